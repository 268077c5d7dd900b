"""The last few operations of this process, kept for the case that one of the next fails.

On the path of every call it is one append to a ring; it is turned into plain data only when a report is asked for.
Moments are seconds *before the report*, on this process's own monotonic clock: no clock of two hosts is ever compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

#: Operations kept for each group, and those of all groups together that a report carries.
KEPT: Final = 20
TEXT_LENGTH: Final = 120
_DIGITS: Final = 5  # 10 µs


#: A `Past` that costs half as much to make, for the path of every call.
PastTuple = tuple[int, str, float, float, bool]


class Past(NamedTuple):
    """One finished operation: its place in the group, what it was, begin and end by `time.monotonic()`, and success."""

    sequence: int
    text: str
    begin: float
    end: float
    ok: bool


def snapshot(
    past: Mapping[str, Iterable[PastTuple]], open_calls: Iterable[tuple[str, int, str, float]], now: float
) -> dict[str, Any]:
    """Return the latest operations as small plain data: tables of groups and texts, and rows that point into them.

    `past` by group; `open_calls` are (group, sequence, text, begin). A row is [group, sequence, text, seconds ago
    begun, seconds ago ended or None, success].

    >>> snapshot({"0": [Past(1, "barrier()", 10.0, 10.5, True)]}, [("0", 2, "barrier()", 11.0)], now=12.0)
    {'groups': ['0'], 'texts': ['barrier()'], 'rows': [[0, 1, 0, 2.0, 1.5, 1], [0, 2, 0, 1.0, None, 0]]}
    """
    ended = [(one[2], group, Past(*one)) for group, ring in past.items() for one in ring]
    ended = sorted(ended, key=lambda entry: entry[0])[-KEPT:]
    groups: dict[str, int] = {}
    texts: dict[str, int] = {}

    def row(group: str, sequence: int, text: str, begin: float, end: float | None, ok: bool) -> list[Any]:
        return [
            groups.setdefault(group, len(groups)),
            sequence,
            texts.setdefault(text[:TEXT_LENGTH], len(texts)),
            round(now - begin, _DIGITS),
            None if end is None else round(now - end, _DIGITS),
            int(ok),
        ]

    rows = [row(group, one.sequence, one.text, one.begin, one.end, one.ok) for _, group, one in ended]
    rows += [row(group, sequence, text, begin, None, False) for group, sequence, text, begin in open_calls]
    return {"groups": list(groups), "texts": list(texts), "rows": rows}
