"""`nccl_timeout_handler` around raw NCCL collectives: the ranks that wait can make their group again, and the late one is told the truth."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join, nccl2

pytestmark = NEEDS_GPU

RANKS, CULPRIT, LIMIT = 3, 2, 2.0


def bounded() -> None:
    """Rank 2 comes when the others have given up."""
    rank = join("nccl")
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == CULPRIT:
        time.sleep(2 * LIMIT)
    started = time.monotonic()
    try:
        with ng.nccl_timeout_handler(LIMIT):
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
        faults.report(went_on=True)
    except ng.CollectiveFailed as error:
        faults.report(raised=type(error).__name__, text=str(error), seconds=time.monotonic() - started)
    if rank != CULPRIT:
        dist.destroy_process_group()
        faults.report(destroyed=True)
    os._exit(0)


@pytest.mark.parametrize("handling", ["3", "2"])
def test_a_late_rank(handling: str) -> None:
    """Error handling 3 is torch's default; with 2 its watchdog aborts in the background, which looks like success on nccl2."""
    env = {
        **SHARED_GPU,
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "4000",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": handling,
        "NCCLGUARD_REPORT_DIR": "none",
    }
    result = faults.run_ranks(bounded, RANKS, env=env, timeout=60)
    ended = handling == "3" and nccl2()  # torch ends the late rank while the abort waits for its watchdog
    for rank in range(RANKS):
        reports = result[rank].reports
        assert "went_on" not in reports, str(result)
        assert rank == CULPRIT and ended or reports["seconds"] < LIMIT + 2.0, reports
    for rank in (0, 1):
        assert result[rank].reports["raised"] == "CollectiveTimeout"
        assert "create it again" in result[rank].reports["text"]
        assert "cannot be kept" not in result[rank].reports["text"]
        assert result[rank].reports["destroyed"]
    text = result[CULPRIT].output if ended else result[CULPRIT].reports["text"]
    assert "cannot be kept" in text
    if handling == "2" and nccl2():
        assert result[CULPRIT].reports["raised"] == "CollectiveFailed"
        assert "COMM_ERROR" in text
