"""All schedules of small jobs; PROTOCOL_BOUND=full adds 3 ranks with 2 faults that both happen at any step (minutes)."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.protocol.exhaustive import explore, job, jobs
from tests.protocol.fabric import Fabric
from tests.protocol.steps import Job

FULL = os.environ.get("PROTOCOL_BOUND") == "full"


#: Those of two faults that take longest; without "shrink" their programs are explored always.
LONG = ("barrier, windowed, shrink", "small stream, large stream, shrink", "small, large, shrink")


@pytest.mark.parametrize(
    "chosen",
    [pytest.param(chosen, id=name, marks=[pytest.mark.thorough] * (name in LONG)) for name, chosen in jobs(2, 2)],
)
def test_two_ranks_two_operations_two_faults_all_schedules(chosen: Job) -> None:
    explored = explore(Fabric(chosen))
    assert not explored.error, (explored.error, explored.trace)
    assert explored.complete


@pytest.mark.parametrize("chosen", [pytest.param(chosen, id=name) for name, chosen in jobs(3, 1)])
def test_three_ranks_two_operations_one_fault_all_schedules(chosen: Job) -> None:
    explored = explore(Fabric(chosen))
    assert not explored.error, (explored.error, explored.trace)
    assert explored.complete


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "chosen", [pytest.param(chosen, id=name) for name, chosen in jobs(3, 2) if FULL or "skips" in name]
)
def test_three_ranks_two_operations_two_faults_all_schedules(chosen: Job) -> None:
    explored = explore(Fabric(chosen))
    assert not explored.error, (explored.error, explored.trace)
    assert explored.complete


@pytest.mark.parametrize("program", ["small, large", "large, small"])
def test_leaving_out_steps_that_commute_and_names_of_ranks_hides_nothing(program: str) -> None:
    """The same exploration without any reduction: more states, and no broken invariant there either."""
    chosen = job(2, 1, program)
    everything = explore(Fabric(replace(chosen, reduced=False)), symmetric=False)
    assert not everything.error, (everything.error, everything.trace)
    assert everything.complete
    assert everything.states > explore(Fabric(chosen)).states


def test_without_a_fault_every_order_of_steps_ends_in_success() -> None:
    """A failed operation is a broken invariant as long as nothing but the transport has broken: see `Fabric._write`."""
    explored = explore(Fabric(job(3, 0, "small, large")))
    assert explored.complete and not explored.error
    assert explored.ends
