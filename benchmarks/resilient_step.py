"""What `resilient_step` costs a step of DDP that nothing happens to: the same step with and without, in turns.

    python benchmarks/resilient_step.py [--fsdp] [--ranks 2] [--rounds 40] [--steps 20] [--width 512] [--depth 4]
            [--batch 64]

Two figures, in one run: the time of a block of steps with it through that of the block without it of the same round
(the order alternates); and, because that is less than the noise of a step, the processor time of what it does around an
empty function, as a share of the processor time of a plain step, which other programs change little. Both on the
backend "ncclguard". `--depth`: pairs of a linear layer and a batch norm. With --fsdp: FSDP2, and `copies=1`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults

EMPTY = 200


def rounds(number: int, steps: int, width: int, depth: int, batch: int, fsdp: bool) -> None:
    """One rank; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))]
    model: Any = torch.nn.Sequential(*layers)
    if fsdp:
        for layer in (*layers[::2], model):
            fully_shard(layer)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    data = torch.randn(batch, width)

    def plain() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    copies = {"copies": 1} if fsdp else {}
    resilient = ng.resilient_step(model, optimizer, keep=[scheduler], **copies)(plain)
    empty = ng.resilient_step(model, optimizer, keep=[scheduler], **copies)(lambda: None)

    def timed(step: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
        step()  # copies what the steps without copies have changed
        dist.barrier()
        started = clock()
        for _ in range(steps):
            step()
        dist.barrier()
        return (clock() - started) / steps

    for step in (plain, resilient):
        timed(step)
    found = []
    for turn in range(number):
        order = (plain, resilient) if turn % 2 else (resilient, plain)
        times = {step is resilient: timed(step) for step in order}
        found.append([times[False], times[True]])
    computing = min(timed(plain, time.process_time) for _ in range(3))
    empty()
    blocks = []
    for _ in range(5):
        used = time.thread_time()
        for _ in range(EMPTY):
            empty()
        blocks.append((time.thread_time() - used) / EMPTY)
    if dist.get_rank() == 0:
        held = sum(shards.nbytes for shards in [resilient._shards] if shards is not None)
        faults.report(found=found, used=statistics.median(blocks), computing=computing, held=held)
    dist.destroy_process_group()


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("ranks", 2), ("rounds", 40), ("steps", 20), ("width", 512), ("depth", 4), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 with copies=1")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    arguments = [given.rounds, given.steps, given.width, given.depth, given.batch, given.fsdp]
    said = faults.run_ranks(rounds, given.ranks, args=arguments, timeout=900).check()[0].reports
    step = statistics.median(plain for plain, _ in said["found"])
    ratios = sorted(resilient / plain for plain, resilient in said["found"])
    low, high = statistics.quantiles(ratios, n=4)[::2]
    print(
        f"torch {torch.__version__}, {given.ranks} ranks on one host with {os.cpu_count()} cores (load {load:.1f} before)"
    )
    print(
        f"a step: {1e3 * step:.2f} ms; resilient / plain {statistics.median(ratios):.3f} (quartiles {low:.3f}, {high:.3f})"
    )
    print(
        f"around an empty function: {1e6 * said['used']:.0f} us of processor time, {said['used'] / said['computing']:.2%} of a "
        f"step's {1e3 * said['computing']:.2f} ms of processor time"
    )
    if given.fsdp:
        print(f"copies: {said['held'] / 1e6:.1f} MB of host memory a rank")


if __name__ == "__main__":
    main()
