"""`cpus` is a rate also where no control group holds it, and `usage.cpu` is what was used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

if sys.platform != "linux":
    pytest.skip("Linux only", allow_module_level=True)

from belljar.backends.bubblewrap import BubblewrapBackend
from belljar.backends.firejail import FirejailBackend
from belljar.backends.jail import JailBackend
from belljar.backends.landlock import LandlockBackend
from belljar.backends.subprocess import SubprocessBackend
from belljar.config import Settings
from belljar.engine import Engine
from belljar.linux import probe
from belljar.types import Request, Result

KINDS = [
    kind
    for kind in (
        JailBackend,
        LandlockBackend,
        SubprocessBackend,
        BubblewrapBackend,
        FirejailBackend,
    )
    if kind().probe().available
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
FORKED = """
import os, time
start = time.monotonic()
child = os.fork()
while time.monotonic() < start + 1.5:
    pass
if not child:
    os._exit(0)
os.wait()
"""
SPENDING = """
import time
while True:
    if time.process_time() > 0.3:
        print('spent', flush=True)
        break
while True: pass
"""


@contextmanager
def engine(kind: type, *, grouped: bool) -> Iterator[Engine]:
    facts = probe.facts() if grouped else replace(probe.facts(), cgroup=None)
    backend = kind(facts=facts)
    with Engine(Settings(), backends={backend.name: backend}) as made:
        yield made


@every_kind
def test_a_fraction_of_a_core_is_held_without_a_control_group(kind: type) -> None:
    def run(cpus: float) -> Result:
        return made.run(Request(code=FORKED), wishes={"cpus": cpus, "timeout": 60})

    with engine(kind, grouped=False) as made:
        held = run(0.1)
        assert held.success, held
        assert held.usage.cpu is not None
        assert held.usage.cpu <= 0.1 * held.usage.wall + 0.15
        assert "hold the rate" in held.enforcement["cpus"].by


@every_kind
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "watched"])
def test_processor_time_of_a_run_that_was_ended(kind: type, grouped: bool) -> None:
    if grouped and probe.facts().cgroup is None:
        pytest.skip("no control group here")
    with engine(kind, grouped=grouped) as made:
        result = made.run(Request(code=SPENDING), wishes={"timeout": 4})
        assert (result.status, result.stdout) == ("timeout", "spent\n")
        assert result.usage.cpu is not None and result.usage.cpu >= 0.29
