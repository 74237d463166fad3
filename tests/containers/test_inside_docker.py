"""Belljar inside somebody's container: what a default `docker run` allows, what doctor asks for.

The container has the engine's default seccomp profile, capabilities and masked paths; Belljar's
source is mounted read-only into an image with a plain Python.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from container_engines import TOGETHER, Engine

import belljar
from belljar.images import names

pytestmark = TOGETHER
SOURCE = str(Path(belljar.__file__).parent.parent)
USERS = pytest.mark.parametrize("user", ["0:0", "1000:1000"], ids=["root", "ordinary"])


@dataclass(frozen=True, kw_only=True)
class Ended:
    status: int
    stdout: str
    stderr: str


def belljar_in_container(engine: Engine, user: str, options: list[str], *words: str) -> Ended:
    """`docker run OPTIONS -v SOURCE:/src:ro IMAGE python3 -m belljar WORDS`, over the API."""
    host: dict[str, Any] = {"Binds": [f"{SOURCE}:/src:ro"], "SecurityOpt": [], "CapAdd": []}
    for option in options:
        name, _, value = option.partition(" ")
        if name == "--user":
            user = value
        elif name == "--cap-add":
            host["CapAdd"].append(value)
        elif value == "systempaths=unconfined":  # the command line's word for these two
            host["MaskedPaths"], host["ReadonlyPaths"] = [], []
        else:
            assert name == "--security-opt", f"doctor names an option that is unknown: {option}"
            host["SecurityOpt"].append(value)
    body = {
        "Image": names.image_name("python"),
        "Cmd": ["python3", "-m", "belljar", *words],
        "Env": ["PYTHONPATH=/src"],
        "User": user,
        "HostConfig": host,
    }
    api = engine.api
    made = api.json("POST", "/containers/create", body=body)["Id"]
    try:
        attached = api.attach(made)
        try:
            api.json("POST", f"/containers/{made}/start")
            told = attached.early
            attached.socket.settimeout(100)
            while piece := attached.socket.recv(1 << 16):
                told += piece
        finally:
            attached.socket.close()
        status = api.json("POST", f"/containers/{made}/wait")["StatusCode"]
    finally:
        api.json("DELETE", f"/containers/{made}", {"force": "1"})
    streams = {1: b"", 2: b""}
    while told:  # frames: the stream's number, three zeros, the length, the bytes
        length = int.from_bytes(told[4:8], "big")
        streams[told[0]] += told[8 : 8 + length]
        told = told[8 + length :]
    return Ended(status=status, stdout=streams[1].decode(), stderr=streams[2].decode())


def doctor(engine: Engine, user: str, options: list[str]) -> dict[str, Any]:
    ended = belljar_in_container(engine, user, options, "doctor", "--json")
    assert ended.stderr == ""
    told: dict[str, Any] = json.loads(ended.stdout)
    assert ended.status == (0 if told["ok"] else 1)
    return told


def backend(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(b for b in report["backends"] if b["name"] == name)
    return found


def docker_options(fix: str) -> list[str]:
    """The options of the first `docker run` in a fix."""
    command = re.search(r"docker run((?: --[a-z-]+ [\w=]+)+)", fix)
    assert command, f"names no options of docker run: {fix}"
    return re.findall(r"--[a-z-]+ [\w=]+", command.group(1))


@USERS
def test_doctor_says_what_a_default_container_lacks(docker_engine: Engine, user: str) -> None:
    report = doctor(docker_engine, user, [])
    namespaces = next(f for f in report["host"] if f["name"] == "namespaces")
    assert namespaces["state"] == "missing"
    assert "seccomp profile" in namespaces["detail"]
    assert "--security-opt seccomp=unconfined" in namespaces["fix"]
    jail = backend(report, "jail")
    assert not jail["available"]
    assert "--security-opt seccomp=unconfined" in jail["fix"]
    assert report["ok"], "something has to serve there"


@USERS
def test_a_program_runs_in_a_default_container(docker_engine: Engine, user: str) -> None:
    ended = belljar_in_container(docker_engine, user, [], "run", "-c", "print(1)")
    assert (ended.status, ended.stdout) == (0, "1\n"), ended.stderr
    told = belljar_in_container(docker_engine, user, [], "run", "--json", "-c", "print(1)")
    result = json.loads(told.stdout)
    assert result["status"] == "success"
    assert result["isolation"] in ("process", "landlock")
    assert {"timeout", "memory", "network", "filesystem"} <= result["enforcement"].keys()


@USERS
def test_the_default_container_keeps_secrets_and_limits(docker_engine: Engine, user: str) -> None:
    code = "print(open('/proc/1/environ').read())"
    read = belljar_in_container(docker_engine, user, [], "run", "-c", code)
    assert read.status != 0
    assert "PYTHONPATH=/src" not in read.stdout
    slow = belljar_in_container(
        docker_engine, user, [], "run", "--timeout", "1s", "-c", "while True: pass"
    )
    assert slow.status == 124


@USERS
def test_a_jail_is_refused_in_a_default_container(docker_engine: Engine, user: str) -> None:
    words = ("run", "--level", "strict", "-c", "print(1)")
    refused = belljar_in_container(docker_engine, user, [], *words)
    assert refused.status in (126, 127)
    assert refused.stdout == ""
    assert "fix:" in refused.stderr


@USERS
def test_what_doctor_names_makes_the_jail_work(docker_engine: Engine, user: str) -> None:
    options: list[str] = []
    for _ in range(3):
        jail = backend(doctor(docker_engine, user, options), "jail")
        if jail["usable"]:
            break
        asked = docker_options(jail["fix"])
        assert not set(asked) <= set(options), f"doctor repeats itself: {jail['fix']}"
        options += asked
    assert jail["usable"], f"with {options}: {jail['problem']}"
    words = ("run", "--backend", "jail", "--level", "strict", "--json", "-c", "print(1)")
    ended = belljar_in_container(docker_engine, user, options, *words)
    assert ended.status == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["stdout"], result["backend"], result["isolation"]) == ("1\n", "jail", "jail")
    # The same attack as above.
    code = "print(open('/proc/1/environ').read())"
    kept = belljar_in_container(docker_engine, user, options, "run", "-c", code)
    assert "PYTHONPATH=/src" not in kept.stdout


def test_root_gets_the_jail_with_one_more_capability(docker_engine: Engine) -> None:
    unconfined = ["--security-opt seccomp=unconfined", "--security-opt systempaths=unconfined"]
    without = backend(doctor(docker_engine, "0:0", unconfined), "jail")
    assert not without["available"]
    assert "--cap-add SYS_ADMIN" in without["fix"]
    words = ("run", "--backend", "jail", "-c", "print(1)")
    options = [*unconfined, "--cap-add SYS_ADMIN"]
    ended = belljar_in_container(docker_engine, "0:0", options, *words)
    assert (ended.status, ended.stdout) == (0, "1\n"), ended.stderr
