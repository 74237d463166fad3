"""The control arms: every safe case without a sandbox, to prove that its detector can fire.

They run as a user that nobody is, so that the worst of them reaches only what is ours: the canaries
belong to that user, everything it started is ended by its uid, and rlimits bound the rest. A few
cases fire only with rights, or with something planted: see `arms`.
"""

from __future__ import annotations

import base64
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...types import File, GuestError, Result, Status, Usage
from . import snapshot, trusting
from .arms import ARMS, Arm
from .cases import Case, CasesInvalid, Suite
from .judge import Verdict
from .private import remove
from .runner import Runner, units
from .subject import Job, Seen, on_terminal
from .world import World

ENOUGH = 0.95
# A program that still runs this long after its time was up has shown that nothing limits it.
_GRACE = 2.5
_LONGEST = 4.0
# What is meant to be left behind need not be waited for as long as what is not.
_TRIES = 3  # memory is sampled: what lives for a moment only may be missed once
_PATIENCE = 1.5
_TIMEOUT = 2
_SCRIPT = Path(__file__).with_name("trusting.py")
_RLIMITS = {
    "RLIMIT_AS": 4 << 30, "RLIMIT_NPROC": 400, "RLIMIT_NOFILE": 2048, "RLIMIT_CPU": 120,
}  # fmt: skip
_OWN_NAMESPACES = (
    "unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc",
    "--kill-child",
)  # fmt: skip
# Kills as the throw-away user, or not at all.
_END_ALL = """
import os
assert os.getresuid() == ({uid},) * 3
assert "CapEff:\t0000000000000000" in open("/proc/self/status").read()
os.kill(-1, 9)
"""
_INTERPRETERS = {"javascript": "node", "bash": "bash"}


@dataclass(frozen=True, kw_only=True)
class Fired:
    """Whether the detector of one case fired without a sandbox, and on what."""

    case: Case
    fired: bool
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.case.id, "fired": self.fired, "reasons": list(self.reasons)}


@dataclass(frozen=True, kw_only=True)
class Controls:
    """All control arms of a suite run."""

    arms: tuple[Fired, ...]

    @property
    def silent(self) -> tuple[Fired, ...]:
        return tuple(arm for arm in self.arms if not arm.fired)

    @property
    def ratio(self) -> float:
        return 1 - len(self.silent) / len(self.arms) if self.arms else 0.0

    @property
    def enough(self) -> bool:
        return self.ratio >= ENOUGH

    def to_dict(self) -> dict[str, Any]:
        return {
            "fired": len(self.arms) - len(self.silent),
            "of": len(self.arms),
            "silent": [arm.case.id for arm in self.silent],
            "arms": [arm.to_dict() for arm in self.arms],
        }


def possible() -> str | None:
    """Why control arms cannot run here, or None."""
    if sys.platform != "linux":
        return "control arms need Linux"
    if os.geteuid() != 0:
        return "control arms run as a throw-away user, and only root can become one"
    return None


def run_controls(
    suite: Suite,
    cases: Iterable[Case],
    *,
    klass: str = "process",
    on_case: Callable[[Case], None] = lambda case: None,
) -> Controls:
    """Every `safe` case of `cases` without a sandbox."""
    if problem := possible():
        raise CasesInvalid(problem, fix="run as root, or leave --controls out")
    uid = free_uid()
    python = interpreter_for(uid)
    suite = replace(suite, limits={**suite.limits, "TIMEOUT_S": _TIMEOUT})
    arms: list[Fired] = []
    with World(suite, owner=uid, python=python) as world:
        subject = ControlSubject(world, uid, python, klass)
        runner = Runner(suite, subject, world, klass=klass, attempts=1, patience=_PATIENCE)
        runner.warm_up()
        for unit in units(case for case in cases if case.control == "safe"):
            on_case(unit[0])
            for _ in range(_TRIES):
                tried = _try_out(unit, subject, runner)
                if all(arm.fired for arm in tried):
                    break
            arms += tried
    return Controls(arms=tuple(arms))


def _try_out(unit: tuple[Case, ...], subject: ControlSubject, runner: Runner) -> list[Fired]:
    subject.begin(ARMS.get(unit[0].id, Arm()))
    arms: list[Fired] = []
    for outcome in runner.judge(unit):
        # A slow machine is not what a detector was built for.
        reasons = tuple(r for r in outcome.reasons if not r.startswith("next_run_ok"))
        seen = outcome.saw or outcome.verdict
        fired = seen is Verdict.BREACHED and bool(reasons)
        # What a class may show is still something that the probe has found.
        found = tuple(f"probe: {line}" for line in subject.found if not fired)
        arms.append(
            Fired(
                case=outcome.case,
                fired=fired or (bool(found) and seen is Verdict.HELD),
                reasons=reasons + found[:1],
            )
        )
    return arms


def free_uid() -> int:
    """A user id without a name and without a process."""
    for uid in range(64_999, 64_000, -1):
        try:
            pwd.getpwuid(uid)
        except KeyError:
            if not snapshot.processes_of(uid):
                return uid
    raise CasesInvalid("no user id between 64000 and 65000 is free for the control arms")


def interpreter_for(uid: int) -> str:
    """A Python that this user may execute: ours may live below somebody's private home."""
    candidates = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")
    for path in candidates:
        try:
            tried = subprocess.run([path, "-I", "-c", ""], **_as_user(uid), capture_output=True)
        except OSError:
            continue
        if tried.returncode == 0:
            return path
    raise CasesInvalid("no Python here can be run by an unprivileged user", fix="install python3")


def _as_user(uid: int) -> dict[str, Any]:
    return {"user": uid, "group": uid, "extra_groups": [], "cwd": "/"}


class ControlSubject:
    """The subject without a sandbox. `found` are the probes that reached something."""

    name = "control"

    def __init__(self, world: World, uid: int, python: str, klass: str) -> None:
        self.klass = klass
        self.arm = Arm()
        self.found: list[str] = []
        self._world, self._uid, self._python = world, uid, python
        self._going: list[subprocess.Popen[bytes]] = []
        self._home = world.root / "control"
        self._home.mkdir()
        os.chown(self._home, uid, uid)
        self._script = world.root / "trusting.py"
        shutil.copyfile(_SCRIPT, self._script)
        self._script.chmod(0o644)

    def begin(self, arm: Arm) -> None:
        """Another case, unsandboxed in this way."""
        self.arm = arm
        self.found = []

    def run(self, job: Job) -> Seen:
        slot = Path(tempfile.mkdtemp(prefix="belljar-control-"))
        work = slot / "work"
        work.mkdir()
        program = work / {"javascript": "main.js", "bash": "main.sh"}.get(job.language, "main.py")
        self._fill(work, program, job)
        for path in (slot, work, *work.rglob("*")):
            os.chown(path, self._uid, self._uid, follow_symlinks=False)
        reply = self._home / f"{slot.name}.reply"
        told = self._home / f"{slot.name}.job"
        told.write_text(json.dumps(self._message(job, work, program, reply)))
        start = time.monotonic()
        with _Listener(self._home / "session", job.on_output):
            self._host(told, job)
        wall = time.monotonic() - start
        if slot.exists() and not os.listdir(slot):
            slot.rmdir()
        try:
            answer = json.loads(reply.read_text())
        except FileNotFoundError:
            return Seen(wall=wall, failure="untyped: the trusting host is gone", stopped=True)
        lines = answer.get("stdout", "").splitlines()
        self.found += [line for line in lines if line.startswith(("R:BREACH", "R:REACHED"))]
        return _seen(answer, wall)

    def _fill(self, work: Path, program: Path, job: Job) -> None:
        program.write_text(self.arm.prelude + job.code)
        for name, data in job.files.items():
            path = work / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        for mount in job.mounts:
            (work / mount.dst).symlink_to(mount.src)

    def _message(self, job: Job, work: Path, program: Path, reply: Path) -> dict[str, Any]:
        if job.language == "python":
            argv = [self._python, "-I", str(self._wrapper()), str(program)]
        else:
            argv = [_INTERPRETERS[job.language], str(program)]
        return {
            "work": str(work),
            "program": str(program),
            "reply": str(reply),
            "session": str(self._home / "session"),
            "argv": argv,
            "language": job.language,
            "stdin": job.stdin.decode("latin-1"),
            "writable": [mount.dst for mount in job.mounts if mount.mode == "rw"],
            "next_cell": "".join(_next_cells(job.code)),
            "outputs": list(job.outputs),
            "stop": min(job.timeout, _LONGEST) + _GRACE,
            "inprocess": self.arm.inprocess,
            "rlimits": {**_RLIMITS, "RLIMIT_FSIZE": self.arm.file_size},
        }

    def _wrapper(self) -> Path:
        path = self._world.root / "wrapper.py"
        path.write_text(trusting.WRAPPER)
        path.chmod(0o644)
        return path

    def _host(self, told: Path, job: Job) -> None:
        """Start the trusting host and wait for it; what it leaves running stays, to be counted."""
        words = [self._python, "-I", str(self._script), str(told)]
        how: dict[str, Any] = _as_user(self._uid)
        if self.arm.planted:
            words, how = _with_planted(self.arm.planted, self._uid, words), {}
        elif self.arm.privileged:
            words, how = [*_OWN_NAMESPACES, *words], {}
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=self._world.server_environment,
            **how,
        )
        self._going.append(process)
        try:
            process.wait(job.timeout + _GRACE + 40)
        except subprocess.TimeoutExpired:
            return
        finally:
            process.kill()
            process.wait()
            self._going.remove(process)

    def terminal(self, job: Job) -> bytes:
        program = self._world.root / "shown.py"
        program.write_text(job.code)
        program.chmod(0o644)
        words = [self._python, "-I", str(program)]
        return on_terminal(words, timeout=job.timeout + _GRACE, **_as_user(self._uid))

    def cancel(self) -> None:
        for process in tuple(self._going):
            process.kill()
        self._end_all()

    def clean(self) -> None:
        """End everything that runs as the throw-away user, and remove what it left in memory."""
        self._end_all()
        for place in (Path("/dev/shm"), Path("/tmp")):
            for path in place.iterdir():
                if _owner(path) == self._uid:
                    path.unlink() if not path.is_dir() else remove(path)
        for path in self._world.temporary.iterdir():
            remove(path)

    def _end_all(self) -> None:
        subprocess.run(
            [self._python, "-I", "-c", _END_ALL.format(uid=self._uid)],
            **_as_user(self._uid),
            stderr=subprocess.DEVNULL,
            check=False,
        )


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # somebody else's, and gone
        return None


def _next_cells(code: str) -> Iterable[str]:
    """The text that the case looks for on its input, as if its session had queued it there."""
    marker = "NEXT-CELL-"
    if marker in code:
        yield marker + code.split(marker, 1)[1].split("'", 1)[0]


def _with_planted(path: str, uid: int, words: list[str]) -> list[str]:
    """The command in a mount namespace of its own in which `path` exists."""
    script = f'mount -t tmpfs tmpfs {os.path.dirname(path)} && mkdir {path} && exec "$@"'
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return ["unshare", "--mount", "sh", "-c", script, "sh", *drop, *words]


class _Listener:
    """Hands on what the session says while it says it."""

    def __init__(self, path: Path, on_output: Callable[[bytes], None] | None) -> None:
        self._path, self._tell = path, on_output
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._offset = path.stat().st_size if path.exists() else 0

    def __enter__(self) -> None:
        if self._tell is not None:
            self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._tell is not None:
            self._thread.join()

    def _follow(self) -> None:
        assert self._tell is not None
        while not self._stop.wait(0.02):
            if not self._path.exists():
                continue
            with self._path.open("rb") as file:
                file.seek(self._offset)
                piece = file.read()
            self._offset += len(piece)
            if piece:
                self._tell(piece)


def _seen(answer: Mapping[str, Any], wall: float) -> Seen:
    """The trusting host's reply as what a client of it would have seen."""
    error = answer.get("error")
    files = {
        path: File(path=path, size=0, data=None if data is None else base64.b64decode(data))
        for path, data in answer["files"].items()
    }
    result = Result(
        status=Status(answer["status"]),
        exit_code=answer["exit_code"],
        stdout=answer.get("stdout", ""),
        stderr=answer.get("stderr", ""),
        error=GuestError(**error) if error else None,
        files=files,
        usage=Usage(wall=answer.get("wall", wall), cpu=answer.get("cpu")),
        backend="control",
    )
    told = replace(result, files={}).to_dict() | {
        name: answer.get(name) for name in ("stdout", "stderr", "value", "error")
    }
    told["files"] = {path: {"size": file.size} for path, file in files.items()}
    return Seen(
        wall=wall,
        result=replace(result, value=_plain(answer.get("value"))),
        wire=json.dumps(told).encode(),  # as carelessly as the rest: NaN passes
        host_growth=answer.get("host_growth", 0),
        stopped=answer.get("stopped", False),
    )


def _plain(value: Any) -> Any:
    """A value that `Result.to_dict` can take; the careless form is in the wire text already."""
    try:
        json.dumps(value, allow_nan=False).encode()
    except ValueError:
        return None
    return value
