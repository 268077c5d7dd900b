"""Ranks that `torch.multiprocessing` starts, as notebooks' launchers do: forked from a process that has imported ncclguard, or spawned."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import ncclguard as ng
from ncclguard import faults

pytestmark = pytest.mark.usefixtures("own_processes")

END = {
    "return": ("exited", "ended its program"),
    "exit": ("exited", "ended its program"),
    "raise": ("failed", "ValueError at"),
}


def rank_main(rank: int, how: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    ng.safe_barrier().raise_if_failed()
    if rank == 2 and how == "raise":
        raise ValueError("of rank 2")
    if rank == 2 and how == "exit":
        raise SystemExit(3)
    if rank == 2:
        return
    outcome = ng.safe_all_reduce(torch.ones(3), timeout=20)
    assert outcome.incident is not None
    said = next(report.exception or report.note for report in outcome.incident.ranks if report.rank == 2)
    verdict = [outcome.agreed, str(outcome.cause), list(outcome.culprits), said]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(verdict))


def start_all(method: str, how: str, folder: str) -> None:
    context = torch.multiprocessing.start_processes(  # type: ignore[no-untyped-call]
        rank_main, args=(how, folder), nprocs=3, join=False, start_method=method
    )
    for process in context.processes:
        process.join()
    faults.report(codes=[process.exitcode for process in context.processes])


@pytest.mark.parametrize(("method", "how"), [*(("fork", how) for how in END), ("spawn", "raise")])
def test_a_rank_that_ends_early_says_so_to_the_others(method: str, how: str, tmp_path: Path) -> None:
    """Such a process ends without the hooks of other programs, so that it was taken for lost, and what it raised for an exit."""
    job = faults.run_ranks(start_all, 1, args=[method, how, str(tmp_path)], timeout=90, launcher="processes")
    assert job[0].reports["codes"] == [0, 0, {"return": 0, "exit": 3, "raise": 1}[how]], job
    cause, said = END[how]
    for rank in (0, 1):
        agreed, *verdict, text = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert agreed, job
        assert verdict == [cause, [2]], job
        assert said in text, job


def in_a_child() -> None:
    dist.init_process_group("gloo")
    child = os.fork()
    if child == 0:
        try:
            ng.safe_barrier()
        except ng.GuardError as error:
            faults.report(refused=str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    faults.report(own=ng.safe_barrier().ok)


def test_a_child_of_a_rank_cannot_speak_for_it() -> None:
    job = faults.run_ranks(in_a_child, 2, timeout=60).check()
    assert all("forked from a rank" in text for text in job.values("refused").values()), job
    assert job.values("own") == {0: True, 1: True}
