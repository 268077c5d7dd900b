"""Counters and histograms of every guarded operation, per group, operation and phase, in constant memory.

The listener counts what the engine reports, and turns failures and changes of settings into records.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ncclguard import events
from ncclguard.config import current_config
from ncclguard.metrics import records
from ncclguard.metrics.exchange import SettingChange, exchanges
from ncclguard.metrics.records import (
    Change,
    ChannelStatus,
    Failure,
    Membership,
    OpenOperation,
    Record,
    SeriesSnapshot,
    SlowRanks,
    Snapshot,
    empty_sizes,
    empty_times,
    size_bucket,
    time_bucket,
)
from ncclguard.metrics.settings import config_of
from ncclguard.outcome import Outcome
from ncclguard.phases import current_phase
from ncclguard.protocol.group_key import GroupKey

if TYPE_CHECKING:
    from ncclguard.coordination.group_state import OpenCall
    from ncclguard.incident.model import MembershipChange

T = TypeVar("T")

#: The number of series that are counted separately; later ones count as `OTHER`, so that labels stay bounded.
MAX_SERIES = 128
#: The number of culprits that a series counts separately.
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
            group=GroupKey.parse(group).short, op=op, phase=phase, count=self.count, attempts=self.attempts, nbytes=self.nbytes,
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
        """Return a copy of every series, in order of its name; groups without the hash of their members."""
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


class Watched(Protocol):
    """The collectives that are watched, not guarded, as metrics and `ncclguard top` show them."""

    def waiting(self) -> Sequence[OpenOperation]:
        """Return those that stand still now."""

    def slow(self) -> SlowRanks | None:
        """Return who makes the job slow."""

    def verdict(self) -> str:
        """Return the agreed verdict on one that stands still now, in a sentence; empty where there is none yet."""

    def issued(self) -> Mapping[str, int]:
        """Return how many collectives this process has issued, by group and backend."""

    def awaited(self) -> list[dict[str, Any]]:
        """Return whom this rank has found awaited in them, as `Monitor.awaited` does."""


_watched: dict[Watched, None] = {}


def add_watched(watched: Watched) -> Callable[[], None]:
    """Show what it tells in every snapshot from now on; return a function that ends that."""
    return _added(_watched, watched)


def awaited_in_watched() -> list[dict[str, Any]]:
    """Return whom this rank has found awaited in watched collectives."""
    return [entry for watched in tuple(_watched) for entry in watched.awaited()]


#: Functions that return the state of an end of a weight channel, in the order in which these were made.
_channels: dict[Callable[[], ChannelStatus], None] = {}


def add_channel(status: Callable[[], ChannelStatus]) -> Callable[[], None]:
    """Show an end of a weight channel in every snapshot from now on; return a function that ends that."""
    return _added(_channels, status)


def _added(shown: dict[T, None], one: T) -> Callable[[], None]:
    """Add one in the order in which they come; the function that is returned takes it out, and may be called again."""
    shown[one] = None

    def end() -> None:
        shown.pop(one, None)

    return end


class RecordingListener(events.Listener):
    """Counts the engine's events in a registry. `emit` is given failures and changes; it must not wait."""

    def __init__(self, job: str, emit: Callable[[Record], None]) -> None:
        self.registry = Registry()
        self._job = job
        self._emit = emit
        self._started = time.monotonic()
        self._open: dict[int, tuple[str, OpenCall]] = {}  # by the identity of the call
        self._ranks: dict[str, int] = {"went on": 0, "rejoined": 0}
        self._lost_seconds = 0.0

    def call_started(self, group: str, call: OpenCall) -> None:
        self._open[id(call)] = (group, call)

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        self._open.pop(id(call), None)
        if outcome is None:
            return
        if outcome.cause is not None:
            self.call_refused(group, outcome)
            return
        waited = call.opened - call.entered if outcome.attempts == 1 else -1.0
        self.registry.success(
            group, outcome.op, current_phase(), outcome.nbytes, outcome.seconds, waited, outcome.attempts
        )

    def call_refused(self, group: str, outcome: Outcome) -> None:
        with contextlib.suppress(Exception):  # counting must not turn a failed outcome into an exception
            phase, word = current_phase(), str(outcome.cause)
            self.registry.failure(
                group, outcome.op, phase, outcome.nbytes, outcome.seconds, outcome.attempts, word, outcome.culprits
            )
            self._emit(
                Failure(
                    **self.origin(), op_id=outcome.op_id, op=outcome.op, phase=phase or NO_PHASE, cause=word,
                    culprits=outcome.culprits, agreed=outcome.agreed, attempts=outcome.attempts,
                    seconds=outcome.seconds, summary="" if outcome.incident is None else outcome.incident.summary,
                )
            )  # fmt: skip

    def settings_changed(self, op_id: str, changes: Sequence[SettingChange]) -> None:
        group = GroupKey.parse(op_id.rpartition("/")[0]).short
        for change in changes:
            self._emit(
                Change(
                    **self.origin(), group=group, op_id=op_id, name=change.name, old=change.old, new=change.new,
                    reason=change.reason,
                )
            )  # fmt: skip

    def membership_changed(self, change: MembershipChange) -> None:
        self._ranks[change.kind] += len(change.ranks)
        self._lost_seconds += change.seconds
        self._emit(
            Membership(
                **self.origin(), change=change.kind, ranks=change.ranks, participants=change.participants,
                seconds=change.seconds, step=change.step, text=str(change),
            )
        )  # fmt: skip

    def snapshot(self, dropped: dict[str, int]) -> Snapshot:
        """Return all counts since the start, and the open calls."""
        known = exchanges()
        tables = [exchange.table for exchange in known]
        calls = self.open_operations()
        return Snapshot(
            **self.origin(),
            world_size=records.world_size(),
            uptime=time.monotonic() - self._started,
            hang=any(call.late for call in calls),
            open=calls,
            series=self.registry.snapshot(),
            stragglers=tuple(table for table in tables if table is not None),
            settings={exchange.group: exchange.settings.changed() for exchange in known},
            dropped=dropped,
            losses=self._ranks["went on"],
            rejoins=self._ranks["rejoined"],
            lost_seconds=self._lost_seconds,
            slow=next((found for found in (watched.slow() for watched in tuple(_watched)) if found is not None), None),
            channels=tuple(status() for status in tuple(_channels)),
            verdict=next(filter(None, (watched.verdict() for watched in tuple(_watched))), ""),
            watched={channel: number for one in tuple(_watched) for channel, number in one.issued().items()},
        )

    def open_operations(self) -> tuple[OpenOperation, ...]:
        """Return the calls of this process that have begun since the start and have not returned."""
        now = time.monotonic()
        found = []
        for group, call in list(self._open.values()):
            age, key = now - call.entered, GroupKey.parse(group)
            limit = config_of(key.process_group, current_config()).warn_after
            found.append(
                OpenOperation(
                    group=key.short, op_id=f"{group}/{call.sequence}", text=call.text, age=age,
                    limit=call.deadline - call.entered, late=age > limit,
                )
            )  # fmt: skip
        return (*found, *(operation for watched in tuple(_watched) for operation in watched.waiting()))

    def origin(self) -> dict[str, Any]:
        """Return the fields that all records share."""
        return {
            "time": time.time(), "job": self._job, "rank": records.rank(), "host": records.host(), "pid": os.getpid(),
        }  # fmt: skip
