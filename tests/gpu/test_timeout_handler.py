"""`nccl_timeout_handler` around raw NCCL collectives: the ranks that wait can make their group again, and so can the late one.

One that is told before its collective keeps its process; one that is inside it already is told what torch will do.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join, leave, nccl2, run_together

pytestmark = NEEDS_GPU

RANKS, CULPRIT, LIMIT = 3, 2, 2.0


def bounded(told: bool, store: str) -> None:
    """Rank 2 comes when the others have given up; then all that can make the group again and use it.

    ``told``: whether rank 2 enters its block when it comes, and so asks the store, or is in it already. ``store`` is a
    file that is not there yet, for the second life of the group: in the same store torch would find keys of the first.
    """
    rank = join("nccl")
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    started = time.monotonic()
    if rank == CULPRIT and told:
        time.sleep(2 * LIMIT)
        started = time.monotonic()
    try:
        with ng.nccl_timeout_handler(LIMIT if rank != CULPRIT or told else 3 * LIMIT):
            if rank == CULPRIT and not told:
                time.sleep(2 * LIMIT)
                started = time.monotonic()
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
        faults.report(went_on=True)
    except ng.CollectiveFailed as error:
        verdict = [str(error.outcome.cause), list(error.outcome.culprits), error.outcome.torn]
        faults.report(raised=type(error).__name__, text=str(error), verdict=verdict, seconds=time.monotonic() - started)
    if rank != CULPRIT or told:
        dist.destroy_process_group()
        faults.report(destroyed=True)
    if told:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
        again = torch.ones(10, device="cuda")
        with ng.nccl_timeout_handler(60):
            dist.all_reduce(again)
            torch.cuda.synchronize()
        faults.report(again=again[0].item())
        leave()
    os._exit(0)


def environment(handling: str) -> dict[str, str]:
    return {
        **SHARED_GPU,
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "4000",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": handling,
        "NCCLGUARD_REPORT_DIR": "none",
    }


def check_those_who_waited(result: faults.JobResult) -> None:
    for rank in (0, 1):
        reports = result[rank].reports
        assert "went_on" not in reports, str(result)
        assert reports["seconds"] < LIMIT + 2.0, reports
        assert reports["raised"] == "CollectiveTimeout"
        assert "create it again" in reports["text"]
        assert "cannot be kept" not in reports["text"]
        assert reports["destroyed"]


def test_a_late_rank_is_told_before_its_collective_names_itself_and_keeps_its_process(tmp_path: Path) -> None:
    result = run_together(
        bounded, RANKS, args=[True, str(tmp_path / "store")], env=environment("3"), timeout=90
    ).check()
    check_those_who_waited(result)
    late = result[CULPRIT].reports
    assert "went_on" not in late, str(result)
    assert late["raised"] == "CollectiveTimeout"
    assert late["verdict"] == ["late", [CULPRIT], False], late
    assert f"rank {CULPRIT}, this one, was late: it had not called collective 2 of the group" in late["text"]
    assert "create it again" in late["text"]
    assert "cannot be kept" not in late["text"]
    assert late["seconds"] < 1.0
    assert result.values("again") == dict.fromkeys(range(RANKS), float(RANKS))


@pytest.mark.parametrize("handling", ["3", "2"])
def test_a_late_rank_that_is_in_its_block_already_is_told_the_truth(handling: str) -> None:
    """Error handling 3 is torch's default; with 2 its watchdog aborts in the background, which looks like success on nccl2."""
    result = faults.run_ranks(bounded, RANKS, args=[False, ""], env=environment(handling), timeout=60)
    check_those_who_waited(result)
    ended = handling == "3" and nccl2()  # torch ends the late rank while the abort waits for its watchdog
    late = result[CULPRIT].reports
    assert "went_on" not in late, str(result)
    assert ended or late["seconds"] < LIMIT + 2.0, late
    text = result[CULPRIT].output if ended else late["text"]
    assert "cannot be kept" in text
    if handling == "2" and nccl2():
        assert late["raised"] == "CollectiveFailed"
        assert "COMM_ERROR" in text
