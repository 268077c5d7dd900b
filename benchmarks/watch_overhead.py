"""What `ncclguard.watch()` costs a step of DDP: the same job with and without it, in turns, on gloo.

    python benchmarks/watch_overhead.py [--ranks 2] [--steps 30] [--rounds 60] [--width 512] [--json FILE]

Each round times the same number of steps once with the watcher running and once without, in an order that alternates, on all
ranks together. Printed: the median of the rounds' ratios, with its interquartile range and a 95 % interval from resampling,
and the processor time that the watcher's thread itself used, as a share of the time that it ran.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.bench.timing import ratio

TARGET = 0.005  # of a step


def rounds(number: int, steps: int, width: int) -> None:
    """One rank: pairs of timings, reported by rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    data = torch.randn(16, width)

    def timed() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            model(data).sum().backward()
        dist.barrier()
        return time.perf_counter() - started

    timed()
    pairs, used, ran = [], 0.0, 0.0
    for index in range(number):
        found: dict[bool, float] = {}
        for watched in (True, False) if index % 2 else (False, True):
            handle = ng.watch(timeout=600) if watched else None
            dist.barrier()
            before = _thread_time()
            found[watched] = timed()
            if handle is not None:
                used += max(_thread_time() - before, 0.0)
                ran += found[watched]
                handle.stop()
        pairs.append((found[True], found[False]))
    if dist.get_rank() == 0:
        faults.report(pairs=pairs, used=used, ran=ran)
    dist.destroy_process_group()


def _thread_time() -> float:
    """Processor seconds of the watcher's thread so far; 0 where there is none."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name == "ncclguard-watch" and thread.native_id is not None:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            total += int(text.split()[0]) / 1e9
    return total


def interval(values: list[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by resampling with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result = faults.run_ranks(rounds, given.ranks, args=[given.rounds, given.steps, given.width], timeout=380).check()
    pairs: list[list[float]] = result[0].reports["pairs"]
    ratios = [watched / plain for watched, plain in pairs]
    compared = ratio([watched for watched, _ in pairs], [plain for _, plain in pairs])
    low, high = interval(ratios)
    found: dict[str, Any] = {
        "schema_version": 1,
        "torch": torch.__version__,
        "ranks": given.ranks,
        "steps": given.steps,
        "rounds": given.rounds,
        "step_ms": statistics.median(plain for _, plain in pairs) / given.steps * 1e3,
        "ratio_median": compared.median,
        "ratio_interval": [low, high],
        "ratio_quartiles": [compared.low, compared.high],
        "thread_share": result[0].reports["used"] / result[0].reports["ran"],
        "target": TARGET,
    }
    print(
        f"torch {found['torch']}, {given.ranks} ranks, gloo, DDP of {4 * given.width * (given.width + 1):,} parameters"
    )
    print(f"a step: {found['step_ms']:.2f} ms; {given.rounds} pairs of {given.steps} steps, in turns")
    print(
        f"with watch() / without: median {compared.median:.4f}, quartiles {compared.low:.4f} to {compared.high:.4f}, "
        f"95 % of the median {low:.4f} to {high:.4f}"
    )
    print(
        f"the watcher's thread: {100 * found['thread_share']:.3f} % of the time (target: {100 * TARGET:.1f} % of a step)"
    )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
