"""Every collective of torch.distributed on a given group, for comparing two groups with the same ranks in one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

Group = dist.ProcessGroup


def values(shift: int = 0, numel: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other elements on every rank; whole numbers, so that sums do not depend on their order."""
    return (torch.arange(numel) + 10 * dist.get_rank() + shift).to(dtype)


def all_reduce(group: Group) -> Any:
    results = []
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        tensor = values() % 7 + 1
        dist.all_reduce(tensor, op=op, group=group)
        results.append(tensor)
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.complex64):
        tensor = values(dtype=dtype)
        dist.all_reduce(tensor, group=group)
        results.append(tensor)
    strided = values(numel=12).view(3, 4).t()
    if dist.get_backend(group) == "gloo":  # takes contiguous tensors only
        strided = strided.contiguous()
    dist.all_reduce(strided, group=group)
    large = values(numel=300_000)
    dist.all_reduce(large, group=group)
    return [*results, strided, large, torch.zeros(0)]


def sparse_all_reduce(group: Group) -> Any:
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 2 + rank]]), torch.tensor([1.0, 2.0]), (8,))
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense()


def broadcast(group: Group) -> Any:
    return [_done(tensor, dist.broadcast(tensor, src=1, group=group)) for tensor in (values(), values(numel=50_000))]


def reduce(group: Group) -> Any:
    tensor, untouched = values(), values()
    dist.reduce(tensor, dst=1, group=group)
    return tensor if dist.get_rank() == 1 else untouched


def all_gather(group: Group) -> Any:
    outputs = [torch.zeros(2, 3) for _ in range(group.size())]
    dist.all_gather(outputs, values().view(2, 3), group=group)
    mask = [torch.zeros(4, dtype=torch.bool) for _ in range(group.size())]
    dist.all_gather(mask, values(numel=4) % 2 == 0, group=group)
    return [*outputs, *mask]


def all_gather_into_tensor(group: Group) -> Any:
    output = torch.zeros(group.size() * 6)
    dist.all_gather_into_tensor(output, values(), group=group)
    return output


def all_gather_coalesced(group: Group) -> Any:
    small, large = torch.zeros(group.size() * 3), torch.zeros(group.size() * 6)
    with distributed_c10d._coalescing_manager(group):
        dist.all_gather_into_tensor(small, values(numel=3), group=group)
        dist.all_gather_into_tensor(large, values(5), group=group)
    return small, large


def all_reduce_coalesced(group: Group) -> Any:
    tensors = [values(), values(3, numel=2).view(2, 1)]
    with distributed_c10d._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    return tensors


def reduce_scatter(group: Group) -> Any:
    output = torch.zeros(6)
    dist.reduce_scatter(output, [values(shift) for shift in range(group.size())], group=group)
    return output


def reduce_scatter_tensor(group: Group) -> Any:
    output = torch.zeros(4)
    dist.reduce_scatter_tensor(output, values(numel=4 * group.size()), group=group)
    return output


def gather(group: Group) -> Any:
    outputs = [torch.zeros(6) for _ in range(group.size())] if dist.get_rank() == 2 else None
    dist.gather(values(), outputs, dst=2, group=group)
    return outputs or []


def scatter(group: Group) -> Any:
    output = torch.zeros(6)
    inputs = [values(shift) for shift in range(group.size())] if dist.get_rank() == 0 else None
    dist.scatter(output, inputs, src=0, group=group)
    return output


def all_to_all(group: Group) -> Any:
    outputs = [torch.zeros(2) for _ in range(group.size())]
    dist.all_to_all(outputs, list(values(numel=2 * group.size()).split(2)), group=group)
    return outputs


def all_to_all_single(group: Group) -> Any:
    size, rank = group.size(), dist.get_rank()
    even = torch.zeros(2 * size)
    dist.all_to_all_single(even, values(numel=2 * size), group=group)
    uneven = torch.zeros(size * (rank + 1))  # rank r gets r + 1 elements of each
    splits = [peer + 1 for peer in range(size)]
    dist.all_to_all_single(uneven, values(numel=sum(splits)), [rank + 1] * size, splits, group=group)
    return even, uneven


def messages(group: Group) -> Any:
    """Around the ring in both directions at once, then one after the other."""
    size, rank = group.size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    received = [torch.zeros(6), torch.zeros(3)]
    batch = [
        dist.P2POp(dist.isend, values(), after, group),
        dist.P2POp(dist.irecv, received[0], before, group),
        dist.P2POp(dist.isend, values(numel=3), before, group),
        dist.P2POp(dist.irecv, received[1], after, group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    last = torch.zeros(2)
    if rank == 0:
        dist.send(values(numel=2), 1, group)
    elif rank == 1:
        dist.recv(last, 0, group)
    return [*received, last]


def barrier(group: Group) -> Any:
    dist.barrier(group)
    return torch.zeros(0)


def objects(group: Group) -> Any:
    slots: list[Any] = [None] * group.size()
    dist.all_gather_object(slots, {"rank": dist.get_rank(), "text": "x" * (10 * dist.get_rank())}, group=group)
    shared = [{"from": 1}] if dist.get_rank() == 1 else [None]
    dist.broadcast_object_list(shared, src=1, group=group)
    gathered: list[Any] | None = [None] * group.size() if dist.get_rank() == 0 else None
    dist.gather_object(dist.get_rank(), gathered, dst=0, group=group)
    return torch.tensor(bytearray(repr((slots, shared, gathered)).encode()))


def asynchronous(group: Group) -> Any:
    """Several in flight, of several kinds, waited for in another order; a blocking one behind them; a future."""
    first, second, third = values(), values(1), values(2, numel=40_000)
    gathered = torch.zeros(6 * group.size())
    works = [
        dist.all_reduce(first, group=group, async_op=True),
        dist.broadcast(second, src=2, group=group, async_op=True),
        dist.all_gather_into_tensor(gathered, values(3), group=group, async_op=True),
        dist.all_reduce(third, group=group, async_op=True),
    ]
    blocking = values(4)
    dist.all_reduce(blocking, group=group)
    last = works[3].get_future().then(lambda future: future.value()[0] * 2).wait()
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return first, second, third, gathered, blocking, last


def functional(group: Group) -> Any:
    """Functional collectives call from C++."""
    from torch.distributed import _functional_collectives as funcol

    size = group.size()
    return [
        torch.as_tensor(funcol.wait_tensor(result))
        for result in (
            funcol.all_reduce(values(), "sum", group),
            funcol.all_gather_tensor(values(), 0, group),
            funcol.reduce_scatter_tensor(values(numel=2 * size), "sum", 0, group),
            funcol.all_to_all_single(values(numel=2 * size), None, None, group),
            funcol.broadcast(values(), 1, group),
        )
    ]


def ddp(group: Group) -> Any:
    """Three steps: parameters and buffers are broadcast and gradients reduced by C++."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model = torch.nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(3):
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).round(decimals=4)  # sums in another order differ in the last place


CASES: tuple[Callable[[Group], Any], ...] = (
    all_reduce, sparse_all_reduce, broadcast, reduce, all_gather, all_gather_into_tensor, all_gather_coalesced,
    all_reduce_coalesced, reduce_scatter, reduce_scatter_tensor, gather, scatter, all_to_all, all_to_all_single, messages,
    barrier, objects, asynchronous, functional, ddp,
)  # fmt: skip


def outcome_of(case: Callable[[Group], Any], group: Group) -> list[list[Any]]:
    """The results as plain numbers, or what was raised."""
    results = case(group)
    tensors = [results] if isinstance(results, torch.Tensor) else list(results)
    return [torch.view_as_real(t).tolist() if t.is_complex() else t.tolist() for t in tensors]


def _done(tensor: torch.Tensor, _: Any) -> torch.Tensor:
    return tensor
