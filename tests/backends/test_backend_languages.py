"""Languages on the backends that run on this host's own files: versions, and a language file."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar import Runner, create_runner
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import LanguageMissing, PolicyError, PolicyUnenforceable
from belljar.language_host import version_of
from belljar.policy import Ceiling
from belljar.testing.fake import FakeBackend
from belljar.types import Request, Status

Run = Callable[..., Any]
PERL = '[perl]\ncommand = ["perl"]\nfile = "main.pl"\n'


@pytest.fixture(params=["subprocess", "jail"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(backend: str, tmp_path: Path) -> Iterator[Callable[..., Runner]]:
    opened: list[Runner] = []

    def make(text: str = "", **settings: Any) -> Runner:
        file = tmp_path / "languages.toml"
        file.write_text(text)
        kept = Settings(language_file=str(file) if text else None, **settings)
        opened.append(create_runner(backend=backend, settings=kept))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def other_pythons() -> list[str]:
    """Commands of other Python versions, on PATH or where a version manager keeps them."""
    kept = os.path.expanduser("~/.pyenv/versions/3.*/bin/python3.*")
    found = {}
    for path in (*glob.glob("/usr/bin/python3.*"), *glob.glob(kept)):
        minor = os.path.basename(path).removeprefix("python3.")
        if minor.isdigit() and 9 <= int(minor) != sys.version_info[1]:
            found[int(minor)] = path
    return [found[minor] for minor in sorted(found)]


def test_every_python_version_has_the_rich_result(
    runner: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python 3.9 or later is installed here")
    monkeypatch.setenv("PATH", ":".join([*map(os.path.dirname, pythons), os.environ["PATH"]]))
    ready = runner()
    for path in (pythons[0], pythons[-1]):
        name = os.path.basename(path)
        code = "import sys; print(given); [sys.version_info[1], given + 1]"
        result = ready.execute(code, {"given": 41}, language=name)
        assert (result.stdout, result.value) == ("41\n", [int(name.split(".")[1]), 42])
        failed = ready.execute("def f():\n    1/0\nf()", language=name)
        assert failed.error is not None and failed.error.type == "ZeroDivisionError"
        assert "line 2, in f" in failed.error.traceback
        shown = ready.execute(
            "class Page:\n    def _repr_html_(self): return '<p>'\nPage()", language=name
        )
        assert [dict(each.data).get("text/html") for each in shown.displays] == ["<p>"]


def test_our_own_version_is_our_own_interpreter(runner: Callable[..., Runner]) -> None:
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    result = runner().execute("import sys; sys.prefix", language=name)
    assert result.value == sys.prefix


def test_a_version_that_is_not_installed_is_told_before_the_run(
    runner: Callable[..., Runner],
) -> None:
    with pytest.raises(LanguageMissing, match=r"python3\.98") as refusal:
        runner().execute("1", language="python3.98")
    assert refusal.value.fix == "uv python install 3.98"


def test_the_installed_node_has_a_versioned_name(runner: Callable[..., Runner]) -> None:
    node = shutil.which("node")
    version = version_of(node) if node else None
    if version is None:
        pytest.skip("node is not installed")
    result = runner().execute("console.log(process.version)", language=f"nodejs{version[0]}")
    assert result.stdout == f"v{'.'.join(map(str, version))}\n"
    with pytest.raises(LanguageMissing, match=str(version[0])):
        runner().execute("1", language=f"nodejs{version[0] + 1}")


needs_perl = pytest.mark.skipif(shutil.which("perl") is None, reason="perl is not installed")


@needs_perl
def test_a_language_of_the_file_runs(runner: Callable[..., Runner]) -> None:
    told = 'env = { A = "file", B = "file" }\n'
    ready = runner(PERL + told)
    code = 'print "$ENV{A} $ENV{B} @ARGV ", <STDIN>; open(F, ">out.txt"); print F "x"; exit 3'
    result = ready.execute(
        code, language="perl", env={"B": "call"}, args=["a b"], stdin="in", outputs=["*.txt"]
    )
    assert (result.stdout, result.exit_code) == ("file call a b in", 3)
    assert {name: file.data for name, file in result.files.items()} == {"out.txt": b"x"}
    with pytest.raises(ValueError, match=r"main\.pl"):
        ready.execute(code, language="perl", files={"main.pl": ""})


@needs_perl
def test_its_limits_are_the_languages_own_within_the_ceiling(
    runner: Callable[..., Runner],
) -> None:
    code = 'my $x = "x" x 200_000_000; print length $x'
    limited = PERL + '[perl.limits]\nmemory = "64M"\n'
    assert runner(PERL).execute(code, language="perl").stdout == "200000000"
    assert not runner(limited).execute(code, language="perl").success
    assert runner(limited).execute(code, language="perl", memory="1G").success
    generous = PERL + '[perl.limits]\nmemory = "1G"\n'
    tight = runner(generous, ceiling=Ceiling(memory=64 << 20))
    assert not tight.execute(code, language="perl").success


@needs_perl
def test_the_strict_profile_closes_sockets(runner: Callable[..., Runner]) -> None:
    code = (
        "use Socket; print socket(my $s, PF_INET, SOCK_STREAM, 0) ? 'open' : 'closed';"
        "print socket(my $u, PF_INET, SOCK_DGRAM, 0) ? ' open' : ' closed';"
    )
    assert runner(PERL).execute(code, language="perl").stdout == "open open"
    result = runner(PERL + 'seccomp = "strict"\n').execute(code, language="perl")
    assert result.stdout == "closed closed"
    assert "strict" in result.enforcement["seccomp"].by


def test_a_program_of_python_runs_under_the_strict_profile(runner: Callable[..., Runner]) -> None:
    text = '[python]\nseccomp = "strict"\n'
    code = """
import os, socket
found = []
for attempt in (lambda: socket.socket(), lambda: os.memfd_create("x"), lambda: os.cpu_count()):
    try:
        attempt()
        found.append("open")
    except OSError:
        found.append("closed")
found
"""
    assert runner(text).execute(code).value == ["closed", "closed", "open"]
    assert runner().execute(code).value[0] == "open"


@needs_perl
def test_the_network_is_denied_by_the_language(runner: Callable[..., Runner]) -> None:
    with pytest.raises(PolicyError, match="perl"):
        runner(PERL + "allow_network = false\n").execute("1", language="perl", network="any")
    assert runner(PERL).execute("1", language="perl", network="any").success


def test_a_command_of_the_backends_own_and_the_directories_it_reads(
    runner: Callable[..., Runner], backend: str, tmp_path: Path
) -> None:
    """An interpreter outside of /usr, which reads a file next to it."""
    home = tmp_path / "opt"
    home.mkdir()
    (home / "words").write_text("from the library\n")
    tool = home / "tool"
    tool.write_text(f"#!/bin/sh\ncat {home}/words\ncat $2\necho $1\n")
    tool.chmod(0o755)
    for path in (tmp_path, home, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path.is_relative_to(tmp_path.parent):
            path.chmod(path.stat().st_mode | 0o055)
    text = f'[own]\ncommand = ["no-such-command"]\nfile = "main.x"\npaths = ["{home}"]\n'
    ready = runner(f'{text}[own.{backend}]\ncommand = ["{tool}", "-x"]\n')
    assert ready.execute("the program\n", language="own").stdout == (
        "from the library\nthe program\n-x\n"
    )
    with pytest.raises(LanguageMissing, match="no-such-command"):
        runner(text).execute("", language="own")


def test_an_environment_under_a_name_of_its_own(runner: Callable[..., Runner]) -> None:
    text = f'[mine]\nextends = "python"\ncommand = ["{sys.executable}"]\n'
    ready = runner(text, block_dangerous_imports=True)
    assert ready.execute("6 * 7", language="mine").value == 42
    assert ready.execute("import subprocess", language="mine").status is Status.REFUSED
    assert ready.execute("import subprocess", language="mine", modules="any").success


# -- what the engine makes of it, wherever it runs


@pytest.mark.parametrize("language", ["python", "py", "python3.9", "python3.99", "analysis"])
def test_the_lint_reads_programs_of_every_python(language: str, tmp_path: Path) -> None:
    file = tmp_path / "languages.toml"
    file.write_text('[analysis]\nextends = "python"\n')
    settings = Settings(language_file=str(file), block_dangerous_imports=True)
    fake = FakeBackend()
    engine = Engine(settings, backends={"fake": fake})
    assert engine.run(Request(code="import os", language=language)).status is Status.REFUSED
    assert fake.requests == []
    assert engine.run(Request(code="import math", language=language)).success
    assert engine.run(Request(code="import os", language="bash")).success


def test_what_only_another_python_can_parse_does_not_pass_the_lint() -> None:
    engine = Engine(Settings(block_dangerous_imports=True), backends={"fake": FakeBackend()})
    code = "import os; this is no syntax of ours"
    refused = engine.run(Request(code=code, language="python3.99"))
    assert refused.status is Status.REFUSED
    assert refused.error is not None and "cannot parse" in refused.error.message
    assert engine.run(Request(code=code)).success  # our own Python will say what is wrong with it


def test_a_backend_without_the_profile_refuses_it(tmp_path: Path) -> None:
    file = tmp_path / "languages.toml"
    file.write_text('[bash]\nseccomp = "strict"\n')
    engine = Engine(Settings(language_file=str(file)), backends={"fake": FakeBackend()})
    with pytest.raises(PolicyUnenforceable) as refusal:
        engine.run(Request(code="", language="bash"), backend="fake")
    assert refusal.value.fields == ("seccomp",)
    assert engine.run(Request(code=""), backend="fake").success


def test_auto_tells_what_is_missing_instead_of_the_policy() -> None:
    with create_runner(backend="auto", settings=Settings()) as runner:
        for level in ("standard", "strict"):
            with pytest.raises(LanguageMissing, match=r"python3\.98"):
                runner.execute("1", language="python3.98", level=level, modules="any")


def test_a_named_backend_without_the_language_falls_back_to_one_that_has_it() -> None:
    class Lacks(FakeBackend):
        def compile(self, policy: Any, request: Request) -> Any:
            raise LanguageMissing("no ruby here")

    engine = Engine(
        Settings(fallback_allow=("other",)),
        backends={"first": Lacks(name="first"), "other": FakeBackend(name="other")},
    )
    result = engine.run(Request(code=""), backend="first")
    assert result.success
    assert any("no ruby here" in warning for warning in result.warnings)


def test_a_language_that_changes_while_its_runner_lives_is_not_remembered_as_it_was(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    ready = runner('[python]\nlimits = { memory = "512M" }\n')
    code = "import socket; socket.socket(); 'open'"
    assert ready.execute(code).value == "open"
    (tmp_path / "languages.toml").write_text('[python]\nseccomp = "strict"\n')
    assert ready.execute(code).value is None
