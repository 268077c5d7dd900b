"""Training under watch() with real FSDP, DeepSpeed and Accelerate, in which rank 2 hangs; run by test_watch_frameworks.py."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.integrations.evaluation_parts import CULPRIT, Block, Model, zero_engine

warnings.filterwarnings("ignore", category=FutureWarning)

LIMIT = 6.0
Step = Callable[[torch.Tensor], object]


def late_and_killed(framework: str) -> None:
    """Rank 2 is late beyond the limit, and the training goes on; then it is killed, and the others end."""
    start = ng.watch(timeout=60)
    step = FRAMEWORKS[framework]()
    train(step, 3)
    late = ng.watch(timeout=LIMIT, on_incident=told("late"))
    train(step, 2)
    if dist.get_rank() == CULPRIT:
        load_the_next_shard(LIMIT + 4)
    train(step, 2)
    killed = ng.watch(timeout=60, on_hang="abort", on_incident=told("killed"))
    train(step, 2)
    faults.report(incidents=[len(watch.incidents) for watch in (start, late, killed)])
    if dist.get_rank() == CULPRIT:
        time.sleep(1)  # until the others are in the next step: its last collective may have ended here first
        faults.report(killed_at=time.time())
        os.kill(os.getpid(), signal.SIGKILL)
    train(step, 1_000_000)


def hangs(framework: str) -> None:
    """Rank 2 stays away: nothing breaks by itself, so the others can only end because they are made to."""
    ng.watch(timeout=60)
    step = FRAMEWORKS[framework]()
    train(step, 3)
    ng.watch(timeout=LIMIT, on_hang="abort", on_incident=told("late"))
    train(step, 2)
    if dist.get_rank() == CULPRIT:
        load_the_next_shard(LIMIT + 5)
        train(step, 1)
    try:
        train(step, 1_000_000)
    except RuntimeError:
        faults.report(ended_at=time.time())
        raise


def load_the_next_shard(seconds: float) -> None:
    faults.report(late_from=time.time())
    time.sleep(seconds)


def train(step: Step, number: int) -> None:
    for _ in range(number):
        step(torch.randn(4, 16))


def told(key: str) -> Callable[[ng.Incident], None]:
    """An on_incident that reports the first incident and when it came; those who were aborted may be another to who is left."""
    seen: list[str] = []

    def report(incident: ng.Incident) -> None:
        seen.append(str(incident))
        if len(seen) == 1:
            faults.report(**{key: {"json": incident.to_json(), "at": time.time()}})
        else:
            faults.report(later=seen[1:])

    return report


# ---------------------------------------------------------------------- a step of each framework


def plain(model: torch.nn.Module) -> Step:
    """Forward, backward and an optimizer that knows of no other rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(inputs: torch.Tensor) -> None:
        (model(inputs) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2() -> Step:
    """`fully_shard`, each block a unit of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model)


def fsdp1() -> Step:
    """`FullyShardedDataParallel`, each block a unit of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    dist.init_process_group("gloo")
    wrapped = FullyShardedDataParallel(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return plain(wrapped)


def zero(stage: int) -> Step:
    """A DeepSpeed engine."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    engine = zero_engine(stage)

    def step(inputs: torch.Tensor) -> None:
        engine.backward((engine(inputs) - 1).square().mean())
        engine.step()

    return step


def accelerated() -> Step:
    """Accelerate around DDP, with a gather for the metrics in each step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(inputs: torch.Tensor) -> None:
        loss = (model(inputs) - 1).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach())

    return step


FRAMEWORKS: dict[str, Callable[[], Step]] = {
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "zero2": lambda: zero(2),
    "zero3": lambda: zero(3),
    "accelerate": accelerated,
}
