"""How long a revoked generation waits for a member that does not answer."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from ncclguard.agreement.decision import Action, Operation, TroubleKind
from ncclguard.agreement.protocol import Entry
from ncclguard.agreement.revocation import PATIENCE, Revocation
from ncclguard.agreement.seat import OpenCall, Seat
from ncclguard.agreement.store import AgreementStore
from ncclguard.outcome import Cause

REVOKED = 100.0


def seat_of_rank_0() -> Seat:
    return Seat("group", 0, (0, 1, 2))


def step(revocation: Revocation, now: float) -> bool:
    """Work on it as rank 0's monitor; ranks 1 and 2 never answer and nothing is known of them."""
    return revocation.step(now, {}, lambda seat, report: report, lambda rank: Cause.UNKNOWN, lambda *known: "")


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
