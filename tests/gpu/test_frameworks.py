"""Unmodified DDP, FSDP2, DeepSpeed ZeRO-2 and ZeRO-3, and Accelerate on the backend "ncclguard" with CUDA tensors: the losses of NCCL, bit for bit."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.frameworks import FRAMEWORKS, build, skip_unless_installed
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, leave, run_together, share_gpu

pytestmark = NEEDS_GPU

RANKS, STEPS = 3, 5
ENV = {**SHARED_GPU, "NCCLGUARD_AUTOSTART": "1", "NCCLGUARD_REPORT_DIR": "none"}


def train(framework: str, backend: str) -> None:
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    step = build(framework)
    torch.manual_seed(100 + dist.get_rank())
    losses = [float(step(torch.randn(8, 20).cuda())).hex() for _ in range(STEPS)]
    faults.report(losses=losses, backend=dist.get_backend())
    leave()


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_the_losses_are_those_of_nccl_bit_for_bit(framework: str) -> None:
    skip_unless_installed(framework)
    found = {}
    for backend in ("nccl", "ncclguard"):
        result = run_together(train, RANKS, args=[framework, backend], env=ENV, timeout=100).check()
        assert set(result.values("backend").values()) == {backend}
        found[backend] = result.values("losses")
    assert len(set(found["nccl"][0])) == STEPS  # it trains
    assert found["ncclguard"] == found["nccl"]


def late_in_training() -> None:
    """Rank 2 is late once beyond the limit, under DDP on the backend "ncclguard"; the error names it on all ranks."""
    torch.cuda.set_device(0)
    share_gpu()
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=6))
    step = build("ddp")
    for number in range(8):
        if number == 4 and dist.get_rank() == 2:
            time.sleep(10.0)
        try:
            step(torch.ones(8, 20, device="cuda"))
            torch.cuda.synchronize()
        except (ng.CollectiveFailed, RuntimeError) as error:  # RuntimeError through autograd
            faults.report(error=str(error))
            break
    faults.wait_until_told("end")  # else the end of one would be what the others hear of
    os._exit(0)


def test_a_late_rank_under_ddp_on_the_backend_is_named_on_all() -> None:
    with faults.start_ranks(late_in_training, RANKS, env=ENV, timeout=90) as job:
        errors = job.wait_for("error", seconds=45)
        job.tell("end")
        job.wait()
    for rank, text in errors.items():
        assert "rank 2 late" in text, (rank, text)
