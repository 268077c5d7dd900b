"""`ncclguard run`: survivors are left alone while they go on, and in every other case it is torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("preforked_programs")

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

FAILING = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist, ncclguard as ng
from torch.nn.parallel import DistributedDataParallel
what, new = sys.argv[1], "NCCLGUARD_JOINS" in os.environ
dist.init_process_group("ncclguard", timeout=timedelta(seconds=5))
if not new:
    ng.safe_barrier(timeout=100)  # on a busy machine imports take unequal time
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
@ng.resilient_step(model, optimizer)
def train():
    optimizer.zero_grad()
    if rank == 1 and train.completed == 5 and what == "stops" and not new:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and train.completed >= 5 and what == "raises":
        raise RuntimeError("of its own")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
ended = {"stops": lambda: train.joins or new and train.completed, "raises": lambda: after > 200}[what]
after = 0
while not ended():
    train()
    after += len(train.losses) == 2
    signal.sigtimedwait([], 0.05)
weights = float(model.module.weight.detach().double().sum())
os.write(1, f"end {rank} {train.ranks} {weights}\\n".encode())  # print() writes in parts, between those of other ranks
"""

EVALUATING = """
import os, signal, time
from datetime import timedelta
import torch, torch.distributed as dist, ncclguard as ng
from torch.nn.parallel import DistributedDataParallel
new = "NCCLGUARD_JOINS" in os.environ
dist.init_process_group("ncclguard", timeout=timedelta(seconds=20))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
@ng.resilient_step(model, optimizer)
def train():
    optimizer.zero_grad()
    if rank == 1 and train.completed == 5 and not new:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
@ng.resilient_evaluate(fallback=None, max_attempts=1, barrier_timeout=20)
def evaluate():
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return int(ranks)
values = []
while len(values) < 3:
    train()
    if len(train.ranks) == 3 and train.completed > 5 and train.completed % 10 == 0:
        values.append(evaluate())
    time.sleep(0.02)
os.write(1, f"end {rank} {values}\\n".encode())
"""


REPLICATED = """
import json, os, signal, time, torch, torch.distributed as dist, ncclguard as ng
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
new = "NCCLGUARD_JOINS" in os.environ
torch.set_num_threads(1)
dist.init_process_group("ncclguard")
rank = dist.get_rank()
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
optimizer.register_step_post_hook(lambda *_: dies(5, 1))
def dies(step, who):
    if (train.completed, rank) == (step, who) and not new:
        os.kill(os.getpid(), signal.SIGKILL)
@ng.resilient_step(model, optimizer)
def train():
    optimizer.zero_grad()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(train.completed))
    loss = model(rows).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.item()
lines, whole = [], 0
while whole < 5:
    loss = train()
    lines.append([train.completed, loss, list(train.made_by), list(model[0].weight.device_mesh.shape)])
    whole = whole + 1 if train.completed > 6 and len(train.made_by) == 4 else 0
    time.sleep(0.05)
os.write(1, f"end {rank} {json.dumps(lines)}\\n".encode())
dist.destroy_process_group()
"""


def start(folder: Path, *arguments: str, merged: bool = False) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "ncclguard", "run", *arguments]
    errors = subprocess.STDOUT if merged else subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)


def end(job: subprocess.Popen[str]) -> None:
    """The launcher, and what it leaves behind when it is killed."""
    children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    for process in (job, *children):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()


def rank_of(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("RANK", ""))
    except psutil.Error:
        return ""


@pytest.mark.parametrize(
    "way",
    [
        [],
        pytest.param(
            ["--fsdp"],
            marks=[
                pytest.mark.thorough,
                pytest.mark.skipif(
                    not hasattr(FSDPModule, "reset_iter_state"),
                    reason="this torch cannot begin FSDP2's step anew (2.13 can)",
                ),
            ],
        ),
    ],
)
def test_the_example_ends_well_when_rank_0_and_another_are_killed(tmp_path: Path, way: list[str]) -> None:
    """Killed from outside, at any moment. All steps are done, with each sample once in an epoch."""
    steps, killed, lines = 60, list[int](), list[str]()
    victims = [0, random.Random(17).choice([1, 2, 3])]
    script = [str(ROOT / "examples" / "train_surviving.py"), "--steps", str(steps), "--samples", "samples", *way]
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
        end(job)
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
    said = [json.loads(file.read_text())["incident"] for file in (tmp_path / "ncclguard-incidents").glob("*.json")]
    assert all("The others go on without it" in one["advice"] for one in said)
    told_of = [(one["culprits"], change["ranks"]) for one in said for change in one["afterwards"]]
    assert sorted(told_of) == sorted(([lost], [lost]) for lost in killed)  # each once, also the one that rank 0 wrote
    for lost in killed:
        assert f"rank {lost} has ended with exit code -9" in errors
        took = re.search(rf"went on without rank {lost} after (\d+\.\d) s", errors)
        assert took is not None and float(took[1]) < 20, errors


def test_a_port_that_is_taken_is_said_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        launcher = start(
            tmp_path, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank", "0", __file__,
            merged=True,
        )  # fmt: skip
        said, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert f"ncclguard run: another process listens at port {port} of this host" in said and "Traceback" not in said, (
        said
    )


def test_a_host_that_is_lost_with_its_launcher_is_not_waited_for_at_the_end(tmp_path: Path) -> None:
    """Two launchers stand for two hosts. torch's own waits another 300 s for the launcher of the lost one."""
    rendezvous = ["--nnodes", "2", "--nproc-per-node", "2"]
    rendezvous += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    script = [str(ROOT / "examples" / "train_surviving.py"), "--steps", "60", "--samples", "samples"]
    script += ["--pause", "0.05"]  # the second host is to be lost long before the last step
    hosts = [start(tmp_path, *rendezvous, "--node-rank", number, *script, merged=True) for number in "01"]
    told = list[str]()
    try:
        first = hosts[0].stdout
        assert first is not None
        for line in first:
            told.append(line.rstrip())
            print(line, end="")
            if line.startswith("step 20:"):
                end(hosts[1])
            if line.startswith("done:"):
                hosts[0].wait(60)
    finally:
        for number, host in enumerate(hosts):
            end(host)
            assert host.stdout is not None
            print(f"what host {number} printed besides:", host.stdout.read(), sep="\n")
            host.stdout.close()
    assert hosts[0].returncode == 0
    assert any("went on without ranks 2-3 after" in line for line in told), told
    assert any(re.match(r"step 60: loss \S+, ranks 0-1$", line) for line in told), told
    assert len((tmp_path / "samples").read_text().split()) > 60 * 2 * 8


@pytest.mark.thorough
def test_spares_take_the_places_of_lost_ranks_one_of_them_twice(tmp_path: Path) -> None:
    """Rank 0, then the process that has its place, then another: all ranks train to the end, with each sample once."""
    steps, killed, lines = 400, list[int](), list[str]()
    victims = [0, 0, random.Random(19).choice([1, 2, 3])]
    script = [str(ROOT / "examples" / "train_surviving.py"), "--steps", str(steps), "--samples", "samples"]
    job = start(tmp_path, "--nproc-per-node", "4", "--spares", "3", *script, merged=True)
    try:
        assert job.stdout is not None
        whole = 0
        for line in job.stdout:
            lines.append(line.rstrip())
            whole = whole + 1 if re.match(r"step \d+: .*ranks 0-3$", line) else 0 if line.startswith("step ") else whole
            if len(killed) < len(victims) and whole == 20:
                whole, rank = 0, victims[len(killed)]
                children = psutil.Process(job.pid).children(recursive=True)
                next(child for child in children if rank_of(child) == str(rank)).kill()
                killed.append(rank)
        job.stdout.close()
        assert job.wait(60) == 0, lines
    finally:
        end(job)
    text = "\n".join(lines)
    assert killed == victims, text
    for rank in set(victims):
        joined = re.findall(rf"rank {rank} rejoined at step \d+, \d+\.\d s", text)
        assert len(joined) == victims.count(rank), text
    assert re.search(rf"step {steps}: loss \S+, ranks 0-3", text)
    assert len(re.findall(rf"done: {steps} steps, parameters [0-9a-f]{{16}}", text)) == 1
    samples = [int(line) for line in (tmp_path / "samples").read_text().split()]
    assert 8 * 3 * steps < len(samples) <= 8 * 4 * steps
    for begin in range(0, len(samples), IMAGES):
        epoch = samples[begin : begin + IMAGES]
        assert len(set(epoch)) == len(epoch)


@pytest.mark.parametrize("what", ["stops", pytest.param("raises", marks=pytest.mark.thorough)])
def test_a_rank_that_stops_is_replaced_and_one_that_raises_the_same_again_is_not(what: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILING)
    job = start(tmp_path, "--nproc-per-node", "3", "--restart-lost", "3", "program.py", what)
    try:
        output, errors = job.communicate(timeout=240)
    finally:
        end(job)
    assert job.returncode == 0, errors
    ends = sorted(line.split(maxsplit=2) for line in output.splitlines() if line.startswith("end"))
    left = ["0", "1", "2"] if what == "stops" else ["0", "2"]
    assert [end[1] for end in ends] == left, (output, errors)
    assert len({end[2] for end in ends}) == 1, ends
    assert re.search(r"rank 1 rejoined at step \d+", errors), errors
    if what == "stops":
        assert "rank 1 does not run, and the others go on without it: its process is ended" in errors
    else:
        assert "rank 1 is not started again: it ended with RuntimeError: of its own, as one before" in errors


def test_a_program_that_does_not_go_on_is_ended_as_by_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(UNDECLARED)
    job = start(tmp_path, "--nproc-per-node", "3", "program.py")
    try:
        _, errors = job.communicate(timeout=240)
    finally:
        end(job)
    assert job.returncode == 1
    assert "may go on without it" not in errors
    assert re.search(r"Root Cause.*\n(.*\n)*.*rank +: 1 .*\n.*exitcode +: -9", errors), errors


def test_who_takes_a_lost_ranks_place_evaluates_with_the_others_where_no_step_is_given(tmp_path: Path) -> None:
    """The count of optimizer steps tells evaluations apart then: a new process goes on with that of the others."""
    (tmp_path / "train.py").write_text(EVALUATING)
    job = start(tmp_path, "--nproc-per-node", "3", "--spares", "1", "train.py", merged=True)
    try:
        output, _ = job.communicate(timeout=120)
    finally:
        end(job)
    assert job.returncode == 0, output
    assert sorted(re.findall(r"^end .*", output, re.MULTILINE)) == [f"end {rank} [3, 3, 3]" for rank in range(3)], (
        output
    )


@pytest.mark.thorough
def test_with_replicas_a_spare_gets_its_shard_and_the_losses_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    """HSDP without copies; all ranks have the same rows, so the mean over three of them is that over four."""
    (tmp_path / "train.py").write_text(REPLICATED)
    job = start(tmp_path, "--nproc-per-node", "4", "--spares", "1", "train.py", merged=True)
    try:
        output, _ = job.communicate(timeout=240)
    finally:
        end(job)
    assert job.returncode == 0, output
    told = {int(rank): json.loads(text) for rank, text in re.findall(r"^end (\d) (.*)", output, re.MULTILINE)}
    assert sorted(told) == [0, 1, 2, 3], output
    assert [line[2:] for line in told[0][4:6]] == [[[0, 1, 2, 3], [2, 2]], [[0, 2, 3], [1, 3]]], told[0]
    assert told[1][-1] == told[0][-1]
    assert told[0][-1][2:] == [[0, 1, 2, 3], [2, 2]]
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step, (completed, loss, *_) in enumerate(told[0]):
        assert completed == step + 1
        optimizer.zero_grad()
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        undisturbed = model(rows).square().mean()
        undisturbed.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert loss == pytest.approx(undisturbed.item(), rel=1e-6, abs=1e-6)


HEALTHY = """
import os, torch, torch.distributed as dist, ncclguard as ng
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("ncclguard")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
@ng.resilient_step(model, optimizer)
def train():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
train()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("launcher", "told"), [("torch.distributed.run", 1), ("ncclguard run", 0)])
def test_a_step_under_a_launcher_that_ends_all_ranks_says_so_once(launcher: str, told: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEALTHY)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", *launcher.split(), "--standalone", "--nproc-per-node", "2", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout + ended.stderr).count("torchrun ends all ranks when one is lost") == told, ended
