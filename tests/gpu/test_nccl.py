"""The NCCL communicator on real ranks that share one GPU; skipped where there is none."""

from __future__ import annotations

import gc
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, build, build_again, error_of, finish, join

pytestmark = NEEDS_GPU


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
        mine = (torch.tensor([1, 0, 2], device="cuda") * (rank + 1)).to(
            dtype
        )  # of bool too: a product with an int is int64
        summed = mine.clone()
        finish(communicator.all_reduce(summed, ReduceOp.SUM))
        parts = [(torch.tensor([1, 0, 2], device="cuda") * (peer + 1)).to(dtype) for peer in range(size)]
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
        if hasattr(dist.Work, "block_current_stream"):  # torch's C++ prints it, once in a process
            assert "Work::synchronize API is being deprecated" not in result[rank].output


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
    build_again()


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


def alone() -> None:
    join()
    communicator = build(1)
    tensor, gathered, scattered = (torch.full((3,), 2.0, device="cuda") for _ in range(3))
    finish(communicator.all_reduce(tensor, ReduceOp.SUM))
    finish(communicator.broadcast(tensor, 0))
    finish(communicator.all_gather([gathered], tensor))
    finish(communicator.reduce_scatter(scattered, [tensor], ReduceOp.AVG))
    faults.report(found=[float(part.sum()) for part in (tensor, gathered, scattered)])
    communicator.close()


def test_a_group_of_one() -> None:
    assert faults.run_ranks(alone, 1, env=SHARED_GPU, timeout=200).check()[0].reports["found"] == [6.0, 6.0, 6.0]


def reduce_beside_an_allocating_thread() -> None:
    """The thread uses the same stream, and fills what the allocator gives it."""
    rank = join()
    size = dist.get_world_size()
    communicator = build(1)
    ended = threading.Event()

    def allocate() -> None:
        while not ended.is_set():
            for numel in (1_000_000, 1_000_000 * size):
                torch.empty(numel, device="cuda").fill_(float("nan"))

    thread = threading.Thread(target=allocate)
    thread.start()
    wrong = 0
    for step in range(100):
        inputs = [torch.full((1_000_000,), float(step + peer), device="cuda") for peer in range(size)]
        output, gathered = torch.zeros_like(inputs[0]), [torch.zeros_like(inputs[0]) for _ in range(size)]
        scattering = communicator.reduce_scatter(output, inputs, ReduceOp.SUM)
        gathering = communicator.all_gather(gathered, inputs[rank])
        finish(scattering)
        finish(gathering)
        wrong += int((output != size * (step + rank)).sum())
        wrong += sum(int((part != step + peer).sum()) for peer, part in enumerate(gathered))
    ended.set()
    thread.join()
    faults.report(wrong=wrong)
    communicator.close()


def test_collectives_of_lists_keep_their_memory_beside_a_thread_that_allocates() -> None:
    result = faults.run_ranks(reduce_beside_an_allocating_thread, 2, env=SHARED_GPU, timeout=250).check()
    assert result.values("wrong") == {0: 0, 1: 0}


def memory_in_use() -> None:
    rank = join()
    communicator = build(1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        mine = torch.full((1_000_000,), float(rank), device="cuda")
        gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        pending = [
            communicator.all_reduce(mine, ReduceOp.SUM),
            communicator.all_gather(gathered, mine),
            communicator.reduce_scatter(mine, gathered, ReduceOp.SUM),
        ]
        for one in pending:
            finish(one)
    del mine, gathered, pending, one
    gc.collect()
    faults.report(kept=torch.cuda.memory_allocated() - before)
    communicator.close()


def test_memory_is_given_back_when_operations_are_complete() -> None:
    result = faults.run_ranks(memory_in_use, 2, env=SHARED_GPU, timeout=200).check()
    assert result.values("kept") == {0: 0, 1: 0}


def capture_after_a_collective() -> None:
    join()
    communicator = build(1)
    tensor = torch.ones(3, device="cuda")
    finish(communicator.all_reduce(tensor, ReduceOp.SUM))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # torch 2.6 waits here until a watchdog has seen the end of every collective
        tensor.mul_(3)
    graph.replay()
    torch.cuda.synchronize()
    faults.report(found=float(tensor[0]))
    communicator.close()


def test_the_program_can_capture_a_graph_afterwards() -> None:
    result = faults.run_ranks(capture_after_a_collective, 2, env=SHARED_GPU, timeout=200).check()
    assert result.values("found") == {0: 6.0, 1: 6.0}
