"""Flip bits at random, and look who is named; and what comparing costs a step.

    python -m benchmarks.replicas --seeds 200 [--kind ddp fsdp hsdp hsdp-2x2 copies transfer] [--write FILE]
    python -m benchmarks.replicas --cost [--every 20] [--rounds 40] [--width 512] [--depth 4] [--batch 512]

Each seed makes a model of its own (widths, batch norm of either kind or none, dropout, float32 or mixed precision or
bfloat16, one of six optimizers) and some steps with a check behind each, which must find nothing; then one bit of one
element of a weight, a moment, a counter or a constant buffer is flipped on one rank, and the next check must find that
element, and name that rank where there is a majority; with `repair` all must agree again. "copies": a bit of a copy
that a rank keeps of an FSDP2 shard flips, and a rank is lost: what goes on has to be what was there before, to the last
bit, or is refused with the name of who kept it. "transfer": a bit flips in what a rank receives of copies or of shards.
`--cost`: steps of DDP under `resilient_step` with and without `check_every`, in turns, of one block each.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.replicas.tensors import Item, collect
from ncclguard.training import shards

#: Ranks, and the mesh of those that are sharded; replicas of each part.
KINDS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "ddp": (3, (), 3), "fsdp": (3, (3,), 3), "hsdp": (6, (3, 2), 3), "hsdp-2x2": (4, (2, 2), 2), "copies": (4, (4,), 0),
    "transfer": (4, (4,), 0),
}  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.LayerNorm, nn.Identity)
OPTIMIZERS: tuple[Any, ...] = (
    lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9), lambda parameters: torch.optim.Adam(parameters),
    lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), lambda parameters: torch.optim.RMSprop(parameters),
    lambda parameters: torch.optim.Adagrad(parameters), lambda parameters: torch.optim.Adam(parameters, foreach=True),
)  # fmt: skip


class Job:
    """A model, its optimizer and its steps, as a seed has them; alike on all ranks but for the data."""

    def __init__(self, seed: int, mesh: tuple[int, ...]) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        width, inner = rng.randrange(3, 40), rng.randrange(3, 40)
        norm = rng.choice(NORMS)
        self.width = width
        self.dtype = torch.bfloat16 if rng.random() < 0.25 else torch.float32
        self.mixed = self.dtype is torch.float32 and rng.random() < 0.5
        model: Any = nn.Sequential(
            nn.Linear(width, inner),
            norm(inner),
            nn.Dropout(rng.random() / 2),
            nn.Linear(inner, width),
            nn.Linear(width, 2),
        ).to(self.dtype)
        model.register_buffer("mask", torch.arange(7.0))
        if mesh:
            names = ("replicate", "shard")[2 - len(mesh) :]
            over = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            for layer in (model[0], model[3], model):
                fully_shard(layer, mesh=over)
            self.model = model
        else:
            self.model = DistributedDataParallel(model)
        self.optimizer = rng.choice(OPTIMIZERS)(self.model.parameters())
        torch.manual_seed(1000 * seed + dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.mixed):
            loss = self.model(torch.randn(5, self.width).to(self.dtype)).float().square().mean()
        loss.backward()
        self.optimizer.step()


def flip(data: torch.Tensor, place: int, bit: int) -> None:
    raw = data.view(-1).view(torch.uint8)
    raw[place * data.element_size() + bit // 8] ^= 1 << bit % 8


def on_all(value: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def seeds(kind: str, first: int, count: int) -> None:
    """One rank of a campaign in which replicas are compared; reports wrong answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, mesh, replicas = KINDS[kind]
    wrong, clean, found = list[str](), 0, {"named": 0, "nobody": 0}
    for seed in range(first, first + count):
        job = Job(seed, mesh)
        rng = random.Random(seed)
        for _ in range(rng.randrange(2, 6)):
            job.step()
            clean += 1
            report = ng.check_replicas(job.model, job.optimizer)
            if not report:
                wrong.append(f"seed {seed}: false alarm: {report}")
        items = [item for item in collect([job.model], [job.optimizer]).items
                 if item.write is None and item.name not in report.left_out]  # fmt: skip
        sizes = on_all([item.tensor.numel() for item in items])
        usable = [place for place in range(len(items)) if all(each[place] for each in sizes)]
        chosen = rng.choice(usable)
        item, victim = items[chosen], rng.randrange(size)
        place, bit = rng.randrange(min(each[chosen] for each in sizes)), rng.randrange(8 * item.tensor.element_size())
        if dist.get_rank() == victim:
            flip(item.tensor, place, bit)
        report = ng.check_replicas(job.model, job.optimizer)
        expected = () if replicas == 2 and not plain(item) else (victim,)
        first_one = report.first
        if (
            report or report.ranks != expected or first_one is None or first_one.bits != 1 or report.differing != (item.name,)
            or victim not in (first_one.rank, first_one.other_rank)
            or (dist.get_rank() == victim and first_one.index != index_of(item, place))
        ):  # fmt: skip
            wrong.append(f"seed {seed}: {item.name}[{place}] bit {bit} on rank {victim}: {report}")
        found["named" if report.ranks else "nobody"] += 1
        if report.ranks and not ng.check_replicas(job.model, job.optimizer, on_difference="repair"):
            wrong.append(f"seed {seed}: not repaired")
    faults.report(wrong=wrong, clean=clean, found=found)
    dist.destroy_process_group()


def plain(item: Item) -> bool:
    return item.kind == 0


def index_of(item: Item, place: int) -> tuple[int, ...]:
    index = torch.tensor(range(item.tensor.numel())).view(item.tensor.shape).eq(place).nonzero()[0].tolist()
    return tuple(a + b for a, b in zip(index, item.offset, strict=True))


# ---------------------------------------------------------------------- kept copies and transfers


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The same for the same parameters and moments, however they are dealt out."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        values = [parameter, *(optimizer.state[parameter][key] for key in sorted(optimizer.state[parameter]))]
        for value in values:
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            whole.update(full.detach().float().numpy().tobytes())
    return whole.hexdigest()


def kept(kind: str, first: int, count: int) -> None:
    """One rank of a campaign in which a rank is lost, and a copy or a transfer was damaged before."""
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    group: Any = dist.group.WORLD
    rank, members, turn = dist.get_rank(), tuple(range(4)), 0
    wrong, ends = list[str](), {"restored": 0, "refused": 0}
    shards.PIECE = 512
    strike = Strike(group)
    for seed in range(first, first + count):
        turn += 1
        group.go_on(members, turn)
        rng = random.Random(seed)
        job, copies = Job(seed, (4,)), rng.choice((1, 2))
        held = shards.Shards(group, [job.model], [job.optimizer], copies, None)
        if kind == "transfer" and rng.random() < 0.5:
            strike.at(rank == rng.randrange(4), "exchange", rng)
        held.settle(members, group)
        for _ in range(2):
            job.step()
            held.keep()
        strike.disarm()
        before = digest(job.model, job.optimizer)
        lost = rng.randrange(4)
        left = tuple(one for one in members if one != lost)
        keeper = rng.choice(left)
        rows = sorted({keeper, *(whose for whose, by in held._moving.kept_by.items() if keeper in by)})
        whose = rng.choice(rows)
        if kind == "copies" and rank == keeper:
            data = held._moving.own if whose == keeper else held._moving.others[whose]
            flip(data, rng.randrange(data.numel()), rng.randrange(8))
        by = [one for one in (whose, *held._moving.kept_by[whose]) if one in left and one != keeper]
        expected = kind == "transfer" or bool(by)
        with torch.no_grad():  # whatever a step that is not done has written
            for parameter in job.model.parameters():
                parameter.to_local().add_(1)
        dist.barrier()
        turn += 1
        if rank == lost:
            continue
        if kind == "transfer":
            strike.at(rank == rng.choice(left), "alltoall", rng)
        try:
            held.settle(left, group.go_on(left, turn))
            if not expected or digest(job.model, job.optimizer) != before:
                wrong.append(f"seed {seed}: rank {rank} restored what was not there before")
            ends["restored"] += 1
        except ng.GuardError as error:
            if expected or f"rank {keeper} kept that of rank {whose}, damaged" not in str(error):
                wrong.append(f"seed {seed}: {error}")
            ends["refused"] += 1
        strike.disarm()
    faults.report(wrong=wrong, found=ends, clean=0, struck=strike.struck)
    dist.destroy_process_group()


class Strike:
    """Flips a bit in what this rank receives next in one kind of collective."""

    def __init__(self, group: Any) -> None:
        self.name, self.struck = "", 0
        for name in ("exchange", "alltoall"):
            self._around(type(group), name)

    def at(self, here: bool, name: str, rng: random.Random) -> None:
        self.name, self.rng = name if here else "", random.Random(rng.random())

    def disarm(self) -> None:
        self.name = ""

    def _around(self, kind: Any, name: str) -> None:
        issue = getattr(kind, name)

        def issued(group: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
            work = issue(group, outputs, inputs, *rest)
            work.wait()
            filled = [output for output in outputs if output.numel()]
            if self.name == name and filled:
                self.name, self.struck = "", self.struck + 1
                data = self.rng.choice(filled)
                flip(data, self.rng.randrange(data.numel()), self.rng.randrange(8))
            return work

        setattr(kind, name, issued)


# ---------------------------------------------------------------------- cost


def cost(every: int, number: int, width: int, depth: int, batch: int) -> None:
    """One rank: blocks of `every` steps with and without a comparison, in turns; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.BatchNorm1d(width))]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(batch, width)

    def one() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    ways = {
        "without": ng.resilient_step(model, optimizer)(one),
        "with": ng.resilient_step(model, optimizer, check_every=every)(one),
    }

    def timed(way: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(every):
            ways[way]()
        dist.barrier()
        return (time.perf_counter() - started) / every

    for way in ways:
        timed(way)
    found = []
    for turn in range(number):
        order = list(ways) if turn % 2 else list(ways)[::-1]
        times = {way: timed(way) for way in order}
        found.append([times["without"], times["with"]])
    whole = []
    for _ in range(10):
        report = ng.check_replicas(model, optimizer)
        whole.append(report.seconds)
    parts = [0.0]
    step = ways["with"]._check.step

    def measured(*given: Any) -> Any:
        started = time.thread_time()
        try:
            return step(*given)
        finally:
            parts.append(time.thread_time() - started)

    ways["with"]._check.step = measured
    for _ in range(5):
        timed("with")
    if dist.get_rank() == 0:
        faults.report(
            found=found, whole=statistics.median(whole), nbytes=report.nbytes, tensors=report.tensors, parts=parts[1:]
        )
    dist.destroy_process_group()


def print_cost(given: argparse.Namespace) -> None:
    load = os.getloadavg()[0]
    arguments = [given.every, given.rounds, given.width, given.depth, given.batch]
    said = faults.run_ranks(cost, given.ranks, args=arguments, timeout=900).check()[0].reports
    step = statistics.median(plain for plain, _ in said["found"])
    ratios = sorted(with_it / plain for plain, with_it in said["found"])
    # Between these two of the sorted values the true median lies with 95 % probability, whatever their distribution.
    aside = math.ceil(0.98 * math.sqrt(len(ratios)) + 0.5)
    least, most = ratios[max(0, len(ratios) // 2 - aside)], ratios[min(len(ratios) - 1, len(ratios) // 2 + aside)]
    print(
        f"torch {torch.__version__}, {given.ranks} ranks on one host with {os.cpu_count()} cores (load {load:.1f} before)"
    )
    print(f"{said['tensors']} tensors and numbers, {said['nbytes'] / 1e6:.1f} MB; a step of DDP: {1e3 * step:.2f} ms")
    print(f"check_replicas alone: {1e3 * said['whole']:.2f} ms, {said['nbytes'] / said['whole'] / 1e9:.2f} GB/s")
    print(
        f"with check_every={given.every} / without: {statistics.median(ratios):.4f} (95 % interval {least:.4f} to {most:.4f}, "
        f"{len(ratios)} rounds of {given.every} steps)"
    )
    mean = sum(said["parts"]) / len(said["parts"])
    print(
        f"processor time in these steps: {1e6 * mean:.0f} us in the mean, {mean / step:.2%} of a step; at most {1e3 * max(said['parts']):.2f} ms"
    )


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--write", type=Path, help="a file for what is printed")
    parser.add_argument("--cost", action="store_true", help="what comparing costs a step, instead")
    for name, default in (("ranks", 2), ("every", 20), ("rounds", 40), ("width", 512), ("depth", 4), ("batch", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.cost:
        print_cost(given)
        return
    lines = [
        f"torch {torch.__version__}, {os.cpu_count()} cores, seeds {given.first} to {given.first + given.seeds - 1}"
    ]
    failed = 0
    for kind in given.kind:
        function = kept if kind in ("copies", "transfer") else seeds
        started = time.monotonic()
        job = faults.run_ranks(function, KINDS[kind][0], args=[kind, given.first, given.seeds], timeout=3600).check()
        wrong = [one for rank in job for one in rank.reports["wrong"]]
        failed += len(wrong)
        told = ", ".join(f"{word} {number}" for word, number in job[0].reports["found"].items())
        clean = f", {job[0].reports['clean']} checks without a fault" if job[0].reports["clean"] else ""
        struck = sum(job.values("struck").values())
        lines.append(
            f"{kind}: {given.seeds} seeds, {told}{clean}{f', {struck} bits flipped on the way' if struck else ''}; "
            f"wrong: {len(wrong)}; {time.monotonic() - started:.0f} s"
        )
        print(lines[-1], *wrong[:20], sep="\n  ", flush=True)
    if given.write is not None:
        given.write.write_text("\n".join(lines) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
