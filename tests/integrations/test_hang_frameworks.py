"""`ncclguard hang` on jobs of Accelerate and DeepSpeed, by their own launchers, that nothing was prepared in."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclguard.hang.command import look_here
from ncclguard_explain.cause import Cause
from tests.ports import free_port

CASES = Path(__file__).parent / "hang_cases.py"
BIN = Path(sys.executable).parent
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        os.geteuid() != 0 and SCOPE.exists() and SCOPE.read_text().strip() != "0",
        reason="kernel.yama.ptrace_scope forbids this user to read the memory of processes that are not its children",
    ),
]
LAUNCHERS = {
    "accelerate": [str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"],
    "accelerate's module": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
                            "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"],
    "deepspeed": [str(BIN / "deepspeed"), "--num_accelerators", "2", "--master_port"],
}  # fmt: skip


@contextmanager
def started(launcher: str, case: str, folder: Path) -> Iterator[int]:
    """Start a job and return its launcher's process once both ranks evaluate; end all of its processes."""
    if importlib.util.find_spec(launcher.partition("'")[0]) is None:
        pytest.skip(f"{launcher} is not installed")
    log = folder / "log"
    command = [sys.executable, *LAUNCHERS[launcher], str(free_port()), str(CASES), case]
    environment = {**os.environ, "HANG_READY": f"{folder}/ready-", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with log.open("w") as output:
        job = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        end = time.monotonic() + 200
        while not all((folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert job.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield job.pid
    finally:
        for pid in [*below(job.pid), job.pid]:
            os.kill(pid, signal.SIGKILL)
        job.wait()


def below(pid: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [one for child in own for one in (*below(child), child)]


@pytest.mark.parametrize(
    ("launcher", "case"),
    [
        ("accelerate", "accelerate"),
        pytest.param("accelerate's module", "accelerate", marks=pytest.mark.thorough),
        pytest.param("deepspeed", "zero2", marks=pytest.mark.thorough),
        ("deepspeed", "zero3"),
    ],
)
def test_the_rank_that_sleeps_in_its_evaluation_is_named(launcher: str, case: str, tmp_path: Path) -> None:
    with started(launcher, case, tmp_path) as pid:
        end = time.monotonic() + 60
        while True:
            (job,) = look_here(pids_of={pid}).jobs
            if not job.stands and time.monotonic() < end:
                continue  # the other rank has not come to wait yet
            break
    assert (job.culprits, job.cause, job.world_size) == ((1,), Cause.LATE, 2), job
    assert [row.rank for row in job.ranks] == [0, 1]
    assert "score_samples" in next(group.stack for group in job.groups if group.ranks == (1,))[-1]
