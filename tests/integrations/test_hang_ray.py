"""`ncclguard hang --ray` on a cluster of Ray with two nodes on this host; it needs `pip install 'ray[train]'`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ncclguard
import ncclguard_explain

JOB = Path(__file__).parent / "hang_ray_job.py"
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.skipif(
        os.geteuid() != 0 and SCOPE.exists() and SCOPE.read_text().strip() != "0",
        reason="kernel.yama.ptrace_scope forbids this user to read the memory of processes that are not its children",
    ),
]


def test_the_worker_of_ray_train_that_sleeps_is_named_by_its_rank(tmp_path: Path) -> None:
    """Its workers are on two nodes, and Ray has told them their ranks after their start."""
    packages = [str(Path(one.__file__ or "").parents[1]) for one in (ncclguard, ncclguard_explain)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": ":".join([*packages, os.environ.get("PYTHONPATH", "")]), "PATH": path,
                   "HANG_RAY_JOB": str(tmp_path)}  # fmt: skip
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen([sys.executable, str(JOB), str(tmp_path)], stdout=log, stderr=log, env=environment)
    try:
        end = time.monotonic() + 280
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(4)):
            assert job.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        asked = [sys.executable, "-m", "ncclguard", "hang", "--ray", (tmp_path / "address").read_text(), "--json", "-",
                 "--environ", f"HANG_RAY_JOB={tmp_path}"]  # fmt: skip
        while True:
            report = json.loads(subprocess.run(asked, env=environment, stdout=-1, check=True, timeout=120).stdout)
            (found,) = report["jobs"]
            if found["stands"] or time.monotonic() > end:
                break
        assert (found["culprits"], found["cause"], found["confidence"]) == ([2], "late", "high"), found
        assert (found["counted"], report["silent"]) == (False, [])
        (stack,) = (group["stack"] for group in found["groups"] if group["ranks"] == [2])
        assert stack[-1].endswith("save_checkpoint")
    finally:
        job.terminate()  # Ray ends what it has started
        job.wait(60)
        log.close()
