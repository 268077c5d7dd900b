"""One rank's side of the agreement: what may still happen after a promise, and how calls and verdicts find each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ncclguard.protocol.decision import Action, Operation, Phase, Trouble, TroubleKind
from ncclguard.protocol.member import Entry, Member, Resolution
from tests.unit.members import ALL, LARGE, SMALL, in_operation, verdict

# ---------------------------------------------------------------------- the healthy path


@pytest.mark.parametrize("operation", [LARGE, SMALL])
def test_calls_take_consecutive_sequence_numbers(operation: Operation) -> None:
    member = Member(0, ALL)
    for sequence in (1, 2, 3):
        assert member.enter(operation) == (Entry.START, None)
        assert member.operation is not None
        assert member.operation.sequence == sequence
        assert member.opened(0)
        assert member.ready(0) or not operation.closing
        assert member.done(0)
        assert member.completed == sequence
        assert (member.operation, member.phase) == (None, Phase.NONE)


def test_a_large_operation_is_not_done_before_it_is_ready() -> None:
    assert not in_operation(LARGE).done(0)


def test_a_small_result_is_kept_until_the_next_opening_round_has_passed() -> None:
    member = in_operation(SMALL)
    assert member.done(0)
    assert member.kept == 1
    member.enter(LARGE)
    assert member.kept == 1
    assert member.opened(0)
    assert member.kept == 0


def test_a_large_result_is_not_kept_for_others() -> None:
    member = in_operation(LARGE, ready=True)
    assert member.done(0)
    assert member.kept == 0


def test_a_second_operation_at_the_same_time_is_refused() -> None:
    with pytest.raises(RuntimeError, match="one operation at a time"):
        in_operation().enter(LARGE)


# ---------------------------------------------------------------------- the promise


def test_the_report_says_how_far_this_rank_is() -> None:
    member = in_operation(LARGE)
    assert member.progressed(0, 3, 1)
    report = member.freeze()
    assert (report.phase, report.first_incomplete, report.restorable_from) == (Phase.RUNNING, 3, 1)
    assert report.operation is not None
    assert (report.operation.sequence, report.done) == (1, 0)


MOVES: list[Callable[[Member], bool]] = [
    lambda m: m.opened(0),
    lambda m: m.progressed(0, 1, 0),
    lambda m: m.ready(0),
    lambda m: m.done(0),
]


@pytest.mark.parametrize("operation", [LARGE, SMALL])
@pytest.mark.parametrize("move", MOVES, ids=["opened", "progressed", "ready", "done"])
@pytest.mark.parametrize("how", ["answered", "in trouble"])
def test_nothing_moves_after_the_promise(operation: Operation, move: Callable[[Member], bool], how: str) -> None:
    member = in_operation(operation)
    if how == "answered":
        member.freeze()
    else:
        member.in_trouble(0, Trouble(TroubleKind.TRANSPORT))
    assert not move(member)
    assert (member.phase, member.first_incomplete, member.completed) == (Phase.RUNNING, 0, 0)


def test_a_rank_that_reported_ready_may_still_see_its_closing_round_pass() -> None:
    member = in_operation(LARGE, ready=True)
    assert member.freeze().phase is Phase.READY
    assert member.done(0)
    assert member.freeze().done == 1


def test_the_first_trouble_is_the_one_that_is_reported() -> None:
    member = in_operation()
    assert member.in_trouble(0, Trouble(TroubleKind.TRANSPORT, "first"))
    assert member.in_trouble(0, Trouble(TroubleKind.DEADLINE, "second"))
    assert member.freeze().trouble == Trouble(TroubleKind.TRANSPORT, "first")


def test_a_call_waits_while_the_generation_is_revoked_and_uses_up_no_number() -> None:
    member = Member(0, ALL)
    member.freeze()
    assert member.enter(LARGE) == (Entry.WAIT, None)
    assert member.next_sequence == 1


# ---------------------------------------------------------------------- generations


def test_nothing_of_an_old_generation_counts() -> None:
    member = in_operation(LARGE)
    member.freeze()
    assert member.adopt(verdict(Action.RESUME)) is Resolution.RESUMED
    assert not any(move(member) for move in MOVES)
    assert not member.in_trouble(0, Trouble(TroubleKind.TRANSPORT))
    assert (member.frozen, member.trouble) == (False, None)
    assert member.opened(1)
    assert member.ready(1)
    assert member.done(1)


def test_the_verdict_of_another_generation_is_refused() -> None:
    member = in_operation()
    for generation in (-1, 1):
        with pytest.raises(ValueError, match="generation"):
            member.adopt(verdict(Action.FAIL, generation=generation))
    assert member.generation == 0


# ---------------------------------------------------------------------- what a verdict means for the running call


def test_failed() -> None:
    member = in_operation()
    assert member.adopt(verdict(Action.FAIL)) is Resolution.FAILED
    assert (member.operation, member.completed, member.settled) == (None, 0, ())
    assert member.enter(LARGE) == (Entry.START, None)
    assert member.operation is not None
    assert member.operation.sequence == 2


def test_resumed_from_the_piece_and_with_the_attempt_of_the_verdict() -> None:
    member = in_operation()
    assert member.progressed(0, 4, 1)
    assert member.adopt(verdict(Action.RESUME, from_piece=2, attempt=2)) is Resolution.RESUMED
    assert (member.phase, member.first_incomplete, member.attempt) == (Phase.RUNNING, 2, 2)


def test_committed_with_the_own_result() -> None:
    member = in_operation(LARGE, ready=True)
    assert member.adopt(verdict(Action.COMMIT)) is Resolution.COMMITTED
    assert member.completed == 1


def test_donated_to_a_rank_whose_small_result_is_incomplete() -> None:
    member = in_operation(SMALL)
    assert member.adopt(verdict(Action.COMMIT)) is Resolution.DONATED
    assert member.completed == 1


def test_missed_by_a_rank_whose_large_result_is_incomplete() -> None:
    """Only after it was silent: a reporter that is not ready keeps a large operation from being committed."""
    member = in_operation(LARGE)
    assert member.adopt(verdict(Action.COMMIT)) is Resolution.MISSED
    assert (member.completed, member.operation) == (0, None)


@pytest.mark.parametrize("action", list(Action))
def test_a_verdict_on_a_later_operation_commits_the_one_in_progress(action: Action) -> None:
    member = in_operation(SMALL)
    assert member.adopt(verdict(action, sequence=2)) is Resolution.DONATED
    assert member.completed == 1


@pytest.mark.parametrize("action", [Action.COMMIT, Action.FAIL])
def test_restarted_when_the_verdict_is_about_an_earlier_operation(action: Action) -> None:
    member = in_operation(SMALL)
    assert member.done(0)
    member.enter(LARGE)
    assert member.opened(0)
    assert member.progressed(0, 2, 0)
    assert member.adopt(verdict(action, sequence=1)) is Resolution.RESTARTED
    assert (member.first_incomplete, member.attempt, member.generation) == (0, 1, 1)
    assert member.operation is not None
    assert member.operation.sequence == 2


def test_a_success_that_failed_for_the_others_is_overruled_and_no_longer_reported_as_done() -> None:
    """This rank completed a small operation and was silent when the others decided."""
    member = in_operation(SMALL)
    assert member.done(0)
    failed = verdict(Action.FAIL)
    assert member.adopt(failed) is None
    assert member.overruled == (failed,)
    assert (member.freeze().done, member.kept) == (0, 0)


# ---------------------------------------------------------------------- late and skipped calls


def test_a_late_call_takes_the_stored_verdict_of_its_operation() -> None:
    member = Member(0, ALL)
    failed = verdict(Action.FAIL)
    assert member.adopt(failed) is None
    assert member.enter(LARGE) == (Entry.SETTLED, failed)
    assert member.enter(LARGE) == (Entry.START, None)
    assert member.operation is not None
    assert member.operation.sequence == 2


def test_a_skipped_call_does_not_shift_what_follows() -> None:
    """The operation that failed was never called here; the call that comes instead is the group's next one."""
    member = Member(0, ALL)
    member.adopt(verdict(Action.FAIL))
    assert member.enter(SMALL) == (Entry.START, None)
    assert member.operation is not None
    assert member.operation.sequence == 2


def test_several_verdicts_wait_for_a_rank_that_is_far_behind() -> None:
    member = Member(0, ALL)
    first, second = verdict(Action.FAIL), verdict(Action.FAIL, sequence=2, generation=1, fingerprints=(8,))
    member.adopt(first)
    member.adopt(second)
    assert member.enter(LARGE) == (Entry.SETTLED, first)
    assert member.enter(SMALL) == (Entry.SETTLED, second)


def test_skipping_to_the_second_of_two_verdicts() -> None:
    member = Member(0, ALL)
    second = verdict(Action.FAIL, sequence=2, generation=1, fingerprints=(8,))
    member.adopt(verdict(Action.FAIL))
    member.adopt(second)
    assert member.enter(SMALL) == (Entry.SETTLED, second)


def test_a_stored_verdict_is_taken_also_while_the_next_generation_is_revoked() -> None:
    member = Member(0, ALL)
    failed = verdict(Action.FAIL)
    member.adopt(failed)
    member.freeze()
    assert member.enter(LARGE) == (Entry.SETTLED, failed)


def test_a_second_verdict_on_the_same_operation_does_not_replace_the_first() -> None:
    member = Member(0, ALL)
    first = verdict(Action.FAIL)
    member.adopt(first)
    member.adopt(verdict(Action.COMMIT, generation=1))
    assert member.settled == (first,)


def test_calls_that_the_others_completed_without_this_rank_are_missed_one_by_one() -> None:
    member = Member(0, ALL)
    third = verdict(Action.FAIL, sequence=3)
    member.adopt(third)
    assert member.enter(LARGE) == (Entry.MISSED, None)
    assert member.enter(LARGE) == (Entry.MISSED, None)
    assert member.enter(LARGE) == (Entry.SETTLED, third)


def test_a_resume_that_is_awaited_of_a_rank_that_has_not_called_yet_settles_nothing() -> None:
    member = Member(0, ALL)
    assert member.adopt(verdict(Action.RESUME)) is None
    assert member.enter(LARGE) == (Entry.START, None)
    assert member.generation == 1
