"""Reads a Python program before it runs and names the imports its policy does not accept (M11).

This is a lint, never the boundary. It catches honest programs that use more than they should and
the well-known tricks around an import check; a determined author gets past any reading of a
language as dynamic as Python. What holds is the sandbox the program runs in, and `report` says so.

How names are judged, once `Modules.active`:
- a rule covers a module and all below it: "pandas" admits `pandas.io`, "os" denies `os.path`;
- `deny` wins over `allow`, and also denies the modules that do the same under another name
  (`posix` for `os`) or import whatever they are asked to (`runpy`), unless `allow` names them;
- the allow list is exact: nothing is added to it but `__future__`;
- modules that the program ships itself (`own`) are accepted, unless the standard library has one of
  that name, which Python would import instead;
- an import whose name cannot be read from the source is reported, because it could be any name.

The program is parsed by the Python that Belljar itself runs on. What that cannot parse has no
findings: the guest's own interpreter tells the truth about a syntax error. Unless the guest has
another interpreter, which may well understand it: then it is reported as not readable.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib.util import decode_source

from .lint_rules import SYS_TRICKS, TELLING, Rules
from .policy import Modules
from .records import positional_record, replace


@positional_record
class Finding:
    """One thing not accepted. Line and column count from 1; `file` is "" for the program itself."""

    line: int
    column: int
    name: str
    message: str
    file: str = ""


_IMPORT_CALLS = frozenset({"__import__", "import_module"})
_CODE_CALLS = frozenset({"exec", "eval", "compile"})
_BUILTIN_CALLS = _CODE_CALLS | {"__import__"}
_PROGRAM = "<program>"

# Bounds that keep the work in proportion to the program, however it is written.
_MAX_SOURCE = 256 << 10  # the parsed tree takes up to a thousand bytes for each character
_MAX_PARTS = 20  # of a dotted name, and meanings of one name
_MAX_DEPTH = 5  # of programs written inside the strings of programs
_FOLD_DEPTH = 40
_FOLD_SIZE = 10_000
_SHOWN = 20

# The filters of `warnings` exist once in a process, and are put back by whoever changed them: one
# thread of ours at a time, or the second puts back what the first had changed.
WARNING_FILTERS = threading.Lock()


def check(
    code: str, modules: Modules, own: Collection[str] = (), *, foreign: bool = False
) -> list[Finding]:
    """What `modules` does not accept in `code`, in source order. Never raises, whatever the text.

    `own` holds the names, or the file names, of modules that come with the program. `foreign` says
    that another Python than ours will run it.
    """
    if not modules.active:
        return []
    return _check(code, Rules(modules, own), depth=0, foreign=foreign)


def check_files(
    code: str, files: Mapping[str, bytes], modules: Modules, *, foreign: bool = False
) -> list[Finding]:
    """`check` for a program and the Python files that come with it, which may import each other."""
    if not modules.active:
        return []
    sources = {path: decoded(data) for path, data in files.items() if path.endswith(".py")}
    found = check(code, modules, sources, foreign=foreign)
    for path, source in sources.items():
        more = check(source, modules, sources, foreign=foreign)
        found += [replace(item, file=path) for item in more]
    return found


def decoded(source: bytes) -> str:
    """`source` in the encoding it declares, as an import would read it; "" if none could."""
    try:
        return decode_source(source)
    except (SyntaxError, LookupError, ValueError):
        return ""


ALLOW_MORE = "Allow more with "  # begins the last line of a report: the fix, as a call has it


def report(
    findings: Iterable[Finding], modules: Modules | None = None, level: str | None = None
) -> str:
    """The findings for a person to read: a sentence, what is not allowed, and how to allow it.

    `level` is given where `modules` is the level's own list.
    """
    found = list(findings)
    things = "1 thing is" if len(found) == 1 else f"{len(found)} things are"
    lines = [f"The program was not started: {things} not allowed by {_whose(modules, level)}."]
    for item in found[:_SHOWN]:
        where = f"{_quoted(item.file)}, " if item.file else ""
        lines.append(f"  {where}line {item.line}, column {item.column}: {item.message}")
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more")
    names = sorted({item.name for item in found if _is_module(item.name)})[:_SHOWN]
    anything = 'everything with modules="any" (the sandbox isolates the same)'
    if names:
        allowed = modules.allow if modules is not None and modules.allow else ()
        listed = ", ".join(f'"{name}"' for name in dict.fromkeys((*allowed, *names)))
        lines.append(f"{ALLOW_MORE}modules=[{listed}], or {anything}. {_NATURE}")
    else:
        lines.append(f"{ALLOW_MORE}a change of the program, or {anything}. {_NATURE}")
    return "\n".join(lines)


def without_fix(text: str) -> str:
    """A report without its last line, for an edge that has its own words for that."""
    said, _, last = text.rpartition("\n")
    return said if said and last.startswith(ALLOW_MORE) else text


_NATURE = "The check is a lint: it catches mistakes; the boundary is the backend."


def _whose(modules: Modules | None, level: str | None) -> str:
    """The list that refuses, with what it allows or denies."""
    if modules is None or not modules.active:
        return "its module list"
    if modules.allow is None:
        return f"its module list, which denies {_some(modules.deny)}"
    allowed = f"allows only {_some(modules.allow)}" if modules.allow else "allows no import"
    denied = f" and denies {_some(modules.deny)}" if modules.deny else ""
    return (f'level "{level}", which ' if level else "its module list, which ") + allowed + denied


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(_short, sorted(names)[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


Spot = tuple[ast.AST, str, str]  # where, the finding's name, its message


class _Program:
    """One parsed program: what its names stand for, and what in it is not accepted."""

    def __init__(self, tree: ast.Module, rules: Rules, depth: int) -> None:
        self.rules = rules
        self.depth = depth
        self.nodes = list(ast.walk(tree))
        self.called = {id(node.func): node for node in self.nodes if isinstance(node, ast.Call)}
        self.meaning: dict[str, set[str]] = {}
        self._learn_names()

    def _learn_names(self) -> None:
        """Which module or member each name stands for, wherever the program imports it."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._means(alias.asname or whole, whole)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._means(alias.asname or alias.name, f"{node.module}.{alias.name}")
        for node in self.nodes:
            if isinstance(node, ast.Assign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                for full in self.dotted(node.value) if names else ():
                    for name in names:
                        self._means(name, full)

    def _means(self, name: str, full: str) -> None:
        known = self.meaning.setdefault(name, set())
        if len(known) < _MAX_PARTS and full.count(".") < _MAX_PARTS:
            known.add(full)

    def dotted(self, node: ast.expr) -> set[str]:
        """What `node` may stand for: {"sys.modules"} for `s.modules` after `import sys as s`."""
        tail: list[str] = []
        while isinstance(node, ast.Attribute) and len(tail) < _MAX_PARTS:
            tail.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return set()
        return {".".join([head, *reversed(tail)]) for head in self.meaning.get(node.id, ())}

    def spots(self) -> Iterator[Spot]:
        for node in self.nodes:
            match node:
                case ast.Import():
                    for alias in node.names:
                        if self.rules.refuses(alias.name):
                            yield _not_allowed(alias, alias.name)
                case ast.ImportFrom():
                    yield from self._from_import(node)
                case ast.Name():
                    yield from self._name(node)
                case ast.Attribute():
                    yield from self._attribute(node)
                case ast.MatchClass():
                    # `case object(__globals__=x)` reads the attribute as well.
                    yield from (_trick(node, name) for name in node.kwd_attrs if name in TELLING)
                case ast.Constant() | ast.BinOp() | ast.JoinedStr() | ast.Call():
                    # For getattr, attrgetter, vars()[...] and whatever else takes a name as text.
                    text = fold(node)
                    if text is not None and text in TELLING:
                        yield _trick(node, text)

    def _from_import(self, node: ast.ImportFrom) -> Iterator[Spot]:
        if node.level:
            # It stays inside the program's own package; without one, `__package__` is its meaning.
            if not self.rules.own:
                name = "." * node.level + (node.module or "")
                yield node, name, f"the relative import of {name!r} is not inside a package"
            return
        module = node.module or ""
        for alias in node.names:
            full = module if alias.name == "*" else f"{module}.{alias.name}"
            if alias.name in TELLING or full in SYS_TRICKS:
                yield _trick(alias, alias.name if alias.name in TELLING else full)
            elif self.rules.refuses(full):
                yield _not_allowed(alias, module if self.rules.refuses(module) else full)
            elif loose := self.rules.loose(alias.name):
                yield _not_allowed(alias, loose)

    def _name(self, node: ast.Name) -> Iterator[Spot]:
        name = node.id
        if not isinstance(node.ctx, ast.Load):
            if name in TELLING or name == "__name__":
                yield node, name, f"setting {name} changes what an import means"
        elif name in _BUILTIN_CALLS:
            yield from self._powerful(node, name)
        elif name in TELLING and name.startswith("__"):
            yield _trick(node, name)
        else:
            members = {full.rpartition(".")[2] for full in self.meaning.get(name, ())}
            for member in members & _IMPORT_CALLS:
                yield from self._powerful(node, member)

    def _attribute(self, node: ast.Attribute) -> Iterator[Spot]:
        if node.attr in _IMPORT_CALLS:
            yield from self._powerful(node, node.attr)
        elif node.attr in TELLING:
            yield _trick(node, node.attr)
        else:
            loose = self.rules.loose(node.attr)
            for full in self.dotted(node):
                if self.rules.refuses(full.partition(".")[0]):
                    continue  # its import is reported already
                if full in SYS_TRICKS:
                    yield _trick(node, full)
                elif loose or self.rules.derives(full):
                    yield _not_allowed(node, loose or full)

    def _powerful(self, node: ast.expr, name: str) -> Iterator[Spot]:
        """Imports by call, and `exec`, `eval`, `compile`: fine if their argument can be read."""
        call = self.called.get(id(node))
        if call is None:
            yield node, name, f"{name} is passed on, so what it is called with cannot be read"
            return
        text = first_argument(call)
        if text is None:
            yield call, name, f"{name}() is called with something that is not a literal string"
        elif name in _CODE_CALLS:
            for inner in _check(text, self.rules, self.depth + 1):
                yield call, inner.name, f"{inner.message} (in the text given to {name})"
        elif text.startswith("."):
            yield call, name, f"{name}() is called with the relative name {_quoted(text)}"
        elif self.rules.refuses(text):
            yield _not_allowed(call, text)


def fold(node: ast.AST, depth: int = 0) -> str | None:
    """The text of an expression of literals only: "o" + "s", f"{'os'}", "".join(["o", "s"])."""
    if depth > _FOLD_DEPTH:
        return None
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _joined([left, right], "", depth)
        case ast.JoinedStr(values=parts):
            return _joined(parts, "", depth)
        case ast.FormattedValue(value=inner, conversion=-1 | 115, format_spec=None):
            return fold(inner, depth + 1)
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as glue), attr="join"),
            args=[ast.List(elts=parts) | ast.Tuple(elts=parts)],
            keywords=[],
        ) if len(glue) * len(parts) <= _FOLD_SIZE:
            return _joined(parts, glue, depth)
        case ast.Call(
            func=ast.Name(id="chr"), args=[ast.Constant(value=int() as code)], keywords=[]
        ):
            return chr(code) if 0 <= code <= sys.maxunicode else None
    return None


def _joined(parts: Iterable[ast.expr], glue: str, depth: int) -> str | None:
    folded: list[str] = []
    for part in parts:
        text = fold(part, depth + 1)
        if text is None:
            return None
        folded.append(text)
    return glue.join(folded)


def first_argument(call: ast.Call) -> str | None:
    """The text that a call is given first, or as `name` or `source`; None if it cannot be read."""
    if call.args:
        return fold(call.args[0])
    named = [word.value for word in call.keywords if word.arg in ("name", "source")]
    return fold(named[0]) if len(named) == 1 else None


def _check(code: str, rules: Rules, depth: int, *, foreign: bool = False) -> list[Finding]:
    if depth > _MAX_DEPTH:
        return [_unreadable("it holds programs in strings, nested too deeply")]
    try:
        tree = parse(code)
        if tree is None:
            if foreign:
                return [_unreadable("Belljar's own Python, which is another, cannot parse it")]
            return []
        lines = re.split("\r\n|\r|\n", code)
        found = {
            Finding(getattr(node, "lineno", 1), _column(lines, node), _short(name), message)
            for node, name, message in _Program(tree, rules, depth).spots()
        }
    except (RecursionError, MemoryError):
        return [_unreadable("it is nested too deeply or too large to be read")]
    except ValueError as error:
        return [_unreadable(str(error))]
    return sorted(found, key=lambda item: (item.line, item.column, item.name, item.message))


def parse(code: str) -> ast.Module | None:
    """The tree; None for what is no Python to us. ValueError for what is not worth parsing."""
    if "\0" in code:
        raise ValueError("it holds null bytes")
    if len(code) > _MAX_SOURCE:
        raise ValueError(f"it is longer than {_MAX_SOURCE} characters")
    with WARNING_FILTERS, warnings.catch_warnings():
        # The guest shows the program's warnings; raised as errors here they would hide it from us.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(code)
        except SyntaxError:
            return None


def _column(lines: list[str], node: ast.AST) -> int:
    """Where `node` starts, in characters from 1; the parser counts bytes of UTF-8 from 0."""
    number, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    line = lines[number - 1] if number <= len(lines) else ""
    # A very long line is not worth the time it takes to count it again for every finding.
    if line.isascii() or len(line) > _FOLD_SIZE:
        return int(offset) + 1
    return len(line.encode()[:offset].decode("utf-8", "ignore")) + 1


def _not_allowed(node: ast.AST, module: str) -> Spot:
    return node, module, f"module {_quoted(module)} is not allowed"


def _trick(node: ast.AST, name: str) -> Spot:
    return node, name, f"{name} reaches modules without importing them"


def _unreadable(why: str) -> Finding:
    return Finding(1, 1, _PROGRAM, f"the program cannot be checked: {why}")


def _is_module(name: str) -> bool:
    tricks = TELLING | SYS_TRICKS | _BUILTIN_CALLS | {"import_module"}
    return name not in tricks and all(part.isidentifier() for part in name.split("."))


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _quoted(text: str) -> str:
    return ascii(_short(text))
