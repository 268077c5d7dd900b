"""`ncclguard hang` on jobs over NCCL that nothing was prepared in: hosts wait for their devices, and NCCL's RAS tells whose turn it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ncclguard.hang.command import look_here
from ncclguard.hang.report import JobReport
from ncclguard_explain.cause import Cause
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU
from tests.gpu.test_ras import JSON_FROM
from tests.ports import free_port

SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        os.geteuid() != 0 and SCOPE.exists() and SCOPE.read_text().strip() != "0",
        reason="kernel.yama.ptrace_scope forbids this user to read the memory of processes that are not its children",
    ),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.nccl.version() < JSON_FROM,  # type: ignore[no-untyped-call]
        reason="RAS of this NCCL tells no counts, and then nobody is named (tests/unit/test_hang_launches.py)",
    ),
]

RANKS = 4
JOB = """
import os, sys, time
import torch, torch.distributed as dist
rank, case = int(os.environ["RANK"]), sys.argv[1]
os.environ["NCCL_HOSTID"] = f"ncclguard-{rank}"  # ranks of one GPU
torch.cuda.set_device(0)
dist.init_process_group("nccl")
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
tensor = torch.ones(1000, device="cuda")

def step(group=None):
    dist.all_reduce(tensor, group=group)
    return tensor.sum().item()

def save_checkpoint():
    time.sleep(600)

def evaluate():
    time.sleep(600)

for _ in range(5):
    step()
    step(pair)
open(f"ready-{rank}", "w").close()
if case == "save" and rank == 2:
    save_checkpoint()
if case == "two places" and rank in (1, 2):
    (save_checkpoint if rank == 1 else evaluate)()
if case == "behind a group" and rank == 3:
    save_checkpoint()
if case == "behind a group":
    step(pair)  # rank 2 waits here for rank 3, and all others for rank 2
if case == "device" and rank == 2:
    torch.cuda._sleep(int(60e9))  # a minute and more
    torch.cuda.synchronize()
if case == "moves":
    while True:
        step()
step()
"""


@pytest.fixture
def look(tmp_path: Path) -> Iterator[Callable[[str], JobReport]]:
    """Begin a job, and return the report on it once it stands."""
    (tmp_path / "job.py").write_text(JOB)
    address = f"127.0.0.1:{free_port()}"
    jobs: list[subprocess.Popen[bytes]] = []

    def looked(case: str) -> JobReport:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={RANKS}",
            "job.py",
            case,
        ]
        environment = {**os.environ, **SHARED_GPU, "NCCL_RAS_ADDR": address, "OMP_NUM_THREADS": "1"}
        with (tmp_path / "output").open("wb") as output:
            started = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        jobs.append(started)
        end = time.monotonic() + 120
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < end and jobs[0].poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        time.sleep(2)  # each comes to where it stands
        (job,) = look_here(pids_of={jobs[0].pid}).jobs
        return job

    yield looked
    for job in jobs:
        children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        for pid in [job.pid, *children]:
            os.kill(pid, signal.SIGKILL)
        job.wait()


CASES = {
    "save": ((2,), "high"),
    "two places": ((1, 2), "high"),
    "behind a group": ((3,), "high"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_has_not_launched_what_the_others_wait_for_is_named(
    case: str, look: Callable[[str], JobReport]
) -> None:
    job = look(case)
    assert (job.culprits, job.confidence) == CASES[case], job
    assert job.cause is Cause.LATE
    assert "AllReduce launched" in job.reason


@pytest.mark.parametrize("case", ["device", "moves"])
def test_nobody_is_named_where_a_device_computes_or_the_job_moves(case: str, look: Callable[[str], JobReport]) -> None:
    job = look(case)
    assert job.culprits == (), job
    assert case != "device" or job.awaited == (2,), job
