"""Explores all orders of steps of small jobs: `python -m tests.protocol.exhaustive --ranks 3 --faults 2`.

Breadth first, so that the trace to a broken invariant is a shortest one. What is modelled is said in process.py and fabric.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.protocol.fabric import Fabric, Name
from tests.protocol.process import Broken, Call
from tests.protocol.steps import FAULTS, Job, State
from tests.protocol.symmetry import Symmetry

SMALL = Call(1, closing=False)
LARGE = Call(2, closing=True, pieces=2)
BARRIER = Call(3, closing=False, pieces=0)
WINDOWED = Call(4, closing=True, pieces=3, window=2)  # atomic=False with one piece in flight
SMALL_STREAM = Call(5, closing=False, meets=True)
LARGE_STREAM = Call(6, closing=True, pieces=2, meets=True)
WINDOWED_STREAM = Call(7, closing=True, pieces=3, window=2, meets=True)
OTHER = 9  # a fingerprint nobody else has

PROGRAMS = {
    "small, large": (SMALL, LARGE),
    "large, small": (LARGE, SMALL),
    "small, the same again": (SMALL, SMALL),
    "barrier, windowed": (BARRIER, WINDOWED),
    "windowed, barrier": (WINDOWED, BARRIER),
    "small stream, large stream": (SMALL_STREAM, LARGE_STREAM),
    "small, large stream": (SMALL, LARGE_STREAM),
    "large stream, small stream": (LARGE_STREAM, SMALL_STREAM),
    "windowed stream, barrier": (WINDOWED_STREAM, BARRIER),
}
#: How the program of the last rank may differ; that counts as one of the faults.
ODD = ("", "skips a call", "calls another operation", "calls one more")


@dataclass(frozen=True)
class Explored:
    """What an exploration covered, and the steps to the first broken invariant it met."""

    states: int
    steps: int
    ends: int  # states in which all is over
    complete: bool
    error: str = ""
    trace: tuple[Name, ...] = ()


def explore(fabric: Fabric, limit: int | None = None, symmetric: bool = True) -> Explored:
    """Visit every state that can be reached; incomplete beyond `limit` states, or at the first broken invariant."""
    start = fabric.start()
    canonical = Symmetry(fabric).canonical if symmetric else None
    parents: dict[State, tuple[State, Name] | None] = {start: None}
    layer = [start]
    steps = ends = 0
    while layer:
        following: list[State] = []
        for state in layer:
            try:
                successors = fabric.successors(state)
            except Broken as error:
                text = f"{error}\n{fabric.describe(state)}"
                return Explored(len(parents), steps, ends, False, text, _trace(parents, state))
            ends += not successors
            steps += len(successors)
            for name, after in successors:
                if canonical is not None:
                    after = canonical(after)
                if after not in parents:
                    parents[after] = (state, name)
                    following.append(after)
        if limit is not None and len(parents) > limit:
            return Explored(len(parents), steps, ends, False)
        layer = following
    return Explored(len(parents), steps, ends, True)


def _trace(parents: dict[State, tuple[State, Name] | None], state: State) -> tuple[Name, ...]:
    names: list[Name] = []
    while (origin := parents[state]) is not None:
        state, name = origin
        names.append(name)
    return tuple(reversed(names))


def job(
    ranks: int, faults: int, program: str, *, shrink: bool = False, odd: str = "", kinds: tuple[str, ...] = FAULTS
) -> Job:
    """A job of `ranks` with the same program, but for the last one where `odd` says how it differs."""
    return job_of(ranks, faults - bool(odd), PROGRAMS[program], shrink, odd, kinds)


def job_of(
    ranks: int, faults: int, calls: tuple[Call, ...], shrink: bool, odd: str, kinds: tuple[str, ...] = FAULTS
) -> Job:
    """The same for any calls, where the last rank's difference is no fault of the budget."""
    if shrink:  # restarts from piece 0, so it keeps all inputs
        calls = tuple(replace(call, shrink=True, window=0) for call in calls)
    other = replace(calls[0], fingerprint=OTHER)
    last = {ODD[0]: calls, ODD[1]: calls[1:], ODD[2]: (other, *calls[1:]), ODD[3]: (other, *calls)}[odd]
    return Job((*[calls] * (ranks - 1), last), faults, kinds, odd=1 << ranks - 1 if odd else 0)


def jobs(ranks: int, faults: int) -> Iterator[tuple[str, Job]]:
    """Every program, with and without `on_lost="shrink"`, with and without a rank that is odd."""
    for program in PROGRAMS:
        for shrink in (False, True):
            for odd in ODD if faults else ODD[:1]:
                name = ", ".join(
                    filter(None, (program, "shrink" if shrink else "", f"rank {ranks - 1} {odd}" if odd else ""))
                )
                yield name, job(ranks, faults, program, shrink=shrink, odd=odd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--only", default="", help="jobs whose name begins with this")
    parser.add_argument("--limit", type=int, help="states of one job")
    options = parser.parse_args()
    states = 0
    for name, chosen in jobs(options.ranks, options.faults):
        if not name.startswith(options.only):
            continue
        began = time.monotonic()
        explored = explore(Fabric(chosen), options.limit)
        states += explored.states
        covered = "all" if explored.complete else "NOT all"
        print(f"{name}: {explored.states} states, {covered}, {time.monotonic() - began:.1f} s", flush=True)
        if explored.error:
            # Once more with the ranks' own names, for a trace that can be read.
            explored = explore(Fabric(chosen), symmetric=False)
            print(explored.error, *explored.trace, sep="\n  ")
            return 1
    print(f"{states} states in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
