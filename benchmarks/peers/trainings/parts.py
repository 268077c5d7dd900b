"""What the trainings have in common: model, data, checkpoint, the strike, and what they write down."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Final

import torch
from torch import nn

STEPS: Final = 200
#: Steps between two checkpoints.
EVERY: Final = 10
#: The step in which the rank is killed: six steps behind a checkpoint.
STRIKE: Final = 16
WIDTH: Final = 64
_STEP: Final = 0.1  # seconds of computation beside the model's
FOLDER: Final = Path(os.environ.get("PEERS_FOLDER", "."))
#: Which process this is, whatever number it gets later.
NAME: Final = os.environ.get("REPLICA_GROUP_ID", os.environ.get("RANK", "0"))


def model() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def batch(step: int, place: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of one rank, the one at `place` of `size`, in a step."""
    time.sleep(_STEP)
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step * size + place))
    return rows, rows.sum(1, keepdim=True)


def save(step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A checkpoint of the state before `step`, whole or not at all."""
    draft = FOLDER / f".checkpoint.{os.getpid()}"
    torch.save({"step": step, "model": module.state_dict(), "optimizer": optimizer.state_dict()}, draft)
    draft.replace(FOLDER / "checkpoint")


def load(module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The newest checkpoint, if there is one; returns the step to begin with."""
    path = FOLDER / "checkpoint"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def ready(size: int) -> None:
    """Wait once until all have started: nobody is to train alone because imports take unequal time."""
    (FOLDER / f"ready.{NAME}").touch()
    while len(list(FOLDER.glob("ready.*"))) < size:
        time.sleep(0.05)


def strike(moment: str, step: int) -> None:
    """Kill this process, once, where it is told to."""
    struck = FOLDER / "struck"
    if os.environ.get("PEERS_STRIKE") == f"{NAME} {moment}" and step == STRIKE and not struck.exists():
        struck.write_text(json.dumps(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def done(step: int, size: int) -> None:
    """Write down that this process has completed a step, with `size` ranks."""
    line = json.dumps({"step": step, "size": size, "at": time.monotonic(), "name": NAME, "pid": os.getpid()})
    with (FOLDER / f"steps.{NAME}").open("a") as file:
        file.write(line + "\n")
