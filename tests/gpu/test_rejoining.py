"""`ncclguard run` with "ncclguard-nccl": a new process takes the place of a rank that was killed, and all overlap again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.distributed.test_run import end, start
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU

pytestmark = NEEDS_GPU

PROGRAM = """
import os, signal
from datetime import timedelta
import torch, torch.distributed as dist, ncclguard as ng
from torch.nn.parallel import DistributedDataParallel
new = "NCCLGUARD_JOINS" in os.environ
os.environ["NCCL_HOSTID"] = "ncclguard-" + os.environ["RANK"] + str(os.getpid())
torch.cuda.set_device(0)
dist.init_process_group("ncclguard-nccl", timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
@ng.resilient_step(model, optimizer)
def train():
    optimizer.zero_grad()
    model(torch.full((2, 4), 1.0 + rank + train.completed, device="cuda")).sum().backward()
    if rank == 1 and train.completed == 5 and not new:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
first = None
while first is None or train.completed < first + 3:  # three steps with the new process
    train()
    first = train.completed if first is None and (new or train.joins) else first
    signal.sigtimedwait([], 0.05)
dist.barrier()
weights = float(model.module.weight.detach().double().sum())
os.write(1, f"end {rank} {train.ranks} {train.completed} {weights}\\n".encode())
os._exit(0)
"""


@pytest.mark.parametrize("new", [["--spares", "1"], ["--restart-lost", "1"]])
def test_a_new_process_takes_the_place_of_one_that_was_killed(
    new: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SHARED_GPU.items():
        if name != "NCCLGUARD_AUTOSTART":
            monkeypatch.setenv(name, value)
    (tmp_path / "program.py").write_text(PROGRAM)
    job = start(tmp_path, "--nproc-per-node", "3", *new, "program.py")
    try:
        output, errors = job.communicate(timeout=200)
    finally:
        end(job)
    assert job.returncode == 0, errors[-6000:]
    ends = sorted(line.split(maxsplit=2) for line in output.splitlines() if line.startswith("end"))
    assert [end[1] for end in ends] == ["0", "1", "2"], (output, errors[-6000:])
    assert len({end[2] for end in ends}) == 1, ends
    assert "(0, 1, 2)" in ends[0][2]
    assert re.search(r"rank 1 rejoined at step \d+", errors), errors[-6000:]
