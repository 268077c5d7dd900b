"""`resilient_evaluate` around an evaluation on NCCL: an out-of-memory on one rank, once and in each try, and training goes on."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from tests.distributed.test_evaluation_goes_on import train
from tests.distributed.test_training import Kill
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join, leave, run_together, share_gpu

pytestmark = NEEDS_GPU

RANKS, CULPRIT = 3, 2


def training(always: bool) -> None:
    """Evaluation with raw collectives of the program's own NCCL group would hang; those inside are the guard's."""
    rank = join("nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(20, 1).cuda(), device_ids=[torch.cuda.current_device()])
    tries = []

    @ng.resilient_evaluate(
        timeout=timedelta(seconds=8), barrier_timeout=timedelta(seconds=20), max_attempts=2, fallback=None
    )
    def evaluate(step: int | None = None) -> float:
        model.eval()
        tries.append(step)
        total = torch.zeros(2, device="cuda")
        with torch.no_grad():
            for batch in range(4):
                if rank == CULPRIT and batch == 2 and (always or len(tries) == 1):
                    raise torch.OutOfMemoryError("CUDA out of memory")
                loss = model(torch.ones(8, 20, device="cuda") * batch).square().mean()
                total += torch.stack([loss, torch.ones_like(loss)])
                dist.all_reduce(total)
        model.train()
        return float(total[0] / total[1])

    result = evaluate(step=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.ones(8, 20, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    faults.report(result=result, tries=len(tries), mode=model.training, trained=True)
    leave()


@pytest.mark.parametrize("always", [False, True])
def test_out_of_memory_on_one_rank(always: bool) -> None:
    env = {**SHARED_GPU, "NCCLGUARD_AUTOSTART": "1", "NCCLGUARD_REPORT_DIR": "none"}
    result = run_together(training, RANKS, args=[always], env=env, timeout=100).check()
    for rank in result:
        assert rank.reports["trained"]
        assert rank.reports["mode"]
        assert rank.reports["tries"] == 2
        assert (rank.reports["result"] is None) is always
    assert len({str(rank.reports["result"]) for rank in result}) == 1


def train_and_evaluate(kills: list[Kill], port: int, options: dict[str, Any]) -> None:
    share_gpu()
    torch.cuda.set_device(0)
    train(kills, port, options)
    os._exit(0)


@pytest.mark.parametrize("backend", ["ncclguard", "ncclguard-nccl"])
def test_all_others_evaluate_again_when_a_rank_is_killed_in_one(backend: str) -> None:
    """Also where collectives are only enqueued: in a step, and in two evaluations, in which another runs out of memory."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kills = [(2, 1, "train"), (0, 2, "inside")]
    options = {"backend": backend, "device": "cuda", "fits": 4, "small": 1}
    env = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
    job = faults.run_ranks(train_and_evaluate, 4, args=[kills, store.port, options], env=env, timeout=120)
    for rank in (1, 3):
        assert job[rank].reports["results"] == [4, 3, 2, 2], job
        assert job[rank].reports["tries"][-2:] == [8, 4], job
        assert "cause: network" not in job[rank].output, job[rank].output
