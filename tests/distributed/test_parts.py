"""Collectives within each of several parts of a group, as a mesh has them: one verdict for all parts."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults

SIZE = 4


def parts() -> tuple[Any, Any]:
    """Return this rank's group of (0, 1), (2, 3), and that of (0, 2), (1, 3)."""
    found = []
    for lines in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        for ranks in lines:
            group: Any = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                group.become_part(dist.group.WORLD, tuple(ranks))
                found.append(group)
    return found[0], found[1]


def values(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    row, column = parts()
    own = torch.arange(5.0) + 10 * rank
    summed = own.clone()
    dist.all_reduce(summed, group=column)
    mean = torch.tensor([rank], dtype=torch.bfloat16)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=row)
    largest = torch.tensor(rank)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=row)
    gathered = torch.empty(10)
    dist.all_gather_into_tensor(gathered, own, group=column)
    uneven = [torch.empty(2 + place) for place in range(2)]
    dist.all_gather(uneven, torch.full((2 + row.rank(),), float(rank)), group=row)
    scattered = torch.empty(2)
    work = dist.reduce_scatter_tensor(scattered, torch.arange(4.0) * (rank + 1), group=row, async_op=True)
    work.wait()
    told = torch.tensor([rank])
    dist.broadcast(told, group=row, group_src=1)
    dealt = torch.empty(1)
    dist.scatter(dealt, [torch.tensor([10.0 * rank + i]) for i in range(2)] * (row.rank() == 0), group=row, group_src=0)
    functional: Any = torch.ops._c10d_functional.all_reduce(torch.tensor([rank]), "sum", row.group_name)
    functional = torch.ops._c10d_functional.wait_tensor(functional)
    dist.barrier(group=row)
    faults.report(
        summed=summed.tolist(), mean=float(mean), largest=int(largest), gathered=gathered.tolist(),
        uneven=[one.tolist() for one in uneven], scattered=scattered.tolist(), told=int(told), dealt=float(dealt),
        functional=int(functional),
    )  # fmt: skip
    for name, call in {
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2), group=row),
        "reduce": lambda: dist.reduce(torch.ones(1), group=row, group_dst=0),
        "all_reduce with BOR": lambda: dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BOR, row),
    }.items():
        with pytest.raises(ng.GuardError, match=f"{name} is not carried on a group of the mesh"):
            call()
    dist.destroy_process_group(row)
    dist.all_reduce(own, group=column)
    faults.report(after_the_end_of_another=own.tolist())
    dist.destroy_process_group()


def test_each_part_has_the_values_of_its_own_ranks() -> None:
    """Of all collectives that FSDP2 and DTensors call, by torch's functions and by the operators of C++."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(values, SIZE, args=[store.port], timeout=100).check()
    for rank in range(SIZE):
        found, beside, across = job[rank].reports, rank ^ 1, (rank + 2) % SIZE
        assert found["summed"] == [2 * place + 10.0 * (rank + across) for place in range(5)]
        assert found["mean"] == (rank + beside) / 2
        assert found["largest"] == max(rank, beside)
        low, high = sorted((rank, across))
        assert found["gathered"] == [place + 10.0 * one for one in (low, high) for place in range(5)]
        even = rank - rank % 2
        assert found["uneven"] == [[float(even)] * 2, [float(even + 1)] * 3]
        weight = even + 1 + even + 2
        assert found["scattered"] == [weight * (2.0 * (rank % 2)), weight * (2.0 * (rank % 2) + 1)]
        assert found["told"] == even + 1
        assert found["dealt"] == 10.0 * even + rank % 2
        assert found["functional"] == rank + beside
        assert found["after_the_end_of_another"] == found["summed"]


def lost(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    row, _ = parts()
    dist.all_reduce(torch.ones(3), group=row)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = torch.full((3,), float(rank))
    try:
        dist.all_reduce(tensor, group=row)
    except ng.PeerLost as error:
        faults.report(culprits=error.outcome.culprits, operation=error.outcome.op_id, tensor=tensor.tolist())
    smaller: Any = dist.group.WORLD.go_on((0, 1, 2), 1)  # type: ignore[union-attr]
    with pytest.raises(ng.GuardError, match="is a part of a group of which ranks 0-2 go on without the others"):
        dist.all_reduce(tensor, group=row)
    mean = torch.full((4,), 0.1 * (rank + 1))
    smaller.part((0, 1, 2)).allreduce([mean], dist.ReduceOp.AVG).wait()
    smaller.part((0, 1, 2)).allreduce([tensor]).wait()
    faults.report(after=tensor.tolist(), mean=mean.tolist())
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_is_lost_in_one_part_is_lost_for_all_of_them_at_the_same_place() -> None:
    """Ranks 0 and 1, whose part is whole, leave their collective with the verdict of ranks 2 and 3."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(lost, SIZE, args=[store.port], timeout=100)
    assert job.values("culprits") == {rank: [3] for rank in range(3)}, job
    assert len(set(job.values("operation").values())) == 1
    assert job.values("tensor") == {rank: [float(rank)] * 3 for rank in range(3)}
    assert job.values("after") == dict.fromkeys(range(3), [3.0] * 3), job
    assert job[0].reports["mean"] == pytest.approx([0.2] * 4)
    assert job.values("mean") == dict.fromkeys(range(3), job[0].reports["mean"])
