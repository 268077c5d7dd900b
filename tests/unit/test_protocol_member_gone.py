"""One rank's side of the agreement once members are gone, or calls have returned before there was a verdict."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.engine import outcomes
from ncclguard.engine.call import Call
from ncclguard.evaluation.runner import reported_as
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import NOBODY, Action, Operation, Phase, Trouble, TroubleKind
from ncclguard.protocol.member import Entry, Member, Resolution
from tests.unit.members import ALL, LARGE, SMALL, in_operation, verdict

Gone = tuple[tuple[int, Cause], ...]
GONE: Gone = ((2, Cause.LOST),)


def test_a_lost_member_fails_the_next_calls_at_once_and_each_uses_up_its_number() -> None:
    member = in_operation()
    member.adopt(verdict(Action.FAIL, departed=GONE))
    for next_sequence in (3, 4):
        assert member.enter(LARGE) == (Entry.LOST, None)
        assert member.next_sequence == next_sequence
    assert member.lost == GONE


def test_a_call_that_may_shrink_leaves_the_lost_member_out() -> None:
    member = in_operation()
    member.adopt(verdict(Action.FAIL, departed=GONE))
    assert member.enter(Operation(0, 7, shrink=True)) == (Entry.START, None)
    assert (member.participants, member.lost) == ((0, 1), ())


def test_a_shrunk_generation_has_lost_nobody() -> None:
    member = in_operation()
    assert member.adopt(verdict(Action.RESUME, participants=(0, 1), departed=GONE)) is Resolution.RESUMED
    assert (member.participants, member.lost, member.fenced) == ((0, 1), (), False)


@pytest.mark.parametrize(("shrink", "expected"), [(False, Resolution.LOST), (True, Resolution.RESTARTED)])
def test_the_running_call_is_lost_or_shrinks_when_the_verdict_on_an_earlier_one_finds_a_member_gone(
    shrink: bool, expected: Resolution
) -> None:
    member = in_operation(SMALL)
    assert member.done(0)
    member.enter(Operation(0, 7, shrink=shrink))
    assert member.adopt(verdict(Action.COMMIT, departed=GONE)) is expected
    assert member.participants == ((0, 1) if shrink else ALL)
    assert (member.operation is None) is not shrink


def test_a_rank_that_was_left_out_is_fenced_for_good() -> None:
    member = in_operation()
    assert member.adopt(verdict(Action.RESUME, participants=(1, 2), departed=((0, Cause.LOST),))) is Resolution.FENCED
    assert member.operation is None
    for _ in range(2):
        assert member.enter(LARGE) == (Entry.FENCED, None)


def test_a_rank_that_was_left_out_while_it_was_elsewhere_is_fenced_at_its_next_call() -> None:
    member = Member(0, ALL)
    assert member.adopt(verdict(Action.RESUME, participants=(1, 2), departed=((0, Cause.LOST),))) is None
    assert member.enter(LARGE) == (Entry.FENCED, None)


OWN, OTHER = (0, Cause.LOST), (2, Cause.LOST)


@pytest.mark.parametrize(
    ("terminated", "named", "before", "culprits"),
    [
        ("was sent SIGTERM", (OTHER,), (), (2,)),
        ("was sent SIGTERM", (OWN,), (OTHER,), (2,)),  # this operation had been tried again without rank 2
        ("was sent SIGTERM", (OWN, (1, Cause.LOST)), (OTHER,), (2,)),
        ("was sent SIGTERM", (OWN, (1, Cause.LOST)), (), ()),
        ("", (OWN,), (OTHER,), (0,)),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_a_rank_that_a_launcher_ended_is_not_named_for_the_one_that_was_lost(
    terminated: str, named: Gone, before: Gone, culprits: tuple[int, ...], inside: bool
) -> None:
    """torchrun sends SIGTERM to rank 0 because rank 2 is gone: rank 0 announces it, and rank 1 goes on alone."""
    state = GroupState("0:cpu", 0, ALL)
    state.terminated = terminated
    state.member = in_operation() if inside else state.member
    call = Call("all_reduce", 3, 12, True, LARGE)
    fence = replace(verdict(Action.RESUME, participants=(1,), departed=(OWN, OTHER)), culprits=named)
    resolution = state.member.adopt(fence)
    if inside:
        assert resolution is Resolution.FENCED
        opened = OpenCall(call.text, 0.0, 0.0, 0, sequence=1)
        outcome = outcomes.from_verdict(resolution, fence, state, call, opened, False, dict(before))
    else:
        entry, _ = state.member.enter(LARGE)
        outcome = outcomes.not_started(entry, state, call, 1, 0.0, None, {})
        culprits = tuple(rank for rank in culprits if (rank, Cause.LOST) not in before)
    assert (outcome.cause, outcome.culprits) == (Cause.LOST if culprits else Cause.UNKNOWN, culprits)
    assert not outcome.agreed
    assert terminated in str(outcome.incident)


@pytest.mark.parametrize(
    ("named", "terminated", "departed", "culprits"),
    [
        ((OTHER,), "was sent SIGTERM", (OWN, (1, Cause.LOST), OTHER), (2,)),
        ((OTHER,), "", (OTHER,), (2,)),
        ((), "was sent SIGTERM", (OWN, (1, Cause.LOST), OTHER), ()),  # all were ended from outside
        ((), "", ((2, Cause.EXITED),), (2,)),  # it left after it had completed what was committed
    ],
)
def test_a_call_after_a_loss_names_neither_itself_nor_those_that_the_launcher_ended_for_it(
    named: Gone, terminated: str, departed: Gone, culprits: tuple[int, ...]
) -> None:
    state = GroupState("0:cpu", 0, ALL)
    state.terminated = terminated
    state.member = in_operation()
    state.member.adopt(replace(verdict(Action.FAIL, departed=departed), culprits=named))
    entry, _ = state.member.enter(LARGE)
    assert entry is Entry.LOST
    call, missing = Call("all_reduce", 3, 12, True, LARGE), dict(state.member.missing(LARGE))
    outcome = outcomes.not_started(entry, state, call, 2, 0.0, None, missing)
    assert outcome.culprits == culprits


@pytest.mark.parametrize(("of", "reported"), [(2, "5e-0-3.0"), (1, "")])
def test_a_call_after_a_loss_refers_to_the_incident_that_told_of_it(of: int, reported: str) -> None:
    """What rank 0 says by itself has no report; rank 2 is gone, and an incident of another rank does not tell of it."""
    state = GroupState("0:cpu", 0, ALL)
    state.member = in_operation()
    incident = Incident(
        id="5e-0-3.0", op="barrier", op_id="0/3", group="0", generation=0, cause=Cause.EXITED, culprits=(of,),
        agreed=True, deadline_expired=False, attempts=1, participants=ALL, summary="gone", advice="look",
    )  # fmt: skip
    state.adopt(replace(verdict(Action.FAIL, departed=((2, Cause.EXITED),)), incident=incident.to_json()), None)
    for text, advised in (("barrier()", True), ("barrier(name='evaluation e at step 1, beginning of try 1')", False)):
        operation = replace(LARGE, text=text, needs=NOBODY)
        call = Call("barrier", 0, 0, True, operation)
        outcome = outcomes.not_started(Entry.LOST, state, call, 2, 0.0, None, dict(state.member.missing(operation)))
        assert (outcome.culprits, reported_as(outcome.incident)) == ((2,), reported)
        assert ('on_lost="shrink"' in str(outcome.incident)) == advised  # an evaluation does not take it


# ---------------------------------------------------------------------- calls that returned without a verdict


def test_giving_up_keeps_what_was_promised_until_the_verdict() -> None:
    """The closing round may have been sent: a report of NONE would let the others fail what one of them has completed."""
    member = in_operation(LARGE, ready=True)
    member.in_trouble(0, Trouble(TroubleKind.DEADLINE))
    member.give_up()
    assert member.freeze().phase is Phase.READY
    assert member.adopt(verdict(Action.COMMIT)) is None
    assert (member.operation, member.abandoned, member.frozen) == (None, (), False)


def test_a_call_that_is_forgone_keeps_its_number_and_is_failed_for_the_others() -> None:
    member = in_operation()
    member.in_trouble(0, Trouble(TroubleKind.DEADLINE))
    member.give_up()
    assert member.enter(SMALL) == (Entry.WAIT, None)
    member.skip(SMALL)
    assert member.next_sequence == 3
    member.adopt(verdict(Action.FAIL))
    report = member.freeze()
    assert report.operation == SMALL.at(2)
    assert report.trouble is not None
    assert report.trouble.kind is TroubleKind.UNANSWERED
    assert member.adopt(verdict(Action.FAIL, sequence=2, generation=1)) is None
    assert member.enter(LARGE) == (Entry.START, None)
    assert member.operation is not None
    assert member.operation.sequence == 3


def test_what_was_given_up_is_not_resumed() -> None:
    member = in_operation()
    member.in_trouble(0, Trouble(TroubleKind.TRANSPORT))
    member.give_up()
    assert member.adopt(verdict(Action.RESUME)) is None
    assert member.frozen
    assert member.trouble is not None
    assert member.trouble.kind is TroubleKind.UNANSWERED
    assert member.enter(LARGE) == (Entry.WAIT, None)


def test_what_was_given_up_is_dropped_when_a_lost_member_ends_it_for_the_others_too() -> None:
    member = in_operation()
    member.in_trouble(0, Trouble(TroubleKind.DEADLINE))
    member.give_up()
    member.skip(LARGE)
    member.adopt(verdict(Action.FAIL, departed=GONE))
    assert (member.abandoned, member.operation, member.frozen) == ((), None, False)
    assert member.enter(LARGE) == (Entry.LOST, None)


def test_a_rank_that_gave_up_and_was_left_out_is_fenced() -> None:
    member = in_operation()
    member.in_trouble(0, Trouble(TroubleKind.DEADLINE))
    member.give_up()
    member.adopt(verdict(Action.RESUME, participants=(1, 2), departed=((0, Cause.LOST),)))
    assert member.enter(LARGE) == (Entry.FENCED, None)
