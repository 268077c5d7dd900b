"""A real Accelerate loop whose evaluations fail; run by test_accelerate.py."""

from __future__ import annotations

import os
import time
import warnings
from datetime import timedelta
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import set_seed
from ncclguard.integrations.accelerate import patch_accelerator, resilient_evaluate
from torch.utils.data import DataLoader, TensorDataset

import ncclguard as ng
from ncclguard import faults
from ncclguard.evaluation import NOT_EVALUATED
from tests.integrations.evaluation_parts import (
    CONNECTED_WITHIN,
    CULPRIT,
    GIVEN_UP,
    TIMEOUT,
    Fault,
    Model,
    attempt,
    start_together,
    summary,
)

warnings.filterwarnings("ignore", category=FutureWarning)


class Loop:
    """Gradient accumulation, so that it matters which dataloader Accelerate believes to be in."""

    def __init__(self, limit: float = 1800.0) -> None:
        self.accelerator = Accelerator(
            gradient_accumulation_steps=2, cpu=True,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=limit))],
        )  # fmt: skip
        set_seed(7)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(512, 16, generator=torch.Generator().manual_seed(1)))
        self.model, self.optimizer, loader, self.held_out = self.accelerator.prepare(
            model, optimizer, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data[:42][0], batch_size=4)
        )
        self.fault = self.accelerator.unwrap_model(self.model).blocks[1].fault = Fault()
        self.batches = iter(loader)
        self.logged: list[Any] = []
        set_seed(100, device_specific=True)

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        """As accelerator.log, which has no tracker here."""
        self.logged.append((step, values))

    def train(self) -> float:
        """Two micro-batches; the mean loss of all ranks in the second."""
        self.model.train()
        for _ in range(2):
            (inputs,) = next(self.batches)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(inputs) - 1).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return float(self.accelerator.reduce(loss.detach(), "mean"))

    def evaluate(self, step: int | None = None) -> tuple[int, float]:
        """How many examples were seen by all, without the padding of the last batch."""
        self.fault.next_try()
        self.model.eval()
        outputs = []
        with torch.no_grad():
            for number, inputs in enumerate(self.held_out):
                if self.fault.mine and self.fault.name == "batches" and number == 1:
                    break
                outputs.append(self.accelerator.gather_for_metrics(self.model(inputs)))
        self.accelerator.wait_for_everyone()
        self.fault.in_metrics()
        return len(torch.cat(outputs)), 1.0


def run(loop: Loop, names: list[str], *, evaluate: bool) -> dict[str, Any]:
    """A step of training, an evaluation with a fault, and so on."""
    found: dict[str, Any] = {"losses": [loop.train()]}
    for number, name in enumerate(names):
        found["losses"] += [loop.train()]
        if not evaluate:
            if name not in GIVEN_UP:  # one that succeeds draws random numbers, for its dataloader
                loop.evaluate(number)
            continue
        if name == "skip" and dist.get_rank() == CULPRIT:
            continue
        loop.fault.begin(name)
        logged, started = len(loop.logged), time.monotonic()
        result = loop.evaluate(number)
        found[name] = (
            summary(loop.evaluate.report, time.monotonic() - started)
            | {  # type: ignore[attr-defined]
                "result": "not evaluated" if result is NOT_EVALUATED else result,
                "logged": loop.logged[logged:],
            }
        )
    found["losses"] += [loop.train(), loop.train()]
    return found


def guarded(names: list[str]) -> None:
    """The same training twice: with the evaluations that fail, and with all the others only."""
    control = run(Loop(), names, evaluate=False)["losses"]
    loop = Loop()
    guard = resilient_evaluate(loop.accelerator, timeout=TIMEOUT, barrier_timeout=TIMEOUT, max_attempts=2, monitor=loop)
    loop.evaluate = guard(loop.evaluate)  # type: ignore[method-assign]
    faults.report(control=control, **run(loop, names, evaluate=True))
    patched(loop)
    dist.barrier()
    loop.accelerator.end_training()


def patched(loop: Loop) -> None:
    """Outside of a guarded evaluation: one rank is late for a barrier, one raises before a gather; both are named."""
    accelerator, rank = loop.accelerator, dist.get_rank()
    patch_accelerator(accelerator, timeout=3, barrier_timeout=2)
    accelerator.wait_for_everyone()
    gathered = accelerator.gather_for_metrics(torch.tensor([rank])).tolist()
    if rank == CULPRIT:
        time.sleep(4)
    late = told(accelerator.wait_for_everyone)
    accelerator.wait_for_everyone()
    gather = told(lambda: accelerator.gather_for_metrics(torch.zeros(3 if rank == CULPRIT else 2)))
    again = accelerator.gather_for_metrics(torch.tensor([rank])).tolist()
    faults.report(patched=[gathered, late, gather, again])


def told(call: Any) -> list[Any]:
    """The error of a call: its type and the ranks it names."""
    try:
        call()
    except ng.CollectiveFailed as error:
        return [type(error).__name__, list(error.outcome.culprits)]
    return []


def unguarded(name: str) -> None:
    """A step of training, an evaluation with the fault, two more steps; plain gloo with a short limit."""
    start_together()
    loop = Loop(CONNECTED_WITHIN)
    loop.train()
    attempt(loop.fault, name, loop.evaluate)
    faults.report(losses=[loop.train(), loop.train()])


def late_beside_a_patch() -> None:
    """The last rank is late to a gather of an evaluation, whose limit is far below that of the patch."""
    accelerator = Accelerator(cpu=True)
    patch_accelerator(accelerator, timeout=300)

    @resilient_evaluate(accelerator, timeout=1.5, barrier_timeout=20, max_attempts=1, fallback="not evaluated")
    def evaluate(step: int | None = None) -> float:
        if accelerator.process_index == 1:
            time.sleep(6)
        return float(accelerator.gather_for_metrics(torch.ones(1)).sum())

    faults.report(result=evaluate(), after=float(accelerator.gather_for_metrics(torch.ones(1)).sum()))
    accelerator.end_training()
