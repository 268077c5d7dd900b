"""The training in nvidia-resiliency-ext's in-process restart, as its basic_example.py has it, and with a prefix for
each restart's keys as in its optimal_example.py: without that the second gloo group reads the first one's addresses."""

import datetime
import os

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.trainings import parts


@inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2})
def main(call_wrapper: inprocess.CallWrapper = None) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        size,
        rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
        use_libuv=True,
    )
    store = dist.PrefixStore(str(call_wrapper.iteration), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=10))
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
            with call_wrapper.atomic():
                parts.save(step + 1, model.module, optimizer)


if __name__ == "__main__":
    main()
