"""Explores every order of steps of small jobs, or seeded random ones of larger jobs: `python -m tests.protocol.checker --help`."""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass

from tests.protocol.model import Broken, Call, World

SMALL = Call(1, closing=False)
LARGE = Call(2, closing=True, pieces=2)
OTHER = Call(3, closing=False)
ALL_KINDS = frozenset({"crash", "witnessed", "pause", "reset", "raise", "exit"})


@dataclass(frozen=True)
class Found:
    """A broken invariant and the steps that lead to it."""

    error: str
    trace: tuple[str, ...]


@dataclass(frozen=True)
class Explored:
    """What an exploration covered."""

    states: int
    ends: int
    complete: bool
    found: Found | None


def explore(start: World, limit: int, scripted_odd: frozenset[int] = frozenset()) -> Explored:
    """Depth first over all states; stops at the first broken invariant, or incomplete at `limit` states.

    One reduction, sound because such a step touches nothing another step reads: a caller handles its resolution at once.
    """
    seen = {start.key()}
    stack: list[tuple[World, tuple[str, ...]]] = [(start, ())]
    ends = 0
    while stack:
        world, trace = stack.pop()
        steps = list(world.steps())
        eager = [step for step in steps if step[0].startswith("resolve")]
        moving = [step for step in steps if not step[0].startswith("pause")]
        if not moving or all(name.split()[0] in ("crash", "exit", "reset", "raise") for name, _ in moving):
            ends += 1
        if not _free(steps):
            try:
                _at_rest(world)
            except Broken as error:
                return Explored(len(seen), ends, False, Found(str(error), trace))
        for name, step in eager[:1] or steps:
            after = world.copy()
            try:
                step(after)
                after.check_verdicts(scripted_odd)
            except Broken as error:
                return Explored(len(seen), ends, False, Found(str(error), (*trace, name)))
            key = after.key()
            if key not in seen:
                seen.add(key)
                if len(seen) >= limit:
                    return Explored(len(seen), ends, False, None)
                stack.append((after, (*trace, name)))
    return Explored(len(seen), ends, True, None)


def walk(start: World, seed: int, scripted_odd: frozenset[int] = frozenset(), longest: int = 5_000) -> Found | None:
    """One random schedule to its end, faults rarely."""
    rng = random.Random(seed)
    world, trace = start.copy(), []
    for _ in range(longest):
        steps = list(world.steps())
        free = _free(steps)
        if not free:
            try:
                _at_rest(world)
            except Broken as error:
                return Found(str(error), tuple(trace))
            if not steps:
                return None
        name, step = rng.choice(free if free and rng.random() < 0.93 else steps)
        trace.append(name)
        try:
            step(world)
            world.check_verdicts(scripted_odd)
        except Broken as error:
            return Found(str(error), tuple(trace))
    return Found("the schedule does not end", tuple(trace[-50:]))


def _free(steps: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Steps that will happen by themselves: no fault, and no deadline."""
    return [
        step for step in steps if step[0].split()[0] not in ("crash", "pause", "reset", "raise", "exit", "deadline")
    ]


def _at_rest(world: World) -> None:
    """Nothing happens by itself any more: either all have ended, or a deadline is what comes next."""
    if any(name.startswith("deadline") for name, _ in world.steps()):
        return
    if any(state.at in ("open", "piece", "close") and state.alive and not state.paused for state in world.ranks):
        world.deadlines = 1  # time passes: deadlines are never used up when nothing else can happen
        return
    world.check_end()


SCENARIOS: dict[str, tuple[Call, ...]] = {
    "small, large": (SMALL, LARGE),
    "large, small": (LARGE, SMALL),
    "small, small": (SMALL, OTHER),
}


def scripts(ranks: int, name: str, shrink: bool = False, skip: bool = False) -> tuple[tuple[Call, ...], ...]:
    """The same program on all ranks; with `skip` the last rank leaves out the first call."""
    calls = tuple(Call(c.fingerprint, c.closing, c.pieces, shrink) for c in SCENARIOS[name])
    programs = [calls] * ranks
    if skip:
        programs[-1] = calls[1:]
    return tuple(programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--limit", type=int, default=5_000_000, help="states")
    parser.add_argument("--walks", type=int, default=0, help="random schedules instead of all")
    parser.add_argument("--mutant", default="")
    options = parser.parse_args()
    for name in SCENARIOS:
        for shrink in (False, True):
            for skip in (False, True):
                start = World(scripts(options.ranks, name, shrink, skip), options.faults, ALL_KINDS, options.mutant)
                odd = frozenset({options.ranks - 1}) if skip else frozenset[int]()
                began = time.monotonic()
                if options.walks:
                    founds = [found for seed in range(options.walks) if (found := walk(start, seed, odd))]
                    found, text = (founds[0] if founds else None), f"{options.walks} schedules"
                else:
                    explored = explore(start, options.limit, odd)
                    found = explored.found
                    text = f"{explored.states} states, {'all' if explored.complete else 'not all'}"
                print(f"{name}, shrink={shrink}, skip={skip}: {text}, {time.monotonic() - began:.1f} s", flush=True)
                if found:
                    print("BROKEN:", found.error, "\n  " + "\n  ".join(found.trace))
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
