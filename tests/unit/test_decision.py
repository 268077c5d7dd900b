"""What the reports of a revoked generation add up to: every cause, every action, and what must hold for any set of reports."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclguard.agreement.decision import (
    PRECEDENCE,
    Action,
    Departure,
    Operation,
    Phase,
    Report,
    Trouble,
    TroubleKind,
    Verdict,
    decide,
)
from ncclguard.outcome import Cause

DEADLINE = Trouble(TroubleKind.DEADLINE)
TRANSPORT = Trouble(TroubleKind.TRANSPORT)
RAISED = Trouble(TroubleKind.RAISED, "ValueError: bad batch")


def entered(
    rank: int,
    fingerprint: int = 7,
    sequence: int = 1,
    *,
    closing: bool = True,
    shrink: bool = False,
    needs: int = -1,
    max_attempts: int = 3,
    phase: Phase = Phase.RUNNING,
    trouble: Trouble | None = None,
    age: float = 10.0,
    first: int = 0,
    restorable: int = 0,
    attempt: int = 1,
) -> Report:
    """The answer of a rank that is in an operation."""
    operation = Operation(sequence, fingerprint, f"op{fingerprint}", closing, shrink, needs, max_attempts)
    return Report(
        rank, 0, done=sequence - 1, operation=operation, phase=phase, first_incomplete=first,
        restorable_from=restorable, attempt=attempt, trouble=trouble, age=age,
    )  # fmt: skip


def outside(rank: int, done: int = 0, elsewhere: str = "", trouble: Trouble | None = None) -> Report:
    """The answer of a rank that is in no operation of this group."""
    return Report(rank, 0, done=done, elsewhere=elsewhere, trouble=trouble)


def verdict_on(
    *reports: Report, departed: Mapping[int, Departure] | None = None, silent: Mapping[int, Cause] | None = None
) -> Verdict:
    gone, quiet = departed or {}, silent or {}
    members = sorted({r.rank for r in reports} | set(gone) | set(quiet))
    return decide(0, members, {r.rank: r for r in reports}, gone, quiet, coordinator=members[0])


# ---------------------------------------------------------------------- commit


def test_commits_when_a_rank_has_completed_it_whatever_else_was_reported() -> None:
    found = verdict_on(outside(0, done=1), entered(1, trouble=DEADLINE, phase=Phase.READY), entered(2, trouble=RAISED))
    assert found.action is Action.COMMIT
    assert (found.sequence, found.cause, found.culprits) == (1, None, ())


def test_commits_a_large_operation_when_every_rank_was_ready() -> None:
    found = verdict_on(*(entered(rank, phase=Phase.READY, trouble=TRANSPORT) for rank in range(3)))
    assert found.action is Action.COMMIT


def test_does_not_commit_while_one_rank_has_promised_never_to_close() -> None:
    found = verdict_on(entered(0, phase=Phase.READY), entered(1, phase=Phase.READY), entered(2, trouble=TRANSPORT))
    assert found.action is Action.RESUME


def test_does_not_commit_when_one_of_the_ready_ranks_has_not_entered() -> None:
    found = verdict_on(entered(0, phase=Phase.READY, trouble=DEADLINE), outside(1))
    assert found.action is Action.FAIL


def test_commits_what_a_departed_rank_had_completed() -> None:
    found = verdict_on(entered(0, closing=False), departed={1: Departure(1, Cause.EXITED, done=1)})
    assert found.action is Action.COMMIT
    assert found.departed == ((1, Cause.EXITED),)


def test_a_revoke_between_two_operations_commits_the_earlier_one_and_blames_nobody() -> None:
    found = verdict_on(outside(0, done=4, trouble=TRANSPORT), outside(1, done=4))
    assert (found.action, found.sequence, found.cause) == (Action.COMMIT, 4, None)


def test_the_verdict_is_about_the_furthest_operation() -> None:
    found = verdict_on(entered(0, sequence=5, trouble=DEADLINE), outside(1, done=4), entered(2, sequence=4))
    assert found.sequence == 5
    assert found.action is Action.FAIL


# ---------------------------------------------------------------------- resume after the transport broke


def test_resumes_at_the_first_piece_that_is_not_complete_everywhere() -> None:
    found = verdict_on(entered(0, first=4, restorable=2, trouble=TRANSPORT), entered(1, first=3, restorable=1))
    assert (found.action, found.from_piece, found.attempt) == (Action.RESUME, 3, 2)
    assert (found.cause, found.culprits) == (Cause.NETWORK, ())
    assert found.participants == (0, 1)


def test_resumes_from_the_start_when_a_rank_has_not_entered_yet() -> None:
    found = verdict_on(entered(0, first=2, trouble=TRANSPORT), outside(1))
    assert (found.action, found.from_piece) == (Action.RESUME, 0)


def test_fails_as_network_when_no_try_is_left() -> None:
    found = verdict_on(entered(0, attempt=3, trouble=TRANSPORT), entered(1, attempt=3))
    assert (found.action, found.cause, found.attempt) == (Action.FAIL, Cause.NETWORK, 3)
    assert not found.deadline_expired


def test_counts_the_tries_of_the_rank_that_made_most() -> None:
    assert verdict_on(entered(0, attempt=1, trouble=TRANSPORT), entered(1, attempt=3)).action is Action.FAIL


def test_a_single_try_allowed_is_never_resumed() -> None:
    assert verdict_on(entered(0, max_attempts=1, trouble=TRANSPORT), entered(1, max_attempts=1)).action is Action.FAIL


def test_fails_when_a_rank_cannot_restore_the_piece_to_start_from() -> None:
    found = verdict_on(entered(0, first=4, restorable=3, trouble=TRANSPORT), entered(1, first=2, restorable=2))
    assert (found.action, found.cause) == (Action.FAIL, Cause.NETWORK)


# ---------------------------------------------------------------------- the causes


def test_failed_names_the_rank_that_raised() -> None:
    found = verdict_on(entered(0), entered(1, trouble=RAISED), entered(2, trouble=TRANSPORT))
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.FAILED, ((1, Cause.FAILED),))


@pytest.mark.parametrize("cause", [Cause.EXITED, Cause.FAILED, Cause.LOST])
def test_a_departed_rank_is_named_with_the_cause_of_its_departure(cause: Cause) -> None:
    found = verdict_on(entered(0), entered(1), departed={2: Departure(2, cause)})
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, cause, ((2, cause),))
    assert found.departed == ((2, cause),)


def test_departure_and_exception_are_both_named_and_the_lost_rank_gives_the_cause() -> None:
    found = verdict_on(entered(0), entered(1, trouble=RAISED), departed={2: Departure(2, Cause.LOST)})
    assert found.cause is Cause.LOST
    assert found.culprits == ((1, Cause.FAILED), (2, Cause.LOST))


def test_diverged_names_those_outside_the_strict_majority_without_waiting_for_a_deadline() -> None:
    found = verdict_on(entered(0), entered(1), entered(2, fingerprint=9, trouble=Trouble(TroubleKind.MISMATCH)))
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.DIVERGED, ((2, Cause.DIVERGED),))
    assert found.sides == (("op7", (0, 1)), ("op9", (2,)))
    assert found.fingerprints == (7, 9)


@pytest.mark.parametrize("fingerprints", [(7, 9), (7, 7, 9, 9), (7, 7, 8, 9), (7, 8, 9)])
def test_without_a_strict_majority_nobody_is_named_and_every_side_is_shown(fingerprints: tuple[int, ...]) -> None:
    found = verdict_on(*(entered(rank, f, trouble=DEADLINE) for rank, f in enumerate(fingerprints)))
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.DIVERGED, ())
    assert sorted(rank for _, ranks in found.sides for rank in ranks) == list(range(len(fingerprints)))


def test_late_names_the_ranks_that_answered_without_having_entered() -> None:
    found = verdict_on(entered(0, trouble=DEADLINE), entered(1), outside(2), outside(3))
    assert (found.action, found.cause) == (Action.FAIL, Cause.LATE)
    assert found.culprits == ((2, Cause.LATE), (3, Cause.LATE))
    assert found.deadline_expired


def test_the_deadline_of_an_earlier_operation_blames_nobody_for_the_next() -> None:
    """Rank 1 is still in operation 1, whose deadline has passed there; the others have completed it and are in 2."""
    found = verdict_on(entered(0, sequence=2), entered(1, sequence=1, trouble=DEADLINE))
    assert (found.action, found.sequence, found.culprits) == (Action.RESUME, 2, ())


def test_a_rank_that_waits_in_another_groups_operation_is_diverged_when_the_others_are_more() -> None:
    found = verdict_on(entered(0, trouble=DEADLINE), entered(1), outside(2, elsewhere="barrier() of group b"))
    assert found.culprits == ((2, Cause.DIVERGED),)
    assert ("barrier() of group b", (2,)) in found.sides


def test_two_sides_that_wait_for_each_other_are_both_shown_and_neither_is_named() -> None:
    found = verdict_on(entered(0, trouble=DEADLINE), outside(1, elsewhere="barrier() of group b"))
    assert (found.cause, found.culprits) == (Cause.DIVERGED, ())
    assert found.sides == (("op7", (0,)), ("barrier() of group b", (1,)))


def test_a_late_rank_is_named_beside_two_sides_of_equal_size() -> None:
    found = verdict_on(entered(0, trouble=DEADLINE), outside(1, elsewhere="b"), outside(2))
    assert found.culprits == ((2, Cause.LATE),)
    assert len(found.sides) == 2


@pytest.mark.parametrize("cause", [Cause.STUCK, Cause.UNKNOWN])
def test_a_silent_rank_is_named_as_what_could_be_seen_of_it(cause: Cause) -> None:
    found = verdict_on(entered(0, trouble=DEADLINE), entered(1), silent={2: cause})
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, cause, ((2, cause),))
    assert found.deadline_expired


def test_silence_alone_names_no_rank_that_answered_although_it_has_not_entered() -> None:
    found = verdict_on(entered(0, trouble=TRANSPORT), outside(1), silent={2: Cause.STUCK})
    assert found.culprits == ((2, Cause.STUCK),)
    assert found.deadline_expired


def test_stuck_timeout_counts_as_a_deadline() -> None:
    found = verdict_on(entered(0, trouble=Trouble(TroubleKind.STUCK)), silent={1: Cause.STUCK})
    assert (found.cause, found.deadline_expired) == (Cause.STUCK, True)


def test_the_rank_that_came_far_behind_the_rest_is_late_although_it_has_entered() -> None:
    found = verdict_on(entered(0, age=10.0, trouble=DEADLINE), entered(1, age=9.0), entered(2, age=4.0))
    assert (found.cause, found.culprits) == (Cause.LATE, ((2, Cause.LATE),))


@pytest.mark.parametrize("ages", [(10.0, 9.0, 6.0), (10.0, 1.0), (10.0, 10.0, 1.0, 1.0), (10.0,)])
def test_network_names_nobody_when_all_have_entered_and_no_minority_came_far_behind(ages: tuple[float, ...]) -> None:
    found = verdict_on(*(entered(rank, age=age, trouble=DEADLINE) for rank, age in enumerate(ages)))
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.NETWORK, ())
    assert found.deadline_expired


def test_what_was_given_up_before_is_failed_as_unknown_and_names_nobody() -> None:
    found = verdict_on(entered(0), entered(1, trouble=Trouble(TroubleKind.UNANSWERED)))
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.UNKNOWN, ())


def test_the_first_cause_in_the_order_of_precedence_is_the_outcomes() -> None:
    assert set(PRECEDENCE) == set(Cause)
    found = verdict_on(entered(0, trouble=DEADLINE), outside(1), silent={2: Cause.STUCK, 3: Cause.UNKNOWN})
    assert found.cause is Cause.STUCK
    assert found.culprits == ((1, Cause.LATE), (2, Cause.STUCK), (3, Cause.UNKNOWN))


# ---------------------------------------------------------------------- shrink


def test_shrink_goes_on_without_the_departed_from_the_first_piece() -> None:
    reports = [entered(rank, shrink=True, first=2, trouble=TRANSPORT) for rank in (0, 1)]
    found = verdict_on(*reports, departed={2: Departure(2, Cause.LOST)})
    assert (found.action, found.participants, found.from_piece, found.attempt) == (Action.RESUME, (0, 1), 0, 2)
    assert (found.cause, found.culprits) == (Cause.LOST, ((2, Cause.LOST),))


def test_shrink_is_not_limited_by_the_tries_for_transport_faults() -> None:
    found = verdict_on(entered(0, shrink=True, max_attempts=1), departed={1: Departure(1, Cause.LOST)})
    assert found.action is Action.RESUME


@pytest.mark.parametrize(
    ("first", "second", "silent"),
    [
        pytest.param({}, {"shrink": False}, {}, id="one caller does not allow it"),
        pytest.param({"needs": 2}, {"needs": 2}, {}, id="the source of the broadcast is gone"),
        pytest.param({}, {"restorable": 1, "first": 2}, {}, id="one rank cannot restore its whole input"),
        pytest.param({}, {"trouble": RAISED}, {}, id="another rank raised"),
        pytest.param({}, {}, {3: Cause.STUCK}, id="another rank is silent"),
        pytest.param({}, {"trouble": DEADLINE}, {}, id="the first deadline has passed"),
    ],
)
def test_shrink_fails_instead(first: dict[str, object], second: dict[str, object], silent: dict[int, Cause]) -> None:
    one = entered(0, **{"shrink": True, **first})  # type: ignore[arg-type]
    two = entered(1, **{"shrink": True, **second})  # type: ignore[arg-type]
    found = verdict_on(one, two, departed={2: Departure(2, Cause.LOST)}, silent=silent)
    assert found.action is Action.FAIL
    assert (2, Cause.LOST) in found.culprits


def test_shrink_after_stuck_timeout_goes_on_when_the_stuck_rank_is_gone_by_then() -> None:
    found = verdict_on(
        entered(0, shrink=True, trouble=Trouble(TroubleKind.STUCK)), departed={1: Departure(1, Cause.LOST)}
    )
    assert found.action is Action.RESUME


def test_shrink_goes_on_when_the_needed_rank_is_another_one() -> None:
    found = verdict_on(entered(0, shrink=True, needs=0), departed={2: Departure(2, Cause.LOST)})
    assert found.action is Action.RESUME


def test_a_rank_that_promised_before_it_left_does_not_take_part_again() -> None:
    reports = [entered(rank, shrink=True) for rank in range(3)]
    found = verdict_on(*reports, departed={2: Departure(2, Cause.EXITED)})
    assert (found.action, found.participants) == (Action.RESUME, (0, 1))


# ---------------------------------------------------------------------- for any reports


@st.composite
def situations(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], dict[int, Report], dict[int, Departure], dict[int, Cause]]:
    """A generation as a coordinator may find it: each member has reported, departed, both, or is silent."""
    members = tuple(range(draw(st.integers(1, 6))))
    furthest = draw(st.integers(1, 3))
    closing, shrink = draw(st.booleans()), draw(st.booleans())
    needs, attempts = draw(st.sampled_from((-1, 0, 1))), draw(st.integers(1, 3))
    kinds = (*([None] * 4), *TroubleKind)
    reports: dict[int, Report] = {}
    departed: dict[int, Departure] = {}
    silent: dict[int, Cause] = {}
    for rank in members:
        how = "reported" if rank == 0 else draw(st.sampled_from(("reported", "reported", "departed", "both", "silent")))
        if how == "silent":
            silent[rank] = draw(st.sampled_from((Cause.STUCK, Cause.UNKNOWN)))
            continue
        if how in ("departed", "both"):
            cause = draw(st.sampled_from((Cause.LOST, Cause.EXITED, Cause.FAILED)))
            departed[rank] = Departure(rank, cause, done=draw(st.integers(0, furthest)))
        if how == "departed":
            continue
        kind = draw(st.sampled_from(kinds))
        trouble = None if kind is None else Trouble(kind)
        sequence = draw(st.integers(max(furthest - 1, 1), furthest))
        if draw(st.booleans()):
            first = draw(st.integers(0, 4))
            phase = draw(st.sampled_from((Phase.RUNNING, Phase.READY))) if closing else Phase.RUNNING
            reports[rank] = entered(
                rank, draw(st.sampled_from((7, 7, 7, 9, 11))), sequence, closing=closing, shrink=shrink, needs=needs,
                phase=phase, trouble=trouble, age=draw(st.floats(0, 100)), first=first,
                restorable=draw(st.integers(0, first)), attempt=attempts,
            )  # fmt: skip
        else:
            reports[rank] = outside(rank, draw(st.integers(0, sequence)), draw(st.sampled_from(("", "", "b"))), trouble)
    return members, reports, departed, silent


Situation = tuple[tuple[int, ...], dict[int, Report], dict[int, Departure], dict[int, Cause]]


def majority(found: Verdict, reports: Mapping[int, Report]) -> int | None:
    """The fingerprint that more than half of those that entered have."""
    prints = [
        r.operation.fingerprint for r in reports.values() if r.operation and r.operation.sequence == found.sequence
    ]
    return next((f for f in set(prints) if 2 * prints.count(f) > len(prints)), None)


@settings(max_examples=400, deadline=None)
@given(situations())
def test_no_rank_that_entered_with_the_majority_is_named_but_one_that_came_last_raised_or_left(s: Situation) -> None:
    members, reports, departed, silent = s
    found = decide(0, members, reports, departed, silent)
    usual = majority(found, reports)
    for rank, cause in found.culprits:
        report = reports.get(rank)
        if report is None or rank in departed or report.operation is None:
            continue
        with_it = report.operation.sequence == found.sequence and report.operation.fingerprint == usual
        raised = report.trouble is not None and report.trouble.kind is TroubleKind.RAISED
        if with_it and not raised:
            assert cause is Cause.LATE
            assert found.deadline_expired
            assert not silent
            assert not found.sides
            assert len(found.culprits) * 2 < len(members)


@settings(max_examples=400, deadline=None)
@given(situations())
def test_what_may_have_been_returned_as_a_success_is_committed_and_nothing_else_is(s: Situation) -> None:
    members, reports, departed, silent = s
    found = decide(0, members, reports, departed, silent)
    phases = [r.phase_at(found.sequence) for r in reports.values()]
    completed = Phase.DONE in phases or any(d.done >= found.sequence for d in departed.values())
    if completed:
        assert found.action is Action.COMMIT
    elif min(phases) < Phase.READY:
        assert found.action is not Action.COMMIT
    if found.action is Action.COMMIT:
        assert found.cause is None
        assert found.culprits == ()
    else:
        assert found.cause is not None


@settings(max_examples=400, deadline=None)
@given(situations())
def test_a_resume_starts_where_every_rank_can_and_takes_along_every_rank_that_is_not_gone(s: Situation) -> None:
    members, reports, departed, silent = s
    found = decide(0, members, reports, departed, silent)
    if found.action is not Action.RESUME:
        assert found.participants == members
        return
    taking_part = [r for r in reports.values() if r.operation and r.operation.sequence == found.sequence]
    assert not silent
    assert not any(r.trouble is not None and r.trouble.kind is TroubleKind.DEADLINE for r in taking_part)
    assert set(members) - set(departed) <= set(found.participants)
    assert all(r.restorable_from <= found.from_piece <= r.first_incomplete for r in taking_part)
    if found.participants != members:
        assert found.from_piece == 0
        assert set(found.participants).isdisjoint(departed)


@settings(max_examples=200, deadline=None)
@given(situations(), st.randoms(use_true_random=False))
def test_the_order_in_which_reports_were_read_changes_nothing(s: Situation, random: object) -> None:
    members, reports, departed, silent = s
    ranks = list(reports)
    random.shuffle(ranks)  # type: ignore[attr-defined]
    shuffled = {rank: reports[rank] for rank in ranks}
    assert decide(0, members, shuffled, departed, silent) == decide(0, members, reports, departed, silent)
