"""`ceiling.interpreters`: which Pythons Belljar may start on the host for a request."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from belljar import config
from belljar.backends.jail import JailBackend
from belljar.backends.landlock import LandlockBackend
from belljar.backends.subprocess import SubprocessBackend
from belljar.engine import Engine
from belljar.errors import BelljarError, LanguageMissing, PolicyError
from belljar.language_report import reports
from belljar.types import Request

BASE = os.path.realpath(sys.executable)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends are for Linux")


class Trap:
    """A file that is no Python: it leaves a mark when it is started."""

    def __init__(self, root: Path, name: str = "python3.77") -> None:
        self.path, self._mark = root / name, root / "started"
        self.path.write_text(f"#!/bin/sh\ntouch {self._mark}\nexit 1\n")
        self.path.chmod(0o755)

    @property
    def started(self) -> bool:
        return self._mark.exists()


@pytest.fixture(params=[JailBackend, LandlockBackend, SubprocessBackend])
def made(request: pytest.FixtureRequest) -> Any:
    backend = request.param()
    if not backend.probe().available:
        pytest.skip(f"{backend.name} is not available")
    yield lambda **values: engine(backend, **values)
    backend.close()


def engine(backend: Any, **values: Any) -> Engine:
    settings = config.load(environ={"HOME": "/nonexistent"}, overrides=values)
    return Engine(settings, backends={backend.name: backend})


def run(engine: Engine, **request: Any) -> Any:
    backend = engine.backend_names()[0]
    return engine.run(Request(code="import sys; sys.executable", **request), backend=backend)


def test_an_interpreter_that_is_not_listed_is_not_started(made: Any, tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    for listed in ("none", [BASE]):
        with pytest.raises(PolicyError, match=r"ceiling\.interpreters"):
            run(made(**{"ceiling.interpreters": listed}), python=str(trap.path))
        assert not trap.started
    with pytest.raises(BelljarError):
        run(made(), python=str(trap.path))
    assert trap.started, "the control: without the ceiling the file is started on the host"


def test_listed_interpreters_and_the_own_one_are_used(made: Any, tmp_path: Path) -> None:
    assert run(made(**{"ceiling.interpreters": [BASE]}), python=BASE).value == BASE
    link = tmp_path / "py"
    link.symlink_to(BASE)
    assert run(made(**{"ceiling.interpreters": [BASE]}), python=str(link)).value == BASE
    own = made(**{"ceiling.interpreters": "none"})
    assert run(own).success
    assert run(own, python=sys.executable).success


def test_a_virtualenv_of_a_listed_interpreter_is_not_listed(made: Any, tmp_path: Path) -> None:
    """Its .pth files are code that its interpreter runs when it starts, on the host."""
    mark, bin = tmp_path / "started", tmp_path / "venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").symlink_to(BASE)
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {os.path.dirname(BASE)}\n")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = tmp_path / "venv" / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (packages / "trap.pth").write_text(f"import os; open({str(mark)!r}, 'w').close()\n")
    outside = tmp_path / "py"  # another link to it
    outside.symlink_to(bin / "python")
    for python in (tmp_path / "venv", bin / "python", outside):
        with pytest.raises(PolicyError, match=r"ceiling\.interpreters"):
            run(made(**{"ceiling.interpreters": [BASE]}), python=str(python))
        assert not mark.exists()
    venv = str(tmp_path / "venv")
    assert run(made(**{"ceiling.interpreters": [venv]}), python=venv).success
    assert mark.exists(), "the control: a listed virtualenv is started"


def test_a_language_files_python_is_under_the_ceiling(made: Any, tmp_path: Path) -> None:
    trap = Trap(tmp_path)
    file = tmp_path / "languages.toml"
    file.write_text(f'[snake]\nextends = "python"\ncommand = ["{trap.path}"]\n')
    bound = {"ceiling.interpreters": "none", "language_file": str(file)}
    with pytest.raises(PolicyError, match=r"ceiling\.interpreters"):
        run(made(**bound), language="snake")
    report = {each.name: each for each in reports(made(**bound))}["snake"]
    assert "ceiling.interpreters" in report.problem
    assert not trap.started
    with pytest.raises(BelljarError):
        run(made(language_file=str(file)), language="snake")
    assert trap.started, "the control"


def test_a_version_is_looked_for_among_the_listed(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = Trap(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LanguageMissing, match=r"ceiling\.interpreters"):
        run(made(**{"ceiling.interpreters": "none"}), language="python3.77")
    assert not trap.started
    with pytest.raises(BelljarError):
        run(made(), language="python3.77")
    assert trap.started, "the control"


def test_no_later_source_adds_an_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = tmp_path / "operator.toml"
    operator.write_text("[ceiling]\ninterpreters = ['/usr/bin/python3', '/opt/python']\n")
    monkeypatch.setattr(config, "OPERATOR_FILE", str(operator))
    home = {"HOME": str(tmp_path)}
    allowed = config.load(environ=home).ceiling.interpreters
    assert allowed == ("/usr/bin/python3", "/opt/python")
    more = "/opt/python,/tmp/mine"
    loaded = config.load(environ={**home, "BELLJAR_CEILING_INTERPRETERS": more})
    assert loaded.ceiling.interpreters == ("/opt/python",)
    assert "env BELLJAR_CEILING_INTERPRETERS" in loaded.sources["ceiling.interpreters"]
    none = config.load(environ={**home, "BELLJAR_CEILING_INTERPRETERS": "none"})
    assert none.ceiling.interpreters == ()
    with pytest.raises(BelljarError, match="not absolute"):
        config.load(environ=home, overrides={"ceiling.interpreters": ["python3"]})
