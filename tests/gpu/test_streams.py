"""CUDA graphs, streams and the allocator beside guarded calls: what docs/nccl.md says that a program may do, and what is refused."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join, leave, run_together

pytestmark = NEEDS_GPU

ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}


def beside_a_graph() -> None:
    """A graph is captured before and between guarded calls, and replayed; a guarded call inside a capture is refused."""
    join("nccl")
    size = dist.get_world_size()
    static = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.mul_(2)
    values, refused = [], ""
    for _ in range(3):
        graph.replay()
        tensor = static.clone()
        ng.safe_all_reduce(tensor, timeout=60).raise_if_failed()
        values.append(float(tensor[0]) / size)
    later = torch.cuda.CUDAGraph()
    with torch.cuda.graph(later):
        static.add_(1)
        try:
            ng.safe_all_reduce(static, timeout=60)
        except ValueError as error:
            refused = str(error)
    later.replay()
    ng.safe_all_reduce(static, timeout=60).raise_if_failed()
    faults.report(values=values, refused=refused, last=float(static[0]) / size)
    leave()


def test_graphs_are_captured_and_replayed_beside_guarded_calls() -> None:
    result = run_together(beside_a_graph, 2, env=ENV, timeout=90).check()
    for rank in result:
        assert rank.reports["values"] == [2.0, 4.0, 8.0]
        assert "cannot be captured" in rank.reports["refused"]
        assert rank.reports["last"] == 9.0


def on_several_streams() -> None:
    """Each step computes on a stream of its own and calls there; another stream reads after an event, and after `record_stream`."""
    rank = join("nccl")
    size = dist.get_world_size()
    streams = [torch.cuda.Stream() for _ in range(3)]
    reader = torch.cuda.Stream()
    wrong = 0
    for step in range(9):
        stream = streams[step % 3]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            tensor = torch.full((100_000,), float(step + rank), device="cuda")
            ng.safe_all_reduce(tensor, timeout=60).raise_if_failed()
        tensor.record_stream(reader)
        with torch.cuda.stream(reader):  # the result is there when the call has returned
            seen = tensor.clone()
            del tensor
        torch.full((100_000,), -1.0, device="cuda")
        reader.synchronize()
        wrong += int((seen != float(sum(step + peer for peer in range(size)))).sum())
    faults.report(wrong=wrong)
    leave()


def test_calls_from_several_streams_give_results_that_other_streams_may_read() -> None:
    result = run_together(on_several_streams, 2, env=ENV, timeout=90).check()
    assert result.values("wrong") == {0: 0, 1: 0}


def memory_after_aborts() -> None:
    """Three operations fail in turn, because rank 1 comes late; the memory of each is given back afterwards."""
    rank = join("nccl")
    tensor = torch.ones(5_000_000, device="cuda")
    ng.safe_all_reduce(tensor, timeout=60).raise_if_failed()
    torch.cuda.synchronize()
    gc.collect()
    before, used = torch.cuda.memory_allocated(), []
    for _ in range(3):
        if rank == 1:
            time.sleep(2.0)
        outcome = ng.safe_all_reduce(tensor, timeout=1.0)
        assert not outcome.ok
        ng.safe_all_reduce(tensor.clone(), timeout=60).raise_if_failed()
        gc.collect()
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
    faults.report(used=used, intact=bool((tensor == tensor[0]).all()))
    torch.cuda.empty_cache()
    faults.report(free=torch.empty(1000, device="cuda").fill_(1.0).sum().item())
    leave()


def test_memory_does_not_grow_with_operations_that_fail() -> None:
    result = run_together(memory_after_aborts, 2, env=ENV, timeout=90).check()
    for rank in result:
        used = rank.reports["used"]
        assert used[2] <= used[0], used
        assert rank.reports["intact"]
        assert rank.reports["free"] == 1000.0
