"""Incidents out of reports: what the coordinator writes beside the verdict, and what one rank can say alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from pydantic import ValidationError

from ncclguard import _torch
from ncclguard.agreement.decision import Action, Departure, Phase, Report, Verdict
from ncclguard.agreement.seat import Seat, Subject
from ncclguard.incident import bounds
from ncclguard.incident.model import Incident, RankReport, State
from ncclguard.incident.render import ranks_text
from ncclguard.outcome import Cause

_LOST = "See the launcher's and the kernel's log of its host (exit code, out-of-memory killer, Xid)."

#: Broken connections that a summary names.
SHOWN_ENDS = 4

#: What a person should do next, by cause.
ADVICE = {
    Cause.LATE: "See in its stack what it was doing instead: work on one rank only (saving, metrics, a data loader) must "
    "fit the timeout or run on all ranks. Raise the timeout only if that work is meant to take so long.",
    Cause.DIVERGED: "Compare what the ranks called: a branch, a batch count or a shape depends on the rank. Make it equal, or "
    "agree on it first.",
    Cause.FAILED: "Fix the exception of that rank first: the others only waited for it.",
    Cause.EXITED: "That rank finished or left early: it had fewer steps or batches, or returned before the others.",
    Cause.LOST: f'{_LOST} Restart it, or go on without it with on_lost="shrink".',
    Cause.STUCK: "Its process exists but its interpreter does not run: stopped, swapped out, or in a call that holds the GIL. "
    "Look at it on its host with `py-spy dump --pid`.",
    Cause.NETWORK: "Every rank was there: check the network between the hosts (`ncclguard doctor`), links and interface choice.",
    Cause.UNKNOWN: "No evidence could be had: look at that rank's log and host.",
}

#: The same where it differs for a collective that the guard only watches.
ADVICE_WATCHED = {Cause.LOST: f"{_LOST} Restart the job: the groups of this rank are unusable."}


def summarise(
    verdict: Verdict,
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Mapping[int, Cause],
    seat: Subject,
) -> str:
    """The coordinator's incident as JSON; empty for a verdict under which nothing failed."""
    if verdict.cause is None:
        return ""
    causes = dict(verdict.culprits)
    entered = [r for r in reports.values() if r.operation is not None and r.operation.sequence == verdict.sequence]
    rightly = [
        r for r in entered if r.rank not in causes
    ] or entered  # what the others called, where somebody called another
    text = rightly[0].operation.text if rightly and rightly[0].operation is not None else "operation"
    waited = max((r.age for r in entered), default=0.0)
    timeout = min((r.age + r.budget for r in entered if r.budget is not None), default=None)
    op_id = f"{seat.key}/{verdict.sequence}"
    resumed = verdict.action is Action.RESUME and bool(causes)
    incident = Incident(
        id=_identifier(seat, f"{op_id}.{verdict.generation}"),
        device=_torch.emulated_device(),
        op=text.partition("(")[0],
        op_id=op_id,
        group=seat.key,
        generation=verdict.generation,
        cause=verdict.cause,
        culprits=verdict.culprit_ranks,
        deadline_expired=verdict.deadline_expired,
        timeout=timeout,
        agreed=True,
        attempts=verdict.attempt,
        participants=verdict.participants,
        ranks=bounds.bounded(
            (
                _rank(rank, verdict, reports, departed, silent, causes, seat.sightings.get(rank, {}))
                for rank in {*reports, *departed, *silent}
            ),
            causes,
        ),
        summary=_summary(text, verdict, causes, waited, reports, departed, silent),
        advice=("The others go on without it. " if resumed else "") + _advice(verdict.cause, seat),
        sides=bounds.sides(verdict.sides),
    )
    said = incident.model_dump(mode="json", exclude_defaults=True)  # most fields of most ranks are empty
    return json.dumps({"schema_version": incident.schema_version, **said}, separators=(",", ":"))


def alone(
    seat: Seat,
    op: str,
    text: str,
    sequence: int,
    cause: Cause,
    causes: Mapping[int, Cause],
    why: str,
    *,
    agreed: bool = False,
    expired: bool = False,
    evidence: Mapping[int, str] | None = None,
) -> Incident:
    """What one rank can say without a verdict."""
    op_id = f"{seat.key}/{sequence}"
    return Incident(
        id=_identifier(seat, f"{op_id}.{seat.member.generation}.rank{seat.member.rank}"),
        device=_torch.emulated_device(),
        op=op,
        op_id=op_id,
        group=seat.key,
        generation=seat.member.generation,
        cause=cause,
        culprits=tuple(sorted(causes)),
        deadline_expired=expired,
        agreed=agreed,
        attempts=1,
        participants=seat.member.participants,
        ranks=tuple(
            RankReport(rank=rank, state="departed", cause=found, note=(evidence or {}).get(rank) or None)
            for rank, found in sorted(causes.items())
        ),
        summary=f"{text} failed: {_because(causes) or cause.value}; {why}.",
        advice=_advice(cause, seat),
    )


def _advice(cause: Cause, seat: Subject) -> str:
    return ADVICE[cause] if seat.guarded else ADVICE_WATCHED.get(cause, ADVICE[cause])


def histories(reports: Mapping[int, Report], departed: Mapping[int, Departure], culprits: Collection[int] = ()) -> str:
    """What each rank says of its last operations, as JSON: for the one rank that writes
    the report, not part of the verdict.

    Where that is more than a store takes, those of the `culprits` come before the others'.
    """
    details = _details(reports, departed)
    found, left = {}, bounds.HISTORIES
    for rank in sorted(details, key=lambda rank: (rank not in culprits, rank)):
        history = details[rank].get("history")
        size = len(json.dumps(history))
        if history and size <= left:
            found[rank], left = history, left - size
    return json.dumps(found, separators=(",", ":"))


def writer(incident: Incident) -> int:
    """The one rank that writes the report: the lowest that answered, and rather one
    that is not to blame; -1 for none.
    """
    live = [report.rank for report in incident.ranks if report.state not in ("silent", "departed")]
    return min(sorted(set(live) - set(incident.culprits)) or live, default=-1)


def from_json(text: str) -> Incident | None:
    """Read a verdict's incident; None where the coordinator wrote none, or one of another version."""
    if not text:
        return None
    try:
        return Incident.from_json(text)
    except ValidationError:
        return None


def _identifier(seat: Subject, text: str) -> str:
    """Fit for a file name, and no other job's: the session's name leads."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{seat.session[:8]}-{text}".lstrip("-"))[-120:]


def _details(reports: Mapping[int, Report], departed: Mapping[int, Departure]) -> dict[int, Mapping[str, object]]:
    return {rank: said.details for source in (departed, reports) for rank, said in source.items()}


def _rank(
    rank: int,
    verdict: Verdict,
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Mapping[int, Cause],
    causes: Mapping[int, Cause],
    sighting: Mapping[str, object],
) -> RankReport:
    cause = causes.get(rank)
    report = reports.get(rank)
    left = departed.get(rank)
    if report is None:
        if left is None:
            return _silent(rank, cause, silent.get(rank, Cause.UNKNOWN), sighting)
        return _left(left, cause)
    details = report.details
    trouble = report.trouble
    raised = trouble.text if trouble is not None and cause is Cause.FAILED else None
    # Where a rank was when it said that it leaves, such as the traceback, tells more than where it is while it ends.
    stack = (left.details.get("stack") if left is not None else None) or details.get("stack")
    notes = (
        f"it waits in {report.elsewhere}" if report.elsewhere else "",
        left.text if left is not None and left.cause is not Cause.FAILED else "",
        str(details.get("dead_threads") or ""),
    )
    return RankReport(
        rank=rank,
        host=str(details.get("host", "")),
        pid=int(str(details.get("pid", 0))),
        cause=cause,
        state=_state(report.phase_at(verdict.sequence)),
        sequence=report.operation.sequence if report.operation is not None else report.done,
        operation=str(details.get("call") or details.get("last") or "") or None,
        age=round(report.age, 3) if report.operation is not None else None,
        call_site=str(details.get("call_site") or "") or None,
        peer=trouble.peer if trouble is not None and trouble.peer >= 0 else None,
        exception=raised or (left.text if left is not None and left.cause is Cause.FAILED else None),
        stack=_frames(stack) if cause is not None else (),
        threads=_threads(details) if cause is not None else (),
        note="; ".join(filter(None, notes)) or None,
    )


def _silent(rank: int, cause: Cause | None, silent: Cause, sighting: Mapping[str, object]) -> RankReport:
    """A rank that did not answer, by what a rank of its host has seen of it."""
    note = f"it did not answer: {silent.value}"
    return RankReport(
        rank=rank,
        host=str(sighting.get("host", "")),
        pid=int(str(sighting.get("pid", 0))),
        cause=cause,
        state="silent",
        stack=_frames(sighting.get("stack")),
        threads=_threads(sighting),
        note=f"{note}; {sighting['note']}" if sighting.get("note") else note,
    )


def _frames(stack: object) -> tuple[str, ...]:
    return tuple(str(frame) for frame in stack) if isinstance(stack, (list, tuple)) else ()


def _threads(details: Mapping[str, object]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    threads = details.get("threads")
    if not isinstance(threads, (list, tuple)):
        return ()
    return tuple((str(name), _frames(frames)) for name, frames in threads)


def _left(left: Departure, cause: Cause | None) -> RankReport:
    """A rank that is gone, by what it said when it left, or what its neighbours saw."""
    raised = left.cause is Cause.FAILED
    stack = left.details.get("stack")
    return RankReport(
        rank=left.rank,
        host=str(left.details.get("host", "")),
        pid=int(str(left.details.get("pid", 0))),
        cause=cause,
        state="departed",
        sequence=left.done,
        operation=str(left.details.get("last") or "") or None,
        exception=left.text if raised else None,
        stack=_frames(stack),
        note=None if raised else left.text,
    )


def _state(phase: Phase) -> State:
    return _STATES[phase]


_STATES: dict[Phase, State] = {
    Phase.NONE: "none",
    Phase.RUNNING: "running",
    Phase.READY: "ready",
    Phase.DONE: "done",
}


def _summary(
    text: str,
    verdict: Verdict,
    causes: Mapping[int, Cause],
    waited: float,
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Mapping[int, Cause],
) -> str:
    because = _alone_to_blame(causes, reports, departed) or _because(causes)
    if because:
        what = "starts again" if verdict.action is Action.RESUME else "failed"
        return f"{text} {what} after {waited:.3g} s: {because}."
    if verdict.cause is Cause.DIVERGED:
        return f"{text} failed after {waited:.3g} s: the ranks called different operations, and no side is a majority."
    troubles = sorted({r.trouble.text for r in reports.values() if r.trouble is not None and r.trouble.text})
    found = "; ".join(filter(None, [_broken(reports), *troubles[:1]]))
    detail = f" ({found})" if found else ""
    quiet = silent.keys() - departed.keys()
    if quiet:
        return (
            f"{text} failed after {waited:.3g} s: {verdict.cause}; {ranks_text(quiet)} did not answer in time{detail}."
        )
    return f"{text} failed after {waited:.3g} s although every rank was in it: {verdict.cause}{detail}."


def _broken(reports: Mapping[int, Report]) -> str:
    """Which connections broke, as each side saw it; those that both sides lost first,
    for the others may be a consequence.
    """
    ends = {
        rank: r.trouble
        for rank, r in sorted(reports.items())
        if r.trouble is not None and (r.trouble.peer >= 0 or r.trouble.host)
    }

    def at(rank: int) -> str:
        host = str(reports[rank].details.get("host", "")) if rank in reports else ""
        return f"rank {rank} ({host})" if host else f"rank {rank}"

    both = [(rank, end.peer) for rank, end in ends.items() if end.peer in ends and ends[end.peer].peer == rank]
    told = [f"{at(rank)} and {at(peer)} lost the connection between them" for rank, peer in both if rank < peer]
    told += [
        f"{at(rank)} lost its connection with {at(end.peer) if end.peer >= 0 else f'a rank at {end.host}'}"
        for rank, end in ends.items()
        if (rank, end.peer) not in both
    ]
    more = [f"{len(told) - SHOWN_ENDS} further: see to_json()"] if len(told) > SHOWN_ENDS else []
    return ", ".join(told[:SHOWN_ENDS] + more)


def _alone_to_blame(
    causes: Mapping[int, Cause], reports: Mapping[int, Report], departed: Mapping[int, Departure]
) -> str:
    """One culprit in its own words: that it raised, and what and where, or that it was
    sent SIGTERM; empty for any other.
    """
    if len(causes) != 1:
        return ""
    ((rank, cause),) = causes.items()
    left, report = departed.get(rank), reports.get(rank)
    if left is not None and left.told:
        return f"rank {rank} {left.text}"
    if cause is not Cause.FAILED:
        return ""
    trouble = report.trouble if report is not None else None
    text = left.text if left is not None and left.cause is Cause.FAILED else trouble.text if trouble is not None else ""
    return f"rank {rank} raised {text.rstrip('.')}" if text else ""


def _because(causes: Mapping[int, Cause]) -> str:
    parts = []
    for cause in Cause:
        ranks = [rank for rank, found in causes.items() if found is cause]
        if ranks:
            parts.append(f"{ranks_text(ranks)} {cause.value}")
    return "; ".join(parts)
