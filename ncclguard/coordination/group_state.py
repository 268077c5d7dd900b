"""The state of one group on this rank: what the caller, the monitor and other ranks tell each other about it.

A group state exists from the moment anybody's revoke of the group is heard, even before this rank has made its first
call there, so that a rank which is late for the very first operation can say so.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ncclguard.incident import model
from ncclguard.incident.model import Incident
from ncclguard.protocol.decision import (
    Departure,
    Operation,
    Phase,
    Report,
    Silent,
    Trouble,
    TroubleKind,
    Verdict,
    Watched,
    decide,
)
from ncclguard.protocol.member import Entry, Member, Resolution
from ncclguard.protocol.timing import ALIVE, GRACE, HELD_UP

#: Seconds for which a rank tells of its last call that failed, which may be why another group has waited for it.
TOLD_FOR = 30.0
#: What a rank has seen of ranks that do not answer, by rank: like the details of a report.
Sightings = Mapping[int, Mapping[str, object]]
#: A verdict, what it means for the call in progress here, and the result that another rank has left for that call.
Decided = tuple[Resolution, Verdict, str | None]


class Subject(Protocol):
    """A group as an incident tells of it: one that the guard carries, or one of torch's that is watched."""

    @property
    def key(self) -> str: ...
    @property
    def session(self) -> str: ...
    @property
    def sightings(self) -> Sightings: ...
    @property
    def decided_after(self) -> float | None: ...
    @property
    def guarded(self) -> bool: ...
    @property
    def outside(self) -> bool: ...

    def hosts(self, ranks: Sequence[int], /) -> Mapping[int, str]:
        """The hosts of ranks that cannot say theirs any more, as far as they are known."""
        ...


Summarise = Callable[[Verdict, Mapping[int, Report], Mapping[int, Departure], Silent, Subject], str]


@dataclass(slots=True)
class OpenCall:
    """The call in progress, as the monitor and those who listen to events see it; times by time.monotonic()."""

    text: str
    entered: float
    deadline: float
    thread: int  # threading.get_ident() of the caller
    sequence: int = 0
    generation: int = 0  # it entered on, and who took part in that
    participants: tuple[int, ...] = ()
    warned: float = 0.0  # age at the last look at who is awaited
    opened: float = 0.0  # when all had come; 0 before
    exchange: bool = False  # carries the group's exchange of statistics
    overdue: bool = False  # its limit had passed before its turn came: it was issued long before


class _Turns:
    """The turns in which one caller waits for a verdict, each of a fraction of a second.

    One that took much longer tells that this process was stopped, or did not get its turn on the machine. Its monitor
    has not asked the store in that time either, so that the store has not answered says nothing of the store.
    """

    def __init__(self, call: OpenCall) -> None:
        self._began = time.monotonic()
        late = call.entered < call.deadline and self._began > call.deadline + HELD_UP
        self._held_up = self._began if late else -math.inf

    def end(self) -> None:
        """A turn is over, and the next one begins."""
        now = time.monotonic()
        if now - self._began > HELD_UP:
            self._held_up = now
        self._began = now

    @property
    def steady(self) -> bool:
        """Return whether the store has had the time to answer since this process was last held up."""
        return time.monotonic() >= self._held_up + ALIVE


def _no_hosts(ranks: Sequence[int]) -> Mapping[int, str]:
    """No monitor has this group: there is nobody who knows."""
    return {}


class GroupState:
    """Thread-safe: `lock`, which is that of `condition`, guards everything; it is never held across I/O.

    The caller's thread enters, moves and ends a call; the monitor's thread answers, adopts verdicts and says that none
    can come. Each method says whose it is, where that is not any thread's. `member` is the protocol's own state.
    """

    #: Whether the guard carries out the collectives; else it only watches those of torch.
    guarded = True
    #: Whether the ranks are of several jobs, or of none, as in a channel of weights: who is lost can join again alone.
    outside = False

    def __init__(self, key: str, rank: int, members: tuple[int, ...]) -> None:
        self.key = key
        self.member = Member(rank, members)
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)  # entering the lock itself costs a third: what each call does
        self.call: OpenCall | None = None  # in progress on this rank
        self._failed = ("", -math.inf)  # the last call that failed here, and when by time.monotonic()
        self.decided: Decided | None = None  # the verdict that the caller has not taken yet
        self.unavailable = ""  # why no verdict can come, such as a store that is gone
        self.incident = ""  # of the last verdict that has one, as JSON
        self.given_up = False  # by this process itself, which has left the group or destroyed it
        self.session = ""  # the name of the job's session, known some time after this is made
        self.sightings: Sightings = {}  # of ranks that did not answer the last revoke
        self.decided_after: float | None = None  # seconds from it to the verdict, where this rank has decided that
        #: Seconds after its deadline in which a caller has its verdict, as a rule; `_waits()`: for how many it waits.
        self.grace = GRACE
        self._waits: Callable[[], float] = lambda: GRACE
        #: What ends this process from outside, as the monitor has announced it, such as "was sent SIGTERM".
        self.terminated = ""
        self.stop_transport: Callable[[int], None] = _no_transport
        self._result: Callable[[], str | None] = _nothing_kept
        self.publish_alone: Callable[[Incident], None] = _nobody_reads
        self._standing: Callable[[], Trouble | None] = _no_trouble
        self.hosts: Callable[[Sequence[int]], Mapping[int, str]] = _no_hosts

    # ------------------------------------------------------------------ any thread

    def trouble(self, generation: int, kind: TroubleKind, text: str, peer: int = -1, host: str = "") -> bool:
        """Stop moving in this generation and have it revoked; False when it has had its verdict already."""
        with self.condition:
            return self.member.in_trouble(generation, Trouble(kind, text, peer, host))

    def open_calls(self) -> list[tuple[str, int, str, float]]:
        """Return what this rank is in, for the timeline: group, sequence, text, and when (`time.monotonic()`)."""
        with self.condition:
            call = self.call
        return [] if call is None else [(self.key, call.sequence, call.text, call.entered)]

    def waited_for(self) -> tuple[OpenCall, int] | None:
        """The open call and its sequence, or None."""
        with self.condition:
            operation = self.member.operation
            if self.call is None or operation is None:
                return None
            return self.call, operation.sequence

    def waiting(self) -> tuple[str, float]:
        """Return what this rank is waiting in, for the reports of other groups, and 0; empty when it is not.

        Else what it has waited in, in vain, and how many seconds ago that ended.
        """
        with self.condition:
            text, ended = self._failed
            since = time.monotonic() - ended
            if self.call is None or self.member.operation is None or self.member.phase is Phase.NONE:
                return (text, since) if since < TOLD_FOR else ("", 0.0)
            return self.call.text, 0.0

    def wait_in(self, call: OpenCall | None) -> None:
        """The monitor sees this rank in `call` from now on, in none with None."""
        with self.condition:
            self.call = call

    def make_unavailable(self, why: str) -> None:
        """No verdict can come any more: whoever waits for one goes by what this rank knows."""
        with self.condition:
            self.unavailable = why
            self.condition.notify_all()

    # ------------------------------------------------------------------ the caller's thread

    def attach(self, stop: Callable[[int], None], result: Callable[[], str | None]) -> None:
        """From now on a revoke stops the communicator of its generation, and `result()` is what late ranks get."""
        self.stop_transport, self._result = stop, result

    def enter(self, operation: Operation, call: OpenCall, wait: float) -> tuple[Entry, Verdict | None]:
        """Take the next place in the sequence, after the verdict of a revoked generation; `wait`: one wait in s."""
        turns: _Turns | None = None
        with self.lock:
            while True:
                entry, verdict = self.member.enter(operation)
                if entry is not Entry.WAIT:
                    call.sequence = self.member.next_sequence - 1
                    if entry is Entry.START:
                        call.generation, call.participants = self.member.generation, self.member.participants
                        call.exchange = self.member.exchanges(call.sequence)
                        self.decided = None
                        self.call = call
                    return entry, verdict
                turns = turns or _Turns(call)
                if self._gives_up(call, turns):
                    call.sequence = self.skip([operation])
                    return entry, None
                self.condition.wait(wait)
                turns.end()

    def skip(self, operations: list[Operation]) -> int:
        """Calls that were never entered take their places all the same; returns the last of these."""
        with self.lock:
            for operation in operations:
                self.member.skip(operation)
            return self.member.next_sequence - 1

    def end(self, call: OpenCall, failed: bool) -> None:
        """The call returns to its caller."""
        with self.lock:
            if self.call is call:
                self.call = None
                if failed:
                    self._failed = (call.text, time.monotonic())

    def _gives_up(self, call: OpenCall, turns: _Turns) -> bool:
        """Return whether the call ends without the verdict that it waits for: none can come, or it takes too long."""
        return bool(self.unavailable) or (time.monotonic() >= call.deadline + self._waits() and turns.steady)

    def await_verdict(self, wait: float, call: OpenCall) -> Decided | None:
        """Wait for the verdict on the call, on local state and by this rank's own clock; None when none came."""
        turns = _Turns(call)
        with self.condition:
            while self.decided is None:
                if self._gives_up(call, turns):
                    self.member.give_up()
                    return None
                self.condition.wait(wait)
                turns.end()
            decided, self.decided = self.decided, None
            return decided

    def verdict_within(self, seconds: float) -> Decided | None:
        """The verdict if there is one within so many seconds; the call stays as it is where there is none."""
        with self.condition:
            self.condition.wait_for(lambda: self.decided is not None, timeout=max(0.0, seconds))
            decided, self.decided = self.decided, None
            return decided

    def take_overruled(self) -> tuple[Verdict, ...]:
        """Verdicts that failed what had been returned as a success here, once."""
        with self.condition:
            overruled, self.member.overruled = self.member.overruled, ()
            return overruled

    def takes_part(self, verdict: Verdict) -> tuple[int, ...]:
        """Return who takes part in the generation after a verdict: this rank may have left out those that are gone."""
        with self.condition:
            member = self.member
            return member.participants if member.generation == verdict.generation + 1 else verdict.participants

    # ------------------------------------------------------------------ the monitor's thread

    def serve(
        self,
        session: str,
        unavailable: str,
        publish_alone: Callable[[Incident], None],
        standing: Callable[[], Trouble | None],
        grace: float = GRACE,
        waits: Callable[[], float] = lambda: GRACE,
        hosts: Callable[[Sequence[int]], Mapping[int, str]] = _no_hosts,
    ) -> None:
        """The monitor takes the group on. `standing()`: why others wait in vain for this rank, see `sections`.

        `waits()`: for how many seconds after its deadline a caller waits for the verdict; `grace`: the same while
        nothing is slow, see `timing`. `hosts` is what `self.hosts` asks.
        """
        self.grace, self._waits, self.hosts = grace, waits, hosts
        self.session, self.unavailable = session, unavailable
        self.publish_alone, self._standing = publish_alone, standing

    def begin_session(self, session: str) -> None:
        """The ranks have agreed on their session: communicators can be built."""
        with self.condition:
            self.session = session
            self.condition.notify_all()

    def saw(self, sightings: Sightings) -> None:
        """Keep what was seen of ranks that do not answer, for the incident."""
        self.sightings = sightings

    def decides(self, after: float) -> None:
        """This rank writes a verdict so many seconds after the revoke: for the incident."""
        self.decided_after = after

    def kept_result(self) -> tuple[int, str] | None:
        """The number of the operation whose result this rank keeps for others, and that result."""
        with self.condition:
            kept = self.member.kept
        text = self._result() if kept else None
        return None if text is None else (kept, text)

    def last_words(self) -> Watched | None:
        """Return what the others may have to know of torch's collectives once this rank has left."""
        return None

    def last_calls(self) -> Report | None:
        """Return what rank 0 compares when all have left, if anything."""
        return None

    def torchs_own(self) -> Watched | None:
        """Return what this rank waits in and has issued of the collectives that the guard does not carry, if known."""
        return None

    def answer(self) -> Report:
        """Freeze the generation and return the promise, with what only the clock of this rank knows."""
        with self.condition:
            report = self.member.freeze()
            standing = self._standing()
            if standing is not None and _explains(standing, report):
                report = replace(report, trouble=standing)
            return self._timed(report)

    def glance(self) -> Report:
        """Return where this rank is, without the promise: nothing is frozen, and no trouble is told."""
        with self.condition:
            return self._timed(replace(self.member.report(), trouble=None))

    def _timed(self, report: Report) -> Report:
        now, call = time.monotonic(), self.call
        if call is None or report.operation is None:
            return report
        return replace(report, age=now - call.entered, budget=call.deadline - now)

    def judge(
        self,
        generation: int,
        members: tuple[int, ...],
        reports: Mapping[int, Report],
        departed: Mapping[int, Departure],
        silent: Silent,
        coordinator: int,
        summarise: Summarise,
    ) -> Verdict:
        """The coordinator's verdict on what the members report, with its incident."""
        verdict = decide(generation, members, reports, departed, silent, coordinator=coordinator)
        incident = summarise(verdict, reports, departed, silent, self)
        return replace(verdict, sides=model.sides(verdict.sides), incident=incident)

    def adopt(self, verdict: Verdict, donated: str | None) -> None:
        """Hand the verdict to the caller who waits for it."""
        with self.condition:
            resolution = self.member.adopt(verdict)
            self.incident = verdict.incident or self.incident
            if resolution is Resolution.DONATED and donated is None:
                resolution = Resolution.MISSED
            if resolution is not None:
                self.decided = (resolution, verdict, donated)
            if resolution is Resolution.FAILED and self.call is not None:
                # The caller may get no processor for a while, and other groups ask meanwhile where this rank has been.
                self._failed = (self.call.text, time.monotonic())
            self.condition.notify_all()


def _no_transport(generation: int) -> None:
    """No communicator has been built for this group yet."""


def _nothing_kept() -> str | None:
    return None


def _nobody_reads(incident: Incident) -> None:
    """No monitor has this group: there is nobody to write a report."""


def _no_trouble() -> Trouble | None:
    return None


def _explains(standing: Trouble, report: Report) -> bool:
    """Return whether others wait because of what this rank did in the section: it is in no call, or not in theirs."""
    if report.operation is None:
        return report.trouble is None
    mismatch = report.trouble is not None and report.trouble.kind is TroubleKind.MISMATCH
    return standing.kind in (TroubleKind.RAISED, TroubleKind.GAVE_UP) and mismatch


#: Groups that keep a state of another kind, by their key: the one of `watch`.
KINDS: dict[str, type[GroupState]] = {}


def make_state(key: str, rank: int, members: tuple[int, ...]) -> GroupState:
    """The state of the group with this key, for a monitor."""
    return KINDS.get(key, GroupState)(key, rank, members)
