"""How long a revoked generation waits for a member that does not answer."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.coordination.revocation import Revocation
from ncclguard.coordination.store import AgreementStore
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Action, Operation, TroubleKind
from ncclguard.protocol.member import Entry
from ncclguard.protocol.timing import Timing

REVOKED = 100.0
PATIENCE = Timing().patience


def state_of_rank_0() -> GroupState:
    return GroupState("group", 0, (0, 1, 2))


def step(revocation: Revocation, now: float) -> bool:
    """Work on it as rank 0's monitor; ranks 1 and 2 never answer and nothing is known of them."""
    return revocation.step(now, {}, lambda state, report: report, lambda rank: Cause.UNKNOWN, lambda *known: "")


def test_the_processes_of_silent_ranks_are_looked_for_before_they_are_judged() -> None:
    """A far process needs a moment to answer, and one after the other they would not have it."""
    state = state_of_rank_0()
    sought: list[tuple[list[int], float, float]] = []
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)

    def work(now: float) -> bool:
        return revocation.step(
            now,
            {},
            lambda state, report: report,
            lambda rank: Cause.STUCK if sought else Cause.UNKNOWN,
            lambda *known: "",
            seek=lambda ranks, since: sought.append((list(ranks), since, now)),
        )

    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    assert not work(REVOKED) and not sought  # they may only be a little slow to answer
    assert not work(REVOKED + PATIENCE / 2 + 0.01)
    assert not work(REVOKED + PATIENCE - 0.1)
    assert work(REVOKED + PATIENCE)
    assert [(ranks, since) for ranks, since, _ in sought] == 3 * [([1, 2], REVOKED + PATIENCE / 2 + 0.01)]
    assert revocation.verdict is not None
    assert dict(revocation.verdict.culprits) == {1: Cause.STUCK, 2: Cause.STUCK}


def enter(state: GroupState, budget: float) -> None:
    call = OpenCall("barrier()", 0.0, 0.0, 0)
    entry, _ = state.member.enter(Operation(sequence=0, fingerprint=1, text="barrier()", closing=False))
    assert entry is Entry.START
    call.entered, call.deadline = time.monotonic(), time.monotonic() + budget
    state.wait_in(call)


def test_with_nobody_in_a_call_silence_is_over_after_patience_and_nobody_is_blamed() -> None:
    """Else the group could never be used again: every later call would wait for this verdict."""
    state = state_of_rank_0()
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + PATIENCE - 0.01)
    assert step(revocation, REVOKED + PATIENCE)
    assert state.member.generation == 1
    assert state.member.enter(Operation(sequence=0, fingerprint=1, text="barrier()", closing=False))[0] is Entry.START


def test_a_call_that_was_given_up_has_no_time_left() -> None:
    state = state_of_rank_0()
    enter(state, 0.0)
    state.trouble(0, TroubleKind.DEADLINE, "not complete")
    state.member.give_up()
    state.wait_in(None)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert step(revocation, REVOKED + PATIENCE)
    assert revocation.verdict is not None
    assert revocation.verdict.action is Action.FAIL
    assert revocation.verdict.culprit_ranks == (1, 2)


@pytest.mark.parametrize("budget", [5.0, 50.0])
def test_a_call_with_time_left_is_waited_for_until_its_deadline(budget: float) -> None:
    state = state_of_rank_0()
    enter(state, budget)
    revocation = Revocation(AgreementStore(HashStore()), state, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + budget - 1.0 + PATIENCE)
    assert step(revocation, REVOKED + budget + PATIENCE)
