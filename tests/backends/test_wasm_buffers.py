"""Binary data of a WebAssembly guest goes through a file in its own temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from belljar.backends.wasm import WasmBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request, Result

_FOUND = WasmBackend().probe()
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)

LARGE = bytes(range(256)) * (8 << 10)  # 2 MiB
PLACE = "/tmp/.belljar-buffer"
# A frame of a value that is the first buffer, sent past the worker's own code.
FORGED = """
import os, wit_world
{before}
wit_world.send(0x89, "")
wit_world.send(0x82, '{{"$":"bytes","v":0}}')
os._exit(0)
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(Settings(), backends={"wasm": WasmBackend()})
    yield engine
    engine.close()


def run(engine: Engine, code: str, context: dict[str, Any] | None = None, **wanted: Any) -> Result:
    request = Request(code=code, context=context or {})
    return engine.run(request, level="standard", wishes={"modules": "any", **wanted})


def test_large_data_goes_in_and_comes_back_and_leaves_no_file(engine: Engine) -> None:
    code = "import os\n(large, bytearray(large), os.listdir('/tmp'), [n / 7 for n in range(999)])"
    for _ in range(2):  # the second run is of the same worker
        result = run(engine, code, {"large": LARGE})
        assert result.success, result
        assert result.value == (LARGE, bytearray(LARGE), [], [n / 7 for n in range(999)])
        assert not result.warnings


def test_a_buffer_takes_a_fraction_of_the_instructions_that_base64_takes(engine: Engine) -> None:
    """That it is no text: with fuel, which counts what the guest computes, and not how long."""
    wanted = {"fuel": 10_000_000_000}
    raw = run(engine, f"bytes({len(LARGE)})", **wanted)
    text = run(engine, f"open('{PLACE}', 'w').close()\nbytes({len(LARGE)})", **wanted)
    assert raw.value == text.value == bytes(len(LARGE))
    assert raw.usage.fuel is not None
    assert text.usage.fuel is not None
    assert 3 * raw.usage.fuel < text.usage.fuel


@pytest.mark.parametrize(
    "obstacle",
    [
        f"open({PLACE!r}, 'w').close()",
        f"import os; os.mkdir({PLACE!r})",
        "import os; os.open = os.write = os.unlink = None",
        "try:\n    open('/tmp/full', 'wb').write(bytes(64 << 20))\nexcept OSError:\n    pass",
    ],
    ids=["a file", "a directory", "other functions", "a full disk"],
)
def test_a_value_comes_back_whatever_is_in_the_way(engine: Engine, obstacle: str) -> None:
    result = run(engine, f"{obstacle}\nlarge", {"large": LARGE}, disk="16M", memory="256M")
    assert result.value == LARGE, result


def test_data_larger_than_the_disk_goes_in(engine: Engine) -> None:
    result = run(engine, "large == bytes(range(256)) * 8192", {"large": LARGE}, disk="1M")
    assert result.value is True, result


def test_a_forged_buffer_is_the_file_that_the_guest_wrote(engine: Engine) -> None:
    """The control arm of the next test."""
    before = f"open({PLACE!r}, 'wb').write(b'own')"
    assert run(engine, FORGED.format(before=before)).value == b"own"


@pytest.mark.parametrize(
    "before",
    [
        "pass",
        f"os.mkdir({PLACE!r})",
        f"open('/tmp/own', 'wb').write(b'own'); os.symlink('own', {PLACE!r})",
    ],
    ids=["nothing", "a directory", "a link"],
)
def test_no_other_thing_in_its_place_is_sent(engine: Engine, before: str) -> None:
    result = run(engine, FORGED.format(before=before))
    assert result.value is None
    assert result.warnings == ("the value could not be read: there is no such buffer",)
    assert run(engine, "1").value == 1
