"""Follows seeded random orders of steps of jobs too large to be explored: `python -m tests.protocol.walk --ranks 8 --schedules 1000`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tests.protocol.exhaustive import (
    BARRIER,
    LARGE,
    LARGE_STREAM,
    ODD,
    SMALL,
    SMALL_STREAM,
    WINDOWED,
    WINDOWED_STREAM,
    job_of,
)
from tests.protocol.fabric import Fabric, Name
from tests.protocol.process import Broken
from tests.protocol.steps import FAULTS, Job, State

KINDS = {"rounds": (SMALL, LARGE, BARRIER, WINDOWED), "streams": (SMALL_STREAM, LARGE_STREAM, BARRIER, WINDOWED_STREAM)}
RARELY = 0.07  # how often a fault is taken where another step is possible too
LONGEST = 20_000  # steps; a schedule that is longer does not end


@dataclass(frozen=True)
class Walked:
    """One schedule: whether it broke an invariant, and its steps."""

    error: str
    trace: tuple[Name, ...]


def walk(fabric: Fabric, seed: int) -> Walked:
    """One random schedule to its end."""
    rng = random.Random(seed)
    state: State = fabric.start()
    trace: list[Name] = []
    while len(trace) < LONGEST:
        try:
            steps = fabric.successors(state)
        except Broken as error:
            return Walked(f"{error}\n{fabric.describe(state)}", tuple(trace))
        if not steps:
            return Walked("", tuple(trace))
        free = [step for step in steps if step[0][0] not in (*FAULTS, "skip")]
        name, state = rng.choice(free if free and rng.random() > RARELY else steps)
        trace.append(name)
    return Walked(f"the schedule does not end\n{fabric.describe(state)}", tuple(trace))


def jobs(ranks: int, faults: int) -> Iterator[tuple[str, Job]]:
    """Four operations, each kind once, in three orders; with and without `on_lost="shrink"`, and with a rank that is odd.

    Once with opening rounds, and once with data in their place.
    """
    for (kind, kinds), first in product(KINDS.items(), range(3)):
        calls = (*kinds[first:], *kinds[:first])
        for shrink, odd in ((False, ""), (True, ""), (False, ODD[1]), (True, ODD[2])):
            name = (
                f"{kind} from operation {first}" + (", shrink" if shrink else "") + (f", the last {odd}" if odd else "")
            )
            yield name, replace(job_of(ranks, faults, calls, shrink, odd), reduced=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--schedules", type=int, default=100, help="of each job")
    options = parser.parse_args()
    for name, chosen in jobs(options.ranks, options.faults):
        began, steps, fabric = time.monotonic(), 0, Fabric(chosen)
        for seed in range(options.schedules):
            walked = walk(fabric, seed)
            steps += len(walked.trace)
            if walked.error:
                print(f"{name}, seed {seed}: {walked.error}", *walked.trace, sep="\n  ")
                return 1
        print(f"{name}: {options.schedules} schedules, {steps} steps, {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
