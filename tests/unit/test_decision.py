"""What the reports of a revoked generation add up to: every cause, every action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import (
    PRECEDENCE,
    Action,
    Departure,
    Phase,
    Report,
    Trouble,
    TroubleKind,
    Verdict,
    Waiting,
    Watched,
    decide,
    waits_outside,
)
from tests.unit.reports import entered, outside

DEADLINE = Trouble(TroubleKind.DEADLINE)
TRANSPORT = Trouble(TroubleKind.TRANSPORT)
RAISED = Trouble(TroubleKind.RAISED, "ValueError: bad batch")


def verdict_on(
    *reports: Report, departed: Mapping[int, Departure] | None = None, silent: Mapping[int, Cause] | None = None
) -> Verdict:
    gone, quiet = departed or {}, silent or {}
    members = sorted({r.rank for r in reports} | set(gone) | set(quiet))
    return decide(0, members, {r.rank: r for r in reports}, gone, quiet, coordinator=members[0])


def test_ranks_that_wait_in_torchs_own_collective_for_one_in_the_operation_are_not_late() -> None:
    """The README's pattern: rank 1 has fewer batches and is in the barrier, the others are in DDP's all-reduce."""
    step = Waiting("0:gloo", (0, 1, 2), 12, 5, "all_reduce(number 12)", 4.9)

    def found(issued: int, inside: tuple[int, ...] = (1,), age: float = 4.9) -> Verdict:
        reports = {
            rank: replace(entered(rank, trouble=DEADLINE, age=5.0), watched=Watched(issued={"0:gloo": issued}))
            if rank in inside
            else replace(outside(rank), watched=Watched((replace(step, age=age),), issued={"0:gloo": 12}))
            for rank in range(3)
        }
        return verdict_on(*waits_outside(reports).values())

    assert (found(11).cause, found(11).culprits) == (Cause.DIVERGED, ((1, Cause.DIVERGED),))
    assert found(11).sides == (("all_reduce(number 12)", (0, 2)), ("op7", (1,)))
    assert found(11, inside=(0, 2)).culprits == ((1, Cause.DIVERGED),)
    late = ((0, Cause.LATE), (2, Cause.LATE))
    assert found(12).culprits == late, "rank 1 has issued it: what the others wait for is their own device"
    assert found(11, age=0.1).culprits == late, "a step in passing"


def test_a_rank_that_makes_a_group_waits_for_others_and_is_not_named() -> None:
    waits = outside(2, elsewhere="new_group(ranks 2-3)")
    found = verdict_on(*(entered(rank, trouble=DEADLINE) for rank in (0, 1, 3)), waits)
    assert (found.cause, found.culprits) == (Cause.DIVERGED, ())
    assert found.sides == (("op7", (0, 1, 3)), ("new_group(ranks 2-3)", (2,)))


def test_a_rank_that_was_held_up_in_another_group_for_the_one_at_fault_is_not_late() -> None:
    """Rank 3 left a call of ranks 2 and 3 out and went on to the barrier, which rank 2 reached when that had failed."""
    held = replace(entered(2, age=0.03, trouble=DEADLINE), elsewhere="all_reduce() of group 2", free_for=0.04)
    found = verdict_on(*(entered(rank, age=5.0, trouble=DEADLINE) for rank in (0, 1, 3)), held)
    assert (found.cause, found.culprits) == (Cause.DIVERGED, ())
    assert found.sides == (("op7", (0, 1, 3)), ("all_reduce() of group 2", (2,)))
    tardy = entered(2, age=0.03, trouble=DEADLINE)
    assert verdict_on(*(entered(rank, age=5.0) for rank in (0, 1, 3)), tardy).culprits == ((2, Cause.LATE),)


ENDED = [Departure(rank, Cause.LOST, "was sent SIGTERM", terminated=True) for rank in range(3)]


def test_a_rank_that_waits_elsewhere_is_not_named_beside_one_that_it_may_wait_for_there() -> None:
    """A trainer waits for an engine's part of a bucket, and the other engines are in the next call already."""
    held = replace(outside(0), elsewhere="broadcast(uint8[32], src=0) of group weights (ranks 0-3)")
    others = [entered(rank, trouble=DEADLINE, age=5.0) for rank in (1, 3)]
    assert verdict_on(held, *others, silent={2: Cause.STUCK}).culprits == ((2, Cause.STUCK),)
    late = verdict_on(held, *others, outside(2))
    assert late.culprits == ((2, Cause.LATE),)
    assert verdict_on(held, *others).culprits == ((0, Cause.DIVERGED),), "nobody else is missing"


def test_what_one_caller_was_told_without_a_verdict_holds_for_all_of_them() -> None:
    """The store was stopped: rank 2 has given up, and rank 1 is still there when the store goes on."""
    given_up = replace(entered(2, trouble=DEADLINE), returned=True)
    late = verdict_on(outside(0), entered(1, trouble=DEADLINE, age=5.0), given_up)
    assert (late.action, late.cause, late.culprits) == (Action.FAIL, Cause.UNKNOWN, ())
    came_last = verdict_on(*(entered(rank, trouble=DEADLINE, age=5.0) for rank in (0, 1, 3)), given_up)
    assert came_last.culprits == (), "its age is not known any more"
    silent = verdict_on(entered(1, trouble=DEADLINE, age=5.0), given_up, silent={0: Cause.STUCK})
    assert (silent.cause, silent.culprits) == (Cause.UNKNOWN, ())
    raised = verdict_on(replace(outside(0), trouble=RAISED), entered(1, trouble=DEADLINE, age=5.0), given_up)
    assert raised.culprits == ((0, Cause.FAILED),), "which it says itself"


def test_where_all_ranks_were_sent_sigterm_nobody_is_named_and_nothing_is_tried_again() -> None:
    found = verdict_on(*(entered(rank, trouble=TRANSPORT) for rank in range(3)), departed=dict(enumerate(ENDED)))
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.UNKNOWN, ())
    alive = verdict_on(*(entered(rank, trouble=TRANSPORT) for rank in range(3)), departed={2: ENDED[2]})
    assert alive.culprits == ((2, Cause.LOST),)


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


def test_a_rank_that_its_launcher_ended_is_not_named_beside_one_that_never_answered() -> None:
    ended = {2: Departure(2, Cause.LOST, "was sent SIGTERM", terminated=True)}
    found = verdict_on(entered(0, trouble=DEADLINE), departed=ended, silent={1: Cause.STUCK})
    assert (found.cause, found.culprits) == (Cause.STUCK, ((1, Cause.STUCK),))
    assert verdict_on(entered(0, trouble=DEADLINE), departed=ended).culprits == ((2, Cause.LOST),)


def test_departure_and_exception_are_both_named_and_the_lost_rank_gives_the_cause() -> None:
    found = verdict_on(entered(0), entered(1, trouble=RAISED), departed={2: Departure(2, Cause.LOST)})
    assert found.cause is Cause.LOST
    assert found.culprits == ((1, Cause.FAILED), (2, Cause.LOST))


def test_who_gave_up_a_section_because_of_another_verdict_is_named_only_where_nobody_else_is() -> None:
    gave_up = entered(1, trouble=Trouble(TroubleKind.GAVE_UP, "PeerLost: rank 2 lost"))
    found = verdict_on(entered(0), gave_up, departed={2: Departure(2, Cause.LOST)})
    assert (found.cause, found.culprits) == (Cause.LOST, ((2, Cause.LOST),))
    found = verdict_on(entered(0), gave_up, entered(2, trouble=RAISED))
    assert (found.cause, found.culprits) == (Cause.FAILED, ((2, Cause.FAILED),))
    found = verdict_on(entered(0), gave_up, entered(2))
    assert (found.cause, found.culprits) == (Cause.FAILED, ((1, Cause.FAILED),))


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


def test_the_root_of_a_broadcast_is_not_right_by_itself() -> None:
    """It may be the one that left a broadcast out, and is in the next one, which has another shape: no side is wrong."""
    sides = [
        replace(entered(rank, number), operation=replace(entered(rank, number).operation, needs=0))  # type: ignore[type-var]
        for rank, number in enumerate((9, 7))
    ]
    assert verdict_on(*sides).culprits == ()


def test_late_names_the_ranks_that_answered_without_having_entered() -> None:
    found = verdict_on(entered(0, trouble=DEADLINE), entered(1), outside(2), outside(3))
    assert (found.action, found.cause) == (Action.FAIL, Cause.LATE)
    assert found.culprits == ((2, Cause.LATE), (3, Cause.LATE))
    assert found.deadline_expired


def test_the_deadline_of_an_earlier_operation_blames_nobody_for_the_next() -> None:
    """Rank 1 is still in operation 1, whose deadline has passed there; the others have completed it and are in 2."""
    found = verdict_on(entered(0, sequence=2), entered(1, sequence=1, trouble=DEADLINE))
    assert (found.action, found.sequence, found.culprits) == (Action.RESUME, 2, ())


def test_a_rank_that_is_held_in_an_earlier_operation_is_not_late() -> None:
    """Its data have arrived, for the others have completed operation 1; what they sent it is lost."""
    found = verdict_on(entered(0, sequence=2, trouble=DEADLINE), entered(1, sequence=2), entered(2, sequence=1))
    assert (found.action, found.sequence, found.cause, found.culprits) == (Action.FAIL, 2, Cause.NETWORK, ())
    beside = verdict_on(
        entered(0, sequence=2, trouble=DEADLINE), entered(1, sequence=1), silent={2: Cause.UNKNOWN, 3: Cause.UNKNOWN}
    )
    assert beside.culprits == ((2, Cause.UNKNOWN), (3, Cause.UNKNOWN))


def test_a_silent_rank_that_runs_is_not_named_and_nobody_is_in_its_place() -> None:
    """It may have come as well, and rank 2 came last only as far as is known; who has not come is named all the same."""
    found = verdict_on(
        entered(0, age=9.0, trouble=DEADLINE), entered(1, age=9.0), entered(2, age=1.0), silent={3: None}
    )
    assert (found.action, found.cause, found.culprits) == (Action.FAIL, Cause.UNKNOWN, ())
    beside = verdict_on(entered(0, trouble=DEADLINE), outside(1), silent={2: Cause.STUCK, 3: None})
    assert beside.culprits == ((1, Cause.LATE), (2, Cause.STUCK))


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


@pytest.mark.parametrize("ages", [(10.0, 1.0), (10.0, 10.0, 1.0, 1.0), (10.0, 2.0, 1.0, 0.5)])
def test_ranks_that_came_when_the_wait_was_almost_over_are_late_as_if_they_had_not_come(
    ages: tuple[float, ...],
) -> None:
    reports = [entered(rank, age=age, trouble=DEADLINE if age == 10.0 else None) for rank, age in enumerate(ages)]
    found = verdict_on(*reports)
    tardy = [rank for rank, age in enumerate(ages) if age < 2.5]
    assert (found.action, found.cause, found.culprits) == (
        Action.FAIL,
        Cause.LATE,
        tuple((rank, Cause.LATE) for rank in tardy),
    )
    came = [entered(rank, age=age, trouble=DEADLINE) for rank, age in enumerate(ages) if rank not in tardy]
    assert verdict_on(*came, *map(outside, tardy)).culprits == found.culprits


@pytest.mark.parametrize("ages", [(10.0, 9.0, 6.0), (10.0, 4.0), (10.0, 10.0, 4.0, 4.0), (10.0,)])
def test_network_names_nobody_when_all_have_entered_and_none_came_far_behind(ages: tuple[float, ...]) -> None:
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


@pytest.mark.parametrize(
    ("texts", "members", "named"),
    [
        (("all_reduce(number 9)",) * 3, (0, 1, 2, 3), (0,)),
        (("all_reduce(number 9)",) * 3, (1, 2, 3, 4), ()),  # they may wait for another one there
        (("all_reduce(number 9)", "all_reduce(number 9)", "broadcast(number 9)"), (0, 1, 2, 3), ()),
        (("all_reduce(number 9)",) * 1, (0, 1), ()),  # one against one
    ],
)
def test_who_calls_the_guard_where_most_call_torchs_own_is_odd(
    texts: tuple[str, ...], members: tuple[int, ...], named: tuple[int, ...]
) -> None:
    """Rank 0 is in a guarded barrier, and the others are in a step of DDP, which waits for it."""
    others = []
    for rank, text in enumerate(texts, 1):
        waits = (Waiting("0:gloo", members, 9, 1, text, 5.0),)
        others.append(replace(outside(rank, elsewhere=text), awaited=members, watched=Watched(waits=waits)))
    found = verdict_on(entered(0, trouble=DEADLINE), *others)
    assert (found.culprit_ranks, str(found.cause)) == (named, "diverged"), found
    assert len(found.sides) == 1 + len({*texts})


@pytest.mark.parametrize(
    ("awaited", "named"), [((0, 1, 2), (2,)), ((), ()), ((0, 1), ())], ids=["known", "unknown", "others only"]
)
def test_who_is_alone_on_a_group_while_the_rest_waits_for_it_on_another_is_odd(
    awaited: tuple[int, ...], named: tuple[int, ...]
) -> None:
    """Of the other group's verdict the same rank is the culprit: it is one fault."""
    others = [replace(outside(rank, elsewhere="all_reduce() of group 1"), awaited=awaited) for rank in (0, 1)]
    found = verdict_on(*others, entered(2, trouble=DEADLINE))
    assert (found.culprit_ranks, str(found.cause)) == (named, "diverged"), found


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("awaited", "cause"), [((0, 1, 2), Cause.DIVERGED), ((2, 3), Cause.EXITED)], ids=["for these", "for another"]
)
def test_a_rank_that_leaves_after_it_has_waited_for_the_others_elsewhere_is_astray(
    late: bool, awaited: tuple[int, ...], cause: Cause
) -> None:
    """Its program ends with that group's verdict, a moment before the others' limit passes, or long before."""
    waiting = [entered(rank, trouble=DEADLINE if late else None) for rank in (0, 1)]
    found = verdict_on(
        *waiting,
        replace(outside(2, elsewhere="all_reduce() of group 2"), awaited=awaited, free_for=0.001),
        departed={2: Departure(2, Cause.EXITED, "ended its program")},
    )
    assert found.culprits == ((2, cause),), found
    assert len(found.sides) == (2 if cause is Cause.DIVERGED else 0)
