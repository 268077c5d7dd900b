"""One small model under each framework that trains over torch.distributed, unmodified: what the GPU tests run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

#: A step of training on a batch of 20 features for each sample; returns the loss.
Step = Callable[[torch.Tensor], torch.Tensor]


def ddp() -> Step:
    return _training(DistributedDataParallel(_model(), device_ids=[torch.cuda.current_device()]))


def fsdp2() -> Step:
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    return _training(fully_shard(_model(), mesh=mesh))


def zero2() -> Step:
    return _deepspeed({"stage": 2, "reduce_bucket_size": 500})


def zero3() -> Step:
    return _deepspeed({"stage": 3, "reduce_bucket_size": 500, "stage3_param_persistence_threshold": 0})


def accelerate() -> Step:
    """As DDP, and the loss is the mean over all ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    step = _training(accelerator.prepare(_model()), accelerator.backward)
    return lambda batch: accelerator.gather(step(batch)).mean()


FRAMEWORKS: dict[str, Callable[[], Step]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "zero2": zero2,
    "zero3": zero3,
    "accelerate": accelerate,
}
NEEDS = {"zero2": "deepspeed", "zero3": "deepspeed", "accelerate": "accelerate"}


def skip_unless_installed(framework: str) -> None:
    if framework in NEEDS and importlib.util.find_spec(NEEDS[framework]) is None:
        pytest.skip(f"needs {NEEDS[framework]}: an extra of this project")


def build(framework: str) -> Step:
    """The step of a framework, in a rank that has joined its process group."""
    os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # DeepSpeed and Accelerate choose the device by it
    return FRAMEWORKS[framework]()


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1)).cuda()


def _loss(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (module(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def _training(module: torch.nn.Module, backward: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(module, batch)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def _deepspeed(zero: dict[str, float]) -> Step:
    import deepspeed

    module = _model()
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
