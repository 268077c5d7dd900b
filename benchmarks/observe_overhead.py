"""What `ncclguard observe` costs an unchanged program: two jobs of torchrun, one of them observed, take turns.

    python benchmarks/observe_overhead.py [--ranks 2] [--seconds 180] [--block 0.6] [--what ddp|pair|all_reduce]
                                          [--json FILE]

Both jobs run the same script, which does not know of ncclguard; one waits while the other runs a block of steps.
`ddp`: forward and backward of 1 million parameters; `pair`: an isend and an irecv of four numbers, which are noted one
by one; `all_reduce` of four numbers, whose wait is. Printed: medians over the rounds of the observed block through the
plain one of the same round, with 95 % intervals from resampling, by the clock and by the processor time of all threads
of the ranks, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
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


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=180.0, help="in all blocks together")
    parser.add_argument("--block", type=float, default=0.6, help="seconds; longer than the 0.5 s between two looks")
    parser.add_argument("--what", choices=("ddp", "pair", "all_reduce"), default="ddp")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load = os.getloadavg()[0]
    found: list[dict[bool, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as both:
        jobs = {
            observed: both.enter_context(Job(Path(folder, str(observed)), given.ranks, given.what, observed))
            for observed in (False, True)
        }
        for job in jobs.values():
            job.block(20)
        steps = max(3, round(given.block / (jobs[False].block(20)[0] / 20)))
        for number in range(max(5, round(given.seconds / given.block / 2))):
            order = (False, True) if number % 2 else (True, False)
            found.append({observed: jobs[observed].block(steps) for observed in order})
    report: dict[str, Any] = {
        "schema_version": 1,
        "cores": os.cpu_count(),
        "load_before": load,
        "ranks": given.ranks,
        "what": given.what,
        "rounds": len(found),
        "steps": steps,
        "step_us": median([each[False][0] for each in found])["median"] / steps * 1e6,
        "target": TARGET,
        "clock": median([each[True][0] / each[False][0] - 1 for each in found]),
        "processor": median([each[True][1] / each[False][1] - 1 for each in found]),
    }
    print(f"{given.what}: {given.ranks} ranks on one host with {report['cores']} cores (load {load:.1f} before), gloo")
    print(f"a step: {report['step_us']:.1f} us; {len(found)} rounds of two blocks of {steps} steps, in turns")
    for name in ("clock", "processor"):
        low, high = report[name]["interval"]
        print(
            f"{name:>10}: {100 * report[name]['median']:+.2f} %, 95 % interval {100 * low:+.2f} to {100 * high:+.2f} %"
        )
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
