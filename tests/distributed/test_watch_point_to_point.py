"""`ncclguard.watch` over sends, receives and several groups on gloo: a chain of waits ends at the rank that waits for nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ncclguard as ng
from ncclguard import faults

LIMIT = 6.0
#: For which the culprit stays away; the others know within the limit and two seconds.
AWAY = LIMIT + 4.0


def told(key: str) -> Any:
    """An on_incident that reports the incident and when it came."""
    return lambda incident: faults.report(**{key: {"at": time.time(), "json": incident.to_json()}})


def stay_away(rank: int) -> None:
    """Nothing happens here on any rank but this one."""
    if dist.get_rank() == rank:
        time.sleep(AWAY)


def pipeline(hold: Callable[[], None]) -> None:
    """One micro-batch through four stages and its gradient back, by blocking calls."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    there, back = torch.ones(8), torch.ones(8)
    if rank > 0:
        dist.recv(there, rank - 1)
    hold()
    if rank < last:
        dist.send(there, rank + 1)
        dist.recv(back, rank + 1)
    if rank > 0:
        dist.send(back, rank - 1)


def exchange(hold: Callable[[], None]) -> None:
    """Every rank gives to both neighbours in a line and takes from them, in one batch; small and large tensors."""
    rank = dist.get_rank()
    neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < dist.get_world_size()]
    hold()
    for numel in (4, 2_000_000):
        ops = []
        for peer in neighbours:
            ops += [dist.P2POp(dist.isend, torch.ones(numel), peer), dist.P2POp(dist.irecv, torch.ones(numel), peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def mesh(hold: Callable[[], None]) -> None:
    """Two dimensions of parallelism: rank 1 waits for rank 0 in one, rank 3 for rank 1 and rank 2 for rank 0 in the other."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    hold()
    dist.all_reduce(torch.ones(1), group=rows["tensor"].get_group())
    dist.all_reduce(torch.ones(1), group=rows["pipeline"].get_group())


def receives_before_a_collective(hold: Callable[[], None]) -> None:
    """gloo counts sends and receives with its collectives: those of the culprit are not to be taken for the awaited one."""
    rank = dist.get_rank()
    for _ in range(5):
        if rank == 2:
            dist.send(torch.ones(1), 1)
        elif rank == 1:
            dist.recv(torch.ones(1), 2)
    hold()
    dist.all_reduce(torch.ones(1))


def large(hold: Callable[[], None]) -> None:
    """A send that does not fit into the buffers waits for the receiver; the others wait for the sender."""
    rank = dist.get_rank()
    tensor = torch.ones(20_000_000)
    hold()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    dist.barrier()


def monitored(hold: Callable[[], None]) -> None:
    """A barrier that gloo makes of messages in C++, with a limit of its own behind that of the watch."""
    hold()
    dist.monitored_barrier(timeout=timedelta(seconds=60))


def monitored_before_a_collective(hold: Callable[[], None]) -> None:
    """gloo counts its messages with the collectives, more of them on rank 0."""
    for _ in range(3):
        dist.monitored_barrier()
    hold()
    dist.all_reduce(torch.ones(1))


STEPS = {
    step.__name__: step
    for step in (
        pipeline,
        exchange,
        mesh,
        receives_before_a_collective,
        large,
        monitored,
        monitored_before_a_collective,
    )
}


def holds(name: str, culprit: int) -> None:
    """A step with a slow rank within the limit, then one with that rank late."""
    step = STEPS[name]
    ng.watch(timeout=60)  # torch before 2.11 records gloo's collectives from its start or not at all
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    watch = ng.watch(
        timeout=LIMIT, on_incident=told("late")
    )  # only now: on a busy machine the ranks begin seconds apart
    dist.barrier()
    step(lambda: time.sleep(1.5) if dist.get_rank() == culprit else None)
    faults.report(healthy=len(watch.incidents))
    dist.barrier()
    started = time.time()
    step(lambda: stay_away(culprit))
    dist.barrier()
    faults.report(started=started, incidents=len(watch.incidents))


@pytest.mark.parametrize(
    ("step", "culprit"),
    [
        pytest.param(pipeline, 1, id="a pipeline stage that sleeps"),
        pytest.param(pipeline, 3, id="the last stage"),
        pytest.param(exchange, 2, id="batch_isend_irecv"),
        pytest.param(mesh, 0, id="two dimensions of a mesh"),
        pytest.param(receives_before_a_collective, 2, id="a collective after sends"),
        pytest.param(receives_before_a_collective, 1, id="a collective after receives"),
        pytest.param(large, 1, id="the receiver of a large tensor"),
        pytest.param(monitored, 2, id="a monitored barrier"),
        pytest.param(monitored, 0, id="a monitored barrier without the rank that asks all others"),
        pytest.param(monitored_before_a_collective, 0, id="a collective after monitored barriers"),
    ],
)
def test_a_chain_of_waits_ends_at_the_rank_that_waits_for_nobody(step: Callable[..., None], culprit: int) -> None:
    """One incident, equal on all ranks, naming the sleeper only; none while the sleeper is within the limit."""
    result = faults.run_ranks(holds, 4, args=[step.__name__, culprit], timeout=90)
    assert result.values("healthy") == dict.fromkeys(range(4), 0), str(result)
    said = {rank: result[rank].reports.get("late") for rank in range(4)}
    assert all(said.values()), str(result)
    for rank, late in said.items():
        incident = ng.Incident.from_json(late["json"])
        assert (str(incident.cause), incident.culprits, incident.agreed) == ("late", (culprit,), True), incident
        assert late["json"] == said[0]["json"]
        assert result[rank].reports["incidents"] == 1
        if rank != culprit:
            assert late["at"] - result[rank].reports["started"] < LIMIT + 2.0
    sleeper = next(rank for rank in incident.ranks if rank.rank == culprit)
    assert any("stay_away" in frame for frame in sleeper.stack), sleeper
    others = [rank for rank in incident.ranks if rank.rank != culprit]
    assert all(
        "recv" in str(other) or "send" in str(other) or "all_reduce" in str(other) or "barrier" in str(other)
        for other in others
    )


def passes_its_own_limit() -> None:
    """A monitored barrier that ends before the limit of the watch, with an exception that ends the program."""
    ng.watch(timeout=60, on_incident=told("late"))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(AWAY + 8.0)  # it does not come while the end of the others is looked into, however slow that is
    dist.monitored_barrier(timeout=timedelta(seconds=LIMIT))


def test_who_missed_a_monitored_barrier_is_named_when_that_ends_it() -> None:
    """gloo tells the other ranks that rank 0 is to blame; and the collective before the barrier had ended."""
    result = faults.run_ranks(passes_its_own_limit, 3, timeout=60)
    for rank in (0, 2):
        incident = ng.Incident.from_json(result[rank].reports["late"]["json"])
        assert (str(incident.cause), incident.culprits, incident.agreed) == ("late", (1,), True), incident
        assert "monitored_barrier" in incident.summary and "all_reduce" not in incident.summary, incident
