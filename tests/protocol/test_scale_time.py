"""The verdict in time at 1,000 to 4,000 ranks, over the model of `scale.py`: production periods, reports and incidents.

What Python computes takes no time in the model, so that each run is the same; how fast a test runs does not matter.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable

import pytest

from ncclguard.coordination.incidents import from_json
from ncclguard.engine import description as description_module
from ncclguard.incident.model import Incident
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Verdict
from ncclguard.protocol.timing import Timing
from tests.protocol.scale import STACK, Expected, Result, World, observe

#: PROTOCOL_BOUND=full runs all at 4,000 ranks too.
SIZES = [1000, 4000] if os.environ.get("PROTOCOL_BOUND") == "full" else [1000]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of ranks say the same."""
    caplog.set_level(logging.CRITICAL, "ncclguard")


def verdict(
    world: World, waiting: Iterable[int], culprits: dict[int, Cause], silent: Iterable[int] = ()
) -> tuple[Result, Verdict, Incident]:
    """Those who wait call the operation, and all get one verdict with these culprits before they give up."""

    def happen(world: World) -> Expected:
        world.stopped.update(silent)
        world.enter(waiting)
        return Expected(culprits)

    found = observe(world, "late", happen=happen)
    assert found.holds, found
    (one,) = {id(verdict): verdict for _, _, verdict in world.decided.values()}.values()
    incident = from_json(one.incident)
    assert incident is not None
    return found, one, incident


def joined(size: int, monkeypatch: pytest.MonkeyPatch, *, handshake: bool = False) -> World:
    world = World(size, monkeypatch)
    world.join(handshake)
    return world


def largest(world: World) -> int:
    return max(map(len, world.server.values.values()))


def test_the_times_fit_each_other_at_every_size() -> None:
    for size in (2, 400, 1250, 2000, 4000, 20_000):
        for active, idle in ((0.05, 0.5), (0.001, 0.001), (0.2, 1.0)):
            timing = Timing.of(size, active, idle)
            assert timing.idle + 2 * timing.period < timing.patience  # a rank that is in no call has answered by then
            assert timing.takeover >= 3 * timing.period  # a coordinator that looks in time is left to do its work
            assert timing.patience + 3 * timing.period < timing.grace
            assert timing.period <= max(0.2, size / 60_000)


def test_ranks_that_wait_for_rank_0_to_come_leave_the_stores_host_most_of_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(4000, monkeypatch)
    for rank in range(1, world.size):
        world.spawn(rank, world.monitors[rank].start, world.now + rank * 0.618034 % 1 / 2)
    world.run(world.now + 3.0)
    assert 0.0 < world.server.busy < 0.3 * 3.0


def test_joining_costs_a_rank_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    world = joined(1000, monkeypatch, handshake=True)
    assert max(world.requests[rank] for rank in range(1, world.size)) <= 40


@pytest.mark.parametrize("size", [1000, pytest.param(4000, marks=pytest.mark.thorough)])
def test_one_late_rank_is_named_to_all_in_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = joined(size, monkeypatch)
    found, one, incident = verdict(world, range(size - 1), {size - 1: Cause.LATE})
    assert incident.ranks[-1].stack == STACK
    assert largest(world) < 1 << 17
    assert world.read[one.coordinator] >= size > 10 * found.read  # one reads all answers, and nobody else does


@pytest.mark.parametrize("size", SIZES)
def test_one_silent_rank_is_named_to_all_in_time(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = joined(size, monkeypatch)
    _, _, incident = verdict(world, range(size - 1), {size - 1: Cause.STUCK}, silent=[size - 1])
    assert incident.ranks[-1].state == "silent"


@pytest.mark.thorough
def test_a_silent_half_of_the_job_is_named_to_the_other_half_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    world = joined(2000, monkeypatch)
    half = range(1000, 2000)
    verdict(world, range(1000), dict.fromkeys(half, Cause.STUCK), silent=half)


@pytest.mark.thorough
def test_where_only_one_rank_of_4000_has_come_all_others_are_named_to_it_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stacks as large as they can be, and unlike each other."""
    size = 4000
    draw = random.Random(size)
    lines = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz/._:=()", k=200)) for _ in range(4096)]
    world = joined(size, monkeypatch)
    monkeypatch.setattr(description_module, "main_thread_stack", lambda: draw.sample(lines, 64))
    monkeypatch.setattr(
        description_module, "other_threads", lambda: [[f"t{n}", draw.sample(lines, 16)] for n in range(16)]
    )
    _, _, incident = verdict(world, [0], dict.fromkeys(range(1, size), Cause.LATE))
    assert [report.rank for report in incident.ranks] == list(range(size))
    assert sum(bool(report.stack) for report in incident.ranks) >= 8
    assert largest(world) < 1 << 18
    assert len(str(incident)) < 1 << 15
