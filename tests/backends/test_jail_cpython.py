"""Full CPython runs in the jail: its own tests pass there wherever they pass outside.

What differs is listed with its reason in tests/data/cpython_in_jail.toml. A difference that is not
listed fails here. The core of the modules always runs; `--soak` runs all of them.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from belljar.backends import registry

Comparing = Callable[[str], Any]


def _script() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "cpython-in-jail"
    loader = SourceFileLoader("cpython_in_jail", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module


script = _script()
lists = script.lists()


def modules() -> list[Any]:
    marks = {"core": (), "longer": (pytest.mark.soak,), "longest": (pytest.mark.soak,)}
    return [
        pytest.param(name, marks=marks[length], id=name)
        for length in marks
        for name in lists[length]
    ]


@pytest.fixture(scope="module")
def comparing(request: pytest.FixtureRequest) -> Iterator[Comparing]:
    """Compares all the modules that were asked for, two at a time; each test waits for its own."""
    if reason := script.cannot_test():
        pytest.skip(reason)
    if not (found := registry.load("jail").probe()).available:
        pytest.skip(f"{found.reason}; {found.fix}")
    asked: list[str] = [
        str(item.callspec.params["module"])
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.function.__name__
        == test_a_module_passes_inside_wherever_it_passes_outside.__name__
        and not any(mark.name == "skip" for mark in item.iter_markers())
    ]
    with script.runner(), ThreadPoolExecutor(2) as pool:
        started: dict[str, Future[Any]] = {
            name: pool.submit(script.compare, name) for name in asked if script.has(name)
        }
        try:
            yield lambda name: started[name].result()
        finally:
            pool.shutdown(cancel_futures=True)
    script.runner.cache_clear()


@pytest.mark.timeout(700)
@pytest.mark.parametrize("module", modules())
def test_a_module_passes_inside_wherever_it_passes_outside(
    module: str, comparing: Comparing
) -> None:
    if not script.has(module):
        pytest.skip(f"this build of Python has no {module}")
    found = comparing(module)
    assert found.outside.get("passed"), "outside nothing passes: there is nothing to compare with"
    # A listed difference may be none on this very version of Python: the list is for several.
    unlisted = [problem for problem in found.problems if "is no difference" not in problem]
    assert not unlisted, "\n".join(unlisted)


# -- that the comparison can fail ------------------------------------------------------------------

PASSED, SKIPPED, FAILED = ("passed", ""), ("skipped", "no such thing"), ("failed", "EROFS")


def listed(*patterns: str, words: str = "") -> list[Any]:
    return [script.Listed(reason="because", tests={"test_x": list(patterns)}, words=words)]


@pytest.mark.parametrize("worse", [SKIPPED, FAILED, None])
def test_a_test_that_ends_worse_inside_is_a_difference_without_a_reason(worse: Any) -> None:
    inside = {"A.one": PASSED} | ({"A.two": worse} if worse else {})
    (found,) = script.differing("test_x", {"A.one": PASSED, "A.two": PASSED}, inside, [])
    assert (found.test, found.outside, found.reason) == ("A.two", "passed", "")
    assert script.Comparison("test_x", {}, {}, [found]).problems


def test_a_test_that_fails_outside_too_is_no_difference() -> None:
    assert not script.differing("test_x", {"A.one": FAILED}, {"A.one": FAILED}, [])


def test_a_listed_difference_is_no_problem_and_another_one_still_is() -> None:
    outside = {"A.one": PASSED, "A.two": PASSED}
    inside = {"A.one": FAILED, "A.two": FAILED}
    one, two = script.differing("test_x", outside, inside, listed("A.one"))
    assert (one.reason, two.reason) == ("because", "")


def test_a_listed_difference_that_says_something_else_is_a_new_one() -> None:
    (found,) = script.differing(
        "test_x", {"A.one": PASSED}, {"A.one": FAILED}, listed("A.one", words="^EPERM")
    )
    assert found.reason == ""


def test_a_listed_difference_that_is_none_any_more_is_stale() -> None:
    assert script.is_stale("A.*", different=set(), outside={"A.one": PASSED})
    assert not script.is_stale("A.*", different={"A.one"}, outside={"A.one": PASSED})
    assert not script.is_stale("A.*", different=set(), outside={"A.one": SKIPPED})
    assert script.Comparison("test_x", {}, {}, stale=["A.*"]).problems


def test_the_page_is_made_of_what_was_found() -> None:
    assert script.TABLE.read_text() == script.table([str(script.FOUND)]), (
        "scripts/cpython-in-jail --table"
    )


def test_the_page_has_every_module_that_is_compared_and_a_reason_for_every_difference() -> None:
    modules = json.loads(script.FOUND.read_text())["modules"]
    # Which multiprocessing modules a build has differs; those of the last list take minutes.
    lacking = {*lists["core"], *lists["longer"]} - modules.keys()
    assert {name for name in lacking if script.has(name)} == set()
    known = set(script.reasons())
    for name, module in modules.items():
        assert module["outside"].get("passed"), name
        assert {each["reason"] for each in module["differences"]} <= known, name


def test_every_entry_of_the_list_has_a_reason_and_names_tests() -> None:
    for entry in lists["difference"]:
        assert entry["reason"]
        assert all(entry["tests"].values())
