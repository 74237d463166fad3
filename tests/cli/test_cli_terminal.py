"""What a guest prints cannot command a terminal, however it is cut into pieces."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.cli.terminal import Neutraliser, paint, visible

HARMLESS_CONTROLS = {"\n", "\t"}


def neutralised(*chunks: bytes, encoding: str = "utf-8") -> str:
    filter = Neutraliser(encoding)
    shown = b"".join(filter.feed(chunk) for chunk in chunks)
    return (shown + filter.feed(b"", final=True)).decode()


@pytest.mark.parametrize(
    ("guest", "shown"),
    [
        (b"plain text\n\twith tab\n", "plain text\n\twith tab\n"),
        ("grüße 🎉 日本".encode(), "grüße 🎉 日本"),
        (b"\x1b]0;title\x07", "^[]0;title^G"),
        (b"\x1b[2J\x1b[H", "^[[2J^[[H"),
        (b"rm -rf /\rls\n", "rm -rf /^Mls\n"),
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"\r", "^M"),
        (b"secret\b\b\b", "secret^H^H^H"),
        (b"\x7f\x00", "^?^@"),
        ("\x9b31m\x85".encode(), "\\x9b31m\\x85"),
        (b"\x9b31m", "\\x9b31m"),
        ("a\u202eb\u2066c\u200fd\u061c".encode(), "a\\u202eb\\u2066c\\u200fd\\u061c"),
        ("a\u2028b".encode(), "a\\u2028b"),
        (b"\xff\xfe", "\\xff\\xfe"),
        (b"\xe2\x82", "\\xe2\\x82"),
    ],
)
def test_controls_become_visible_and_text_stays(guest: bytes, shown: str) -> None:
    assert neutralised(guest) == shown
    assert neutralised(*(guest[i : i + 1] for i in range(len(guest)))) == shown


@given(st.lists(st.binary()))
def test_no_byte_sequence_gets_a_control_through(chunks: list[bytes]) -> None:
    shown = neutralised(*chunks)
    assert {c for c in shown if unicodedata.category(c) == "Cc"} <= HARMLESS_CONTROLS
    assert not {c for c in shown if unicodedata.bidirectional(c) in _BIDI_CONTROLS}
    assert shown == neutralised(b"".join(chunks))


_BIDI_CONTROLS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


@given(st.text(st.characters(exclude_categories=("C", "Zl", "Zp"))), st.integers(0, 50))
def test_ordinary_text_passes_unchanged_wherever_it_is_cut(text: str, cut: int) -> None:
    data = text.encode()
    assert neutralised(data[:cut], data[cut:]) == text


def test_a_terminal_that_is_not_utf8_gets_ascii_only() -> None:
    assert neutralised("⛛é".encode(), encoding="latin-1") == "\\u26db\\xe9"


def test_messages_of_ours_show_controls_in_the_names_they_quote() -> None:
    assert visible("no file 'a\x1b[2Jb\u202e'") == "no file 'a^[[2Jb\\u202e'"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_need_a_terminal_and_no_objection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert paint("x", "red", Terminal()) == "\033[31mx\033[0m"
    assert paint("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", Terminal()) == "x"
