"""Tensors without elements, and a result that lies in its own input."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime
from ncclguard.transport.memory import Arithmetic


def empty_on_one_rank() -> None:
    """Rank 1 comes later, with a tensor that has elements; then both have none."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=30).raise_if_failed()
    found = {}
    for name, call in {
        "all_reduce": lambda tensor: ng.safe_all_reduce(tensor, timeout=20),
        "all_gather": lambda tensor: ng.safe_all_gather(
            [torch.empty_like(tensor) for _ in range(2)], tensor, timeout=20
        ),
    }.items():
        if rank == 1:
            time.sleep(1.0)
        outcome = call(torch.ones(7 if rank == 1 else 0))
        found[name] = [outcome.ok, str(outcome.cause)]
        found[f"{name} of nothing"] = [call(torch.ones(0)).ok]
    faults.report(found=found)
    dist.destroy_process_group()


def test_a_tensor_without_elements_meets_the_other_ranks_like_any_other() -> None:
    result = faults.run_ranks(empty_on_one_rank, 2, timeout=90).check()
    for rank in result:
        for name in ("all_reduce", "all_gather"):
            assert rank.reports["found"][name] == [False, "diverged"], rank
            assert rank.reports["found"][f"{name} of nothing"] == [True], rank


def scattered_in_place() -> None:
    """The connections of rank 0 break once while segments are added up."""
    dist.init_process_group("gloo")
    rank, size, part = dist.get_rank(), dist.get_world_size(), 500_000
    ng.safe_barrier(timeout=30).raise_if_failed()
    combine, calls = Arithmetic.combine, []

    def breaking(self: Arithmetic, left: Any, right: Any, out: Any) -> None:
        calls.append(len(out))
        if rank == 0 and len(calls) == 4:
            for _, guarded in runtime.current()._groups.values():
                guarded._communicators._communicator.stop()  # type: ignore[union-attr]
        combine(self, left, right, out)

    Arithmetic.combine = breaking  # type: ignore[method-assign]
    found = []
    for atomic in (False, True):
        calls.clear()
        whole = torch.ones(size * part)
        inputs = list(whole.split(part))
        outcome = ng.safe_reduce_scatter(inputs[rank], inputs, timeout=30, atomic=atomic)
        found.append([outcome.ok, outcome.attempts, inputs[rank].unique().tolist()])
    faults.report(found=found)
    dist.destroy_process_group()


def test_a_reduce_scatter_into_its_own_input_is_right_after_a_retry() -> None:
    """Not atomic too: what was added up once must not be added up again."""
    result = faults.run_ranks(scattered_in_place, 3, timeout=90).check()
    assert result.values("found") == {rank: [[True, 2, [3.0]]] * 2 for rank in range(3)}


def in_a_graph() -> None:
    """A tensor that a backward pass still needs is reduced, as in `loss.backward()` after it; then one that none needs."""
    dist.init_process_group("gloo")
    weight = torch.ones(3, requires_grad=True)
    squared = (weight * 2).exp()
    loss = (squared * squared).sum()
    assert ng.safe_all_reduce(squared)
    try:
        loss.backward()
    except RuntimeError as error:
        faults.report(raised=str(error))
    taught = (weight * 2).exp()
    assert ng.safe_broadcast(taught.detach() if dist.get_rank() == 0 else torch.zeros(3), src=0)
    (taught * taught).sum().backward()  # on the source nothing has been written
    weight.grad = None
    loss = (weight * 2).sum()
    assert ng.safe_all_reduce(loss)
    loss.backward()
    with torch.inference_mode():
        assert ng.safe_all_reduce(torch.ones(2))
    faults.report(gradient=weight.grad.tolist(), loss=loss.item())
    dist.destroy_process_group()


def test_a_backward_pass_that_needs_the_values_before_raises_as_after_any_operation_in_place() -> None:
    job = faults.run_ranks(in_a_graph, 2, timeout=60).check()
    for rank in job:
        assert "has been modified by an inplace operation" in rank.reports["raised"]
        assert (rank.reports["gradient"], rank.reports["loss"]) == ([2.0, 2.0, 2.0], 12.0)
