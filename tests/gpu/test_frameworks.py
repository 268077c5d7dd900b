"""Unmodified DDP, FSDP2, DeepSpeed ZeRO-2 and Accelerate on the backend "ncclguard" with CUDA tensors: the losses of NCCL, bit for bit."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU

pytestmark = NEEDS_GPU

RANKS, STEPS = 3, 5
ENV = {**SHARED_GPU, "NCCLGUARD_AUTOSTART": "1", "NCCLGUARD_REPORT_DIR": "none"}
Step = Callable[[torch.Tensor], torch.Tensor]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1)).cuda()


def plain_step(module: torch.nn.Module) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = (module(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp() -> Step:
    return plain_step(DistributedDataParallel(model(), device_ids=[torch.cuda.current_device()]))


def fsdp2() -> Step:
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    return plain_step(fully_shard(model(), mesh=mesh))


def zero2() -> Step:
    import deepspeed

    module = model()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 500},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (engine(batch) - batch.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def accelerate() -> Step:
    from accelerate import Accelerator

    accelerator = Accelerator()
    module, optimizer = accelerator.prepare(model(), torch.optim.SGD(model().parameters(), lr=1e-2))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (module(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        total: torch.Tensor = accelerator.gather(loss.detach())
        return total.mean()

    return step


FRAMEWORKS = {"ddp": ddp, "fsdp2": fsdp2, "zero2": zero2, "accelerate": accelerate}
NEEDS = {"zero2": "deepspeed", "accelerate": "accelerate"}


def train(framework: str, backend: str) -> None:
    os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    step = FRAMEWORKS[framework]()
    torch.manual_seed(100 + dist.get_rank())
    losses = [float(step(torch.randn(8, 20).cuda())).hex() for _ in range(STEPS)]
    faults.report(losses=losses, backend=dist.get_backend())
    os._exit(0)


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_the_losses_are_those_of_nccl_bit_for_bit(framework: str) -> None:
    if framework in NEEDS and importlib.util.find_spec(NEEDS[framework]) is None:
        pytest.skip(f"needs {NEEDS[framework]}")
    found = {}
    for backend in ("nccl", "ncclguard"):
        result = faults.run_ranks(train, RANKS, args=[framework, backend], env=ENV, timeout=100).check()
        assert set(result.values("backend").values()) == {backend}
        found[backend] = result.values("losses")
    assert len(set(found["nccl"][0])) == STEPS  # it trains
    assert found["ncclguard"] == found["nccl"]


def late_in_training() -> None:
    """Rank 2 is late once beyond the limit, under DDP on the backend "ncclguard"; the error names it on all ranks."""
    torch.cuda.set_device(0)
    os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=3))
    step = ddp()
    for number in range(8):
        if number == 4 and dist.get_rank() == 2:
            time.sleep(6.0)
        try:
            step(torch.ones(8, 20, device="cuda"))
            torch.cuda.synchronize()
        except (ng.CollectiveFailed, RuntimeError) as error:  # RuntimeError through autograd
            faults.report(error=str(error))
            break
    faults.wait_until_told("end")  # else the end of one would be what the others hear of
    os._exit(0)


def test_a_late_rank_under_ddp_on_the_backend_is_named_on_all() -> None:
    with faults.start_ranks(late_in_training, RANKS, env=ENV, timeout=60) as job:
        errors = job.wait_for("error", seconds=30)
        job.tell("end")
        job.wait()
    for rank, text in errors.items():
        assert "rank 2 late" in text, (rank, text)
