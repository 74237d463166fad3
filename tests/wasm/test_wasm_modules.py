"""The list of what the Python guest has is compared with the guest itself."""

from __future__ import annotations

import pytest

from belljar.backends.wasm import WasmBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.types import Request
from belljar.wasm import modules

_FOUND = WasmBackend().probe()
pytestmark = pytest.mark.skipif(not _FOUND.available, reason=_FOUND.reason)

ASK = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
def has(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True
quiet = {"antigravity", "this", "__main__"}
public = [n for n in sys.stdlib_module_names if not n.startswith("_") and n not in quiet]
[[n for n in public if has(n)], [n for n in given if has(n)]]
"""


def test_the_list_is_what_the_guest_has() -> None:
    asked = [*modules.ABSENT_BELOW, "__future__", "compression.zlib", "numpy", "xml.etree"]
    with Engine(Settings(), backends={"wasm": WasmBackend(tidy=True)}) as jar:
        result = jar.run(Request(code=ASK, context={"given": asked}))
    public, present = result.value
    assert set(public) == modules.PRESENT - {"__future__"}
    assert present == ["__future__", "compression.zlib", "xml.etree"]
    assert present == [name for name in asked if modules.importable(name)]


def test_what_is_hollow_is_there() -> None:
    tops = {name.partition(".")[0] for name in modules.HOLLOW}
    assert tops - modules.PRESENT == {"_thread"}
