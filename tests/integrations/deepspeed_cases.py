"""Training with real DeepSpeed engines, ZeRO 1, 2 and 3, whose evaluations fail; run by test_deepspeed.py."""

from __future__ import annotations

import logging
import os
import time
import warnings
from datetime import timedelta
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from ncclguard.integrations.deepspeed import patch_trainer

from ncclguard import faults
from ncclguard.evaluation import NOT_EVALUATED
from tests.integrations.evaluation_parts import (
    CONNECTED_WITHIN,
    CULPRIT,
    TIMEOUT,
    Fault,
    attempt,
    start_together,
    summary,
    zero_engine,
)

warnings.filterwarnings("ignore", category=FutureWarning)
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


class Monitor:
    """Takes metrics as trainers' monitors do."""

    def __init__(self) -> None:
        self.logged: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
        self.logged.append((step, metrics))


class Trainer:
    """The usual shape around a DeepSpeed engine."""

    def __init__(self, stage: int) -> None:
        torch.manual_seed(7)
        self.model = zero_engine(stage)
        self.monitor = Monitor()
        self.fault = self.model.module.blocks[1].fault = Fault()
        self.eval_batch_size = 8
        torch.manual_seed(100 + dist.get_rank())

    def train(self) -> float:
        """One step; the mean loss of all ranks."""
        loss = (self.model(torch.randn(4, 16)) - 1).square().mean()
        self.model.backward(loss)
        self.model.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)

    def evaluate(self, step: int | None = None) -> tuple[float, float]:
        """Gathers of ZeRO-3 in the model, a reduction through deepspeed.comm after each batch."""
        self.fault.next_try()
        self.model.eval()
        total = torch.zeros(1)
        with torch.no_grad():
            for _ in range(1 if self.fault.mine and self.fault.name == "batches" else 3):
                found = 1 + 0 * self.model(torch.ones(self.eval_batch_size, 16)).mean().reshape(1)
                deepspeed.comm.all_reduce(found)
                total += found
        self.fault.in_metrics()
        self.model.train()
        return float(total), 1.0


def run(trainer: Trainer, names: list[str], *, evaluate: bool) -> dict[str, Any]:
    """A step of training, an evaluation with a fault, and so on."""
    found: dict[str, Any] = {"losses": [trainer.train()]}
    for number, name in enumerate(names):
        found["losses"] += [trainer.train()]
        if not evaluate or (name == "skip" and dist.get_rank() == CULPRIT):
            continue
        trainer.fault.begin(name)
        logged, started = len(trainer.monitor.logged), time.monotonic()
        result = trainer.evaluate(number)
        found[name] = (
            summary(trainer.evaluate.report, time.monotonic() - started)
            | {  # type: ignore[attr-defined]
                "result": "not evaluated" if result is NOT_EVALUATED else result,
                "logged": trainer.monitor.logged[logged:],
                "modes": [trainer.model.training, trainer.model.module.training],
            }
        )
    found["losses"] += [trainer.train(), trainer.train()]
    return found


def guarded(stages: list[int], names: list[str]) -> None:
    """For each stage the same training twice: without any evaluation, and with those that fail."""
    deepspeed.init_distributed("gloo", verbose=False)
    for stage in stages:
        control = run(Trainer(stage), names, evaluate=False)["losses"]
        trainer = Trainer(stage)
        patch_trainer(trainer, timeout=TIMEOUT, barrier_timeout=TIMEOUT, max_attempts=2, batch_size="eval_batch_size")
        faults.report(**{f"zero{stage}": {"control": control} | run(trainer, names, evaluate=True)})
    dist.barrier()
    dist.destroy_process_group()


def unguarded(name: str, stage: int) -> None:
    """A step of training, an evaluation with the fault, two more steps; plain gloo with a short limit."""
    start_together()
    deepspeed.init_distributed("gloo", verbose=False, timeout=timedelta(seconds=CONNECTED_WITHIN))
    trainer = Trainer(stage)
    trainer.train()
    attempt(trainer.fault, name, trainer.evaluate)
    trainer.model.train()
    faults.report(losses=[trainer.train(), trainer.train()])
