"""The NCCL communicator on real ranks that share one GPU; skipped where there is none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ncclguard import _torch_stores, faults
from ncclguard.transport.base import Pending, TransportError
from ncclguard.transport.nccl import NcclBuilder, NcclCommunicator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs an NVIDIA GPU and torch with NCCL"
    ),
]

# Several ranks on one GPU look like as many hosts to NCCL (init.cc compares host hash and bus id), and use its sockets.
SHARED_GPU = {
    "NCCLGUARD_AUTOSTART": "0",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}


# --- helpers that run in the ranks ----------------------------------------------------------------------------------


def join() -> int:
    os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    return dist.get_rank()


def build(generation: int, seconds: float = 60.0) -> NcclCommunicator:
    store = _torch_stores.clone_store(_torch_stores.default_store())
    ranks = tuple(range(dist.get_world_size()))
    prefix = f"transport/{generation}"
    return NcclBuilder().build(store, prefix, ranks, dist.get_rank(), generation, 600.0, seconds)


def finish(pending: Pending, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not pending.wait(0.1):
        if time.monotonic() > end:
            raise AssertionError(f"not complete after {seconds} s")


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except TransportError as error:
        return str(error)
    return ""


# --- tests ----------------------------------------------------------------------------------------------------------


def results() -> None:
    rank = join()
    size = dist.get_world_size()
    communicator = build(1)
    votes = []
    for value in (7, rank):
        vote = communicator.agree(value)
        finish(vote)
        votes.append(vote.agreed)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        mine = torch.tensor([1, 0, 2], device="cuda").to(dtype) * (rank + 1)
        summed = mine.clone()
        finish(communicator.all_reduce(summed, ReduceOp.SUM))
        parts = [torch.tensor([1, 0, 2], device="cuda").to(dtype) * (peer + 1) for peer in range(size)]
        wanted = torch.stack(parts).any(0) if dtype is torch.bool else torch.stack(parts).sum(0).to(dtype)
        moved, gathered = mine.clone(), [torch.zeros_like(mine) for _ in range(size)]
        finish(communicator.broadcast(moved, 1))
        finish(communicator.all_gather(gathered, mine))
        scattered = torch.zeros_like(mine)
        finish(communicator.reduce_scatter(scattered, [mine.clone() for _ in range(size)], ReduceOp.SUM))
        for name, got, right in (
            ("all_reduce", summed, wanted),
            ("broadcast", moved, parts[1]),
            ("all_gather", torch.stack(gathered), torch.stack(parts)),
            ("reduce_scatter", scattered, wanted),
        ):
            if not torch.equal(got, right):
                wrong.append(f"{name} {dtype}: {got.tolist()}")
    pieces = torch.ones(20, 100_000, device="cuda")
    pending = [communicator.all_reduce(piece, ReduceOp.SUM) for piece in pieces]  # all queued before one is waited for
    for one in pending:
        finish(one)
    faults.report(votes=votes, wrong=wrong, pieces=bool((pieces == size).all()))
    graph, refused = torch.cuda.CUDAGraph(), ""
    with torch.cuda.graph(graph):
        try:
            communicator.all_reduce(torch.ones(1, device="cuda"), ReduceOp.SUM)
        except ValueError as error:
            refused = str(error)
    faults.report(refused=refused)
    communicator.close()


def test_operations_complete_with_the_right_results_and_capture_is_refused() -> None:
    result = faults.run_ranks(results, 2, env=SHARED_GPU, timeout=200).check()
    for rank in range(2):
        assert result[rank].reports["votes"] == [True, False]
        assert result[rank].reports["wrong"] == []
        assert result[rank].reports["pieces"]
        assert "cannot be captured" in result[rank].reports["refused"]


def stop_and_rebuild() -> None:
    """Rank 1 does not enter rank 0's operation; both stop, build the next generation and use it."""
    rank = join()
    first = build(1)
    tensor = torch.full((1_000_000,), float(rank), device="cuda")
    start = time.monotonic()
    if rank == 0:
        pending = first.all_reduce(tensor, ReduceOp.SUM)
        entered = pending.wait(1.0)
        first.stop()
        stop_took = time.monotonic() - start - 1.0
        error = error_of(lambda: finish(pending))
        faults.report(completed=entered, stop_took=stop_took, error=error, quiet=first.quiet(15.0))
    else:
        time.sleep(2.0)
        first.stop()
        faults.report(error=error_of(lambda: first.all_reduce(tensor, ReduceOp.SUM)), quiet=first.quiet(15.0))
    first.close()
    second = build(2)
    again = torch.ones(1, device="cuda")
    finish(second.all_reduce(again, ReduceOp.SUM))
    faults.report(again=float(again))
    second.close()


def test_stop_ends_a_kernel_that_waits_for_a_missing_rank_and_the_next_generation_works() -> None:
    result = faults.run_ranks(stop_and_rebuild, 2, env=SHARED_GPU, timeout=200).check()
    assert result[0].reports["completed"] is False
    assert all("was stopped" in result[rank].reports["error"] for rank in range(2))
    assert all(result[rank].reports["quiet"] for rank in range(2))
    assert all(result[rank].reports["again"] == 2.0 for rank in range(2))


def lose_a_peer() -> None:
    rank = join()
    communicator = build(1)
    faults.report(ready=1)
    if rank == 1:
        faults.wait_until_told("never")
    pending = communicator.all_reduce(torch.ones(1_000_000, device="cuda"), ReduceOp.SUM)
    end = time.monotonic() + 5.0
    error = error_of(lambda: [pending.wait(0.1) for _ in iter(lambda: time.monotonic() < end, False)])
    communicator.stop()
    faults.report(error=error, quiet=communicator.quiet(15.0))
    communicator.close()
    time.sleep(2.0)  # a watchdog with teeth would end the process now


def test_a_killed_peer_does_not_take_the_process_down() -> None:
    with faults.start_ranks(lose_a_peer, 2, env=SHARED_GPU, timeout=200) as job:
        job.wait_for("ready", seconds=120)
        job.send_signal(1, signal.SIGKILL)
        result = job.wait()
    assert result[0].ok, str(result)
    assert result[0].reports["quiet"]
