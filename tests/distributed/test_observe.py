"""`ncclguard observe`: programs that do not know of ncclguard, under real launchers; the verdicts are those of `watch()`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import ncclguard as ng
from ncclguard.faults.cleanup import JOB_VARIABLE, end_processes
from tests.ports import free_port

pytestmark = pytest.mark.slow
THOROUGH = pytest.mark.thorough

CULPRIT = 2
LIMIT = 6
#: torch's own, from where all ranks are, in seconds: above that of `watch()`.
OWN_LIMIT = 20
#: On a busy machine ranks come from `init_process_group` seconds apart, and no collective has to wait for that.
MEET = """
store = dist.distributed_c10d._get_default_store()
store.set(f"here {dist.get_rank()}", "")
store.wait([f"here {rank}" for rank in range(dist.get_world_size())])
"""
#: A training that knows nothing of ncclguard, and what befalls its rank 2.
TRAINING = f"""
import ctypes, os, signal, subprocess, sys, time
from datetime import timedelta
import torch
import torch._dynamo  # as the first step does, which takes some ranks seconds longer than others
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault, before = sys.argv[1], dict(os.environ)
dist.init_process_group("gloo", timeout=timedelta(seconds=90))
assert dict(os.environ) == before, "a variable was set"
{MEET}
rank, other = dist.get_rank(), dist.new_group()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2)))

def steps(number):
    for _ in range(number):
        loss = model(torch.ones(4, 20)).sum()
        loss.backward()
    return loss.item()

def save_checkpoint(seconds):
    time.sleep(seconds)

steps(5)
time.sleep(3)  # the ranks of this host learn of each other
steps(5)
dist.distributed_c10d._set_pg_timeout(timedelta(seconds={OWN_LIMIT}))
if rank == {CULPRIT}:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ValueError("boom in rank 2")
    if fault == "exit":
        sys.exit(0)
    if fault == "late":
        save_checkpoint({LIMIT} + 4)
    if fault == "slow":
        save_checkpoint({LIMIT} / 2)
    if fault == "gil":
        ctypes.PyDLL(None).usleep(({LIMIT} + 5) * 1000000)
    if fault == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {{{LIMIT} + 6}}; kill -CONT {{os.getpid()}}"])
        os.kill(os.getpid(), signal.SIGSTOP)
if fault == "size":
    dist.all_reduce(torch.ones(4_000_000 * (2 if rank == {CULPRIT} else 1)))
if fault == "group" and rank == {CULPRIT}:
    dist.barrier(group=other)
print(f"rank {{rank}} ended with {{steps(5)!r}}\\n", end="", flush=True)  # in one write
dist.destroy_process_group()
time.sleep(0.5)  # gloo's threads let go of the last works, which takes the GIL: SIGABRT once the interpreter ends
"""
#: fault -> cause, whether the job ends well. tests/distributed/test_watch.py and test_culprit_stacks.py have the same.
FAULTS = {
    "kill": ("lost", False),
    "raise": ("failed", False),
    "exit": ("exited", False),
    "late": ("late", True),
    "gil": ("stuck", True),
    "stop": ("stuck", True),
    "size": ("diverged", False),
    "group": ("diverged", False),
}


@dataclass(frozen=True)
class Ended:
    """How a job ended: its exit code, what it printed, the incidents of its reports, the oldest first."""

    code: int
    output: str
    incidents: list[ng.Incident]


@pytest.fixture
def job() -> Iterator[str]:
    """A mark that every process of a job carries, by which those that are left are ended."""
    name = uuid.uuid4().hex
    yield name
    assert not end_processes(name)


def launch(folder: Path, job: str, script: str, *command: str, **variables: str) -> Ended:
    """Run a command in a folder that has the script as train.py."""
    (folder / "train.py").write_text(script)
    reports = folder / "reports"
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {JOB_VARIABLE: job, "NCCLGUARD_TIMEOUT": str(LIMIT), "NCCLGUARD_REPORT_DIR": str(reports)}
    environment |= variables
    with (folder / "output").open("w+") as file:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=200, check=False
        )
        file.seek(0)
        output = file.read()
    written = sorted(reports.glob("*.json"), key=lambda path: path.stat().st_mtime)
    incidents = [ng.Incident.from_json(json.dumps(json.loads(path.read_text())["incident"])) for path in written]
    return Ended(done.returncode, output, incidents)


def observe(*command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ncclguard", "observe", "--", *command)


def torchrun(*arguments: str, ranks: int = 4) -> tuple[str, ...]:
    return ("torchrun", "--standalone", "--nproc-per-node", str(ranks), "train.py", *arguments)


@pytest.mark.parametrize(
    "fault",
    [
        "kill",
        "late",
        *(pytest.param(name, marks=THOROUGH) for name in ("group", "size", "raise", "exit", "gil", "stop")),
    ],
)
def test_a_rank_of_an_unchanged_program_is_named(fault: str, tmp_path: Path, job: str) -> None:
    cause, ends_well = FAULTS[fault]
    ended = launch(tmp_path, job, TRAINING, *observe(*torchrun(fault)))
    assert (ended.code == 0) == ends_well, ended.output
    assert ended.incidents, ended.output
    first = ended.incidents[0]
    assert (str(first.cause), first.culprits, first.agreed) == (cause, (CULPRIT,), True), ended.output
    assert {rank for incident in ended.incidents for rank in incident.culprits} == {CULPRIT}, ended.output
    assert first.summary in ended.output
    if fault == "late":
        culprit = next(rank for rank in first.ranks if rank.rank == CULPRIT)
        assert any("save_checkpoint" in frame for frame in culprit.stack), culprit


@THOROUGH
def test_a_late_rank_is_named_where_torchs_own_limit_passes_first(tmp_path: Path, job: str) -> None:
    """gloo raises on the ranks that wait, and nothing of ours has passed yet."""
    script = TRAINING.replace(f"({LIMIT} + 4)", "(90)")
    assert (
        "save_checkpoint(90)" in script
    )  # it does not come while the others' end is looked into, however slow that is
    ended = launch(tmp_path, job, script, *observe(*torchrun("late")), NCCLGUARD_TIMEOUT="90")
    assert ended.code != 0 and ended.incidents, ended.output
    first = ended.incidents[0]
    assert (str(first.cause), first.culprits, first.timeout) == ("late", (CULPRIT,), OWN_LIMIT), ended.output
    assert max(report.age or 0.0 for report in first.ranks) >= OWN_LIMIT, first
    assert {rank for incident in ended.incidents for rank in incident.culprits} == {CULPRIT}, ended.output


def test_a_healthy_program_computes_the_same_and_nobody_is_named(tmp_path: Path, job: str) -> None:
    """Rank 2 is slow within the limit; what is printed is what is printed without."""
    script = TRAINING.replace(f"seconds={OWN_LIMIT}", "seconds=90")
    plain = launch(tmp_path, job, script, *torchrun("slow"))
    ended = launch(tmp_path, job, script, *observe(*torchrun("slow")), NCCLGUARD_TIMEOUT="30")
    assert plain.code == 0, plain.output
    assert (ended.code, ended.incidents) == (0, []), ended.output
    lines = [sorted(line for line in one.output.splitlines() if "ended with" in line) for one in (plain, ended)]
    assert lines[0] == lines[1] and len(lines[0]) == 4, ended.output
    assert "observes the 4 ranks of this job" in ended.output
    assert "torch itself" not in ended.output, "its limit is above that of watch()"


SPAWNING = f"""
import multiprocessing, os, sys, time
import torch
import torch.distributed as dist

def rank(number, method):
    os.environ |= {{"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}}
    dist.init_process_group("gloo")
    exec({MEET!r})
    dist.barrier()
    if number == 1:
        time.sleep({LIMIT} + 4)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=rank, args=(number, sys.argv[1])) for number in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(sum(one.exitcode != 0 for one in ranks))
"""


@pytest.mark.parametrize(
    "method", ["spawn", pytest.param("fork", marks=THOROUGH), pytest.param("forkserver", marks=THOROUGH)]
)
def test_ranks_that_a_program_or_a_notebook_starts_itself_are_observed(method: str, tmp_path: Path, job: str) -> None:
    ended = launch(tmp_path, job, SPAWNING, *observe(sys.executable, "train.py", method, str(free_port())))
    assert ended.code == 0, ended.output
    assert [(str(one.cause), one.culprits) for one in ended.incidents] == [("late", (1,))], ended.output


LATE = """
import sys, time
import torch
import torch.distributed as dist
{init}
{meet}
dist.barrier()
if dist.get_rank() == 1:
    time.sleep({away})
dist.barrier()
dist.destroy_process_group()
"""
#: launcher -> its package, its command, how a script of its own begins
LAUNCHERS = {
    "accelerate": (
        "accelerate",
        ("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
         "--mixed_precision", "no", "--dynamo_backend", "no", "train.py"),  # as with GPUs: `--cpu` starts one process
        "from accelerate import Accelerator\nAccelerator(cpu=True)",
    ),
    "deepspeed": (
        "deepspeed",
        ("deepspeed", "--num_gpus", "2", "train.py"),
        'import deepspeed\ndeepspeed.init_distributed("gloo")',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["accelerate", pytest.param("deepspeed", marks=THOROUGH)])
def test_ranks_of_other_launchers_are_observed(name: str, tmp_path: Path, job: str) -> None:
    package, command, init = LAUNCHERS[name]
    pytest.importorskip(package)
    script = LATE.format(init=init, meet=MEET, away=LIMIT + 4)
    ended = launch(tmp_path, job, script, *observe(*command), DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="true")
    assert ended.code == 0, ended.output
    assert [(str(one.cause), one.culprits) for one in ended.incidents] == [("late", (1,))], ended.output


def report(folder: Path, job: str, init: str, after: str, **variables: str) -> Ended:
    """Two ranks that print how many watchers they have."""
    script = f"""
import threading
import torch.distributed as dist
{init}
print(sum(thread.name == "ncclguard-watch" for thread in threading.enumerate()), "watchers", flush=True)
{after}
dist.destroy_process_group()
"""
    return launch(folder, job, script, *observe(*torchrun(ranks=2)), **variables)


WATCHES = {
    "before": 'import ncclguard as ng\nng.watch(timeout=5)\ndist.init_process_group("gloo")',
    "after": 'dist.init_process_group("gloo")\nimport ncclguard as ng\nng.watch(timeout=5)',
}


@pytest.mark.parametrize("when", [pytest.param("before", marks=THOROUGH), "after"])
def test_a_program_that_watches_itself_is_watched_once(when: str, tmp_path: Path, job: str) -> None:
    ended = report(tmp_path, job, WATCHES[when], "ng.safe_barrier(timeout=20).raise_if_failed()")
    assert ended.code == 0, ended.output
    assert ended.output.count("1 watchers") == 2, ended.output


#: What goes wrong in the hook -> variables and files that bring it about, and what is said.
BROKEN: Mapping[str, tuple[dict[str, str], dict[str, str], str]] = {
    "a package is missing": ({}, {"pydantic_settings.py": "raise ModuleNotFoundError('none here')"}, "none here"),
    "a wrong setting": ({"NCCLGUARD_TIMEOUT": "abc"}, {}, "NCCLGUARD_TIMEOUT"),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_an_error_of_the_hook_does_not_reach_the_program(what: str, tmp_path: Path, job: str) -> None:
    variables, files, said = BROKEN[what]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ended = report(
        tmp_path, job, 'dist.init_process_group("gloo")', "dist.barrier()", PYTHONPATH=str(tmp_path), **variables
    )
    assert ended.code == 0, ended.output
    assert ended.output.count("0 watchers") == 2, ended.output
    assert said in ended.output, ended.output
