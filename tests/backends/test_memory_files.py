"""Large data on its way into a fork: mapped from a sealed file, and the program's to write to."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("memory files are Linux's", allow_module_level=True)

import fcntl

from belljar.backends.jail import JailBackend
from belljar.backends.landlock import LandlockBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request, Result

FORKING = {"jail": JailBackend, "landlock": LandlockBackend}
LARGE = bytes(range(256)) * (16 << 10)  # 4 MiB
# Whose memory an array is a view of: `mmap`, or what has received a copy.
OWNER = """
def owner(thing):
    while type(thing) is memoryview or getattr(thing, "base", None) is not None:
        thing = thing.obj if type(thing) is memoryview else thing.base
    return type(thing).__name__
"""


@pytest.fixture(scope="module", params=FORKING)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    backend = FORKING[request.param]()
    found = backend.probe()
    if not found.available:
        pytest.skip(found.reason)
    engine = Engine(Settings(), backends={request.param: backend})
    yield engine
    engine.close()


def run(engine: Engine, code: str, context: dict[str, Any], **wishes: Any) -> Result:
    request = Request(code=code, context=context)
    result = engine.run(request, level="standard", wishes={"modules": "any", **wishes})
    assert result.success, result
    return result


def test_large_data_is_mapped_and_small_data_is_not(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    for data, wanted in ((LARGE, True), (LARGE[: 1 << 16], False)):
        given = numpy.frombuffer(data, "u1")
        result = run(
            engine,
            f"{OWNER}(bytes(given) == text, owner(given) == 'mmap')",
            {"given": given, "text": data},
        )
        assert result.value == (True, wanted)


def test_a_program_can_write_to_its_data_and_nobody_else_sees_it(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    given = numpy.zeros(1 << 19)
    code = "given[:] = 7\nchild = __import__('os').fork()\n"
    code += "if not child:\n    given[:] = 8\n    __import__('os')._exit(0)\n"
    code += "__import__('os').waitpid(child, 0)\ngiven.sum()"
    for _ in range(2):
        assert run(engine, code, {"given": given}).value == 7 * given.size
    assert not given.any()


def test_a_program_and_its_children_have_no_descriptor_of_the_file(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    code = """
import subprocess, sys
look = '''
import fcntl
def sealable(fd):
    try: return fcntl.fcntl(fd, fcntl.F_GET_SEALS) >= 0
    except OSError: return False
print([fd for fd in range(100) if sealable(fd)], end=" ")
'''
exec(look)
try: subprocess.run([sys.executable, "-c", look], close_fds=False, check=True)
except OSError: print([], end=" ")  # this backend has no children here
"""
    given = {"given": numpy.zeros(1 << 19)}
    assert run(engine, code, given).stdout.split() == ["[]", "[]"]
    control = os.memfd_create("control")
    assert fcntl.fcntl(control, fcntl.F_GET_SEALS) >= 0  # which finds such a file
    os.close(control)


def test_where_there_can_be_no_memory_file_data_goes_through_the_pipe(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    given = numpy.frombuffer(LARGE, "u1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run(engine, "1", {})  # its processes have the limit of their start
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        result = run(engine, f"{OWNER}(bytes(given), owner(given) == 'mmap')", {"given": given})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.value == (LARGE, False)


def test_nothing_of_the_host_stays_open(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    for _ in range(2):
        run(engine, "1", {"given": numpy.zeros(1 << 19)})
    links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
             if os.path.lexists(f"/proc/self/fd/{n}")]  # fmt: skip
    assert not [link for link in links if "memfd:belljar" in link]


def test_data_that_the_program_writes_to_counts_as_its_memory(engine: Engine) -> None:
    numpy = pytest.importorskip("numpy")
    given = numpy.zeros(24 << 20)  # 192 MiB
    request = Request(code="given[:] = 1\ngiven.sum()", context={"given": given})
    wishes = {"modules": "any", "memory": "96M", "timeout": 60}
    result = engine.run(request, level="standard", wishes=wishes)
    assert result.limit_hit == "memory", result
    wishes["memory"] = "512M"  # the control arm
    assert engine.run(request, level="standard", wishes=wishes).value == given.size
