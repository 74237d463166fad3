"""Conformance: what a program returns comes back typed, and what it is given arrives typed."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from ...guest.marked import Member, Opaque
from ...types import Result
from .harness import Backed, Jar

UTC = datetime.timezone.utc  # noqa: UP017 - the expression is also run by guests before 3.11

# An expression, run by the guest, and what it has to be on the host: equal, and of the same type.
VALUES: list[Any] = [
    True,
    0,
    -1,
    2**63,
    -(2**200),
    1.5,
    -0.0,
    1e308,
    "",
    "text\n",
    "日本語 🫙",
    b"",
    b"\x00\xff bytes",
    [],
    [1, "two", 3.0, None],
    (1, (2, 3)),
    {},
    {"a": 1, "nested": {"list": [1, {"deep": b"x"}]}},
    {1: "int key", (2, 3): "tuple key"},
    {1, 2, 3},
    datetime.datetime(2024, 2, 29, 12, 30, 15, 250000),
    datetime.datetime(2024, 2, 29, 12, 30, tzinfo=UTC),
    datetime.date(2024, 2, 29),
    datetime.timedelta(days=1, seconds=2),
]


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return math.copysign(1, left) == math.copysign(1, right) and left == right
    return bool(left == right)


def dropped(result: Result) -> list[str]:
    """The warnings about a value that is not in the result."""
    return [text for text in result.warnings if text.startswith("the value was dropped: ")]


class Values(Backed):
    @pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
    def test_a_value_comes_back_as_it_was(self, jar: Jar, value: Any) -> None:
        result = jar.run(f"import datetime\n{value!r}")
        assert result.success, result
        assert same(result.value, value), result.value
        json.dumps(result.to_dict(), allow_nan=False)

    @pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
    def test_a_variable_goes_in_as_it_is(self, jar: Jar, value: Any) -> None:
        result = jar.run("given", context={"given": value})
        assert result.success, result
        assert same(result.value, value), result.value

    @pytest.mark.parametrize("text", ["inf", "-inf", "nan"])
    def test_floats_that_json_lacks_come_back(self, jar: Jar, text: str) -> None:
        value = jar.run(f"float({text!r})").value
        assert isinstance(value, float)
        assert str(value) == text

    def test_the_last_expression_is_the_value(self, jar: Jar) -> None:
        assert jar.run("x = 20\nprint(x)\nx * 2 + 2").value == 42

    def test_without_a_last_expression_the_variable_result_is_the_value(self, jar: Jar) -> None:
        assert jar.run("result = [1, 2]").value == [1, 2]
        assert jar.run("for result in range(4): pass").value == 3

    def test_the_last_expression_wins_over_result(self, jar: Jar) -> None:
        assert jar.run("result = 1\n2").value == 2

    def test_a_last_expression_that_is_none_is_no_value(self, jar: Jar) -> None:
        result = jar.run("print('said')")
        assert (result.value, result.success, result.stdout) == (None, True, "said\n")

    def test_a_program_that_fails_has_no_value(self, jar: Jar) -> None:
        assert jar.run("result = 5\n1 / 0").value is None

    def test_several_variables_go_in(self, jar: Jar) -> None:
        result = jar.run("a + len(b)", context={"a": 40, "b": [1, 2]})
        assert result.value == 42

    def test_a_value_that_cannot_cross_does_not_fail_the_program(self, jar: Jar) -> None:
        result = jar.run("print('done')\nobject()")
        assert result.success
        assert result.stdout == "done\n"
        json.dumps(result.to_dict(), allow_nan=False)

    def test_a_value_that_contains_itself_does_not_fail_the_program(self, jar: Jar) -> None:
        result = jar.run("x = []\nx.append(x)\nx")
        assert result.success
        json.dumps(result.to_dict(), allow_nan=False)

    def test_a_value_that_lies_about_itself_does_not_fail_the_host(self, jar: Jar) -> None:
        result = jar.run("""
            class Liar(dict):
                def items(self):
                    raise RuntimeError("never mind")
                def __repr__(self):
                    raise RuntimeError("never mind")

            Liar(a=1)
            """)
        json.dumps(result.to_dict(), allow_nan=False)

    def test_a_value_over_its_limit_is_dropped_and_said_so(self, jar: Jar) -> None:
        within = jar.run("'x' * 2000", value="4K", output="1K")
        assert (within.value, within.truncated) == ("x" * 2000, False)
        result = jar.run("'x' * 2000", value="1K")
        assert result.success
        assert result.value is None
        assert result.truncated
        (warning,) = dropped(result)
        assert "str of 2000 characters" in warning
        assert "`value`" in warning

    def test_a_million_numbers_come_back(self, jar: Jar) -> None:
        result = jar.run("list(range(1_000_000))", timeout=60)
        assert result.success, result
        assert result.value == list(range(1_000_000))
        assert (result.truncated, dropped(result)) == (False, [])

    def test_large_binary_data_goes_in_and_comes_back(self, jar: Jar) -> None:
        size = 3_000_000
        given = {"data": bytes(range(256)) * (size // 256), "more": bytearray(b"x" * 100_000)}
        result = jar.run("[given['more'], given['data']]", context={"given": given}, timeout=60)
        assert result.success, result
        assert same(result.value, [given["more"], given["data"]])
        assert result.warnings == () or not dropped(result)

    def test_a_million_floats_come_back(self, jar: Jar) -> None:
        result = jar.run("[i / 7 for i in range(1_000_000)]", timeout=60)
        assert result.success, result
        assert result.value == [i / 7 for i in range(1_000_000)]
        assert (result.truncated, dropped(result)) == (False, [])

    def test_a_value_may_be_larger_than_the_default_limit(self, jar: Jar) -> None:
        room = None if jar.held("memory").state == "absent" else "2G"
        code = "b'x' * 70_000_000"
        result = jar.run(code, value="128M", memory=room, timeout=60)
        assert result.success, result
        assert result.value == b"x" * 70_000_000
        assert dropped(jar.run(code, memory=room, timeout=60))  # the control arm

    def test_objects_of_a_program_come_back_as_marked_plain_data(self, jar: Jar) -> None:
        result = jar.run("""
            import dataclasses, enum, pathlib

            class Colour(enum.Enum):
                RED = (1, 2)

            @dataclasses.dataclass
            class Point:
                x: int
                colour: Colour

            class Own:
                def __repr__(self):
                    return "mine"

            red = Colour.RED
            [pathlib.PurePosixPath("a/b"), pathlib.Path("c"), red, Point(1, red), Own()]
            """)
        assert result.success, result
        pure, path, colour, point, own = result.value
        assert (pure, path) == (PurePosixPath("a/b"), Path("c"))
        assert colour == Member("Colour", "RED", (1, 2))
        assert (point, point.type, point.kind) == ({"x": 1, "colour": colour}, "Point", "dataclass")
        assert (own, own.type, type(own)) == ("mine", "Own", Opaque)
        assert same(
            result.to_dict()["value"][4], {"$": "object", "v": {"type": "Own", "repr": "mine"}}
        )
        (warning,) = [text for text in result.warnings if text.startswith("the value ")]
        assert "of type Own: " in warning
        again = jar.run("given", context={"given": result.value})
        assert again.success, again
        assert [*map(type, again.value)] == [*map(type, result.value)]
        assert again.value == result.value

    def test_a_small_value_that_grows_when_it_is_read_is_dropped(self, jar: Jar) -> None:
        """Every cell of an array of text takes as much as its longest one: 200 KB become 61 MB."""
        pytest.importorskip("numpy")
        jar.needs_own_process()  # it replaces a function of its worker
        code = """
            import sys

            array = {"dtype": "U", "shape": [1000], "items": ["y" * 16000] + [""] * 999}
            forged = {"$": "ndarray", "v": array}
            worker = sys.modules[type(display.__self__).__module__]
            worker.values.encode = lambda *given: [forged]
            0
            """
        within = jar.run(code, value="64M")
        if getattr(within.value, "__len__", int)() != 1:
            pytest.skip("no control arm: the program could not forge what its worker sends")
        result = jar.run(code, value="8M")
        assert result.success
        assert (result.value, result.truncated) == (None, True)
        (warning,) = dropped(result)
        assert "`value`" in warning

    def test_a_dataframe_goes_in_and_comes_back(self, jar: Jar) -> None:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        jar.needs_packages()
        frame = pandas.DataFrame({"n": [1, 2, 3], "name": ["a", None, "ü"], "x": [0.5, 1.5, None]})
        # pandas and Arrow take far more address space than a small program: give them room.
        room = None if jar.held("memory").state == "absent" else "4G"
        result = jar.run("df.assign(m=df.n * 2)", context={"df": frame}, memory=room)
        assert result.success, result
        expected = frame.assign(m=frame.n * 2)
        pandas.testing.assert_frame_equal(result.value, expected, check_dtype=False)
        assert str(result.value.dtypes["m"]) == "int64"
        large = pandas.DataFrame({"n": range(50_000), "x": 0.5, "t": ["a", "b"] * 25_000})
        change = "df.loc[3, ['n', 'x', 't']] = [-1, 2.5, 'c']\ndf"
        result = jar.run(change, context={"df": large}, memory=room, timeout=60)
        assert result.success, result
        assert [*result.value.loc[3]] == [-1, 2.5, "c"]
        assert [*large.loc[3]] == [3, 0.5, "b"]  # the program has its own
        assert result.value.drop(index=3).equals(large.drop(index=3))
        result.value.loc[4, "n"] = -2
        json.dumps(result.to_dict(), allow_nan=False)
