"""What `resilient_step` costs a step of DDP that nothing happens to: the same step with and without, in turns.

    python benchmarks/resilient_step.py [--fsdp | --hsdp] [--ranks 2] [--rounds 40] [--steps 20] [--width 512]
            [--depth 4] [--batch 64]

Three figures, in one run: the time of a block of steps with it through that of the block without it of the same round
(the order alternates). Because what it costs is less than the noise of a step: the time that it takes before and behind
the function in these same steps, where the function has left it none of the processor's caches; and the processor time
of what it does around an empty function, which other programs change little. All on the backend "ncclguard". `--depth`:
pairs of a linear layer and a batch norm. With --fsdp: FSDP2, and `copies=1`. With --hsdp, and 4 ranks or more: two
replicas, and the steps without it are those of another model, whose mesh has groups with sequences of their own.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults

EMPTY = 200


def made(width: int, depth: int, fsdp: bool, hsdp: bool) -> tuple[Any, torch.optim.Optimizer]:
    layers = [part for _ in range(depth) for part in (torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width))]
    model: Any = torch.nn.Sequential(*layers)
    if fsdp or hsdp:
        shape, names = (2, dist.get_world_size() // 2), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if hsdp else None
        for layer in (*layers[::2], model):
            fully_shard(layer, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters())


def rounds(number: int, steps: int, width: int, depth: int, batch: int, fsdp: bool, hsdp: bool) -> None:
    """One rank; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    model, optimizer = made(width, depth, fsdp, hsdp)
    other = made(width, depth, fsdp, hsdp) if hsdp else (model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    data = torch.randn(batch, width)

    def one(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    def plain() -> None:
        one(*other)

    began, ended, around = [0.0], [0.0], list[float]()

    def stamped() -> None:
        began[0] = time.perf_counter()
        one(model, optimizer)
        ended[0] = time.perf_counter()

    copies = {"copies": 1} if fsdp else {}
    train = ng.resilient_step(model, optimizer, keep=[scheduler], **copies)(stamped)

    def resilient() -> None:
        called = time.perf_counter()
        train()
        around.append(began[0] - called + time.perf_counter() - ended[0])

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
        held = sum(shards.nbytes for shards in [train._shards] if shards is not None)
        figures = {"used": statistics.median(blocks), "around": statistics.median(around), "computing": computing}
        faults.report(found=found, held=held, **figures)
    dist.destroy_process_group()


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("ranks", 2), ("rounds", 40), ("steps", 20), ("width", 512), ("depth", 4), ("batch", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 with copies=1")
    parser.add_argument("--hsdp", action="store_true", help="HSDP of two replicas, without copies")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    arguments = [given.rounds, given.steps, given.width, given.depth, given.batch, given.fsdp, given.hsdp]
    said = faults.run_ranks(rounds, given.ranks, args=arguments, timeout=900).check()[0].reports
    step = statistics.median(plain for plain, _ in said["found"])
    ratios = sorted(resilient / plain for plain, resilient in said["found"])
    low, high = statistics.quantiles(ratios, n=4)[::2]
    # Between these two of the sorted values the true median lies with 95 % probability, whatever their distribution.
    aside = math.ceil(0.98 * math.sqrt(len(ratios)) + 0.5)
    least, most = ratios[max(0, len(ratios) // 2 - aside)], ratios[min(len(ratios) - 1, len(ratios) // 2 + aside)]
    print(
        f"torch {torch.__version__}, {given.ranks} ranks on one host with {os.cpu_count()} cores (load {load:.1f} before)"
    )
    print(
        f"a step: {1e3 * step:.2f} ms; resilient / plain {statistics.median(ratios):.4f} (95 % interval {least:.4f} to {most:.4f}; "
        f"quartiles {low:.3f}, {high:.3f})"
    )
    print(f"before and behind the function: {1e6 * said['around']:.0f} us, {said['around'] / step:.2%} of a step")
    print(
        f"around an empty function: {1e6 * said['used']:.0f} us of processor time, {said['used'] / said['computing']:.2%} of a "
        f"step's {1e3 * said['computing']:.2f} ms of processor time"
    )
    if given.fsdp or given.hsdp:
        print(f"copies: {said['held'] / 1e6:.1f} MB of host memory a rank")


if __name__ == "__main__":
    main()
