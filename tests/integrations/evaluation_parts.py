"""What the tests of guarded evaluations share: a model, data, a rank that misbehaves, and a report of how each evaluation went."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ncclguard import faults, torch_compat
from ncclguard.faults.injection import reset_own_connections, store_ports
from ncclguard.torch_compat.sockets import connections
from tests import gloo_aborts

CULPRIT = 2
TIMEOUT = 4.0
CONNECTED_WITHIN = 60.0  # the limit of the process group where there is no guard, as far as the evaluation
LIMIT = 6.0  # and from there on
BOUND = 60.0  # what an evaluation without a guard, and the training after it, may take before the job is ended
UNCAUGHT = "metric, not caught"
GIVEN_UP = ("metric", "batches", "skip")
#: fault -> (action, cause, tries); rank 2 is at fault wherever there is a cause, and late by more than two limits in "late"
CASES = {
    "none": ("accept", "None", 1),
    "oom": ("accept", "failed", 2),
    "metric": ("give up", "failed", 1),
    "batches": ("give up", "diverged", 2),
    "reset": ("accept", "None", 1),
    "late": ("accept", "late", 2),
    "skip": ("give up", "diverged", 0),
}


class Block(nn.Module):
    """A layer whose forward pass can be made to fail in the middle of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.fault: Fault | None = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.fault is not None and not self.training:
            self.fault.strike()
        result: torch.Tensor = states + self.dropout(torch.relu(self.linear(states)))
        return result


class Model(nn.Module):
    """Three such layers and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        output: torch.Tensor = self.head(inputs)
        return output


def zero_engine(stage: int) -> Any:
    """A `Model` under a real DeepSpeed engine; with stage 3 all but its smallest parameters are partitioned."""
    import deepspeed

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class Fault:
    """What rank 2 does in the middle of the forward pass of an evaluation's second batch."""

    def __init__(self) -> None:
        self.name = ""
        self.tries = 0
        self.passes = 0
        self.older: set[int] = set()  # ports of connections that training uses: a reset must not hit those

    def begin(self, name: str) -> None:
        """Before an evaluation."""
        self.name, self.tries = name, 0
        self.older = self.older or {p for c in connections(lambda *_: True) for p in (c.local[1], c.remote[1])}

    def next_try(self) -> None:
        """At the beginning of each try."""
        self.tries += 1
        self.passes = 0
        if self.name in GIVEN_UP or (self.name in ("oom", "late") and self.tries == 1):
            torch.rand(3)  # a try that fails may not move the random numbers

    @property
    def mine(self) -> bool:
        return dist.get_rank() == CULPRIT

    def strike(self) -> None:
        """Called by the model."""
        self.passes += 1
        if not self.mine or self.passes != 2:
            return
        if self.name == "oom" and self.tries == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.name == "late" and self.tries == 1:
            time.sleep(2 * TIMEOUT + 1)
        if self.name == "reset":
            reset_own_connections(self.older)

    def in_metrics(self) -> None:
        """Called by the metric code."""
        if self.mine and self.name == "metric":
            raise KeyError("f1")


def summary(report: Any, seconds: float) -> dict[str, Any]:
    """What the tests look at, as JSON."""
    return {
        "report": [report.action.value, str(report.cause), report.attempts],
        "culprits": list(report.culprits),
        "text": str(report),
        "seconds": seconds,
    }


def check(found: dict[int, dict[str, Any]], name: str) -> None:
    """The same, right report on all ranks."""
    action, cause, tries = CASES[name]
    assert sorted(found) == [rank for rank in range(4) if (name, rank) != ("skip", CULPRIT)], name
    for rank, values in found.items():
        assert values["report"] == [action, cause, tries], (name, rank, values)
        assert values["culprits"] == ([] if cause == "None" else [CULPRIT]), (name, rank, values)
        failed = tries - 1 if action == "accept" else tries
        waits = 1 + failed + (name == "late")  # each try that failed, the meeting or the try after it; late for both
        assert values["seconds"] < waits * (TIMEOUT + 2), (name, rank, values)


def attempt(fault: Fault, name: str, evaluate: Callable[[], Any]) -> None:
    """An evaluation with a fault and no guard, on connections that training uses as well."""
    for group in torch_compat.known_groups():
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=LIMIT))
    fault.older = store_ports()
    fault.begin("metric" if name == UNCAUGHT else name)
    faults.report(evaluating=True)
    if name == "skip" and fault.mine:
        return
    started = time.monotonic()
    try:
        evaluate()
        caught = ""
    except Exception as error:  # as the usual advice has it
        if name == UNCAUGHT:
            raise
        caught = f"{type(error).__name__}: {error}"
    faults.report(caught=caught, seconds=time.monotonic() - started)


def start_together() -> None:
    """Wait until all ranks have got here: who imports slowly would use up the others' limit."""
    faults.report(imported=True)
    faults.wait_until_told("go", seconds=300)


def without_guard(program: Path, *args: Any) -> dict[str, faults.JobResult]:
    """How a job of 4 ranks ends with each fault, and without one.

    The jobs run at the same time: most of it is waiting.
    """
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(faults.start_ranks(f"{program}:unguarded", 4, args=[name, *args], timeout=600))
            for name in (*CASES, UNCAUGHT)
        }
        for job in jobs.values():
            job.wait_for("imported", seconds=200)
        for job in jobs.values():  # one after the other: starting all at once would use up the limit
            job.tell("go")
            job.wait_for("evaluating", seconds=60)
        end = time.monotonic() + BOUND
        return {name: job.wait(max(5.0, end - time.monotonic())) for name, job in jobs.items()}


def check_without_guard(ended: dict[str, faults.JobResult], aborting: tuple[str, ...] = ()) -> None:
    """No rank gets through the next step of training, whatever the fault; with those in `aborting`, gloo ends a rank.

    The exception is one in the metric code that is caught: no collective comes after it, so nobody waits for rank 2. All ranks
    train on alike, but rank 2 alone has no metrics, and the random numbers of training have moved on. Not caught, as
    the Trainer has it, it ends the job like the other faults.
    """
    for name, job in ended.items():
        caught, seconds, losses = (job.values(key) for key in ("caught", "seconds", "losses"))
        others = {rank: text for rank, text in caught.items() if rank != CULPRIT}
        aborted = [rank.rank for rank in job if gloo_aborts.aborted(rank)]
        assert job.still_running == (), (name, str(job))
        assert job.left_running == (), name
        if name in ("none", "metric"):
            assert job.ok, (name, str(job))
            assert caught == dict.fromkeys(range(4), "") | ({CULPRIT: "KeyError: 'f1'"} if name == "metric" else {})
            assert len({str(values) for values in losses.values()}) == 1, (name, losses)
            continue
        assert {rank.end for rank in job if rank.rank not in aborted} <= {"exit 1"}, (name, str(job))
        assert losses == {}, (name, str(job))
        assert bool(aborted) == (name in aborting), (name, str(job))
        assert CULPRIT not in aborted, (name, str(job))
        assert sorted([*others, *aborted]) == [0, 1, 3], (name, str(job))
        assert not any("rank 2" in text.lower() for text in others.values()), (name, others)
        if name == UNCAUGHT:  # the others have evaluated, and miss rank 2 when they train
            assert set(others.values()) == {""}, (name, others)
            assert "KeyError: 'f1'" in job[CULPRIT].output
            continue
        assert all(text.startswith("RuntimeError: ") for text in others.values()), (name, others)
        if name != "reset" and name not in aborting:  # then they know at once: a connection of theirs breaks
            assert max(seconds[rank] for rank in others) > LIMIT - 0.5, (name, seconds)
        mine = caught.get(CULPRIT)
        if name == "skip":
            assert mine is None
        elif name == "oom":
            assert mine.startswith("OutOfMemoryError: "), mine
        elif name == "late":
            assert mine.startswith("RuntimeError: "), mine
            assert seconds[CULPRIT] > 2 * TIMEOUT
        elif name == "reset":
            assert mine.startswith("RuntimeError: "), mine
            assert seconds[CULPRIT] < LIMIT
    assert ended["metric"].values("losses") != ended["none"].values("losses")
