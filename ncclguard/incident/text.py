"""Ranks and durations in words, as every message, page and log line has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: Culprits, sides and groups of waiting ranks that are shown one by one.
SHOWN_GROUPS: Final = 8


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for people, runs shortened.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5]), ranks_text([])
    ('rank 3', 'ranks 0-2, 5', 'no rank')
    """
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > 2 * SHOWN_GROUPS:
        parts = [*parts[: 2 * SHOWN_GROUPS], f"... ({len(numbers)} in all)"]
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Seconds, with minutes beside them where that helps."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s ({seconds / 60:.3g} min)"
