// What a program finds besides the language itself, and how its result becomes frames.
// Runs once, when the snapshot is made; `host` and what this returns are never visible to programs.
(host) => {
  "use strict";
  const { stringify, parse } = JSON;
  const VALUE = 0x82, ERROR = 0x83, DISPLAY = 0x84, DROPPED = 0x88;
  const MAX_TEXT = 8192, MAX_DEPTH = 60, NODE = 64;
  // What the host keeps of a value; a request may say less. See guest/protocol.py.
  let budget = 64 * 1048576;

  const clean = (text) => String(text).toWellFormed();
  const show = (value, depth = 0) => {
    if (typeof value === "string") return depth ? stringify(value) : value;
    if (typeof value === "bigint") return `${value}n`;
    if (typeof value === "function") return `[Function: ${value.name || "(anonymous)"}]`;
    if (value === null || typeof value !== "object") return String(value);
    if (value instanceof Error) return describe(value);
    if (depth > 3) return Array.isArray(value) ? "[Array]" : "[Object]";
    const next = (item) => show(item, depth + 1);
    if (Array.isArray(value)) return value.length ? `[ ${value.slice(0, 100).map(next).join(", ")} ]` : "[]";
    if (value instanceof Date) return isNaN(value) ? "Invalid Date" : value.toISOString();
    if (value instanceof RegExp) return String(value);
    if (value instanceof Promise) return "Promise {}";
    if (value instanceof Map) return `Map(${value.size}) { ${[...value].map(([k, v]) => `${next(k)} => ${next(v)}`).join(", ")} }`;
    if (value instanceof Set) return `Set(${value.size}) { ${[...value].map(next).join(", ")} }`;
    if (ArrayBuffer.isView(value)) return `${value.constructor.name}(${value.length}) [ ${[...value].slice(0, 100).join(", ")} ]`;
    const name = value.constructor && value.constructor !== Object ? `${value.constructor.name} ` : "";
    const parts = Object.entries(value).map(([key, item]) => `${/^[\w$]+$/.test(key) ? key : stringify(key)}: ${next(item)}`);
    return parts.length ? `${name}{ ${parts.join(", ")} }` : `${name}{}`;
  };
  const describe = (error) => {
    const stack = clean(error.stack || "").trimEnd();
    return `${clean(error)}${stack ? `\n${stack}` : ""}`;
  };

  const format = (args) => {
    const rest = [...args];
    let text = "";
    if (typeof rest[0] === "string" && rest.length > 1 && /%[sdifoOj%]/.test(rest[0])) {
      text = rest.shift().replace(/%([sdifoOj%])/g, (whole, kind) => {
        if (kind === "%") return "%";
        if (!rest.length) return whole;
        const item = rest.shift();
        if (kind === "d" || kind === "i" || kind === "f") return kind === "i" ? String(parseInt(item)) : String(Number(item));
        return kind === "j" ? stringify(item) : show(item);
      });
      if (rest.length) text += " ";
    }
    return text + rest.map((item) => show(item)).join(" ");
  };
  const printer = (stream) => (...args) => { host.write(stream, `${clean(format(args))}\n`); };
  const out = printer(1), err = printer(2);
  const define = (name, value) =>
    Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false });
  define("console", { log: out, info: out, debug: out, warn: err, error: err, trace: err, assert: (held, ...args) => { if (!held) err("Assertion failed", ...args); } });
  define("print", out);

  // Timers: the host sleeps, we say until when.
  let timers = [], last = 0;
  const later = (call, wait, every, args) => {
    const id = ++last;
    timers.push({ id, at: Date.now() + Math.max(0, Number(wait) || 0), every: every ? Math.max(1, Number(wait) || 1) : 0, call, args });
    return id;
  };
  const forget = (id) => { timers = timers.filter((timer) => timer.id !== id); };
  define("setTimeout", (call, wait, ...args) => later(call, wait, false, args));
  define("setInterval", (call, wait, ...args) => later(call, wait, true, args));
  define("clearTimeout", forget);
  define("clearInterval", forget);
  define("queueMicrotask", (call) => { Promise.resolve().then(call); });
  const wait = () => (timers.length ? Math.max(0, Math.min(...timers.map((timer) => timer.at)) - Date.now()) : -1);
  const fire = () => {
    const due = timers.reduce((a, b) => (b.at < a.at ? b : a));
    if (due.every) due.at += due.every; else forget(due.id);
    due.call(...due.args);
  };

  // Math.random was seeded when the snapshot was made: seed one of our own in every run.
  // Marsaglia's xorshift128: shifts of small integers only, so that a number costs equal fuel
  // whatever it is.
  let seeded = false, x, y, z, w;
  const next = () => {
    const t = x ^ (x << 11);
    x = y; y = z; z = w;
    return (w = w ^ (w >>> 19) ^ t ^ (t >>> 8));
  };
  Math.random = function random() {
    if (!seeded) {
      seeded = true;
      x = host.random() | 1; y = host.random() | 0; z = host.random() | 0; w = host.random() | 0;
    }
    return (next() >>> 5) / 134217728 + (next() >>> 6) / 9007199254740992;
  };

  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const read = (wire) => {
    if (Array.isArray(wire)) return wire.map(read);
    if (wire === null || typeof wire !== "object") return wire;
    if (!("$" in wire)) return Object.fromEntries(Object.entries(wire).map(([key, item]) => [key, read(item)]));
    const value = wire.v;
    switch (wire.$) {
      case "float": return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value];
      case "int": return value.startsWith("-") ? -BigInt(value.slice(1)) : BigInt(value);
      case "bytes": case "bytearray": return bytes(value);
      case "tuple": return value.map(read);
      case "set": case "frozenset": return new Set(value.map(read));
      case "dict": return new Map(value.map((pair) => pair.map(read)));
      case "date": case "datetime": return new Date(/T/.test(value) && !/(Z|[+-]\d\d:\d\d)$/.test(value) ? `${value}Z` : value);
      case "decimal": case "uuid": return value;
    }
    throw new TypeError(`a ${wire.$} has no form in JavaScript`);
  };

  const tagged = (tag, value) => `{"$":"${tag}","v":${value}}`;
  const write = (value, depth, count) => {
    if (depth > MAX_DEPTH) throw new TypeError("it is nested too deeply");
    count.size += NODE + (typeof value === "string" ? value.length : 0);
    if (count.size > budget) throw new RangeError("it is too large");
    const inner = (item) => write(item, depth + 1, count);
    switch (typeof value) {
      case "boolean": return String(value);
      case "string": return stringify(value.toWellFormed());
      case "bigint": return String(value).length < 300 ? String(value) : tagged("int", stringify((value < 0n ? "-0x" : "0x") + (value < 0n ? -value : value).toString(16)));
      case "number":
        if (Number.isFinite(value)) return Object.is(value, -0) ? "-0.0" : String(value).includes("e") ? value.toExponential() : String(value);
        return tagged("float", stringify(Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf"));
      case "undefined": return "null";
      case "object": break;
      default: throw new TypeError(`a ${typeof value} cannot cross`);
    }
    if (value === null) return "null";
    if (Array.isArray(value)) return `[${Array.from(value, inner).join(",")}]`;
    if (value instanceof Date) {
      const [, whole, part] = /^(\d{4}-.*)\.(\d{3})Z$/.exec(value.toISOString());
      return tagged("datetime", stringify(`${whole}${part === "000" ? "" : `.${part}000`}+00:00`));
    }
    if (value instanceof Set) return `[${[...value].map(inner).join(",")}]`;
    if (value instanceof Map) return tagged("dict", `[${[...value].map(([k, v]) => `[${inner(k)},${inner(v)}]`).join(",")}]`);
    if (value instanceof Uint8Array) return tagged("bytes", stringify(btoa(Array.from(value, (n) => String.fromCharCode(n)).join(""))));
    if (ArrayBuffer.isView(value)) return `[${Array.from(value, inner).join(",")}]`;
    const pairs = Object.entries(value);
    if (pairs.some(([key]) => key === "$")) return tagged("dict", `[${pairs.map(([k, v]) => `[${inner(k)},${inner(v)}]`).join(",")}]`);
    return `{${pairs.map(([key, item]) => `${stringify(key.toWellFormed())}:${inner(item)}`).join(",")}}`;
  };

  const begin = (request) => {
    const fields = parse(request);
    if (fields.budget) budget = fields.budget.value;
    define("scriptArgs", ["main.js", ...fields.args]);
    define("env", fields.env);
    define("stdin", fields.stdin);
    for (const [name, wire] of Object.entries(fields.context)) define(name, read(wire));
  };
  const notice = (value, problem) => {
    const text = typeof value === "string", array = Array.isArray(value) || ArrayBuffer.isView(value);
    const count = text || array ? value.length : value instanceof Map || value instanceof Set ? value.size : 0;
    const name = typeof value === "object" && value.constructor ? value.constructor.name : typeof value;
    const why = problem instanceof Error ? problem.message : problem;
    return {
      what: "value", type: clean(name).slice(0, 100), count: Number.isInteger(count) ? count : 0,
      unit: count ? (text ? "characters" : "items") : "", field: problem instanceof RangeError ? "value" : "",
      why: clean(why).slice(0, 200),
    };
  };
  const succeed = (value) => {
    if (value === undefined || value === null) value = globalThis.result;
    if (value !== undefined && value !== null) {
      try {
        host.frame(VALUE, write(value, 0, { size: 0 }));
      } catch (problem) {
        host.frame(DROPPED, stringify(notice(value, problem)));
        host.frame(DISPLAY, stringify({ "text/plain": clean(show(value)).slice(0, MAX_TEXT) }));
      }
    }
  };
  const fail = (error) => {
    const real = error instanceof Error;
    const message = clean(real ? error.message : show(error)).slice(0, MAX_TEXT);
    const text = real ? describe(error) : `Uncaught ${message}`;
    const memory = real && error.name === "InternalError" && message === "out of memory";
    const type = clean(real ? error.name : "Error").slice(0, 200);
    host.frame(ERROR, stringify({ type, message, traceback: text.slice(0, 8 * MAX_TEXT), ...(memory ? { memory } : {}) }));
    host.write(2, `${real ? "Uncaught " : ""}${text}\n`);
  };
  return { begin, succeed, fail, wait, fire };
}
