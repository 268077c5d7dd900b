"""What `ncclguard.watch()` costs a step of DDP: blocks of steps in turns,
without it, with it, with it in a hurry, and with many samples of who is slow.

    python benchmarks/watch_overhead.py [--backend gloo] [--ranks 2] [--seconds 180] [--block 0.6]
                                        [--width 512] [--batch 64] [--json FILE]

With `--backend nccl` on GPUs; ranks that are more than the GPUs share them, and look like as many hosts to NCCL.

What the watcher does in a second is less than the noise of a step, so it is measured in two ways, in one run. Directly:
the time of a block with `watch()` through that of the block without it of the same round. And enlarged: with a watcher
that looks 20 times as often, whose cost a look, times the looks that `watch()` takes in a second, is its share; and
likewise with 20 times the samples by which it finds slow ranks. Of each round's four blocks the order rotates. Printed:
medians over the rounds, with 95 % intervals from resampling, and the processor time of the watcher's thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.config import current_config, reset_config
from ncclguard.watch import pace
from ncclguard.watch.recorder import Recorder

TARGET = 0.005  # of a step
HURRY = 20
PERIOD = pace.PERIOD
PLAIN, WATCHED, HURRIED, SAMPLED = VARIANTS = ("without", "watch()", "hurried", "sampled")


class Looks:
    """How often the watcher of this process has looked at the counters, and taken a sample for slow ranks."""

    def __init__(self) -> None:
        self.number = self.samples = 0
        original, flight = Recorder.status, Recorder.flight

        def counted(recorder: Recorder) -> dict[str, tuple[int, int]]:
            self.number += 1
            return original(recorder)

        def sampled(recorder: Recorder) -> tuple[int, bool] | None:
            self.samples += 1
            return flight(recorder)

        Recorder.status, Recorder.flight = counted, sampled  # type: ignore[method-assign]


def rounds(backend: str, seconds: float, block: float, width: int, batch: int) -> None:
    """One rank: rounds of four timings, reported by rank 0."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
        if int(os.environ["WORLD_SIZE"]) > gpus:
            os.environ["NCCL_HOSTID"] = f"ncclguard-{rank}"
        device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device))
    data = torch.randn(batch, width, device=device)
    looks, period = Looks(), current_config().poll_idle

    def timed(steps: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            model(data).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - started

    timed(20)
    step = timed(20) / 20
    plan = torch.tensor([block / step, seconds / (len(VARIANTS) * block)], device=device)
    dist.broadcast(plan, 0)  # rank 0's, so that all make the same number of steps
    steps, number = (max(3, round(value)) for value in plan.tolist())
    found = []
    for index in range(number):
        shift = index % len(VARIANTS)
        turn = VARIANTS[shift:] + VARIANTS[:shift]
        found.append({variant: _block(variant, period, looks, lambda: timed(steps)) for variant in turn})
    if dist.get_rank() == 0:
        faults.report(found=found, steps=steps, period=period)
    dist.destroy_process_group()


def _block(variant: str, period: float, looks: Looks, timed: Callable[[], float]) -> dict[str, float]:
    """One block: its seconds, the looks taken in it, and the processor seconds of the watcher's thread."""
    if variant == PLAIN:
        return {"seconds": timed(), "looks": 0.0, "samples": 0.0, "used": 0.0}
    if variant == HURRIED:
        ng.configure(poll_idle=period / HURRY, poll_active=min(period / HURRY, current_config().poll_active))
    pace.PERIOD = PERIOD / (HURRY if variant == SAMPLED else 1)  # type: ignore[misc]
    with ng.watch(timeout=600):
        reset_config()
        dist.barrier()
        number, samples, used = looks.number, looks.samples, _thread_time()
        return {
            "seconds": timed(),
            "looks": looks.number - number,
            "samples": looks.samples - samples,
            "used": max(_thread_time() - used, 0.0),
        }


def _thread_time() -> float:
    """Processor seconds of the watcher's thread so far; 0 where there is none."""
    total = 0.0
    for thread in threading.enumerate():
        if thread.name == "ncclguard-watch" and thread.native_id is not None:
            text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            total += int(text.split()[0]) / 1e9
    return total


def median(values: list[float]) -> dict[str, Any]:
    """The median, its 95 % interval by resampling with a fixed seed, and the quartiles."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    quartiles = statistics.quantiles(values, n=4)
    return {
        "median": statistics.median(values),
        "interval": [medians[50], medians[1949]],
        "quartiles": [quartiles[0], quartiles[2]],
    }


def figures(found: list[dict[str, dict[str, float]]], period: float) -> dict[str, Any]:
    """What the rounds add up to."""
    ratios = {
        variant: [each[variant]["seconds"] / each[PLAIN]["seconds"] for each in found] for variant in VARIANTS[1:]
    }
    totals = {
        variant: {key: sum(each[variant][key] for each in found) for key in ("seconds", "looks", "samples", "used")}
        for variant in VARIANTS[1:]
    }
    rates = {variant: total["looks"] / total["seconds"] for variant, total in totals.items()}
    samples = {variant: total["samples"] / total["seconds"] for variant, total in totals.items()}
    scale = 1 / (period * rates[HURRIED])  # of the looks of the hurried one, this share is watch()'s
    return {
        "direct": median([value - 1 for value in ratios[WATCHED]]),
        "enlarged": median([(value - 1) * scale for value in ratios[HURRIED]]),
        "sampling": median([(value - 1) * samples[WATCHED] / samples[SAMPLED] for value in ratios[SAMPLED]]),
        "looks_per_second": rates,
        "samples_per_second": samples,
        "thread_share": {variant: total["used"] / total["seconds"] for variant, total in totals.items()},
    }


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=180.0, help="in all blocks together")
    parser.add_argument("--block", type=float, default=0.6, help="seconds; longer than the 0.5 s between two looks")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    arguments = [given.backend, given.seconds, given.block, given.width, given.batch]
    result = faults.run_ranks(rounds, given.ranks, args=arguments, timeout=2 * given.seconds + 120).check()
    said = result[0].reports
    rows: list[dict[str, dict[str, float]]] = said["found"]
    plain = statistics.median(row[PLAIN]["seconds"] for row in rows)
    found: dict[str, Any] = {
        "schema_version": 3,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": load,
        "backend": given.backend,
        "device": torch.cuda.get_device_name() if given.backend == "nccl" else "cpu",
        "ranks": given.ranks,
        "parameters": 4 * given.width * (given.width + 1),
        "rounds": len(rows),
        "steps": said["steps"],
        "step_ms": plain / said["steps"] * 1e3,
        "target": TARGET,
        **figures(rows, said["period"]),
    }
    print(
        f"torch {found['torch']}, {given.ranks} ranks on one host with {found['cores']} cores (load {load:.1f} before), {given.backend}, "
        f"DDP of {found['parameters']:,} parameters"
    )
    print(f"a step: {found['step_ms']:.2f} ms; {len(rows)} rounds of four blocks of {said['steps']} steps, in turns")
    for name, words in (
        ("direct", "watch() / without"),
        ("enlarged", f"from {HURRY} times the looks"),
        ("sampling", f"from {HURRY} times the samples"),
    ):
        low, high = found[name]["interval"]
        print(
            f"{words:>24}: {100 * found[name]['median']:+.3f} % of a step, 95 % interval {100 * low:+.3f} to {100 * high:+.3f} % "
            f"(target: below {100 * TARGET:.1f} %)"
        )
    print(
        f"the watcher's thread: {100 * found['thread_share'][WATCHED]:.3f} % of a core, "
        f"{found['looks_per_second'][WATCHED]:.1f} looks and {found['samples_per_second'][WATCHED]:.0f} samples a second; "
        f"with {found['samples_per_second'][SAMPLED]:.0f} samples a second {100 * found['thread_share'][SAMPLED]:.2f} % of a core"
    )
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
