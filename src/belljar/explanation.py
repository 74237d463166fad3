"""What a result says in a sentence or two, for a person or a model: what happened, and why.

The sentences name limits by their value and settings by the name they have in a call and on the
command line. They never claim what the result does not show: a hint says "may".
"""

from __future__ import annotations

import re

from .policy import Policy
from .policy_fields import number_text
from .records import replace
from .types import Limit, Request, Result, Status

_LIMITS: dict[Status, Limit] = {
    Status.TIMEOUT: "timeout",
    Status.OOM: "memory",
    Status.FUEL_EXHAUSTED: "fuel",
}
# Limit -> the policy's field and the verb.
_EXCEEDED = {
    "timeout": ("timeout", "ran longer than"),
    "memory": ("memory", "needed more memory than"),
    "fuel": ("fuel", "used more fuel than"),
    "pids": ("processes", "needed more processes than"),
    "disk": ("disk", "wrote more to disk than"),
    "fds": ("open_files", "opened more files than"),
    "output": ("output", "printed more than"),
}
_NO_NETWORK = re.compile(
    r"name resolution|Non-recoverable error|[Nn]ame or service not known|Could not resolve host"
    r"|getaddrinfo|Network is unreachable|Address family not supported|ENETUNREACH|EAI_AGAIN"
    r"|ENOTFOUND"
)
_SHARED = re.compile(r"/multiprocessing/(?:synchronize|shared_memory)\.py\"")
_ELSEWHERE = re.compile(r"'(/mnt/[^']*|/home/[^']*|/content/[^']*|/workspace/[^']*|/data/[^']*)'")
# How a backend says that the disk is several file systems; see its enforcement report.
_PARTS = re.compile(r"memory file systems of limited size: ([^;]*)")
_TAIL = 4000  # characters of stderr that may hold the reason of a command's failure


def explained(result: Result, policy: Policy, request: Request) -> Result:
    """`result` with `explanation` and `limit_hit` filled in; a success stays as it is."""
    if result.status is Status.SUCCESS:
        return result
    limit = result.limit_hit or _LIMITS.get(result.status)
    result = replace(result, limit_hit=limit)
    sentences = [_what_happened(result, policy), *_hints(result, policy, request)]
    return replace(result, explanation=" ".join(each for each in sentences if each))


def limit_text(policy: Policy, name: str) -> str:
    """A limit as people write it."""
    return number_text(name, getattr(policy.limits, name))


def network_text(policy: Policy) -> str:
    network = policy.network
    return network.mode if network.mode != "hosts" else ", ".join(network.allow)


def signal_text(number: int) -> str:
    """`segmentation fault (signal 11)`"""
    import signal as signals

    try:
        described = signals.strsignal(number)
    except ValueError:
        described = None
    return f"{described.lower()} (signal {number})" if described else f"signal {number}"


def _what_happened(result: Result, policy: Policy) -> str:
    reason = result.kill.reason if result.kill is not None else ""
    if result.status is Status.REFUSED:
        why = result.error.message if result.error is not None else "its policy does not allow it"
        return f"The program was refused and did not run: {why}"
    if reason == "cpu":
        return "The program used up the processor time of its cpus and timeout."
    if result.status is Status.OOM and reason == "ended" and result.error is not None:
        return (
            f"The program ended with MemoryError under a memory limit of "
            f"{limit_text(policy, 'memory')}."
        )
    if result.limit_hit in _EXCEEDED:
        field, verb = _EXCEEDED[result.limit_hit]
        if getattr(policy.limits, field, None) is not None:
            return f"The program {verb} {limit_text(policy, field)}."
    if result.status is Status.KILLED:
        if reason == "cancelled":
            return "The run was cancelled, and the program was ended."
        if reason == "ended":
            return (
                "The program was killed (signal 9) by itself, by another process of its own, or "
                "from outside."
            )
        return "The program was ended from outside."
    if result.signal is not None:
        return f"The program crashed: {signal_text(result.signal)}."
    if result.error is not None:
        from .presentation import one_line  # late: a success needs it not

        # The guest chose both, and a line of its own could look like one of the summary's.
        kind = one_line(result.error.type, 200)
        message = one_line(result.error.message.strip().split("\n")[0], 300)
        return f"The program raised {kind}{': ' if message else ''}{message}."
    return f"The program ended with exit code {result.exit_code}."


def _hints(result: Result, policy: Policy, request: Request) -> list[str]:
    error = result.error
    text = error.message if error is not None else result.stderr[-_TAIL:]
    kind = error.type if error is not None else ""
    hints = []
    if result.limit_hit == "disk" and (disk := result.enforcement.get("disk")) is not None:
        hints += [f"That is divided: {each[1]}." for each in _PARTS.finditer(disk.by)]
    if policy.network.mode == "off" and (kind.endswith("gaierror") or _NO_NETWORK.search(text)):
        hints.append(
            'The policy of this run has no network; allow it with network="any" (--network any).'
        )
    if kind == "ModuleNotFoundError":
        hints.append(_missing_module(result, text))
    if kind == "EOFError" and "reading a line" in text and not request.stdin:
        hints.append("It asked for input, and this run has no stdin; give it with stdin=...")
    if kind in ("FileNotFoundError", "PermissionError", "NotADirectoryError"):
        found = _ELSEWHERE.search(text)
        if found and not any(found[1].startswith(mount.dst) for mount in request.mounts):
            hints.append(
                "Files are read and written in the work directory, which is the current one: use a "
                "relative path, and give input files with files=... or mounts=..."
            )
    if kind == "PermissionError" and error is not None and _SHARED.search(error.traceback):
        hints.append(
            "Processes cannot share memory or semaphores here: use threads, or a backend "
            "with a /dev/shm of its own (jail, subprocess)."
        )
    return hints


def _missing_module(result: Result, text: str) -> str:
    found = re.search(r"'([\w.]+)'", text)
    name = found[1].partition(".")[0] if found else "it"
    if result.backend == "wasm":
        return (
            f"The wasm backend has only the standard library; a backend with the host's packages "
            f"(jail, landlock, subprocess) may have {name}."
        )
    if result.backend in ("docker", "gvisor"):
        return f"The container's image lacks {name}: name one that has it with image=..."
    return (
        f"{name} is not installed for the interpreter that runs the program: `pip install {name}` "
        "there, or give the module's file with files=..."
    )
