"""A training, by DDP or with --fsdp by FSDP2, that goes on, without them, when ranks are killed:

    ncclguard run --nproc-per-node 4 examples/train_surviving.py --steps 200 --pause 0.5 [--fsdp]

Kill any of its processes while it runs; each prints its number.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng

BATCH, IMAGES = 8, 512


class Numbered(common.Images):
    """Images that say which they are."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "index": torch.tensor(index)}


class Record:
    """One line for each sample that a completed step used, by one rank; the next one goes on where it was killed."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._samples: list[int] = []
        self._first = self._known = 0  # the line of the first of them; lines that this rank knows to be in the file

    def add(self, samples: list[int], position: int, writes: bool) -> None:
        """The samples of one more step, the last of which is at `position` of the whole sequence.

        The rank that `writes` also adds what another did not come to.
        """
        if not self._samples:
            self._first = position - len(samples)
        self._samples += samples
        if self._path is None or not writes:
            self._known = 0  # whoever writes now goes on, so this rank has to look again when its turn comes back
            return
        if not self._known:
            whole, _, _ = self._path.read_bytes().rpartition(b"\n") if self._path.exists() else (b"", b"", b"")
            self._known = len(whole.splitlines())
            self._path.write_bytes(whole + b"\n" if whole else b"")
        with self._path.open("a") as file:
            file.write("".join(f"{sample}\n" for sample in self._samples[self._known - self._first :]))
        self._known = position


def spans(ranks: tuple[int, ...]) -> str:
    """Ranks for people: 0-1, 3."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][-1] == rank - 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def tell(line: str) -> None:
    """Print a line in one write, so that neither a kill nor what another rank prints comes between its parts."""
    os.write(1, f"{line}\n".encode())


def sharded(model: common.Classifier) -> torch.nn.Module:
    """By FSDP2, each layer that has parameters by itself."""
    for layer in model.body:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def digest(model: torch.nn.Module) -> str:
    """The same for the same parameters, which all ranks have to be there for where they are sharded."""
    if isinstance(model, FSDPModule):
        model.reshard()  # the last evaluation has left some of them whole
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in parts)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds between two steps, so that there is time to kill"
    )
    parser.add_argument("--samples", default="", help="file for one line for each sample that a completed step used")
    parser.add_argument("--fsdp", action="store_true", help="FSDP2; a neighbour keeps a copy of each rank's shard")
    given = parser.parse_args()
    torch.set_num_threads(1)
    place = common.device()
    dist.init_process_group("ncclguard")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = common.Classifier().to(place)
    wrapped = sharded(model) if given.fsdp else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    loader = ng.ElasticLoader(Numbered(IMAGES, seed=1), BATCH)
    held_out = common.Images(64, seed=2)
    torch.manual_seed(1000 + rank)  # dropout is each rank's own

    @ng.resilient_step(wrapped, optimizer, loader=loader, keep=[scheduler], copies=int(given.fsdp))
    def train(batch: dict[str, torch.Tensor]) -> tuple[float, list[int]]:
        numbers = batch.pop("index")
        loss = wrapped(**{name: value.to(place) for name, value in batch.items()})["loss"]
        optimizer.zero_grad()
        loss.backward()
        # What is told of a step is exchanged before the optimizer's: until then the step can be done again.
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        samples = torch.full((size, BATCH), 0, dtype=torch.int64, device=place)
        samples[rank] = numbers.to(place) + 1  # 0 stands for none
        dist.all_reduce(samples)
        optimizer.step()
        scheduler.step()
        return mean.item(), [number - 1 for number in samples[samples > 0].tolist()]

    @ng.resilient_step
    def evaluate() -> float:
        """The part of the images that the model sees rightly, each rank having looked at some."""
        model.eval()
        mine, others = evaluate.ranks.index(rank), len(evaluate.ranks)
        share = [held_out[number] for number in range(mine, len(held_out), others)]
        images = {name: torch.stack([image[name] for image in share]).to(place) for name in share[0]}
        with torch.no_grad():  # one forward on each rank: where they are sharded, all need the parameters as often
            right = model(**images)["logits"].argmax(-1) == images["labels"]
        counts = torch.tensor([float(right.sum()), float(len(share))], device=place)
        model.train()
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    @ng.resilient_step
    def finish() -> None:
        """The line of the one rank that prints is there, or another one prints it."""
        known = digest(model)
        if rank == finish.ranks[0]:
            tell(f"done: {given.steps} steps, parameters {known}")
        dist.barrier()

    record = Record(given.samples)
    tell(f"rank {rank} is process {os.getpid()}")
    while train.completed < given.steps:  # a rank that takes a lost one's place begins with the step the others are at
        time.sleep(given.pause)
        loss, samples = train()
        step = train.completed
        tells = rank == train.ranks[0]
        record.add(samples, loader.position, tells)
        if tells:
            tell(f"step {step}: loss {loss:.6f}, ranks {spans(train.made_by)}")
        if step % 50 == 0:
            right = evaluate()
            if tells:
                tell(f"evaluation after step {step}: {right:.3f} are right")
    finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
