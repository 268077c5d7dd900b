"""Two joined groups and the job's in each of three processes, with random faults: no verdict crosses over:

    python -m benchmarks.joined_rounds --rounds 1000 [--seed N] [--rounds-of-a-job 50] [--write FILE]

Each process has another rank in each of its three groups, and calls in all three at once, each in a thread of its own.
In a round nothing is wrong, or one process is struck in one group (late, called with another shape, has left it, or is
a moment late only), or as a whole (stopped; killed at the end of a job). Checked is what each process was told:

- in a group where nobody was struck the call succeeds, with the right values,
- where somebody was, all others have one verdict, which names the struck process by its rank in that group alone, for
  the right cause, and their tensors hold what was given,
- who was stopped is told of nobody but itself.

Nobody need be named where one leaves a joined group in which another was to blame before, as it may leave because of
that; where shapes differ and one process has not come yet; and in the job while the process with its store is stopped.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.ports import free_port

SIZE: Final = 3
#: By group, how far its ranks are turned from those of the job.
GROUPS: Final = {"job": 0, "one": 1, "two": 2}
#: Seconds: a limit that no call needs, and the one in a round in which somebody misses it.
GENEROUS, LIMIT = 30.0, 2.0
FAULTS: Final = {"none": 40, "hesitant": 21, "shape": 20, "leave": 10, "late": 7, "stop": 2}
#: What may be said of the struck process; one that is stopped may be back on a busy machine before the verdict.
CAUSES: Final = {
    "shape": {"diverged"}, "leave": {"exited"}, "late": {"late"}, "stop": {"stuck", "late"}, "kill": {"lost"},
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A round; `group` is "" where the process is struck as a whole."""

    fault: str
    group: str
    victim: int
    numel: int
    moment: float


def plan_of(seed: int, number: int, last: bool) -> Plan:
    """The same in every process."""
    draw = random.Random(f"{seed}/{number}")
    fault = draw.choices(list(FAULTS), list(FAULTS.values()))[0]
    group = draw.choice(["one", "two"] if fault == "leave" else list(GROUPS))
    victim, numel, moment = draw.randrange(SIZE), draw.choice((1, 1000, 200_000)), draw.uniform(0.0, 0.4)
    if last:  # the job's own store is in the process of its rank 0
        fault, victim = "kill", draw.randrange(1, SIZE)
    return Plan(fault, "" if fault in ("stop", "kill") else group, victim, numel, moment)


def rank_in(group: str, process: int) -> int:
    return (process + GROUPS[group]) % SIZE


# ---------------------------------------------------------------------- a process


def be_a_process(address: str, seed: int, first: int, rounds: int) -> None:
    process = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    groups: dict[str, Any] = {"job": dist.group.WORLD}

    def join(name: str) -> None:
        groups[name] = ng.join(address, name=name, rank=rank_in(name, process), world_size=SIZE, timeout=60)

    join("one")
    join("two")
    with concurrent.futures.ThreadPoolExecutor(len(GROUPS)) as threads:
        for number in range(first, first + rounds):
            plan = plan_of(seed, number, number == first + rounds - 1)
            tries = meet()
            if plan.victim == process and plan.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.victim == process and plan.fault == "stop":
                subprocess.Popen(["sh", "-c", f"sleep {LIMIT + 3.5}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            called = {name: threads.submit(call, groups[name], name, process, plan) for name in GROUPS}
            faults.report(**{f"round{number}": {name: one.result() for name, one in called.items()} | {"tries": tries}})
            if plan.fault == "leave":
                if plan.victim != process:
                    dist.destroy_process_group(groups[plan.group])
                join(plan.group)
    os._exit(0)  # one of the others is gone


def meet() -> int:
    """Come together in the job's group; returns the number of tries, of which one is enough if nobody was stopped."""
    for tries in range(1, 4):
        try:
            if ng.safe_barrier(timeout=GENEROUS):
                return tries
        except ng.CollectiveFailed:  # what an earlier call had returned as a success, see docs/protocol.md
            pass
    return 4


def call(group: Any, name: str, process: int, plan: Plan) -> list[Any]:
    """Return what this process was told: cause, culprits, whether all agreed, and whether the values are right."""
    struck = plan.victim == process and plan.group == name
    if struck and plan.fault == "leave":
        time.sleep(plan.moment)
        dist.destroy_process_group(group)
        return []
    if struck and plan.fault in ("late", "hesitant"):
        time.sleep(LIMIT + 2.5 if plan.fault == "late" else plan.moment)
    limit = LIMIT if (plan.fault == "late" and plan.group == name) or plan.fault == "stop" else GENEROUS
    tensor = torch.full((plan.numel + (struck and plan.fault == "shape"),), float(process + 1))
    try:
        outcome = ng.safe_all_reduce(tensor, group=group, timeout=limit)
    except ng.CollectiveFailed as error:
        return [f"raised {error}", list(error.outcome.culprits), False, True]
    right = float(sum(range(1, SIZE + 1))) if outcome.ok else float(process + 1)
    cause = "" if outcome.ok else str(outcome.cause)
    return [cause, list(outcome.culprits), outcome.agreed, bool((tensor == right).all())]


# ---------------------------------------------------------------------- the judgement


def unnamed(plan: Plan, group: str, follows: bool) -> set[tuple[str, bool]]:
    """Return the causes without a name, and whether they are agreed, that there may be in place of one with a name."""
    if plan.fault == "leave" and follows:
        return {("unknown", True)}
    if plan.fault == "shape":  # seen before the third of them has come: one against one
        return {("diverged", True)}
    return {("unknown", False)} if (plan.fault, plan.victim, group) == ("stop", 0, "job") else set()


def wrong(plan: Plan, before: str, blamed: set[int], told: dict[int, dict[str, Any]]) -> Iterator[str]:
    """Yield what does not hold; `before`: the fault before; `blamed`: who was to blame since the group was joined."""
    follows = plan.fault == "leave" and bool(blamed - {plan.victim}) and plan.victim not in blamed
    for process, answers in told.items():
        if answers["tries"] > (3 if before == "stop" else 1):
            yield f"process {process} needed {answers['tries']} tries to meet the others after {before or 'the start'}"
        for name in GROUPS:
            struck = plan.fault in CAUSES and plan.group in ("", name)
            if plan.victim == process and plan.fault in ("stop", "leave") and struck:
                if answers[name] and set(answers[name][1]) - {rank_in(name, process)}:
                    yield f"process {process}, which was struck, was told in {name}: {answers[name]}"
                continue
            cause, culprits, agreed, right = answers[name]
            if not right:
                yield f"process {process} has other values in {name}: {answers[name]}"
            if struck and not culprits and (cause, agreed) in unnamed(plan, name, follows):
                continue
            if not struck and (cause, culprits) != ("", []):
                yield f"process {process} was told in {name}, where nobody was struck: {answers[name]}"
            if struck and (not agreed or culprits != [rank_in(name, plan.victim)] or cause not in CAUSES[plan.fault]):
                yield f"process {process} was told in {name}: {answers[name]}, not rank {rank_in(name, plan.victim)}"


def one_job(address: str, seed: int, first: int, rounds: int) -> Iterator[dict[str, Any]]:
    result = faults.run_ranks(be_a_process, SIZE, args=[address, seed, first, rounds], timeout=60 + 12 * rounds)
    before, blamed = "", {name: set[int]() for name in GROUPS}
    for number in range(first, first + rounds):
        plan = plan_of(seed, number, number == first + rounds - 1)
        told = {
            rank: result[rank].reports[f"round{number}"]
            for rank in range(SIZE)
            if f"round{number}" in result[rank].reports
        }
        lines = list(wrong(plan, before, blamed.get(plan.group, set()), told))
        if set(told) != set(range(SIZE)) - ({plan.victim} if plan.fault == "kill" else set()):
            lines.append(f"only {sorted(told)} came to the end of it")
        names = [answers[name][1] for answers in told.values() for name in GROUPS if answers[name] and answers[name][0]]
        yield {
            "round": number, "fault": plan.fault, "group": plan.group, "victim": plan.victim, "wrong": lines,
            "unnamed": [] in names,
        }  # fmt: skip
        before = plan.fault
        for name in GROUPS if plan.fault in CAUSES else ():
            if plan.group in ("", name):
                blamed[name] = set() if plan.fault == "leave" else {*blamed[name], plan.victim}
    if result.left_running:
        yield {
            "round": first,
            "fault": "",
            "group": "",
            "victim": -1,
            "wrong": [f"left running: {result.left_running}"],
        }


def main() -> None:
    """Run the rounds, print a line for each that does not hold, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds-of-a-job", type=int, default=50)
    parser.add_argument("--write", default="", help="a JSON file for the results")
    given = parser.parse_args()
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ncclguard", "store", "--listen", address]
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None and "listening" in store.stdout.readline()
        try:
            for first in range(0, given.rounds, given.rounds_of_a_job):
                rounds = min(given.rounds_of_a_job, given.rounds - first)
                for result in one_job(f"tcp://{address}", given.seed, first, rounds):
                    results.append(result)
                    for line in result["wrong"]:
                        print(
                            f"round {result['round']}, {result['fault']}: {line}; load {os.getloadavg()[0]:.0f}",
                            flush=True,
                        )
                if given.write:
                    Path(given.write).write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))
        finally:
            store.kill()
    bad = sum(bool(result["wrong"]) for result in results)
    counts = ", ".join(f"{count} {fault}" for fault, count in Counter(one["fault"] for one in results).most_common())
    silent = sum(result["unnamed"] for result in results)
    print(f"{len(results) - bad} of {len(results)} rounds held ({counts}) in {time.monotonic() - began:.0f} s")
    print(f"in {silent} of them nobody was named for a fault, as it may be")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
