"""The statistics of the bench on samples whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ncclguard.bench.results import Lag, percentile, ratio, slowest, slowest_rank_times

times = st.lists(st.floats(min_value=1e-9, max_value=1e6), min_size=1, max_size=50)


@given(times, st.floats(min_value=0, max_value=100))
def test_a_percentile_is_a_sample_that_enough_do_not_exceed(samples: list[float], percent: float) -> None:
    """Nearest rank: a real sample, at least that share of all samples at or below it."""
    value = percentile(samples, percent)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= percent / 100 * len(samples) - 1e-9


def test_percentiles_of_a_hundred() -> None:
    """p50 of 1 to 100 is 50, p99 is 99, p0 the least, p100 the most."""
    samples = list(range(100, 0, -1))
    assert [percentile(samples, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_a_percentile_of_nothing_or_beyond_all_is_refused(samples: list[float], percent: float) -> None:
    """ValueError, never an invented number."""
    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, percent)


def test_a_ratio_is_taken_cycle_by_cycle() -> None:
    """A cycle in which everything took ten times as long does not move the ratio."""
    plain = [1.0, 1.0, 10.0, 1.0, 1.0]
    found = ratio([1.2 * each for each in plain], plain)
    assert found.median == pytest.approx(1.2)
    assert (found.low, found.high) == (pytest.approx(1.2), pytest.approx(1.2))
    assert found.cycles == 5


@pytest.mark.parametrize(("upper", "lower"), [([], []), ([1.0], [1.0, 2.0])])
def test_a_ratio_without_pairs_is_refused(upper: list[float], lower: list[float]) -> None:
    """ValueError for no cycles and for unequal ones."""
    with pytest.raises(ValueError, match="same cycles"):
        ratio(upper, lower)


def test_the_time_of_a_call_is_the_slowest_ranks() -> None:
    """Shape (ranks, cycles, calls) in, (cycles, calls) out."""
    durations = np.array([[[1.0, 5.0], [2.0, 2.0]], [[3.0, 4.0], [1.0, 9.0]]])
    assert slowest_rank_times(durations).tolist() == [[3.0, 5.0], [2.0, 9.0]]


def test_who_waits_least_in_the_barrier_came_last() -> None:
    """Rank 1 is 0.4 s late in most cycles; one odd cycle does not change that."""
    waits = np.array([[0.5, 0.5, 0.0], [0.1, 0.1, 0.3], [0.45, 0.5, 0.3]])
    assert slowest(waits) == Lag(1, pytest.approx(0.4))


def test_a_single_rank_has_no_lag() -> None:
    """One rank is first and last."""
    assert slowest(np.array([[0.1, 0.2]])) == Lag(0, 0.0)
