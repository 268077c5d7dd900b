"""A training on several hosts, each a network namespace with `ncclguard run`: what tests of lost hosts share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.fsdp import FSDPModule

from ncclguard.faults.hosts import Hosts

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
PATIENCE = 200  # seconds: the processes import torch, on a machine that is busy with other tests

NEW_ENOUGH = hasattr(FSDPModule, "reset_iter_state")
FSDP = pytest.mark.skipif(not NEW_ENOUGH, reason="this torch cannot begin FSDP2's step anew (2.13 can)")
WAYS = ["ddp", pytest.param("fsdp", marks=[FSDP, pytest.mark.thorough])]

SCRIPT = """
import os, pathlib, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, ncclguard as ng
from torch.nn.parallel import DistributedDataParallel
steps, way, end = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[0]).with_name("end")
if os.environ.get("NCCLGUARD_JOINS"):
    time.sleep(float(os.environ.get("STARTS_AFTER", 0)))
    while "STARTS_WHEN" in os.environ and not os.path.exists(os.environ["STARTS_WHEN"]):
        time.sleep(0.05)
if "OWN_HOST_FIRST" in os.environ:
    from ncclguard.training import places
    places.OWN_HOST_FIRST = float(os.environ["OWN_HOST_FIRST"])
dist.init_process_group("ncclguard", timeout=timedelta(seconds=4))
if not os.environ.get("NCCLGUARD_JOINS"):
    ng.safe_barrier(timeout=100)  # on a busy machine imports take unequal time

if sys.argv[3:] == ["held"]:  # no rank meets the survivors before the test has cut off the next host
    from ncclguard.training.continuation import Continuation

    def meet_without(self, ranks, leave_out=Continuation._meet_without):
        leave_out(self, ranks)
        end, told = time.monotonic() + 6, pathlib.Path(sys.argv[0]).with_name(f"next-after-{ranks[0]}")
        while not told.exists() and time.monotonic() < end:
            time.sleep(0.01)

    Continuation._meet_without = meet_without

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
if way == "fsdp":
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
loader = ng.ElasticLoader(torch.utils.data.TensorDataset(torch.arange(512.0).reshape(128, 4) / 512), 4, seed=3)

@ng.resilient_step(model, optimizer, loader=loader, timeout=8, copies=2 * (way == "fsdp"))
def step(batch):
    if step.completed >= int(os.environ.get(f"RAISES_{dist.get_rank()}_AFTER", 1 << 30)):
        raise RuntimeError("of its own")
    optimizer.zero_grad()
    loss = model(batch[0]).square().mean()
    loss.backward()
    told = float(end.exists())
    dist.all_reduce(both := torch.stack([loss.detach(), torch.tensor(told)]), op=dist.ReduceOp.AVG)
    optimizer.step()
    return both.tolist()

last = 0.0
while step.completed < steps and not last:
    loss, last = step()
    line = f"step {step.completed} of rank {dist.get_rank()}: {loss:.6f}, by {step.made_by}\\n"
    sys.stdout.write(line)  # in one piece: two ranks write into this file
    sys.stdout.flush()
    time.sleep(0.1)
dist.destroy_process_group()
"""


class Job:
    """`ncclguard run` on each host, with so many ranks; the last `standing_by` hosts have none."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        way: str,
        ranks: int = 2,
        held: bool = False,
        standing_by: int = 0,
        steps: int = STEPS,
        options: Mapping[int, Sequence[str]] = {},
        env: Mapping[int, Mapping[str, str]] = {},
    ) -> None:
        self._folder = folder
        script, port = folder / "train.py", hosts.next_port()
        script.write_text(SCRIPT)
        self.outputs = [folder / f"{name}.txt" for name in hosts.names]
        self._commands: list[tuple[list[str], dict[str, str]]] = []
        self.with_ranks = range(len(hosts.names) - standing_by)
        for index, name in enumerate(hosts.names):
            place = ["--nproc-per-node", str(ranks)]
            if index in self.with_ranks:
                place += ["--nnodes", str(len(self.with_ranks)), "--node-rank", str(index)]
            else:
                place.append("--stand-by")
            store = ["--master-addr", hosts.address(hosts.names[0]), "--master-port", str(port)]
            command = [sys.executable, "-m", "ncclguard", "run", *place, *store, *options.get(index, [])]
            command += [str(script), str(steps), way, *["held"] * held]
            own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env.get(index, {})}
            own["NCCLGUARD_REPORT_DIR"] = str(folder / f"{name}-reports")
            self._commands.append((hosts.command(name, command), own))
        self.launchers = [self._started(index) for index in range(len(hosts.names))]

    def _started(self, index: int) -> subprocess.Popen[bytes]:
        command, env = self._commands[index]
        with self.outputs[index].open("a") as output:
            return subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def start_again(self, index: int) -> None:
        """The same command on the same host, whose launcher has ended."""
        self.launchers[index].wait(10)
        self.launchers[index] = self._started(index)

    @classmethod
    def begun(cls, hosts: Hosts, folder: Path, *args: Any, **kwargs: Any) -> Job:
        """A job of which each host with ranks has made ten steps."""
        job = cls(hosts, folder, *args, **kwargs)
        job.wait_until(lambda: all("step 10 of" in job.said(index) for index in job.with_ranks))
        return job

    def said(self, index: int) -> str:
        return self.outputs[index].read_text()

    def wait_until(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < end, "\n".join(output.read_text()[-3000:] for output in self.outputs)
            time.sleep(0.05)

    def finish(self) -> None:
        """The next step is the last one."""
        (self._folder / "end").touch()

    def code(self, index: int) -> int:
        """The exit code of a launcher, once it has ended."""
        self.wait_until(lambda: self.launchers[index].poll() is not None)
        return int(self.launchers[index].returncode)

    def ranks(self, index: int) -> dict[int, psutil.Process]:
        """The processes of a host's ranks."""
        there = psutil.Process(self.launchers[index].pid).children(recursive=True)
        return {int(process.environ()["RANK"]): process for process in there if "RANK" in process.environ()}

    def kill(self, index: int, launcher: bool = False) -> None:
        """Kill the ranks of a host, its launcher first or not at all."""
        ranks = self.ranks(index)
        if launcher:
            self.launchers[index].kill()
        for process in ranks.values():
            process.kill()

    def made_by(self, step: int) -> set[str]:
        """Who made a step, by what all ranks of all hosts have said."""
        said = "".join(output.read_text() for output in self.outputs)
        return set(re.findall(rf"^step {step} of rank \d+: (\S+, by .*)$", said, re.MULTILINE))
