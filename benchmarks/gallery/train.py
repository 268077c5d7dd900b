"""The program that the gallery drills: steps of a gradient's all-reduce and a loss's, guarded, on gloo."""

import logging
import os
import time

import torch
import torch.distributed as dist

import ncclguard as ng

STEPS, LIMIT = 7, 3.0  # seconds
logging.basicConfig(level=logging.ERROR)


def step(number: int, on_lost: str) -> bool:
    """Whether the step counts: on a failure all ranks leave it out."""
    gradient, loss = torch.randn(100_000), torch.rand(1)
    time.sleep(0.1)
    for tensor, name in ((gradient, "gradient"), (loss, "loss")):
        outcome = ng.safe_all_reduce(tensor, timeout=LIMIT, on_lost=on_lost, name=name)
        if not outcome:
            print(f"rank {dist.get_rank()}: step {number} is left out: {outcome.cause}, ranks {outcome.culprits}")
            return False
    return True


def main() -> None:
    """Train; after a failure go on without ranks that are gone."""
    dist.init_process_group("gloo")
    on_lost = "fail"
    for number in range(STEPS):
        if not step(number, on_lost):
            on_lost = "shrink"
    dist.destroy_process_group()


def watched() -> None:
    """The same without a guarded call, under `watch()`."""
    dist.init_process_group("gloo")
    ng.watch(timeout=LIMIT)
    for _ in range(STEPS):
        time.sleep(0.1)
        dist.all_reduce(torch.randn(100_000))
        dist.all_reduce(torch.rand(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    watched() if os.environ.get("WATCHED") else main()
