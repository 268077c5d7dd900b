"""Guarded collectives on CUDA tensors; on real ranks that share one GPU, skipped where there is none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine.execution import AllReduce
from ncclguard.transport import nccl
from ncclguard.transport.base import Save, TransportError
from ncclguard.transport.nccl import NcclCommunicator
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join

pytestmark = NEEDS_GPU

SECOND = 2_000_000_000  # cycles of a GPU clock, about


def averages() -> None:
    rank = join()
    tensor = torch.full((100_000,), 40_000.0, dtype=torch.float16, device="cuda")
    first = ng.safe_all_reduce(tensor, ReduceOp.AVG, timeout=120, chunk_numel=30_000)
    output = torch.zeros(1000, dtype=torch.float16, device="cuda")
    second = ng.safe_reduce_scatter(output, [tensor[:1000].clone() for _ in range(2)], ReduceOp.AVG, timeout=120)
    pairs = torch.full((10,), complex(rank, 2.0), dtype=torch.complex64, device="cuda")
    third = ng.safe_all_reduce(pairs, ReduceOp.AVG, timeout=120)
    faults.report(
        ok=[first.ok, second.ok, third.ok],
        found=[float(tensor.min()), float(tensor.max()), float(output.min()), float(output.max())],
        pairs=[float(pairs[0].real), float(pairs[0].imag)],
    )


def test_an_average_of_float16_does_not_overflow() -> None:
    result = faults.run_ranks(averages, 2, env=SHARED_GPU, timeout=250).check()
    for rank in range(2):
        assert result[rank].reports["ok"] == [True, True, True]
        assert result[rank].reports["found"] == [40_000.0] * 4
        assert result[rank].reports["pairs"] == [0.5, 2.0]


def copied_out_late() -> None:
    """Between the kernel and the copy into the caller's memory the stream sleeps for a second."""
    join()
    finish = AllReduce.finish

    def late(self: AllReduce, participants: Sequence[int]) -> None:
        torch.cuda._sleep(SECOND)  # type: ignore[no-untyped-call]
        finish(self, participants)

    AllReduce.finish = late  # type: ignore[method-assign, assignment]
    tensor = torch.ones(10_000_000, device="cuda")
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    wrong = 0
    for step in range(3):
        ng.safe_all_reduce(tensor, timeout=120).raise_if_failed()
        with torch.cuda.stream(other):  # which waits for nothing
            seen = tensor.clone()
            again = torch.full((10_000_000,), -1.0, device="cuda")
            ng.safe_all_reduce(again, timeout=120).raise_if_failed()  # takes over the staging memory
        wrong += int((seen != 2.0 ** (step + 1)).sum()) + int((again != -2).sum())
    torch.cuda.synchronize()
    faults.report(wrong=wrong + int((tensor != 8).sum()))


def test_results_are_there_for_other_streams_and_the_staging_memory_for_other_operations() -> None:
    result = faults.run_ranks(copied_out_late, 2, env=SHARED_GPU, timeout=250).check()
    assert result.values("wrong") == {0: 0, 1: 0}


def behind_a_long_kernel() -> None:
    rank = join()
    tensor = torch.ones(1000, device="cuda")
    ng.safe_all_reduce(tensor, timeout=120).raise_if_failed()
    if rank == 1:
        torch.cuda._sleep(10 * SECOND)  # type: ignore[no-untyped-call]
    outcome = ng.safe_all_reduce(tensor, timeout=3 if rank == 0 else 60)
    verdict = [outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits)]
    torch.cuda.synchronize()
    faults.report(verdict=verdict, kept=float(tensor[0]), after=ng.safe_all_reduce(tensor, timeout=120).ok)


def test_a_rank_behind_a_long_kernel_is_late_and_nothing_is_aborted_for_it() -> None:
    result = faults.run_ranks(behind_a_long_kernel, 2, env=SHARED_GPU, timeout=250).check()
    for rank in range(2):
        assert result[rank].reports["verdict"] == [False, True, "late", [1]]
        assert result[rank].reports["kept"] == 2.0
        assert result[rank].reports["after"]


def abort_takes_long() -> None:
    """Rank 0's communicator breaks at its third piece, and its abort begins ten seconds later."""
    rank = join()
    ng.safe_all_reduce(torch.ones(1, device="cuda"), timeout=120).raise_if_failed()
    all_reduce, abort = NcclCommunicator.all_reduce, nccl.abort_group
    broken: list[int] = []

    def breaks(self: NcclCommunicator, tensor: torch.Tensor, op: ReduceOp.RedOpType, save: Save | None = None) -> Any:
        if tensor.numel() == 1_000_000 and not broken:
            broken.append(0)
        elif broken and len(broken) < 3:
            broken.append(0)
            if len(broken) == 3:
                raise TransportError("made up")
        return all_reduce(self, tensor, op, save)

    def slow(group: Any, device: torch.device) -> None:
        time.sleep(10)
        abort(group, device)

    if rank == 0:
        NcclCommunicator.all_reduce = breaks  # type: ignore[method-assign]
        nccl.abort_group = slow
    tensor = torch.arange(20_000_000.0, device="cuda")
    outcome = ng.safe_all_reduce(tensor, timeout=120, chunk_numel=1_000_000)
    right = bool(tensor.equal(2 * torch.arange(20_000_000.0, device="cuda")))
    faults.report(verdict=[outcome.ok, outcome.torn], attempts=outcome.attempts, right=right)


def test_a_retry_beside_an_abort_that_has_not_come_back_gives_the_exact_sum() -> None:
    result = faults.run_ranks(abort_takes_long, 2, env=SHARED_GPU, timeout=280).check()
    for rank in range(2):
        assert result[rank].reports["verdict"] == [True, False]
        assert result[rank].reports["attempts"] > 1
        assert result[rank].reports["right"]


def on_no_current_device() -> None:
    """The tensor says which device it is, not `torch.cuda.set_device`; with one GPU both are the same."""
    join()
    tensor = torch.ones(3, device=f"cuda:{torch.cuda.device_count() - 1}")
    outcome = ng.safe_all_reduce(tensor, timeout=120)
    alone = ng.safe_barrier(timeout=60)
    faults.report(found=[outcome.ok, alone.ok, float(tensor[0])])
    dist.destroy_process_group()


def test_the_tensor_chooses_the_device_and_the_group_can_be_destroyed() -> None:
    result = faults.run_ranks(on_no_current_device, 2, env=SHARED_GPU, timeout=200).check()
    assert result.values("found") == {0: [True, True, 2.0], 1: [True, True, 2.0]}
