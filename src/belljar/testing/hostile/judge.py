"""The verdict rules: from what a run showed to held or breached. Pure.

The case file's header is the law; this is its reading:
- every output line that starts with `R:` must start with one of the case's `verdict_any`;
- where `verdict_any` is given, at least one line must match it: a run that was refused, or ended
  before it said anything, did not test the case, and so did not hold it;
- the status must be one of `status_in`, the wall time within `max_wall_s`;
- an outcome `reached` (gvisor, vm) also allows `R:REACHED` lines; `inner` also allows `R:BREACH`
  lines, because they act on the sandbox's own kernel: there the host's invariants decide;
- an outcome `limited` is "stopped by a limit with a truthful status": a program that a limit ended,
  with a status that `status_in` names, could not say anything any more, and need not have;
- an outcome `na` (wasm) lets the program end with an error instead of a verdict; so does
  `landlock` where what the program needs to begin is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...types import Status
from .cases import Case
from .scene import Failure
from .subject import Seen, refused

# What the class `process` answers for, in the words of the case file's header. The others answer
# for every group; `inproc` for none, `landlock` for what a jail does but for the cases below.
PROCESS_CLAIMS = frozenset(
    {
        "cpu-time", "memory", "output", "process", "protocol", "result-values", "result-files",
        "secrets", "fd-exhaustion",
    }
)  # fmt: skip
# What `landlock` does not answer for, though a jail does, and what it lacks for it.
LANDLOCK_LACKS = {
    "fs-012-protected-project-paths": "mounts: a writable directory is writable everywhere",
    "fs-013-create-missing-protected": "mounts: a writable directory is writable everywhere",
    "fs-026-git-new-names": "mounts: a project is not protected, nor tidied at the end",
    "fs-027-git-new-submodule": "mounts: a project is not protected, nor tidied at the end",
    "fs-028-git-bare-at-the-top": "mounts: a project is not protected, nor tidied at the end",
    "se-007-host-identity": "a uts namespace: uname tells the host's name",
}
# Programs that cannot even begin there, without AF_UNIX, local sockets and /proc.
_LANDLOCK_ABSENT = frozenset(
    {
        "ip-004-abstract-unix-w", "ke-036-suid-binaries", "ne-014-bind-listen",
        "ne-024-port-scan-loopback", "ps-016-host-pids-visible", "ps-017-status-hardening",
    }
)  # fmt: skip
_STOPPED = (Status.OOM, Status.LIMIT, Status.TIMEOUT, Status.KILLED)
_STRONG = ("jail", "container", "gvisor", "vm", "wasm")


class Verdict(StrEnum):
    """The five answers that a scorecard counts."""

    HELD = "held"
    BREACHED = "breached"
    NOT_CLAIMED = "not claimed"
    PENDING = "pending"
    ERROR = "error"


def claimed(case: Case, klass: str) -> bool:
    """Whether a backend of this class promises to hold this case."""
    if "any" in case.expect.classes:
        return True  # about a server or this harness: it binds whatever runs behind it
    if klass == "process":
        return case.group in PROCESS_CLAIMS
    if klass == "landlock":
        return "jail" in case.expect.classes and case.id not in LANDLOCK_LACKS
    return klass in _STRONG and klass in case.expect.classes


@dataclass(frozen=True)
class Allowance:
    """What a class may show without having breached the case."""

    verdicts: tuple[str, ...]
    breach_lines: bool
    silent_statuses: tuple[Status, ...]


def allowance(case: Case, klass: str) -> Allowance:
    """The class rules of the header, for one case."""
    # These have no outcomes of their own: where they claim a case, it is a jail's.
    like_a_jail = klass in ("process", "landlock")
    word = case.expect.classes.get("jail" if like_a_jail else klass, "held")
    outcome = word.split("|")
    verdicts = case.expect.verdict_any
    inner = "inner" in outcome
    if verdicts and klass in ("gvisor", "vm", "container"):
        verdicts += ("R:REACHED",) if "reached" in outcome else ()
        verdicts += ("R:BREACH", "R:REACHED") if inner else ()
    return Allowance(
        verdicts=verdicts,
        # A case that lists R:BREACH among its verdicts calls it information, not a breach.
        breach_lines=inner or "R:BREACH" in case.expect.verdict_any,
        silent_statuses=(
            *((Status.ERROR,) if klass == "wasm" and "na" in outcome else ()),
            *((Status.ERROR,) if klass == "landlock" and case.id in _LANDLOCK_ABSENT else ()),
            *(s for s in _STOPPED if "limited" in outcome and s.value in case.expect.status_in),
        ),
    )


def is_absent(case: Case, klass: str, seen: Seen) -> bool:
    """Whether the program met an interface that its class does not have, and ended of that."""
    status = seen.result.status if seen.result is not None else None
    return status is Status.ERROR and status in allowance(case, klass).silent_statuses


def program_failures(case: Case, klass: str, seen: Seen, max_wall: float | None) -> list[Failure]:
    """What the run itself showed against the expectation, before any look at the host."""
    if seen.result is None:
        kind = "refused" if refused(seen) else "failed"
        return [Failure("run", f"the run {kind}: {seen.failure}")]
    if refused(seen):
        return [Failure("run", "the program was refused, so nothing was tested")]
    allowed = allowance(case, klass)
    failures = list(_verdict_failures(allowed, seen))
    status = seen.result.status
    expected = case.expect.status_in
    if expected and status.value not in expected and status not in allowed.silent_statuses:
        failures.append(Failure("status_in", f"{status.value}, not {' or '.join(expected)}"))
    if max_wall is not None and seen.wall > max_wall:
        why = f"it took {seen.wall:.1f} s, not at most {max_wall:g} s"
        failures.append(Failure("max_wall_s", why, noisy=not seen.stopped))
    return failures


def _verdict_failures(allowed: Allowance, seen: Seen) -> list[Failure]:
    if not allowed.verdicts:
        return []
    assert seen.result is not None
    lines = [line.strip() for line in seen.result.stdout.splitlines()]
    wrong = [
        line for line in lines if line.startswith("R:") and not line.startswith(allowed.verdicts)
    ]
    if wrong:
        return [Failure("verdict", wrong[0][:120])]
    said = any(line.startswith(allowed.verdicts) for line in lines)
    if not said and seen.result.status not in allowed.silent_statuses:
        ending = seen.result.error.message if seen.result.error else seen.result.status.value
        return [Failure("verdict", f"the program gave no verdict ({ending[:80]})")]
    return []


def breach_lines(seen: Seen) -> list[str]:
    """Every line, on either stream, in which the guest says that a forbidden thing worked."""
    if seen.result is None:
        return []
    text = seen.result.stdout + "\n" + seen.result.stderr
    return [line.strip() for line in text.splitlines() if "R:BREACH" in line]
