"""How two ranks' calls are compared, without processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ncclguard.watch import comparison
from ncclguard.watch.recorder import Calls


def called(*types: str, first: int = 1) -> Calls:
    """All-reduces of these dtypes, numbered from `first` on."""
    entries: list[dict[str, Any]] = [
        {
            "process_group": ["0", ""],
            "profiling_name": "gloo:all_reduce",
            "collective_seq_id": number,
            "input_sizes": [[4]],
            "input_dtypes": [kind],
        }
        for number, kind in enumerate(types, first)
    ]
    return Calls("0:gloo", (0, 1), entries, "gloo")


@pytest.mark.parametrize(
    ("own", "other", "different"),
    [
        (called("Float", "Int", "Float"), called("Float", "Int"), None),  # one is further
        (called("Float", "Int"), called("Float", "Int", "Float"), None),
        (called("Float", "Int", "Half"), called("Float", "Long", "Byte"), 2),
        (called("Float", "Int", first=7), called("Float", "Int", first=400), None),  # nothing of both is known
        (called("Byte", "Int", first=7), called("Float", "Int", first=7), None),  # the oldest may not be whole
        (called("Float", "Int", "Int", first=7), called("Float", "Int", first=8), None),
        (called("Float", "Int", "Half", first=7), called("Float", "Float", first=8), 9),
        (called(), called("Float"), None),
        (called("Float"), called(), None),
    ],
)
def test_the_first_call_is_found_that_both_know_and_that_differs(
    own: Calls, other: Calls, different: int | None
) -> None:
    number, ranks, first, marks = json.loads(comparison._written(3, other))
    assert (number, ranks) == (3, "0-1")
    assert comparison._first_different(own, first, marks) == different


def test_a_long_history_is_written_in_part() -> None:
    _, _, first, marks = json.loads(comparison._written(1, called(*["Float"] * 2000)))
    assert (first, len(marks)) == (2000 - comparison.LAST + 1, 4 * comparison.LAST)
