"""Seeded random schedules of more ranks and operations than can be explored: each ends, and breaks no invariant."""

from __future__ import annotations

import pytest

from tests.protocol.fabric import Fabric
from tests.protocol.mutations import MUTATIONS
from tests.protocol.walk import Walked, jobs, walk

#: Needs a caller that gives up before it could enter, and a rank that goes on: too rare for random steps.
TOO_RARE = "giving up: a call that could not enter takes no place in the sequence"


def first_broken(fabric: type[Fabric], ranks: int, faults: int, schedules: int) -> Walked | None:
    for _, chosen in jobs(ranks, faults):
        explored = fabric(chosen)
        for seed in range(schedules):
            walked = walk(explored, seed)
            if walked.error:
                return walked
    return None


@pytest.mark.parametrize(
    ("ranks", "faults"), [(3, 4), *(pytest.param(*bound, marks=pytest.mark.thorough) for bound in ((5, 3), (8, 2)))]
)
def test_every_schedule_ends_with_all_invariants(ranks: int, faults: int) -> None:
    broken = first_broken(Fabric, ranks, faults, 30)
    assert broken is None, broken


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * name.startswith("the mark:"))  # takes as long as all others
        for name in MUTATIONS
        if name != TOO_RARE
    ],
)
def test_random_schedules_notice_the_protocol_without(name: str) -> None:
    """So that the test above is known to see something."""
    assert first_broken(MUTATIONS[name], 3, 2, 200) is not None
