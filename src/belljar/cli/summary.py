"""A run as a person reads it: the frame before, the line after, and which limit was hit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ..backends.base import Plan
from ..explanation import limit_text, network_text, signal_text
from ..policy import Ceiling, Limits, Policy
from ..presentation import value_text
from ..records import names
from ..types import Enforcement, Result, Status
from ..units import human_size
from . import terminal
from .terminal import paint, visible

# limit_hit -> the policy field behind it.
_FIELDS = {
    "timeout": "timeout",
    "memory": "memory",
    "fuel": "fuel",
    "pids": "processes",
    "disk": "disk",
    "fds": "open_files",
    "output": "output",
}


def frame(plan: Plan) -> None:
    """The summary before a run: where it runs and what it may use."""
    policy = plan.policy
    limits = " · ".join(
        f"{label} {limit_text(policy, name)}"
        for label, name in (
            ("time", "timeout"),
            ("memory", "memory"),
            ("cpus", "cpus"),
            ("processes", "processes"),
            ("disk", "disk"),
        )
    )
    corners = ("╭─", "│ ", "╰─") if terminal.speaks_unicode(sys.stderr) else ("+-", "| ", "+-")
    lines = (
        f"belljar · {plan.backend} · isolation {plan.isolation.value} · level {policy.level}",
        limits,
        f"network {network_text(policy)}",
    )
    for corner, line in zip(corners, lines, strict=True):
        terminal.say(paint(f"{corner} {_plain(visible(line))}", "dim"))


def completion(result: Result, *, whole: bool) -> None:
    """The line after a run: how it ended and what it cost. `whole`: all of its output was shown."""
    usage = result.usage
    parts = [result.status.value, f"{usage.wall:.2f} s"]
    if usage.cpu is not None:
        parts.append(f"cpu {usage.cpu:.2f} s")
    if usage.peak_memory is not None:
        parts.append(f"memory peak {human_size(usage.peak_memory)}")
    if result.signal is not None:
        parts.append(signal_text(result.signal))
    elif result.exit_code is not None:
        parts.append(f"exit {result.exit_code}")
    if result.truncated and not whole:
        parts.append("output truncated")
    if result.displays:
        parts.append(f"{len(result.displays)} displays, see --json")
    dashes = "──" if terminal.speaks_unicode(sys.stderr) else "--"
    colour = "green" if result.success else "red"
    terminal.say(paint(f"{dashes} {_plain(visible(' · '.join(parts)))}", colour))
    if result.value is not None:
        terminal.say(f"   value: {visible(_shortened(value_text(result.value)))}")


def trouble(
    result: Result, policy: Policy | None, ceiling: Ceiling, *, cancelled: bool = False
) -> None:
    """What went wrong and how to go on, for every end but success and the program's own failure."""
    field = _FIELDS.get(result.limit_hit or "")
    if cancelled:
        terminal.complain("cancelled; the program was ended")
    elif result.kill is not None and result.kill.reason == "cpu":
        terminal.complain(f"timeout: {_told(result)}", "allow more with --cpus or --timeout")
    elif field is not None:
        raised = _raised(result, policy, field)
        fix = f"allow more with {' '.join(_flag(each, policy) for each in raised)}"
        if policy is not None:
            for each in raised:
                if getattr(policy.limits, each) == getattr(ceiling, each):
                    fix = f"only the operator can allow more: ceiling.{each} in `belljar settings`"
        terminal.complain(f"{result.limit_hit}: {_told(result)}", fix)
    elif result.status is Status.REFUSED:
        from .. import lint  # late: most runs are not refused, and it imports a parser

        why = result.error.message if result.error else "the program was refused before it ran"
        terminal.complain(f"refused: {lint.without_fix(why)}", lint_fix(policy))
    elif result.status is Status.KILLED or result.signal is not None or _hinted(result):
        name = "killed" if result.status is Status.KILLED else "error"
        terminal.complain(f"{name}: {_told(result)}")


def _told(result: Result) -> str:
    """The result's explanation, as the end of a sentence."""
    text = result.explanation
    return text[:1].lower() + text[1:].removesuffix(".")


def _hinted(result: Result) -> bool:
    """Whether the explanation says more than the program has printed itself."""
    return result.error is not None and ". " in result.explanation


def lint_fix(policy: Policy | None) -> str:
    """How to let more imports through, as flags."""
    allowed = () if policy is None or policy.modules.allow is None else policy.modules.allow
    more = ",".join((*sorted(allowed), "NAME"))
    return f"allow more with --modules {more}, or everything with --modules any"


def modules_text(policy: Policy) -> str:
    modules = policy.modules
    allowed = "any" if modules.allow is None else ", ".join(sorted(modules.allow)) or "none"
    denied = f" but {', '.join(modules.deny)}" if modules.deny else ""
    return f"{allowed}{denied}"


def explain(plan: Plan) -> str:
    """The backend, the policy and what enforces it, as text."""
    policy = plan.policy
    rows = [
        ("backend", f"{plan.backend} (isolation {plan.isolation.value})"),
        ("level", f"{policy.level} (isolation at least {policy.min_isolation.value})"),
    ]
    rows += [(name, limit_text(policy, name)) for name in names(Limits) if name != "fuel"]
    if policy.limits.fuel is not None:
        rows.append(("fuel", limit_text(policy, "fuel")))
    rows.append(("network", network_text(policy)))
    files = policy.filesystem
    for name in ("read_only", "read_write", "hidden"):
        if paths := getattr(files, name):
            rows.append((name, ", ".join(paths)))
    for mount in plan.request.mounts:
        bare = "" if mount.protect else ", unprotected"
        rows.append(("mount", f"{mount.src} at {mount.dst} ({mount.mode}{bare})"))
    rows.append(("modules", modules_text(policy)))
    text = visible(table(rows)) + "\n\n" + enforcement_table(plan.enforcement)
    from .. import lint

    warnings = []
    for warning in plan.warnings:
        said = lint.without_fix(warning)
        warnings.append(warning if said == warning else f"{said}\nfix: {lint_fix(policy)}")
    return text + "".join(f"\nwarning: {visible(warning)}" for warning in warnings)


def enforcement_table(report: Mapping[str, Enforcement]) -> str:
    """One line a policy field: whether it is held, and by what."""
    rows = [(name, held.state, held.by) for name, held in report.items()]
    return visible(table([("field", "state", "held by"), *rows]))


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as they need to be, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _raised(result: Result, policy: Policy | None, field: str) -> tuple[str, ...]:
    """The limits to raise. A disk in memory needs the memory to hold it, and follows it unless it
    was asked for."""
    disk = result.enforcement.get("disk")
    if field != "disk" or policy is None or disk is None or "memory file system" not in disk.by:
        return (field,)
    if "disk" not in policy.explicit:
        return ("memory",)
    return ("disk", "memory") if 2 * policy.limits.disk > policy.limits.memory else ("disk",)


def _flag(field: str, policy: Policy | None) -> str:
    more = f" {_more(policy, field)}" if policy is not None else ""
    return f"--{field.replace('_', '-')}{more}"


def _more(policy: Policy, name: str) -> str:
    doubled = 2 * getattr(policy.limits, name)
    match name:
        case "memory" | "disk" | "output" | "value" | "displays":
            return human_size(doubled).replace(" ", "").replace("iB", "")
        case "timeout":
            return f"{doubled:g}s"
    return str(doubled) if isinstance(doubled, int) else f"{doubled:g}"


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(text: str) -> str:
    return text if terminal.speaks_unicode(sys.stderr) else text.replace("·", "-")
