"""Writable mounts that belong to another user than the guest: on Docker, Podman and gVisor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_container_agent
from container_engines import TOGETHER
from test_container_agent import Make

from belljar.errors import PolicyUnenforceable
from belljar.types import Mount

pytestmark = [pytest.mark.slow, TOGETHER]
kind, make = test_container_agent.kind, test_container_agent.make


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """Root's, and writable for nobody else."""
    if os.geteuid() != 0:
        pytest.skip("needs files of root's")
    made = tmp_path / "project"
    (made / "sub").mkdir(parents=True)
    (made / ".git" / "hooks").mkdir(parents=True)
    (made / "old").write_text("old")
    for path in (tmp_path, made, *made.rglob("*")):
        path.chmod(0o755)
    yield made


WRITE = """
import os
done = []
for name in ("new", "old", "sub/new", ".git/hooks/pre-commit", ".envrc", "/etc/passwd"):
    try:
        with open(os.path.join("project", name), "a") as file:
            file.write("x")
        done.append(name)
    except OSError:
        pass
try:
    os.chmod("project/new", 0o4755)
    done.append("set-id")
except OSError:
    pass
[done, os.getuid() != 0, os.stat("project/old").st_uid == os.getuid()]
"""


def test_a_project_of_root_s_is_written_to_or_refused(
    kind: str, make: Make, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, mounts = make(), (Mount(str(project), "project", "rw"),)
    if kind == "gvisor":
        with pytest.raises(PolicyUnenforceable, match="chown -R") as refused:
            bench.run(WRITE, mounts=mounts)
        assert refused.value.fields == ("mounts",)
    else:
        result = bench.run(WRITE, mounts=mounts)
        assert result.value == [["new", "old", "sub/new"], True, True], result
        assert (project / "old").read_text() == "oldx"
        owners = {path.lstat().st_uid for path in project.rglob("*")}
        assert owners == {0}
        monkeypatch.setattr("belljar.linux.remap.problem", lambda path: "not this file system")
        with pytest.raises(PolicyUnenforceable, match="not this file system"):
            bench.run(WRITE, mounts=mounts)
    for path in (project, *project.rglob("*")):  # the control arm: an ordinary user's
        os.chown(path, 4711, 4711)
    assert bench.run(WRITE, mounts=mounts).value[0][0] == "new"


def test_what_a_run_may_read_only_stays_read_only(kind: str, make: Make, project: Path) -> None:
    result = make().run(WRITE, mounts=(Mount(str(project), "project", "ro"),))
    assert result.value[0] == []
