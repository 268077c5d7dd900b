"""Outcomes out of what happened: agreed verdicts, successes, and what this rank could only find out alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ncclguard.agreement.decision import NOBODY, PRECEDENCE, Verdict
from ncclguard.agreement.incidents import alone, from_json
from ncclguard.agreement.protocol import Entry, Resolution
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.incident.model import Incident
from ncclguard.metrics import hook
from ncclguard.outcome import Cause, FailedOutcome, Outcome, bus_factor

if TYPE_CHECKING:
    from ncclguard.request import Request


def success(
    seat: Seat, request: Request, call: OpenCall, attempts: int, chunks: int, participants: tuple[int, ...]
) -> Outcome:
    """The operation completed."""
    seconds = time.monotonic() - call.entered
    if hook.observer is not None:
        waited = call.opened - call.entered if attempts == 1 else -1.0
        hook.observer.succeeded(seat.key, request.op, request.nbytes, seconds, waited, attempts)
    if seat.exchange is not None:
        seat.exchange.completed(request, call, attempts, chunks, seconds)
    algbw = request.nbytes / seconds if seconds > 0 else 0.0
    return Outcome(
        ok=True,
        agreed=True,
        op=request.op,
        op_id=f"{seat.key}/{call.sequence}",
        cause=None,
        culprits=(),
        attempts=attempts,
        chunks=chunks,
        numel=request.numel,
        nbytes=request.nbytes,
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(request.op, len(participants)),
        participants=participants,
        torn=False,
        incident=None,
    )


def from_verdict(
    resolution: Resolution, verdict: Verdict, seat: Seat, request: Request, call: OpenCall, torn: bool
) -> Outcome:
    """The operation failed by an agreed verdict, or was committed by the others without this rank."""
    if resolution is Resolution.LOST:
        return _lost(seat, request, call.sequence, call.entered, dict(verdict.departed))
    incident = from_json(verdict.incident)
    if resolution is Resolution.FAILED:
        return _failure(
            seat, request, call.sequence, call.entered, verdict.cause, verdict.culprit_ranks,
            attempts=verdict.attempt, participants=verdict.participants, torn=torn, incident=incident,
        )  # fmt: skip
    rank = seat.member.rank
    if resolution is Resolution.FENCED:
        note = f"rank {rank} was found gone by the others, who go on without it: end this process"
    else:
        note = f"the others completed {request.text} while rank {rank} did not answer; its own result is incomplete"
    return _failure(
        seat, request, call.sequence, call.entered, Cause.STUCK, (rank,), agreed=False, attempts=verdict.attempt,
        participants=verdict.participants, torn=torn,
        incident=alone(seat, request.op, request.text, call.sequence, Cause.STUCK, {rank: Cause.STUCK}, note),
    )  # fmt: skip


def missed(seat: Seat, request: Request, sequence: int, started: float) -> Outcome:
    """A late call whose operation the others have completed, and whose result is not kept."""
    rank = seat.member.rank
    note = f"the others completed {request.text} without rank {rank}, which came too late for its result"
    return _failure(
        seat, request, sequence, started, Cause.LATE, (rank,), agreed=False, participants=seat.member.participants,
        incident=alone(seat, request.op, request.text, sequence, Cause.LATE, {rank: Cause.LATE}, note),
    )  # fmt: skip


def not_started(
    entry: Entry,
    seat: Seat,
    request: Request,
    sequence: int,
    started: float,
    verdict: Verdict | None,
    missing: dict[int, Cause],
) -> Outcome:
    """The call ended before it began: decided already, a member known to be gone,
    fenced, or no verdict on what was before.
    """
    if entry is Entry.SETTLED and verdict is not None:
        return _failure(
            seat, request, sequence, started, verdict.cause, verdict.culprit_ranks, attempts=verdict.attempt,
            participants=verdict.participants, incident=from_json(verdict.incident),
        )  # fmt: skip
    if entry is Entry.MISSED:
        return missed(seat, request, sequence, started)
    if entry is Entry.LOST:
        return _lost(seat, request, sequence, started, missing)
    if entry is Entry.FENCED:
        rank = seat.member.rank
        note = f"rank {rank} was found gone by the others, who go on without it: end this process"
        return _failure(
            seat, request, sequence, started, Cause.LOST, (rank,), agreed=False,
            incident=alone(seat, request.op, request.text, sequence, Cause.LOST, {rank: Cause.LOST}, note),
        )  # fmt: skip
    why = seat.unavailable or "no verdict on the operation before it came in time"
    return _failure(
        seat, request, sequence, started, Cause.UNKNOWN, (), agreed=False,
        incident=alone(seat, request.op, request.text, sequence, Cause.UNKNOWN, {}, why),
    )  # fmt: skip


def _lost(seat: Seat, request: Request, sequence: int, started: float, causes: dict[int, Cause]) -> Outcome:
    """Agreed before: members are gone, and this call does not go on without them."""
    cause = min(causes.values(), key=PRECEDENCE.index)
    note = "gone since an earlier operation: restart what is gone"
    if request.needs == NOBODY:
        note += ', or go on without with on_lost="shrink"'
    return _failure(
        seat, request, sequence, started, cause, tuple(sorted(causes)), participants=seat.member.participants,
        incident=alone(seat, request.op, request.text, sequence, cause, causes, note, agreed=True),
    )  # fmt: skip


def local(
    seat: Seat, request: Request, call: OpenCall, attempts: int, torn: bool, gone: Callable[[int], str]
) -> Outcome:
    """No verdict could be had: this rank's own, which never is a success."""
    evidence = {rank: gone(rank) for rank in seat.member.participants if rank != seat.member.rank}
    causes = {rank: Cause.LOST for rank, text in evidence.items() if text}
    cause = Cause.LOST if causes else Cause.UNKNOWN
    why = (
        seat.unavailable
        or "the agreement did not answer in time: this rank may be cut off, or the store's host stopped"
    )
    expired = time.monotonic() >= call.deadline
    incident = alone(
        seat, request.op, request.text, call.sequence, cause, causes, why, expired=expired, evidence=evidence
    )
    seat.publish_alone(incident)
    return _failure(
        seat, request, call.sequence, call.entered, cause, tuple(sorted(causes)), agreed=False, attempts=attempts,
        participants=seat.member.participants, torn=torn, incident=incident,
    )  # fmt: skip


def busy(seat: Seat, request: Request, started: float, budget: float) -> Outcome:
    """Another thread of this process kept the group for the call's whole budget."""
    call = seat.call
    other = call.text if call is not None else "another operation"
    note = f"another thread of this process was in {other} on this group for the whole budget of {budget:.3g} s"
    return _failure(
        seat, request, 0, started, Cause.UNKNOWN, (), agreed=False,
        incident=alone(seat, request.op, request.text, 0, Cause.UNKNOWN, {}, note, expired=True),
    )  # fmt: skip


def overruled(seat: Seat, verdict: Verdict) -> Outcome:
    """A small operation that had returned a success here while this rank was silent, and failed for the others."""
    incident = from_json(verdict.incident)
    return FailedOutcome(
        ok=False, agreed=True, op=incident.op if incident else "operation", op_id=f"{seat.key}/{verdict.sequence}",
        cause=verdict.cause, culprits=verdict.culprit_ranks, attempts=verdict.attempt, chunks=0, numel=0, nbytes=0,
        seconds=0.0, algbw=0.0, busbw=0.0, participants=verdict.participants, torn=False, incident=incident,
    )  # fmt: skip


def _failure(
    seat: Seat,
    request: Request,
    sequence: int,
    started: float,
    cause: Cause | None,
    culprits: tuple[int, ...],
    *,
    agreed: bool = True,
    attempts: int = 1,
    participants: tuple[int, ...] = (),
    torn: bool = False,
    incident: Incident | None = None,
) -> Outcome:
    seconds = time.monotonic() - started
    if seat.exchange is not None:
        seat.exchange.failed(agreed, cause, incident)
    op_id = f"{seat.key}/{sequence}"
    if hook.observer is not None:
        hook.observer.failed(op_id, request.op, request.nbytes, seconds, attempts, cause, culprits, agreed, incident)
    return FailedOutcome(
        ok=False,
        agreed=agreed,
        op=request.op,
        op_id=op_id,
        cause=cause,
        culprits=culprits,
        attempts=attempts,
        chunks=0,
        numel=request.numel,
        nbytes=request.nbytes,
        seconds=seconds,
        algbw=0.0,
        busbw=0.0,
        participants=participants,
        torn=torn,
        incident=incident,
    )
