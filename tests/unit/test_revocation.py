"""How long a revoked generation waits for a member that does not answer."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from ncclguard.agreement.decision import Action, Operation, TroubleKind
from ncclguard.agreement.protocol import Entry
from ncclguard.agreement.revocation import Revocation
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.agreement.store import AgreementStore
from ncclguard.agreement.timing import Timing
from ncclguard.outcome import Cause

REVOKED = 100.0
PATIENCE = Timing().patience


def seat_of_rank_0() -> Seat:
    return Seat("group", 0, (0, 1, 2))


def step(revocation: Revocation, now: float) -> bool:
    """Work on it as rank 0's monitor; ranks 1 and 2 never answer and nothing is known of them."""
    return revocation.step(now, {}, lambda seat, report: report, lambda rank: Cause.UNKNOWN, lambda *known: "")


def test_the_processes_of_silent_ranks_are_looked_for_before_they_are_judged() -> None:
    """A far process needs a moment to answer, and one after the other they would not have it."""
    seat = seat_of_rank_0()
    sought: list[tuple[list[int], float, float]] = []
    revocation = Revocation(AgreementStore(HashStore()), seat, 0, 0, REVOKED)

    def work(now: float) -> bool:
        return revocation.step(
            now,
            {},
            lambda seat, report: report,
            lambda rank: Cause.STUCK if sought else Cause.UNKNOWN,
            lambda *known: "",
            seek=lambda ranks, since: sought.append((list(ranks), since, now)),
        )

    enter(seat, 0.0)
    seat.trouble(0, TroubleKind.DEADLINE, "not complete")
    assert not work(REVOKED) and not sought  # they may only be a little slow to answer
    assert not work(REVOKED + PATIENCE / 2 + 0.01)
    assert not work(REVOKED + PATIENCE - 0.1)
    assert work(REVOKED + PATIENCE)
    assert [(ranks, since) for ranks, since, _ in sought] == 3 * [([1, 2], REVOKED + PATIENCE / 2 + 0.01)]
    assert revocation.verdict is not None
    assert dict(revocation.verdict.culprits) == {1: Cause.STUCK, 2: Cause.STUCK}


def enter(seat: Seat, budget: float) -> None:
    call = OpenCall("barrier()", 0.0, 0.0, 0)
    entry, _ = seat.member.enter(Operation(sequence=0, fingerprint=1, text="barrier()", closing=False))
    assert entry is Entry.START
    call.entered, call.deadline = time.monotonic(), time.monotonic() + budget
    seat.call = call


def test_with_nobody_in_a_call_silence_is_over_after_patience_and_nobody_is_blamed() -> None:
    """Else the group could never be used again: every later call would wait for this verdict."""
    seat = seat_of_rank_0()
    revocation = Revocation(AgreementStore(HashStore()), seat, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + PATIENCE - 0.01)
    assert step(revocation, REVOKED + PATIENCE)
    assert seat.member.generation == 1
    assert seat.member.enter(Operation(sequence=0, fingerprint=1, text="barrier()", closing=False))[0] is Entry.START


def test_a_call_that_was_given_up_has_no_time_left() -> None:
    seat = seat_of_rank_0()
    enter(seat, 0.0)
    seat.trouble(0, TroubleKind.DEADLINE, "not complete")
    seat.member.give_up()
    seat.call = None
    revocation = Revocation(AgreementStore(HashStore()), seat, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert step(revocation, REVOKED + PATIENCE)
    assert revocation.verdict is not None
    assert revocation.verdict.action is Action.FAIL
    assert revocation.verdict.culprit_ranks == (1, 2)


@pytest.mark.parametrize("budget", [5.0, 50.0])
def test_a_call_with_time_left_is_waited_for_until_its_deadline(budget: float) -> None:
    seat = seat_of_rank_0()
    enter(seat, budget)
    revocation = Revocation(AgreementStore(HashStore()), seat, 0, 0, REVOKED)
    assert not step(revocation, REVOKED)
    assert not step(revocation, REVOKED + budget - 1.0 + PATIENCE)
    assert step(revocation, REVOKED + budget + PATIENCE)
