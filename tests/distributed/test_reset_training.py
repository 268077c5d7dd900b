"""Training on the backend "ncclguard" goes through resets of its connections, and nobody can tell from the losses."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ncclguard import faults
from ncclguard.engine import runtime

STEPS, RESET_IN = 20, (5, 10, 15)


def train(reset: bool) -> None:
    """DDP; rank 1 resets its connections in the middle of three of the steps."""
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    inputs = torch.randn(32, 512, generator=torch.Generator().manual_seed(rank))
    losses = []
    for step in range(STEPS):
        if reset and rank == 1 and step in RESET_IN:
            threading.Timer(0.02, faults.reset_own_connections).start()
        loss = wrapped(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        time.sleep(0.01)
    generations = [guarded._member.generation for _, guarded in runtime.current()._groups.values()]
    faults.report(losses=losses, generations=generations)
    dist.destroy_process_group()


@pytest.mark.parametrize("memory", ["1", "0"])
def test_three_resets_in_twenty_steps_leave_every_loss_bit_identical(memory: str) -> None:
    """By memory and by sockets; the connections were made anew at least once."""
    env = {"NCCLGUARD_CROSS_MEMORY": memory}
    undisturbed = faults.run_ranks(train, 2, args=[False], env=env, timeout=60).check()
    disturbed = faults.run_ranks(train, 2, args=[True], env=env, timeout=60).check()
    assert len(undisturbed[0].reports["losses"]) == STEPS
    assert disturbed.values("losses") == undisturbed.values("losses")
    assert undisturbed.values("generations") == {0: [0], 1: [0]}
    assert all(generations[0] >= 1 for generations in disturbed.values("generations").values()), disturbed
