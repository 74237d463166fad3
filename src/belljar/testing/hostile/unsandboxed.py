"""Runs cases without a sandbox, as a throw-away user: the subject of the control arms."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...types import File, GuestError, Result, Status, Usage
from . import trusting
from .arms import Arm
from .private import remove
from .subject import Job, Seen, on_terminal
from .world import World

# A program that still runs this long after its time was up has shown that nothing limits it.
_GRACE = 2.5
_LONGEST = 4.0
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


def as_user(uid: int) -> dict[str, Any]:
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
        how: dict[str, Any] = as_user(self._uid)
        if self.arm.planted or self.arm.shadowed:
            words, how = self._with_mounts(words), {}
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

    def _with_mounts(self, words: list[str]) -> list[str]:
        """The command in a mount namespace of its own, with what the arm wants to be there."""
        path = self.arm.planted or self.arm.shadowed
        script = f"mount -t tmpfs tmpfs {os.path.dirname(path)} && "
        if self.arm.planted:
            script += f"mkdir {path}"
        elif os.path.exists(path):
            copy = self._world.root / "shadow"
            copy.write_bytes(Path(path).read_bytes())
            copy.chmod(0o666)
            script = f"mount --bind {shlex.quote(str(copy))} {path}"
        else:
            script += f"echo 0 > {path} && chmod 666 {path}"
        drop = ["setpriv", f"--reuid={self._uid}", f"--regid={self._uid}", "--clear-groups"]
        return ["unshare", "--mount", "sh", "-c", script + ' && exec "$@"', "sh", *drop, *words]

    def terminal(self, job: Job) -> bytes:
        program = self._world.root / "shown.py"
        program.write_text(job.code)
        program.chmod(0o644)
        words = [self._python, "-I", str(program)]
        return on_terminal(words, timeout=job.timeout + _GRACE, **as_user(self._uid))

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
            **as_user(self._uid),
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
