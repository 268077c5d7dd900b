"""Histograms with fixed buckets, each twice as wide as the one before: constant
memory, and a bit operation to find the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Exponents of two of the upper bounds: 1 us to 4096 s, and 1 byte to 1 TiB; below and above go to the ends.
FIRST_TIME, LAST_TIME = -20, 12
LAST_SIZE = 40
#: Upper bounds of the buckets; the last bucket of each kind has none.
TIME_BOUNDS = tuple(2.0**exponent for exponent in range(FIRST_TIME, LAST_TIME + 1))
SIZE_BOUNDS = tuple(float(1 << exponent) for exponent in range(LAST_SIZE + 1))
_TIMES = len(TIME_BOUNDS)
_SIZES = len(SIZE_BOUNDS)


def time_bucket(seconds: float) -> int:
    """Index of the bucket of a duration: the first whose bound exceeds it.

    >>> TIME_BOUNDS[time_bucket(0.7)]
    1.0
    """
    if seconds <= 0.0:
        return 0
    index = math.frexp(seconds)[1] - FIRST_TIME
    return 0 if index < 0 else min(_TIMES, index)


def size_bucket(nbytes: int) -> int:
    """Index of the bucket of a size: the first whose bound is not below it.

    >>> SIZE_BOUNDS[size_bucket(1024)], SIZE_BOUNDS[size_bucket(1025)]
    (1024.0, 2048.0)
    """
    index = (nbytes - 1).bit_length() if nbytes > 1 else 0
    return min(_SIZES, index)


def empty_times() -> list[int]:
    return [0] * (_TIMES + 1)


def empty_sizes() -> list[int]:
    return [0] * (_SIZES + 1)


def quantile(counts: Sequence[int], bounds: Sequence[float], q: float) -> float:
    """The value below which a share `q` of the observations lies, to within its bucket; 0.0 without observations.

    >>> counts = empty_times()
    >>> for _ in range(100):
    ...     counts[time_bucket(0.003)] += 1
    >>> 0.002 <= quantile(counts, TIME_BOUNDS, 0.5) <= 0.004
    True
    """
    total = sum(counts)
    if total == 0:
        return 0.0
    wanted, below = q * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            upper = bounds[min(index, len(bounds) - 1)]
            if index >= len(bounds):
                return upper
            return upper * 2 ** ((wanted - below) / count - 1)  # evenly spread over the octave, by its logarithm
        below += count
    return bounds[-1]
