"""`belljar` with a person in front of it: summary, colours, Ctrl-C, and guests that know tricks."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from real_command import Terminal

Open = Callable[..., Terminal]
TRICKS = r"print('\x1b]0;owned\x07\x1b[2J', end=''); print('safe\rEVIL\u202e\x9b31m')"


def test_a_run_is_framed_and_concluded(terminal: Open) -> None:
    screen = terminal("run", "-c", "print('hello')")
    assert screen.end() == 0
    shown = screen.shown.decode()
    before, _, after = shown.partition("hello\n")
    for part in ("isolation", "level standard", "time 30 s", "memory 512 MiB", "network off"):
        assert part in before
    for part in ("success", "cpu", "memory peak", "exit 0"):
        assert part in after


def test_quiet_shows_the_program_alone(terminal: Open) -> None:
    screen = terminal("run", "-q", "-c", "print('hello')")
    assert screen.end() == 0
    assert screen.shown == b"hello\n"


def test_the_value_is_shown(terminal: Open) -> None:
    screen = terminal("run", "-c", "6 * 7")
    screen.end()
    assert "value: 42" in screen.shown.decode()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("10**6000", "<an integer of 19932 bits>"),
        ("[1, {'b': -10**6000, 'a': 2}]", "[1, {'b': <an integer of 19932 bits>, 'a': 2}]"),
        ("float('nan')", "nan"),
        ("'\\ud800 half'", "\ufffd half"),
        ("'\\x1b[2J'", "'\\x1b[2J'"),
        ("x = 1\nfor _ in range(55): x = [x]\nx", "[[[[[[[...]]]]]]]"),
    ],
    ids=["large", "large inside", "nan", "surrogate", "escape", "deep"],
)
def test_no_value_keeps_the_command_from_ending_well(
    terminal: Open, value: str, shown: str
) -> None:
    screen = terminal("run", "-c", value)
    assert screen.end() == 0
    assert shown in screen.shown.decode()
    assert "Traceback" not in screen.shown.decode()
    screen = terminal("run", "--json", "-c", value)
    assert screen.end() == 0
    assert json.loads(screen.shown)["status"] == "success"


def test_escape_sequences_are_shown_not_obeyed(terminal: Open) -> None:
    screen = terminal("run", "-q", "-c", TRICKS)
    assert screen.end() == 0
    assert screen.shown == b"^[]0;owned^G^[[2Jsafe^MEVIL\\u202e\\x9b31m\n"


def test_raw_passes_them_on(terminal: Open) -> None:
    screen = terminal("run", "-q", "--raw", "-c", TRICKS)
    assert screen.end() == 0
    assert screen.shown == "\x1b]0;owned\x07\x1b[2Jsafe\rEVIL\u202e\x9b31m\n".encode()


def test_stderr_is_made_harmless_too(terminal: Open) -> None:
    screen = terminal("run", "-q", "-c", r"raise ValueError('\x1b[2J')")
    assert screen.end() == 1
    assert b"\x1b" not in screen.shown
    assert b"^[[2J" in screen.shown or b"\\x1b" in screen.shown


def test_a_guests_value_and_file_names_are_harmless(terminal: Open) -> None:
    code = r"open('a\x1b[2Jb', 'w').write('x'); '\x1b[2J'"
    screen = terminal("run", "-c", code, "--out", "*", NO_COLOR="1")
    assert screen.end() == 0
    assert b"\x1b" not in screen.shown
    assert b"wrote a^[[2Jb" in screen.shown


def test_a_character_cut_by_a_write_is_whole_on_the_screen(terminal: Open) -> None:
    code = (
        "import os, time\nfor byte in 'é🎉'.encode():\n"
        "    os.write(1, bytes([byte])); time.sleep(0.05)"
    )
    screen = terminal("run", "-q", "-c", code)
    screen.end()
    assert screen.shown.decode().strip() == "é🎉"


def test_the_conclusion_starts_on_a_line_of_its_own(terminal: Open) -> None:
    screen = terminal("run", "-c", "print('no newline', end='')", NO_COLOR="1")
    screen.end()
    assert "no newline\n──" in screen.shown.decode()


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_obey_no_color(terminal: Open, extra: dict[str, str], coloured: bool) -> None:
    screen = terminal("run", "-c", "1", **extra)
    screen.end()
    assert (b"\x1b[" in screen.shown) is coloured
    screen = terminal("doctor", **extra)
    screen.end()
    assert (b"\x1b[" in screen.shown) is coloured


def test_a_terminal_without_utf8_gets_ascii(terminal: Open) -> None:
    words = ("run", "-c", "print('é')")
    screen = terminal(*words, LANG="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="POSIX")
    assert screen.end() == 0
    assert screen.shown.isascii()
    assert b"\\xe9" in screen.shown


def test_a_person_at_the_terminal_is_not_the_programs_input(terminal: Open) -> None:
    screen = terminal("run", "-q", "-c", "import sys; print(repr(sys.stdin.read()))")
    assert screen.end() == 0
    assert screen.shown == b"''\n"


def test_ctrl_c_ends_the_guest_and_says_so(terminal: Open) -> None:
    code = "import time\nprint('up', flush=True)\nwhile True: time.sleep(1)"
    screen = terminal("run", "-c", code)
    screen.read_until(b"up\n")
    screen.press(b"\x03")
    assert screen.end() == 130
    assert b"cancelled" in screen.shown
    assert b"Traceback" not in screen.shown


def test_a_limit_that_was_hit_is_named_with_its_flag(terminal: Open) -> None:
    screen = terminal("run", "-c", "while True: pass", "--timeout", "1", NO_COLOR="1")
    assert screen.end() == 124
    assert b"timeout: the program ran longer than 1 s" in screen.shown
    assert b"fix: allow more with --timeout 2s" in screen.shown


def test_json_on_a_terminal_is_json_alone(terminal: Open) -> None:
    import json

    screen = terminal("run", "--json", "-c", TRICKS)
    assert screen.end() == 0
    assert b"\x1b" not in screen.shown
    assert json.loads(screen.shown)["stdout"].startswith("\x1b]0;owned")
