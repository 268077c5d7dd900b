"""Answers of ranks, for the tests of what they add up to."""

from __future__ import annotations

from ncclguard.protocol.decision import Operation, Phase, Report, Trouble


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
