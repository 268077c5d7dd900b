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
    def train(step: int) -> None:
        inputs, targets = parts.batch(step, train.ranks.index(rank), len(train.ranks))
        loss = mse_loss(model(inputs), targets)
        parts.strike("forward", step)
        optimizer.zero_grad()
        loss.backward()
        parts.strike("optimizer", step)
        optimizer.step()

    first = parts.load(model.module, optimizer)
    for step in range(first, parts.STEPS):
        train(step)
        parts.done(step, len(train.ranks))
        if rank == train.ranks[0] and (step + 1) % parts.EVERY == 0:
            parts.save(step + 1, model.module, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
