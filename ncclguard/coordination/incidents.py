"""Incidents out of reports: what the coordinator writes beside the verdict, and what one rank can say alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from pydantic import ValidationError

from ncclguard import lifecycle, torch_compat
from ncclguard.coordination.group_state import GroupState, Subject
from ncclguard.errors import is_repeat
from ncclguard.incident import model
from ncclguard.incident.model import Incident, RankReport, State
from ncclguard.incident.stacks import innermost_of_program
from ncclguard.protocol.decision import (
    Action,
    Departure,
    Phase,
    Report,
    Sides,
    Silent,
    TroubleKind,
    Verdict,
    ended_from_outside,
    interrupted_from_outside,
    is_interrupt,
)
from ncclguard_explain.cause import (
    ADVICE,
    ADVICE_ABORTED,
    ADVICE_ABORTED_BY_OTHERS,
    ADVICE_ENDED_BY_EARLIER,
    ADVICE_ENDED_NEVERTHELESS,
    ADVICE_EVALUATION_IN_PART,
    ADVICE_GOES_ON,
    ADVICE_IN_EVALUATION,
    ADVICE_INTERRUPTED,
    ADVICE_MAY_HAVE_ABORTED,
    ADVICE_OUTSIDE,
    ADVICE_SOURCE_FIRST,
    ADVICE_WATCHED,
    ROOTED,
    SEE_LOST,
    WORD,
    Cause,
)
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ranks import FEW_RANKS, Hosts, ranks_text

#: In a report's details: by channel, the thread of the program, other than the main one, that issued its collectives.
ISSUERS: Final = "issuers"
#: The group of a watch's incident while no rank waits in a collective of torch's own.
NOBODY_WAITS: Final = "job"
#: The backend each of whose collectives has a verdict of its own.
GUARDED: Final = "ncclguard"
#: Broken connections that a summary names.
SHOWN_ENDS = 4


def summarise(
    verdict: Verdict,
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Silent,
    state: Subject,
    reported: Collection[Incident] = (),
) -> str:
    """The coordinator's incident as JSON, empty where nothing failed; `reported`: earlier ones that it may repeat."""
    if verdict.cause is None:
        return ""
    causes = dict(verdict.culprits)
    entered = [r for r in reports.values() if r.operation is not None and r.operation.sequence == verdict.sequence]
    rightly = [
        r for r in entered if r.rank not in causes
    ] or entered  # what the others called, where somebody called another
    text = rightly[0].operation.text if rightly and rightly[0].operation is not None else ""
    waited = max((r.age for r in entered), default=0.0)
    timeout = min((r.age + r.budget for r in entered if r.budget is not None), default=None)
    op_id = f"{state.key}/{verdict.sequence}"
    resumed = verdict.action is Action.RESUME and bool(causes)
    said = [
        _rank(rank, verdict, reports, departed, silent, causes, state.sightings.get(rank, {}), state.key)
        for rank in sorted({*reports, *departed, *silent})
    ]
    absent = sorted({*departed, *silent} - reports.keys())
    many = len(reports) + len(absent) > FEW_RANKS
    known = state.hosts(absent) if many and absent else {}
    hosts = {**known, **{report.rank: report.host for report in said if report.host}}
    placed = Hosts(hosts, (report.rank for report in said))
    told = model.bounded(said, causes)
    nobody = not causes and not verdict.sides
    interrupted = nobody and interrupted_from_outside(reports, departed, silent)
    outside = interrupted or (nobody and ended_from_outside(reports, departed, silent))
    if interrupted:
        advice: Message | str = _INTERRUPTED
    elif outside:
        advice = _ENDED
    elif _share_gpu(reports):
        advice = _ONE_GPU
    elif _ended_nevertheless(verdict, entered, state.guarded):
        advice = ADVICE_ENDED_NEVERTHELESS
    elif _evaluates_in_part(verdict.sides):
        advice = ADVICE_EVALUATION_IN_PART
    else:
        advice = _advice(verdict.cause, state, text, resumed, told)
    incident = Incident(
        id=_identifier(state, f"{op_id}.{verdict.generation}"),
        device=torch_compat.emulated_device(),
        op=text.partition("(")[0] or "operation",
        op_id=op_id,
        group=state.key,
        generation=verdict.generation,
        cause=verdict.cause,
        culprits=verdict.culprit_ranks,
        deadline_expired=verdict.deadline_expired or (timeout is not None and waited > timeout),
        timeout=timeout,
        agreed=True,
        attempts=verdict.attempt,
        participants=verdict.participants,
        ranks=told,
        hosts=model.unsaid_hosts(hosts, told),
        summary=_summary(text, verdict, causes, waited, reports, departed, silent, state.guarded, placed, state.key),
        advice=advice,
        further=""
        if outside or advice in (ADVICE_ENDED_NEVERTHELESS, ADVICE_EVALUATION_IN_PART)
        else _further(text, verdict.cause, state, resumed, told),
        sides=model.sides(verdict.sides),
        decided_after=None if state.decided_after is None else round(state.decided_after, 3),
    )
    sent_away = outside or (bool(causes) and all(rank in departed and _sent_away(departed[rank]) for rank in causes))
    done = {rank: one.done for rank, one in departed.items()} | {rank: one.done for rank, one in reports.items()}
    first = next(
        (
            one.id
            for one in reported
            if (_is_sequel(one, incident, state.guarded, sent_away) and not _has_recovered(one, incident, done))
            or (outside and _still_holds(one, incident, done))
        ),
        None,
    )
    if first is None and not state.guarded:
        first = _operation_of_errors(incident)  # of whose verdict this rank may not have heard yet
    told_before = next((one for one in reported if one.id == first), None)
    if told_before is not None and told_before.culprits != incident.culprits:  # who ended by its error is not to blame
        advice = tr("It follows from incident {first}: see that one's report.", first=told_before.id)
    incident = incident.model_copy(update={"repeats": first, "advice": advice})
    fields = incident.model_dump(mode="json", exclude_defaults=True)  # most fields of most ranks are empty
    return json.dumps({"schema_version": incident.schema_version, **fields}, separators=(",", ":"))


def _evaluates_in_part(sides: Sides) -> bool:
    """Return whether some ranks begin an evaluation where others are in no evaluation at all."""
    texts = [text for text, _ in sides]
    return any(map(begins_evaluation, texts)) and not all(map(in_evaluation, texts))


def _ended_nevertheless(verdict: Verdict, entered: Collection[Report], guarded: bool) -> bool:
    """Return whether ranks that called different collectives of torch's own were all given something by them."""
    ended = all(report.phase is Phase.DONE for report in entered)
    return verdict.cause is Cause.DIVERGED and not guarded and bool(entered) and ended


def _is_sequel(known: Incident, later: Incident, guarded: bool, sent_away: bool) -> bool:
    """Return whether a later incident has no report of its own.

    `sent_away`: whom it names were sent SIGTERM or SIGINT. Where they stood in what a known incident was about, the job
    has been ended for that one.
    """
    if has_no_report_beside(known, later, guarded):
        return True
    if guarded:
        return False
    if sent_away and known.op_id == later.op_id:
        return True
    return says_nothing_new(later, known) or _only_raise_its_error(known, later)


def has_no_report_beside(known: Incident, later: Incident, guarded: bool) -> bool:
    """Return whether a known incident tells of the same fault, even where the later was decided at the same time."""
    if guarded:
        return goes_on(known, later)
    if _has_the_same_sides(known, later) or _evaluates_alone_again(known, later):
        return True
    return is_of_guarded_calls(later) and _names_the_same_dead(known, later)


def _has_recovered(known: Incident, later: Incident, done: Mapping[int, int]) -> bool:
    """Return whether calls of a group have succeeded since a known incident of another kind: who leaves now is new."""
    at = known.op_id.rpartition("/")[2]
    other = known.group == later.group and later.cause is Cause.EXITED is not known.cause
    return other and at.isdecimal() and max(done.values(), default=0) > int(at)


def _still_holds(known: Incident, later: Incident, done: Mapping[int, int]) -> bool:
    """Return whether a job was ended while the ranks that an incident of its group names had not come on.

    Gloo completes a collective on a rank that needs nothing more of those, which then waits in the next one.
    """
    at, now = (one.op_id.rpartition("/")[2] for one in (known, later))
    if known.group != later.group or not known.culprits or not (at.isdecimal() and now.isdecimal()):
        return False
    return int(now) <= int(at) + 1 and all(done.get(rank, 0) < int(at) for rank in known.culprits)


def is_of_guarded_calls(incident: Incident) -> bool:
    """Return whether an incident of a watch is about no collective but the guard's own, whose verdicts tell of it."""
    return incident.group == NOBODY_WAITS or incident.group.rpartition(":")[2] == GUARDED


def alone(
    state: GroupState,
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
    """Return what one rank can say without a verdict, or `agreed` by an earlier one, whose incident is reported."""
    known = from_json(state.incident) if agreed else None
    op_id = f"{state.key}/{sequence}"
    ranks = tuple(
        RankReport(rank=rank, state="departed", cause=found, note=(evidence or {}).get(rank) or None)
        for rank, found in sorted(causes.items())
    )
    return Incident(
        id=_identifier(state, f"{op_id}.{state.member.generation}.rank{state.member.rank}"),
        device=torch_compat.emulated_device(),
        op=op,
        op_id=op_id,
        group=state.key,
        generation=state.member.generation,
        cause=cause,
        culprits=tuple(sorted(causes)),
        deadline_expired=expired,
        agreed=agreed,
        attempts=1,
        participants=state.member.participants,
        ranks=ranks,
        summary=tr(
            "{operation} failed: {because}; {why}.", operation=text, because=_because(causes) or WORD[cause], why=why
        ),
        advice=_advice(cause, state, text, ranks=ranks),
        further=_further(text, cause, state),
        repeats=(known.repeats or known.id) if known is not None and causes.keys() <= {*known.culprits} else None,
    )


def _advice(
    cause: Cause, state: Subject, text: str, resumed: bool = False, ranks: Collection[RankReport] = ()
) -> Message | str:
    if resumed:
        return tr("The others go on without it. {advice}", advice=SEE_LOST if cause is Cause.LOST else ADVICE[cause])
    if state.outside and cause is Cause.LOST:
        return ADVICE_OUTSIDE
    if state.guarded and cause is Cause.LOST and lifecycle.goes_on():
        return ADVICE_GOES_ON
    if state.guarded and cause is Cause.LOST and in_evaluation(text):
        return ADVICE_IN_EVALUATION
    advice = ADVICE[cause] if state.guarded else ADVICE_WATCHED.get(cause, ADVICE[cause])
    blamed = [one for one in ranks if one.cause is cause]
    if model.came(blamed):
        return tr(
            "See what it did before this call: work on one rank only (saving, metrics, a data loader) must fit the timeout "
            "or run on all ranks. Raise the timeout only if that work is meant to take so long."
        )
    if cause is Cause.FAILED and _were_interrupted(blamed):
        return ADVICE_INTERRUPTED
    if cause is Cause.FAILED and blamed and all(_OUT_OF_MEMORY.search(str(one.exception)) for one in blamed):
        return tr(
            "It ran out of memory: smaller batches there, or less that is held beside them (graphs of losses, outputs on "
            "the GPU)."
        )
    if cause is Cause.FAILED and blamed and all(is_repeat(str(one.exception)) for one in blamed):
        return ADVICE_ENDED_BY_EARLIER
    if cause is Cause.NETWORK and not state.guarded and text.partition("(")[0] in ROOTED:
        return ADVICE_SOURCE_FIRST
    if cause is Cause.STUCK:
        return _advice_on_stuck(blamed, state) or advice
    if cause is Cause.DIVERGED and any("killed by SIGABRT" in (one.note or "") and one.cause is None for one in ranks):
        return ADVICE_ABORTED_BY_OTHERS
    if cause is Cause.LOST and not state.guarded:
        ends = [one.note or "" for one in blamed]
        if ends and all("killed by SIGABRT" in end for end in ends):
            return ADVICE_ABORTED
        return advice if ends and all(map(_OTHER_END.search, ends)) else ADVICE_MAY_HAVE_ABORTED
    astray = state.guarded and any(map(_in_torchs_own, ranks))
    if begins_evaluation(text):
        if cause is Cause.LATE or astray:
            advice = tr(
                "If it does not call this evaluation at all, call it there too: an evaluation is called on all ranks or on "
                "none. If it only comes later, see in its stack why, and raise `barrier_timeout` if that is meant to take "
                "so long."
            )
        if cause is Cause.EXITED:
            advice = tr(
                "{advice} If it does not call this evaluation at all, call it on all ranks, not under `if rank == 0:`.",
                advice=advice,
            )
        if (cause in (Cause.LATE, Cause.EXITED) or astray) and _BY_NUMBER.search(text):
            advice = tr(
                "{advice} If it has left out an earlier one instead, the values since then mix different evaluations, "
                "since nothing but their number tells these apart: give each a `step=` of its own.",
                advice=advice,
            )
    elif cause is Cause.EXITED and state.guarded and not in_evaluation(text):
        return tr(
            "{advice} If it left out a call earlier instead, calls that look alike have been paired since, and what they gave "
            "mixes different steps: a `name=` in each, such as the step, tells of that at once.",
            advice=advice,
        )
    elif cause is Cause.EXITED and not state.guarded:
        return tr(
            "{advice} If it left out a call earlier instead, calls that look alike have been paired since, and what they gave "
            "mixes different steps.",
            advice=advice,
        )
    elif astray:
        return tr(
            "It waits in a collective of torch's own, which a guarded call does not meet: use the guarded one on all ranks "
            "or on none, and call both in the same order on each."
        )
    return advice


def _were_interrupted(ranks: Collection[RankReport]) -> bool:
    """Return whether there are some, and Ctrl-C or a signal's handler that calls `sys.exit` ended each one's call."""
    return bool(ranks) and all(_INTERRUPT.match(str(one.exception)) for one in ranks)


def _advice_on_stuck(culprits: Sequence[RankReport], state: Subject) -> Message | str:
    """Return what to do about processes that are all stopped, or whose stacks are all known; empty for any others."""
    if culprits and all(state.sightings.get(one.rank, {}).get("stopped") for one in culprits):
        if len(culprits) > 1:
            return tr(
                "They are stopped by a signal or a debugger: `kill -CONT PID` on their hosts, with the pids in this report, "
                "has them go on. Find out what stopped them: SIGSTOP, Ctrl-Z, a scheduler that suspends jobs."
            )
        return tr(
            "It is stopped by a signal or a debugger: `kill -CONT {pid}` on its host has it go on. Find out what stopped "
            "it: SIGSTOP, Ctrl-Z, a scheduler that suspends jobs.",
            pid=culprits[0].pid,
        )
    if culprits and all(one.stack for one in culprits):
        return tr(
            "Its process exists but its interpreter does not run: swapped out, or in a call that holds the GIL. See in its "
            "stack, in this report, which call that is."
        )
    return ""


def _in_torchs_own(rank: RankReport) -> bool:
    """Return whether this rank is missing because it is inside a collective that the guard does not see.

    One that is in a call of its own here is not: on a guarded backend all calls come through torch's functions.
    """
    called = (_TORCHS_OWN.search(frame) for frame in rank.stack)
    return (
        rank.cause in (Cause.LATE, Cause.DIVERGED)
        and not (rank.note or rank.inside)
        and any(each and "group" not in each[1] for each in called)
    )


def _further(text: str, cause: Cause, state: Subject, resumed: bool = False, ranks: Collection[RankReport] = ()) -> str:
    """Return what would have made more of the same failure; empty where the program has it, or nothing here would."""
    if not state.guarded:
        return tr(
            'A guarded call (`safe_all_reduce`, or the backend "ncclguard") ends on all ranks at its limit, and the program goes '
            'on with the tensor as it was; `watch()` only tells of it, or with on_hang="abort" ends it for good.'
        )
    if resumed or in_evaluation(text):
        return ""
    if cause in (Cause.LOST, Cause.STUCK):
        if state.outside or os.environ.get(lifecycle.RUN_FOLDER):
            return ""
        return tr("A training goes on without a lost rank under `resilient_step`, started with `ncclguard run`.")
    places = [text, *(place for one in ranks for place in (one.call_site or "", *one.stack))]
    if not any("eval" in place.lower() for place in places):
        return ""
    return tr("An evaluation that fails on one rank ends on all with `resilient_evaluate`, and the training goes on.")


def histories(reports: Mapping[int, Report], departed: Mapping[int, Departure], culprits: Collection[int] = ()) -> str:
    """Return what each rank says of its last operations, as JSON.

    It is for the one rank that writes the report, and not part of the verdict.

    Where that is more than a store takes, those of the `culprits` come before the others'.
    """
    details = _details(reports, departed)
    found, left = {}, model.HISTORIES
    for rank in sorted(details, key=lambda rank: (rank not in culprits, rank)):
        history = details[rank].get("history")
        size = len(json.dumps(history))
        if history and size <= left:
            found[rank], left = history, left - size
    return json.dumps(found, separators=(",", ":"))


def goes_on(known: Incident, later: Incident) -> bool:
    """Return whether a later incident is the fault of a known one, which goes on: of each culprit the same is known.

    A rank that has begun a guarded call in between is at fault anew, unless all that it raised is the error of the
    known incident, whose outcome its program had left unread, or it stands at the same place, or has raised the same,
    in a later try of the same evaluation. One that answered neither time is taken for the same while its process and
    its stack are.
    """
    if _only_raise_its_error(known, later) or _shows_its_side(known, later) or _names_the_same_dead(known, later):
        return True
    if _evaluates_alone_again(known, later):
        return True
    if (known.cause, known.culprits) != (later.cause, later.culprits):
        return False
    tried_again = _is_a_later_try(known, later)
    if tried_again and _has_the_same_sides(known, later, numbered=False):
        return True
    before, now = ({report.rank: report for report in one.ranks} for one in (known, later))
    return bool(known.culprits) and all(
        rank in before and rank in now and _same_standstill(before[rank], now[rank], tried_again)
        for rank in known.culprits
    )


def says_nothing_new(later: Incident, known: Incident) -> bool:
    """Return whether a later incident is about a known one's collective, and says the same or nothing.

    A collective breaks later than it was known to be stuck, and by then those who broke it may have ended unseen; or
    all have come, and an abort because of the known incident has broken it where that is not known yet.
    """
    if later.op_id != known.op_id:
        return False
    nothing = later.cause in (Cause.UNKNOWN, Cause.NETWORK) and not later.culprits
    return nothing or (later.cause, later.culprits) == (known.cause, known.culprits)


def _only_raise_its_error(known: Incident, later: Incident) -> bool:
    """Return whether what ended the later call is nothing but the error of the known one, which carries its id."""
    raised = [report.exception for report in later.ranks if report.exception is not None]
    return (
        later.cause in (Cause.FAILED, Cause.UNKNOWN)
        and bool(raised)
        and all(f"({known.op_id})" in text for text in raised)
    )


def _operation_of_errors(later: Incident) -> str | None:
    """Return the operation whose verdict's error is all that ranks raised, where nobody is named; else None."""
    raised = [report.exception for report in later.ranks if report.exception is not None]
    if later.cause is not Cause.UNKNOWN or later.culprits or not raised or not all(map(is_repeat, raised)):
        return None
    return raised[0].partition("(")[2].rstrip(")")


def _names_the_same_dead(known: Incident, later: Incident) -> bool:
    """Return whether all that a later incident names were lost before in its session, to which nobody returns."""
    lost = {report.rank for report in known.ranks if report.cause is Cause.LOST}
    same_session = known.id.partition("-")[0] == later.id.partition("-")[0]
    return same_session and later.cause is Cause.LOST and bool(later.culprits) and lost.issuperset(later.culprits)


def _shows_its_side(known: Incident, later: Incident) -> bool:
    """Return whether ranks diverged by what a known incident shows, and the later one names nobody else for it.

    In the same group a later call of the same ranks may differ anew.
    """
    told = [{text for text, _ in one.sides if _NUMBERED.search(text)} for one in (known, later)]
    of_another_group = later.group != known.group and later.culprits == known.culprits
    if later.cause is not Cause.DIVERGED or (later.culprits and not of_another_group):
        return False
    return not told[0].isdisjoint(told[1]) or _has_the_same_sides(known, later, numbered=False)


def _evaluates_alone_again(known: Incident, later: Incident) -> bool:
    """Return whether the same ranks have begun the next evaluation without the others, which may have ended by now."""
    if known.advice != ADVICE_EVALUATION_IN_PART:
        return False
    if later.advice == known.advice:
        return later.culprits == known.culprits
    waiting = tuple(report.rank for report in later.ranks if report.rank not in later.culprits)
    return (
        later.cause is Cause.EXITED
        and waiting == known.culprits
        and any(begins_evaluation(report.operation or "") for report in later.ranks if report.inside)
    )


def _has_the_same_sides(known: Incident, later: Incident, numbered: bool = True) -> bool:
    """Return whether ranks wait for each other in two groups, of which a known incident is about the other one.

    Or in two tries of one evaluation. `numbered`: one of the calls must be known by its number, since equal calls may
    differ again.
    """
    if not (known.cause is later.cause is Cause.DIVERGED) or len(known.sides) < 2:
        return False
    sides = [
        {(ranks, _NUMBER_OF_TRY.sub("try", text.partition(" of group ")[0])) for text, ranks in one.sides}
        for one in (known, later)
    ]
    return sides[0] == sides[1] and (not numbered or any(_NUMBERED.search(text) for _, text in sides[0]))


def _same_standstill(before: RankReport, now: RankReport, tried_again: bool) -> bool:
    same = before.pid == now.pid != 0 and before.exception == now.exception
    if before.entered is None or now.entered is None:
        return same and before.state == now.state == "silent" and before.stack == now.stack
    # What raised the same at the same place may be anywhere by now.
    there = before.stack == now.stack or before.exception is not None
    return same and (before.entered == now.entered or (tried_again and there))


#: What to do where all ranks were ended from outside.
_ENDED = tr(
    "See why the job was ended: its launcher's or scheduler's log tells who did (a time limit, a cancelled job, another "
    "worker that failed). No rank of it is to blame."
)


#: What to do where that was Ctrl-C.
_INTERRUPTED = tr(
    "No rank is blamed, because no limit had passed. If the job hung, see in this report's JSON what a rank that had not "
    "come was doing, and give `watch()`, or the guarded call, a shorter `timeout`: the next hang is told before anybody "
    "ends it."
)


def _sent_away(departure: Departure) -> bool:
    return departure.terminated or is_interrupt(departure)


#: What to do where NCCL says "Duplicate GPU detected" (src/init.cc): a program without this line, mostly.
_ONE_GPU = tr(
    'Two ranks have chosen one GPU, which NCCL refuses: call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before '
    "the first collective, and start no more ranks on a host than it has GPUs."
)


def _share_gpu(reports: Mapping[int, Report]) -> bool:
    return any("Duplicate GPU detected" in str(one.trouble.text) for one in reports.values() if one.trouble is not None)


#: The end of the text of a collective of torch's own, which no other one of its group has.
_NUMBERED = re.compile(r", number \d+\)$")
#: What the calls of an evaluation are called: its label, and the try.
_NUMBER_OF_TRY = re.compile(r"\btry \d+")
_TRY = re.compile(r"='(evaluation .*), (?:(?:beginning|end) of )?try (\d+)'")


#: A frame of a collective of torch, and of what makes or ends groups.
_TORCHS_OWN = re.compile(r"torch/distributed/distributed_c10d\.py:\d+ in ([a-z]\w*)")
#: How an exception reads of a rank that had no memory, on the device or on the host.
_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|\bMemoryError\b", re.IGNORECASE)
#: How an exception reads that ends a call from outside.
#: A program that exits with a text of its own says why; a handler of a signal exits with a number.
_INTERRUPT = re.compile(r"KeyboardInterrupt\b|SystemExit(?: at \S+:\d+ in \S+)?(?:: -?\d+)?$")
#: How the evidence reads of a process that is known not to have been ended by abort(3).
_OTHER_END = re.compile(r"killed by (?!SIGABRT)|: exit code \d")
#: The label of an evaluation that nothing but its number tells from the one before it.
_BY_NUMBER = re.compile(r" optimizer steps, number \d+ there, beginning of try 1'")


def in_evaluation(operation: str) -> bool:
    """Return whether this is the text of a call of an evaluation, or of one that the program makes in it."""
    return "='evaluation " in operation


def begins_evaluation(operation: str) -> bool:
    """Return whether this is the text of the call with which an evaluation begins, to which a rank may never come."""
    found = _TRY.search(operation)
    return found is not None and found[0].endswith("beginning of try 1'")


def _is_a_later_try(known: Incident, later: Incident) -> bool:
    """Return whether both are about calls of one evaluation, and the later one about a later try."""
    first, again = _try_of(known), _try_of(later)
    return first is not None and again is not None and first[0] == again[0] and int(first[1]) < int(again[1])


def _try_of(incident: Incident) -> tuple[str, ...] | None:
    """Return the evaluation and the number of the try that ranks are in; None where they are in none."""
    # A rank that is not in the call tells of its last one, in an evaluation before, maybe.
    inside = [each for each in incident.ranks if each.inside] or incident.ranks
    return max((found.groups() for each in inside if (found := _TRY.search(each.operation or ""))), default=None)


def writer(incident: Incident) -> int:
    """Return who writes the report: the lowest that answered, rather one that is not to blame; -1 for none."""
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


def _identifier(state: Subject, text: str) -> str:
    """Fit for a file name, and no other job's: the session's name leads."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{state.session[:8]}-{text}".lstrip("-"))[-120:]


def _details(reports: Mapping[int, Report], departed: Mapping[int, Departure]) -> dict[int, Mapping[str, object]]:
    return {rank: said.details for source in (departed, reports) for rank, said in source.items()}


def _rank(
    rank: int,
    verdict: Verdict,
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Silent,
    causes: Mapping[int, Cause],
    sighting: Mapping[str, object],
    channel: str,
) -> RankReport:
    cause = causes.get(rank)
    report = reports.get(rank)
    left = departed.get(rank)
    if report is None:
        if left is None:
            return _silent(rank, cause, silent.get(rank) or Cause.UNKNOWN, sighting)
        return _left(left, cause)
    details = report.details
    trouble = report.trouble
    repeated = trouble is not None and trouble.kind is TroubleKind.REPEATED
    raised = trouble.text if trouble is not None and (cause is Cause.FAILED or repeated) else None
    # Where a rank was when it said that it leaves, such as the traceback, tells more than where it is while it ends.
    stack = (left.details.get("stack") if left is not None else None) or details.get("stack")
    thread, threads = str(details.get("thread") or "") or None, _threads(details)
    if stack is not details.get("stack"):
        thread = None
    elif issuer := _issuer(details, channel, threads):
        main = [(thread or "MainThread", _frames(stack))]
        thread, stack = issuer
        threads = (*main, *(one for one in threads if one[0] not in (thread, main[0][0])))
    notes = (
        _elsewhere(report),
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
        entered=int(str(details["entered"])) if cause is not None and "entered" in details else None,
        operation=str(details.get("call") or details.get("last") or "") or None,
        age=round(report.age, 3) if report.operation is not None else None,
        call_site=str(details.get("call_site") or "") or None,
        peer=trouble.peer if trouble is not None and trouble.peer >= 0 else None,
        exception=raised or (left.text if left is not None and left.cause is Cause.FAILED else None),
        stack=_frames(stack) if cause is not None else (),
        thread=thread if cause is not None else None,
        threads=threads if cause is not None else (),
        note="; ".join(filter(None, notes)) or None,
        steps=int(str(details["steps"])) if details.get("steps") else None,
    )


def _issuer(
    details: Mapping[str, object], channel: str, threads: Sequence[tuple[str, tuple[str, ...]]]
) -> tuple[str, tuple[str, ...]] | None:
    """Return the other thread that issues the collectives of a channel, which is the one that holds it up."""
    issuers = details.get(ISSUERS)
    name = issuers.get(channel) if isinstance(issuers, Mapping) else None
    return next((one for one in threads if one[0] == name and one[0] != details.get("thread")), None)


def _elsewhere(report: Report) -> str:
    """Return what the rank waits in, in another group, or has waited in until the others gave up."""
    if report.free_for:
        until = tr(
            "it waited in {operation} until {seconds:.3g} s before", operation=report.elsewhere, seconds=report.free_for
        )
        return until if report.elsewhere else ""
    return tr("it waits in {operation}", operation=report.elsewhere) if report.elsewhere else ""


def _silent(rank: int, cause: Cause | None, silent: Cause, sighting: Mapping[str, object]) -> RankReport:
    """A rank that did not answer, by what a rank of its host has seen of it."""
    note = tr("it did not answer: {cause}", cause=WORD[silent])
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
    silent: Silent,
    guarded: bool,
    placed: Hosts,
    channel: str,
) -> str:
    operation = text or tr("operation")
    # What is only watched goes on, and may complete.
    failed = tr("{operation} stood still for {seconds:.3g} s", operation=operation, seconds=waited)
    entered = [r for r in reports.values() if r.operation is not None and r.operation.sequence == verdict.sequence]
    if _ended_nevertheless(verdict, entered, guarded):
        failed = tr("{operation} has ended, and not all ranks called the same", operation=operation)
    if guarded:
        failed = tr("{operation} failed after {seconds:.3g} s", operation=operation, seconds=waited)
    because = (
        _alone_to_blame(causes, reports, departed, placed)
        or _because(causes, placed)
        or _repeated(reports, departed, placed)
    )
    if because and verdict.action is Action.RESUME and guarded:
        return tr(
            "{operation} starts again after {seconds:.3g} s: {because}.",
            operation=operation,
            seconds=waited,
            because=because,
        )
    if because and not (text or guarded):
        return tr("{because}; no rank was waiting in a collective of torch's own.", because=because)
    if because:
        if _of_groups(verdict.sides):
            because = tr("{because}: the same call on another group", because=because)
        elif _of_settings(verdict.sides):
            because = tr(
                "{because}: the same call with another `chunk_numel`, `max_attempts` or `on_lost`", because=because
            )
        return tr("{failed}: {because}.", failed=failed, because=because)
    if verdict.cause is Cause.DIVERGED and _of_groups(verdict.sides) and _has_majority(verdict.sides):
        return tr(
            "{failed}: the ranks made the same call on different groups, and nothing tells who is wrong.", failed=failed
        )
    if verdict.cause is Cause.DIVERGED and _of_groups(verdict.sides):
        return tr(
            "{failed}: the ranks made the same call on different groups, and no side is a majority.", failed=failed
        )
    if verdict.cause is Cause.DIVERGED and _of_settings(verdict.sides):
        return tr(
            "{failed}: the ranks made the same call with different `chunk_numel`, `max_attempts` or `on_lost`, and no "
            "side is a majority.",
            failed=failed,
        )
    interrupted = interrupted_from_outside(reports, departed, silent)
    if verdict.cause is Cause.UNKNOWN and (interrupted or ended_from_outside(reports, departed, silent)):
        not_come = (
            _not_come(verdict.sequence, reports, departed) if guarded else _not_issued(channel, verdict, departed)
        )
        return _said_of_ended(failed, interrupted, not_come, departed, placed)
    if verdict.cause is Cause.DIVERGED and _has_majority(verdict.sides):
        return tr("{failed}: the ranks were in different operations, and nothing tells who is wrong.", failed=failed)
    if verdict.cause is Cause.DIVERGED:
        return tr("{failed}: the ranks called different operations, and no side is a majority.", failed=failed)
    troubles = sorted({r.trouble.text for r in reports.values() if r.trouble is not None and r.trouble.text})
    returned = [rank for rank, r in sorted(reports.items()) if r.returned and r.phase_at(verdict.sequence) < Phase.DONE]
    alone = tr("{ranks} had returned without a verdict", ranks=placed.text(returned)) if returned else ""
    found = joined("; ", filter(None, [alone, _broken(reports), *troubles[:1]]))
    cause: Message = WORD[verdict.cause or Cause.UNKNOWN]
    quiet = silent.keys() - departed.keys()
    if quiet:
        cause = tr("{cause}; {ranks} did not answer in time", cause=cause, ranks=placed.text(quiet))
    elif verdict.cause is Cause.NETWORK:
        failed = tr("{failed} although every rank was in it", failed=failed)
    cause = tr("{cause} ({details})", cause=cause, details=found) if found else cause
    return tr("{failed}: {because}.", failed=failed, because=cause)


def _said_of_ended(
    failed: Message, interrupted: bool, not_come: Sequence[int], departed: Mapping[int, Departure], placed: Hosts
) -> Message:
    """Say also who had not come to what the others waited in, and where: a fact, and before the limit no fault."""
    how = tr("with Ctrl-C") if interrupted else tr("with SIGTERM")
    if not not_come:
        return tr("{failed}: all ranks were ended from outside, {how}.", failed=failed, how=how)
    places = {_left_at(departed[rank]) if rank in departed else "" for rank in not_come}
    place = places.pop() if len(places) == 1 else ""
    ranks = placed.text(not_come)
    if not place:
        return tr(
            "{failed}: all ranks were ended from outside, {how}; {ranks} had not come to it.",
            failed=failed,
            how=how,
            ranks=ranks,
        )
    return tr(
        "{failed}: all ranks were ended from outside, {how}; {ranks} had not come to it, interrupted at {place}.",
        failed=failed,
        how=how,
        ranks=ranks,
        place=place,
    )


def _left_at(left: Departure) -> str:
    """Return where the program of a rank was when it was ended, by its exception or its stack; empty where unknown."""
    stack = _frames(left.details.get("stack"))
    own = innermost_of_program(stack)
    place = left.text.partition(" at ")[2]
    if not place and own is not None:
        return stack[own]
    return next((frame for frame in stack if place and frame.startswith(f"{place}: ")), place)


def _not_issued(channel: str, verdict: Verdict, departed: Mapping[int, Departure]) -> list[int]:
    """Return the ranks that left and had not issued the collective of torch's own that the verdict is about."""
    issued = {rank: said.watched.issued for rank, said in departed.items() if said.watched is not None}
    sequence = verdict.sequence
    return [rank for rank, numbers in sorted(issued.items()) if numbers.get(channel, sequence) < sequence]


def _not_come(sequence: int, reports: Mapping[int, Report], departed: Mapping[int, Departure]) -> list[int]:
    """Return the ranks that had not entered a guarded operation; one that left says so by where it was interrupted."""

    def was_elsewhere(left: Departure) -> bool:
        stack = _frames(left.details.get("stack"))
        own = innermost_of_program(stack)
        return (
            left.done < sequence
            and own is not None
            and not any(frame.startswith("ncclguard/") for frame in stack[own:])
        )

    ended = {rank for rank, left in departed.items() if rank not in reports and was_elsewhere(left)}
    return sorted(ended | {rank for rank, report in reports.items() if report.phase_at(sequence) is Phase.NONE})


def _broken(reports: Mapping[int, Report]) -> Message:
    """Return which connections broke, as each side saw it; those that both sides lost come first."""
    ends = {
        rank: r.trouble
        for rank, r in sorted(reports.items())
        if r.trouble is not None and (r.trouble.peer >= 0 or r.trouble.host)
    }

    def at(rank: int) -> Message:
        host = str(reports[rank].details.get("host", "")) if rank in reports else ""
        return tr("rank {rank} ({host})", rank=rank, host=host) if host else ranks_text([rank])

    both = [(rank, end.peer) for rank, end in ends.items() if end.peer in ends and ends[end.peer].peer == rank]
    told = [
        tr("{one} and {other} lost the connection between them", one=at(rank), other=at(peer))
        for rank, peer in both
        if rank < peer
    ]
    told += [
        tr(
            "{one} lost its connection with {other}",
            one=at(rank),
            other=at(end.peer) if end.peer >= 0 else tr("a rank at {host}", host=end.host),
        )
        for rank, end in ends.items()
        if (rank, end.peer) not in both
    ]
    more = [tr("{count} further: see to_json()", count=len(told) - SHOWN_ENDS)] if len(told) > SHOWN_ENDS else []
    return joined(", ", told[:SHOWN_ENDS] + more)


def _raised(rank: int, reports: Mapping[int, Report], departed: Mapping[int, Departure]) -> str:
    """Return the exception with which a rank left, or else that of its call; empty for none."""
    left, report = departed.get(rank), reports.get(rank)
    if left is not None and left.cause is Cause.FAILED:
        return left.text
    return report.trouble.text if report is not None and report.trouble is not None else ""


def _alone_to_blame(
    causes: Mapping[int, Cause], reports: Mapping[int, Report], departed: Mapping[int, Departure], placed: Hosts
) -> str:
    """Return one culprit in its own words: what it raised, or that it was sent SIGTERM; empty for any other."""
    if len(causes) != 1:
        return ""
    ((rank, cause),) = causes.items()
    left = departed.get(rank)
    if left is not None and left.terminated:
        if left.text == lifecycle.SENT_SIGTERM:
            return tr("{ranks} was sent SIGTERM", ranks=placed.text([rank]))
        return joined(": ", (placed.text([rank]), left.text))
    if cause is not Cause.FAILED:
        return ""
    text = _raised(rank, reports, departed)
    if is_repeat(text):
        return tr("{ranks} raised {exception}, the error of an earlier call", ranks=placed.text([rank]), exception=text)
    return tr("{ranks} raised {exception}", ranks=placed.text([rank]), exception=text.rstrip(".。")) if text else ""


def _has_majority(sides: Sides) -> bool:
    return bool(sides) and 2 * len(sides[0][1]) > sum(len(ranks) for _, ranks in sides)


def _of_groups(sides: Sides) -> bool:
    """Return whether what the ranks called differs by nothing but the group, with which a call on another is named."""
    texts = {text for text, _ in sides}
    return len(texts) > 1 and len({text.partition(" of group ")[0] for text in texts}) == 1


def _of_settings(sides: Sides) -> bool:
    """Return whether the ranks called the same by its text: what is compared and not shown are settings of the call."""
    return len(sides) > 1 and len({text for text, _ in sides}) == 1


def _repeated(reports: Mapping[int, Report], departed: Mapping[int, Departure], placed: Hosts) -> str:
    """Ranks that are not to blame, and only raised here what an earlier verdict had found."""
    errors = {
        rank: r.trouble.text
        for rank, r in sorted(reports.items())
        if r.trouble is not None and r.trouble.kind is TroubleKind.REPEATED
    }
    ended = {rank: d.text for rank, d in sorted(departed.items()) if is_repeat(d.text)}
    if ended:
        return tr(
            "{ranks} raised {exception}, the error of an earlier call",
            ranks=placed.text(ended),
            exception=next(iter(ended.values())),
        )
    if not errors:
        return ""
    return tr(
        "{ranks} raised {exception}, the error of an earlier call whose outcome its program had not looked at",
        ranks=placed.text(errors),
        exception=next(iter(errors.values())),
    )


def _of_ranks(cause: Cause, ranks: Message) -> Message:
    """Say who is to blame for what: a sentence of its own for each cause, because other languages put it otherwise."""
    return {
        Cause.LATE: tr("{ranks} late", ranks=ranks),
        Cause.DIVERGED: tr("{ranks} diverged", ranks=ranks),
        Cause.FAILED: tr("{ranks} failed", ranks=ranks),
        Cause.EXITED: tr("{ranks} exited", ranks=ranks),
        Cause.LOST: tr("{ranks} lost", ranks=ranks),
        Cause.STUCK: tr("{ranks} stuck", ranks=ranks),
        Cause.NETWORK: tr("{ranks} network", ranks=ranks),
        Cause.UNKNOWN: tr("{ranks} unknown", ranks=ranks),
    }[cause]


def _because(causes: Mapping[int, Cause], placed: Hosts | None = None) -> Message:
    parts = []
    for cause in Cause:
        ranks = [rank for rank, found in causes.items() if found is cause]
        if ranks:
            parts.append(_of_ranks(cause, ranks_text(ranks) if placed is None else placed.text(ranks)))
    return joined("; ", parts)
