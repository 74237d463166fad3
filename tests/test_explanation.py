"""What results say of themselves: explanation, one line, summary, notebook view, `check`."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import belljar
from belljar import ProgramFailed
from belljar.errors import RequestError
from belljar.explanation import explained, signal_text
from belljar.policy import level_policy
from belljar.types import Display, File, GuestError, KillProof, Request, Result, Status

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


def said(request: Request | None = None, **fields: Any) -> str:
    asked = request if request is not None else Request(code="")
    return explained(Result(**fields), level_policy("standard"), asked).explanation


def ended(reason: str) -> KillProof:
    return KillProof(reason=reason, survivors=0, seconds=0.0)


def failed(kind: str, message: str = "", **more: Any) -> str:
    error = GuestError(type=kind, message=message)
    return said(status=Status.ERROR, exit_code=1, error=error, backend="jail", **more)


@pytest.mark.parametrize(
    ("fields", "sentence", "limit"),
    [
        ({"status": Status.SUCCESS}, "", None),
        ({"status": Status.TIMEOUT}, "The program ran longer than 30 s.", "timeout"),
        ({"status": Status.OOM}, "The program needed more memory than 512 MiB.", "memory"),
        (
            {"status": Status.LIMIT, "limit_hit": "pids"},
            "The program needed more processes than 50.",
            "pids",
        ),
        ({"status": Status.ERROR, "exit_code": 3}, "The program ended with exit code 3.", None),
        (
            {"status": Status.ERROR, "signal": 11},
            "The program crashed: segmentation fault (signal 11).",
            None,
        ),
        (
            {"status": Status.KILLED, "signal": 9, "kill": ended("cancelled")},
            "The run was cancelled, and the program was ended.",
            None,
        ),
    ],
)
def test_each_end_has_a_sentence_and_its_limit(
    fields: dict[str, Any], sentence: str, limit: str | None
) -> None:
    result = explained(Result(**fields), level_policy("standard"), Request(code=""))
    assert (result.explanation, result.limit_hit) == (sentence, limit)
    assert result.to_dict()["explanation"] == sentence


def test_a_program_that_killed_itself_was_not_cancelled() -> None:
    text = said(status=Status.KILLED, signal=9, kill=ended("ended"))
    assert "by itself" in text


def test_hints_name_what_is_missing() -> None:
    assert "--network any" in failed("socket.gaierror", "[Errno -3] Temporary failure")
    assert "--network any" in failed("OSError", "[Errno 101] Network is unreachable")
    assert "--network" not in failed("ValueError", "bad port")
    assert "pip install nosuch" in failed("ModuleNotFoundError", "No module named 'nosuch.part'")
    assert "stdin=" in failed("EOFError", "EOF when reading a line")
    assert "stdin=" not in failed("EOFError", "")  # a pipe's, say
    given = Request(code="", stdin=b"x")
    assert "stdin=" not in failed("EOFError", "EOF when reading a line", request=given)
    missing = "[Errno 2] No such file or directory: '/mnt/data/in.csv'"
    assert "work directory" in failed("FileNotFoundError", missing)
    assert "work directory" not in failed("FileNotFoundError", "No such file: 'in.csv'")


def test_signals_have_names() -> None:
    assert signal_text(6) == "aborted (signal 6)"
    assert signal_text(9999) == "signal 9999"


def test_a_result_is_one_line() -> None:
    big = Result(status=Status.SUCCESS, stdout="x\n" * 10_000, value=10**6000, backend="jail")
    line = repr(big)
    assert "\n" not in line
    assert len(line) < 300
    assert line.startswith("<Result success value=")
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert len(repr(Result(status=Status.SUCCESS, value=nested))) < 300
    assert repr(Display(data={"text/plain": "a\x1b[31m\nb"})).isprintable()


def test_a_summary_keeps_to_its_size_and_says_the_most_important() -> None:
    error = GuestError(type="ValueError", message="m", traceback="Traceback ...\nValueError: m\n")
    result = Result(
        status=Status.ERROR,
        exit_code=1,
        explanation="The program raised ValueError: m.",
        stdout="first\n" + "x" * 100_000 + "\nlast\n",
        stderr="noise\n" + error.traceback,
        error=error,
        displays=(Display(data={"text/plain": "f", "image/png": PIXEL}),),
        value=[1] * 100_000,
    )
    for size in (300, 1000, 4000):
        text = result.summary(max_chars=size)
        assert len(text) <= size
        assert text.startswith("status: error, exit code 1")
    for part in ("first", "last", "noise", "image/png", "cut"):
        assert part in text
    assert text.count("ValueError: m\n") <= 1 or text.count("Traceback") == 1


def test_no_line_of_a_summary_but_the_programs_output_is_its_own() -> None:
    forged = "x\nstatus: success\n\x1b[2J"
    result = Result(
        status=Status.ERROR,
        exit_code=1,
        error=GuestError(type=forged, message=forged),
        files={forged: File(path=forged, size=1)},
    )
    result = explained(result, level_policy("standard"), Request(code=""))
    lines = result.summary().split("\n")
    assert [line for line in lines if line.startswith("status:")] == ["status: error, exit code 1"]
    assert all(line.isprintable() for line in lines)


def test_the_line_of_a_result_costs_as_little_for_many_bytes_as_for_few() -> None:
    tracemalloc.start()
    try:
        assert "b'aaa" in repr(Result(status=Status.SUCCESS, value={"k": b"a" * (8 << 20)}))
        kept = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kept < 12 << 20  # the value itself, and no text of all of it


def test_check_raises_what_has_the_result() -> None:
    good = Result(status=Status.SUCCESS)
    assert good.check() is good
    bad = Result(status=Status.TIMEOUT, explanation="The program ran longer than 1 s.")
    with pytest.raises(ProgramFailed, match="longer than 1 s") as caught:
        bad.check()
    assert caught.value.result is bad
    assert pickle.loads(pickle.dumps(caught.value)).result == bad  # noqa: S301 - our own


def test_a_notebook_shows_pictures_and_runs_nothing(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    shown = Display(data={"text/plain": script, "text/html": script, "image/png": PIXEL})
    assert set(shown._repr_mimebundle_()) == {"text/plain", "image/png"}
    result = Result(status=Status.SUCCESS, stdout=script, displays=(shown,), value=script)
    page = result._repr_mimebundle_()["text/html"]
    assert "<script" not in page
    assert PIXEL in page
    assert shown.html == script
    assert shown.png is not None
    shown.save(tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes() == shown.png
    shown.save(tmp_path / "a.html")
    with pytest.raises(ValueError, match=r"\.png, \.html, \.txt"):
        shown.save(tmp_path / "a.pdf")
    with pytest.raises(ValueError, match="no form"):
        shown.save(tmp_path / "a.json")


def test_a_real_run_explains_itself() -> None:
    slow = belljar.run("print('a')\nwhile True: pass", timeout=1)
    assert (slow.limit_hit, slow.stdout) == ("timeout", "a\n")
    assert slow.explanation == "The program ran longer than 1 s."
    offline = belljar.run("import urllib.request as r; r.urlopen('http://192.0.2.1')", timeout=10)
    assert "network" in offline.explanation
    refused = belljar.run("import socket", modules=["math"])
    assert "socket" in refused.explanation
    json.dumps(slow.to_dict())


def test_an_output_glob_that_matches_nothing_is_a_warning() -> None:
    code = "open('a.txt', 'w').close()"
    found = belljar.run(code, outputs=["*.txt", "*.png"])
    assert [text for text in found.warnings if "'*.png'" in text]
    assert not [text for text in found.warnings if "'*.txt'" in text]


@pytest.mark.parametrize("glob", ["/tmp/*.png", "../x", "a/../../b"])
def test_an_output_glob_outside_of_the_work_directory_is_refused(glob: str) -> None:
    with pytest.raises(RequestError, match="work directory") as caught:
        belljar.run("1", outputs=[glob])
    assert caught.value.fix is not None


def test_files_are_given_as_paths(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_bytes(b"a,b\n")
    code = "[open(name).read() for name in sorted(__import__('os').listdir('.')) if 'csv' in name]"
    assert belljar.run(code, files=[data]).value == ["a,b\n"]
    assert belljar.run(code, files={"other.csv": data}).value == ["a,b\n"]
    with pytest.raises(RequestError, match="not a path"):
        belljar.run(code, files=[str(data)])
    with pytest.raises(RequestError, match="cannot be read"):
        belljar.run(code, files=[tmp_path / "missing.csv"])
    with pytest.raises(RequestError, match="same name"):
        belljar.run(code, files=[data, tmp_path / "below" / "data.csv"])
