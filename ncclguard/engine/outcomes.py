"""Outcomes out of what happened: agreed verdicts, successes, and what this rank could only find out alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ncclguard import lifecycle
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.incidents import alone, from_json, in_evaluation
from ncclguard.engine.call import Call
from ncclguard.engine.table import bus_factor
from ncclguard.outcome import Outcome
from ncclguard.protocol.decision import NOBODY, PRECEDENCE, Verdict
from ncclguard.protocol.member import Entry, Resolution
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import tr


def success(key: str, call: Call, opened: OpenCall, attempts: int, chunks: int) -> Outcome:
    """The operation completed."""
    seconds = time.monotonic() - opened.entered
    algbw = call.nbytes / seconds if seconds > 0 else 0.0
    return Outcome(
        op=call.op,
        op_id=f"{key}/{opened.sequence}",
        attempts=attempts,
        chunks=chunks,
        numel=call.numel,
        nbytes=call.nbytes,
        seconds=seconds,
        algbw=algbw,
        busbw=algbw * bus_factor(call.op, len(opened.participants)),
        participants=opened.participants,
    )


def from_verdict(
    resolution: Resolution,
    verdict: Verdict,
    state: GroupState,
    call: Call,
    opened: OpenCall,
    torn: bool,
    before: dict[int, Cause] | None = None,
) -> Outcome:
    """The operation failed by an agreed verdict, or was committed by the others without this rank.

    `before`: whom earlier verdicts on this operation, after which it was tried again, have named.
    """
    if resolution is Resolution.LOST:
        return _lost(state, call, opened.sequence, opened.entered, dict(verdict.departed))
    incident = from_json(verdict.incident)
    if resolution is Resolution.FAILED:
        return _failure(
            state, call, opened.sequence, opened.entered, verdict.cause, verdict.culprit_ranks,
            attempts=verdict.attempt, participants=verdict.participants, torn=torn, incident=incident,
        )  # fmt: skip
    rank = state.member.rank
    if resolution is Resolution.FENCED:
        return _fenced(
            state, call, opened.sequence, opened.entered, before, attempts=verdict.attempt,
            participants=verdict.participants, torn=torn,
        )  # fmt: skip
    note = tr(
        "the others completed {operation} while rank {rank} did not answer; its own result is incomplete",
        operation=call.text,
        rank=rank,
    )
    return _alone(
        state, call, opened.sequence, opened.entered, {rank: Cause.STUCK}, note, attempts=verdict.attempt,
        participants=verdict.participants, torn=torn,
    )  # fmt: skip


def missed(state: GroupState, call: Call, sequence: int, started: float) -> Outcome:
    """A late call whose operation the others have completed, and whose result is not kept."""
    rank = state.member.rank
    note = tr(
        "the others completed {operation} without rank {rank}, which came too late for its result",
        operation=call.text,
        rank=rank,
    )
    participants = state.member.participants
    return _alone(state, call, sequence, started, {rank: Cause.LATE}, note, participants=participants)


def not_started(
    entry: Entry,
    state: GroupState,
    call: Call,
    sequence: int,
    started: float,
    verdict: Verdict | None,
    missing: dict[int, Cause],
) -> Outcome:
    """Return the outcome of a call that ended before it began."""
    if entry is Entry.SETTLED and verdict is not None:
        return _failure(
            state, call, sequence, started, verdict.cause, verdict.culprit_ranks, attempts=verdict.attempt,
            participants=verdict.participants, incident=from_json(verdict.incident),
        )  # fmt: skip
    if entry is Entry.MISSED:
        return missed(state, call, sequence, started)
    if entry is Entry.LOST:
        return _lost(state, call, sequence, started, missing)
    if entry is Entry.FENCED:
        return _fenced(state, call, sequence, started)
    why = state.unavailable or tr("no verdict on the operation before it came in time")
    return _alone(state, call, sequence, started, {}, why)


def _fenced(
    state: GroupState,
    call: Call,
    sequence: int,
    started: float,
    before: dict[int, Cause] | None = None,
    *,
    attempts: int = 1,
    participants: tuple[int, ...] = (),
    torn: bool = False,
) -> Outcome:
    """The others go on without this rank: it was found gone, or had announced its own end.

    A launcher ends all ranks with SIGTERM when one is gone. A rank that has announced that is not the reason: named
    here are those that left by themselves, else those whom this operation had lost `before`, else nobody.
    """
    rank, causes = state.member.rank, dict(state.member.fenced_for)
    if state.terminated or (causes and rank not in causes):
        if rank in causes:  # then all whom it names were ended from outside
            causes = before or {}
        note = tr("rank {rank} had announced its end, and the others go on without it", rank=rank)
        if state.terminated == lifecycle.SENT_SIGTERM:
            note = tr("rank {rank} was sent SIGTERM, and the others go on without it", rank=rank)
    else:
        causes = {rank: causes.get(rank, Cause.LOST)}
        note = tr("rank {rank} was found gone by the others, who go on without it: end this process", rank=rank)
    return _alone(state, call, sequence, started, causes, note, attempts=attempts, participants=participants, torn=torn)


def _lost(state: GroupState, call: Call, sequence: int, started: float, causes: dict[int, Cause]) -> Outcome:
    """Agreed before: members are gone, and this call does not go on without them.

    A launcher ends all ranks when one is gone, this one too: they are not named beside it.
    """
    named = causes.keys() & state.member.named
    followed = causes.keys() if state.terminated or named else {state.member.rank}
    causes = {rank: cause for rank, cause in causes.items() if rank in named or rank not in followed}
    note = tr("gone since an earlier operation: restart what is gone")
    if call.operation.needs == NOBODY and not in_evaluation(call.text):
        note = tr('gone since an earlier operation: restart what is gone, or go on without with on_lost="shrink"')
    if not causes:
        note = tr("all ranks were ended from outside, with SIGTERM")
    return _alone(state, call, sequence, started, causes, note, agreed=True, participants=state.member.participants)


def local(
    state: GroupState, call: Call, opened: OpenCall, attempts: int, torn: bool, gone: Callable[[int], str]
) -> Outcome:
    """No verdict could be had: this rank's own, which never is a success."""
    evidence = {rank: gone(rank) for rank in state.member.participants if rank != state.member.rank}
    causes = {rank: Cause.LOST for rank, text in evidence.items() if text}
    why = state.unavailable or tr(
        "the agreement did not answer in time: this rank may be cut off, or the store's host stopped"
    )
    expired = time.monotonic() >= opened.deadline
    outcome = _alone(
        state, call, opened.sequence, opened.entered, causes, why, expired=expired, evidence=evidence,
        attempts=attempts, participants=state.member.participants, torn=torn,
    )  # fmt: skip
    assert outcome.incident is not None
    if not state.given_up:  # else it has ended because this process gave the group up, which is nobody's fault
        state.publish_alone(outcome.incident)
    return outcome


def busy(state: GroupState, call: Call, started: float, budget: float) -> Outcome:
    """Another thread of this process kept the group for the call's whole budget."""
    running = state.call
    other = running.text if running is not None else tr("another operation")
    note = tr(
        "another thread of this process was in {operation} on this group for the whole budget of {budget:.3g} s",
        operation=other,
        budget=budget,
    )
    return _alone(state, call, 0, started, {}, note, expired=True)


def overruled(key: str, verdict: Verdict) -> Outcome:
    """A small operation that had returned a success here while this rank was silent, and failed for the others."""
    incident = from_json(verdict.incident)
    return Outcome(
        op=incident.op if incident else "operation",
        op_id=f"{key}/{verdict.sequence}",
        cause=verdict.cause or Cause.UNKNOWN,
        culprits=verdict.culprit_ranks,
        attempts=verdict.attempt,
        participants=verdict.participants,
        incident=incident,
    )


def _alone(
    state: GroupState,
    call: Call,
    sequence: int,
    started: float,
    causes: dict[int, Cause],
    why: str,
    *,
    agreed: bool = False,
    expired: bool = False,
    evidence: dict[int, str] | None = None,
    **said: Any,
) -> Outcome:
    """Return the failure that this rank tells of by itself; `said`: further fields of the outcome."""
    cause = min(causes.values(), key=PRECEDENCE.index, default=Cause.UNKNOWN)
    incident = alone(
        state, call.op, call.text, sequence, cause, causes, why, agreed=agreed, expired=expired, evidence=evidence
    )
    return _failure(state, call, sequence, started, cause, incident.culprits, agreed=agreed, incident=incident, **said)


def _failure(
    state: GroupState,
    call: Call,
    sequence: int,
    started: float,
    cause: Cause | None,
    culprits: tuple[int, ...],
    **said: Any,
) -> Outcome:
    return Outcome(
        op=call.op,
        op_id=f"{state.key}/{sequence}",
        cause=cause or Cause.UNKNOWN,
        culprits=culprits,
        numel=call.numel,
        nbytes=call.nbytes,
        seconds=time.monotonic() - started,
        **said,
    )
