"""The jobs of `ncclguard drill` without a command: guarded all-reduces, or with `--raw` a training under `watch`."""

from __future__ import annotations

import time
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng

#: Seconds that a step takes beside its collective.
STEP: Final = 0.1


def train(steps: int, timeout: float, numel: int, seed: int) -> None:
    """Run `steps` steps on this rank, each with one all-reduce of `numel` elements that has `timeout` seconds."""
    dist.init_process_group("gloo")
    torch.manual_seed(seed + dist.get_rank())
    weights = torch.zeros(numel)
    on_lost: Literal["fail", "shrink"] = "fail"
    for step in range(steps):
        gradient = torch.randn(numel)
        time.sleep(STEP)
        outcome = ng.safe_all_reduce(gradient, timeout=timeout, on_lost=on_lost)
        if outcome:
            weights -= 0.01 * gradient / len(outcome.participants)
        elif dist.get_rank() in outcome.culprits and not outcome.agreed:
            raise SystemExit(f"step {step}: {outcome.error}")
        else:
            on_lost = "shrink"  # the same on all ranks, as the verdict is
            print(f"rank {dist.get_rank()}: step {step} is left out: {outcome.cause}, ranks {outcome.culprits}")
    dist.destroy_process_group()


def train_watched(steps: int, timeout: float, numel: int, seed: int) -> None:
    """Run `steps` steps of DistributedDataParallel with about `numel` parameters, each limited by `watch` only."""
    dist.init_process_group("gloo")
    ng.watch(timeout=timeout)
    torch.manual_seed(seed)
    width = max(1, int(numel**0.5))
    model = DistributedDataParallel(torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        time.sleep(STEP)
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
