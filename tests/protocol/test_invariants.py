"""Seeded random schedules of more ranks than can be explored completely, on a second, independent model of store and wire.

`test_exhaustive.py` explores small jobs completely. Here faults are rare and jobs larger; every schedule has to end, with all
invariants intact. `python -m tests.protocol.checker --ranks 8 --walks 1000` goes further.
"""

from __future__ import annotations

import pytest

from tests.protocol.checker import ALL_KINDS, SCENARIOS, Found, scripts, walk
from tests.protocol.model import World

SCHEDULES = 100


def first_found(ranks: int, faults: int, mutant: str, schedules: int) -> Found | None:
    for name in SCENARIOS:
        for shrink, skip in ((False, False), (True, False), (False, True)):
            start = World(scripts(ranks, name, shrink, skip), faults, ALL_KINDS, mutant)
            odd = frozenset({ranks - 1}) if skip else frozenset[int]()
            for seed in range(schedules):
                found = walk(start, seed, odd)
                if found is not None:
                    return found
    return None


@pytest.mark.parametrize("ranks", [3, 5, 8])
def test_seeded_schedules_of_more_ranks_with_two_faults(ranks: int) -> None:
    """Random schedules with faults, deadlines, shrinking and skipped calls: no invariant broken, every one ends."""
    assert first_found(ranks, 2, "", SCHEDULES) is None


@pytest.mark.parametrize("mutant", ["no promise", "no lock", "no closing round", "resume at the maximum"])
def test_the_random_schedules_notice_a_protocol_without_one_of_its_parts(mutant: str) -> None:
    """So that the test above is known to see something."""
    assert first_found(3, 2, mutant, 1500) is not None
