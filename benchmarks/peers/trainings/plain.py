"""DDP with checkpoints, for `torchrun --max-restarts`: what the other trainings are compared with."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.trainings import parts


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(parts.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = parts.load(model.module, optimizer)
    for step in range(first, parts.STEPS):
        inputs, targets = parts.batch(step, rank, size)
        loss = mse_loss(model(inputs), targets)
        parts.strike("forward", step)
        optimizer.zero_grad()
        loss.backward()
        parts.strike("optimizer", step)
        optimizer.step()
        parts.done(step, size)
        if rank == 0 and (step + 1) % parts.EVERY == 0:
            parts.save(step + 1, model.module, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
