"""The hostile suite as an ordinary user: no root, no control groups, one user id.

When the tests run as root, the package is copied to where everybody can read it, and another
interpreter runs `belljar selftest` as a user that does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import belljar
from belljar.backends.jail import JailBackend

pytestmark = pytest.mark.skipif(
    not JailBackend().probe().available, reason=JailBackend().probe().reason or "no jail"
)

NOBODY = 63996
FLAGS = ("--json", "--backend", "jail", "--claimed-only")
SYSTEM_PYTHON = "/usr/bin/python3"

PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from belljar.cli import main
sys.exit(main(sys.argv[1:]))
"""

Examine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def examine() -> Iterator[Examine]:
    """Runs `belljar selftest --backend jail` with these words, and gives its card."""
    directory = Path(tempfile.mkdtemp(prefix="belljar-unprivileged-", dir="/var/tmp"))
    python, before = sys.executable, []
    if os.geteuid() == 0:
        python = SYSTEM_PYTHON
        before = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        if not os.path.exists(python) or shutil.which(before[0]) is None:
            pytest.skip("no interpreter that another user could run, or no setpriv")
    package = directory / "package"
    for module in (belljar, yaml):
        source = Path(module.__file__ or "").parent
        shutil.copytree(source, package / source.name, ignore=shutil.ignore_patterns("*.so"))
    directory.chmod(0o755)
    own = directory / "t"
    own.mkdir()
    if before:
        os.chown(own, NOBODY, NOBODY)

    def run(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [*before, python, "-I", "-B", "-c", PROGRAM, str(package), "selftest", *FLAGS, *words],
            capture_output=True,
            text=True,
            env={"PATH": os.defpath, "TMPDIR": str(own)},
            cwd="/",
        )
        if "backend_unavailable" in done.stderr or "not available" in done.stderr:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.stdout, done.stderr
        assert os.listdir(own) == []
        (card,) = json.loads(done.stdout)["backends"]
        assert card["host"]["user"] == "ordinary"
        return dict(card)

    try:
        yield run
    finally:
        shutil.rmtree(directory)


def not_held(card: dict[str, Any]) -> dict[str, list[str]]:
    bad = ("breached", "error")
    return {case["id"]: case["reasons"] for case in card["cases"] if case["verdict"] in bad}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["kernel", "memory"])
def test_without_privilege_the_group_holds(examine: Examine, group: str) -> None:
    card = examine("--group", group)
    assert not_held(card) == {}
    assert card["totals"]["held"] >= 7


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_without_privilege_every_claimed_case_holds(examine: Examine) -> None:
    card = examine()
    assert not_held(card) == {}
    assert card["totals"]["held"] >= 160
