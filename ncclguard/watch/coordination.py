"""The monitor's part of `watch`: what needs the store. Departures that matter, early mismatches, and who is awaited."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ncclguard.cause import Cause
from ncclguard.coordination.inquiry import Question, not_answering, not_come
from ncclguard.coordination.liveness import silent_cause
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import AgreementStore, HighWaterMarks
from ncclguard.incident.model import Incident
from ncclguard.incident.text import SHOWN_GROUPS, ranks_text
from ncclguard.protocol.decision import Departure, TroubleKind, elsewhere_long_enough
from ncclguard.watch.group_state import KEY, WatchState
from ncclguard.watch.judge import analyse, has_issued, is_consequence
from ncclguard.watch.recorder import Pending

log = logging.getLogger("ncclguard")

#: Seconds a rank that left without saying what it issued is not held to account: that may still be on its way.
LEFT_GRACE = 0.5
#: The same for one that had issued what is awaited.
ISSUED_GRACE = 5.0
_GONE = (Cause.LOST, Cause.FAILED, Cause.EXITED)  # causes of ranks that will not come any more
_WAITING = "running"  # the state, in an incident, of a rank that is in the collective
#: How the evidence reads of a process that was ended by abort(3).
ABORTED = "killed by SIGABRT"
#: Seconds after a process ended without a goodbye at which that is an incident although nobody waits in a collective.
LOST_GRACE = 0.7
#: Collectives before the one it waits in that a rank compares with what the others called.
COMPARED = 2
#: Collectives of a group whose callers are kept in the store, each in a key of its own until a later one needs it.
KEPT_OPEN = 4
#: Seconds after which a process that ended is spoken of although the monitor has not come to it: the store blocks.
SPEAK_AFTER = 0.3


@dataclass(kw_only=True)
class _Question(Question):
    pending: Pending


class WatchCoordination:
    """`step` is called by the monitor; `process_ended`, `overdue` and `waiting` belong to the watcher's thread.

    Once some rank of the job has left or died, `hurried` is set and `hurry` called: from then on a stop is soon
    suspect. ``last`` is to be the last incident, ``given_up`` the channels in which torch's own limit has passed here.
    """

    def __init__(
        self,
        monitor: Monitor,
        state: WatchState,
        rank: int,
        warn_after: float,
        ask: Callable[[TroubleKind, str], None],
        hurry: Callable[[], None],
    ) -> None:
        self.waiting: tuple[Pending, ...] = ()
        self.hurried = False
        self.last: Incident | None = None
        self.given_up: set[str] = set()
        self._monitor = monitor
        self._state = state
        self._rank = rank
        self._warn_after = warn_after
        self._ask = ask
        self._hurry = hurry
        self._lock = threading.Lock()
        self._ended: dict[int, tuple[str, float]] = {}  # as seen here: evidence, when; until the monitor has come to it
        self._known: dict[int, float] = {}  # departed rank -> when this rank heard of it
        self._handled: set[int] = set()
        self._looked = 0.0
        self._marks = HighWaterMarks()
        self._published: dict[str, tuple[int, int]] = {}  # key -> generation and number of what was written there last
        self._warned: dict[str, tuple[int, float]] = {}  # channel -> number of the collective last warned of, its age
        self._question: _Question | None = None
        self._asked = 0

    # ------------------------------------------------------------------ the watcher's thread

    def process_ended(self, rank: int, evidence: str) -> None:
        """A peer's process on this host has ended; whether it said goodbye, the store knows."""
        with self._lock:
            self._ended[rank] = (evidence, time.monotonic())
        self._monitor.wake()

    def overdue(self, now: float) -> None:
        """Speak of an ended process by oneself, when the monitor does not come to it
        because the store does not answer.
        """
        with self._lock:
            left = {
                r: e for r, (e, seen) in self._ended.items() if self._monitor.unavailable or now - seen > SPEAK_AFTER
            }
            for rank in left:
                del self._ended[rank]
        for rank, evidence in left.items():
            self._lost(rank, evidence)
            if self._follows(rank, evidence):
                continue
            self._ask(TroubleKind.DEPARTED, f"rank {rank} lost: {evidence}")

    # ------------------------------------------------------------------ the monitor's thread

    def step(self, now: float, store: AgreementStore) -> None:
        """Do what can be done without waiting."""
        if self._monitor.departures_begun and not self.hurried:
            self.hurried = True
            self._hurry()
        self._look_at_departures(now)
        self._publish(store)
        if self._question is not None:
            self._collect(self._question, now, store)
        else:
            self._ask_if_due(now, store)

    def _look_at_departures(self, now: float) -> None:
        with self._lock:
            ended, self._ended = self._ended, {}
        if not (ended or self.waiting or self._state.member.trouble or self._known.keys() - self._handled):
            return
        departed = self._monitor.read_departures()
        for rank, (evidence, _) in ended.items():
            if rank not in departed:
                departed[rank] = self._departure(rank, evidence)
                self._monitor.witness(departed[rank])
                self._lost(rank, evidence)
        participants = self._state.member.participants
        for rank, departure in departed.items():
            self._known.setdefault(rank, now)
            if rank in self._handled or rank not in participants or rank == self._rank:
                self._handled.add(rank)
            elif self._matters(departure, now - self._known[rank], now):
                self._handled.add(rank)
                self._ask(TroubleKind.DEPARTED, f"rank {rank} {departure.cause.value}: {departure.text}")

    def _matters(self, departure: Departure, known: float, now: float) -> bool:
        """Whether this rank waits, or will wait in vain, for one that is gone."""
        if departure.cause is Cause.FAILED and is_consequence(departure.text):
            return False  # it ended because its collective broke: who broke that is being found out
        if departure.cause is Cause.LOST and self._follows(departure.rank, departure.text):
            return False
        if known < 2 * LOST_GRACE and now - self._looked >= 0.2:
            self._looked = now
            self._state.read()
        awaited = any(departure.rank in pending.ranks for pending in self._state.observation.pending)
        if departure.cause is Cause.EXITED or departure.terminated:
            return self._in_vain(departure, known)
        return awaited or (departure.cause is Cause.LOST and known >= LOST_GRACE)

    def _in_vain(self, departure: Departure, known: float) -> bool:
        """Whether this rank waits for a collective that one which left has not issued."""
        awaited = {pending.channel: pending.sequence for pending in self.waiting if departure.rank in pending.ranks}
        if not awaited:
            return False
        if departure.watched is None:
            return known >= LEFT_GRACE
        return known >= ISSUED_GRACE or not has_issued(departure, awaited)

    def _departure(self, rank: int, evidence: str) -> Departure:
        details = {p.rank: {"host": p.host, "pid": p.pid} for p in self._monitor.peers_here()}
        terminated = self._follows(rank, evidence)
        return Departure(rank, Cause.LOST, evidence, details=details.get(rank, {}), terminated=terminated)

    def _follows(self, rank: int, evidence: str) -> bool:
        """Whether the end of a process is what the last incident has led to, and not another one.

        torch ends a process whose collective has failed, or has not ended within torch's own limit
        (ProcessGroupNCCL.cpp, ``Watchdog::run``; nccl2 likewise). So that collective must not have ended since, and the
        rank have waited in it.
        """
        last = self.last
        if last is None or not any(found.rank == rank and found.state == _WAITING for found in last.ranks):
            return False
        channel, _, sequence = last.op_id.rpartition("/")
        observation = self._state.read()
        if observation.done.get(channel, 0) >= int(sequence):
            return False
        if any(found.cause in _GONE for found in last.ranks):
            return True
        if "killed by" in evidence and ABORTED not in evidence:
            return False
        waits = any((p.channel, p.sequence) == (channel, int(sequence)) for p in observation.pending)
        return channel in self.given_up or not waits

    def _lost(self, rank: int, evidence: str) -> None:
        log.warning("ncclguard: rank %d is lost: %s (seen by rank %d)", rank, evidence, self._rank)

    # ------------------------------------------------------------------ mismatches

    def _publish(self, store: AgreementStore) -> None:
        """The first that waits writes down what it called; the others compare, so that a mismatch is known in seconds.

        Also what it called just before: a mismatch may have ended here, with rubbish, and not on the others.
        """
        generation = self._state.member.generation
        before = [
            ended
            for ended in self._state.observation.recent
            if any(p.channel == ended.channel and 0 < p.sequence - ended.sequence <= COMPARED for p in self.waiting)
        ]
        for pending in (*self.waiting, *before):
            key = f"{KEY}/open/{pending.channel}/{pending.sequence % KEPT_OPEN}"
            place = (generation, pending.sequence)
            if not pending.fingerprint or self._published.get(key) == place:
                continue
            self._published[key] = place
            mine: list[int | str] = [pending.fingerprint, self._rank, pending.text]
            first = self._marks.enter(store, key, place, mine)
            if first is not None and first[0] != pending.fingerprint:
                _, rank, other = first
                why = f"rank {rank} is in {other}, rank {self._rank} in {pending.text}"
                self._ask(TroubleKind.MISMATCH, why)

    # ------------------------------------------------------------------ who is awaited

    def _ask_if_due(self, now: float, store: AgreementStore) -> None:
        """After `warn_after`, and each time it has doubled: one rank of the job asks all, and logs what they answer."""
        pending = max(self.waiting, key=self._state.age, default=None)
        if pending is None or self._state.member.frozen:
            return
        number, last = self._warned.get(pending.channel, (-1, 0.0))
        age = self._state.age(pending)
        if age < (2 * last if number == pending.sequence else self._warn_after):
            return
        self._warned[pending.channel] = (pending.sequence, max(age, self._warn_after))
        if now - self._state.asked < self._warn_after / 2:
            return  # somebody else has just asked, maybe because of another group
        level = len([1 for double in range(30) if age >= self._warn_after * 2**double])
        place = (self._state.member.generation, pending.sequence, level)
        if self._marks.enter(store, f"{KEY}/ask/{pending.channel}", place, [self._rank]) != [self._rank]:
            return
        self._asked += 1
        self._question = _Question(asker=f"{KEY}{self._rank}", number=self._asked, asked=now, pending=pending)
        self._monitor.post(self._question.entry(self._state, self._rank, store))

    def _collect(self, question: _Question, now: float, store: AgreementStore) -> None:
        silent = question.silent(self._state.member.participants, now, store)
        if silent is None:
            return
        if silent and not question.sought:
            question.sought = True
            self._monitor.seek(silent, now)
            return
        self._question = None
        if any((p.channel, p.sequence) == (question.pending.channel, question.pending.sequence) for p in self.waiting):
            self._warn(question, silent)

    def _warn(self, question: _Question, silent: list[int]) -> None:
        sights = {rank: self._monitor.sight(rank) for rank in silent}
        causes = {rank: silent_cause(sight) for rank, (sight, _) in sights.items()}
        finding = analyse(elsewhere_long_enough(question.answers), {}, causes, overdue=True)
        lines = not_come({rank: question.answers[rank] for rank in finding.causes if rank not in sights})
        lines += not_answering(sights)
        lines += [f"{ranks_text(ranks)} in {text}" for text, ranks in finding.sides[:SHOWN_GROUPS]]
        log.warning(
            "ncclguard: %s has made no progress for %.0f s on rank %d: %s",
            question.pending.text,
            self._state.age(question.pending),
            self._rank,
            "; ".join(lines) or "every rank has entered: the transfer itself is slow or stalled",
        )
