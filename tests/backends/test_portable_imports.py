"""Everything that does not say `linux` imports where Linux's and POSIX's own modules do not exist.

Not the real thing, but it fails for the mistake that is easy to make: a module or a constant that
only POSIX has, used while importing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import belljar

# What each platform lacks. A name that is not even there on the machine of the tests does no harm.
POSIX_MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty")
POSIX_NAMES = {
    "os": (
        "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_PATH P_PID WEXITED WNOHANG WNOWAIT chown "
        "environb fchmod fchown fork getegid geteuid getgid getgroups getpgid getpgrp getresuid "
        "getuid kill killpg mkfifo pidfd_open pread pwrite sched_getaffinity sched_setaffinity "
        "set_blocking setgroups setsid setuid sysconf uname unshare wait wait3 wait4 waitid"
    ),
    "select": "POLLERR POLLHUP POLLIN POLLOUT epoll poll",
    "signal": (
        "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGWINCH "
        "SIGXCPU SIGXFSZ SIG_BLOCK pause pthread_sigmask setitimer"
    ),
    "socket": "AF_UNIX SCM_RIGHTS",
}
LINUX_NAMES = {
    "os": "O_PATH pidfd_open sched_getaffinity sched_setaffinity unshare waitid memfd_create",
    "select": "epoll",
}
LACKS = {"win32": (POSIX_MODULES, POSIX_NAMES), "darwin": ((), LINUX_NAMES)}

# The standard library is imported first: it knows for itself what platform it is on.
CHILD = """
import sys, json
platform, source, blocked, names, skipped, neutral = json.loads(sys.argv[1])
import argparse, asyncio, ctypes, importlib, multiprocessing, pkgutil, platform as _, select, shutil
import socket, subprocess, tempfile, threading, tomllib, importlib.metadata, inspect, fnmatch
import urllib.request
for optional in ("uvicorn", "mcp.server"):  # these too know for themselves what platform it is
    try:
        importlib.import_module(optional)
    except ImportError:
        pass
for name in blocked:
    sys.modules[name] = None
for module, gone in names.items():
    for name in gone.split():
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
sys.platform = platform
sys.path.insert(0, source)
import belljar
failures = {}
seen = []
for found in pkgutil.walk_packages(belljar.__path__, "belljar.", onerror=lambda name: None):
    if found.name.startswith(tuple(skipped)):
        continue
    if found.name.startswith("belljar.backends.") and not found.name.startswith(tuple(neutral)):
        continue
    seen.append(found.name)
    try:
        importlib.import_module(found.name)
    except Exception as error:
        failures[found.name] = repr(error)
for name in belljar.__all__:
    getattr(belljar, name)
from belljar.backends import registry
from belljar.cli import main
backend = registry.load("subprocess")
told = {"failures": failures, "seen": seen, "backend": type(backend).__name__}
told["available"] = backend.probe().available
told["auto"] = {name: type(registry.load(name)).__module__ for name in registry.PREFERENCE}
print(json.dumps(told))
"""
# Linux's own half, the suites for testers, and the file whose import runs the program; the agent,
# which runs in Linux containers; what is inside of WebAssembly, or loads a platform's own engine.
SKIPPED = (
    "belljar.linux", "belljar.testing", "belljar.__main__", "belljar.guest.agent",
    "belljar.wasm.inside", "belljar.wasm.calls", "belljar.wasm.javascript", "belljar.wasm.worker",
    "belljar.wasm.plain_worker",
)  # fmt: skip
# Of the backends those that are for every platform; another one is imported only when it is named.
NEUTRAL = tuple(
    f"belljar.backends.{name}"
    for name in ("base", "inprocess", "portable", "registry", "verdict", "wasm_orders")
)


def imported_as(platform: str, neutral: tuple[str, ...] = NEUTRAL) -> dict[str, object]:
    source = os.path.dirname(os.path.dirname(belljar.__file__))
    modules, names = LACKS[platform]
    told = json.dumps([platform, source, modules, names, SKIPPED, neutral])
    child = subprocess.run(
        [sys.executable, "-I", "-c", CHILD, told], capture_output=True, text=True, timeout=60
    )
    assert child.returncode == 0, child.stderr
    answer: dict[str, object] = json.loads(child.stdout)
    return answer


@pytest.mark.parametrize("platform", LACKS)
def test_the_package_imports_without_what_the_platform_lacks(platform: str) -> None:
    told = imported_as(platform)
    assert told["failures"] == {}
    assert {"belljar.api", "belljar.engine", "belljar.cli.run", "belljar.doctor"} <= set(
        told["seen"]  # type: ignore[call-overload]
    )
    assert told["backend"] == "PortableBackend"
    expected = {"wasm": "belljar.backends.portable_wasm", "docker": "belljar.backends.docker"}
    expected["subprocess"] = "belljar.backends.portable"
    if platform == "win32":
        del expected["docker"]
    assert list(told["auto"].items()) == list(expected.items())  # type: ignore[attr-defined]


def test_the_check_finds_a_module_that_needs_posix() -> None:
    """The control arm: the half that is Linux's own does not import as if on Windows."""
    failures = imported_as("win32", ("belljar.backends.process_plan",))["failures"]
    assert isinstance(failures, dict)
    assert "belljar.backends.process_plan" in failures


def test_on_windows_the_backend_needs_no_ps() -> None:
    assert imported_as("win32")["available"] is True
