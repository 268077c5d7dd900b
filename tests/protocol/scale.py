"""Ten events in a job of thousands of ranks: production code over a model of store, wire, hosts and clock.

    python -m tests.protocol.scale --ranks 16384 [--per-host 8] [--events late,silent,...] [--json FILE]

Each rank has a production `Monitor`, in the loop of its own thread, with `GroupState`, `Revocation`, reports and
incidents; it runs as a greenlet of one queue of events, so that a request to the store takes its time while all others
go on. The store's host works off one request after the other, for as long as a real TCPStore took for one of its kind
(`benchmarks/store_requests.py`), and sends answers at the speed of its network. Clocks are those of the model. With
`--compute` what Python takes for a step is measured while the simulation runs and passes in the model too, so that a
coordinator that reads thousands of reports takes as long as a real one.

Of a caller there is what a verdict depends on: it enters, its deadline passes, its connection with a process that ends
breaks, it gives up. Not modelled: data, communicators, the building of a next generation.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import heapq
import itertools
import json
import logging
import mmap
import os
import random
import resource
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import greenlet
import pytest

from ncclguard.coordination import (
    group_state as state_module,
    liveness as liveness_module,
    monitor as monitor_module,
    revocation as revocation_module,
    store as store_module,
)
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.host_page import SIZE, HostPage
from ncclguard.coordination.incidents import summarise
from ncclguard.coordination.inquiry import Patience
from ncclguard.coordination.liveness import Identity, Sight
from ncclguard.coordination.monitor import Monitor, MonitorSettings
from ncclguard.coordination.store import AgreementStore
from ncclguard.engine import description as description_module
from ncclguard.engine.attempt import SLICE
from ncclguard.engine.description import Description, History
from ncclguard.incident.stacks import Fetched
from ncclguard.outcome import Cause
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Operation, TroubleKind, Verdict
from ncclguard.protocol.member import Entry, Resolution
from ncclguard.protocol.timing import Timing
from ncclguard.transport.links import distances

T = TypeVar("T")

#: Seconds of the store's host for a request, for each further key in one for many, for each value that many are answered
#: with, and for each byte: benchmarks/store_requests.py on a TCPStore of torch 2.13, docs/scale.md.
REQUEST, FURTHER_KEY, EACH_VALUE, EACH_BYTE = 15e-6, 0.3e-6, 2.5e-6, 0.3e-9
#: Seconds from one process to another, with waking it up, and bytes a second that the store's host can send.
WIRE, BANDWIDTH = 50e-6, 25e9 / 8
#: Seconds that a rank of the same host takes to fetch the stacks of one that does not answer.
FETCHING = 0.1
#: Seconds that a process takes to end once it has said goodbye.
ENDING = 0.2
GROUP = "group:cpu:0"
STACK = tuple(f"train.py:{line} in step_{line}: loss = model(batch[{line}])" for line in range(30))


class StoreGone(ConnectionError):
    """The connection to the store was reset, as torch would report it."""


class Task(greenlet.greenlet):
    """A thread of one rank."""

    rank = -1
    asks = 0  # how often it has waited: what arrives for an earlier wait finds that it is over


@dataclass(eq=False)
class Flag:
    """`threading.Event` for tasks."""

    world: World
    up: bool = False
    waiting: list[tuple[Task, int]] = field(default_factory=list)

    def is_set(self) -> bool:
        return self.up

    def clear(self) -> None:
        self.up = False

    def set(self) -> None:
        self.up = True
        waiting, self.waiting = self.waiting, []
        for task, ask in waiting:
            self.world.at(self.world.clock(), self.world.resume, task, ask, True)

    def wait(self, timeout: float | None = None) -> bool:
        if not self.up:
            task = self.world.current
            self.waiting = [(other, ask) for other, ask in self.waiting if other.asks == ask]
            self.waiting.append((task, task.asks))
            self.world.pause(timeout)
        return self.up


class Thread:
    """`threading.Thread` as a task of the rank that makes it."""

    def __init__(
        self, world: World, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
    ) -> None:
        self._world = world
        self._ended = Flag(world)
        self._started = False
        self._target = lambda: target(*args)

    def start(self) -> None:
        self._started = True
        self._world.spawn(self._world.current_rank, self._run)

    def _run(self) -> None:
        self._target()
        self._ended.set()

    def is_alive(self) -> bool:
        return self._started and not self._ended.up

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


class Server:
    """The job's store, and the time of its host: one request after the other, in the order of arrival."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.free_at = 0.0
        self.link_free_at = 0.0
        self.busy = 0.0

    def serve(self, now: float, cost: float, answer: int) -> float:
        """Work a request off that arrives now and is answered with so many bytes; returns when that answer leaves."""
        cost += answer * EACH_BYTE
        self.busy += cost
        self.free_at = max(now, self.free_at) + cost
        self.link_free_at = max(self.free_at, self.link_free_at) + answer / BANDWIDTH
        return self.link_free_at


class Connection:
    """One rank's connection to the store, with the calls that the agreement makes of a TCPStore."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._values = world.server.values

    def _ask(self, operate: Callable[[], tuple[T, int]], cost: float = REQUEST) -> T:
        return self._world.ask(self._rank, operate, cost)

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: (all(key in self._values for key in keys), 8), REQUEST + len(keys) * FURTHER_KEY)

    def get(self, key: str) -> bytes:
        # TCPStore::get waits for the key first: two requests.
        return self._ask(lambda: (self._values[key], len(self._values[key])), 2 * REQUEST)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        def operate() -> tuple[list[bytes], int]:
            found = [self._values[key] for key in keys]
            self._world.read[self._rank] += len(keys)
            return found, sum(map(len, found))

        return self._ask(operate, 2 * REQUEST + len(keys) * (FURTHER_KEY + EACH_VALUE))

    def set(self, key: str, value: str) -> None:
        written = value.encode()
        self._world.tell(self._rank, lambda: self._values.__setitem__(key, written), REQUEST + len(value) * EACH_BYTE)

    def add(self, key: str, amount: int) -> int:
        def operate() -> tuple[int, int]:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = b"%d" % total
            return total, 8

        return self._ask(operate)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        wanted, written = expected.encode(), desired.encode()

        def operate() -> tuple[bytes, int]:
            if self._values.get(key, b"") == wanted:
                self._values[key] = written
            found = self._values.get(key, wanted)
            return found, len(found)

        return self._world.ask(self._rank, operate, REQUEST + len(written) * EACH_BYTE)


class HostMemory:
    """What the ranks of one host share, in the simulation's own memory; takes room only where something is written."""

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # each event has its own

    def read(self, at: int, size: int) -> bytes:
        return self._bytes[at : at + size]

    def write(self, at: int, data: bytes) -> None:
        self._bytes[at : at + len(data)] = data

    def hide(self) -> None: ...

    def close(self) -> None: ...


class Surroundings:
    """What a rank sees of the processes of others, in place of /proc and connections: `Liveness`."""

    def __init__(self, world: World, rank: int) -> None:
        host = f"node{world.host(rank)}"
        self._world = world
        self._reached: set[int] = set()
        self.identity = Identity(rank, host, host, pid=1000 + rank, start_ticks=1, port=(host, 1))

    def look(self, peer: Identity) -> tuple[Sight, str]:
        world, me = self._world, self.identity.rank
        here = world.host(peer.rank) == world.host(me)
        if not here and not world.connected(me, peer.rank):
            return Sight.UNKNOWN, "its host cannot be reached"
        if peer.rank in world.killed:
            gone = here or peer.rank in self._reached
            return (Sight.GONE, "it has ended") if gone else (Sight.UNKNOWN, "its port refuses, and was never reached")
        self._reached.add(peer.rank)
        if here:
            return (Sight.STOPPED, "it is stopped") if peer.rank in world.stopped else (Sight.RUNNING, "it runs")
        return Sight.PRESENT, "it answers: the process exists"

    def befriend(self, peer: Identity) -> None:
        self.look(peer)

    def seek(self, peers: Iterable[Identity], since: float) -> None: ...

    def drain(self) -> None: ...


class World:
    """A job: its ranks on hosts of `per_host`, its store in the process of rank 0, and one queue of events."""

    def __init__(
        self,
        size: int,
        patch: pytest.MonkeyPatch,
        per_host: int = 8,
        compute: bool = False,
        timeout: float = 2.0,
        pages: bool = True,
    ) -> None:
        self.size, self.per_host, self.compute, self.timeout = size, per_host, compute, timeout
        self.now = 1000.0
        self.current = self._nobody = Task()
        self.server = Server()
        self.requests: Counter[int] = Counter()
        self.read: Counter[int] = Counter()  # values that each rank has read many at a time
        self.killed: set[int] = set()
        self.stopped: set[int] = set()
        self.cut: set[int] = set()  # on hosts that the store's cannot reach, nor any other outside
        self.store_reset = False
        self.timing = Timing.of(size)
        self.grace = self.timing.grace
        self._pages = [HostMemory() for _ in range(0, size, per_host)] if pages else []
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self._hub = greenlet.getcurrent()
        self._began = 0.0  # processor seconds of this thread when the current task went on
        self._over: list[Task] = []
        self._deferred: list[tuple[Task, int, object]] = []  # of stopped processes
        # What became of the call:
        self.calls: dict[int, OpenCall] = {}
        self.decided: dict[int, tuple[float, Resolution, Verdict]] = {}
        self.alone: dict[int, float] = {}
        self.ended_before: set[int] = set()  # processes that were ended before their call was
        self.before: Counter[int] = Counter()  # requests of each rank until something went wrong
        self.spent: dict[int, int] = {}  # and from then until its call ended
        self._patch(patch)
        self.members = tuple(range(size))
        self.monitors = [self._monitor(rank) for rank in range(size)]
        self.states = [monitor.state(GROUP, self.members) for monitor in self.monitors]

    # ------------------------------------------------------------------ time and tasks

    def clock(self) -> float:
        return self.now + self._charge()

    def _charge(self) -> float:
        """Seconds that the current task has computed since it went on."""
        return time.thread_time() - self._began if self.compute and self.current is not self._nobody else 0.0

    def at(self, when: float, do: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._queue, (when, next(self._number), do, arguments))

    def run(self, until: float, reached: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass until something is so; False where it is not by then."""
        while not reached():
            if not self._queue or self._queue[0][0] > until:
                self.now = max(self.now, until)
                return reached()
            self.now, _, do, arguments = heapq.heappop(self._queue)
            do(*arguments)
        return True

    @property
    def current_rank(self) -> int:
        return self.current.rank

    def spawn(self, rank: int, target: Callable[[], None], when: float | None = None) -> None:
        task = Task(target, self._hub)
        task.rank = rank
        self.at(self.clock() if when is None else when, self.resume, task, 0, None)

    def resume(self, task: Task, ask: int, answer: object) -> None:
        """Let a task go on with what it has waited for, unless that wait is over or its process does not run."""
        if task.asks != ask or task.rank in self.killed:
            self._over.append(task)  # one that is forgotten would run to its end
            return
        if task.rank in self.stopped:
            self._deferred.append((task, ask, answer))
            return
        task.asks += 1
        self.current = task
        self._began = time.thread_time() if self.compute else 0.0
        if isinstance(answer, Exception):
            task.throw(answer)
        elif task:
            task.switch(answer)
        else:  # it begins
            task.switch()
        now, self.current = self.clock(), self._nobody
        state = self.states[task.rank]
        if state.decided is not None:
            self._told(task.rank, state, now)
        elif state.unavailable and state.member.trouble is not None:
            self._give_up(task.rank)

    def pause(self, seconds: float | None) -> Any:
        """The current task waits for an answer, or for so long."""
        if seconds is not None:
            self.at(self.clock() + seconds, self.resume, self.current, self.current.asks, None)
        return self._hub.switch()

    def connected(self, one: int, other: int) -> bool:
        return self.host(one) == self.host(other) or (one in self.cut) == (other in self.cut)

    def host(self, rank: int) -> int:
        return rank // self.per_host

    # ------------------------------------------------------------------ the store

    def ask(self, rank: int, operate: Callable[[], tuple[T, int]], cost: float) -> T:
        """A request and its answer; one that does not come is waited for without end, as torch would for minutes."""
        self.requests[rank] += 1
        task = self.current
        self.at(self.clock() + WIRE, self._arrive, task, task.asks, operate, cost)
        return self.pause(None)  # type: ignore[no-any-return]

    def tell(self, rank: int, operate: Callable[[], object], cost: float) -> None:
        """A request that is not acknowledged."""
        self.requests[rank] += 1
        self.at(self.clock() + WIRE, self._arrive, self.current, -1, lambda: (operate(), 0), cost)

    def _arrive(self, task: Task, ask: int, operate: Callable[[], tuple[object, int]], cost: float) -> None:
        if self.store_reset:
            self.at(self.now + WIRE, self.resume, task, ask, StoreGone("connection reset by peer"))
        elif 0 not in self.cut or task.rank in self.cut:
            if (task.rank in self.cut) != (0 in self.cut) or 0 in self.killed:
                return
            answer, size = operate()
            left = self.server.serve(self.now, cost, size)
            if ask >= 0:
                self.at(left + WIRE, self.resume, task, ask, answer)

    # ------------------------------------------------------------------ the ranks

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        clock = types.SimpleNamespace(monotonic=self.clock, sleep=self.pause)
        for module in (store_module, state_module, monitor_module, description_module, liveness_module):
            patch.setattr(module, "time", clock)
        threads = types.SimpleNamespace(
            Event=lambda: Flag(self),
            Thread=lambda **given: Thread(self, **given),
            Lock=threading.Lock,
            current_thread=lambda: None,
            get_native_id=lambda: 0,
        )
        patch.setattr(monitor_module, "threading", threads)
        patch.setattr(revocation_module, "threading", threads)
        patch.setattr(liveness_module, "observe", self._fetch)
        patch.setattr(description_module, "main_thread_stack", lambda: STACK)
        patch.setattr(description_module, "other_threads", list)
        patch.setattr(description_module, "call_site_of", lambda thread: STACK[-1])
        # What all ranks read of one text is worked out once: they are in one process here. In the model each takes its time.
        patch.setattr(codec, "loads_verdict", self._once(codec.loads_verdict))
        patch.setattr(store_module, "_plain", self._once(store_module._plain, longer_than=4096))
        patch.setattr(monitor_module, "json", types.SimpleNamespace(dumps=json.dumps, loads=self._once(json.loads)))

    def _once(self, function: Callable[[Any], T], longer_than: int = 0) -> Callable[[Any], T]:
        known: dict[Any, tuple[T, float]] = {}

        def remembered(text: Any) -> T:
            if len(text) < longer_than:
                return function(text)
            if text in known:
                value, seconds = known[text]
                self._began -= seconds
                return value
            began = time.thread_time()
            value = function(text)
            if len(known) >= 8:
                del known[next(iter(known))]
            known[text] = value, time.thread_time() - began
            return value

        return remembered

    def _fetch(self, pid: int, offer: object) -> Fetched:
        self.pause(FETCHING)
        return Fetched(STACK, (), "it is stopped")

    def _monitor(self, rank: int) -> Monitor:
        monitor: Monitor
        history = History()
        settings = MonitorSettings(
            self.timing,
            lambda group: Patience(30.0, None),
            describe=lambda group, report: Description(monitor, f"node{self.host(rank)}", history).describe(group, report),
            summarise=summarise,
            open_page=lambda session: HostPage(self._pages[self.host(rank)]) if self._pages else None,
        )  # fmt: skip
        store = AgreementStore(Connection(self, rank))  # type: ignore[arg-type]
        monitor = Monitor(store, rank, self.size, Surroundings(self, rank), settings)  # type: ignore[arg-type]
        return monitor

    def join(self, handshake: bool = True) -> float:
        """All ranks start within half a second of each other and agree on their session; returns how long that took.

        Without `handshake` they know the session already.
        """
        began = self.now
        for rank, monitor in enumerate(self.monitors):
            if not handshake:
                monitor._handshake = types.SimpleNamespace(
                    nonce="0123456789ab", about_first=monitor._settings.about, step=lambda: True
                )  # type: ignore[assignment]
            self.spawn(rank, monitor.start, began + rank * 0.618034 % 1 / 2)
        joined = self.run(began + 120.0, lambda: all(monitor.session_ready.is_set() for monitor in self.monitors))
        assert joined, "the ranks have not joined within two minutes"
        taken = self.now - began
        self.run(self.now + 2.0)  # what happens once is over: lists are read, ranks next to each other have met
        return taken

    # ------------------------------------------------------------------ callers

    def enter(self, ranks: Iterable[int]) -> None:
        """These ranks call an operation within 20 ms of each other; then deadlines pass."""
        operation = Operation(0, 7, "all_reduce(1)", True)
        for rank in ranks:
            if rank not in self.killed:
                self.at(self.now + rank * 0.618034 % 1 * 0.02, self._enter, rank, operation)

    def _enter(self, rank: int, operation: Operation) -> None:
        state = self.states[rank]
        call = OpenCall(operation.text, self.now, self.now + self.timeout, thread=0)
        entry, _ = state.member.enter(operation)
        assert entry is Entry.START, entry
        state.wait_in(call)
        self.calls[rank] = call
        self.at(call.deadline, self.trouble, rank, TroubleKind.DEADLINE, f"not complete after {self.timeout:g} s")
        self.at(call.deadline + self.grace, self._await, rank)

    def in_call(self, rank: int) -> bool:
        ended = rank in self.decided or rank in self.alone or rank in self.ended_before
        return rank in self.calls and not ended and rank not in self.killed

    def trouble(self, rank: int, kind: TroubleKind, text: str, peer: int = -1) -> None:
        """Something goes wrong for a caller that is in its call."""
        if not self.in_call(rank) or rank in self.stopped:
            return
        state = self.states[rank]
        if state.trouble(state.member.generation, kind, text, peer):
            self.monitors[rank].wake()
        if state.unavailable:
            self._give_up(rank)

    def _await(self, rank: int) -> None:
        """A caller whose budget is over looks from time to time whether it has to go on waiting for the verdict."""
        if self.in_call(rank) and rank not in self.stopped:
            if self.now >= self.calls[rank].deadline + self.monitors[rank].caller_waits():
                self._give_up(rank)
            else:
                self.at(self.now + SLICE, self._await, rank)

    def _give_up(self, rank: int) -> None:
        if self.in_call(rank):
            state = self.states[rank]
            state.member.give_up()
            state.wait_in(None)
            self._ended(rank)
            self.alone[rank] = self.now

    def _told(self, rank: int, state: GroupState, now: float) -> None:
        decided = state.verdict_within(0.0)
        if decided is None or not self.in_call(rank):
            return
        resolution, verdict, _ = decided
        if resolution in (Resolution.RESUMED, Resolution.RESTARTED):
            return  # it goes on waiting, on the next generation
        state.wait_in(None)
        self._ended(rank)
        self.decided[rank] = now, resolution, verdict

    def _ended(self, rank: int) -> None:
        self.spent[rank] = self.requests[rank] - self.before[rank]

    # ------------------------------------------------------------------ what goes wrong

    def kill(self, ranks: Iterable[int]) -> None:
        """Processes end: the kernel closes their connections, and the callers at the other ends see that."""
        ranks = set(ranks)
        for rank in ranks:
            if self.in_call(rank):
                self.ended_before.add(rank)
            self.killed.add(rank)
        self.store_reset = self.store_reset or 0 in ranks
        for rank in ranks:
            for distance in distances(self.size):
                for peer in ((rank - distance) % self.size, (rank + distance) % self.size):
                    if self.connected(rank, peer):
                        why = f"the connection with rank {rank} broke: connection reset by peer"
                        self.at(self.now + WIRE, self.trouble, peer, TroubleKind.TRANSPORT, why, rank)

    def raise_in(self, ranks: Iterable[int]) -> None:
        """Callers are interrupted by an exception."""
        for rank in ranks:
            self.trouble(rank, TroubleKind.RAISED, "RuntimeError: CUDA error: an illegal memory access")

    def vanish(self, ranks: Iterable[int]) -> None:
        """Hosts without power: nothing comes from them any more, and nobody is told."""
        self.cut.update(ranks)
        self.stopped.update(ranks)

    def speaking(self, hosts: Iterable[int]) -> int:
        """A rank of one of these hosts whose request to the store is under way; -1 where none is."""
        asking = {entry[3][0].rank for entry in self._queue if entry[2] == self._arrive}
        return next((rank for rank in sorted(asking) if self.host(rank) in hosts), -1)

    def terminate(self, rank: int) -> None:
        """The launcher sends SIGTERM; as `Runtime` does then, with the end of the process."""

        def end() -> None:
            monitor = self.monitors[rank]
            monitor.settle(self.timing.leave)
            monitor.depart(Cause.LOST, "was sent SIGTERM", self.timing.leave, {"stack": list(STACK)}, terminated=True)
            if rank == 0:
                monitor.settle(self.timing.leave, self.timing.linger)
            self.at(self.clock() + ENDING, self.kill, [rank])

        if rank not in self.killed:
            self.spawn(rank, end)

    def fail(self, rank: int) -> None:
        """An exception that nobody catches ends the program of a rank outside of any call."""

        def end() -> None:
            why = "RuntimeError: CUDA error: an illegal memory access"
            self.monitors[rank].depart(Cause.FAILED, why, self.timing.leave, {"stack": list(STACK)})
            self.at(self.clock() + ENDING, self.kill, [rank])

        self.spawn(rank, end)


# ---------------------------------------------------------------------- the events

Culprits = dict[int, Cause]


@dataclass
class Expected:
    """What should come of an event: who is named, and which ranks cannot know because they do not reach the store."""

    culprits: Culprits
    unreachable: set[int] = field(default_factory=set)
    fault: float = 0.0  # seconds after the call began; 0: before


#: Seconds after the beginning of the call at which something happens to ranks that wait in it.
MOMENT = 1.2


def _middle(world: World) -> int:
    """A rank that is neither the first nor the last of its host, which is not the store's."""
    return world.host(world.size * 3 // 7) * world.per_host + min(3, world.per_host - 1)


def one_late(world: World) -> Expected:
    rank = _middle(world)
    world.enter(other for other in range(world.size) if other != rank)
    return Expected({rank: Cause.LATE})


def one_silent(world: World) -> Expected:
    rank = _middle(world)
    world.stopped.add(rank)
    world.enter(other for other in range(world.size) if other != rank)
    return Expected({rank: Cause.STUCK})


def silent_host(world: World) -> Expected:
    first = _middle(world) // world.per_host * world.per_host
    ranks = range(first, first + world.per_host)
    world.vanish(ranks)
    world.enter(other for other in range(world.size) if other not in ranks)
    return Expected(dict.fromkeys(ranks, Cause.UNKNOWN))


def store_host_gone(world: World) -> Expected:
    ranks = range(world.per_host)
    world.enter(range(world.size))
    world.at(world.now + MOMENT, world.vanish, ranks)
    return Expected({}, set(range(world.size)), MOMENT)


def store_killed(world: World) -> Expected:
    world.enter(range(world.size))
    world.at(world.now + MOMENT, world.kill, [0])
    return Expected({}, set(range(world.size)), MOMENT)


def speaker_killed(world: World) -> Expected:
    return _without_speaker(world, Cause.LOST, lambda rank: world.kill([rank]))


def speaker_stopped(world: World) -> Expected:
    return _without_speaker(world, Cause.STUCK, world.stopped.add)


def _without_speaker(world: World, cause: Cause, end: Callable[[int], None]) -> Expected:
    """A rank goes while its request to the store is under way, for itself or for its host."""
    expected = Expected({}, fault=MOMENT)
    hosts = range(world.host(_middle(world)), world.host(world.size - 1))

    def strike() -> None:
        rank = world.speaking(hosts)
        if rank < 0:
            world.at(world.now + WIRE / 2, strike)
            return
        expected.culprits[rank] = cause
        end(rank)

    world.enter(range(world.size))
    world.at(world.now + MOMENT, strike)
    return expected


def partition(world: World) -> Expected:
    half = range(world.host(world.size // 2) * world.per_host, world.size)
    world.enter(range(world.size))
    world.at(world.now + MOMENT, world.cut.update, half)
    return Expected(dict.fromkeys(half, Cause.UNKNOWN), set(half), MOMENT)


def one_percent(world: World) -> Expected:
    """Half of them are killed, the other half raise in the call."""
    draw = random.Random(world.size)
    ranks = sorted(draw.sample(range(1, world.size), max(2, world.size // 100)))
    killed, raised = ranks[::2], ranks[1::2]
    world.enter(range(world.size))
    world.at(world.now + MOMENT, world.kill, killed)
    world.at(world.now + MOMENT, world.raise_in, raised)
    return Expected({**dict.fromkeys(killed, Cause.LOST), **dict.fromkeys(raised, Cause.FAILED)}, fault=MOMENT)


def launcher(world: World) -> Expected:
    """One rank raises outside of the call; its launcher ends all others 0.3 s later, within 0.2 s."""
    rank = _middle(world)
    world.enter(other for other in range(world.size) if other != rank)
    world.at(world.now + MOMENT, world.fail, rank)
    for other in range(world.size):
        if other != rank:
            world.at(world.now + MOMENT + 0.3 + world.host(other) * 0.618034 % 1 * 0.2, world.terminate, other)
    return Expected({rank: Cause.FAILED}, fault=MOMENT)


EVENTS: dict[str, tuple[str, Callable[[World], Expected]]] = {
    "late": ("one rank late", one_late),
    "silent": ("one rank stopped", one_silent),
    "host": ("a silent host", silent_host),
    "store": ("the store's host gone", store_host_gone),
    "reset": ("the store's process killed", store_killed),
    "speaker": ("the speaker of a host killed", speaker_killed),
    "mute": ("the speaker of a host stopped", speaker_stopped),
    "partition": ("half the ranks cut off", partition),
    "many": ("1 % of the ranks fail", one_percent),
    "launcher": ("the launcher ends all", launcher),
}


@dataclass
class Result:
    """What an event came to. Seconds are those of the model, but for `wall` and `processor`."""

    event: str
    agreed: int  # ranks with a verdict
    verdicts: int  # different ones
    should: int  # ranks that should have one: alive, in the call, and able to reach the store
    alone: int  # ranks that returned a verdict of their own
    ended: int  # processes that were ended before their call was
    right: bool  # whether the culprits are those, and no rank names another
    culprits: str
    last: float  # seconds after its deadline at which the last rank returned
    after: float  # and after the fault
    bound: float
    mean: float  # requests of a rank from the fault, or the first deadline, to the end of its call
    most: int
    coordinator: int
    read: int  # values that a rank read many at a time in the event, most of any but the coordinator
    busy: float  # share of the store's host's time while all wait
    verdict_bytes: int
    joining: float
    wall: float
    processor: float
    memory: float  # MiB

    @property
    def holds(self) -> bool:
        """Whether one verdict came to all that it can come to, with the right names, in time."""
        one = self.verdicts == min(1, self.should) and self.agreed >= self.should
        return one and self.right and self.last <= self.bound


def observe(
    world: World, event: str, joining: float = 0.0, happen: Callable[[World], Expected] | None = None
) -> Result:
    """Let an event, or what `happen` does, happen to a job that has joined, until every call has ended."""
    wall, began = time.monotonic(), world.now
    world.read.clear()
    expected = (happen or EVENTS[event][1])(world)
    until = began + (expected.fault or world.timeout)
    world.run(began + 0.3)
    busy, since = world.server.busy, world.now
    world.run(until - 0.001)
    busy = (world.server.busy - busy) / (world.now - since)
    world.before = world.requests.copy()
    ended = world.run(
        began + world.timeout + world.grace + 15.0,
        lambda: len(world.spent) + len(world.ended_before) >= len(world.calls) and bool(world.calls) or _over(world),
    )
    assert ended, "calls have not ended"
    return _result(world, event, expected, began, busy, joining, wall)


def _over(world: World) -> bool:
    return not any(world.in_call(rank) and rank not in world.stopped for rank in world.calls)


def _result(
    world: World, event: str, expected: Expected, began: float, busy: float, joining: float, wall: float
) -> Result:
    verdicts: list[Verdict] = []
    for verdict in {id(verdict): verdict for _, _, verdict in world.decided.values()}.values():
        if verdict not in verdicts:
            verdicts.append(verdict)
    should = {
        rank
        for rank in world.calls
        if rank not in expected.unreachable | world.stopped | world.ended_before
        and rank not in {r for r, cause in expected.culprits.items() if cause is not Cause.FAILED}
    }
    times = {rank: when for rank, (when, _, _) in world.decided.items()} | world.alone
    named = [dict(verdict.culprits) for verdict in verdicts]
    right = all(culprits == expected.culprits for culprits in named) and not _wrongly(world)
    coordinator = verdicts[0].coordinator if verdicts else -1
    spent = [count for rank, count in world.spent.items() if rank != coordinator]
    large = max((len(text) for key, text in world.server.values.items() if key.endswith("/verdict")), default=0)
    return Result(
        event=event,
        agreed=len(world.decided),
        verdicts=len(verdicts),
        should=len(should),
        alone=len(world.alone),
        ended=len(world.ended_before),
        right=right,
        culprits="; ".join(_named(culprits) for culprits in named) or "nobody",
        last=max((when - world.calls[rank].deadline for rank, when in times.items()), default=0.0),
        after=max(times.values(), default=began) - began - (expected.fault or world.timeout),
        bound=world.grace + CLEANING,
        mean=sum(spent) / max(1, len(spent)),
        most=max(spent, default=0),
        coordinator=world.spent.get(coordinator, 0),
        read=max((count for rank, count in world.read.items() if rank != coordinator), default=0),
        busy=busy,
        verdict_bytes=large,
        joining=joining,
        wall=time.monotonic() - wall,
        processor=time.process_time(),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


#: Seconds that a caller has to clean up once it stops waiting: `timing.py`.
CLEANING = 0.2


def _wrongly(world: World) -> list[int]:
    """Ranks that a rank without a verdict would name, although their processes exist."""
    found = set()
    for rank in world.alone:
        monitor = world.monitors[rank]
        near = {peer.rank for peer in monitor.neighbours.here} | {(rank - 1) % world.size, (rank + 1) % world.size}
        found.update(other for other in near - world.killed if monitor.neighbours.gone(other))
    return sorted(found)


def _named(culprits: Culprits) -> str:
    parts = []
    for cause in dict.fromkeys(culprits.values()):
        ranks = [rank for rank, found in culprits.items() if found is cause]
        parts.append(f"{len(ranks)} {cause.value} ({codec.ranges(ranks)[:24]})")
    return ", ".join(parts)


# ---------------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.protocol.scale", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--events", default=",".join(EVENTS), help="of: %(default)s")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds of the call (default %(default)s)")
    parser.add_argument(
        "--join", action="store_true", help="with the handshake of the session, which takes longer to simulate"
    )
    parser.add_argument("--free", action="store_true", help="what Python computes takes no time in the model")
    parser.add_argument("--no-pages", action="store_true", help="each rank asks the store for itself")
    parser.add_argument("--jobs", type=int, default=2, help="events at a time (default %(default)s)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    events = options.events.split(",")
    logging.getLogger("ncclguard").setLevel(logging.CRITICAL)  # thousands of ranks say the same
    with pytest.MonkeyPatch.context() as patch:
        gc.disable()
        began = time.monotonic()
        world = World(options.ranks, patch, options.per_host, not options.free, options.timeout, not options.no_pages)
        joining = world.join(options.join)
        print(
            f"{options.ranks:,} ranks on hosts of {options.per_host}, "
            f"{_joined(world, joining) if options.join else 'which know their session'}, "
            f"{time.monotonic() - began:.0f} s here ({time.process_time():.0f} s of the processor); "
            f"period {world.timing.period:.3g} s, bound {world.grace + CLEANING:.2f} s"
        )
        print(HEAD, flush=True)
        gc.freeze()
        results, under_way = [], deque[Callable[[], Result]]()
        for event in (*events, *[""] * options.jobs):
            if event:
                under_way.append(in_a_child(functools.partial(observe, world, event, joining)))
            if under_way and (not event or len(under_way) == options.jobs):
                results.append(under_way.popleft()())
                print(_line(results[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(found) for found in results], indent=1) + "\n")
    return 0 if all(found.holds for found in results) else 1


def _joined(world: World, seconds: float) -> str:
    requests = sum(world.requests.values()) / world.size
    return (
        f"joined in {seconds:.2f} s of the model, with {requests:.1f} requests of a rank and {world.server.busy:.2f} s "
        "of the store's host until 2 s later"
    )


HEAD = (
    f"{'event':<30}{'verdict':>8}{'ranks':>14}{'alone':>7}{'ended':>7}  {'names':<6}{'after deadline':>15}{'bound':>7}"
    f"{'after fault':>12}{'requests':>9}{'most':>6}{'coord.':>7}{'busy':>6}{'KB':>6}{'wall s':>8}{'cpu s':>7}{'MiB':>7}  named"
)


def _line(found: Result) -> str:
    return (
        f"{EVENTS[found.event][0]:<30}{'one' if found.verdicts == 1 else found.verdicts:>8}"
        f"{f'{found.agreed}/{found.should}':>14}{found.alone:>7}{found.ended:>7}  {'right' if found.right else 'WRONG':<6}"
        f"{found.last:>+13.2f} s{found.bound:>7.2f}{found.after:>+10.2f} s{found.mean:>9.1f}{found.most:>6}"
        f"{found.coordinator:>7}{found.busy:>6.0%}{found.verdict_bytes / 1000:>6.0f}{found.wall:>8.0f}"
        f"{found.processor:>7.0f}{found.memory:>7.0f}"
        f"  {found.culprits}{'' if found.holds else '  <- FAILS'}"
    )


def in_a_child(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begin in a fork, so that each event finds the job as it was when it had joined; returns how to wait for it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), os.fdopen(writer, "w") as pipe:
            try:
                json.dump(asdict(work()), pipe)
            except BaseException:  # noqa: BLE001 - told to whoever reads the terminal; the parent goes on
                sys.excepthook(*sys.exc_info())
        os._exit(0)
    os.close(writer)

    def wait() -> Result:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        if not text:
            raise SystemExit("the simulation ended with an error, which is above")
        return Result(**json.loads(text))

    return wait


if __name__ == "__main__":
    sys.exit(main())
