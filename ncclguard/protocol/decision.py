"""Decisions on the reports of a revoked generation: commit, resume or fail, and who is to blame.

`decide` is a pure function of what one coordinator has read. Two coordinators may read different things; only the
verdict that is written first counts (the store's compare-and-set), so `decide` has to be *safe* for every subset of
reports it may see, and *right* for the full one. Why each branch is safe is argued in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from statistics import median
from typing import Final

from ncclguard_explain.cause import Cause

#: What ranks called, each with those that did.
Sides = tuple[tuple[str, tuple[int, ...]], ...]
#: Members that have not answered in time, each with the cause it is named with: STUCK or UNKNOWN; None for one that
#: runs as far as can be seen, whose machine may only be busy, and whom silence does not accuse.
Silent = Mapping[int, Cause | None]


class Phase(IntEnum):
    """The progress of a rank in one operation.

    DONE anywhere implies READY everywhere (or, without closing round, a donor).
    """

    NONE = 0  # not entered
    RUNNING = 1  # entered; the own result is not complete
    READY = 2  # the own result is complete and the closing round may have been sent
    DONE = 3  # returned to the caller as a success


class Action(str, Enum):
    """The effects that a verdict has on its operation."""

    COMMIT = "commit"
    RESUME = "resume"
    FAIL = "fail"


class TroubleKind(str, Enum):
    """Why a rank revoked the generation."""

    DEADLINE = "deadline"
    STUCK = "stuck"  # `stuck_timeout` passed and a member's interpreter does not run
    TRANSPORT = "transport"
    MISMATCH = "mismatch"
    RAISED = "raised"
    REPEATED = "repeated"  # it raised the error of an earlier verdict, which is no fault of its own
    GAVE_UP = "gave up"  # it left the section that the others are still in with such an error
    DEPARTED = "departed"
    OVERDUE = "overdue"  # its limit had passed before its turn came: it was issued long before
    UNANSWERED = "unanswered"  # no verdict came in time: the call has returned with a local one
    FINISHED = "finished"  # this rank has come to the end of the section that the others are still in
    TOLD = "terminated"  # another rank said that it raised or finished in the section, and will not come


@dataclass(frozen=True, slots=True)
class Trouble:
    """One rank's reason to revoke, with a text for people; of a broken connection also who was at its other end.

    `peer` is a global rank, -1 where it could not be told, and `host` the numeric address: for the incident, never for
    the decision.
    """

    kind: TroubleKind
    text: str = ""
    peer: int = -1
    host: str = ""


NOBODY, EVERYBODY = -1, -2  # of `Operation.needs`, where it is no rank


@dataclass(frozen=True, slots=True)
class Operation:
    """The agreement's view of one call: what must be equal on all ranks, and what a verdict may do with it."""

    sequence: int
    fingerprint: int
    text: str = ""
    closing: bool = True  # has a closing round; else a rank that completed donates its result
    shrink: bool = False  # on_lost="shrink", and the operation can go on without a member
    needs: int = NOBODY  # a rank it cannot go on without, the source of a broadcast; or EVERYBODY
    max_attempts: int = 3

    def at(self, sequence: int, closing: bool = False) -> Operation:
        """Return the same at its place in the group's sequence, `closing` there also where it is not of itself.

        On every call's path, so not by `dataclasses.replace`.
        """
        return Operation(
            sequence,
            self.fingerprint,
            self.text,
            self.closing or closing,
            self.shrink,
            self.needs,
            self.max_attempts,
        )


@dataclass(frozen=True, slots=True)
class Issued:
    """One collective of torch that a rank has issued; `fingerprint` is 0 where nothing is known to compare."""

    channel: str  # the process group's name and its backend, such as "0:gloo"
    sequence: int  # its number there, from 1
    fingerprint: int
    text: str
    age: float | None = None  # seconds since then, by its own clock, where that is known


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank waits in one collective of torch, or saw it break; `members` are global ranks, `age` is in seconds."""

    channel: str
    members: tuple[int, ...]
    sequence: int
    fingerprint: int
    text: str
    age: float
    broken: bool = False  # its transport failed: it has ended with an error


@dataclass(frozen=True, slots=True)
class Watched:
    """The report of a rank on collectives that the guard does not carry: what `watch` decides by.

    By channel: `done`, the number up to which all have ended; `issued`, that of the last one. `recent`: the last that
    were issued in any group, ended or not, the latest last. `limit`: seconds of the oldest that is pending.
    `compared`: those that the ranks are asked about because they differ, mostly ended.
    """

    waits: tuple[Waiting, ...] = ()
    done: Mapping[str, int] = field(default_factory=dict)
    issued: Mapping[str, int] = field(default_factory=dict)
    recent: tuple[Issued, ...] = ()
    limit: float | None = None
    compared: tuple[Waiting, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's answer to a revoke, and its promise: an operation reported NONE or RUNNING will never complete here."""

    rank: int
    generation: int
    done: int = 0  # highest sequence this rank has completed with success, 0 for none
    operation: Operation | None = None  # the one in progress
    phase: Phase = Phase.NONE
    first_incomplete: int = 0  # piece
    restorable_from: int = 0  # the first piece whose input this rank can still restore
    attempt: int = 1
    trouble: Trouble | None = None
    age: float = 0.0  # seconds since this rank entered the operation, by its own clock
    budget: float | None = None  # seconds left until its deadline, by its own clock
    elsewhere: str = ""  # an operation of another group this rank is waiting in, or has waited in, in vain
    awaited: tuple[int, ...] = ()  # the members of that group, where they are known
    free_for: float = 0.0  # seconds since that ended; 0 while it is waiting
    watched: Watched | None = None  # collectives that the guard does not carry; None where they are not watched
    returned: bool = False  # the operation has returned without a verdict: its caller was told that nobody is known
    details: Mapping[str, object] = field(
        default_factory=dict
    )  # host, pid, stack, ...: for the incident, never for the decision

    def phase_at(self, sequence: int) -> Phase:
        """Return how far this rank is in the operation with this sequence number."""
        if self.done >= sequence:
            return Phase.DONE
        if self.operation is not None and self.operation.sequence == sequence:
            return self.phase
        return Phase.NONE


@dataclass(frozen=True, slots=True)
class Departure:
    """A process that is gone or going: announced by itself (exited, failed) or witnessed (lost)."""

    rank: int
    cause: Cause
    text: str = ""
    done: int = 0  # highest sequence it completed in this group, whose result it left in the store
    details: Mapping[str, object] = field(default_factory=dict, compare=False)  # as in a report: for the incident only
    terminated: bool = (
        False  # ended from outside, by SIGTERM: launchers end all when one is gone, so rather a consequence
    )
    follows: bool = False  # it gives the group up because of a fault of others that all know: it is not to blame
    watched: Watched | None = None  # as in a report, where the rank has said it


@dataclass(frozen=True, slots=True)
class Verdict:
    """The one decision about a generation; every operation of it before `sequence` is committed."""

    generation: int
    sequence: int
    action: Action
    cause: Cause | None = None
    culprits: tuple[tuple[int, Cause], ...] = ()
    participants: tuple[int, ...] = ()  # of the next generation
    departed: tuple[tuple[int, Cause], ...] = ()
    from_piece: int = 0
    attempt: int = 1  # of the next try when resumed, of the last one otherwise
    fingerprints: tuple[int, ...] = ()  # of the calls that entered `sequence`
    sides: Sides = ()
    deadline_expired: bool = False
    coordinator: int = -1
    incident: str = ""  # JSON, opaque here

    @property
    def culprit_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, _ in self.culprits))


#: How the text begins of what a rank waits in while it makes a group with others: who of them has strayed is not known.
MAKES_GROUP = "new_group("
#: Seconds for which a rank waits in a collective of torch's own before that tells where it is.
TELLING_AFTER = 1.0


#: When several causes were found, the outcome's single `cause` is the first of these.
PRECEDENCE = (
    Cause.LOST,
    Cause.FAILED,
    Cause.EXITED,
    Cause.DIVERGED,
    Cause.STUCK,
    Cause.LATE,
    Cause.NETWORK,
    Cause.UNKNOWN,
)


def elsewhere_long_enough(reports: Mapping[int, Report]) -> dict[int, Report]:
    """The reports, without what a rank waited in elsewhere for less than half of the time that others waited for it.

    Ranks that wait for each other in two groups give up at the same time, and the verdict on one group ends the wait of
    those whom the other group is about to accuse.
    """
    waited = max((r.age for r in reports.values()), default=0.0)
    return {
        rank: replace(r, elsewhere="", awaited=(), free_for=0.0) if r.free_for > waited / 2 else r
        for rank, r in reports.items()
    }


def waits_outside(reports: Mapping[int, Report]) -> dict[int, Report]:
    """The reports, with the collective of torch's own as `elsewhere` that a rank waits in for ranks that wait for it.

    These are in the operation of the guard and have not issued that collective, such as a step more of DDP: neither
    side can go on.
    """
    inside = {r.rank: r.watched.issued for r in reports.values() if r.operation is not None and r.watched is not None}

    def is_told(report: Report, wait: Waiting) -> bool:
        if report.elsewhere and not report.free_for:
            return wait.text == report.elsewhere
        return wait.age >= TELLING_AFTER and any(
            issued.get(wait.channel, wait.sequence) < wait.sequence
            for rank, issued in inside.items()
            if rank in wait.members
        )

    found = dict(reports)
    for rank, report in reports.items():
        if report.operation is None and report.watched is not None:
            wait = next((wait for wait in report.watched.waits if is_told(report, wait)), None)
            if wait is not None:
                found[rank] = replace(report, elsewhere=wait.text, awaited=wait.members, free_for=0.0)
    return found


def ended_from_outside(reports: Mapping[int, Report], departed: Mapping[int, Departure], silent: Silent) -> bool:
    """Return whether no rank is left and some were sent SIGTERM: a scheduler, a launcher or a person ended the job."""
    return not silent and reports.keys() <= departed.keys() and any(d.terminated for d in departed.values())


#: In a report's details: this rank was sent SIGINT, whatever its main thread is in.
INTERRUPTED: Final = "interrupted"
#: Seconds for which that counts: torchrun kills who does not react after 30 s, and a notebook goes on.
INTERRUPT_COUNTS: Final = 60.0


def is_interrupt(departure: Departure) -> bool:
    """Return whether a rank ended with KeyboardInterrupt."""
    return departure.cause is Cause.FAILED and departure.text.startswith(KeyboardInterrupt.__name__)


def raises_interrupt(report: Report) -> bool:
    """Return whether a rank's call raised KeyboardInterrupt."""
    if report.trouble is None or report.trouble.kind is not TroubleKind.RAISED:
        return False
    return report.trouble.text.startswith(KeyboardInterrupt.__name__)


def interrupted_from_outside(reports: Mapping[int, Report], departed: Mapping[int, Departure], silent: Silent) -> bool:
    """Return whether every rank was sent SIGINT or SIGTERM, and one has ended thereby: Ctrl-C on the whole job."""
    raising = {rank for rank, report in reports.items() if raises_interrupt(report)}
    sent = all(
        rank in departed or rank in raising or report.details.get(INTERRUPTED) for rank, report in reports.items()
    )
    ended = bool(raising) or any(map(is_interrupt, departed.values())) or killed_after_interrupt(reports, departed)
    return sent and not silent and ended


def killed_after_interrupt(reports: Mapping[int, Report], departed: Mapping[int, Departure]) -> bool:
    """Return whether some ranks are lost and all others were sent SIGINT: a launcher has killed who did not react.

    A rank in a call of gloo's does not, and torchrun waits for 30 s.
    """
    left = [report for rank, report in reports.items() if rank not in departed]
    lost = any(one.cause is Cause.LOST for one in departed.values())
    return lost and bool(left) and all(report.details.get(INTERRUPTED) for report in left)


def is_sent_away(departure: Departure, killed: bool) -> bool:
    """Return whether a rank was ended with all the others: by SIGTERM or Ctrl-C, or `killed` after that."""
    return departure.terminated or is_interrupt(departure) or (killed and departure.cause is Cause.LOST)


def decide(
    generation: int,
    members: Sequence[int],
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Silent,
    coordinator: int = -1,
) -> Verdict:
    """Return the verdict on a generation from the reports of its members.

    `members` are the generation's global ranks; each is in `reports`, in `departed`, or in `silent`. A member that
    reported *and* departed counts with both: its promise holds, and it will not take part again.
    """
    entered_any = [r.operation.sequence for r in reports.values() if r.operation is not None]
    latest_done = [r.done for r in reports.values()] + [d.done for d in departed.values()]
    sequence = max(entered_any + latest_done, default=0)
    among = frozenset(members)  # thousands, of whom half may be gone
    gone = {rank: departed[rank].cause for rank in sorted(departed) if rank in among}
    entered = {rank: r for rank, r in reports.items() if r.operation is not None and r.operation.sequence == sequence}
    attempt = max((r.attempt for r in entered.values()), default=1)
    # A deadline of an earlier operation, which this verdict commits, says nothing about who is late for this one.
    kinds = {r.trouble.kind for r in entered.values() if r.trouble is not None}
    overdue = not kinds.isdisjoint((TroubleKind.DEADLINE, TroubleKind.STUCK))
    # Members are called silent only after a deadline, whatever the trouble was that revoked the generation.
    expired = bool(silent) or overdue or TroubleKind.OVERDUE in kinds
    returned = any(r.returned for r in entered.values())
    unanswered = returned or not kinds.isdisjoint((TroubleKind.UNANSWERED, TroubleKind.OVERDUE, TroubleKind.REPEATED))
    # Then no further try can end well: it would hide who was gone.
    spent = not kinds.isdisjoint((TroubleKind.DEADLINE, TroubleKind.OVERDUE))
    base = Verdict(
        generation=generation,
        sequence=sequence,
        action=Action.COMMIT,
        participants=tuple(members),
        departed=tuple(gone.items()),
        attempt=attempt,
        fingerprints=tuple(sorted({r.operation.fingerprint for r in entered.values() if r.operation is not None})),
        deadline_expired=expired,
        coordinator=coordinator,
    )
    if _committed(sequence, reports, departed):
        return base

    culprits, sides = _blame(sequence, among, reports, departed, silent, entered, overdue)
    interrupted = interrupted_from_outside(reports, departed, silent)
    operation = next(r.operation for r in entered.values() if r.operation is not None)
    from_piece = _resume_point(sequence, reports)
    only_gone = bool(culprits) and set(culprits) <= set(gone)
    if only_gone and not silent and not spent and _may_shrink(entered, departed):
        rest = tuple(rank for rank in members if rank not in departed)
        return _replace(base, Action.RESUME, culprits, sides, participants=rest, from_piece=0, attempt=attempt + 1)
    restorable = all(r.restorable_from <= from_piece for r in entered.values())
    # Who left and is not to blame was ended with all the others: no further try can have it back.
    over = unanswered or interrupted or bool(gone)
    if not (culprits or expired or sides or over) and attempt < operation.max_attempts and restorable:
        return _replace(base, Action.RESUME, {}, sides, from_piece=from_piece, attempt=attempt + 1, cause=Cause.NETWORK)
    cause = Cause.DIVERGED if sides else Cause.UNKNOWN if over or silent else Cause.NETWORK
    return _replace(base, Action.FAIL, culprits, sides, cause=cause)


def _committed(sequence: int, reports: Mapping[int, Report], departed: Mapping[int, Departure]) -> bool:
    """Return whether somebody may already have returned the operation as a success, so that all must."""
    phases = [r.phase_at(sequence) for r in reports.values()]
    if any(phase is Phase.DONE for phase in phases) or any(d.done >= sequence for d in departed.values()):
        return True
    closings = [r.operation.closing for r in reports.values() if r.operation and r.operation.sequence == sequence]
    return bool(closings) and all(closings) and all(phase >= Phase.READY for phase in phases)


def _resume_point(sequence: int, reports: Mapping[int, Report]) -> int:
    """The first piece that is not complete on every rank that reported; 0 when one of them has not entered."""
    return min(
        (r.first_incomplete if r.phase_at(sequence) is not Phase.NONE else 0 for r in reports.values()),
        default=0,
    )


def _may_shrink(entered: Mapping[int, Report], departed: Mapping[int, Departure]) -> bool:
    """Return whether every caller asked for it, can restore its whole input, and does not need a rank that is gone."""
    return all(
        r.operation is not None and r.operation.shrink and r.operation.needs not in departed and r.restorable_from == 0
        for r in entered.values()
    )


def _blame(
    sequence: int,
    members: frozenset[int],
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Silent,
    entered: Mapping[int, Report],
    overdue: bool,
) -> tuple[dict[int, Cause], Sides]:
    """Name the ranks that kept the operation from completing, strongest evidence first; nobody where there is none."""
    raised = {
        rank: Cause.FAILED
        for rank, r in reports.items()
        if r.trouble is not None and r.trouble.kind is TroubleKind.RAISED
    }
    gave_up = {
        rank: Cause.FAILED
        for rank, r in reports.items()
        if r.trouble is not None and r.trouble.kind is TroubleKind.GAVE_UP
    }
    gone = {rank: d.cause for rank, d in departed.items() if rank in members and d.done < sequence and not d.follows}
    by_themselves = {rank: cause for rank, cause in gone.items() if not departed[rank].terminated}
    # One that never answered did not even announce its end.
    if by_themselves or raised or gave_up or silent or ended_from_outside(reports, departed, silent):
        gone = by_themselves
    if interrupted_from_outside(reports, departed, silent):  # who raised or left because of that is not to blame
        raised = {rank: cause for rank, cause in raised.items() if not raises_interrupt(reports[rank])}
        killed = killed_after_interrupt(reports, departed)
        gone = {rank: cause for rank, cause in gone.items() if not is_sent_away(departed[rank], killed)}
    astray = {rank for rank in gone if _has_waited_for(entered, reports.get(rank), departed[rank])}
    if raised or gone.keys() - astray:
        return {**gone, **raised}, ()
    if gave_up:  # the reason is in another verdict: named where there is nobody else
        return gave_up, ()
    if any(r.returned for r in entered.values()):  # what one caller was told holds for all of them
        return {}, ()
    odd, sides = divergence(entered)
    if not sides:
        odd, sides = _finished(sequence, reports, entered)
    if sides:
        return dict.fromkeys(odd, Cause.DIVERGED), sides
    if not (overdue or silent or astray):
        return {}, ()
    missing = {
        rank: Cause.DIVERGED if r.elsewhere else Cause.LATE
        for rank, r in reports.items()
        if (overdue or rank in astray) and r.phase_at(sequence) is Phase.NONE and not _is_held(r, sequence)
    }
    missing.update({rank: cause for rank, cause in silent.items() if rank in members and cause is not None})
    if missing:
        return _without_majority(missing, entered, reports)
    return ({}, ()) if silent else _came_last(entered)


def _has_waited_for(ranks: Iterable[int], report: Report | None, departure: Departure) -> bool:
    """Return whether a rank has left after it had waited for these in another group: it would not have come anyhow."""
    return departure.cause is Cause.EXITED and report is not None and {*ranks} <= {*report.awaited}


def largest_first(sides: Iterable[tuple[str, Sequence[int]]]) -> Sides:
    """Return what ranks called, with the ranks in order: the largest side first, then that of the first rank."""
    return tuple(
        (text, tuple(ranks)) for text, ranks in sorted(sides, key=lambda side: (-len(side[1]), tuple(side[1])))
    )


def divergence(entered: Mapping[int, Report]) -> tuple[tuple[int, ...], Sides]:
    """Split the ranks by what they called; odd are those outside a strict majority, if there is one."""
    sides: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    for rank in sorted(entered):
        operation = entered[rank].operation
        assert operation is not None
        sides.setdefault(operation.fingerprint, []).append(rank)
        texts.setdefault(operation.fingerprint, operation.text)
    if len(sides) < 2:
        return (), ()
    shown = largest_first((texts[fingerprint], ranks) for fingerprint, ranks in sides.items())
    largest = len(shown[0][1])
    odd = [rank for _, ranks in shown[1:] for rank in ranks] if 2 * largest > len(entered) else []
    return tuple(sorted(odd)), shown


def _finished(
    sequence: int, reports: Mapping[int, Report], entered: Mapping[int, Report]
) -> tuple[tuple[int, ...], Sides]:
    """Split the ranks that wait from those that have finished the section and will not come.

    Odd is the smaller side.
    """
    done = {
        rank: r.trouble.text
        for rank, r in sorted(reports.items())
        if r.trouble is not None and r.trouble.kind is TroubleKind.FINISHED and r.phase_at(sequence) is Phase.NONE
    }
    waiting = next((r.operation for r in entered.values() if r.operation is not None), None)
    if not done or waiting is None:
        return (), ()
    sides = largest_first([(waiting.text, sorted(entered)), (f"nothing more: {next(iter(done.values()))}", [*done])])
    odd = sides[1][1] if len(sides[0][1]) > len(sides[1][1]) else ()
    return odd, sides


def _is_held(report: Report, sequence: int) -> bool:
    """Return whether a rank waits in an earlier operation, which others have completed: it lost the rest."""
    return report.operation is not None and report.operation.sequence < sequence and not report.elsewhere


def _without_majority(
    missing: dict[int, Cause], entered: Mapping[int, Report], reports: Mapping[int, Report]
) -> tuple[dict[int, Cause], Sides]:
    """Two groups waiting for each other accuse nobody unless one side is the larger: show both sides.

    The larger may be in a collective of another group, or of torch's own, whose members are known. Where somebody is
    in no call at all, or silent, those that wait elsewhere may wait for that one.
    """
    elsewhere = {rank for rank, cause in missing.items() if cause is Cause.DIVERGED}
    if not elsewhere:
        return missing, ()
    sides: dict[str, list[int]] = {}
    for rank in sorted(reports):
        operation = entered[rank].operation if rank in entered else None
        text = operation.text if operation is not None else reports[rank].elsewhere
        if text:
            sides.setdefault(text, []).append(rank)
    shown = largest_first(sides.items())
    makes_group = any(reports[rank].elsewhere.startswith(MAKES_GROUP) for rank in elsewhere)
    alone = len(elsewhere) == len(missing)
    if alone and 2 * len(entered) > len(entered) + len(elsewhere) and not makes_group:
        return missing, shown
    waited_for = all({*entered} <= {*reports[rank].awaited} for rank in elsewhere)
    if alone and len(shown) == 2 and len(elsewhere) > len(entered) and waited_for:
        return dict.fromkeys(sorted(entered), Cause.DIVERGED), shown
    return {rank: cause for rank, cause in missing.items() if rank not in elsewhere}, shown


def _came_last(entered: Mapping[int, Report]) -> tuple[dict[int, Cause], Sides]:
    """Name, where all have entered, those that came far behind the rest, else nobody.

    Far behind is, for fewer than half of the ranks, under half the median age, and for any number of them under a
    quarter of the longest: had they come a moment later, they would be missing. One that was held up in another
    operation waited for somebody there: that is shown, and it is not named.
    """
    ages = [r.age for r in entered.values()]
    if len(ages) < 2:
        return {}, ()
    behind = {rank for rank, r in entered.items() if r.age < median(ages) / 2}
    tardy = {rank for rank, r in entered.items() if r.age < max(ages) / 4}
    if 2 * len(behind) < len(ages):
        tardy |= behind
    sides: dict[str, list[int]] = {}
    for rank, r in sorted(entered.items()):
        text = r.elsewhere if rank in tardy and r.elsewhere else "" if r.operation is None else r.operation.text
        sides.setdefault(text, []).append(rank)
    late = {rank: Cause.LATE for rank in tardy if not entered[rank].elsewhere}
    return late, largest_first(sides.items()) if len(late) < len(tardy) else ()


def _replace(
    base: Verdict,
    action: Action,
    culprits: Mapping[int, Cause],
    sides: Sides,
    *,
    participants: tuple[int, ...] | None = None,
    from_piece: int = 0,
    attempt: int | None = None,
    cause: Cause = Cause.NETWORK,
) -> Verdict:
    found = [c for c in PRECEDENCE if c in culprits.values()]
    return Verdict(
        generation=base.generation,
        sequence=base.sequence,
        action=action,
        cause=found[0] if found else cause,
        culprits=tuple(sorted(culprits.items())),
        participants=base.participants if participants is None else participants,
        departed=base.departed,
        from_piece=from_piece,
        attempt=base.attempt if attempt is None else attempt,
        fingerprints=base.fingerprints,
        sides=sides,
        deadline_expired=base.deadline_expired,
        coordinator=base.coordinator,
    )
