"""Sizes as people write them become exact numbers of elements; everything else is refused with what to write."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ncclguard.bench.arguments import parse_size, sweep


@pytest.mark.parametrize(
    ("text", "element_size", "numel"),
    [
        ("5e8", 4, 500_000_000),
        ("5E8", 8, 500_000_000),
        ("500_000_000", 2, 500_000_000),
        ("1.5e3", 4, 1500),
        ("1", 4, 1),
        (" 7 ", 4, 7),
        ("1.5GiB", 4, 402_653_184),
        ("1.5 gib", 2, 805_306_368),
        ("64MB", 4, 16_000_000),
        ("10B", 4, 2),
        ("2TiB", 8, 2**38),
        ("0.1GiB", 1, 107_374_182),
    ],
)
def test_a_size_is_read_exactly(text: str, element_size: int, numel: int) -> None:
    """Plain numbers count elements, numbers with a unit bytes, rounded down to whole elements."""
    assert parse_size(text).numel(element_size) == numel


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a size"),
        ("five", "not a size"),
        ("-5", "not a size"),
        ("5e-3", "not a size"),
        ("nan", "not a size"),
        ("inf", "not a size"),
        ("1.5", "whole number"),
        ("5K", "5KiB for bytes"),
        ("3M", "3MiB for bytes"),
        ("5XB", "unknown unit"),
    ],
)
def test_what_is_no_size_is_refused_with_what_to_write(text: str, says: str) -> None:
    """ValueError, and its text tells the way out."""
    with pytest.raises(ValueError, match=says):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "3B", "1e300", "9000000TiB"])
def test_too_few_and_too_many_elements_are_refused(text: str) -> None:
    """Less than one element, or beyond 2**62 bytes."""
    with pytest.raises(ValueError, match="ask for"):
        parse_size(text).numel(4)


@given(st.integers(min_value=1, max_value=2**50))
def test_every_count_survives_with_underscores(count: int) -> None:
    """What Python prints with underscores is read back."""
    assert parse_size(f"{count:_}").numel(1) == count


def test_a_sweep_multiplies_and_stays_within_its_bounds() -> None:
    """First size first, nothing above the last, growth even where the factor rounds to nothing."""
    assert sweep(1, 1000, 10) == (1, 10, 100, 1000)
    assert sweep(3, 50, 4) == (3, 12, 48)
    assert sweep(1, 4, 1.1) == (1, 2, 3, 4)
    assert sweep(5, 5, 2) == (5,)
    assert sweep(1000, 10**18, 1e308) == (1000,)
    assert len(sweep(1, 1000, 1.0000001)) == 1000
    with pytest.raises(ValueError, match=r"more than 1,000 sizes of 1 to 1001"):
        sweep(1, 1001, 1.0000001)


@pytest.mark.parametrize(("last", "factor"), [(1, 2), (100, 1), (100, 0.5), (100, float("nan")), (100, float("inf"))])
def test_a_sweep_that_goes_nowhere_is_refused(last: int, factor: float) -> None:
    """ValueError for --max below --min and for a factor that does not grow."""
    with pytest.raises(ValueError, match="--m|--factor"):
        sweep(10, last, factor)
