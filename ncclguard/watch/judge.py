"""Judgement on who holds up the collectives that the guard does not carry: a pure function of what the ranks report.

The counterpart of `protocol.decision.decide` for one state that covers all groups of the job. A raw collective has no
closing round and may end on one rank before another has entered it, so nothing is ever committed or resumed here: what
is decided is who is to blame, and only that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ncclguard.coordination.incidents import ISSUERS
from ncclguard.errors import is_repeat
from ncclguard.protocol.codec import ranks_of
from ncclguard.protocol.decision import (
    MAKES_GROUP,
    PRECEDENCE,
    TELLING_AFTER,
    Action,
    Departure,
    Issued,
    Operation,
    Phase,
    Report,
    Sides,
    Silent,
    TroubleKind,
    Verdict,
    Waiting,
    Watched,
    divergence,
    ended_from_outside,
    interrupted_from_outside,
    is_sent_away,
    killed_after_interrupt,
    largest_first,
)
from ncclguard.torch_compat.groups import broken_collective
from ncclguard_explain.cause import Cause

#: What a rank adds to its last words when its exception comes from a broken collective.
BROKEN: Final = "(a collective broke)"
#: Seconds that NCCL may take to connect the ranks in the first collective of a group, once all of them are in it: more
#: than 3 s where 18 processes began on one H200, and minutes where there are thousands of ranks.
CONNECTS_WITHIN: Final = 120.0

#: In a report's details: the channels in which the collective that it waits in has begun on the device.
STARTED: Final = "started"
#: In a report's details: the ranks are asked about a call of theirs that may differ, and about nothing else.
COMPARES: Final = "compares"
#: A detail of what a rank says when it leaves: whether it has called anything, also in groups that are gone.
CALLED: Final = "called"
#: A detail of such an answer: by channel, the lines of the program that have called, each with its numbers.
PLACES: Final = "places"
#: In a report's details: the message between two ranks that its device waits in, in words.
MESSAGE: Final = "message"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the reports; `channel` is empty when nobody waits for anything any more."""

    channel: str
    sequence: int
    causes: dict[int, Cause]
    cause: Cause
    sides: Sides
    reports: dict[int, Report]  # as seen from that channel


def is_consequence(text: str) -> bool:
    """Return whether an exception's text is that of a broken collective, and so no cause."""
    return BROKEN in text or broken_collective(text)


def has_issued(departure: Departure, awaited: Mapping[str, int]) -> bool:
    """Return whether a rank that left had issued what is awaited (channel, number); False where it did not say."""
    said = departure.watched
    return said is not None and all(said.issued.get(c, 0) >= sequence for c, sequence in awaited.items())


def has_completed(departure: Departure, channel: str, sequence: int) -> bool:
    """Return whether a collective had ended on a rank before it left."""
    return departure.watched is not None and departure.watched.done.get(channel, 0) >= sequence


def expired(reports: Mapping[int, Report]) -> bool:
    """Return whether some rank's limit has passed, so that absence or silence is held against a rank."""
    return any(r.trouble is not None and r.trouble.kind is TroubleKind.DEADLINE for r in reports.values())


def analyse(
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    silent: Silent,
    overdue: bool,
) -> Finding:
    """Find the collective that holds everything up, and who is to blame for it, strongest evidence first."""
    waits = {rank: _waits(report) for rank, report in reports.items()}
    stalled = _stalled(waits)
    more = _made_more_calls(stalled, departed, waits)
    if more is not None:
        channel, odd, sides = more
        return _finding(channel, stalled, dict.fromkeys(odd, Cause.DIVERGED), sides, reports, waits, Cause.DIVERGED)
    gone = _gone(stalled, departed, reports, silent)
    raised = {
        rank: Cause.FAILED
        for rank, r in reports.items()
        if r.trouble is not None and r.trouble.kind is TroubleKind.RAISED
    }
    mismatch = _mismatch(stalled, reports, departed, waits)
    # gloo ends a process that is sent more than it expects: often a healthy one, and a consequence.
    if (gone or raised) and not (mismatch and not raised and set(gone.values()) == {Cause.LOST}):
        channel = _channel_with(stalled, {*gone, *raised})
        return _finding(channel, stalled, {**gone, **raised}, (), reports, waits)
    differing = None if overdue else _differing(reports)
    if differing:
        channel, sequence, members, odd, sides = differing
        ended = {channel: (sequence, members)}
        return _finding(channel, ended, dict.fromkeys(odd, Cause.DIVERGED), sides, reports, waits, Cause.DIVERGED)
    if mismatch:
        channel, odd, sides = mismatch
        return _finding(channel, stalled, dict.fromkeys(odd, Cause.DIVERGED), sides, reports, waits, Cause.DIVERGED)
    kinds = {report.trouble.kind for report in reports.values() if report.trouble is not None}
    if kinds <= {TroubleKind.MISMATCH} and any(report.details.get(COMPARES) for report in reports.values()):
        return _finding("", stalled, {}, (), reports, waits)  # the answers do not show it, and nobody waits in vain
    if overdue:
        found = _missing(stalled, reports, silent, waits)
        if found is not None:
            channel, causes, sides = found
            return _finding(channel, stalled, causes, sides, reports, waits, Cause.DIVERGED)
        behind = _behind(stalled, reports, waits)
        if behind is not None and None not in silent.values():
            return _finding(behind[0], stalled, behind[1], (), reports, waits)
    spent = _gone(stalled, departed, reports, silent, spent=True)
    if spent:
        return _finding(_channel_with(stalled, {*spent}), stalled, spent, (), reports, waits)
    channel = _oldest(stalled, waits)
    # A receive may wait for another tag, or for any rank; what broke before all had come is no fault of the network.
    known = not (silent or "->" in channel or _ended_from_outside(reports, departed, silent))
    known = known and not any(is_repeat(d.text) for d in departed.values())
    known = known and _all_entered(channel, stalled, reports, waits)
    if known and (_connects(channel, waits) or _has_just_come(channel, stalled, reports, departed, waits)):
        channel = ""  # nobody waits in vain yet
    return _finding(channel, stalled, {}, (), reports, waits, Cause.NETWORK if known else Cause.UNKNOWN)


def verdict_of(finding: Finding, generation: int, members: Sequence[int], **facts: Any) -> Verdict:
    """The finding as the agreement's verdict; without a cause when nobody waits any more."""
    departed: Mapping[int, Departure] = facts["departed"]
    found = [cause for cause in PRECEDENCE if cause in finding.causes.values()]
    cause = found[0] if found else finding.cause
    waited = bool(finding.channel or finding.causes)
    return Verdict(
        generation=generation,
        sequence=finding.sequence,
        action=Action.FAIL if waited else Action.RESUME,
        cause=cause if waited else None,
        culprits=tuple(sorted(finding.causes.items())),
        participants=tuple(rank for rank in members if rank not in departed),
        departed=tuple((rank, d.cause) for rank, d in sorted(departed.items())),
        sides=finding.sides,
        deadline_expired=facts["expired"],
        coordinator=facts["coordinator"],
    )


# ---------------------------------------------------------------------- what the ranks wait in


def _waits(report: Report) -> tuple[Waiting, ...]:
    return () if report.watched is None else report.watched.waits


def _issued(waits: tuple[Waiting, ...], said: Watched | None, channel: str, sequence: int) -> Operation | None:
    """Return what a rank issued under this number; None where it did not, or it is not known any more."""
    known: tuple[Waiting | Issued, ...] = (*waits, *(() if said is None else said.recent))
    found = next((one for one in known if (one.channel, one.sequence) == (channel, sequence) and one.fingerprint), None)
    return None if found is None else Operation(sequence, found.fingerprint, found.text)


def _done(report: Report, channel: str) -> int | None:
    """Up to where this rank has ended the channel's collectives; None when it does not watch them."""
    return None if report.watched is None else report.watched.done.get(channel, 0)


def _budget(report: Report, age: float) -> float | None:
    """Return what is left of this rank's limit; the report's own budget says how long to wait for answers."""
    limit = None if report.watched is None else report.watched.limit
    return None if limit is None else limit - age


def _stalled(waits: Mapping[int, tuple[Waiting, ...]]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """For each channel that somebody waits in: the lowest number waited for, and the members."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for wait in (wait for items in waits.values() for wait in items):
        lowest = found.get(wait.channel, (wait.sequence, ()))[0]
        found[wait.channel] = (min(lowest, wait.sequence), wait.members)
    return found


def _standing(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]], waits: Mapping[int, tuple[Waiting, ...]], silent: Silent
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """The channels in which somebody has waited for long, or that have a member which gives no sign of life.

    The ranks' reports are of different moments: in a channel that is at work, who has not come may just be about to.
    """
    ages: dict[str, float] = {}
    for wait in (wait for items in waits.values() for wait in items):
        ages[wait.channel] = max(ages.get(wait.channel, 0.0), wait.age)
    least = min(TELLING_AFTER, max(ages.values(), default=0.0) / 2)
    broken = {wait.channel for items in waits.values() for wait in items if wait.broken}
    return {
        channel: found
        for channel, found in stalled.items()
        if ages[channel] >= least or channel in broken or any(silent.get(rank) is not None for rank in found[1])
    }


def _oldest(stalled: Mapping[str, object], waits: Mapping[int, tuple[Waiting, ...]]) -> str:
    """The channel that has been waited in for the longest time."""
    ages = {
        channel: max(w.age for items in waits.values() for w in items if w.channel == channel) for channel in stalled
    }
    return max(ages, key=lambda channel: (ages[channel], channel), default="")


# ---------------------------------------------------------------------- who is to blame


def _gone(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    departed: Mapping[int, Departure],
    reports: Mapping[int, Report],
    silent: Silent,
    spent: bool = False,
) -> dict[int, Cause]:
    """Ranks that left or died while somebody waited for them.

    One that ended because its collective broke, or with the error of a guarded call, is a consequence, and so is one
    that left beside one that died, or that the launcher or Ctrl-C ended while another rank gives no sign of life, or
    with all the others. One that left after it had issued all that is waited for counts with `spent` only, where that
    had not ended for it: rather somebody else is to blame.
    """
    broken = (TroubleKind.DEPARTED, TroubleKind.TRANSPORT)
    told = any(r.trouble is not None and r.trouble.kind in broken for r in reports.values())
    awaited = {rank for _, members in stalled.values() for rank in members}

    def may_be_why(rank: int, left: Departure) -> bool:
        own = {channel: sequence for channel, (sequence, members) in stalled.items() if rank in members}
        if spent:
            return not (own and all(has_completed(left, channel, sequence) for channel, sequence in own.items()))
        return not has_issued(left, own)

    found = {
        rank: d
        for rank, d in departed.items()
        if (rank in awaited or (told and d.cause is not Cause.EXITED and not d.terminated))
        and not (d.cause is Cause.FAILED and (is_consequence(d.text) or is_repeat(d.text)))
        and may_be_why(rank, d)
    }
    killed = killed_after_interrupt(reports, departed)
    consequence = silent or _ended_from_outside(reports, departed, silent)
    for sent_away in (False,) if consequence else (False, True):  # launchers end all when one is gone
        for cause in (Cause.FAILED, Cause.LOST, Cause.EXITED):
            ranks: dict[int, Cause] = {
                rank: cause for rank, d in found.items() if d.cause is cause and is_sent_away(d, killed) is sent_away
            }
            if ranks:
                return ranks
    return {}


def _ended_from_outside(reports: Mapping[int, Report], departed: Mapping[int, Departure], silent: Silent) -> bool:
    return ended_from_outside(reports, departed, silent) or interrupted_from_outside(reports, departed, silent)


def _made_more_calls(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    departed: Mapping[int, Departure],
    waits: Mapping[int, tuple[Waiting, ...]],
) -> tuple[str, tuple[int, ...], Sides] | None:
    """Return the channel in which few wait while most have ended well after equally many calls, who, and the sides.

    Such as where a loader has more batches on one rank.
    """
    for channel, (sequence, members) in sorted(stalled.items()):
        left = {
            rank: departed[rank].watched
            for rank in members
            if rank in departed and departed[rank].cause is Cause.EXITED and not departed[rank].terminated
        }
        waiting = {
            rank: wait.text
            for rank in members
            for wait in waits.get(rank, ())
            if (wait.channel, wait.sequence) == (channel, sequence)
        }
        numbers = {None if said is None else said.issued.get(channel) for said in left.values()}
        if 2 * len(left) > len(members) and {*left, *waiting} == {*members} and len(numbers) == 1:
            number = numbers.pop()
            if number is not None and number < sequence:
                text = f"nothing more: {departed[min(left)].text}"
                return channel, tuple(waiting), largest_first([(text, [*left]), (waiting[min(waiting)], [*waiting])])
    return None


def _mismatch(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    waits: Mapping[int, tuple[Waiting, ...]],
) -> tuple[str, tuple[int, ...], Sides] | None:
    """Return the channel whose members issued different collectives under one number, who is odd, and the sides.

    Also of those for whom it has ended, with an error or with rubbish, and who may wait in a later one. Of who is gone
    or silent it is mostly not known: they may have been on any side, so the majority must be one with all of them
    against it.
    """
    for channel, (sequence, members) in sorted(stalled.items()):
        called = {}
        for rank in members:
            sources = (departed.get(rank), reports.get(rank))  # one that raised has not said it when it left
            said = next((one.watched for one in sources if one is not None and one.watched is not None), None)
            operation = _issued(waits.get(rank, ()), said, channel, sequence)
            if operation is not None:
                called[rank] = Report(rank=rank, generation=0, operation=operation)
        odd, sides = divergence(called)
        if sides:
            unknown = sum(rank not in reports and rank not in called for rank in members)
            return channel, odd if 2 * len(sides[0][1]) > len(called) + unknown else (), sides
    return None


def _differing(
    reports: Mapping[int, Report],
) -> tuple[str, int, tuple[int, ...], tuple[int, ...], Sides] | None:
    """Return the first collective that the ranks are asked about and that differs, its members, who is odd, the sides.

    It has ended, so nobody waits in it. A majority must be one with all of whom it is not known against it.
    """
    said: dict[tuple[str, int, tuple[int, ...]], dict[int, Waiting]] = {}
    for rank, report in reports.items():
        for one in report.watched.compared if report.watched else ():
            said.setdefault((one.channel, one.sequence, one.members), {})[rank] = one
    for (channel, sequence, members), here in sorted(said.items()):
        called = {
            rank: Report(rank=rank, generation=0, operation=Operation(one.sequence, one.fingerprint, one.text))
            for rank, one in here.items()
        }
        odd, sides = divergence(called)
        if sides:
            most = 2 * len(sides[0][1]) > len(members)
            return channel, sequence, members, odd if most else (), sides
    return None


def _channel_with(stalled: Mapping[str, tuple[int, tuple[int, ...]]], ranks: set[int]) -> str:
    """The channel to speak of: the one whose members include the most of these ranks."""
    return max(stalled, key=lambda c: (len(ranks & set(stalled[c][1])), c), default="")


def _missing(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    reports: Mapping[int, Report],
    silent: Silent,
    waits: Mapping[int, tuple[Waiting, ...]],
) -> tuple[str, dict[int, Cause], Sides] | None:
    """Members that have not entered what the others wait in; one that waits elsewhere only passes the delay on.

    Nobody is named where one of those waits in a channel in which nobody has waited for long: that may be at work.
    """
    standing = _standing(stalled, waits, silent)
    found, passing_on = _absent(standing, reports, silent, waits)
    if found is not None:
        return *found, ()
    moves = any(
        waits[rank] and not any(wait.channel in standing for wait in waits[rank]) and not reports[rank].elsewhere
        for rank in passing_on
    )
    known = passing_on and not moves and None not in silent.values()
    return _cycle(stalled, passing_on, waits, reports) if known else None


def _absent(
    channels: Mapping[str, tuple[int, tuple[int, ...]]],
    reports: Mapping[int, Report],
    silent: Silent,
    waits: Mapping[int, tuple[Waiting, ...]],
) -> tuple[tuple[str, dict[int, Cause]] | None, dict[int, str]]:
    """Return the channel that lacks the most ranks, with these, and who waits elsewhere, in what."""
    passing_on: dict[int, str] = {}
    best: tuple[str, dict[int, Cause]] | None = None
    for channel, (sequence, members) in sorted(channels.items()):
        causes: dict[int, Cause] = {}
        for rank in members:
            if rank in silent:
                cause = silent[rank]
                if cause is not None:
                    causes[rank] = cause
            elif rank in reports and not _entered(reports[rank], waits[rank], channel, sequence):
                elsewhere = _elsewhere(reports[rank], waits[rank], channel)
                if elsewhere:
                    passing_on[rank] = elsewhere
                else:
                    causes[rank] = Cause.UNKNOWN if reports[rank].watched is None else Cause.LATE
        if causes and (best is None or len(causes) > len(best[1])):
            best = channel, causes
    return best, passing_on


def _elsewhere(report: Report, waits: tuple[Waiting, ...], channel: str) -> str:
    """Return what keeps a rank from this channel, in words: what another of its threads is in does not."""
    said = report.details.get(ISSUERS)
    threads = said if isinstance(said, Mapping) else {}
    own = threads.get(channel)  # known where it is one of the program's own besides the main thread
    waits = tuple(w for w in waits if w.channel != channel and (own is None or threads.get(w.channel) == own))
    return report.elsewhere or _message(report) or next((wait.text for wait in waits), "")


def _behind(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    reports: Mapping[int, Report],
    waits: Mapping[int, tuple[Waiting, ...]],
) -> tuple[str, dict[int, Cause]] | None:
    """Ranks that have issued what the others wait in, while their device has not come to it, and to nothing else."""
    begun: dict[int, set[str]] = {}
    for rank, report in reports.items():
        said = report.details.get(STARTED)
        begun[rank] = {str(channel) for channel in said} if isinstance(said, (list, tuple)) else set()
    for channel, (sequence, members) in sorted(stalled.items()):
        inside = [
            rank
            for rank in members
            if any((wait.channel, wait.sequence) == (channel, sequence) for wait in waits.get(rank, ()))
        ]
        if any(channel in begun[rank] for rank in inside):
            causes = {rank: Cause.LATE for rank in inside if not begun[rank] and not _message(reports[rank])}
            if causes:
                return channel, causes
    return None


def _cycle(
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    passing_on: Mapping[int, str],
    waits: Mapping[int, tuple[Waiting, ...]],
    reports: Mapping[int, Report],
) -> tuple[str, dict[int, Cause], Sides]:
    """Judge ranks that wait for each other in different collectives: a strict majority accuses the rest."""
    sides: dict[str, list[int]] = {}
    for rank, items in sorted(waits.items()):
        text = passing_on.get(rank) or next((wait.text for wait in items), "")
        if text:
            sides.setdefault(text, []).append(rank)
    shown = largest_first(sides.items())
    total = sum(len(ranks) for _, ranks in shown)
    one_to_one = any("->" in wait.channel for items in waits.values() for wait in items)  # either end may be wrong
    one_to_one = one_to_one or any(_message(report) for report in reports.values())
    makes_group = any(text.startswith(MAKES_GROUP) for text in passing_on.values())
    majority = not (one_to_one or makes_group) and bool(shown) and 2 * len(shown[0][1]) > total
    odd = [r for _, ranks in shown[1:] for r in ranks] if majority else []
    return _oldest(stalled, waits), dict.fromkeys(sorted(odd), Cause.DIVERGED), shown


def _message(report: Report) -> str:
    return str(report.details.get(MESSAGE, ""))


def _entered(report: Report, waits: tuple[Waiting, ...], channel: str, sequence: int) -> bool:
    done = _done(report, channel)
    return (done is not None and done >= sequence) or any(
        wait.channel == channel and wait.sequence <= sequence for wait in waits
    )


def _connects(channel: str, waits: Mapping[int, tuple[Waiting, ...]]) -> bool:
    """Return whether NCCL may be connecting still: in a first collective, not recorded by all, and not for too long."""
    first = [wait for items in waits.values() for wait in items if wait.channel == channel]
    some = any(not wait.fingerprint for wait in first)  # a rank that is connected has recorded it, and waits for them
    return some and all(wait.sequence == 1 and not wait.broken and wait.age < CONNECTS_WITHIN for wait in first)


def _has_just_come(
    channel: str,
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    reports: Mapping[int, Report],
    departed: Mapping[int, Departure],
    waits: Mapping[int, tuple[Waiting, ...]],
) -> bool:
    """Return whether the last rank came as the limit passed, and nothing broke: what it kept waiting goes on now.

    For it that call may be over, and it may have left. Not where torch gave up, by a limit of its own: its watchdog is
    about to end that process.
    """
    sequence, members = stalled.get(channel, (0, ()))
    freed = [r for rank, r in reports.items() if rank in members and r.elsewhere and 0 < r.free_for < TELLING_AFTER]
    if freed:  # it waited in another call until the others gave that up
        return True
    inside = [
        (rank, wait)
        for rank, items in waits.items()
        for wait in items
        if (wait.channel, wait.sequence) == (channel, sequence)
    ]
    broken = any(r.trouble is not None and r.trouble.kind is TroubleKind.TRANSPORT for r in reports.values())
    if not inside or broken or any(wait.broken for _, wait in inside):
        return False
    first, oldest = max(inside, key=lambda one: one[1].age)
    budget = _budget(reports[first], oldest.age)
    if budget is None or budget > 0:
        return False
    over = any(rank in departed and has_completed(departed[rank], channel, sequence) for rank in members)
    if over and -budget < oldest.age / 2:  # it is about to end here, too
        return True
    said = [reports[rank].watched for rank in members if rank in reports]
    recent = [one for watched in said if watched is not None for one in watched.recent]
    issued = [one.age for one in recent if (one.channel, one.sequence) == (channel, sequence) and one.age is not None]
    return min([*(wait.age for _, wait in inside), *issued]) < min(TELLING_AFTER, oldest.age / 2)


def _all_entered(
    channel: str,
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    reports: Mapping[int, Report],
    waits: Mapping[int, tuple[Waiting, ...]],
) -> bool:
    sequence, members = stalled.get(channel, (0, ()))
    return all(rank not in reports or _entered(reports[rank], waits[rank], channel, sequence) for rank in members)


# ---------------------------------------------------------------------- the reports, as seen from one channel


def _finding(
    channel: str,
    stalled: Mapping[str, tuple[int, tuple[int, ...]]],
    causes: dict[int, Cause],
    sides: Sides,
    reports: Mapping[int, Report],
    waits: Mapping[int, tuple[Waiting, ...]],
    cause: Cause = Cause.UNKNOWN,
) -> Finding:
    sequence = stalled[channel][0] if channel else 0
    return Finding(channel, sequence, causes, cause, sides, _project(reports, waits, channel, sequence))


def _project(
    reports: Mapping[int, Report],
    waits: Mapping[int, tuple[Waiting, ...]],
    channel: str,
    sequence: int,
) -> dict[int, Report]:
    """Return the reports with the collective of this channel as their operation, for what reads those of one group."""
    found = {}
    for rank, report in reports.items():
        wait = next((wait for wait in waits[rank] if wait.channel == channel), None)
        elsewhere = _elsewhere(report, waits[rank], channel)
        compared = () if report.watched is None else report.watched.compared
        called = next((one for one in compared if (one.channel, one.sequence) == (channel, sequence)), None)
        if called is not None and (wait is None or wait.sequence != sequence):
            operation = Operation(sequence, called.fingerprint, called.text)
            details = {**report.details, "call": called.text, **_call_site(report, channel, sequence)}
            found[rank] = replace(
                report, operation=operation, phase=Phase.DONE, done=sequence, elsewhere="", details=details
            )
            continue
        if wait is None:
            done = _done(report, channel)
            found[rank] = replace(report, operation=None, phase=Phase.NONE, done=done or 0, elsewhere=elsewhere)
            continue
        found[rank] = replace(
            report,
            operation=Operation(wait.sequence, wait.fingerprint, wait.text),
            phase=Phase.RUNNING,
            done=wait.sequence - 1,
            age=wait.age,
            budget=_budget(report, wait.age),
            elsewhere="",
        )
    return found


def _call_site(report: Report, channel: str, sequence: int) -> dict[str, str]:
    """Return where the program has made a call, as a detail of its report; nothing where it did not say."""
    places = report.details.get(PLACES)
    of_channel = places.get(channel, {}) if isinstance(places, Mapping) else {}
    made = [place for place, numbers in of_channel.items() if sequence in ranks_of(numbers)]
    return {"call_site": made[0]} if made else {}
