"""Every rule of the protocol is needed: without it, the exploration that passes with it breaks an invariant."""

from __future__ import annotations

import pytest

from tests.protocol.exhaustive import ODD, explore, job
from tests.protocol.mutations import MUTATIONS
from tests.protocol.steps import Job

#: Where a mutation shows; the others show in the first.
WHERE: dict[str, Job] = {
    "the backup": job(2, 2, "windowed, barrier"),
    "the mark: what": job(2, 2, "small stream, large stream", odd=ODD[2]),
    "the mark: an operation": job(2, 2, "small stream, large stream"),
    "late calls": job(2, 2, "small, large", odd=ODD[1]),
    "giving up: a call": job(3, 2, "large, small", kinds=("crash", "reset", "deadline", "give up")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_exploration_catches_the_protocol_without(name: str) -> None:
    chosen = next((where for begin, where in WHERE.items() if name.startswith(begin)), job(2, 2, "small, large"))
    explored = explore(MUTATIONS[name](chosen), symmetric=False)
    assert explored.error, f"{explored.states} states, and nothing is wrong"
    assert explored.trace
