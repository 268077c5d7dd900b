"""`ncclguard doctor`, `drill` and `bench` where there are GPUs; what they say of an emulated one says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ncclguard.bench.results import BenchResult
from ncclguard.environment.doctor import checks
from ncclguard.environment.doctor.checks import Check, read_context
from tests.gpu.parts import EMULATED, NEEDS_GPU, SHARED_GPU

pytestmark = NEEDS_GPU

ROOT = Path(__file__).resolve().parents[2]
RANKS, CULPRIT = 3, 2
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

GUARDED = """
import torch, torch.distributed as dist, ncclguard as ng
from tests.gpu.parts import join
join("nccl")
for step in range(9):
    outcome = ng.safe_all_reduce(torch.ones(1000, device="cuda"), timeout=5.0 if step else 60.0)
    print(step, outcome.ok, flush=True)
dist.destroy_process_group()
"""

#: Started by faults.run_ranks: torchrun ends the others when one has raised, in the time that they need to agree. They
#: end by themselves, where torch would do so a minute later.
WATCHED = """
import os, threading, torch, torch.distributed as dist, ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import SHARED_GPU, join

def told(incident):
    if incident.cause != "late":
        threading.Timer(3.0, os._exit, [1]).start()

def train():
    ng.watch(timeout=5.0, on_incident=told)
    join("nccl")
    gradient = torch.ones(1000, device="cuda")
    for step in range(60):
        dist.all_reduce(gradient)
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000)
    dist.destroy_process_group()

if __name__ == "__main__":
    print(faults.run_ranks(train, 3, env=SHARED_GPU, timeout=200))
"""


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `ncclguard` with its arguments in `folder`."""
    env = {**os.environ, **SHARED_GPU, "NCCL_RAS_ENABLE": "0", "PYTHONPATH": str(ROOT), **variables}
    del env["NCCLGUARD_AUTOSTART"]
    command = [sys.executable, "-m", "ncclguard", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)


def assert_right(gpus: Check, links: Check, number: int) -> None:
    """Whether doctor's checks say what there is."""
    assert f"{number} x {torch.cuda.get_device_name()}" in gpus.detail, gpus
    assert ("emulated" in gpus.detail) is EMULATED
    if number == 1:
        assert (links.status, links.detail) == ("skipped", "one GPU")
    else:
        assert f"all {number} GPUs" in links.detail or "no direct access for" in links.detail, links
    if EMULATED:
        assert (gpus.status, links.status) == ("ok", "skipped" if number == 1 else "ok")


def test_doctor_names_the_gpus_that_this_process_sees() -> None:
    context = read_context()
    assert_right(checks.check_gpus(context), checks.check_gpu_links(context), torch.cuda.device_count())


def test_the_command_doctor_names_the_gpus_and_their_links(tmp_path: Path) -> None:
    """Where the GPUs are emulated, three of them."""
    done = run("doctor", "--json", "-", folder=tmp_path, **({"EMULATED_GPUS": "3"} if EMULATED else {}))
    found = {one["name"]: Check.model_validate(one) for one in json.loads(done.stdout)["checks"]}
    assert_right(found["gpus"], found["gpu links"], 3 if EMULATED else torch.cuda.device_count())
    assert found["ras"].status == "skipped" and "NCCL_RAS_ENABLE=0" in found["ras"].detail
    assert ("emulated" in done.stderr) is EMULATED  # the table


def drill(program: str, *arguments: str, launcher: Sequence[str] = (), folder: Path) -> dict[str, Any]:
    """Strike rank 2 of an unchanged program and return what the drill found."""
    (folder / "train.py").write_text(program)
    what = ["drill", "--timeout", "240", "--rank", str(CULPRIT), "--json", "found.json", *arguments]
    launched = [sys.executable, *launcher, "train.py"]
    done = run(*what, "--", *launched, folder=folder, NCCLGUARD_ALLOW_DRILL="1")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return {**found, "text": done.stdout}


@pytest.mark.parametrize(
    ("fault", "cause", "knowing", "going_on"),
    [
        ("late --seconds 9", "late", "012", "012"),
        ("oom", "failed", "01", ""),
        ("stop --seconds 9", "stuck", "012", "012"),
    ],
)
def test_drill_strikes_guarded_calls(fault: str, cause: str, knowing: str, going_on: str, tmp_path: Path) -> None:
    launcher = [*LAUNCHER, str(RANKS)]
    found = drill(GUARDED, "--op", "3", "--fault", *fault.split(), launcher=launcher, folder=tmp_path)
    assert (found["named"], found["cause"]) == ([CULPRIT], cause), found["text"]
    assert set(knowing) - {str(CULPRIT)} <= set(found["known_by"]), found["text"]
    assert sorted(found["went_on"]) == list(going_on), found["text"]
    assert found["torn"] == []
    (page,) = found["reports"]
    assert ("emulated GPU" in (tmp_path / page).with_suffix(".json").read_text()) is EMULATED


@pytest.mark.parametrize(("fault", "cause"), [("late --seconds 9", "late"), ("oom", "failed")])
def test_drill_strikes_raw_calls_under_watch(fault: str, cause: str, tmp_path: Path) -> None:
    found = drill(WATCHED, "--raw", "--op", "20", "--fault", *fault.split(), folder=tmp_path)
    assert (found["named"], found["cause"]) == ([CULPRIT], cause), found["text"]
    assert {"0", "1"} <= set(found["known_by"]), found["text"]
    assert sorted(found["went_on"]) == (["0", "1", "2"] if cause == "late" else []), found["text"]


def test_bench_measures_cuda_tensors_and_says_what_it_measured_on(tmp_path: Path) -> None:
    """Two ranks that share a GPU look like two hosts to NCCL; without --ranks, since the launcher says so."""
    script = 'NCCL_HOSTID=ncclguard-$RANK exec "$0" -m ncclguard.bench "$@"'
    launched = [sys.executable, *LAUNCHER, "2", "--no-python", "sh", "-c", script, sys.executable]
    env = {**os.environ, **SHARED_GPU, "PYTHONPATH": str(ROOT)}
    del env["NCCLGUARD_AUTOSTART"]
    sizes = ["--numel", "1", "1e5", "--iters", "4", "--warmup", "1", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(
        [*launched, *sizes],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# OK: 2 sizes" in done.stdout
    assert ("emulated" in done.stdout) is EMULATED
    found = BenchResult.model_validate_json((tmp_path / "found.json").read_text())
    environment = found.environment
    assert (found.ok, environment.backend, environment.device, environment.world_size) == (True, "nccl", "cuda", 2)
    assert all(("emulated" in name) is EMULATED for name in environment.gpus) and environment.gpus
    assert [size.numel for size in found.sizes] == [1, 100_000]
    for size in found.sizes:
        assert any(variant.guarded for variant in size.variants) and not all(
            variant.guarded for variant in size.variants
        )
        for variant in size.variants:
            assert (variant.calls, variant.wrong) == (4, 0)
            assert variant.checked == 4 * size.numel * 2
