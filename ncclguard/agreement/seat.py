"""A rank's place in one group: the protocol's state under its lock, and what the
caller and the monitor tell each other.

A seat exists from the moment anybody's revoke of the group is heard, even before this rank has made its first call
there, so that a rank which is late for the very first operation can say so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ncclguard.agreement.decision import Departure, Phase, Report, Trouble, TroubleKind, Verdict, decide
from ncclguard.agreement.protocol import Member, Resolution
from ncclguard.incident import bounds
from ncclguard.incident.history import KEPT, PastTuple
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause

if TYPE_CHECKING:
    from ncclguard.metrics.exchange import Exchange


class Subject(Protocol):
    """What an incident says of a seat, or of one of the groups behind it."""

    @property
    def key(self) -> str: ...
    @property
    def session(self) -> str: ...
    @property
    def sightings(self) -> Mapping[int, Mapping[str, object]]: ...
    @property
    def guarded(self) -> bool: ...


Summarise = Callable[[Verdict, Mapping[int, Report], Mapping[int, Departure], Mapping[int, Cause], Subject], str]


@dataclass(slots=True)
class OpenCall:
    """The call in progress, as the monitor needs to see it."""

    text: str
    entered: float  # time.monotonic()
    deadline: float  # time.monotonic()
    thread: int  # threading.get_ident() of the caller
    sequence: int = 0
    generation: int = 0  # it entered on, and who took part in that
    participants: tuple[int, ...] = ()
    warned: float = 0.0  # age at the last look at who is awaited
    opened: float = 0.0  # time.monotonic() when all had come; 0 before
    exchange: bool = False  # carries the group's exchange of statistics


class Seat:
    """Thread-safe: `lock`, which is that of `condition`, guards every field; it is never held across I/O."""

    #: Whether the guard carries out the collectives; else it only watches those of torch.
    guarded = True

    def __init__(self, key: str, rank: int, members: tuple[int, ...]) -> None:
        self.key = key
        self.member = Member(rank, members)
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)  # entering the lock itself costs a third: what each call does
        self.call: OpenCall | None = None
        self.last_text = ""
        self.session = ""  # the nonce of the job's session, known some time after the seat is made
        self.past: deque[PastTuple] = deque(maxlen=KEPT)
        self.resolution: tuple[Resolution, Verdict, str | None] | None = None
        self.unavailable = ""  # why no verdict can come: the store is gone
        self.exchange: Exchange | None = None  # of statistics; None in jobs that have none
        self.stop_transport: Callable[[int], None] = _no_transport
        self.kept_result: Callable[[], str | None] = _nothing_kept
        self.publish_alone: Callable[[Incident], None] = _nobody_reads
        self.sightings: Mapping[
            int, Mapping[str, object]
        ] = {}  # what was seen of ranks that do not answer, like details
        self.standing: Callable[[], Trouble | None] = _no_trouble

    def remember(self, call: OpenCall) -> None:
        """Keep a finished call for later reports; on every call's path, under `condition`."""
        done = self.member.completed >= call.sequence
        self.past.append((call.sequence, call.text, call.entered, time.monotonic(), done))

    def open_calls(self) -> list[tuple[str, int, str, float]]:
        """What this rank is in, for the timeline: group, sequence, text, and when it entered by `time.monotonic()`."""
        with self.condition:
            call = self.call
        return [] if call is None else [(self.key, call.sequence, call.text, call.entered)]

    def last_words(self) -> dict[str, object]:
        """What others may want to know once this rank has left, for the details of its departure."""
        return {}

    def trouble(self, generation: int, kind: TroubleKind, text: str, peer: int = -1, host: str = "") -> bool:
        """Stop moving in this generation and have it revoked; False when it has had its verdict already."""
        with self.condition:
            return self.member.in_trouble(generation, Trouble(kind, text, peer, host))

    def waited_for(self) -> tuple[OpenCall, int] | None:
        """The open call and its sequence, or None."""
        with self.condition:
            operation = self.member.operation
            if self.call is None or operation is None:
                return None
            return self.call, operation.sequence

    def answer(self) -> Report:
        """Freeze the generation and return the promise, with what only the clock of this rank knows."""
        with self.condition:
            report = self.member.freeze()
            standing = self.standing()
            if standing is not None and _explains(standing, report):
                report = replace(report, trouble=standing)
            return self._timed(report)

    def glance(self) -> Report:
        """Where this rank is, without the promise: nothing is frozen, and no trouble is told."""
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
        silent: Mapping[int, Cause],
        coordinator: int,
        summarise: Summarise,
    ) -> Verdict:
        """The coordinator's verdict on what the members report, with its incident."""
        verdict = decide(generation, members, reports, departed, silent, coordinator=coordinator)
        incident = summarise(verdict, reports, departed, silent, self)
        return replace(verdict, sides=bounds.sides(verdict.sides), incident=incident)

    def adopt(self, verdict: Verdict, donated: str | None) -> None:
        """Hand the verdict to the caller who waits for it."""
        with self.condition:
            resolution = self.member.adopt(verdict)
            if resolution is Resolution.DONATED and donated is None:
                resolution = Resolution.MISSED
            if resolution is not None:
                self.resolution = (resolution, verdict, donated)
            self.condition.notify_all()

    def takes_part(self, verdict: Verdict) -> tuple[int, ...]:
        """Who takes part in the generation after a verdict: this rank may have left out those that are gone."""
        with self.condition:
            member = self.member
            return member.participants if member.generation == verdict.generation + 1 else verdict.participants

    def set_unavailable(self, why: str) -> None:
        with self.condition:
            self.unavailable = why
            self.condition.notify_all()

    def waiting_text(self) -> str:
        """What this rank is waiting in, for the reports of other groups; empty when it is not."""
        with self.condition:
            if self.call is None or self.member.operation is None or self.member.phase is Phase.NONE:
                return ""
            return self.call.text


def _no_transport(generation: int) -> None:
    """No communicator has been built for this seat yet."""


def _nothing_kept() -> str | None:
    return None


def _nobody_reads(incident: Incident) -> None:
    """No monitor has this seat: there is nobody to write a report."""


def _no_trouble() -> Trouble | None:
    return None


def _explains(standing: Trouble, report: Report) -> bool:
    """Whether what this rank did in the section is why the others wait: it is in no
    call, or in one that is not theirs.
    """
    if report.operation is None:
        return report.trouble is None
    mismatch = report.trouble is not None and report.trouble.kind is TroubleKind.MISMATCH
    return standing.kind is TroubleKind.RAISED and mismatch
