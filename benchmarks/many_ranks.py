"""How many of many real ranks on this machine get the right verdict, how soon, and what joining costs beside gloo.

    python benchmarks/many_ranks.py [--ranks 64] [--fault killed late stopped] [--busy 1] [--runs 10] [--json FILE]
    python benchmarks/many_ranks.py --hosts 8 --ranks-per-host 4 [--fault killed late stopped cut store-cut] [...]

Each run is a job of plain gloo and a job with the guard, in alternating order, whose ranks start at one moment and are
timed until the last has left its first barrier. Then one rank of the guarded job, or one host, is struck while all
others are in an all-reduce. A line for each run says how many survivors had an agreed verdict with exactly the right
cause and culprits, how long after the kill or its own deadline the last of them returned, and how many ranks then
completed another operation. `--busy N` keeps N programs computing beside both jobs. Hosts are network namespaces, which
need root: `cut` separates one of them from the rest; `store-cut` that of rank 0, with the job's store, for 5 s while
all wait for a rank that is late. Rank 0 itself is never struck: without the store nothing can be agreed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.bench.machine import describe
from ncclguard.bench.ranks import World

#: By fault: the limit of the call that is struck, in seconds, and the cause that every survivor has to name.
FAULTS = {
    "killed": (30.0, "lost"),
    "late": (5.0, "late"),
    "stopped": (5.0, "stuck"),
    "cut": (5.0, "unknown"),
    "store-cut": (12.0, "late"),
}
ONE_HOST = ("killed", "late", "stopped")
CUT_FOR = 5.0  # seconds that the host of the store is away
PATIENCE = 300.0  # seconds that anything of a job may take on a machine that does much else


# ---------------------------------------------------------------------- the ranks


def plain_rank() -> None:
    """Join a job of plain gloo."""
    faults.report(started=True)
    faults.wait_until_told("start", PATIENCE)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    initialised = time.monotonic()
    dist.barrier()
    faults.report(joined=[initialised, time.monotonic()])
    dist.destroy_process_group()


def guarded_rank(fault: str, victim: int, limit: float) -> None:
    """Join, make the call that is struck, say what it came to, and call once more."""
    faults.report(started=True)
    faults.wait_until_told("start", PATIENCE)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    initialised = time.monotonic()
    ng.safe_barrier(timeout=PATIENCE).raise_if_failed()
    faults.report(joined=[initialised, time.monotonic()])
    rank = dist.get_rank()
    faults.wait_until_told("call", PATIENCE)
    if rank == victim:
        if FAULTS[fault][1] == "late":
            time.sleep(limit + 4.0)
        else:
            faults.wait_until_told("again", PATIENCE)
    tensor = torch.full((1000,), float(rank))
    entered = time.monotonic()
    faults.report(entered=entered)
    outcome = ng.safe_all_reduce(tensor, timeout=limit)
    verdict = [outcome.agreed, outcome.ok, str(outcome.cause), list(outcome.culprits)]
    faults.report(returned=time.monotonic(), verdict=verdict, intact=bool((tensor == rank).all()))
    faults.wait_until_told("again", PATIENCE)
    good = False
    for _ in range(5):  # who was away has first to learn what the others have decided
        try:
            good = good or ng.safe_all_reduce(tensor, timeout=60, on_lost="shrink").ok
        except ng.CollectiveFailed:  # what an earlier call had returned as a success, see docs/protocol.md
            continue
        if good:
            break
    faults.report(after=good)
    dist.destroy_process_group()


# ---------------------------------------------------------------------- one run


@dataclass(frozen=True)
class Struck:
    """Who is struck, and who has to name whom."""

    fault: str
    victim: int  # -1 where a host is
    host: str
    culprits: list[int]
    survivors: list[int]

    def __str__(self) -> str:
        return f"rank {self.victim}" if self.victim >= 0 else self.host


def choose(fault: str, size: int, per_host: int, random_: random.Random) -> Struck:
    """Who is struck in a run; never rank 0, and never a rank of its host where that is cut off."""
    victim = random_.randrange(per_host if fault in ("cut", "store-cut") else 1, size)
    if fault == "cut":
        host = victim // per_host
        culprits = list(range(host * per_host, (host + 1) * per_host))
        return Struck(fault, -1, f"host{host}", culprits, [rank for rank in range(size) if rank not in culprits])
    return Struck(fault, victim, "host0", [victim], [rank for rank in range(size) if rank != victim])


def joined(job: faults.Job) -> tuple[float, float]:
    """Seconds from the common start until the last rank is initialised, and until it has left the first barrier."""
    job.wait_for("started", seconds=PATIENCE)
    start = time.monotonic()
    job.tell("start")
    found = job.wait_for("joined", seconds=PATIENCE).values()
    return max(one[0] for one in found) - start, max(one[1] for one in found) - start


def join_plain(size: int, hosts: faults.Hosts | None) -> tuple[float, float]:
    """The same of plain gloo."""
    alone = {"NCCLGUARD_AUTOSTART": "0"}
    with faults.start_ranks(plain_rank, size, env=alone, timeout=2 * PATIENCE, hosts=hosts, launcher="fork") as job:
        found = joined(job)
        job.wait().check()
        return found


def strike(job: faults.Job, struck: Struck, hosts: faults.Hosts | None) -> float:
    """Have all call, and make the fault; returns when somebody was killed (time.monotonic()), else 0.0."""
    if struck.fault == "stopped":
        job.send_signal(struck.victim, signal.SIGSTOP)
    if struck.fault == "cut":
        assert hosts is not None
        hosts.partition(struck.host)
    job.tell("call")
    job.wait_for("entered", struck.survivors, seconds=PATIENCE)
    if struck.fault == "killed":
        time.sleep(1.0)
        job.send_signal(struck.victim, signal.SIGKILL)
        return time.monotonic()
    if struck.fault == "store-cut":
        assert hosts is not None
        time.sleep(1.0)
        hosts.partition(struck.host)
        time.sleep(CUT_FOR)
        hosts.heal()
    return 0.0


def run_guarded(struck: Struck, size: int, hosts: faults.Hosts | None) -> dict[str, Any]:
    """One guarded job: what it took to join, and what became of the call that was struck."""
    limit, cause = FAULTS[struck.fault]
    args = [struck.fault, struck.victim, limit]
    with faults.start_ranks(guarded_rank, size, args=args, timeout=4 * PATIENCE, hosts=hosts, launcher="fork") as job:
        join = joined(job)
        killed = strike(job, struck, hosts)
        verdicts = job.wait_for("verdict", struck.survivors, seconds=PATIENCE)
        if struck.fault == "stopped":
            job.send_signal(struck.victim, signal.SIGCONT)
        elif struck.fault == "cut":
            assert hosts is not None
            job.wait_for("verdict", seconds=PATIENCE)
            hosts.heal()
        elif struck.fault != "killed":
            job.wait_for("verdict", seconds=PATIENCE)
        job.tell("again")
        result = job.wait()
    entered, returned = result.values("entered"), result.values("returned")
    right = [True, False, cause, struck.culprits]
    others = Counter(json.dumps(verdict) for verdict in verdicts.values() if verdict != right)
    after = {rank: returned[rank] - (killed or entered[rank] + limit) for rank in struck.survivors}
    return {
        "joined": join,
        "right": sum(verdict == right for verdict in verdicts.values()),
        "survivors": len(struck.survivors),
        "seconds": max(after.values()),
        "others": dict(others),
        "alone": [rank for rank in struck.culprits if returned.get(rank) and not result[rank].reports["verdict"][0]],
        "intact": all(result[rank].reports["intact"] for rank in struck.survivors),
        "again": sum(result.values("after").values()),
        "ended": [f"rank {rank.rank}: {rank.end}" for rank in result if not rank.ok and rank.end != "SIGKILL"],
    }


def run_one(fault: str, number: int, seed: int, size: int, per_host: int, hosts: faults.Hosts | None) -> dict[str, Any]:
    """A job of each kind, in an order that alternates, and a line about both."""
    struck = choose(fault, size, per_host, random.Random(f"{seed}/{fault}/{number}"))
    load = os.getloadavg()[0]
    plain = join_plain(size, hosts) if number % 2 == 0 else None
    found = run_guarded(struck, size, hosts)
    plain = plain or join_plain(size, hosts)
    row = {"fault": fault, "run": number, "struck": str(struck), "load": load, "plain": plain, **found}
    since = "the kill" if fault == "killed" else "the deadline"
    print(
        f"  {fault:<9} {number:>3}  {struck!s:<8} {row['right']:>3} of {row['survivors']:>3} right,"
        f" the last {row['seconds']:6.2f} s after {since:<12} {row['again']:>3} go on;"
        f" joining {row['joined'][1]:6.2f} s, gloo {plain[1]:6.2f} s; load {load:.1f}",
        flush=True,
    )
    for verdict, count in row["others"].items():
        print(f"      {count} of them: agreed, ok, cause, culprits = {verdict}")
    for line in row["ended"]:
        print(f"      {line}")
    return row


# ---------------------------------------------------------------------- all runs


@contextlib.contextmanager
def busy(programs: int) -> Iterator[None]:
    """So many programs beside the ranks that do nothing but compute."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in started:
            program.kill()
            program.wait()


def summary(rows: list[dict[str, Any]]) -> None:
    """One line for each fault, and one about joining."""
    for fault in dict.fromkeys(row["fault"] for row in rows):
        of = [row for row in rows if row["fault"] == fault]
        all_right = sum(row["right"] == row["survivors"] for row in of)
        worst = max(row["seconds"] for row in of)
        print(f"# {fault}: every survivor right in {all_right} of {len(of)} runs, the last after {worst:.2f} s at most")
    more = sorted(row["joined"][1] - row["plain"][1] for row in rows)
    print(
        f"# joining, beyond gloo's own: median {statistics.median(more):.2f} s, {more[0]:.2f} to {more[-1]:.2f} s;"
        f" gloo's own {min(row['plain'][1] for row in rows):.2f} to {max(row['plain'][1] for row in rows):.2f} s"
    )


def main() -> int:
    """Make all runs; 0 where every survivor of each has had the right verdict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64, help="on this host, without --hosts")
    parser.add_argument("--hosts", type=int, default=0, help="network namespaces, instead of this host")
    parser.add_argument("--ranks-per-host", type=int, default=4)
    parser.add_argument("--fault", nargs="+", choices=FAULTS, help="default: all that there are")
    parser.add_argument("--busy", type=int, default=0, help="programs that compute beside the ranks")
    parser.add_argument("--runs", type=int, default=10, help="of each fault")
    parser.add_argument("--seed", type=int, default=1, help="decides who is struck")
    parser.add_argument("--json", type=Path, help="write the figures here; never overwrites a file")
    options = parser.parse_args()
    if options.json is not None and options.json.exists():
        parser.error(f"{options.json} exists and is never overwritten; choose another name")
    size = options.hosts * options.ranks_per_host or options.ranks
    chosen = options.fault or list(FAULTS if options.hosts else ONE_HOST)
    if not options.hosts and not set(chosen) <= set(ONE_HOST):
        parser.error("a host is cut off with --hosts only; give --hosts 8")
    if size < 3 or options.hosts == 1:
        parser.error("give 3 ranks at least, and 2 hosts: one is struck, and the others have to agree")
    environment = describe(World(0, size, 0, size, "ncclguard.faults"), "gloo", torch.device("cpu"), [])
    where = f"{options.hosts} network namespaces" if options.hosts else "one host"
    print(
        f"# {size} ranks on {where}, {options.busy} busy programs; ncclguard {environment.ncclguard}, torch "
        f"{environment.torch}, Python {environment.python}, {environment.cores} cores ({environment.cpu})"
    )
    rows = []
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(faults.Hosts(options.hosts)) if options.hosts else None
        stack.enter_context(busy(options.busy))
        for number in range(options.runs):
            for fault in chosen:
                rows.append(run_one(fault, number, options.seed, size, options.ranks_per_host, hosts))
    summary(rows)
    if options.json is not None:
        content = {
            "schema_version": 1,
            "command": ["benchmarks/many_ranks.py", *sys.argv[1:]],
            "environment": environment.model_dump(mode="json"),
            "rows": rows,
        }
        with options.json.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, default=str) + "\n")
    return 0 if all(row["right"] == row["survivors"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
