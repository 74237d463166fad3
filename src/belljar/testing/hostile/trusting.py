"""A host that trusts its guests in every way, to prove that the checks notice.

This is the unsandboxed control arm. It runs as a throw-away user and does what a careless host
does: no limits, its own environment and descriptors handed on, the exit status as the guest tells
it, frames allocated at the length they claim, pickles loaded, links followed, archives unpacked.
It is started as a script, with the path of a job file.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import resource
import select
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from typing import Any

# Nothing here may take the machine down: a claim of a terabyte is believed up to this much.
BELIEVED = 256 << 20
FILE_BELIEVED = 96 << 20

# What runs around the guest's code, in the guest's own process: it reports, and is believed.
WRAPPER = r"""
import base64, io, json, os, pickle, sys, traceback, types
path, channel = sys.argv[1], int(sys.argv[2])
sys.argv = [path]
source = open(path).read()
main = types.ModuleType("__main__")
main.__file__ = path
sys.modules["__main__"] = main
report = {"status": "success", "exit_code": 0}
try:
    exec(compile(source, path, "exec"), main.__dict__)
    if "result" in main.__dict__:
        value = main.__dict__["result"]
        report["repr"] = repr(value)
        try: report["json"] = json.dumps(value)
        except (TypeError, ValueError): pass
        try: payload = value if isinstance(value, bytes) else pickle.dumps(value)
        except Exception: payload = b""
        report["pickle"] = base64.b64encode(payload).decode()
except SystemExit as ending:
    report = {"status": "error" if ending.code else "success", "exit_code": ending.code or 0}
except BaseException as error:
    traceback.print_exc()
    report = {"status": "error", "exit_code": 1,
              "error": {"type": type(error).__name__, "message": str(error),
                        "traceback": traceback.format_exc()}}
sys.stdout.flush()
text = json.dumps(report).encode()
os.write(channel, len(text).to_bytes(4, "big") + text)
sys.exit(report["exit_code"])
"""


def main(job_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    _generous_limits(job)
    os.chdir(job["work"])
    reply = _in_this_very_process(job) if job["inprocess"] else Host(job).run()
    text = json.dumps(reply)  # NaN, lone surrogates and all
    with open(job["reply"] + ".part", "w") as file:
        file.write(text)
    os.rename(job["reply"] + ".part", job["reply"])


def _generous_limits(job: dict[str, Any]) -> None:
    """Bounds that only a run-away control would meet."""
    for name, value in job["rlimits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(number, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))


def _in_this_very_process(job: dict[str, Any]) -> dict[str, Any]:
    """What the guest's objects do, they do to the host."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with open(job["program"]) as file:
        exec(compile(file.read(), job["program"], "exec"), names)
    return {"status": "success", "exit_code": 0, "value": repr(names.get("result")), "files": {}}


class Host:
    """One careless run, and the reply about it."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.frames = b""
        self.size = _largest()
        self.deadline = time.monotonic() + job["stop"]

    def run(self) -> dict[str, Any]:
        job = self.job
        start = time.monotonic()
        log = open(job["session"], "ab", buffering=0)
        offset = os.path.getsize(job["session"])
        stderr = open(job["session"] + ".err", "ab", buffering=0)
        stderr_offset = os.path.getsize(job["session"] + ".err")
        reader, writer = os.pipe()
        stdin, queue = os.pipe()
        # The session's next program stands in the same pipe already.
        os.write(queue, job["stdin"].encode() + job["next_cell"].encode())
        child = subprocess.Popen(
            [*job["argv"], str(writer)], stdin=stdin, stdout=log, stderr=stderr, pass_fds=(writer,)
        )
        os.close(writer)
        stopped = self._listen(child, reader)
        wall = time.monotonic() - start
        reply = self._report(child, stopped)
        reply["stdout"] = self._said(job["session"], offset)
        reply["stderr"] = self._said(job["session"] + ".err", stderr_offset)
        self._believe_stdout(reply)
        self._load(reply)
        reply["files"] = self._collect() if job["outputs"] else self._list()
        for directory in job["writable"]:
            self._take_back(directory)
        shutil.rmtree(job["work"], ignore_errors=True)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        reply.update(
            wall=wall,
            stopped=stopped,
            cpu=usage.ru_utime + usage.ru_stime,
            host_growth=_largest() - self.size,
        )
        return reply

    def _listen(self, child: subprocess.Popen[bytes], reader: int) -> bool:
        """Until the guest hangs up, or ends, or the control arm has shown that nothing ends it."""
        while True:
            if time.monotonic() > self.deadline:
                child.kill()
                return True
            ready, _, _ = select.select([reader], [], [], 0.02)
            if ready:
                piece = os.read(reader, 65536)
                if not piece:
                    return False
                self.frames += piece
                self._make_room()
            elif child.poll() is not None:
                return False

    def _make_room(self) -> None:
        if len(self.frames) >= 4:
            length = int.from_bytes(self.frames[:4], "big")
            _touched(length)

    def _report(self, child: subprocess.Popen[bytes], stopped: bool) -> dict[str, Any]:
        """What the guest said of itself; a guest that said nothing has surely succeeded."""
        if stopped:
            return {"status": "killed", "exit_code": None}
        if self.job["language"] != "python":
            code = child.wait()
            return {"status": "error" if code else "success", "exit_code": code}
        try:
            told: dict[str, Any] = json.loads(self.frames[4:].decode())
            return told
        except ValueError:
            return {"status": "success", "exit_code": 0}

    def _said(self, path: str, offset: int) -> str:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read().decode("utf-8", "surrogateescape")

    def _believe_stdout(self, reply: dict[str, Any]) -> None:
        for line in reply["stdout"].splitlines():
            if line.startswith("{"):
                try:
                    told = json.loads(line)
                except ValueError:
                    continue
                if "status" in told:
                    reply.update(status="success", exit_code=told.get("exit_code", 0))
                    reply["value"] = told.get("value")

    def _load(self, reply: dict[str, Any]) -> None:
        if reply.get("json"):
            reply["value"] = json.loads(reply["json"])
        payload = base64.b64decode(reply.pop("pickle", ""))
        if payload:
            try:
                value = pickle.loads(payload)  # noqa: S301 - the very mistake to be noticed
            except Exception as error:  # noqa: BLE001 - whatever the guest's bytes raise
                value = repr(error)
            reply.setdefault("value", repr(value))

    def _take_back(self, directory: str) -> None:
        """What the guest made is the user's again, whatever it is."""
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            try:
                os.chmod(path, os.stat(path).st_mode & 0o7777 | 0o700)
            except OSError:
                continue

    def _list(self) -> dict[str, None]:
        return {name: None for name in os.listdir(".") if os.path.isfile(name)}

    def _collect(self) -> dict[str, str]:
        found: dict[str, str] = {}
        pending = ["out"]
        while pending:
            path = pending.pop()
            if os.path.isdir(path):
                pending += [os.path.join(path, name) for name in os.listdir(path)]
            elif time.monotonic() < self.deadline + 20:
                os.chmod(path, 0o600)
                with open(path, "rb") as file:
                    data = file.read(FILE_BELIEVED)
                found[path] = base64.b64encode(data).decode()
                found.update(self._open(path, data))
        return found

    def _open(self, path: str, data: bytes) -> dict[str, str]:
        """Be helpful: unpack archives, look at pictures."""
        if path.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall("unpacked")
                return {"out/" + name: "" for name in archive.namelist()}
        if path.endswith(".tar"):
            os.makedirs("unpacked", exist_ok=True)
            with tarfile.open(path) as archive:
                for member in archive:
                    try:
                        archive.extract(member, "unpacked")
                    except (OSError, tarfile.TarError):
                        continue
        if path.endswith(".png"):
            width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
            _touched(width * height * 3)
        return {}


def _touched(size: int) -> None:
    """Memory that is really used, not only promised."""
    room = bytearray(min(size, BELIEVED))
    room[::4096] = b"x" * len(room[::4096])


def _largest() -> int:
    """The most memory that this process ever had."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(sys.argv[1])
