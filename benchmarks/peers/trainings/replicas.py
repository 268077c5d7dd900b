"""The training with torchft, as its train_ddp.py has it: each process is a replica group of its own torchrun.

PEERS_PURE: with torchft's wrapper that is written in Python.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.ddp import PureDistributedDataParallel

from benchmarks.peers.trainings import parts


def main() -> None:
    parts.ready(int(os.environ["NUM_REPLICA_GROUPS"]))

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{os.environ['REPLICA_GROUP_ID']}",
        timeout=timedelta(seconds=10),
    )
    wrapper = PureDistributedDataParallel if os.environ.get("PEERS_PURE") else DistributedDataParallel
    model = wrapper(manager, parts.model())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    while (step := manager.current_step()) < parts.STEPS:
        optimizer.zero_grad()  # begins the quorum
        rank, size = manager.participating_rank(), manager.num_participants()
        inputs, targets = parts.batch(step, rank or 0, size)
        loss = mse_loss(model(inputs), targets)
        parts.strike("forward", step)
        loss.backward()
        parts.strike("optimizer", step)
        optimizer.step()
        if manager.current_step() > step:  # else the step was not committed, and is done again
            parts.done(manager.current_step() - 1, size)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
