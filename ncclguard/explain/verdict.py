"""What a naming rule answers: the culprits, how sure, the facts that carry it, and what would overturn it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclguard.explain.facts import Fact, Group, Work
from ncclguard.outcome import Cause


@dataclass(slots=True)
class Verdict:
    """Who held the others up. `culprits` is empty when it cannot be proved; `suspects` are worth a look besides.

    `facts` carry it; `overturned` says, in sentences, what would prove it wrong.
    """

    culprits: tuple[int, ...] = ()
    cause: Cause = Cause.UNKNOWN
    confidence: str = "low"
    rule: str = "none"
    reason: str = ""
    facts: list[Fact] = field(default_factory=list)
    suspects: tuple[int, ...] = ()
    sides: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    work: Work | None = None
    group: Group | None = None
    overturned: list[str] = field(default_factory=list)


def ranks_text(ranks: tuple[int, ...] | list[int] | set[int]) -> str:
    """Return "rank 3" or "ranks 0, 4"; long lists are shortened.

    Example:
        >>> ranks_text((0, 4))
        'ranks 0, 4'
    """
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(str(number) for number in numbers[:16])
    return f"ranks {shown}" + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
