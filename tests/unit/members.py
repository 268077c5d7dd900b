"""One rank in an operation and verdicts on it, for the tests of its side of the agreement."""

from __future__ import annotations

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Action, Operation, Verdict
from ncclguard.protocol.member import Entry, Member

LARGE = Operation(0, 7, closing=True)
SMALL = Operation(0, 8, closing=False)
ALL = (0, 1, 2)


def in_operation(operation: Operation = LARGE, *, ready: bool = False) -> Member:
    """A member whose first call is this one, past the opening round."""
    member = Member(0, ALL)
    assert member.enter(operation) == (Entry.START, None)
    assert member.opened(0)
    if ready:
        assert member.ready(0)
    return member


def verdict(
    action: Action,
    sequence: int = 1,
    generation: int = 0,
    *,
    fingerprints: tuple[int, ...] = (7,),
    participants: tuple[int, ...] = ALL,
    departed: tuple[tuple[int, Cause], ...] = (),
    from_piece: int = 0,
    attempt: int = 1,
) -> Verdict:
    cause = None if action is Action.COMMIT else Cause.NETWORK
    return Verdict(
        generation, sequence, action, cause, participants=participants, departed=departed, from_piece=from_piece,
        attempt=attempt, fingerprints=fingerprints,
    )  # fmt: skip
