"""The command line over a scripted backend: flags in, bytes and exit codes out."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar.backends.base import Availability, best_effort
from belljar.cli import COMMANDS, arguments, main, running
from belljar.config import Settings
from belljar.engine import Engine
from belljar.errors import BackendFailed, CommandNotFound
from belljar.policy import Ceiling, Isolation
from belljar.testing import FakeBackend
from belljar.types import Change, File, GuestError, KillProof, Request, Result, Status

Use = Callable[..., FakeBackend]


@pytest.fixture(autouse=True)
def no_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty standard input, and a current directory of the test's own."""
    null = os.open(os.devnull, os.O_RDONLY)
    saved = os.dup(0)
    os.dup2(null, 0)
    monkeypatch.chdir(tmp_path)
    yield
    os.dup2(saved, 0)
    os.close(saved)
    os.close(null)


class Lasting(FakeBackend):
    """Survives the end of a command, so that a test can run several."""

    def close(self) -> None:
        return


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Make the command line run on a FakeBackend with the given script."""

    def install(*args: Any, settings: Settings | None = None, **kwargs: Any) -> FakeBackend:
        fake = Lasting(*args, **kwargs)

        def open_engine(args: argparse.Namespace, **overrides: Any) -> Engine:
            given = {name: value for name, value in overrides.items() if value is not None}
            return Engine(replace(settings or Settings(), **given), backends={"fake": fake})

        monkeypatch.setattr(running, "open_engine", open_engine)
        return fake

    return install


def answer(**fields: Any) -> Callable[[Request], Result]:
    return lambda request: Result(**{"status": Status.SUCCESS, "exit_code": 0, **fields})


# What reaches the engine


def test_code_args_and_options_reach_the_request(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = use()
    fake.takes_images = True
    (tmp_path / "in.csv").write_bytes(b"1,2")
    (tmp_path / "b.txt").write_bytes(b"B")
    (tmp_path / "input").write_bytes(b"\xff\0raw")
    monkeypatch.setenv("PASSED", "through")
    words = (
        "run -c print(1) one --arg two --env A=b=c --env PASSED --file in.csv --file b.txt:d/b "
        "--out *.png --python python3 --image img --stdin input --mount .:/data:ro"
    )
    assert main([*words.split(), "three", "--", "--four", "--", "five"]) == 0
    (request,) = fake.requests
    assert request.code == "print(1)"
    assert request.args == ("two", "one", "three", "--four", "--", "five")
    assert request.env == {"A": "b=c", "PASSED": "through"}
    assert request.files == {"in.csv": b"1,2", "d/b": b"B"}
    assert request.outputs == ("*.png",)
    assert (request.python, request.image, request.stdin) == ("python3", "img", b"\xff\0raw")
    (mount,) = request.mounts
    assert (mount.src, mount.dst, mount.mode) == (os.path.realpath("."), "/data", "ro")


def test_limits_and_rights_reach_the_policy(use: Use) -> None:
    fake = use()
    words = (
        "run -c 1 --level strict --timeout 2s --memory 32M --cpus 0.5 --processes 3 --disk 2M "
        "--output 1K --value 2K --displays 3K --open-files 29 --fuel 5 "
        "--network a.org,b.org:443 --modules any --min-isolation jail"
    )
    assert main(words.split()) == 0
    rules = fake.plans[0].policy
    limits = rules.limits
    assert (limits.timeout, limits.memory, limits.cpus) == (2, 32 << 20, 0.5)
    assert (limits.processes, limits.disk, limits.output) == (3, 2 << 20, 1024)
    assert (limits.value, limits.displays) == (2048, 3072)
    assert (limits.open_files, limits.fuel) == (29, 5)
    assert rules.network.allow == ("a.org", "b.org:443")
    assert (rules.level, rules.modules.allow) == ("strict", None)


@pytest.mark.parametrize(
    ("name", "language"),
    [("a.py", "python"), ("a.js", "javascript"), ("a.sh", "bash"), ("noext", "python")],
)
def test_the_language_is_told_by_the_suffix(use: Use, name: str, language: str) -> None:
    fake = use()
    Path(name).write_text("1")
    assert main(["run", name]) == 0
    assert main(["run", name, "--lang", "bash"]) == 0
    assert [request.language for request in fake.requests] == [language, "bash"]


def test_a_file_with_a_byte_order_mark_is_read_without_it(use: Use) -> None:
    fake = use()
    Path("a.py").write_bytes(b"\xef\xbb\xbfprint(1)\r\n")
    assert main(["run", "a.py"]) == 0
    assert fake.requests[0].code == "print(1)\r\n"


def test_exec_takes_its_command_after_the_dashes(use: Use) -> None:
    fake = use()
    assert main(["exec", "--timeout", "5", "--", "ls", "-la", "--json"]) == 0
    assert main(["exec", "true"]) == 0
    assert [request.command for request in fake.requests] == [("ls", "-la", "--json"), ("true",)]
    assert fake.requests[0].code is None


# What comes back


def test_the_guests_bytes_reach_the_right_stream(
    use: Use, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = bytes(range(256)) * 3
    use(
        output=lambda request: [("stdout", out), ("stderr", b"\x1b[31merr\r\n"), ("stdout", b"end")]
    )
    assert main(["run", "-c", "1"]) == 0
    captured = capfdbinary.readouterr()
    assert captured.out == out + b"end"
    assert captured.err == b"\x1b[31merr\r\n"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, 0, []),
        ({"status": Status.ERROR, "exit_code": 3}, 3, []),
        ({"status": Status.ERROR, "exit_code": 256}, 1, []),
        ({"status": Status.ERROR, "exit_code": None, "signal": 11}, 139, ["segmentation fault"]),
        ({"status": Status.TIMEOUT, "signal": 9}, 124, ["timeout", "30 s", "--timeout 60s"]),
        ({"status": Status.OOM, "exit_code": 1}, 137, ["512 MiB", "--memory 1G"]),
        ({"status": Status.KILLED, "signal": 9}, 137, ["killed"]),
        ({"status": Status.FUEL_EXHAUSTED}, 137, ["fuel", "--fuel 10000000"]),
        (
            {"status": Status.LIMIT, "limit_hit": "pids", "signal": 9, "exit_code": None},
            137,
            ["pids", "50", "--processes 100"],
        ),
        (
            {"status": Status.LIMIT, "limit_hit": "fds", "exit_code": 1},
            1,
            ["fds", "256", "--open-files 512"],
        ),
        (
            {"status": Status.LIMIT, "limit_hit": "disk", "exit_code": 1},
            1,
            ["disk", "1 GiB", "--disk 2G"],
        ),
        (
            {
                "status": Status.REFUSED,
                "exit_code": None,
                "error": GuestError(type="ImportRefused", message="line 1: os"),
            },
            126,
            ["refused", "line 1: os", "--modules"],
        ),
        (
            {
                "status": Status.TIMEOUT,
                "signal": 9,
                "kill": KillProof(reason="cpu", survivors=0, seconds=0.1),
            },
            124,
            ["--cpus"],
        ),
    ],
)
def test_every_end_has_its_exit_code_and_its_words(
    use: Use,
    capfd: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    code: int,
    words: list[str],
) -> None:
    use(answer(**fields))
    fuel = ["--fuel", "5e6"] if fields.get("status") is Status.FUEL_EXHAUSTED else []
    assert main(["run", "-c", "1", *fuel]) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err
    if not words:
        assert captured.err == ""
    use(answer(**fields))
    assert main(["run", "-c", "1", "--json", *fuel]) == code
    captured = capfd.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["status"] == fields.get("status", Status.SUCCESS)


def test_a_limit_at_the_operators_ceiling_is_not_advised_away(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    use(answer(status=Status.TIMEOUT, signal=9), settings=Settings(ceiling=Ceiling(timeout=5)))
    assert main(["run", "-c", "1"]) == 124
    err = capfd.readouterr().err
    assert "ceiling.timeout" in err
    assert "--timeout" not in err


def test_json_is_one_strict_object_whatever_the_guest_says(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    use(
        answer(value={"x": 1}, error=GuestError(type="E", message="\ud800\x1b")),
        output=lambda request: [("stdout", b"\xff\x1b[2J"), ("stderr", "é\u202e".encode())],
    )
    main(["run", "-c", "1", "--json"])
    out = capfd.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    parsed = json.loads(out, parse_constant=pytest.fail)
    assert parsed["value"] == {"x": 1}
    assert parsed["stderr"] == "é\u202e"


def test_warnings_are_said_unless_quiet(use: Use, capfd: pytest.CaptureFixture[str]) -> None:
    use(settings=Settings(ceiling=Ceiling(timeout=5)))
    main(["run", "-c", "1", "--timeout", "60"])
    assert "lowered" in capfd.readouterr().err
    main(["run", "-c", "1", "--timeout", "60", "--quiet"])
    assert capfd.readouterr().err == ""


def test_outputs_are_written_here_or_where_told(
    use: Use, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {"a.csv": File(path="a.csv", size=1, data=b"A")}
    use(answer(files=files))
    assert main(["run", "-c", "1", "--out", "*.csv"]) == 0
    assert (tmp_path / "a.csv").read_bytes() == b"A"
    assert main(["run", "-c", "1", "--out", "*.csv"]) == 125
    assert "--force" in capfd.readouterr().err
    assert main(["run", "-c", "1", "--out", "*.csv", "--force"]) == 0
    assert main(["run", "-c", "1", "--out", "*.csv", "--out-dir", "deep/er"]) == 0
    assert (tmp_path / "deep" / "er" / "a.csv").read_bytes() == b"A"


def test_outputs_to_writes_below_a_directory_and_json_says_where(
    use: Use, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change = Change(path="a.csv", kind="created", size=1, sha256="00")
    use(answer(files={"a.csv": File(path="a.csv", size=1, data=b"A")}, changes=(change,)))
    words = ["run", "-c", "1", "--outputs-to", "o", "--outputs-each", "1M", "--json"]
    assert main(words) == 0
    shown = json.loads(capfd.readouterr().out)
    place = tmp_path / "o" / "a.csv"
    assert place.read_bytes() == b"A"
    assert (shown["files"]["a.csv"]["data"], shown["files"]["a.csv"]["saved"]) == (None, str(place))
    assert shown["changes"] == [
        {"path": "a.csv", "kind": "created", "size": 1, "sha256": "00", "mime_type": "text/csv"}
    ]
    assert main(words) == 125  # it is there already, and is not replaced
    assert "a.csv" in str(json.loads(capfd.readouterr().out)["warnings"])


def test_a_directory_is_copied_in(use: Use) -> None:
    fake = use()
    (Path("proj") / "sub").mkdir(parents=True)
    (Path("proj") / "a").write_text("A")
    (Path("proj") / "sub" / "b").write_text("B")
    assert main(["run", "-c", "1", "--file", "proj/", "--file", "proj/sub:s"]) == 0
    assert fake.requests[0].files == {"proj/a": b"A", "proj/sub/b": b"B", "s/b": b"B"}


def test_json_writes_files_only_to_a_directory_that_was_named(
    use: Use, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    use(answer(files={"a": File(path="a", size=1, data=b"A")}))
    assert main(["run", "-c", "1", "--json", "--out", "*"]) == 0
    assert json.loads(capfd.readouterr().out)["files"]["a"]["data"] == "QQ=="
    assert not (tmp_path / "a").exists()
    assert main(["run", "-c", "1", "--json", "--out", "*", "--out-dir", "."]) == 0
    assert (tmp_path / "a").exists()


# Failures of ours


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("run", 125, "-c CODE"),
        ("run nowhere.py", 125, "nowhere.py"),
        ("run .", 125, "cannot read"),
        ("run job.rb", 127, "--lang"),
        ("run -c 1 --lang cobol", 127, "cobol"),
        ("run -c 1 --timeout soon", 125, "soon"),
        ("run -c 1 --level lax", 125, "lax"),
        ("run -c 1 --backend missing", 127, "missing"),
        ("run -c 1 --min-isolation vm", 126, "min_isolation"),
        ("run -c 1 --min-isolation brick", 125, "brick"),
        ("run -c 1 --env", 125, "--env"),
        ("run -c 1 --env =x", 125, "NAME=VALUE"),
        ("run -c 1 --env BELLJAR_TEST_UNSET", 125, "BELLJAR_TEST_UNSET"),
        ("run -c 1 --file nowhere", 125, "nowhere"),
        ("run -c 1 --file a --file a", 125, "two files"),
        ("run -c 1 --file a:../up", 125, "leaves"),
        ("run -c 1 --file nothing:d", 125, "nothing"),
        ("run -c 1 --outputs-to a", 125, "outputs_to"),
        ("run -c 1 --outputs-to o --outputs-each big", 125, "outputs_each"),
        ("run -c 1 --mount nowhere:/x", 125, "nowhere"),
        ("run -c 1 --mount a:/../x", 125, ".."),
        ("run -c 1 --network http://x/", 125, "network"),
        ("run -c 1 --modules a-b", 125, "modules"),
        ("run -c 1 --stdin nowhere", 125, "nowhere"),
        ("run - --stdin -", 125, "--stdin"),
        ("run -c 1 --unknown", 125, "after --"),
        ("run -c 1 --time 5", 125, "--time"),
        ("run latin.py", 125, "UTF-8"),
        ("exec", 125, "belljar exec -- CMD"),
        ("exec --lang x -- ls", 125, "--lang"),
        ("launch", 125, "belljar --help"),
        ("rnu", 125, "belljar run"),
        ("a", 125, "belljar run a"),
        ("-c 1", 125, "belljar run -c"),
        ("settings surplus", 125, "surplus"),
        ("settings --config nowhere", 125, "nowhere"),
    ],
)
def test_a_wrong_command_line_is_told_what_to_do(
    use: Use, capfd: pytest.CaptureFixture[str], words: str, code: int, part: str
) -> None:
    fake = use()
    Path("a").write_text("x")
    Path("d").mkdir()
    Path("latin.py").write_bytes(b"\xff")
    Path("job.rb").write_text("puts 1")
    assert main(words.split()) == code
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("belljar: ")
    assert part in captured.err
    assert "Traceback" not in captured.err
    ours, _, rest = words.partition(" -- ")
    assert main([*ours.split(), "--json", *(["--", rest] if rest else [])]) == code
    captured = capfd.readouterr()
    assert captured.err == ""
    assert set(json.loads(captured.out)["error"]) >= {"code", "message", "fix", "retryable"}
    assert fake.requests == []


def test_json_after_the_dashes_is_the_guests(use: Use, capfd: pytest.CaptureFixture[str]) -> None:
    use()
    assert main(["exec", "--unknown", "--", "ls", "--json"]) == 125
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "--unknown" in captured.err


def raising(error: Exception) -> Callable[[Request], Result]:
    def respond(request: Request) -> Result:
        raise error

    return respond


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendFailed("it broke", fix="mend it"), 125),
        (CommandNotFound("command", "'ls' is not installed"), 127),
        (ZeroDivisionError("a bug"), 125),
    ],
)
def test_a_failing_sandbox_keeps_what_the_guest_said_and_never_exits_as_the_guest(
    use: Use, capfd: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    use(raising(error), output=lambda request: [("stdout", b"before")])
    assert main(["run", "-c", "1"]) == code
    captured = capfd.readouterr()
    assert captured.out == "before"
    assert str(error.args[0]) in captured.err
    assert main(["run", "-c", "1", "--json"]) == code
    assert json.loads(capfd.readouterr().out)["error"]["message"]


def test_a_message_cannot_carry_escape_sequences(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    use(raising(BackendFailed("said \x1b[2J\u202e", fix="\x9b")))
    main(["run", "-c", "1"])
    err = capfd.readouterr().err
    assert "^[[2J\\u202e" in err
    assert "\x1b" not in err
    assert "\x9b" not in err


# The other commands


def test_explain_shows_the_policy_and_starts_nothing(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = use(enforcement={"disk": best_effort("a watchdog")})
    words = ["run", "-c", "1", "--explain", "--timeout", "7", "--network", "a.org"]
    assert main(words) == 0
    text = capfd.readouterr().out
    for part in ("fake", "jail", "7 s", "512 MiB", "a.org", "best_effort", "a watchdog"):
        assert part in text
    assert main([*words, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["policy"]["limits"]["timeout"] == 7
    assert told["enforcement"]["disk"] == {"state": "best_effort", "by": "a watchdog"}
    assert fake.requests == []


def test_explain_of_what_cannot_be_held_names_the_fields(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    use(isolation=Isolation.PROCESS)
    assert main(["run", "-c", "1", "--level", "strict", "--explain", "--json"]) == 126
    assert json.loads(capfd.readouterr().out)["error"]["fields"] == ["min_isolation"]


def test_backends_lists_each_with_what_it_lacks(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    use(availability=Availability(available=False, reason="no daemon", fix="start it"))
    assert main(["backends"]) == 0
    text = capfd.readouterr().out
    for part in ("fake", "jail", "no daemon", "start it"):
        assert part in text
    assert main(["backends", "--json"]) == 0
    (entry,) = json.loads(capfd.readouterr().out)["backends"]
    assert (entry["name"], entry["available"], entry["fix"]) == ("fake", False, "start it")


def test_doctor_succeeds_only_if_some_backend_holds_the_level(
    use: Use, capfd: pytest.CaptureFixture[str]
) -> None:
    use(isolation=Isolation.PROCESS)
    assert main(["doctor"]) == 0
    assert "held here by fake" in capfd.readouterr().out
    assert main(["doctor", "--level", "strict"]) == 1
    assert "no backend" in capfd.readouterr().out
    assert main(["doctor", "--level", "strict", "--json"]) == 1
    told = json.loads(capfd.readouterr().out)
    assert told["ok"] is False
    assert told["backends"][0]["lacking"] == ["min_isolation"]
    assert main(["doctor", "--verbose"]) == 0
    assert "the script" in capfd.readouterr().out


def test_settings_show_value_and_source(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELLJAR_TIMEOUT", "5s")
    assert main(["settings"]) == 0
    (line,) = (
        line for line in capfd.readouterr().out.splitlines() if line.startswith("defaults.timeout")
    )
    assert line.split() == ["defaults.timeout", "5", "env", "BELLJAR_TIMEOUT", "BELLJAR_TIMEOUT"]
    assert main(["settings", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["settings"]["defaults.timeout"] == 5
    assert told["sources"]["defaults.timeout"] == "env BELLJAR_TIMEOUT"


# Help


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from belljar.cli import main; main(['--help']); "
        "print(sorted(m for m in sys.modules if m.startswith('belljar') or m == 'argparse'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(belljar.__file__).parent.parent)},
    )
    *text, modules = done.stdout.splitlines()
    for name, command in COMMANDS.items():
        assert any(line.split()[:1] == [name] and command.summary in line for line in text)
    assert modules == str(["belljar", "belljar._version", "belljar.cli"])


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "selftest"])
def test_every_command_teaches_with_examples(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capfd.readouterr().out
    assert f"usage: belljar {name}" in text
    assert "examples:" in text
    assert "--json" in text
    assert main(["help", name]) == 0
    assert capfd.readouterr().out == text


@pytest.mark.parametrize("told", ["60", "200", "0", "wide", ""])
def test_help_is_as_wide_as_the_terminal(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", told)
    assert arguments._columns() == shutil.get_terminal_size().columns


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"belljar {belljar.__version__}\n"
    assert main(["--version", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"version": belljar.__version__}
