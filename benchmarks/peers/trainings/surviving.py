"""The training with `ncclguard.resilient_step`, for `ncclguard run`: docs/going-on.md."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from benchmarks.peers.trainings import parts


def main() -> None:
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    model = DistributedDataParallel(parts.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @ng.resilient_step(model, optimizer)
    def train() -> None:
        step = train.completed
        inputs, targets = parts.batch(step, train.ranks.index(rank), len(train.ranks))
        loss = mse_loss(model(inputs), targets)
        parts.strike("forward", step)
        optimizer.zero_grad()
        loss.backward()
        parts.strike("optimizer", step)
        optimizer.step()

    train.completed = parts.load(model.module, optimizer)
    while train.completed < parts.STEPS:
        train()
        parts.done(train.completed - 1, len(train.made_by))
        if rank == train.ranks[0] and train.completed % parts.EVERY == 0:
            parts.save(train.completed, model.module, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
