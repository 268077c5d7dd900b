"""`ncclguard.watch` compares what the ranks have called: NCCL, which sees bytes, ends collectives that do not fit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime
from tests.gpu.parts import DEVICE, NCCL_BACKENDS, NEEDS_GPU, SHARED_GPU, join, leave, run_together

pytestmark = NEEDS_GPU

RANKS, CULPRIT = 3, 2
ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}


def calls_a_barrier(backend: str) -> None:
    """From some step on rank 2 is in a barrier where the others reduce one number: to NCCL that is the same."""
    handle = ng.watch(timeout=60)
    rank = join(backend)
    step, going, end = 0, torch.ones(1, device=DEVICE), time.monotonic() + 40
    while going.item():
        if rank == CULPRIT and step >= 20:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1, device=DEVICE))
        going.fill_(float(not handle.incidents and time.monotonic() < end))
        dist.broadcast(going, src=0)
        step += 1
        time.sleep(0.03)
    while not handle.incidents and time.monotonic() < end:
        time.sleep(0.1)
    faults.report(incidents=[incident.to_json() for incident in handle.incidents])
    leave()


@pytest.mark.parametrize("backend", NCCL_BACKENDS)
def test_a_mismatch_with_which_nothing_stands_still_is_told_on_all_ranks(backend: str) -> None:
    result = run_together(calls_a_barrier, RANKS, args=[backend], env=ENV)
    for rank in range(RANKS):
        incidents = [ng.Incident.from_json(text) for text in result[rank].reports["incidents"]]
        assert [(str(one.cause), one.culprits) for one in incidents] == [("diverged", (CULPRIT,))], str(result)
        assert "has ended, and not all ranks called the same" in incidents[0].summary


def calls_together(backend: str) -> None:
    """Calls that are issued as one, and messages among them, which only some ranks have."""
    handle = ng.watch(timeout=60)
    rank = join(backend)
    x = torch.ones(6, device=DEVICE)
    parts = [torch.ones(2, device=DEVICE) for _ in range(3)]
    watcher: Any = runtime.current().watcher
    end, going = time.monotonic() + 40, torch.ones(1, device=DEVICE)
    while going.item():
        with dist._coalescing_manager(group=dist.group.WORLD, device=DEVICE, async_ops=True) as manager:
            for part in parts:
                dist.all_reduce(part)
        manager.wait()
        if rank < 2:
            kind = dist.isend if rank == 0 else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(kind, x, 1 - rank)]):
                work.wait()
        dist.all_gather([torch.empty_like(x) for _ in range(RANKS)], x)
        dist.all_to_all_single(torch.empty(RANKS, device=DEVICE), torch.ones(RANKS, device=DEVICE))
        dist.barrier()
        going.fill_(float(watcher._comparison._begun < 3 and time.monotonic() < end))
        dist.broadcast(going, src=0)
    faults.report(incidents=[str(one) for one in handle.incidents], compared=watcher._comparison._begun)
    leave()


@pytest.mark.parametrize("backend", NCCL_BACKENDS)
def test_nobody_is_named_for_calls_that_are_issued_together(backend: str) -> None:
    result = run_together(calls_together, RANKS, args=[backend], env=ENV)
    for rank in range(RANKS):
        assert result[rank].reports["incidents"] == [], str(result)
        assert result[rank].reports["compared"] >= 2, str(result)
