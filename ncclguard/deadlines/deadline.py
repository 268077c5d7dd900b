"""Points in time to be done by, and the limits that follow from an operation's size."""

from __future__ import annotations

import math
import operator
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from ncclguard_explain.language import told

SMALL_NUMEL: Final = 10_000_000
MEDIUM_NUMEL: Final = 100_000_000


def get_adaptive_timeout(numel: int) -> float:
    """Return the time limit, in seconds, for a collective on ``numel`` elements.

    300 s below 1e7 elements, 900 s below 1e8, 1800 s from there on. These are the limits of the recipe this library
    grew out of: they leave room for a slow rank, since no fabric needs minutes for the bytes themselves.

    Raises ``TypeError`` unless ``numel`` is an integer and ``ValueError`` if it is negative.

    >>> get_adaptive_timeout(467_019_003)
    1800.0
    """
    if isinstance(numel, bool):
        raise TypeError(told("numel must be a number of elements, not a bool; pass tensor.numel()"))
    try:
        count = operator.index(numel)
    except TypeError:
        text = told(
            "numel must be an integer number of elements, not {kind}; pass tensor.numel(), or int(...)",
            kind=type(numel).__name__,
        )
        raise TypeError(text) from None
    if count < 0:
        text = told(
            "numel is {count}; a number of elements cannot be negative, pass tensor.numel()",
            count=count,
        )
        raise ValueError(text)
    if count < SMALL_NUMEL:
        return 300.0
    if count < MEDIUM_NUMEL:
        return 900.0
    return 1800.0


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A point on this process's monotonic clock by which something has to be done.

    Deadlines compare by time: the sooner one is the smaller. They mean nothing in another process.

    >>> budget = Deadline.after(30)
    >>> step = budget.sooner(Deadline.after(5))
    >>> step < budget, step.expired
    (True, False)
    """

    at: float  # reading of time.monotonic(), seconds

    @classmethod
    def after(cls, seconds: float | timedelta) -> Deadline:
        """Return the deadline ``seconds`` from now: expired for zero or less, never for ``math.inf``.

        Raises ``TypeError`` for anything but a number or ``timedelta``, ``ValueError`` for NaN.
        """
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        elif isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise TypeError(f"a deadline takes seconds or a timedelta, not {type(seconds).__name__}")
        if math.isnan(seconds):
            raise ValueError("a deadline cannot be NaN seconds away; pass a number of seconds")
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.at

    def sooner(self, other: Deadline | None) -> Deadline:
        """Return the earlier of the two; ``None`` stands for no deadline."""
        return self if other is None or self.at <= other.at else other
