"""The verdict in time at 1,000 and 4,000 ranks: production periods, reports and incidents, over a clock that is turned by hand.

Each monitor looks when its own period says so, and each store operation takes the store's host its time, one after the other: what a
single-threaded server does. The clock is that of the model; nothing sleeps, and how fast the test runs does not matter.
"""

from __future__ import annotations

import functools
import heapq
import os
import random
import types
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from ncclguard.coordination import group_state as state_module
from ncclguard.coordination import monitor as monitor_module
from ncclguard.coordination import store as entries_module
from ncclguard.coordination import store as store_module
from ncclguard.coordination.group_state import OpenCall
from ncclguard.coordination.incidents import from_json, summarise
from ncclguard.coordination.inquiry import Patience
from ncclguard.coordination.monitor import Monitor, MonitorSettings
from ncclguard.coordination.store import AgreementStore
from ncclguard.engine import description as description_module
from ncclguard.engine.description import Description, History
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Operation, TroubleKind, Verdict
from ncclguard.protocol.member import Entry
from ncclguard.protocol.timing import Timing
from tests.protocol.test_scale import CountingStore, KnownLiveness

#: Seconds of the store's host for one request, and for each further key in it: a TCPStore of torch 2.13 took 12 to 16 µs for `add` and
#: `check` (loopback, two clients), and 1 to 5 µs for each of 256 keys.
SERVICE, FURTHER = 15e-6, 5e-6
GROUP = "group:cpu:0"
TIMEOUT = 0.9
#: PROTOCOL_BOUND=full runs all at 4,000 ranks too.
SIZES = [1000, 4000] if os.environ.get("PROTOCOL_BOUND") == "full" else [1000]
STACK = tuple(f"train.py:{line} in step_{line}: loss = model(batch[{line}])" for line in range(30))


class TimedStore(CountingStore):
    """Takes its time for each key."""

    job: TimedJob

    def _count(self, keys: int = 1) -> None:
        super()._count(keys)
        self.job.keys[self._rank] += keys
        self.job.now += SERVICE + (keys - 1) * FURTHER


class TimedJob:
    """The monitors of all ranks, each stepped when it would look at the store by itself, or when its caller wakes it."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch, timing: Timing | None = None) -> None:
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        for module in (entries_module, state_module, monitor_module, description_module):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(description_module, "main_thread_stack", lambda: STACK)
        monkeypatch.setattr(description_module, "other_threads", list)
        # What all ranks read of one text is worked out once: they are in one process here.
        monkeypatch.setattr(codec, "loads_verdict", functools.lru_cache(maxsize=8)(codec.loads_verdict))
        monkeypatch.setattr(store_module, "_plain", functools.lru_cache(maxsize=8)(store_module._plain))
        self.size = size
        self.shared: dict[str, bytes] = {}
        self.operations: Counter[int] = Counter()  # requests
        self.keys: Counter[int] = Counter()
        self.killed: set[int] = set()
        self.silent: set[int] = set()
        self.timing = timing or Timing.of(size)
        self.monitors = [self._monitor(rank) for rank in range(size)]
        members = tuple(range(size))
        self.states = [monitor.state(GROUP, members) for monitor in self.monitors]
        self.returned: dict[int, float] = {}  # rank -> when the verdict that its caller waits for was there
        self._due: dict[int, float] = {}
        self._events: list[tuple[float, int, bool]] = []  # when, rank, whether its caller's deadline has passed
        for rank in range(size):
            self._look(rank, self.now + rank * 0.618034 % 1 * self.timing.idle)

    def _monitor(self, rank: int) -> Monitor:
        connection = TimedStore(self.shared, self.operations, rank)
        connection.job = self
        monitor: Monitor
        history = History()
        settings = MonitorSettings(
            self.timing,
            lambda group: Patience(30.0, None),
            describe=lambda group, report: Description(monitor, f"node{rank // 8}", history).describe(group, report),
            summarise=summarise,
        )
        store = AgreementStore(connection)  # type: ignore[arg-type]
        monitor = Monitor(store, rank, self.size, KnownLiveness(rank, self.killed), settings)  # type: ignore[arg-type]
        return monitor

    def _look(self, rank: int, when: float) -> None:
        self._due[rank] = when
        heapq.heappush(self._events, (when, rank, False))

    def run(self, reached: Callable[[], bool], seconds: float) -> None:
        """Let time pass until something is so; fails after some seconds of the model."""
        end = self.now + seconds
        while not reached():
            when, rank, deadline = heapq.heappop(self._events)
            assert max(when, self.now) <= end, f"not reached in {seconds} s"
            if rank in self.silent or not (deadline or self._due[rank] == when):
                continue
            self.now = max(self.now, when)
            if deadline and not self.states[rank].trouble(0, TroubleKind.DEADLINE, f"not complete after {TIMEOUT} s"):
                continue
            self.monitors[rank]._step(self.now)
            if self.states[rank].decided is not None:
                self.returned.setdefault(rank, self.now)
            self._look(rank, self.now + self.monitors[rank]._interval())

    def join(self) -> None:
        """All ranks start together, and agree on their session."""
        self.run(lambda: all(monitor.session_ready.is_set() for monitor in self.monitors), 5.0)
        assert max(self.operations[rank] for rank in range(1, self.size)) <= 30

    def enter(self, ranks: Iterable[int]) -> list[int]:
        """These ranks call the operation now; their deadlines pass within 20 ms of each other."""
        ranks = list(ranks)
        for rank in ranks:
            group = self.states[rank]
            entry, _ = group.member.enter(Operation(0, 7, "all_reduce(1)", True))
            assert entry is Entry.START
            deadline = self.now + TIMEOUT + rank * 0.618034 % 1 * 0.02
            group.wait_in(OpenCall("all_reduce(1)", self.now, deadline, thread=0))
            heapq.heappush(self._events, (deadline, rank, True))
        return ranks

    def verdict(self, waiting: list[int]) -> tuple[Verdict, Incident]:
        """The one that all who wait get; each before it gives up."""
        self.run(lambda: len(self.returned) == len(waiting), TIMEOUT + 4.0)
        late = {rank: self.returned[rank] - self.states[rank].call.deadline for rank in waiting}  # type: ignore[union-attr]
        assert max(late.values()) < self.timing.grace
        found = {group.decided[1] for group in (self.states[rank] for rank in waiting) if group.decided is not None}
        (verdict,) = found
        incident = from_json(verdict.incident)
        assert incident is not None
        return verdict, incident

    def largest(self) -> int:
        return max(map(len, self.shared.values()))


def test_the_times_fit_each_other_at_every_size() -> None:
    for size in (2, 400, 1250, 2000, 4000, 20_000):
        for active, idle in ((0.05, 0.5), (0.001, 0.001), (0.2, 1.0)):
            timing = Timing.of(size, active, idle)
            assert timing.idle + 2 * timing.period < timing.patience  # a rank that is in no call has answered by then
            assert timing.takeover >= 3 * timing.period  # a coordinator that looks in time is left to do its work
            assert timing.patience + 3 * timing.period < timing.grace
            assert timing.period <= max(0.2, size / 70_000)


def test_ranks_that_wait_for_rank_0_to_come_leave_the_stores_host_most_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = TimedJob(4000, monkeypatch)
    job.silent.add(0)
    job.run(lambda: job.now > 1003.0, 3.1)
    assert sum(job.operations.values()) * SERVICE < 0.3 * 3.0


@pytest.mark.parametrize("size", [1000, 4000])
def test_one_late_rank_is_named_to_all_in_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TimedJob(size, monkeypatch)
    job.join()
    job.keys.clear()
    verdict, incident = job.verdict(job.enter(range(size - 1)))
    assert verdict.culprits == ((size - 1, Cause.LATE),)
    assert incident.ranks[-1].stack == STACK
    assert job.largest() < 1 << 17
    readers = [rank for rank in range(size) if job.keys[rank] > size]
    assert readers == [verdict.coordinator]  # while it reads thousands of answers, nobody takes it for dead


@pytest.mark.parametrize("size", SIZES)
def test_one_silent_rank_is_named_to_all_in_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = TimedJob(size, monkeypatch)
    job.join()
    job.silent.add(size - 1)
    verdict, incident = job.verdict(job.enter(range(size - 1)))
    assert verdict.culprits == ((size - 1, Cause.STUCK),)
    assert incident.ranks[-1].state == "silent"


def test_a_silent_half_of_the_job_is_named_to_the_other_half_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2000
    job = TimedJob(size, monkeypatch)
    job.join()
    job.silent.update(range(size // 2, size))
    verdict, _ = job.verdict(job.enter(range(size // 2)))
    assert verdict.culprits == tuple((rank, Cause.STUCK) for rank in range(size // 2, size))


def test_where_only_one_rank_of_4000_has_come_all_others_are_named_to_it_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stacks as large as they can be, and unlike each other."""
    size = 4000
    draw = random.Random(size)

    def line() -> str:
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz/._:=()", k=200))

    job = TimedJob(size, monkeypatch)
    job.join()
    lines = [line() for _ in range(4096)]
    monkeypatch.setattr(description_module, "main_thread_stack", lambda: draw.sample(lines, 64))
    monkeypatch.setattr(
        description_module, "other_threads", lambda: [[f"t{n}", draw.sample(lines, 16)] for n in range(16)]
    )
    verdict, incident = job.verdict(job.enter([0]))
    assert verdict.culprits == tuple((rank, Cause.LATE) for rank in range(1, size))
    assert [report.rank for report in incident.ranks] == list(range(size))
    assert sum(bool(report.stack) for report in incident.ranks) >= 8
    assert job.largest() < 1 << 18
    assert len(str(incident)) < 1 << 15
