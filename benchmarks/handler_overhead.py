"""What ``nccl_timeout_handler`` costs on the healthy path: raw gloo all-reduces with and without it, interleaved.

    python benchmarks/handler_overhead.py [--ranks 2] [--rounds 200]

Prints for each size the median time of a plain all-reduce, of one under the recipe's handler (SIGALRM alone, which
bounds nothing, claimed to cost less than 1 %) and of one in a block of its own, with their ratios to the plain one, and
the cost of an empty block.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ncclguard import faults
from ncclguard.deadlines import nccl_timeout_handler

SIZES = (1, 10_000, 100_000, 1_000_000, 10_000_000)  # elements of float32
EMPTY_BLOCKS = 20_000


def ring(signum: int, frame: object) -> None:
    """The recipe's handler."""
    raise TimeoutError("NCCL operation timed out")


def measure(rounds: int) -> None:
    """One rank: time the three ways in turn, so that whatever else the machine does hits all."""
    dist.init_process_group("gloo")
    for numel in SIZES:
        tensor = torch.zeros(numel)

        def plain(tensor: torch.Tensor = tensor) -> None:
            dist.all_reduce(tensor)

        def recipe(tensor: torch.Tensor = tensor) -> None:
            old = signal.signal(signal.SIGALRM, ring)
            signal.alarm(1800)
            try:
                dist.all_reduce(tensor)
            finally:
                signal.alarm(0)
                signal.signal(signal.SIGALRM, old)

        def bounded(tensor: torch.Tensor = tensor) -> None:
            with nccl_timeout_handler(1800):
                dist.all_reduce(tensor)

        times: dict[Callable[[], None], list[float]] = {plain: [], recipe: [], bounded: []}
        count = rounds if numel >= 1_000_000 else rounds * 10
        for turn in range(count + 10):
            for call in itertools.islice(itertools.cycle(times), turn % 3, turn % 3 + 3):
                started = time.perf_counter()
                call()
                if turn >= 10:  # warm-up
                    times[call].append(time.perf_counter() - started)
        faults.report(**{str(numel): [statistics.median(each) for each in times.values()]})
    started = time.perf_counter()
    for _ in range(EMPTY_BLOCKS):
        with nccl_timeout_handler(1800):
            pass
    faults.report(block=(time.perf_counter() - started) / EMPTY_BLOCKS)
    dist.destroy_process_group()


def main() -> None:
    """Run the ranks and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=200, help="of the sizes from 1e6 elements; ten times as many below"
    )
    arguments = parser.parse_args()
    result = faults.run_ranks(measure, arguments.ranks, args=[arguments.rounds], timeout=600).check()
    reports = result[0].reports
    print(
        f"torch {torch.__version__}, gloo, {arguments.ranks} ranks on one host with {os.cpu_count()} cores, medians of rank 0"
    )
    print(f"{'elements':>12} {'plain us':>12} {'recipe us':>12} {'ratio':>8} {'in a block us':>14} {'ratio':>8}")
    for numel in SIZES:
        plain, recipe, bounded = reports[str(numel)]
        print(
            f"{numel:>12,} {plain * 1e6:>12.1f} {recipe * 1e6:>12.1f} {recipe / plain:>8.4f} "
            f"{bounded * 1e6:>14.1f} {bounded / plain:>8.4f}"
        )
    print(f"an empty block: {reports['block'] * 1e6:.1f} us")


if __name__ == "__main__":
    main()
