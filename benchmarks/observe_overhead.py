"""What `ncclguard observe` costs an unchanged program: two jobs of torchrun, one of them observed, take turns.

    python benchmarks/observe_overhead.py [--ranks 2] [--seconds 180] [--pairs 12] [--block 0.6]
                                          [--what ddp|pair|all_reduce] [--json FILE]

Both jobs run the same script, which does not know of ncclguard; one waits while the other runs a block of steps. Two
jobs differ although nothing is observed in either (where their memory lies, on which core which thread is), by more
than what is measured: so there are several pairs of jobs, each started anew.
`ddp`: forward and backward of 1 million parameters; `pair`: an isend and an irecv of four numbers, which are noted one
by one; `all_reduce` of four numbers, whose wait is. Printed: the median over the pairs, each of which has the median of
its rounds, of the observed block through the plain one of the same round, with 95 % intervals from resampling pairs, by
the clock and by the processor time of all threads of the ranks, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from watch_overhead import TARGET, median

#: The program: a line with a number of steps on the rank's own pipe, then the seconds of the block on another.
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, what = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
four = torch.ones(4)
if what == "ddp":
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]))
    data = torch.randn(64, 512)

def step():
    if what == "ddp":
        model(data).sum().backward()
    elif what == "pair":
        sent, got = dist.isend(four, (rank + 1) % size), dist.irecv(torch.empty(4), (rank - 1) % size)
        got.wait()
        sent.wait()
    else:
        dist.all_reduce(four.fill_(1.0))

with open(f"{folder}/to{rank}") as orders, open(f"{folder}/from{rank}", "w") as answers:
    for line in orders:
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step()
        dist.barrier()
        print(time.perf_counter() - started, time.process_time() - used, "ncclguard" in sys.modules, file=answers, flush=True)
dist.destroy_process_group()
"""


class Job:
    """A job of torchrun that waits for orders; a context manager that ends it."""

    def __init__(self, folder: Path, ranks: int, what: str, observed: bool) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(PROGRAM)
        for rank in range(ranks):
            os.mkfifo(folder / f"to{rank}")
            os.mkfifo(folder / f"from{rank}")
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *command, str(folder / "train.py"), str(folder), what]
        if observed:
            command = [sys.executable, "-m", "ncclguard", "observe", "--", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(command, env=environment)
        self._pipes = [(open(folder / f"to{r}", "w"), open(folder / f"from{r}")) for r in range(ranks)]  # noqa: SIM115
        self._observed = observed

    def block(self, steps: int) -> tuple[float, float]:
        """Run so many steps: the seconds by the clock, and those of the processor in all ranks."""
        for orders, _ in self._pipes:
            print(steps, file=orders, flush=True)
        answers = [answers.readline().split() for _, answers in self._pipes]
        assert all((guarded == "True") is self._observed for _, _, guarded in answers), answers
        return float(answers[0][0]), sum(float(used) for _, used, _ in answers)

    def __enter__(self) -> Job:  # noqa: PYI034 - there are no subclasses
        return self

    def __exit__(self, *error: object) -> None:
        for orders, _ in self._pipes:
            orders.close()
        self._process.wait(timeout=120)


def pair(ranks: int, what: str, block: float, rounds: int, observed_first: bool) -> dict[str, float]:
    """Start two jobs, and return the medians of what the observed one takes more, and the plain one's step."""
    found: list[dict[bool, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as both:
        jobs = {
            observed: both.enter_context(Job(Path(folder, str(observed)), ranks, what, observed))
            for observed in ((True, False) if observed_first else (False, True))
        }
        for job in jobs.values():
            job.block(20)
        steps = max(3, round(block / (jobs[False].block(20)[0] / 20)))
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            found.append({observed: jobs[observed].block(steps) for observed in order})
    return {
        "clock": statistics.median(each[True][0] / each[False][0] - 1 for each in found),
        "processor": statistics.median(each[True][1] / each[False][1] - 1 for each in found),
        "step_us": statistics.median(each[False][0] for each in found) / steps * 1e6,
    }


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=180.0, help="in all blocks together")
    parser.add_argument("--pairs", type=int, default=12, help="of jobs")
    parser.add_argument("--block", type=float, default=0.6, help="seconds; longer than the 0.5 s between two looks")
    parser.add_argument("--what", choices=("ddp", "pair", "all_reduce"), default="ddp")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    rounds = max(5, round(given.seconds / given.pairs / given.block / 2))
    pairs = [pair(given.ranks, given.what, given.block, rounds, number % 2 == 1) for number in range(given.pairs)]
    report: dict[str, Any] = {
        "schema_version": 1,
        "cores": os.cpu_count(),
        "load_before": load,
        "ranks": given.ranks,
        "what": given.what,
        "rounds": rounds,
        "step_us": statistics.median(each["step_us"] for each in pairs),
        "target": TARGET,
        "pairs": pairs,
        **{name: median([each[name] for each in pairs]) for name in ("clock", "processor")},
    }
    print(f"{given.what}: {given.ranks} ranks on one host with {report['cores']} cores (load {load:.1f} before), gloo")
    print(
        f"a step: {report['step_us']:.1f} us; {len(pairs)} pairs of jobs, {rounds} rounds of two blocks each, in turns"
    )
    for name in ("clock", "processor"):
        low, high = report[name]["interval"]
        print(
            f"{name:>10}: {100 * report[name]['median']:+.2f} %, 95 % interval {100 * low:+.2f} to {100 * high:+.2f} %"
        )
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
