"""The collectives of objects are two operations each, and behave like one."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import collectives, faults


class Scarce:
    """torch, with memory for small tensors only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, numel: int, **keywords: Any) -> torch.Tensor:
        if numel > 10_000:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return torch.empty(numel, **keywords)


def told(outcome: ng.Outcome) -> list[Any]:
    return [outcome.ok, str(outcome.cause), list(outcome.culprits)]


def without_memory() -> None:
    """Rank 1 knows the sizes, and has no memory for the bytes."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    slots: list[Any] = [None] * size
    objects: list[Any] = ["x" * 50_000 if rank == 0 else None]
    if rank == 1:
        collectives.torch = Scarce()  # type: ignore[attr-defined]
    found["gather"] = [told(ng.safe_all_gather_object(slots, "x" * 50_000, timeout=30)), list(slots)]
    found["broadcast"] = told(ng.safe_broadcast_object_list(objects, 0, timeout=30))
    collectives.torch = torch  # type: ignore[attr-defined]
    found["after"] = told(ng.safe_all_gather_object(slots, rank, timeout=30))
    faults.report(found=found, slots=slots)
    dist.destroy_process_group()


def test_a_rank_without_memory_for_the_bytes_is_named_at_once() -> None:
    """On all ranks alike, not at the deadline and not as late."""
    result = faults.run_ranks(without_memory, 3, timeout=60)
    failed, good = [False, "failed", [1]], [True, "None", []]
    for rank, found in result.values("found").items():
        assert found == {"gather": [failed, [None] * 3], "broadcast": failed, "after": good}, (rank, found)
    assert result.values("slots") == {rank: [0, 1, 2] for rank in range(3)}


def ignored() -> None:
    dist.init_process_group("gloo")
    rank, slots = dist.get_rank(), [None] * dist.get_world_size()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == 1:
        time.sleep(8)
    ng.safe_all_gather_object(slots, rank, timeout=3)  # nobody looks at what it returned
    raised = []
    for _ in range(2):
        try:
            raised.append(ng.safe_barrier(timeout=20).ok)
        except ng.CollectiveTimeout as error:
            raised.append(error.outcome.op)
    if rank == 1:
        time.sleep(8)
    ng.safe_barrier(timeout=3)  # nor at this one, and no call comes after it
    faults.report(raised=raised)
    dist.destroy_process_group()


def test_a_failure_that_nobody_looked_at_is_raised_by_the_next_call_and_logged_at_the_end() -> None:
    result = faults.run_ranks(ignored, 3, timeout=60)
    assert result.values("raised") == {rank: ["all_gather_object", True] for rank in range(3)}, str(result)
    assert all(rank.output.count("was never looked at") == 2 for rank in result), str(result)
    what = re.compile(
        r"all_gather_object\(.*\) failed after .*: rank 1 late\. The outcome \(0:cpu:\w+/2\) was never looked at"
    )
    assert all(what.search(rank.output) for rank in result), str(result)


def half_ignored() -> None:
    """Only rank 0 does not look at the failure of the first call; the others look, and go on."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()  # the ranks start apart
    if dist.get_rank() == 1:
        time.sleep(8)
    first = ng.safe_barrier(timeout=3)
    if dist.get_rank() != 0:
        first.acknowledge()
    try:
        second = ng.safe_barrier(timeout=20)
        faults.report(
            op_id=first.op_id, cause=str(second.cause), culprits=second.culprits, incident=str(second.incident)
        )
    except ng.CollectiveTimeout:
        faults.report(op_id=first.op_id)
    dist.destroy_process_group()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_rank_that_raises_what_it_had_not_looked_at_is_not_blamed_for_it(language: str, tmp_path: Path) -> None:
    variables = {"NCCLGUARD_LANGUAGE": language, "NCCLGUARD_REPORT_DIR": str(tmp_path)}
    result = faults.run_ranks(half_ignored, 3, timeout=60, env=variables)
    for rank in (1, 2):
        found = result[rank].reports
        assert (found["cause"], found["culprits"]) == ("unknown", []), str(result)
        said = "，而那是更早一次调用的错误" if language == "zh" else ", the error of an earlier call"
        assert f"CollectiveTimeout ({found['op_id']}){said}" in found["incident"], found
    assert len([*tmp_path.glob("*.html")]) == 1, str(result)
    assert "。。" not in str(result)


class Slow:
    """Takes a second to unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _slowly, ()


def _slowly() -> str:
    time.sleep(1.0)
    return "slow"


def limited() -> None:
    dist.init_process_group("gloo")
    slots: list[Any] = [None] * dist.get_world_size()
    ng.safe_barrier(timeout=30).raise_if_failed()  # has the ranks connected, for which a busy machine takes long
    with ng.nccl_timeout_handler(0.7):
        outcome = told(ng.safe_all_gather_object(slots, Slow(), timeout=30))
    faults.report(found=[outcome, slots, told(ng.safe_barrier(timeout=30))])
    dist.destroy_process_group()


def test_a_time_limit_does_not_interrupt_the_collective_where_it_unpickles() -> None:
    good = [True, "None", []]
    found = faults.run_ranks(limited, 2, timeout=60).values("found")
    assert found == {rank: [good, ["slow", "slow"], good] for rank in range(2)}, found
