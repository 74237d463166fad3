"""Records are to their users what frozen dataclasses with slots are."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any, ClassVar

import pytest

from belljar.records import field, names, plain, positional_record, record, replace


@record
class Point:
    """A place."""

    kind: ClassVar[str] = "plane"
    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)

    def sum(self) -> int:
        return self.x + self.y


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standard:
    """What `Point` is to be like."""

    x: int
    y: int = 2
    tags: list[str] = dataclasses.field(default_factory=list)


@positional_record
class Pair:
    left: int
    right: int = 5


def test_fields_have_values_and_defaults_and_every_record_its_own_list() -> None:
    one, other = Point(x=1), Point(x=1, y=3)
    one.tags.append("a")
    assert (one.x, one.y, other.y, other.tags, one.sum(), Point.kind) == (1, 2, 3, [], 3, "plane")
    assert Point.__doc__ == "A place."


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Point(),  # type: ignore[call-arg]
            "x",
        ),
        (lambda: Point(x=1, z=2), "z"),  # type: ignore[call-arg]
        (lambda: Point(1), "positional"),  # type: ignore[call-arg]
        (lambda: Pair(1, 2, 3), "positional"),  # type: ignore[call-arg]
        (lambda: Pair(1, left=2), "left"),  # type: ignore[misc]
        (lambda: replace(Point(x=1), z=2), "z"),
    ],
)
def test_wrong_arguments_are_type_errors_that_name_them(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make()


def test_nothing_of_a_record_can_be_changed_or_added() -> None:
    point = Point(x=1)
    for name in ("x", "z"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(point, name, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x
    assert not hasattr(point, "__dict__")


def test_equal_records_are_equal_and_hash_alike() -> None:
    assert Point(x=1) == Point(x=1) != Point(x=2)
    assert Pair(1) == Pair(1, 5) and hash(Pair(1)) == hash(Pair(left=1))
    assert Pair(1) != Point(x=1)  # type: ignore[comparison-overlap]


def test_replace_copies_and_leaves_the_old_one() -> None:
    old = Point(x=1, tags=["a"])
    new = replace(old, y=9)
    assert (new.x, new.y, new.tags is old.tags, old.y) == (1, 9, True, 2)


def test_the_standard_tools_take_it_for_a_dataclass() -> None:
    point = Point(x=1, tags=["a"])
    assert dataclasses.is_dataclass(point)
    assert dataclasses.asdict(point) == {"x": 1, "y": 2, "tags": ["a"]} == plain(point)
    assert dataclasses.replace(point, y=3) == Point(x=1, y=3, tags=["a"])
    assert [each.name for each in dataclasses.fields(Point)] == list(names(Point))
    assert repr(point) == repr(Standard(x=1, tags=["a"])).replace("Standard", "Point")
    assert copy.copy(point) == copy.deepcopy(point) == point
    assert pickle.loads(pickle.dumps(point)) == point  # noqa: S301


def test_a_dataclass_can_be_made_of_it() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Named(Point):
        name: str = "n"

    assert Named(x=1).y == 2


def test_a_match_statement_knows_positional_fields() -> None:
    match Pair(1, 2):
        case Pair(left, right):
            assert (left, right) == (1, 2)


def test_a_class_that_is_used_often_stays_what_it_was() -> None:
    """Then it gets a constructor of its own, which must not differ in anything but speed."""

    @record
    class Often:
        x: int
        y: int = 2
        tags: list[str] = field(default_factory=list)

    @positional_record
    class Both:
        left: int
        right: int = 5

    first = Often.__init__
    many = [Often(x=number) for number in range(50)]
    pairs = [Both(number) for number in range(50)]
    assert Often.__init__ is not first
    assert [each.x for each in many] == list(range(50)) == [each.left for each in pairs]
    assert {each.y for each in many} == {2}
    many[-1].tags.append("own")
    assert many[-2].tags == [] == Often(x=1).tags
    assert Often(x=1, y=3, tags=["a"]) == replace(Often(x=1, tags=["a"]), y=3)
    assert Both(1, right=2) == Both(1, 2) and hash(Both(1)) == hash(Both(1, 5))
    wrong: tuple[tuple[Any, str], ...] = (
        (lambda: Often(), "x"),  # type: ignore[call-arg]
        (lambda: Often(x=1, z=2), "z"),  # type: ignore[call-arg]
        (lambda: Often(1), "positional"),  # type: ignore[call-arg]
        (lambda: Both(1, 2, 3), "positional"),  # type: ignore[call-arg]
    )
    for make, words in wrong:
        with pytest.raises(TypeError, match=words):
            make()


def test_the_path_of_a_run_does_not_import_dataclasses() -> None:
    """They took half of a command's start."""
    program = (
        "import sys, belljar.engine, belljar.backends.jail; print('dataclasses' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
