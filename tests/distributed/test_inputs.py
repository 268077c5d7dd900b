"""Tensors that torch.distributed refuses or breaks on: right results for all sizes alike, or a sentence before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults

#: One that goes along with the opening round, one without and one with a closing round.
NUMELS = (3, 1000, 20_000)


def conjugated(numel: int, value: complex) -> torch.Tensor:
    return torch.full((numel,), value.conjugate()).conj()


def negated(numel: int, value: complex) -> torch.Tensor:
    tensor = torch.full((numel,), value.conjugate()).conj().imag
    assert tensor.is_neg()
    return tensor


def lazy_views() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []

    def compare(what: str, outcome: ng.Outcome, *pairs: tuple[torch.Tensor, complex | float]) -> None:
        if not outcome or any(bool((tensor != value).any()) for tensor, value in pairs):
            wrong.append(f"{what}: {outcome}, {[(tensor[:2].tolist(), value) for tensor, value in pairs]}")

    for numel in NUMELS:
        for make, of in ((conjugated, lambda value: value), (negated, lambda value: value.imag)):
            for options in ({}, {"atomic": False}, {"chunk_numel": max(2, numel // 3)}):
                what = f"{make.__name__} {numel} {options}"
                values = [complex(1, 2 + 4 * each) for each in range(size)]
                mine, total = values[rank], of(sum(values))
                tensor = make(numel, mine)
                compare(f"sum of {what}", ng.safe_all_reduce(tensor, **options), (tensor, total))
                tensor = make(numel, mine)
                outcome = ng.safe_all_reduce(tensor, ReduceOp.AVG, **options)
                compare(f"average of {what}", outcome, (tensor, total / size))
                tensor = make(numel, mine)
                compare(f"broadcast of {what}", ng.safe_broadcast(tensor, 1, **options), (tensor, of(values[1])))
                slots = [make(numel, 0j) for _ in values]
                outcome = ng.safe_all_gather(slots, make(numel, mine), **options)
                compare(f"gathered {what}", outcome, *zip(slots, map(of, values), strict=True))
                output = make(numel, 0j)
                outcome = ng.safe_reduce_scatter(output, [make(numel, mine) for _ in values], **options)
                compare(f"scattered {what}", outcome, (output, total))
    faults.report(wrong=wrong)
    dist.destroy_process_group()


def test_pending_conjugations_and_negations_are_carried_out() -> None:
    """Small ones were sent as the memory they are a view of, and gave other values than larger ones."""
    result = faults.run_ranks(lazy_views, 2, timeout=120).check()
    assert result.values("wrong") == {0: [], 1: []}, result


def inference_tensors() -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    with torch.inference_mode():
        small, large = torch.zeros(3), torch.zeros(50_000)
        slots = [torch.zeros(50_000) for _ in range(size)]
    right: dict[str, bool] = {}
    for atomic in (True, False):
        for output in (small, large):
            for op, expected in ((ReduceOp.SUM, size), (ReduceOp.AVG, 1)):
                inputs = [torch.ones_like(output) for _ in range(size)]
                done = ng.safe_reduce_scatter(output, inputs, op, atomic=atomic)
                right[f"{op}, {output.numel()}, {atomic}"] = done.ok and bool((output == expected).all())
        done = ng.safe_all_gather(slots, torch.full((50_000,), 1.0 + atomic), atomic=atomic)
        right[f"gathered {atomic}"] = done.ok and all(bool((slot == 1.0 + atomic).all()) for slot in slots)
    faults.report(wrong=[name for name, fine in right.items() if not fine])
    dist.destroy_process_group()


def test_results_are_written_into_inference_tensors_outside_inference_mode() -> None:
    result = faults.run_ranks(inference_tensors, 2, timeout=60).check()
    assert result.values("wrong") == {0: [], 1: []}, result


def no_memory_on_rank_1() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ng.safe_barrier(timeout=30).raise_if_failed()
    inputs, output = [torch.ones(1000) for _ in range(size)], torch.full((1000,), 7.0)
    empty = torch.empty

    def refuse(*arguments: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    if rank == 1:
        torch.empty = refuse
    failed = ng.safe_reduce_scatter(output, inputs, timeout=30, atomic="require")
    torch.empty = empty
    failed.acknowledge()
    faults.report(cause=str(failed.cause), culprits=failed.culprits, output=output.unique().tolist())
    faults.report(next=ng.safe_reduce_scatter(output, inputs, timeout=30, atomic="require").ok)
    dist.destroy_process_group()


def test_a_rank_without_memory_for_the_result_of_a_reduce_scatter_is_named() -> None:
    """An outcome on all ranks, not an exception on one."""
    result = faults.run_ranks(no_memory_on_rank_1, 2, timeout=90).check()
    for rank in result:
        assert (rank.reports["cause"], rank.reports["culprits"]) == ("failed", [1]), rank
        assert rank.reports["output"] == [7.0]
        assert rank.reports["next"]


def nan_on_one_rank() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for where in range(size):
        for op in (ReduceOp.MAX, ReduceOp.MIN):
            tensor = torch.full((124,), float("nan") if rank == where else 1.0)
            ng.safe_all_reduce(tensor, op).raise_if_failed()
            found.append(bool(tensor.isnan().all()))
    faults.report(found=found)
    dist.destroy_process_group()


def test_a_nan_on_any_rank_is_the_extremum_of_up_to_496_bytes() -> None:
    """As documented; what gloo makes of a NaN depends on the rank that has it."""
    result = faults.run_ranks(nan_on_one_rank, 2, timeout=60).check()
    assert result.values("found") == {0: [True] * 4, 1: [True] * 4}


def shared_memory() -> None:
    """Through the guard's process group; every rank is refused, so the next collective is the first of all."""
    dist.init_process_group("ncclguard")
    size = dist.get_world_size()
    expanded, whole = torch.zeros(1).expand(4), torch.ones(4)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(expanded),
        "reduce": lambda: dist.reduce(expanded, 0),
        "broadcast": lambda: dist.broadcast(expanded, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(expanded, [whole] * size),
        "all_gather": lambda: dist.all_gather([expanded] * size, whole),
        "all_to_all": lambda: dist.all_to_all([expanded] * size, [whole] * size),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = "share memory" in str(error)
    dist.all_reduce(whole)
    faults.report(refused=[name for name in calls if found.get(name)], sum=whole.unique().tolist(), calls=list(calls))
    dist.destroy_process_group()


def test_the_process_group_refuses_outputs_whose_elements_share_memory() -> None:
    result = faults.run_ranks(shared_memory, 2, timeout=60).check()
    for rank in result:
        assert rank.reports["refused"] == rank.reports["calls"], rank
        assert rank.reports["sum"] == [2.0]
