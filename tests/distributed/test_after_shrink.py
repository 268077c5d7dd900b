"""What works, and what is refused on all ranks alike, once the others go on without a rank that is gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults

GONE = 1


def told(outcome: ng.Outcome) -> list[Any]:
    return [outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits), list(outcome.participants)]


def after_shrink() -> None:
    """Rank 1 is killed, the others leave it out, and go through the other operations."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == GONE:
        os.kill(os.getpid(), signal.SIGKILL)
    found: dict[str, Any] = {}
    tensor = torch.full((5,), float(rank))
    found["shrink"] = [told(ng.safe_all_reduce(tensor, timeout=20, on_lost="shrink")), tensor.tolist()]
    inputs = [torch.full((3,), 100.0 * rank + slot) for slot in range(size)]
    for on_lost in ("fail", "shrink"):
        output = torch.full((3,), -1.0)
        found[f"reduce_scatter {on_lost}"] = [
            told(ng.safe_reduce_scatter(output, inputs, timeout=20, on_lost=on_lost)), output.tolist(),  # type: ignore[arg-type]
        ]  # fmt: skip
        for numel in (4, 100_000):
            tensor = torch.full((numel,), float(rank))
            outcome = ng.safe_broadcast(tensor, GONE, timeout=20, on_lost=on_lost)  # type: ignore[arg-type]
            found[f"broadcast {on_lost} {numel}"] = [told(outcome), tensor[:3].tolist()]
    objects = [rank]
    found["objects"] = [told(ng.safe_broadcast_object_list(objects, GONE, timeout=20, on_lost="shrink")), objects]
    tensor = torch.full((4,), float(rank))
    found["alive"] = [told(ng.safe_broadcast(tensor, 2, timeout=20)), tensor.tolist()]
    tensor = torch.ones(3)
    found["next"] = [told(ng.safe_all_reduce(tensor, timeout=20)), tensor.tolist()]
    faults.report(found=found)
    dist.destroy_process_group()


def test_what_needs_a_rank_that_is_gone_fails_for_all_and_the_rest_goes_on() -> None:
    """reduce_scatter needs everybody and broadcast its source: `lost`, naming rank 1, nothing written; also by default, without shrink."""
    found = faults.run_ranks(after_shrink, 4, timeout=90).values("found")
    assert sorted(found) == [0, 2, 3]
    lost = [False, True, "lost", [GONE], [0, 2, 3]]
    good = [True, True, "None", [], [0, 2, 3]]
    for rank, seen in found.items():
        assert seen["shrink"] == [good, [5.0] * 5], found
        for on_lost in ("fail", "shrink"):
            assert seen[f"reduce_scatter {on_lost}"] == [lost, [-1.0] * 3], found
            for numel in (4, 100_000):
                assert seen[f"broadcast {on_lost} {numel}"] == [lost, [float(rank)] * 3], found
        assert seen["objects"] == [lost, [rank]], found
        assert seen["alive"] == [good, [2.0] * 4], found
        assert seen["next"] == [good, [3.0] * 3], found


def source_dies() -> None:
    """The call that finds the rank gone is the broadcast from it."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == GONE:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.full((4,), float(rank))
    first = told(ng.safe_broadcast(tensor, GONE, timeout=20, on_lost="shrink"))
    again = told(ng.safe_broadcast(tensor, GONE, timeout=20, on_lost="shrink"))
    total = torch.ones(2)
    after = told(ng.safe_all_reduce(total, timeout=20, on_lost="shrink"))
    faults.report(found=[first[:4], again[:4], tensor.tolist(), after, total.tolist()])
    dist.destroy_process_group()


def test_a_broadcast_whose_source_has_just_died_fails_also_when_it_is_called_again() -> None:
    found = faults.run_ranks(source_dies, 3, timeout=90).values("found")
    lost = [False, True, "lost", [GONE]]
    for rank in (0, 2):
        assert found[rank] == [lost, lost, [float(rank)] * 4, [True, True, "None", [], [0, 2]], [2.0, 2.0]], found
