"""One rank of a job of Accelerate or DeepSpeed of which rank 1 sleeps in its evaluation; run by test_hang_frameworks.py."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

LATE = 1


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))


def ready() -> None:
    """Say that this rank is about to evaluate."""
    Path(os.environ["HANG_READY"] + os.environ["RANK"]).touch()


def score_samples() -> None:
    if os.environ["RANK"] == str(LATE):
        time.sleep(600)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    made = model()
    trained, optimizer = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(trained(torch.ones(4, 20)).sum())
        optimizer.step()
    ready()
    score_samples()
    accelerator.gather_for_metrics(torch.ones(4))


def deepspeed(stage: int) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    made = model()
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=settings)
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 20)).sum())
        engine.step()
    ready()
    engine.eval()
    score_samples()
    with torch.no_grad():
        loss = engine(torch.ones(4, 20)).sum()  # gathers what ZeRO 3 has partitioned
    deepspeed.comm.all_reduce(loss)


if __name__ == "__main__":
    torch.set_num_threads(1)
    case = next(word for word in sys.argv[1:] if not word.startswith("-"))
    accelerate() if case == "accelerate" else deepspeed(int(case[-1]))
