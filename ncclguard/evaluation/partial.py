"""Partial results: what an evaluation has so far, so that not all is lost when it cannot be finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recorder:
    """What one try has recorded on this rank."""

    results: dict[int, Any] = field(default_factory=dict)  # by count
    total: int = 0

    @property
    def latest(self) -> Any:
        return self.results[max(self.results)] if self.results else None


_current: Recorder | None = None


def record_partial(result: Any, done: int, total: int = 0) -> None:
    """Say inside an evaluation that `result` covers `done` of `total` data sets or batches.

    If the evaluation has to be given up, the result with the largest `done` that *every* rank recorded is returned in its
    place, so record what is the same on all ranks; with `combine=` the ranks' own parts are combined instead. Outside of
    a guarded evaluation it does nothing. Raises ValueError for a count that cannot be.

    >>> record_partial((0.31, 0.9), done=1, total=3)
    """
    if done < 0 or (total and done > total):
        raise ValueError(f"done is {done} of {total}: give the number of data sets or batches that are in")
    if _current is not None:
        _current.results[done] = result
        _current.total = total


def begin() -> Recorder:
    """Start recording for a new try."""
    global _current
    _current = Recorder()
    return _current


def end() -> None:
    """Record no more."""
    global _current
    _current = None


def inside() -> bool:
    """Whether a try is in progress in this process."""
    return _current is not None
