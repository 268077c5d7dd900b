"""`ncclguard run`: survivors are left alone while they go on, and in every other case it is torchrun."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = 512  # of the example

UNDECLARED = """
import os, signal, torch, torch.distributed as dist, ncclguard as ng
dist.init_process_group("gloo")
ng.safe_barrier(timeout=60)
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ng.safe_all_reduce(torch.ones(2), timeout=60).raise_if_failed()
finally:
    print("told", flush=True)
    signal.pause()
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "ncclguard", "run", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rank_of(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("RANK", ""))
    except psutil.Error:
        return ""


@pytest.mark.timeout(300)  # four processes import torch, which takes a minute where others compute on all cores
def test_the_example_ends_well_when_rank_0_and_another_are_killed(tmp_path: Path) -> None:
    """Killed from outside, at any moment. All steps are done, with each sample once in an epoch."""
    steps, killed, lines = 60, list[int](), list[str]()
    victims = [0, random.Random(17).choice([1, 2, 3])]
    script = [str(ROOT / "examples" / "train_surviving.py"), "--steps", str(steps), "--samples", "samples"]
    job = start(tmp_path, "--nproc-per-node", "4", *script)
    try:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line.rstrip())
            if len(killed) < 2 and line.startswith(f"step {10 + 20 * len(killed)}:"):
                children = psutil.Process(job.pid).children(recursive=True)
                next(child for child in children if rank_of(child) == str(victims[len(killed)])).kill()
                killed.append(victims[len(killed)])
        _, errors = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0, errors
    told = {int(m[1]): m[2] for m in (re.match(r"step (\d+): loss \S+, ranks (.*)", line) for line in lines) if m}
    # The line of a step is one rank's, which may be killed between the step and its line.
    assert len(told) >= steps - 1
    assert steps in told
    left = [other for other in range(4) if other not in killed]
    spans = f"{left[0]}-{left[1]}" if left[1] == left[0] + 1 else f"{left[0]}, {left[1]}"
    assert (told[1], told[steps]) == ("0-3", spans)
    assert re.fullmatch(rf"done: {steps} steps, parameters [0-9a-f]{{16}}", lines[-1])
    samples = [int(line) for line in (tmp_path / "samples").read_text().split()]
    assert len(samples) > 8 * 2 * steps
    for begin in range(0, len(samples), IMAGES):
        epoch = samples[begin : begin + IMAGES]
        assert len(set(epoch)) == len(epoch)
    for lost in killed:
        assert f"rank {lost} has ended with exit code -9" in errors
        assert re.search(rf"went on without rank {lost} after [0-4]\.\d s", errors), errors


@pytest.mark.timeout(300)
def test_a_program_that_does_not_go_on_is_ended_as_by_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNDECLARED)
    job = start(tmp_path, "--nproc-per-node", "3", "program.py")
    try:
        _, errors = job.communicate(timeout=240)
    finally:
        job.kill()
    assert job.returncode == 1
    assert "may go on without it" not in errors
    assert re.search(r"Root Cause.*\n(.*\n)*.*rank +: 1 .*\n.*exitcode +: -9", errors), errors
