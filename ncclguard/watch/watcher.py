"""`watch` and its thread: sees that a collective stands still or a peer is gone, and delivers the agreed verdict.

The watcher never talks to the store: that is the monitor's part (`ncclguard.watch.coordination`), so a store that does
not answer cannot blind it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from ncclguard import events, lifecycle, torch_compat
from ncclguard.config import current_config, seconds
from ncclguard.coordination import incidents
from ncclguard.coordination.liveness import Identity, Sight, look_here
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import AgreementStore
from ncclguard.deadlines.stopping import Stop
from ncclguard.engine import runtime
from ncclguard.environment.network import launched_ranks
from ncclguard.errors import CollectiveFailed, GuardConfigError, GuardError, error_for, headline
from ncclguard.groups import check_group
from ncclguard.incident.model import Incident
from ncclguard.incident.stacks import exit_status, process_state
from ncclguard.metrics.monitoring import show_watched
from ncclguard.metrics.records import OpenOperation, SlowRanks
from ncclguard.outcome import of_incident
from ncclguard.phases import phases_of, resolve_timeout
from ncclguard.protocol.decision import Report, TroubleKind, Verdict
from ncclguard.spelling import hinted
from ncclguard.watch.comparison import Comparison
from ncclguard.watch.coordination import KEY, WatchCoordination, WatchState, open_call
from ncclguard.watch.judge import BROKEN, CALLED, is_consequence
from ncclguard.watch.pace import Sampler, SlowSearch
from ncclguard.watch.recorder import Pending, Recorder
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import beside, say, told, tr

if TYPE_CHECKING:
    from typing_extensions import Self


class Processes:
    """Used by one thread, except `wake`. Costs nothing while all live: the kernel ends the wait (pidfd_open(2))."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.POLLIN)
        self._peers: dict[int, Identity] = {}
        self._descriptors: dict[int, int] = {}  # pidfd -> rank
        self._polled: set[int] = set()  # ranks of which there is no descriptor
        self._ended: set[int] = set()

    def learn(self, peers: Iterable[Identity]) -> None:
        """Watch these ranks' processes too."""
        for peer in peers:
            if peer.rank in self._peers:
                continue
            self._peers[peer.rank] = peer
            try:
                descriptor = os.pidfd_open(peer.pid)
            except (OSError, AttributeError):  # gone already, or an old kernel: looked at with every wait
                self._polled.add(peer.rank)
                continue
            state = process_state(peer.pid)
            if state is None or state[1] != peer.start_ticks:  # the pid belongs to a later process
                os.close(descriptor)
                self._polled.add(peer.rank)
                continue
            self._descriptors[descriptor] = peer.rank
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> list[tuple[int, str]]:
        """Return ranks whose process has ended, with the evidence: as soon as one has, or after `wake` or `seconds`."""
        events = self._poll.poll(max(seconds, 0.0) * 1000)
        found = []
        for descriptor, _ in events:
            if descriptor == self._bell:
                self._quieten()
                continue
            rank = self._descriptors.pop(descriptor)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            if rank not in self._ended:
                self._ended.add(rank)
                found.append((rank, self._evidence(rank)))
        for rank in sorted(self._polled - self._ended):
            sight, evidence = look_here(self._peers[rank])
            if sight is Sight.GONE:
                self._ended.add(rank)
                found.append((rank, evidence))
        return found

    def wake(self) -> None:
        """End the wait; any thread, also after `close`."""
        bell = self._bell
        if bell >= 0:
            with suppress(OSError):  # closed meanwhile
                os.eventfd_write(bell, 1)

    def close(self) -> None:
        """Release the descriptors; not while a thread waits."""
        bell, self._bell = self._bell, -1  # its number is soon another's
        for descriptor in (bell, *self._descriptors):
            os.close(descriptor)
        self._descriptors.clear()

    def _quieten(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return

    def _evidence(self, rank: int) -> str:
        peer = self._peers[rank]
        text = tr("process {pid} of rank {rank} on {host} has ended", pid=peer.pid, rank=rank, host=peer.host)
        how = exit_status(peer.pid)
        return f"{text}: {how}" if how else text


def interrupt(
    threads: Iterable[int], incident: Incident, seconds: float, raised: Callable[[], None] = lambda: None
) -> tuple[int, ...]:
    """Have the typed error of an incident raised in threads, by ``threading.get_ident()``, and in the main thread.

    Where one sits in a native call it is raised as soon as that returns, and `raised` is called then. Threads that are
    not Python's are left out. Returns those that will raise it.
    """
    error = _error_without_arguments(incident, seconds, raised)
    living = {thread.ident for thread in threading.enumerate()}
    reached = tuple(thread for thread in {threading.main_thread().ident, *threads} & living if thread is not None)
    for thread in reached:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
    return reached


def _error_without_arguments(incident: Incident, seconds: float, raised: Callable[[], None]) -> type[CollectiveFailed]:
    """A class of its own, because CPython makes the instance of such an exception by itself."""
    outcome = of_incident(incident, seconds, torn=True)
    kind = type(error_for(outcome))

    def make(self: CollectiveFailed) -> None:
        raised()
        kind.__init__(self, outcome)

    names = {"__init__": make, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "ended_by_watch": True}
    return type(kind.__name__, (kind,), names)


log = logging.getLogger("ncclguard")

#: Seconds for which a collective must have stood still before anything is read or said.
STILL: float = 1.0
#: The same, and the longest pause between two looks at the counters, once some rank of the job is gone.
HURRIED_STILL: float = 0.25
HURRIED_LOOK: float = 0.1
#: Seconds between two readings of the recorder while it does.
AGAIN: float = 5.0
#: Seconds after a reason to ask, at least, at which a rank goes by what it sees alone, when no verdict can come.
ALONE_AFTER: float = 4.0
#: Seconds that an exception or a SIGTERM which ends the program waits for the verdict on who caused it.
LAST_WORDS: float = 2.0
#: Seconds for which the end of the program waits for this thread, which may be about to deliver a verdict.
DELIVERED_WITHIN: float = 5.0
#: Seconds after a backend has reported a broken connection at which that is an incident: who died is known by then.
BROKEN_GRACE: float = 3.0
#: The same, once nothing can be agreed any more: the others, who decide alone too, are to find this process alive.
LINGER: float = 1.0
#: Seconds after which a function of the program that has not returned is warned of, and those that the end of the
#: program waits for one.
CALLBACK_TAKES: float = 10.0
CALLBACK_ENDS: float = 2.0


#: Called in the watcher's thread with each verdict that has an incident: that, the number of verdicts so far, what is
#: pending here, and for how many seconds.
ending: list[Callable[[Incident, int, Sequence[Pending], float], None]] = []
#: Limits of collectives, in seconds, of groups that have one of their own, by what the flight recorder calls the group.
limits: dict[str, Callable[[], float | None]] = {}


@dataclass
class Settings:
    """The settings that the user asked for, and what was found so far."""

    timeout: float | None
    abort: bool
    on_incident: Callable[[Incident], None] | None
    on_slow: Callable[[SlowRanks | None], None] | None
    group: dist.ProcessGroup | None
    incidents: list[Incident] = field(default_factory=list)
    slow: SlowRanks | None = None


class Callbacks:
    """Calls functions of the program one after another, in a thread of its own: one that blocks holds up no watch.

    Used by the watcher's thread, except `finish`.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None  # while there is something to call
        self._began = math.inf  # time.monotonic() of the call in progress that has not been warned of

    def call(self, name: str, function: Callable[[], None]) -> None:
        """Have `function` called once the earlier ones have returned, and return at once."""
        with self._condition:
            self._waiting.append((name, function))
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="ncclguard-callbacks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the program has ended: Python 3.12 starts no threads any more
            self._run()

    def warn(self, now: float) -> None:
        """Say once that a call takes long."""
        with self._condition:
            if now - self._began < CALLBACK_TAKES:
                return
            self._began = math.inf
            name = self._waiting[0][0]
        text = told(
            "{name} has not returned for {seconds:g} s: the watch goes on, but later calls of on_incident and on_slow wait "
            "for it; give what it does a time limit",
            name=name,
            seconds=CALLBACK_TAKES,
        )
        log.warning("ncclguard: %s", text)

    def finish(self, seconds: float) -> None:
        """Give what has been begun so long to return."""
        with self._condition:
            if self._thread is not threading.current_thread():
                self._condition.wait_for(lambda: self._thread is None, seconds)

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._waiting:
                    self._thread, self._began = None, math.inf
                    self._condition.notify_all()
                    return
                name, function = self._waiting[0]
                self._began = time.monotonic()
            with _kept_alive(name):
                function()
            with self._condition:
                self._waiting.popleft()


class Watcher:
    """`start`, then `close`; `uncaught` with an exception that is about to end the program."""

    def __init__(self, monitor: Monitor, rank: int, world_size: int, settings: Settings) -> None:
        state = monitor.state(KEY, tuple(range(world_size)))
        assert isinstance(state, WatchState)
        self._state = state
        self._monitor = monitor
        self._rank = rank
        self._settings = settings
        self._config = current_config()
        self._processes = Processes()
        self._aborted = False  # every collective of the job has been ended, and processes end with them
        asks = partial(self._ask, unless=lambda: self._aborted)
        self._coordination = WatchCoordination(monitor, state, rank, self._config.warn_after, asks, self._wakes)
        self._counters: dict[str, tuple[tuple[int, int], float]] = {}
        self._examined: dict[str, tuple[tuple[int, int], float]] = {}
        self._told: dict[str, int] = {}  # channel -> number of the collective that the last incident was about
        # What this rank had issued last when it heard of the last incident.
        self._last_told: tuple[str, int] | None = None
        self._callbacks = Callbacks()
        self._over = False  # aborted, or a rank is gone: what breaks from now on is a consequence
        self._asked_at: float | None = None
        # What an agreement has let go on: its channel and number, and the age at which it is asked about again.
        self._let_go_on: dict[str, tuple[int, float]] = {}
        self._broken: dict[str, float] = {}  # channel -> when its backend reported an error first
        self._closing = False
        self._warned_blind = False
        self._standing: tuple[Pending, ...] = ()  # collectives that stand still now
        self._stood = -math.inf  # time.monotonic() when some did last
        self._sampler = Sampler(Recorder(), rank, self._in_guarded_call, self._config.slow_ranks == "watch")
        self._search = SlowSearch(monitor, self._sampler, self._slow_found)
        self._comparison = Comparison(
            monitor, state, self._calls_counted, self._channel_concerns, self._ask, self._wakes
        )
        self._slow: deque[tuple[SlowRanks | None, int]] = deque()  # findings not told of here yet, and who judged
        self._hide: Callable[[], None] = lambda: None  # from `ncclguard top`
        self._thread = threading.Thread(target=self._run, name="ncclguard-watch", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin."""
        self._state.observe(self._limit, self._wakes)
        self._monitor.on_step = self._step
        self._monitor.hearers |= {"slow": self._search.hear, **self._comparison.hearers}
        if torch_compat.under_detail():
            log.warning(
                "ncclguard: %s",
                told(
                    "under TORCH_DISTRIBUTED_DEBUG=DETAIL torch's flight recorder does not say which group a collective "
                    "belongs to, so watch() reports processes that end and exceptions only; use INFO to have hangs reported",
                    "log",
                ),
            )
        self._state.recorder.status()
        self._warn_of_blindness()
        self._thread.start()
        self._hide = show_watched(self)

    def close(self) -> None:
        """Stop, after a verdict that is on its way; once."""
        if self._closing:
            return
        awaited = not self._state.settled.is_set() and not self._state.unavailable
        if awaited and threading.current_thread() is not self._thread:
            self._state.settled.wait(LAST_WORDS)
        self._closing = True
        self._hide()
        self._monitor.on_step = None
        self._monitor.hearers.clear()
        self._sampler.close()
        self._wakes()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(DELIVERED_WITHIN)
        self._state.observe_no_more()
        self.finish_callbacks()

    def compare_last_calls(self, reports: Mapping[int, Report]) -> None:
        """Tell where ranks that have all left did not call the same last, or anything: nobody can be asked now."""
        all_said = len(reports) == len(self._state.member.members)
        if all_said and not any(one.done or one.details.get(CALLED) for one in reports.values()):
            text = told(
                "watch() has seen no collective of torch.distributed in this job of {count} ranks: if they were to train "
                "together, each has trained by itself (Accelerate does so on CPUs, unless it is told use_cpu=True)",
                count=len(reports),
            )
            log.warning("ncclguard: %s", text)
            return
        incident = incidents.from_json(self._state.judge_last_calls(reports))
        if incident is not None:
            incident = incident.model_copy(update={"agreed": False})
            self._state.publish_alone(incident)
            self._conclude(incident, None)
            self.finish_callbacks()

    def finish_callbacks(self) -> None:
        """Give functions of the program that have been begun a moment to return: the process is about to end."""
        self._callbacks.finish(CALLBACK_ENDS)

    def slow(self) -> SlowRanks | None:
        """Return who makes the job slow, as all ranks know it."""
        return self._settings.slow

    def verdict(self) -> str:
        """Return the last verdict on what still stands still."""
        standing = {str(pending.sequence) for pending in self._standing}
        told = (one for one in reversed(self._settings.incidents) if one.op_id.rpartition("/")[2] in standing)
        return next((one.summary for one in told), "")

    def issued(self) -> dict[str, int]:
        """Return how many collectives this process has issued, by channel."""
        return self._state.recorder.issued()

    def awaited(self) -> list[dict[str, Any]]:
        """Return whom this rank has found awaited in what still stands still."""
        if self._coordination.answered is None:
            return []
        asked, age, lines = self._coordination.answered
        if not any((one.channel, one.sequence) == (asked.channel, asked.sequence) for one in self._standing):
            return []
        said = {"group": asked.channel, "sequence": asked.sequence, "text": asked.text, "lines": lines}
        return [{**said, "by": self._rank, "age": round(age, 1)}]

    def waiting(self) -> list[OpenOperation]:
        """Return the collectives that stand still."""
        ages = [(p, self._state.age(p)) for p in self._standing]
        return [
            OpenOperation(
                group=p.channel, op_id=f"{p.channel}/{p.sequence}", text=p.text, age=age, limit=self._limit(p),
                late=age > self._config.warn_after,
            )
            for p, age in ages
        ]  # fmt: skip

    def uncaught(self, error: BaseException, text: str) -> str:
        """Find out first who broke a collective whose exception ends the program; return `text` with that said."""
        if not _from_collective(error):
            return text
        text = text if is_consequence(text) else f"{text} {BROKEN}"
        moved = time.monotonic() - self._stood > STILL
        if self._over or self._closing or (moved and isinstance(error, KeyboardInterrupt)):
            return text
        self._broke(text)
        self._state.settled.wait(LAST_WORDS)
        end = time.monotonic() + 0.5
        while self._state.verdicts and self._thread.is_alive() and time.monotonic() < end:
            time.sleep(0.005)  # it is being delivered
        if self._state.unavailable:
            time.sleep(LINGER)
        return text

    def terminated(self) -> None:
        """Wait for the verdict on a rank of this host that is gone: a launcher ends the others because of it."""
        end = time.monotonic() + LAST_WORDS
        while not self._closing and self._thread.is_alive() and time.monotonic() < end and self._is_owed():
            time.sleep(0.01)

    def _is_owed(self) -> bool:
        """Return whether a verdict is awaited, or being delivered, or is soon to be on a rank that is gone."""
        if self._state.verdicts or not self._state.settled.is_set():
            return True
        return not self._over and not self._state.unavailable and self._coordination.somebody_is_gone()

    def suspect(self, text: str) -> None:
        """The collective that was issued last broke here, in words: find out whose fault it is."""
        self._broke(f"{text} {BROKEN}")

    def _broke(self, text: str) -> None:
        self._state.broke(text)
        kind = TroubleKind.DEADLINE if torch_compat.is_of_limit(text) else TroubleKind.TRANSPORT
        self._ask(kind, text, unless=self._is_over)

    def _is_over(self) -> bool:
        """Return whether what breaks from now on is a consequence; a verdict may have come and not been delivered."""
        return self._over or any(map(self._ends_elsewhere, tuple(self._state.verdicts)))

    def _ends_elsewhere(self, verdict: Verdict) -> bool:
        """Return whether ranks that have been told a verdict have ended what this one waits in."""
        incident = incidents.from_json(verdict.incident)
        if incident is None:
            return False
        group = incident.op_id.rpartition("/")[0].rpartition(":")[0]
        return self._settings.abort or bool(verdict.departed) or group in limits

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing:
            period = self._config.poll_idle
            if self._coordination.hurried:
                period = min(period, HURRIED_LOOK)
            try:
                self._processes.learn(self._monitor.neighbours.here)
                for rank, evidence in self._wait(period):
                    self._coordination.process_ended(rank, evidence)
                if self._closing:
                    break
                self._deliver()
                self._coordination.overdue(time.monotonic())
                self._tell_of_slow()
                self._comparison.read()
                self._look(time.monotonic())
                self._go_alone(time.monotonic())
                self._callbacks.warn(time.monotonic())
            except Exception:
                log.exception(
                    "ncclguard: %s",
                    told("watch() of rank {rank} met an unexpected error and goes on", "log", rank=self._rank),
                )
                time.sleep(period)
        self._deliver()
        self._processes.close()

    def _wait(self, seconds: float) -> list[tuple[int, str]]:
        """Wait until something is to be done, for `seconds` at most, and take samples meanwhile."""
        end = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            pause = min(self._sampler.pause(), max(end - began, 0.0))
            found = self._processes.wait(pause)
            self._sampler.sample()
            now = time.monotonic()
            if found or now >= end or now - began < pause:  # earlier: woken
                return found

    def _in_guarded_call(self) -> bool:
        return any(state.guarded and state.call is not None for state in self._monitor.states())

    def _calls_counted(self) -> int:
        """Return a number that grows as collectives are issued; any thread."""
        return sum(issued for (issued, _), _ in self._counters.values())

    def _step(self, now: float, store: AgreementStore) -> None:
        """In the monitor's thread."""
        self._coordination.step(now, store)
        self._search.step(now, store, self._state.member.participants)
        self._comparison.step(now, store)

    def _slow_found(self, slow: SlowRanks | None, by: int) -> None:
        """In the monitor's thread."""
        self._slow.append((slow, by))
        self._wakes()

    def _tell_of_slow(self) -> None:
        while self._slow:
            slow, by = self._slow.popleft()
            self._settings.slow = slow
            if by == self._rank:
                text = told("no rank is slow any more") if slow is None else say(slow.text)
                log.warning("ncclguard: %s", text)
            for listener in events.listeners:
                listener.slow_found(slow)
            if self._settings.on_slow is not None:
                self._callbacks.call("on_slow", partial(self._settings.on_slow, slow))

    def _wakes(self) -> None:
        self._processes.wake()

    def _look(self, now: float) -> None:
        """Read the counters, and the recorder once they have stood still; escalate what is over its limit."""
        counters = {key: _progress(key, value) for key, value in self._state.recorder.status().items()}
        self._warn_of_blindness()
        self._counters = {
            key: (value, self._counters[key][1] if self._counters.get(key, ((), 0.0))[0] == value else now)
            for key, value in counters.items()
        }
        enough = HURRIED_STILL if self._coordination.hurried else STILL
        still = {key: since for key, (value, since) in self._counters.items() if now - since >= enough}
        due = [key for key in still if self._due(key, counters[key], len(still) == len(counters), now)]
        if due:
            for key in due:
                self._examined[key] = (counters[key], now)
            observation = self._state.read()
            for pending in observation.pending:
                if pending.key in still:
                    self._state.began(pending, still[pending.key])
        self._standing = tuple(
            p
            for p in self._state.observation.pending
            # What was read before the counter moved says nothing any more.
            if p.key in still and self._examined.get(p.key, ((-1, -1), 0.0))[0] == counters[p.key]
        )
        if self._standing:
            self._stood = now
        waiting = [p for p in self._standing if self._told.get(p.channel) != p.sequence and self._concerns(p)]
        oldest = max(waiting, key=self._state.age, default=None)
        self._state.wait_in(None if oldest is None else open_call(oldest, self._state.age(oldest), self._limit(oldest)))
        waited, self._coordination.waiting = self._coordination.waiting, tuple(waiting)
        if waiting and not waited:
            self._monitor.wake()
        self._heed_backends(now)
        for pending in waiting:
            limit = self._limit(pending)
            number, later = self._let_go_on.get(pending.channel, (0, 0.0))
            if self._state.age(pending) >= max(limit, later if number == pending.sequence else 0.0):
                self._ask(
                    TroubleKind.DEADLINE,
                    tr(
                        "{operation} did not progress for {limit:g} s on rank {rank}",
                        operation=pending.text,
                        limit=limit,
                        rank=self._rank,
                    ),
                    unless=lambda: bool(self._state.verdicts),  # which may be about this one
                )
                break

    def _heed_backends(self, now: float) -> None:
        """Find out whose fault it is when torch's own watchdog gives up: it is about to end this process."""
        if self._state.verdicts:  # one may be on this, and others have ended it
            return
        for channel, kind in self._state.recorder.errors().items():
            since = self._broken.setdefault(channel, now)
            ended_here = channel.rpartition(":")[0] in limits
            grace = HURRIED_STILL if ended_here and self._coordination.hurried else BROKEN_GRACE
            if since == math.inf or (kind != "TIMEOUT" and now - since < grace):
                continue
            self._broken[channel] = math.inf
            if kind == "TIMEOUT":
                self._coordination.given_up.add(channel)
            pending = next((p for p in self._state.read().pending if p.channel == channel), None)
            if pending is None and ended_here:  # torch takes one that broke for one that has ended
                self.suspect(kind)
            if pending is None or self._told.get(channel) == pending.sequence or not self._concerns(pending):
                continue
            if kind == "TIMEOUT":
                text = tr(
                    "{operation} did not end within torch's own limit on rank {rank}",
                    operation=pending.text,
                    rank=self._rank,
                )
                self._ask(TroubleKind.DEADLINE, text)
            else:
                self._ask(
                    TroubleKind.TRANSPORT,
                    tr(
                        "{operation} broke on rank {rank}: {kind} {marker}",
                        operation=pending.text,
                        rank=self._rank,
                        kind=kind,
                        marker=BROKEN,
                    ),
                )

    def _warn_of_blindness(self) -> None:
        """Once, as soon as it shows: NCCL records nothing before its first collective."""
        blind = self._state.recorder.blind
        if blind and not self._warned_blind:
            self._warned_blind = True
            log.warning(
                "ncclguard: %s",
                told(
                    "torch's flight recorder does not cover {some}, so watch() knows their collectives only by number; "
                    "set TORCH_FR_BUFFER_SIZE=2000 before init_process_group (before torch 2.8 TORCH_NCCL_TRACE_BUFFER_SIZE), or use "
                    "torch 2.11 or later",
                    "log",
                    some=", ".join(blind),
                ),
            )

    def _due(self, key: str, value: tuple[int, int], all_still: bool, now: float) -> bool:
        """Return whether the recorder is to be read because a counter stands still; reading takes long."""
        seen = self._examined.get(key)
        if seen is None or seen[0] != value:
            # A group where everything issued has ended is idle; gloo may end them out of order,
            # so look when all is still.
            return value[0] != value[1] or all_still
        return now - seen[1] >= AGAIN and any(p.key == key for p in self._state.observation.pending)

    def _concerns(self, pending: Pending) -> bool:
        return self._channel_concerns(pending.channel)

    def _channel_concerns(self, channel: str) -> bool:
        group = self._settings.group
        return group is None or channel.rpartition(":")[0] == torch_compat.recorded_name(group)

    def _limit(self, pending: Pending) -> float:
        own = limits.get(pending.channel.rpartition(":")[0])
        phases = phases_of(pending.thread, pending.issued or time.time_ns())
        return resolve_timeout(self._settings.timeout if own is None else own(), pending.numel, phases=phases)

    def _ask(self, kind: TroubleKind, text: str, unless: Callable[[], bool] = lambda: False) -> None:
        state = self._state
        with state.condition:  # in which verdicts are adopted
            if state.member.trouble is not None or unless():
                return
            generation = state.member.generation
            state.settled.clear()
        if state.trouble(generation, kind, text):
            self._asked_at = time.monotonic()
            self._monitor.wake()

    # ------------------------------------------------------------------ the verdict

    def _deliver(self) -> None:
        while self._state.verdicts:
            verdict = self._state.verdicts[0]
            self._asked_at = None
            try:
                incident = incidents.from_json(verdict.incident)
                if incident is None:
                    self._let_go_on = {
                        p.channel: (p.sequence, self._state.age(p) + self._limit(p)) for p in self._standing
                    }
                else:
                    self._end(incident, verdict.generation + 1)
                    self._conclude(incident, verdict)
            finally:
                self._state.verdicts.popleft()
                self._coordination.delivered()

    def _end(self, incident: Incident, number: int) -> None:
        """Let groups that are guarded by this watch end what a verdict is about, before anybody hears of it."""
        if limits:
            self._state.broke("")  # what broke has its verdict, and the program goes on
        pending = self._state.observation.pending
        seconds = max((self._state.age(p) for p in pending), default=0.0)
        for end in ending:
            end(incident, number, pending, seconds)

    def _conclude(self, incident: Incident, verdict: Verdict | None) -> None:
        self._coordination.last = incident
        self._coordination.waiting = ()  # until the next look, in which what has been told is left out
        observation = self._state.observation
        self._told |= {p.channel: p.sequence for p in observation.pending}
        self._last_told = _number(observation.latest)
        repeats = incident.repeats is not None  # of which the monitor of one rank has told
        known = any(one.id == incident.repeats for one in self._settings.incidents)
        if repeats and (known or not incidents.is_of_guarded_calls(incident)):
            self._over = self._over or bool(verdict is not None and verdict.departed)
            return
        if any(incidents.says_nothing_new(incident, known) for known in self._settings.incidents):
            text = told("incident {name} has gone on: {text}", name=incident.id, text=headline(incident))
            log.warning("ncclguard: %s", text)
            return
        self._over = self._over or self._settings.abort or bool(verdict is not None and verdict.departed)
        self._settings.incidents.append(incident)
        if not repeats:  # else a guarded call has; what is to be done about it is for the watch all the same
            text = beside(f"{headline(incident)} ", _whose_report(incident, self._rank)).rstrip()
            log.error("ncclguard incident %s: %s", incident.id, text)
            for listener in events.listeners:
                listener.incident_found(incident)
        if self._settings.on_incident is not None:
            self._callbacks.call("on_incident", partial(self._settings.on_incident, incident))
        if self._settings.abort:
            self._aborted = True
            self._abort(incident)

    def _abort(self, incident: Incident) -> None:
        """End every collective of the process with an error, for good."""
        groups = [group for group in torch_compat.known_groups() if group.size() > 1]
        pending = [p for p in self._state.observation.pending if not _backend_of(p).startswith("gloo")]
        if pending:  # gloo's raise by themselves
            interrupt({p.thread for p in pending}, incident, max(self._state.age(p) for p in pending))
        log.error(
            "ncclguard: %s",
            told("ending the collectives of this process (on_hang='abort') after incident {name}", name=incident.id),
        )
        stop = Stop(groups)
        stop.start()
        stop.wait()
        if stop.failures:
            log.error(
                "ncclguard: %s",
                told(
                    "not all could be ended, so this process may have to be killed: {details}",
                    "log",
                    details="; ".join(stop.failures),
                ),
            )

    def _go_alone(self, now: float) -> None:
        """No verdict can come: say what this rank sees."""
        asked = self._asked_at
        trouble = self._state.member.trouble
        if asked is None or trouble is None:
            return
        gone = {rank: self._monitor.neighbours.gone(rank) for rank in self._state.member.participants}
        gone = {
            rank: evidence for rank, evidence in gone.items() if evidence and not self._coordination.left_well(rank)
        }
        lonely = bool(self._state.unavailable) and (bool(gone) or now - asked >= 0.5)
        waits = max(ALONE_AFTER, self._monitor.caller_waits())  # longer while the store answers: a rank may be slow
        overdue = trouble.kind is TroubleKind.DEADLINE and now - asked >= waits
        if not (lonely or overdue):
            return
        self._asked_at = None
        if (
            lonely
            and not overdue
            and self._last_told is not None
            and self._last_told == _number(self._state.read().latest)
        ):
            # No step further since an incident that all know: its victims have ended, and the store's host with them.
            log.warning(
                "ncclguard: %s",
                told(
                    "rank {rank} got no further after the last incident: {text}",
                    "log",
                    rank=self._rank,
                    text=trouble.text,
                ),
            )
            self._state.settled.set()
            return
        pending = next(iter(self._state.observation.pending), None)
        latest = pending or self._state.observation.latest
        incident = incidents.alone(
            self._state,
            "collective" if latest is None else latest.text.partition("(")[0],
            tr("a collective") if latest is None else latest.text,
            0 if latest is None else latest.sequence,
            Cause.LOST if gone else Cause.UNKNOWN,
            dict.fromkeys(gone, Cause.LOST),
            self._state.unavailable or tr("the agreement did not answer in time"),
            expired=trouble.kind is TroubleKind.DEADLINE,
            evidence=gone,
        )
        self._state.publish_alone(incident)
        self._end(incident, self._state.member.generation + 1)
        self._conclude(incident, None)
        self._state.settled.set()


def _progress(key: str, counters: tuple[int, int]) -> tuple[int, int]:
    """The counters of a group, without those of NCCL that move although nothing ends: its host may be steps ahead."""
    issued, ended = counters
    return (ended + 1, ended) if issued > ended and key.startswith("nccl") else counters


def _backend_of(pending: Pending) -> str:
    return pending.channel.rpartition(":")[2]


def _number(pending: Pending | None) -> tuple[str, int] | None:
    return None if pending is None else (pending.channel, pending.sequence)


@contextmanager
def _kept_alive(name: str) -> Iterator[None]:
    """Log whatever a function of the program raises, also SystemExit: this thread goes on."""
    try:
        yield
    except SystemExit:
        text = told(
            "{name} called sys.exit(), which ends no program from the thread it is called in: raise in the program's own "
            'thread, or give on_hang="abort"',
            name=name,
        )
        log.exception("ncclguard: %s", text)
    except BaseException:
        log.exception("ncclguard: %s", told("{what} failed", "log", what=name))


def _whose_report(incident: Incident, rank: int) -> str:
    writer = incidents.writer(incident)
    return "" if writer in (rank, -1) or not incident.agreed else told("(rank {rank} reports it)", rank=writer)


def _from_collective(error: BaseException) -> bool:
    """Return whether an exception, or one that it was raised from, is that of a broken collective."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if getattr(seen, "ended_by_watch", False):
            return True
        of_torch = isinstance(seen, OSError) or (
            isinstance(seen, RuntimeError) and not isinstance(seen, CollectiveFailed)
        )
        if of_torch and (isinstance(seen, getattr(dist, "DistError", ())) or is_consequence(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class Watch:
    """The handle that `watch` returns: the incidents so far, and `stop`; as a context manager it stops at its end."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._watcher: Watcher | None = None
        self._launched: int | None = None  # ranks, while init_process_group is waited for

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Every incident that this process knows of, the oldest first."""
        return tuple(self._settings.incidents)

    @property
    def slow(self) -> SlowRanks | None:
        """The ranks that the others wait for again and again; None where nobody is known to be slow."""
        return self._settings.slow

    @property
    def active(self) -> bool:
        """Return whether collectives are observed now: between ``init_process_group`` and ``destroy_process_group``."""
        return self._watcher is not None and self._watcher.running

    def stop(self) -> None:
        """Observe no more; safe to call twice."""
        global _current
        if _current is self:
            _current = None
        self._waits_no_more()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def _wait(self) -> None:
        """Begin with the next process group; in a launcher's job say so, and also at its end if there never was one."""
        launched = launched_ranks(os.environ)
        if launched is None or launched[1] < 2:
            return
        self._launched = launched[1]
        lifecycle.before_end(self._never_began)
        if torch_compat.was_destroyed():
            text = told(
                "watch() was called after destroy_process_group: nothing is observed until the next init_process_group"
            )
            log.warning("ncclguard: %s", text)
        else:
            waits = told("watch() observes from init_process_group on, which has not been called yet")
            log.info("ncclguard: %s", waits)

    def _waits_no_more(self) -> None:
        if self._launched is not None:
            self._launched = None
            lifecycle.forget(self._never_began)

    def _never_began(self) -> None:
        if torch_compat.init_failed():
            text = told(
                "watch() has observed nothing: init_process_group failed on rank {rank}. A rank that does not come to it is "
                "found with 'ncclguard hang' while the others wait",
                rank=os.environ.get("RANK", "?"),
            )
            log.warning("ncclguard: %s", text)
            return
        nothing = told(
            "watch() has observed nothing: {count} ranks were launched, and init_process_group was not called after watch() "
            "in this one; call it, or leave watch() out",
            count=self._launched or 0,
        )
        log.warning("ncclguard: %s", nothing)

    def _start(self) -> None:
        """Begin with the default process group that is initialised now."""
        self._waits_no_more()
        if dist.get_world_size() < 2:
            return
        current = runtime.current()
        for former in (self._watcher, current.watcher):
            if former is not None:  # of another session, of which nobody here is to hear any more, or another watch()
                former.close()
        self._watcher = current.watcher = Watcher(
            current.monitor, dist.get_rank(), dist.get_world_size(), self._settings
        )
        self._watcher.start()
        world = dist.group.WORLD
        own, given = None if world is None else torch_compat.time_limit(world), self._settings.timeout
        setting = "timeout={:g}"
        if given is None:
            given, setting = current_config().timeout, "NCCLGUARD_TIMEOUT={:g}"
        if given is not None and own is not None and own < given and dist.get_rank() == 0:
            text = told(
                "ncclguard: with {setting} watch() reports nothing before torch itself gives up, after {own:g} s: give a "
                "shorter limit, or init_process_group a longer one",
                setting=setting.format(given),
                own=own,
            )
            log.warning("%s", text)
        for listener in events.listeners:
            listener.watch_started(current.monitor.session_ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


_current: Watch | None = None
_lock = threading.Lock()


@hinted
def watch(
    group: dist.ProcessGroup | None = None,
    *,
    timeout: float | timedelta | None = None,
    on_hang: Literal["report", "abort"] = "report",
    on_incident: Callable[[Incident], None] | None = None,
    on_slow: Callable[[SlowRanks | None], None] | None = None,
) -> Watch:
    """Observe every collective of this process until one does not progress.

    That includes those of DDP, FSDP, DeepSpeed and Accelerate.

    When a collective has not progressed for `timeout` (seconds or timedelta; None: phase, then ``NCCLGUARD_TIMEOUT``,
    then by its size), or at once when a rank it needs died, raised or left, or called another collective, the ranks
    agree on who is to blame and the incident is reported as for a guarded call, and given to `on_incident` on every
    rank, in a thread of the library that nothing waits for. ``on_hang="abort"`` then also ends the job's collectives
    with an error, for good, so that a launcher can restart it. `group`: escalate only what is pending on this group;
    None: on all of them.

    Ranks that do not hang but are slow are named in the log of the first rank, in `Watch.slow`, and given to `on_slow`
    on every rank, likewise; None once nobody is slow any more.

    Call it on every rank, before or after ``init_process_group``; a second call replaces the first. With one rank it
    does nothing. A rank that did not call it, but imported ncclguard, still answers. Raises ValueError for a time or
    `on_hang` that cannot be, TypeError for a time that is none, GuardConfigError for a wrong variable.

    >>> import ncclguard as ng
    >>> ng.watch(timeout=120, on_hang="abort").incidents
    ()
    """
    if on_hang not in ("report", "abort"):
        refusal = told('on_hang must be "report" or "abort", not {value}: give one of them', value=repr(on_hang))
        raise ValueError(refusal)
    if on_incident is not None and not callable(on_incident):
        text = told(
            "on_incident must be a function that takes an Incident, not {kind}: give one, or none",
            kind=type(on_incident).__name__,
        )
        raise TypeError(text)
    if on_slow is not None and not callable(on_slow):
        text = told(
            "on_slow must be a function that takes SlowRanks or None, not {kind}: give one, or none",
            kind=type(on_slow).__name__,
        )
        raise TypeError(text)
    settings = Settings(seconds(timeout, "timeout"), on_hang == "abort", on_incident, on_slow, check_group(group))
    torch_compat.switch_recorders_on()
    return _watch(settings)


def _watch(settings: Settings) -> Watch:
    global _current
    current_config()  # a wrong variable is told of here, and not when the process group is there
    with _lock:
        if _current is not None:
            _current.stop()
        _current = handle = Watch(settings)
        runtime.install()
        torch_compat.on_init(_begin)
        if dist.is_available() and dist.is_initialized():
            try:
                handle._start()
            except GuardConfigError:
                handle.stop()
                raise
            except (GuardError, RuntimeError) as error:
                log.warning(
                    "ncclguard: %s",
                    told("watch() could not start, so hangs are not reported here: {error}", "log", error=error),
                )
        else:
            handle._wait()
    return handle


def ensure() -> bool:
    """Observe with the default settings, unless the program has called `watch` already; True if it is observed now.

    torch's flight recorder stays as the program has it.
    """
    if _current is not None:
        return False
    return _watch(Settings(None, False, None, None, None)).active


def observe_anew() -> None:
    """Observe in the session that this process has gone over to, where it is observed at all."""
    if _current is not None:
        _current._start()


def _begin() -> None:
    """After every init_process_group."""
    handle = _current
    if handle is not None:
        handle._start()
