"""Partial results: what an evaluation has so far, so that not all is lost when it cannot be finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recorder:
    """What one try has recorded on this rank."""

    results: dict[int, Any] = field(default_factory=dict)  # by count; another rank may be at any of them
    total: int = 0
    latest_only: bool = False

    @property
    def latest(self) -> Any:
        return self.results[max(self.results)] if self.results else None

    def add(self, result: Any, done: int, total: int) -> None:
        """Keep it, or only what covers most where nothing else will be asked for."""
        self.total = total
        if self.latest_only:
            if done < max(self.results, default=0):
                return
            self.results.clear()
        self.results[done] = result


_current: Recorder | None = None


def record_partial(result: Any, done: int, total: int = 0) -> None:
    """Say inside an evaluation that `result` covers `done` of `total` data sets or batches.

    If the evaluation has to be given up, the result with the largest `done` that *every* rank recorded is returned in
    its place, so record what is the same on all ranks; with `combine=` the ranks' own parts are combined instead. Every
    result is kept until the evaluation ends, because another rank may have got less far: record figures, not
    predictions. With `combine=` only the latest is. Outside of a guarded evaluation it does nothing. Raises ValueError
    for a count that cannot be.

    >>> record_partial((0.31, 0.9), done=1, total=3)
    """
    if done < 0 or (total and done > total):
        raise ValueError(f"done is {done} of {total}: give the number of data sets or batches that are in")
    if _current is not None:
        _current.add(result, done, total)


def begin(*, latest_only: bool = False) -> Recorder:
    """Start recording for a new try; with `latest_only`, keep no result that a later one covers."""
    global _current
    _current = Recorder(latest_only=latest_only)
    return _current


def end() -> None:
    """Record no more."""
    global _current
    _current = None


def inside() -> bool:
    """Whether a try is in progress in this process."""
    return _current is not None
