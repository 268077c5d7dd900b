"""Store operations of the monitors of up to 1,000 ranks, over a store in memory that counts them and a clock that is turned by hand.

The monitors, their states, the revocation and the decision are the production code; no thread, no socket and no sleep is in it.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from ncclguard.coordination import group_state as state_module, monitor as monitor_module, store as entries_module
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.inquiry import Patience
from ncclguard.coordination.liveness import Identity, Sight
from ncclguard.coordination.monitor import Monitor, MonitorSettings
from ncclguard.coordination.store import AgreementStore
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Action, Operation, Report, TroubleKind, Verdict
from ncclguard.protocol.member import Entry, Resolution
from ncclguard.protocol.timing import Timing

SIZES = [16, 128, 1000]
PER_HOST = 8
GROUP = "group:cpu:0"
TIMEOUT = 0.9  # below the second after which open calls publish their fingerprint


class CountingStore:
    """One rank's connection to a store that all share, with the five calls the agreement makes of a TCPStore."""

    def __init__(self, shared: dict[str, bytes], operations: Counter[int], rank: int) -> None:
        self._shared = shared
        self._operations = operations
        self._rank = rank

    def _count(self, keys: int = 1) -> None:
        """One request, whatever the number of keys."""
        self._operations[self._rank] += 1

    def check(self, keys: list[str]) -> bool:
        self._count(len(keys))
        return all(key in self._shared for key in keys)

    def get(self, key: str) -> bytes:
        self._count()
        return self._shared[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._count(len(keys))
        return [self._shared[key] for key in keys]

    def set(self, key: str, value: str) -> None:
        self._count()
        self._shared[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self._count()
        total = int(self._shared.get(key, b"0")) + amount
        self._shared[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count()
        if self._shared.get(key, b"") == expected.encode():
            self._shared[key] = desired.encode()
        return self._shared.get(key, expected.encode())


class KnownLiveness:
    """What the job says of its processes, in place of /proc and connections."""

    def __init__(self, rank: int, killed: set[int]) -> None:
        host = f"host{rank // PER_HOST}"
        self.identity = Identity(rank, host, host, pid=1000 + rank, start_ticks=1, port=None)
        self._killed = killed

    def look(self, peer: Identity) -> tuple[Sight, str]:
        return (Sight.GONE, "its pid does not exist") if peer.rank in self._killed else (Sight.RUNNING, "it runs")

    def befriend(self, peer: Identity) -> None: ...

    def seek(self, peers: Iterable[Identity], since: float) -> None: ...

    def drain(self) -> None: ...


class Job:
    """The monitors of all ranks of one job, stepped one after the other."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        for module in (entries_module, state_module, monitor_module):
            monkeypatch.setattr(module, "time", clock)
        self.size = size
        self.shared: dict[str, bytes] = {}
        self.operations: Counter[int] = Counter()
        self.killed: set[int] = set()
        self.silent: set[int] = set()
        self.monitors = [self._monitor(rank) for rank in range(size)]
        self.states = [monitor.state(GROUP, tuple(range(size))) for monitor in self.monitors]
        self.until(lambda: all(monitor.session_ready.is_set() for monitor in self.monitors), steps=10)
        self.step(3)  # lists are read and groups are looked up: what only happens once is over

    def _monitor(self, rank: int) -> Monitor:
        settings = MonitorSettings(
            Timing(), lambda group: Patience(30.0, None), describe=_as_it_is, summarise=_no_incident
        )
        store = AgreementStore(CountingStore(self.shared, self.operations, rank))  # type: ignore[arg-type]
        return Monitor(store, rank, self.size, KnownLiveness(rank, self.killed), settings)  # type: ignore[arg-type]

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.killed and rank not in self.silent]

    def step(self, rounds: int = 1, seconds: float = 0.05) -> None:
        """Turn the clock and let every monitor that runs do its step, in an order that differs each time."""
        for number in range(rounds):
            self.now += seconds
            first = (7 * number) % self.size
            for rank in sorted(self.alive, key=lambda rank: (rank - first) % self.size):
                self.monitors[rank]._step(self.now)

    def until(self, reached: Callable[[], bool], steps: int) -> None:
        """Step until something is so; fails after `steps`."""
        for _ in range(steps):
            if reached():
                return
            self.step()
        assert reached(), f"not reached in {steps} steps"

    def enter(self, ranks: Iterable[int], *, closing: bool = True, shrink: bool = False) -> None:
        for rank in ranks:
            group = self.states[rank]
            entry, _ = group.member.enter(Operation(0, 7, "all_reduce(1)", closing, shrink))
            assert entry is Entry.START
            group.wait_in(OpenCall("all_reduce(1)", self.now, self.now + TIMEOUT, thread=0))
            group.verdict_within(0.0)

    def settled(self) -> bool:
        return all(self.states[rank].member.generation == 1 for rank in self.alive)

    def verdict(self) -> Verdict:
        """The one that every rank has adopted."""
        found = {_verdict(self.states[rank]) for rank in self.alive}
        assert len(found) == 1
        return found.pop()


def _as_it_is(group: GroupState, report: Report) -> Report:
    return report


def _no_incident(*_: object) -> str:
    return ""


def _verdict(group: GroupState) -> Verdict:
    """From the caller who waits for it, or from what is kept for a call that has not come."""
    return group.decided[1] if group.decided is not None else group.member.settled[-1]


def _highest(job: Job, ranks: Iterable[int]) -> int:
    return max(job.operations[rank] for rank in ranks)


def test_an_idle_step_costs_every_rank_the_same_whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy: one counter each step, one more each second; an operation that is not slow adds nothing."""
    for size in SIZES:
        job = Job(size, monkeypatch)
        job.operations.clear()
        job.enter(job.alive)
        job.step(4, seconds=0.05)
        assert set(job.operations.values()) <= set(range(4, 7)), size
        assert len(job.operations) == size


@pytest.mark.parametrize("size", SIZES)
def test_the_handshake_costs_the_others_a_constant_and_rank_0_a_constant_for_each(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(size, monkeypatch)
    assert _highest(job, range(1, size)) <= 50
    assert job.operations[0] <= 50 + 4 * size


@pytest.mark.parametrize("size", SIZES)
def test_a_late_rank_costs_a_constant_to_report_and_one_reader_linear(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank never comes; the first deadline revokes, every rank answers once, one reads all answers."""
    job = Job(size, monkeypatch)
    late = size - 1
    job.enter(range(late))
    assert job.states[3].trouble(0, TroubleKind.DEADLINE, "not complete")
    job.operations.clear()
    job.until(job.settled, steps=6)
    found = job.verdict()
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.LATE, ((late, Cause.LATE),))
    assert found.coordinator == 3
    others = [rank for rank in job.alive if rank != 3]
    assert _highest(job, others) <= 30
    assert job.operations[3] <= 50 + size // 8


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_in_trouble_at_once_gives_one_verdict_and_one_reader(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections of all break in the same step: the first to revoke coordinates, and the operation is resumed."""
    job = Job(size, monkeypatch)
    job.enter(job.alive)
    for rank in job.alive:
        assert job.states[rank].trouble(0, TroubleKind.TRANSPORT, "connection reset")
    job.operations.clear()
    job.until(job.settled, steps=6)
    found = job.verdict()
    assert (found.action, found.cause, found.culprits) == (Action.RESUME, Cause.NETWORK, ())
    others = [rank for rank in job.alive if rank != found.coordinator]
    assert _highest(job, others) <= 30
    assert job.operations[found.coordinator] <= 50 + size // 8


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_rank_is_announced_once_and_read_once_by_every_rank(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seven host mates see it at the same time; the others go on without it."""
    job = Job(size, monkeypatch)
    dead = size - 3
    job.enter((rank for rank in range(size) if rank != dead), shrink=True)
    job.killed.add(dead)
    job.now += 0.3  # the calls are slow by now, so that the monitors attend to departures
    job.operations.clear()
    job.until(job.settled, steps=8)
    found = job.verdict()
    assert (found.action, found.cause, found.departed) == (Action.RESUME, Cause.LOST, ((dead, Cause.LOST),))
    assert found.participants == tuple(job.alive)
    assert sum("/departure/" in key for key in job.shared) == 1
    others = [rank for rank in job.alive if rank != found.coordinator]
    assert _highest(job, others) <= 30
    assert job.operations[found.coordinator] <= 50 + size // 8


@pytest.mark.parametrize("size", [16, 128])
def test_the_coordination_is_taken_over_from_a_rank_that_falls_silent_and_a_second_coordinator_changes_nothing(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that revoked stops before it decides, and stays silent: stuck, named after the deadline; told when it comes back."""
    job = Job(size, monkeypatch)
    first = size // 2
    job.enter(job.alive)
    assert job.states[first].trouble(0, TroubleKind.TRANSPORT, "connection reset")
    job.monitors[first]._revoke_for_callers(job.now)
    job.silent.add(first)
    job.operations.clear()
    job.until(job.settled, steps=80)
    found = job.verdict()
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.STUCK, ((first, Cause.STUCK),))
    assert found.coordinator == 0
    assert _highest(job, range(size)) <= 400 + 4 * size  # 50 steps of waiting until silence counts
    job.silent.clear()
    job.until(job.settled, steps=4)
    assert job.verdict() == found
    resolution = job.states[first].decided
    assert resolution is not None
    assert resolution[0] is Resolution.FAILED
