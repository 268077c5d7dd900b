"""The one place that turns measured durations into figures. Seconds in, seconds and bytes per second out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def percentile(samples: Sequence[float] | Array, percent: float) -> float:
    """The smallest sample that at least `percent` % of all samples do not exceed (nearest rank): always a real sample.

    Raises:
        ValueError: no samples, or a percentage outside 0 to 100.

    Example:
        >>> percentile([3.0, 1.0, 2.0], 50), percentile([3.0, 1.0, 2.0], 99)
        (2.0, 3.0)
    """
    if len(samples) == 0 or not 0 <= percent <= 100:
        raise ValueError("a percentile needs samples and a percentage from 0 to 100.")
    ordered = sorted(float(sample) for sample in samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio over cycles: the median and the quartiles, `cycles` pairs."""

    median: float
    low: float
    high: float
    cycles: int


def ratio(numerator: Sequence[float] | Array, denominator: Sequence[float] | Array) -> Ratio:
    """Compare two variants cycle by cycle, so that what slows a whole cycle down slows both.

    Raises:
        ValueError: not the same number of cycles, or none.

    Example:
        >>> ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
        Ratio(median=3.0, low=2.5, high=3.5, cycles=3)
    """
    if len(numerator) != len(denominator) or len(numerator) == 0:
        raise ValueError("a ratio needs the same cycles, at least one, of both variants.")
    pairs = np.asarray(numerator, dtype=np.float64) / np.asarray(denominator, dtype=np.float64)
    low, median, high = np.quantile(pairs, (0.25, 0.5, 0.75))
    return Ratio(float(median), float(low), float(high), len(pairs))


def slowest_rank_times(durations: Array) -> Array:
    """Time of each call: that of the rank that took longest. `durations` has shape (ranks, cycles, calls)."""
    return np.asarray(durations.max(axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Lag:
    """The rank that arrives last, and by how many seconds (median over the cycles) after the first."""

    rank: int
    seconds: float


def slowest(waits: Array) -> Lag:
    """Who arrives last, from how long each rank waits in a barrier: who waits least arrived last.

    `waits` has shape (ranks, cycles). All ranks leave a barrier together, so a rank's lateness against the first to
    arrive is the longest wait minus its own. Only durations of one host's clock each go in.

    Example:
        >>> slowest(np.array([[0.5, 0.5, 0.7], [0.1, 0.1, 0.1]])).rank
        1
    """
    lateness = np.median(waits.max(axis=0) - waits, axis=1)
    rank = int(lateness.argmax())
    return Lag(rank, float(lateness[rank]))
