"""Looking into calls that take long, without ending them: an early mismatch check, and who is awaited and where it is.

Nothing here is a promise. The first rank that has waited a second in an operation publishes its fingerprint; the others compare
theirs, so that a mismatch is known in seconds although a further rank has not come and the opening round cannot pass. That first
rank also asks, when the warning is due, and is the only one to log what the answers say.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ncclguard.agreement import codec
from ncclguard.agreement.decision import Operation, Phase, Report, TroubleKind
from ncclguard.agreement.liveness import Sight
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.agreement.store import AgreementStore
from ncclguard.outcome import Cause

log = logging.getLogger("ncclguard")

#: Seconds after which an open call publishes its fingerprint.
PUBLISH_AFTER = 1.0
#: Seconds that members have to answer a question before they are called silent.
ANSWER_WITHIN = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How many seconds a call may take until its ranks are asked who is awaited, and until a silent one ends it."""

    warn_after: float
    stuck_timeout: float | None


class Surroundings(Protocol):
    """What an inquiry needs from the monitor."""

    def seats(self) -> list[Seat]: ...
    def seat(self, key: str, members: tuple[int, ...]) -> Seat: ...
    def describe(self, seat: Seat, report: Report) -> Report: ...
    def post(self, entry: dict[str, object]) -> None: ...
    def sight(self, rank: int) -> tuple[Sight, str]: ...
    def patience(self, seat: Seat) -> Patience: ...


@dataclass(kw_only=True)
class Question:
    """What one rank wants to know of the members of a group, and what they have said so far."""

    identifier: str
    asked: float
    answers: dict[int, Report] = field(default_factory=dict)

    def entry(self, seat: Seat, rank: int) -> dict[str, object]:
        """What to post for the others, by `rank`."""
        members = list(seat.member.members)
        return {"kind": "question", "id": self.identifier, "group": seat.key, "members": members, "by": rank}

    def silent(self, ranks: Iterable[int], now: float, store: AgreementStore) -> list[int] | None:
        """Take in the answers that have come; those of `ranks` that gave none in time, None while there is time."""
        missing = [rank for rank in ranks if rank not in self.answers]
        for rank in missing:
            text = store.read(f"answer/{self.identifier}/{rank}")
            if text is not None:
                self.answers[rank] = codec.loads_report(text)
        missing = [rank for rank in missing if rank not in self.answers]
        return None if missing and now - self.asked < ANSWER_WITHIN else missing


@dataclass(kw_only=True)
class _Inquiry(Question):
    seat: Seat
    generation: int
    operation: Operation
    call: OpenCall


class Inquiries:
    """The monitor's questions, and its answers to those of others."""

    def __init__(self, rank: int, surroundings: Surroundings) -> None:
        self._rank = rank
        self._around = surroundings
        self._published: dict[str, tuple[int, int, bool]] = {}  # seat -> generation, sequence, am I the one who asks
        self._question: _Inquiry | None = None
        self._asked = 0

    @property
    def busy(self) -> bool:
        return self._question is not None

    def step(self, now: float, store: AgreementStore) -> None:
        """Publish and compare fingerprints, ask when it is time, and log what the answers add up to."""
        for seat in self._around.seats():
            self._publish(seat, now, store)
        if self._question is not None:
            self._collect(self._question, now, store)
            return
        for seat in self._around.seats():
            self._ask_if_due(seat, now)

    def answer(self, store: AgreementStore, entry: dict[str, object]) -> None:
        """Say where this rank is in the operation that is asked about."""
        members = entry["members"]
        assert isinstance(members, list)
        seat = self._around.seat(str(entry["group"]), tuple(members))
        report = self._around.describe(seat, seat.glance())
        store.first(f"answer/{entry['id']}/{self._rank}", codec.dumps(report))

    def _publish(self, seat: Seat, now: float, store: AgreementStore) -> None:
        with seat.condition:
            call, operation, generation = seat.call, seat.member.operation, seat.member.generation
            if call is None or operation is None or seat.member.frozen or now - call.entered < PUBLISH_AFTER:
                return
        if self._published.get(seat.key, (-1, -1, False))[:2] == (generation, operation.sequence):
            return
        mine = json.dumps([operation.fingerprint, self._rank, operation.text])
        fingerprint, rank, text = json.loads(store.first(f"{seat.key}/{generation}/open/{operation.sequence}", mine))
        self._published[seat.key] = (generation, operation.sequence, rank == self._rank)
        if fingerprint != operation.fingerprint:
            why = f"rank {rank} is in {text}, rank {self._rank} in {operation.text}"
            seat.trouble(generation, TroubleKind.MISMATCH, why)

    def _ask_if_due(self, seat: Seat, now: float) -> None:
        with seat.condition:
            call, operation, generation = seat.call, seat.member.operation, seat.member.generation
            if call is None or operation is None or seat.member.frozen:
                return
        if self._published.get(seat.key) != (generation, operation.sequence, True):
            return
        age, patience = now - call.entered, self._around.patience(seat)
        due = patience.warn_after if call.warned < patience.warn_after else 2 * call.warned
        if patience.stuck_timeout is not None and call.warned < patience.stuck_timeout:
            due = min(due, patience.stuck_timeout)
        if age < due:
            return
        call.warned = age
        self._asked += 1
        self._question = _Inquiry(
            identifier=f"{self._rank}.{self._asked}",
            asked=now,
            seat=seat,
            generation=generation,
            operation=operation,
            call=call,
        )
        self._around.post(self._question.entry(seat, self._rank))

    def _collect(self, question: _Inquiry, now: float, store: AgreementStore) -> None:
        with question.seat.condition:
            participants = question.seat.member.participants
            over = question.seat.member.operation != question.operation
        if over:
            self._question = None
            return
        silent = question.silent(participants, now, store)
        if silent is None:
            return
        self._question = None
        self._conclude(question, silent, now)

    def _conclude(self, question: _Inquiry, silent: list[int], now: float) -> None:
        age, stuck_timeout = now - question.call.entered, self._around.patience(question.seat).stuck_timeout
        lines: list[str] = []
        stuck: list[int] = []
        for rank, report in sorted(question.answers.items()):
            if report.phase_at(question.operation.sequence) is Phase.NONE:
                lines.append(f"rank {rank} has not come: {whereabouts(report)}")
        for rank in silent:
            sight, evidence = self._around.sight(rank)
            cause = silent_cause(sight)
            if cause is Cause.STUCK:
                stuck.append(rank)
            lines.append(f"rank {rank} does not answer: {cause.value} ({evidence})")
        if stuck and stuck_timeout is not None and age >= stuck_timeout:
            why = f"ranks {stuck} did not answer for {age:.0f} s (stuck_timeout {stuck_timeout:g} s)"
            question.seat.trouble(question.generation, TroubleKind.STUCK, why)
        if not lines:
            lines.append("every rank has entered: the transfer itself is slow or stalled")
        log.warning(
            "ncclguard: %s has been waiting for %.0f s (deadline in %.0f s): %s",
            question.call.text,
            age,
            question.call.deadline - now,
            "; ".join(lines),
        )


def silent_cause(sight: Sight) -> Cause:
    """A silent rank whose process exists is stuck; where nobody can look, the truth is unknown."""
    return Cause.STUCK if sight in (Sight.RUNNING, Sight.STOPPED, Sight.PRESENT) else Cause.UNKNOWN


def whereabouts(report: Report) -> str:
    if report.elsewhere:
        return f"it waits in {report.elsewhere}"
    stack = report.details.get("stack")
    if isinstance(stack, (list, tuple)) and stack:
        return f"it is at {stack[-1]}"
    return "where it is, is unknown"
