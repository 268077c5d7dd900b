"""The guarded collectives: check the arguments, describe the operation, hand it to the guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from ncclguard import _torch
from ncclguard.calls import (
    EMPTY,
    ONE,
    Atomic,
    Call,
    OnLost,
    Time,
    check_list,
    check_tensor,
    describe,
    nbytes_of,
    pickled,
    unpickled,
)
from ncclguard.execution import AllGather, AllReduce, Barrier, Broadcast, ReduceScatter
from ncclguard.outcome import Outcome


def safe_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    chunk_numel: int | None = None,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Reduce `tensor` over the group in place, in pieces when it is large, and return the agreed outcome.

    `tensor`: any shape, dense, the same shape and dtype on all ranks. `timeout`: seconds or timedelta for the whole call, retries
    included. On failure the tensor is bit-equal to its input (`atomic=True`, the default).
    Raises TypeError or ValueError for a wrong call, before anything is sent; never for a failed communication.

    >>> import torch
    >>> import ncclguard as ng
    >>> outcome = ng.safe_all_reduce(torch.ones(1000))
    >>> outcome.ok, outcome.culprits
    (True, ())
    """
    check_tensor(tensor, "tensor")
    call = Call("all_reduce", group, timeout, tensor.numel(), max_attempts, on_lost, name)
    if call.solo:
        return call.alone(nbytes_of(tensor), tensor.numel())
    call.check("all_reduce", tensor, op)
    kind = _torch.reduce_op_name(op)
    pieces = call.plan(tensor.numel(), chunk_numel, tensor.element_size())
    closing = nbytes_of(tensor) > call.config.closing_nbytes
    work = AllReduce(tensor, getattr(ReduceOp, kind), pieces, closing, staged=tensor.is_cuda)
    return call.run(work, tensor, f"{describe(tensor)}, {kind}", (kind,), atomic)


def safe_barrier(
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Wait until all ranks of the group are here; the outcome is true when they are.

    `timeout` in seconds or as a timedelta; 300 s by default. Raises TypeError or ValueError for a wrong call.

    >>> import ncclguard as ng
    >>> if ng.safe_barrier(timeout=300):
    ...     pass  # evaluate
    """
    call = Call("barrier", group, timeout, 0, None, on_lost, name)
    if call.solo:
        return call.alone(0, 0)
    return call.run(Barrier(EMPTY), None, "", (), None)


def safe_broadcast(
    tensor: torch.Tensor,
    src: int,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    chunk_numel: int | None = None,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Copy `tensor` of global rank `src` to all ranks of the group.

    `tensor`: the same shape and dtype on all ranks. Fails when the source is lost, also with `on_lost="shrink"`.
    Raises TypeError or ValueError for a wrong call, before anything is sent.

    >>> import torch
    >>> import ncclguard as ng
    >>> ng.safe_broadcast(torch.zeros(3), src=0).ok
    True
    """
    check_tensor(tensor, "tensor")
    call = Call("broadcast", group, timeout, tensor.numel(), max_attempts, on_lost, name)
    if call.solo:
        return call.alone(nbytes_of(tensor), tensor.numel())
    call.check("broadcast", tensor)
    source = call.member(src)
    pieces = call.plan(tensor.numel(), chunk_numel, tensor.element_size())
    closing = nbytes_of(tensor) > call.config.closing_nbytes
    work = Broadcast(tensor, source, dist.get_rank(), pieces, closing, staged=tensor.is_cuda)
    return call.run(work, tensor, f"{describe(tensor)}, src={source}", (source,), atomic, needs=source)


def safe_all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    chunk_numel: int | None = None,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Gather `tensor` of every rank into `tensor_list`, one output per rank of the group in its order.

    All tensors of the same shape and dtype on all ranks. With `on_lost="shrink"` the slot of a lost rank is left as it was.
    Raises TypeError or ValueError for a wrong call, before anything is sent.

    >>> import torch
    >>> import ncclguard as ng
    >>> ng.safe_all_gather([torch.zeros(2)], torch.ones(2)).ok
    True
    """
    check_tensor(tensor, "tensor")
    check_list(tensor_list, tensor, "tensor_list")
    call = Call("all_gather", group, timeout, tensor.numel(), max_attempts, on_lost, name)
    call.check_length(tensor_list, "tensor_list")
    if call.solo:
        with torch.no_grad():
            tensor_list[0].copy_(tensor)
        return call.alone(nbytes_of(tensor), tensor.numel())
    call.check("all_gather", tensor)
    pieces = call.plan(tensor.numel(), chunk_numel, tensor.element_size())
    closing = nbytes_of(tensor) * len(tensor_list) > call.config.closing_nbytes
    work = AllGather(tensor_list, tensor, call.ranks, pieces, closing)
    return call.run(work, tensor, describe(tensor), (), atomic)


def safe_reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    chunk_numel: int | None = None,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Reduce `input_list[i]` over the group into `output` of its i-th rank.

    All tensors of the same shape and dtype on all ranks. Fails when a rank is lost, also with `on_lost="shrink"`.
    Raises TypeError or ValueError for a wrong call, before anything is sent.

    >>> import torch
    >>> import ncclguard as ng
    >>> ng.safe_reduce_scatter(torch.zeros(2), [torch.ones(2)]).ok
    True
    """
    check_tensor(output, "output")
    check_list(input_list, output, "input_list")
    call = Call("reduce_scatter", group, timeout, output.numel() * len(input_list), max_attempts, on_lost, name)
    call.check_length(input_list, "input_list")
    if call.solo:
        with torch.no_grad():
            output.copy_(input_list[0])
        return call.alone(nbytes_of(output), output.numel())
    call.check("reduce_scatter", output, op)
    kind = _torch.reduce_op_name(op)
    work = ReduceScatter(
        output, input_list, getattr(ReduceOp, kind), call.plan(output.numel(), chunk_numel, output.element_size())
    )
    return call.run(work, output, f"{describe(output)}, {kind}", (kind,), atomic, may_shrink=False)


def safe_all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    max_attempts: int | None = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Gather one picklable object of every rank into `object_list`, which has one slot per rank of the group.

    `object_list` is written only when everything has arrived. Objects are unpickled: gather only from ranks you trust, as with
    torch.distributed. Raises TypeError or ValueError for a wrong call or an object that cannot be pickled, before anything is sent.

    >>> import ncclguard as ng
    >>> slots = [None]
    >>> ng.safe_all_gather_object(slots, {"loss": 0.5}).ok, slots
    (True, [{'loss': 0.5}])
    """
    data = pickled(obj)
    call = Call("all_gather_object", group, timeout, data.numel(), max_attempts, on_lost, name)
    call.check_length(object_list, "object_list")
    if call.solo:
        object_list[0] = obj
        return call.alone(data.numel(), data.numel())
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in call.ranks]
    size = torch.tensor([data.numel()], dtype=torch.int64)
    work = AllGather(sizes, size, call.ranks, ONE, closing=False)
    outcome = call.run(work, size, "sizes", ("sizes",), True)
    if not outcome.ok:
        return outcome
    longest = int(max(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    slots = [torch.empty(longest, dtype=torch.uint8) for _ in call.ranks]
    closing = longest * len(slots) > call.config.closing_nbytes
    work = AllGather(slots, padded, call.ranks, call.plan(longest, None, 1), closing)
    outcome = call.run(work, padded, f"{longest} bytes", ("bytes", longest), True)
    if outcome.ok:
        for index, rank in enumerate(call.ranks):
            if rank in outcome.participants:
                object_list[index] = unpickled(slots[index][: int(sizes[index])])
    return outcome


def safe_broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    max_attempts: int | None = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Replace `object_list` on all ranks by that of global rank `src`; the same length everywhere.

    Written only when everything has arrived. Raises TypeError or ValueError for a wrong call or an object that cannot be pickled,
    before anything is sent.

    >>> import ncclguard as ng
    >>> ng.safe_broadcast_object_list(["a", 1], src=0).ok
    True
    """
    if not isinstance(object_list, list):
        raise TypeError(f"object_list must be a list, not {type(object_list).__name__}")
    call = Call("broadcast_object_list", group, timeout, 0, max_attempts, on_lost, name)
    if call.solo:
        return call.alone(0, 0)
    source = call.member(src)
    sending = dist.get_rank() == source
    data = pickled(object_list) if sending else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()], dtype=torch.int64)
    work = Broadcast(size, source, dist.get_rank(), ONE, closing=False, staged=False)
    key = (source, len(object_list))
    outcome = call.run(work, size, f"size, src={source}", ("size", *key), True, needs=source)
    if not outcome.ok:
        return outcome
    numel = int(size)
    received = data if sending else torch.empty(numel, dtype=torch.uint8)
    closing = numel > call.config.closing_nbytes
    work = Broadcast(received, source, dist.get_rank(), call.plan(numel, None, 1), closing, staged=False)
    outcome = call.run(work, received, f"{numel} bytes, src={source}", ("bytes", numel, *key), True, needs=source)
    if outcome.ok and not sending:
        object_list[:] = unpickled(received)
    return outcome
