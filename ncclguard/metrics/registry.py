"""Counters and histograms of every guarded operation, per group, operation and phase, in constant memory."""

from __future__ import annotations

import threading

from ncclguard.metrics.histogram import empty_sizes, empty_times, size_bucket, time_bucket
from ncclguard.metrics.records import SeriesSnapshot

#: Series that are kept apart; what comes later is counted under `OTHER`, so that labels stay bounded.
MAX_SERIES = 128
#: Culprits that a series keeps apart.
MAX_CULPRITS = 64
OTHER = "other"
#: Phase of calls outside `with phase(...)`.
NO_PHASE = "none"


class Series:
    """One group, operation and phase. Not thread-safe by itself."""

    __slots__ = (
        "attempts",
        "count",
        "culprits",
        "durations",
        "failures",
        "key",
        "longest",
        "nbytes",
        "seconds",
        "sizes",
        "waited",
        "waits",
    )  # fmt: skip

    def __init__(self, key: tuple[str, str, str]) -> None:
        self.key = key
        self.count = 0
        self.attempts = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.waited = 0.0
        self.longest = 0.0
        self.durations = empty_times()
        self.waits = empty_times()
        self.sizes = empty_sizes()
        self.failures: dict[str, int] = {}
        self.culprits: dict[str, int] = {}

    def snapshot(self) -> SeriesSnapshot:
        group, op, phase = self.key
        return SeriesSnapshot(
            group=group.rpartition(":")[0] or group, op=op, phase=phase, count=self.count, attempts=self.attempts, nbytes=self.nbytes,
            seconds=self.seconds, waited=self.waited, longest=self.longest, durations=tuple(self.durations),
            waits=tuple(self.waits), sizes=tuple(self.sizes), failures=dict(self.failures), culprits=dict(self.culprits),
        )  # fmt: skip


class Registry:
    """All series of this process; thread-safe. An observation costs about a microsecond."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str], Series] = {}
        self._lock = threading.Lock()

    def success(
        self, group: str, op: str, phase: str | None, nbytes: int, seconds: float, waited: float, attempts: int
    ) -> None:
        """Count a success; `waited` in seconds, negative where it is not known."""
        with self._lock:
            series = self._observe(group, op, phase, nbytes, seconds, attempts)
            if waited >= 0.0:
                series.waited += waited
                series.waits[time_bucket(waited)] += 1

    def failure(
        self,
        group: str,
        op: str,
        phase: str | None,
        nbytes: int,
        seconds: float,
        attempts: int,
        cause: str,
        culprits: tuple[int, ...],
    ) -> None:
        """Count a failure with its cause and the ranks to blame."""
        with self._lock:
            series = self._observe(group, op, phase, nbytes, seconds, attempts)
            series.failures[cause] = series.failures.get(cause, 0) + 1
            for rank in culprits:
                name = str(rank)
                if name not in series.culprits and len(series.culprits) >= MAX_CULPRITS:
                    name = OTHER
                series.culprits[name] = series.culprits.get(name, 0) + 1

    def snapshot(self) -> tuple[SeriesSnapshot, ...]:
        """A copy of every series, in order of its name; groups without the hash of their members."""
        with self._lock:
            series = [one.snapshot() for one in self._series.values()]
        return tuple(sorted(series, key=lambda one: (one.group, one.op, one.phase)))

    def _observe(self, group: str, op: str, phase: str | None, nbytes: int, seconds: float, attempts: int) -> Series:
        key = (group, op, phase or NO_PHASE)
        series = self._series.get(key)
        if series is None:
            series = self._new(key)
        series.count += 1
        series.attempts += attempts
        series.nbytes += nbytes
        series.seconds += seconds
        series.longest = max(series.longest, seconds)
        series.durations[time_bucket(seconds)] += 1
        series.sizes[size_bucket(nbytes)] += 1
        return series

    def _new(self, key: tuple[str, str, str]) -> Series:
        if len(self._series) >= MAX_SERIES:
            key = (OTHER, OTHER, OTHER)
            if key in self._series:
                return self._series[key]
        series = self._series[key] = Series(key)
        return series
