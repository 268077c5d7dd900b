"""`called at` names a line of the program, whatever of torch or of the library lies between that line and the collective."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults


def under_ddp() -> None:
    """Rank 1 is late for the third step; the others wait in what DDP has issued, in C++."""
    dist.init_process_group("ncclguard")
    ng.safe_barrier(timeout=60).raise_if_failed()  # the ranks start apart
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    for number in range(3):
        if dist.get_rank() == 1 and number == 2:
            time.sleep(12.0)
        step(model)


def step(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def in_an_evaluation() -> None:
    """Rank 1 is late in the evaluation; the others wait in a collective of torch that is carried by the guard."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()  # the ranks start apart

    @ng.resilient_evaluate(timeout=5, barrier_timeout=20, max_attempts=1)
    def evaluate() -> float:
        if dist.get_rank() == 1:
            time.sleep(12.0)
        return gather()

    evaluate()
    dist.destroy_process_group()


def gather() -> float:
    values = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.ones(1))
    return float(sum(values))


@pytest.mark.parametrize(("program", "function"), [(under_ddp, "step"), (in_an_evaluation, "gather")])
def test_the_place_of_a_waiting_rank_is_a_line_of_the_program(
    program: Callable[[], None], function: str, tmp_path: Path
) -> None:
    variables = {"NCCLGUARD_TIMEOUT": "5", "NCCLGUARD_REPORT_DIR": str(tmp_path)}
    result = faults.run_ranks(program, 3, env=variables, timeout=90)
    incidents = [json.loads(file.read_text())["incident"] for file in tmp_path.rglob("*.json")]
    places = [report["call_site"] for incident in incidents for report in incident["ranks"] if report["call_site"]]
    assert all("test_call_sites.py" in place for place in places), (places, str(result))
    assert any(place.endswith(f" in {function}") for place in places), (places, str(result))
