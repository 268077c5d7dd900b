"""What all ranks do next, as pure functions of what they exchanged or of the agreed
verdict: equal input, equal decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclguard.agreement.decision import PRECEDENCE
from ncclguard.evaluation.results import Action, Decision, Failure, Kind, Meeting, NotMet, RankResult, Terms
from ncclguard.outcome import Cause


def at_opening(meeting: Meeting, attempt: int, ranks: Sequence[int]) -> Decision:
    """Whether to run a try at all, from the `Terms` of all ranks; one that switches
    off, or is missing, decides for all.
    """
    if isinstance(meeting, NotMet):
        return Decision(_unmet(meeting, Action.GIVE_UP), _failure_to_meet(meeting, attempt))
    terms: Sequence[Terms] = meeting.values
    if not all(term.enabled for term in terms):
        return Decision(Action.SKIP)
    divisor = max(term.divisor for term in terms)
    chosen = [term.single_rank for term in terms if term.single_rank is not None]
    if chosen and min(chosen) in ranks:
        return Decision(Action.RUN_SINGLE, divisor=divisor, single_rank=min(chosen))
    return Decision(Action.RUN, divisor=divisor)


def at_end(meeting: Meeting, attempt: int, max_attempts: int) -> Decision:
    """What to do after a try, from the `RankResult` of all ranks; a partial result is
    the caller's to weigh on GIVE_UP.
    """
    again = Action.RETRY if attempt < max_attempts else Action.GIVE_UP
    if isinstance(meeting, NotMet):
        return Decision(_unmet(meeting, again), _failure_to_meet(meeting, attempt))
    results: Sequence[RankResult] = meeting.values
    done, total = common_part(results)
    if all(result.fine for result in results):
        return Decision(Action.ACCEPT, done=done, total=total)
    return Decision(again, failure_of(results, attempt), done=done, total=total)


def at_single_end(meeting: Meeting, attempt: int, max_attempts: int) -> Decision:
    """What to do after a try on a single rank, from what it broadcast: its result with its `RankResult`."""
    again = Action.RETRY if attempt < max_attempts else Action.GIVE_UP
    if isinstance(meeting, NotMet):
        return Decision(_unmet(meeting, again), _failure_to_meet(meeting, attempt))
    result: RankResult = meeting.values[0]
    if result.fine:
        return Decision(Action.ACCEPT)
    return Decision(again, failure_of([result], attempt))


def failure_of(results: Sequence[RankResult], attempt: int) -> Failure:
    """Name the ranks whose own exception ended the try; where none has one, those the collectives' verdicts name."""
    own = [result for result in results if result.kind in (Kind.OUT_OF_MEMORY, Kind.RAISED)]
    if own:
        return Failure(
            attempt,
            Cause.FAILED,
            tuple(sorted(result.rank for result in own)),
            tuple(sorted((result.rank, result.error) for result in own)),
            any(result.kind is Kind.OUT_OF_MEMORY for result in own),
        )
    told = [result for result in results if result.cause is not None]
    # Nobody has an exception of its own, so "rank 3 failed" says that rank 3 gave up the
    # try after a verdict that it was told.
    first = [result for result in told if result.cause is not Cause.FAILED]
    told = first or told
    cause = min((result.cause for result in told if result.cause is not None), key=PRECEDENCE.index, default=None)
    culprits = {rank for result in told if result.cause is cause for rank in result.culprits}
    errors = tuple(sorted((result.rank, result.error) for result in told if result.cause is cause))[:1]
    return Failure(attempt, cause or Cause.UNKNOWN, tuple(sorted(culprits)), errors)


def without_followers(decided: Decision, mine: RankResult) -> Decision:
    """Ranks that left after the try had failed left because of it: blame those that its own verdict named."""
    failure = decided.failure
    if failure is None or not mine.culprits or not set(mine.culprits) < set(failure.culprits):
        return decided
    return replace(decided, failure=replace(failure, cause=mine.cause or failure.cause, culprits=mine.culprits))


def common_part(results: Sequence[RankResult]) -> tuple[int, int]:
    """The largest count at which *every* rank recorded a partial result, and the total; (0, 0) for none."""
    common = set(results[0].done) if results else set()
    for result in results[1:]:
        common &= set(result.done)
    done = max(common, default=0)
    return (done, max(result.total for result in results)) if done else (0, 0)


def first_with_sink(terms: Sequence[Terms], ranks: Sequence[int]) -> int:
    """The one rank that logs metrics: the first that has somewhere to log them, so that each is logged once."""
    return next((rank for rank, term in zip(ranks, terms, strict=True) if term.sink), ranks[0])


def _unmet(meeting: NotMet, otherwise: Action) -> Action:
    return Action.STOP if meeting.gone or not meeting.agreed else otherwise


def _failure_to_meet(meeting: NotMet, attempt: int) -> Failure:
    return Failure(attempt, meeting.cause, meeting.culprits, report=meeting.report)
