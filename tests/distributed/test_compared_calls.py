"""`ncclguard.watch` compares what the ranks have called, also where nothing stands still: gloo ends what does not fit."""

from __future__ import annotations

import importlib
import logging
import os
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime

#: torch 2.8 and later; without it a collective has a number and no name, and nothing can be compared.
pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"),
    reason="this torch does not record gloo's collectives",
)

RANKS = 4
FROM = 20
#: Seconds after which the ranks go on, whatever they have heard.
PATIENCE = 60.0


def watched() -> tuple[Any, list[str]]:
    """Watch from the start on; the texts of the incidents are kept."""
    importlib.import_module("torch._dynamo")  # as DDP does: torch then tells in which stack it was called
    os.environ["NCCLGUARD_REPORT_DIR"] = "none"
    found: list[str] = []
    handle = ng.watch(timeout=60, on_incident=lambda incident: found.append(incident.to_json()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    return handle, found


def compared() -> int:
    """Count the comparisons that this rank has read its calls for."""
    watcher: Any = runtime.current().watcher
    return int(watcher._comparison._begun)


def reduces_integers(odd: list[int], members: list[int] | None) -> None:
    """From one step on, some ranks reduce int32 where the others reduce float32: as many bytes, and wrong sums."""
    handle, found = watched()
    rank = dist.get_rank()
    group = None if members is None else dist.new_group(members)
    step, at, end = 0, 0, time.monotonic() + PATIENCE
    missing = torch.ones(1)
    while missing.item() and time.monotonic() < end:
        dtype = torch.int32 if rank in odd and step >= FROM else torch.float32
        if members is None or rank in members:
            dist.all_reduce(torch.ones(4, dtype=dtype), group=group)
        if handle.incidents and not at:
            at = compared()
        missing.fill_(float(not at or compared() == at))  # it is seen once more, and not told again
        dist.all_reduce(missing)
        step += 1
        time.sleep(0.03)
    ng.safe_barrier(timeout=60).raise_if_failed()
    faults.report(incidents=found, told=len(handle.incidents), missing=missing.item())


@pytest.mark.parametrize(
    ("odd", "members", "named"),
    [([1], None, (1,)), ([0], None, (0,)), ([0, 1], None, ()), ([3], [1, 2, 3], (3,))],
    ids=["a rank", "the first rank", "two against two", "in a group of three"],
)
def test_a_mismatch_with_which_nothing_stands_still_is_told_once_on_all_ranks(
    odd: list[int], members: list[int] | None, named: tuple[int, ...]
) -> None:
    """The job ends well, so without the comparison nobody hears of it."""
    result = faults.run_ranks(reduces_integers, RANKS, args=[odd, members], timeout=120)
    said = [result[rank].reports for rank in range(RANKS)]
    assert [(one["told"], len(one["incidents"])) for one in said] == [(1, 1)] * RANKS, str(result)
    assert {one["incidents"][0] for one in said} == {said[0]["incidents"][0]}
    assert [one["missing"] for one in said] == [0.0] * RANKS, "a later comparison sees the same mismatch"
    incident = ng.Incident.from_json(said[0]["incidents"][0])
    assert (str(incident.cause), incident.culprits, incident.agreed) == ("diverged", named, True), incident
    assert sorted(rank for _, ranks in incident.sides for rank in ranks) == (members or [*range(RANKS)])
    assert {text.split("[")[0] for text, _ in incident.sides} == {"all_reduce(Float ", "all_reduce(Int "}
    assert "has ended, and not all ranks called the same" in incident.summary
    for report in (incident.ranks[rank] for rank in members or range(RANKS)):  # of the call, not of where it is by now
        assert "in reduces_integers" in str(report.call_site), report
        assert (report.rank in named) == any(text.endswith("group=group)") for text in report.stack), report
    assert "not to be trusted" in incident.advice


def calls_what_it_may() -> None:
    """Each kind of collective, with sizes, sources, messages and groups that rightly depend on the rank."""
    warnings.simplefilter("ignore")
    handle, _ = watched()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2, 3]), dist.new_group([3, 1])]
    own = [group for group in groups if dist.get_rank(group) >= 0]
    model = DistributedDataParallel(torch.nn.Linear(8, 8), find_unused_parameters=True)
    given, taken = [rank + other for other in range(ranks)], [rank + other for other in range(ranks)]
    going, end = torch.ones(1), time.monotonic() + PATIENCE
    while going.item():
        dist.all_reduce(torch.ones(2, 2) if rank else torch.ones(4))
        dist.broadcast(torch.ones(3), src=1)
        dist.reduce(torch.ones(3), dst=2)
        dist.all_gather([torch.empty(5) for _ in range(ranks)], torch.ones(5))
        dist.all_gather_object([None] * ranks, "x" * (rank + 1))
        dist.gather_object({rank: "y" * rank}, [None] * ranks if rank == 1 else None, dst=1)
        dist.broadcast_object_list([rank, "z" * rank], src=0)
        dist.gather(torch.ones(2), [torch.empty(2) for _ in range(ranks)] if rank == 0 else None, dst=0)
        dist.scatter(torch.empty(2), [torch.ones(2) for _ in range(ranks)] if rank == 2 else None, src=2)
        dist.all_to_all_single(torch.empty(sum(taken)), torch.ones(sum(given)), taken, given)
        dist.reduce_scatter(torch.empty(2), [torch.ones(2) for _ in range(ranks)])
        dist.all_reduce(torch.sparse_coo_tensor([[0] * (rank + 1)], torch.ones(rank + 1), (4,)))
        dist.monitored_barrier()
        if rank == 0:
            dist.send(torch.ones(3), 1)
            dist.send(torch.ones(3), 1, tag=4)
        if rank == 1:
            dist.recv(torch.empty(3), 0)
            dist.recv(torch.empty(3), 0, tag=4)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), 2)])[0].wait()
        if rank == 2:
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.empty(2), 1)])[0].wait()
        for group in own:
            dist.all_reduce(torch.ones(3, dtype=torch.int64), group=group)
        with Join([model]):  # the ranks have unlike numbers of batches
            for _ in range(rank + 1):
                model(torch.ones(1, 8)).sum().backward()
        ng.safe_all_reduce(torch.ones(2)).raise_if_failed()
        going.fill_(float(compared() < 3 and time.monotonic() < end))
        dist.broadcast(going, src=0)
    number = compared()
    dist.destroy_process_group()  # which compares once more
    faults.report(incidents=[str(one) for one in handle.incidents], compared=number)


def test_nobody_is_named_where_all_ranks_call_what_they_may() -> None:
    """Several comparisons, and no incident."""
    result = faults.run_ranks(calls_what_it_may, RANKS, timeout=120)
    for rank in range(RANKS):
        assert result[rank].reports["incidents"] == [], str(result)
        assert result[rank].reports["compared"] >= 2, str(result)


def reduces_and_leaves(odd: list[int], members: list[int] | None, calls: int, at: int) -> None:
    """A job of a moment, in which some ranks once call something else."""
    handle, found = watched()
    rank = dist.get_rank()
    group = None if members is None else dist.new_group(members)
    for call in range(1, calls + 1):
        dtype = torch.int32 if rank in odd and call == at else torch.float32
        if members is None or rank in members:
            dist.all_reduce(torch.ones(4, dtype=dtype), group=group)
    dist.destroy_process_group()
    faults.report(incidents=found, told=len(handle.incidents))


@pytest.mark.parametrize(
    ("odd", "members", "calls", "at", "named"),
    [([1], None, 1, 1, (1,)), ([0], None, 300, 7, (0,)), ([0, 1], None, 3, 3, ()), ([3], [1, 2, 3], 30, 20, (3,))],
    ids=["a rank", "the first rank", "two against two", "in a group of three"],
)
def test_a_mismatch_at_the_end_of_a_job_is_told_when_all_have_left(
    odd: list[int], members: list[int] | None, calls: int, at: int, named: tuple[int, ...]
) -> None:
    """The job is over before the first comparison; the first rank tells, since nobody else is there any more."""
    result = faults.run_ranks(reduces_and_leaves, RANKS, args=[odd, members, calls, at], timeout=60)
    said = [result[rank].reports for rank in range(RANKS)]
    assert [one["told"] for one in said] == [1, 0, 0, 0], str(result)
    incident = ng.Incident.from_json(said[0]["incidents"][0])
    assert (str(incident.cause), incident.culprits, incident.agreed) == ("diverged", named, False), incident
    assert incident.op_id.rpartition("/")[2] == str(at), "the one that differs"
    assert all("in reduces_and_leaves" in str(incident.ranks[rank].call_site) for rank in members or range(RANKS))
    assert {text.split("[")[0] for text, _ in incident.sides} == {"all_reduce(Float ", "all_reduce(Int "}


def says_at_its_end(calls: str) -> None:
    """A job in which each rank may train by itself."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ncclguard").addHandler(handler)
    watched()
    if calls == "torch's":
        dist.barrier()
    elif calls == "guarded":
        ng.safe_barrier().raise_if_failed()
    elif calls == "messages" and dist.get_rank() == 0:
        dist.send(torch.ones(1), 1)
    elif calls == "messages" and dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
    dist.destroy_process_group()
    faults.report(said=[text for text in said if "has seen no collective" in text])


@pytest.mark.parametrize(("calls", "number"), [("none", 1), ("torch's", 0), ("guarded", 0), ("messages", 0)])
def test_a_job_without_a_collective_is_told_that_each_rank_was_by_itself(calls: str, number: int) -> None:
    """Accelerate makes a group under torchrun on CPUs, and trains on each rank alone."""
    result = faults.run_ranks(says_at_its_end, 2, args=[calls], timeout=60)
    said = [result[rank].reports["said"] for rank in range(2)]
    assert [len(one) for one in said] == [number, 0], str(result)
    assert not number or "in this job of 2 ranks" in said[0][0]
