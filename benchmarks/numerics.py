"""Make a number that is none on one rank, and look whose the first one is said to be; and what looking costs a step.

    python -m benchmarks.numerics --seeds 50 [--kind ddp fsdp safe]
    python -m benchmarks.numerics --cost [--rounds 40] [--width 512] [--depth 4] [--batch 512]

Each seed makes a model of its own, trains it for some steps, and then on one rank divides the loss by zero, poisons the
gradient behind one layer, puts a NaN into the batch or into one weight ("safe": into a tensor of `safe_all_reduce` or
`safe_reduce_scatter`), while the job goes on until all ranks have it. Right is: that rank, in that step, on all ranks.
`--cost`: steps of DDP with and without `watch_numerics`, in turns.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults

RANKS = 3
KINDS = ("ddp", "fsdp", "safe")


class Poison(torch.autograd.Function):
    """Hands a tensor through; the gradient has a NaN or an infinity in one place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, place: int, number: float) -> torch.Tensor:
        """Remember where."""
        ctx.place, ctx.number = place, number
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """Put the number there."""
        spoilt = gradient.clone()
        spoilt.view(-1)[ctx.place % spoilt.numel()] = ctx.number
        return spoilt, None, None


class Net(nn.Module):
    """Some layers, of which one may have its gradient poisoned."""

    def __init__(self, rng: random.Random, width: int) -> None:
        super().__init__()
        wide = [width, *(rng.randrange(3, 30) for _ in range(rng.randrange(1, 5))), 2]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(wide))
        self.poisoned: tuple[int, int, float] | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            rows = torch.tanh(layer(rows))
            if self.poisoned is not None and self.poisoned[0] == number:
                rows = Poison.apply(rows, *self.poisoned[1:])
        return rows


def campaign(kind: str, first: int, count: int, device: str = "cpu", backend: str = "gloo") -> None:
    """One rank: strike once for each seed, and report what was not right."""
    torch.set_num_threads(1)
    if backend == "nccl":  # ranks that share a GPU look like as many hosts
        os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"
    dist.init_process_group(backend)
    torch.set_default_device(device)
    if kind == "safe":
        ng.configure(numerics="watch")
    wrong = [
        text
        for seed in range(first, first + count)
        if (text := _reduced(seed) if kind == "safe" else _trained(seed, kind))
    ]
    faults.report(wrong=wrong)
    dist.destroy_process_group()


def _trained(seed: int, kind: str) -> str:
    """Train a model, strike, and return what is wrong with what is said of it."""
    rng, rank = random.Random(seed), dist.get_rank()
    torch.manual_seed(seed)
    width = rng.randrange(3, 20)
    net = Net(rng, width)
    model: Any = net
    if kind == "fsdp":
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    else:
        model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    struck, step, how = rng.randrange(RANKS), rng.randrange(1, 9), rng.choice(["loss", "gradient", "batch", "weight"])
    number = rng.choice([float("nan"), float("inf"), float("-inf")])
    layer, place = rng.randrange(len(net.layers)), rng.randrange(1000)
    weight = net.layers[layer].weight if kind == "ddp" else net.layers[layer].weight.to_local()
    if not weight.numel() and how == "weight":
        how = "loss"  # this rank has no part of so small a layer
    hows: list[Any] = [None] * RANKS
    dist.all_gather_object(hows, how)
    how = hows[struck]
    found: list[Any] = []
    with ng.watch_numerics(model, on_found=found.append) as numerics:
        for turn in range(1, step + 4):
            here = rank == struck and turn == step
            rows = torch.randn(5, width)
            net.poisoned = (layer, place, number) if here and how == "gradient" else None
            with torch.no_grad():
                if here and how == "batch":
                    rows.view(-1)[place % rows.numel()] = float("nan")
                if here and how == "weight":
                    weight.view(-1)[place % weight.numel()] = float("nan")
            loss = model(rows).square().mean()
            (loss / 0 if here and how == "loss" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        wanted = [(struck, step)]
        if not _becomes(lambda: _said(numerics.first) == wanted and bool(found) and _said(found[-1]) == wanted):
            what = [str(one) for one in numerics.first]
            return f"{kind} seed {seed}: {how} of rank {struck} in step {step}; rank {rank} says {what}"
    dist.barrier()
    return ""


def _reduced(seed: int) -> str:
    """Reduce with a number that is none in what one rank brings, and return what is wrong with what is said of it."""
    rng, rank = random.Random(seed), dist.get_rank()
    group = dist.new_group(list(range(RANKS)))
    struck, step, scatter = rng.randrange(RANKS), rng.randrange(1, 9), rng.random() < 0.5
    value = torch.zeros(RANKS, rng.randrange(1, 40))
    monitor = ng.engine.runtime.current().monitor
    for turn in range(1, step + 4):
        if rank == struck and turn == step:
            value.view(-1)[rng.randrange(value.numel())] = float("nan")
        if scatter:
            output = torch.zeros(value.shape[1])
            ng.safe_reduce_scatter(output, list(value), group=group).raise_if_failed()
            value = output.expand(RANKS, -1).clone()
        else:
            ng.safe_all_reduce(value, group=group).raise_if_failed()
    (scope,) = [one for one in monitor.nonfinite._all if one not in _seen] or [""]
    _seen.add(scope)
    right = _becomes(lambda: _said(monitor.nonfinite.first(scope)) == [(struck, step)])
    what = [str(one) for one in monitor.nonfinite.first(scope)]
    dist.barrier()
    return "" if right else f"safe seed {seed}: rank {struck} in call {step}; rank {rank} says {what}"


def _said(found: Any) -> list[tuple[int, int]]:
    return [(one.rank, one.number) for one in found]


def _becomes(true: Callable[[], bool]) -> bool:
    """Return whether that becomes true within a minute; ranks hear of each other meanwhile."""
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


_seen: set[str] = set()


def cost(number: int, width: int, depth: int, batch: int) -> None:
    """One rank: blocks of steps with and without the watch, in turns; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.LayerNorm(width)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch, width)

    def timed() -> float:
        dist.barrier()
        started = time.thread_time()
        for _ in range(5):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
        return time.thread_time() - started

    timed()
    found = []
    for turn in range(number):
        times = {}
        for watched in (True, False) if turn % 2 else (False, True):
            numerics = ng.watch_numerics(model) if watched else None
            times[watched] = timed()
            if numerics is not None:
                numerics.close()
        found.append([times[False] / 5, times[True] / 5])
    if dist.get_rank() == 0:
        faults.report(found=found)
    dist.destroy_process_group()


def main() -> None:
    """Run what is asked for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cost", action="store_true")
    for name, value in (("rounds", 40), ("width", 512), ("depth", 4), ("batch", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if given.cost:
        arguments = [given.rounds, given.width, given.depth, given.batch]
        pairs = faults.run_ranks(cost, 2, args=arguments, timeout=900).check()[0].reports["found"]
        ratios = sorted(with_it / plain for plain, with_it in pairs)
        middle = 1e3 * statistics.median(plain for plain, _ in pairs)
        print(
            f"torch {torch.__version__}, 2 ranks on one host with {os.cpu_count()} cores; the main thread's processor time"
        )
        print(f"a step of DDP: {middle:.2f} ms; with watch_numerics / without: {statistics.median(ratios):.3f} "
              f"(quartiles {ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}, {len(ratios)} rounds)")  # fmt: skip
        return
    for kind in given.kind:
        said = faults.run_ranks(campaign, RANKS, args=[kind, given.first, given.seeds], timeout=60 + 20 * given.seeds)
        wrong = sorted({text for one in said.check() for text in one.reports["wrong"]})
        print(f"{kind}: {given.seeds} seeds, {len({text.split(':')[0] for text in wrong})} not right on all ranks")
        print(*wrong, sep="\n", end="\n" if wrong else "")


if __name__ == "__main__":
    main()
