"""Sizes, times and counts: what people write is read exactly, and nonsense names its field."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar import units
from belljar.errors import PolicyError

READERS = [units.size, units.seconds, units.count, units.cores]

ABSURD = [
    0, -1, -0.5, math.nan, math.inf, -math.inf, 10**400, -(10**400), 2**63, True, False,
    "", " ", "x", "-1", "1 X", "nan", "inf", "-inf", "9" * 5000, "1e999", "0", "0x10",
    b"1", [], {}, (), object(), 1j,
]  # fmt: skip


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (1, 1),
        (1048576, 1048576),
        (2**62, 2**62),
        ("1", 1),
        ("1K", 1024),
        ("128M", 128 << 20),
        ("128m", 128 << 20),
        ("128MB", 128 << 20),
        ("128MiB", 128 << 20),
        (" 128 MiB ", 128 << 20),
        ("1.5G", 3 << 29),
        ("2T", 2 << 40),
        ("512b", 512),
    ],
)
def test_sizes_are_read_as_people_write_them(written: object, expected: int) -> None:
    read = units.size("memory", written)
    assert (read, type(read)) == (expected, int)


@pytest.mark.parametrize(
    ("written", "expected"),
    [(1, 1), (1.5, 1.5), ("1.5", 1.5), ("1.5s", 1.5), ("1500ms", 1.5), ("2m", 120), ("1H", 3600)],
)
def test_times_are_read_as_people_write_them(written: object, expected: float) -> None:
    assert units.seconds("timeout", written) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("written", "expected"), [(1, 1), (2.0, 2), ("50", 50), (" 7 ", 7), ("2e6", 2000000)]
)
def test_counts_are_whole_numbers(written: object, expected: int) -> None:
    read = units.count("processes", written)
    assert (read, type(read)) == (expected, int)


@pytest.mark.parametrize("written", [1.5, "1.5", "50 processes", "1K"])
def test_a_fraction_or_a_unit_is_no_count(written: object) -> None:
    with pytest.raises(PolicyError) as refusal:
        units.count("processes", written)
    assert refusal.value.field == "processes"


@pytest.mark.parametrize(("written", "expected"), [(0.5, 0.5), (2, 2), ("0.5", 0.5), ("4", 4)])
def test_cores_may_be_fractions(written: object, expected: float) -> None:
    assert units.cores("cpus", written) == expected


@pytest.mark.parametrize("read", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("absurd", ABSURD, ids=lambda value: repr(value)[:20])
def test_nonsense_is_refused_by_name(read: object, absurd: object) -> None:
    assert callable(read)
    with pytest.raises(PolicyError) as refusal:
        read("some_field", absurd)
    assert refusal.value.field == "some_field"
    assert str(refusal.value).startswith("some_field: ")


@pytest.mark.parametrize("too_small", [0.5, "0.5", "0.0001K"])
def test_less_than_one_byte_is_no_size(too_small: object) -> None:
    with pytest.raises(PolicyError):
        units.size("memory", too_small)
    assert units.size("memory", 1) == 1


@given(number=st.integers(min_value=1, max_value=2**62))
def test_a_whole_number_of_bytes_is_kept_exactly(number: int) -> None:
    assert units.size("disk", number) == number


@given(number=st.integers(min_value=1, max_value=2**20), unit=st.sampled_from("KMG"))
def test_a_unit_multiplies_by_powers_of_1024(number: int, unit: str) -> None:
    assert units.size("disk", f"{number}{unit}") == number * 1024 ** (" KMG".index(unit))


@given(
    read=st.sampled_from(READERS),
    written=st.one_of(
        st.text(max_size=30),
        st.integers(),
        st.floats(allow_nan=True, allow_infinity=True),
        st.from_regex(r"\A\d{1,400}(\.\d{1,5})? ?[a-zA-Z]{0,3}\Z"),
        st.none(),
        st.binary(max_size=5),
    ),
)
def test_anything_is_a_sane_number_or_a_refusal(read: object, written: object) -> None:
    assert callable(read)
    try:
        number = read("field", written)
    except PolicyError as refusal:
        assert refusal.field == "field"
    else:
        assert 0 < number <= 2**62
        assert math.isfinite(number)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (128 << 20, "128 MiB"),
        (1 << 30, "1 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_are_shown_for_people(number: int, text: str) -> None:
    assert units.human_size(number) == text
