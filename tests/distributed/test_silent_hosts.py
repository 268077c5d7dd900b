"""A host that falls silent, without power or cut off: the others go on without it, and it ends, should it come back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed.fsdp import FSDPModule

from ncclguard.faults.hosts import Hosts, namespaces_available

ROOT = Path(__file__).resolve().parents[2]
STEPS = 60
REASON = namespaces_available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"network namespaces are not available: {REASON}")

SCRIPT = """
import pathlib, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, ncclguard as ng
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
steps, way = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("ncclguard", timeout=timedelta(seconds=4))

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
model = fully_shard(model) if way == "fsdp" else DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters())
loader = ng.ElasticLoader(torch.utils.data.TensorDataset(torch.arange(512.0).reshape(128, 4) / 512), 4, seed=3)

@ng.resilient_step(model, optimizer, loader=loader, timeout=8, copies=2 * (way == "fsdp"))
def step(batch):
    optimizer.zero_grad()
    loss = model(batch[0]).square().mean()
    loss.backward()
    dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.AVG)
    optimizer.step()
    return mean.item()

while step.completed < steps:
    loss = step()
    line = f"step {step.completed} of rank {dist.get_rank()}: {loss:.6f}, by {step.made_by}\\n"
    sys.stdout.write(line)  # in one piece: two ranks write into this file
    sys.stdout.flush()
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Job:
    """`ncclguard run` on each host, with so many ranks."""

    def __init__(self, hosts: Hosts, folder: Path, way: str, ranks: int, held: bool) -> None:
        script, port = folder / "train.py", hosts.next_port()
        script.write_text(SCRIPT)
        self.outputs = [folder / f"{name}.txt" for name in hosts.names]
        self.launchers = []
        for index, name in enumerate(hosts.names):
            place = ["--nnodes", str(len(hosts.names)), "--node-rank", str(index)]
            place += ["--nproc-per-node", str(ranks)]
            store = ["--master-addr", hosts.address(hosts.names[0]), "--master-port", str(port)]
            command = [
                sys.executable,
                "-m",
                "ncclguard",
                "run",
                *place,
                *store,
                str(script),
                str(STEPS),
                way,
                *["held"] * held,
            ]
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            env["NCCLGUARD_REPORT_DIR"] = str(folder / f"{name}-reports")
            with self.outputs[index].open("w") as output:
                self.launchers.append(
                    subprocess.Popen(hosts.command(name, command), env=env, stdout=output, stderr=subprocess.STDOUT)
                )

    def said(self, index: int) -> str:
        return self.outputs[index].read_text()

    def wait_until(self, what: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, "\n".join(output.read_text()[-3000:] for output in self.outputs)
            time.sleep(0.05)

    def code(self, index: int, seconds: float) -> int:
        """The exit code of a launcher, which ends within this time."""
        self.wait_until(lambda: self.launchers[index].poll() is not None, seconds)
        return int(self.launchers[index].returncode)

    def kill(self, index: int) -> None:
        """Kill the ranks of a host, not its launcher."""
        for process in psutil.Process(self.launchers[index].pid).children(recursive=True):
            if "RANK" in process.environ():
                process.kill()

    def made_by(self, step: int) -> set[str]:
        """Who made a step, by what all ranks of all hosts have said."""
        said = "".join(output.read_text() for output in self.outputs)
        return set(re.findall(rf"^step {step} of rank \d+: (\S+, by .*)$", said, re.MULTILINE))


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    with Hosts(getattr(request, "param", 3)) as made:
        yield made


def begun(hosts: Hosts, folder: Path, way: str, ranks: int = 2, held: bool = False) -> Job:
    """A job of which each host has made ten steps."""
    job = Job(hosts, folder, way, ranks, held)
    job.wait_until(lambda: all("step 10 of" in job.said(index) for index in range(len(hosts.names))), 120)
    return job


sharded = pytest.param(
    "fsdp",
    marks=pytest.mark.skipif(
        not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot begin FSDP2's step anew (2.13 can)"
    ),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["ddp", sharded])
def test_the_others_go_on_without_a_host_that_falls_silent(hosts: Hosts, tmp_path: Path, way: str) -> None:
    job = begun(hosts, tmp_path, way)
    hosts.partition("host2")
    assert [job.code(index, 90) for index in (0, 1)] == [0, 0], job.said(0)
    assert job.code(2, 60) != 0  # nobody answers there: it cannot go on
    made = [job.made_by(step) for step in range(1, STEPS + 1)]
    assert all(len(said) == 1 for said in made), made  # one loss, and one opinion of who took part, on all
    whole = [step for step, said in enumerate(made, 1) if next(iter(said)).endswith("by (0, 1, 2, 3, 4, 5)")]
    assert whole == list(range(1, len(whole) + 1))
    assert 10 <= len(whole) < STEPS
    assert next(iter(made[-1])).endswith("by (0, 1, 2, 3)")
    assert "ranks 4-5 given up" in job.said(0)
    assert re.search(r"went on without ranks 4-5 after \d", job.said(0))


@pytest.mark.timeout(300)
def test_a_host_that_was_given_up_ends_when_it_is_back(hosts: Hosts, tmp_path: Path) -> None:
    """It is back when the others have gone on, and before it has given up itself; they are not disturbed."""
    job = begun(hosts, tmp_path, "ddp")
    hosts.partition("host2")
    job.wait_until(lambda: "given up: no rank can reach it" in job.said(0), 60)
    hosts.heal("host2")
    assert [job.code(index, 90) for index in (0, 1)] == [0, 0], job.said(0)
    assert job.code(2, 60) != 0
    last = max(int(step) for step in re.findall(r"^step (\d+) of", job.said(2), re.MULTILINE))
    assert len(job.made_by(last)) == 1
    assert job.made_by(STEPS).pop().endswith("by (0, 1, 2, 3)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [5], indirect=True)
def test_a_rank_is_killed_elsewhere_before_the_host_is_known_to_be_silent(hosts: Hosts, tmp_path: Path) -> None:
    """The verdict is on the killed one then, and the survivors' meeting finds out about the other."""
    job = begun(hosts, tmp_path, "ddp", ranks=1)
    hosts.partition("host4")
    time.sleep(1.0)
    job.kill(2)
    assert [job.code(index, 90) for index in (0, 1, 3)] == [0, 0, 0], job.said(0)
    assert [job.code(index, 60) != 0 for index in (2, 4)] == [True, True]
    assert job.made_by(STEPS).pop().endswith("by (0, 1, 3)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [5], indirect=True)
def test_fewer_than_half_do_not_go_on_also_where_hosts_fall_silent_one_by_one(hosts: Hosts, tmp_path: Path) -> None:
    """The second falls silent while the others do without the first, and the third likewise: two of five are left."""
    job = begun(hosts, tmp_path, "ddp", ranks=1, held=True)
    hosts.partition("host4")
    for given_up, next_host in (("4", "host3"), ("3", "host2")):
        job.wait_until(lambda rank=given_up: f"rank {rank} given up" in job.said(0), 60)  # type: ignore[misc]
        hosts.partition(next_host)
        (tmp_path / f"next-after-{given_up}").touch()
    assert [job.code(index, 90) != 0 for index in range(5)] == [True] * 5
    assert "went on" not in job.said(0)


@pytest.mark.timeout(300)
def test_the_job_ends_where_most_ranks_have_fallen_silent(hosts: Hosts, tmp_path: Path) -> None:
    """The host of the store is then more likely the one that is cut off."""
    job = begun(hosts, tmp_path, "ddp")
    hosts.partition("host0")
    assert all(job.code(index, 90) != 0 for index in range(3))
    assert not any("went on" in job.said(index) for index in range(3))
