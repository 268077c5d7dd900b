"""What the tests of guarded evaluations share: a model, data, a rank that misbehaves, and a report of how each evaluation went."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ncclguard._sockets import connections
from ncclguard.faults.effects import reset_own_connections

CULPRIT = 2
TIMEOUT = 4.0
GIVEN_UP = ("metric", "batches", "skip")
#: fault -> (action, cause, tries); rank 2 is at fault wherever there is a cause
CASES = {
    "none": ("accept", "None", 1),
    "oom": ("accept", "failed", 2),
    "metric": ("give up", "failed", 2),
    "batches": ("give up", "diverged", 2),
    "reset": ("accept", "None", 1),
    "late": ("accept", "late", 2),
    "skip": ("give up", "late", 0),
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
        assert values["seconds"] < 40, (name, rank, values)
