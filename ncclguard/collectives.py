"""The guarded collectives: check the arguments, describe the operation, hand it to the guard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from ncclguard import _torch
from ncclguard.agreement.decision import EVERYBODY
from ncclguard.calls import (
    EMPTY,
    ONE,
    Atomic,
    Call,
    OnLost,
    Time,
    check_list,
    check_objects,
    check_tensor,
    describe,
    nbytes_of,
    pickled,
    unpickled,
)
from ncclguard.deadlines import engine_section
from ncclguard.execution import AllGather, AllReduce, Barrier, Broadcast, Execution, ReduceScatter, Refused, writable
from ncclguard.outcome import FailedOutcome, Outcome


def safe_all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    chunk_numel: float | None = None,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Reduce `tensor` over the group in place, in pieces when it is large, and return the agreed outcome.

    `tensor`: any shape, dense, the same shape and dtype on all ranks. `timeout`: seconds or timedelta for the whole
    call, retries included. On failure the tensor is bit-equal to its input (`atomic=True`, the default). On the CPU
    the sum has the same bits on all ranks, and a NaN on any rank is the MAX and MIN. Raises TypeError or
    ValueError for a wrong call, before anything is sent; never for a failed communication.

    >>> import torch
    >>> import ncclguard as ng
    >>> outcome = ng.safe_all_reduce(torch.ones(1000))
    >>> outcome.ok, outcome.culprits
    (True, ())
    """
    check_tensor(tensor, "tensor", written=True)
    kind = _torch.reduce_op_name(op)
    call = Call("all_reduce", group, timeout, tensor.numel(), max_attempts, on_lost, name)
    call.check("all_reduce", tensor, kind, atomic)
    pieces = call.plan(tensor.numel(), chunk_numel, tensor.element_size())
    if call.solo:
        return call.alone(nbytes_of(tensor), tensor.numel())
    closing = nbytes_of(tensor) > call.config.closing_nbytes
    work = AllReduce(tensor, kind, pieces, closing, staged=tensor.is_cuda)
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
    chunk_numel: float | None = None,
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
    check_tensor(tensor, "tensor", written=True)
    call = Call("broadcast", group, timeout, tensor.numel(), max_attempts, on_lost, name)
    call.check("broadcast", tensor, atomic=atomic)
    source = call.member(src)
    pieces = call.plan(tensor.numel(), chunk_numel, tensor.element_size())
    if call.solo:
        return call.alone(nbytes_of(tensor), tensor.numel())
    closing = nbytes_of(tensor) > call.config.closing_nbytes
    work = Broadcast(tensor, source, dist.get_rank(), pieces, closing, staged=tensor.is_cuda)
    return call.run(work, tensor, f"{describe(tensor)}, src={source}", (source,), atomic, needs=source)


def safe_all_gather(
    tensor_list: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    *,
    timeout: Time = None,
    chunk_numel: float | None = None,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Outcome:
    """Gather `tensor` of every rank into `tensor_list`, one output per rank of the group in its order.

    All tensors of the same shape and dtype on all ranks. With `on_lost="shrink"` the slot of a lost rank is left as it
    was. Raises TypeError or ValueError for a wrong call, before anything is sent.

    >>> import torch
    >>> import ncclguard as ng
    >>> ng.safe_all_gather([torch.zeros(2)], torch.ones(2)).ok
    True
    """
    check_tensor(tensor, "tensor")
    check_list(tensor_list, tensor, "tensor_list", written=True)
    call = Call("all_gather", group, timeout, tensor.numel(), max_attempts, on_lost, name)
    call.check_length(tensor_list, "tensor_list")
    call.check("all_gather", tensor, atomic=atomic)
    pieces = call.plan(tensor.numel(), chunk_numel, tensor.element_size())
    if call.solo:
        with torch.no_grad(), writable(tensor_list[0]):
            tensor_list[0].copy_(tensor)
        return call.alone(nbytes_of(tensor), tensor.numel())
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
    chunk_numel: float | None = None,
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
    check_tensor(output, "output", written=True)
    kind = _torch.reduce_op_name(op)
    check_list(input_list, output, "input_list")
    call = Call("reduce_scatter", group, timeout, output.numel() * len(input_list), max_attempts, on_lost, name)
    call.check_length(input_list, "input_list")
    call.check("reduce_scatter", output, kind, atomic)
    pieces = call.plan(output.numel(), chunk_numel, output.element_size())
    if call.solo:
        with torch.no_grad(), writable(output):
            output.copy_(input_list[0])
        return call.alone(nbytes_of(output), output.numel())
    work = ReduceScatter(output, input_list, kind, pieces)
    return call.run(work, output, f"{describe(output)}, {kind}", (kind,), atomic, needs=EVERYBODY)


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

    `object_list` is written only when everything has arrived. Objects are unpickled: gather only from ranks you trust,
    as with torch.distributed. Raises TypeError or ValueError for a wrong call or an object that cannot be pickled,
    before anything is sent.

    >>> import ncclguard as ng
    >>> slots = [None]
    >>> ng.safe_all_gather_object(slots, {"loss": 0.5}).ok, slots
    (True, [{'loss': 0.5}])
    """
    check_objects(object_list)
    data = pickled(obj)
    call = Call("all_gather_object", group, timeout, data.numel(), max_attempts, on_lost, name)
    call.check_length(object_list, "object_list")
    if call.solo:
        object_list[0] = obj
        return call.alone(data.numel(), data.numel())
    with engine_section():
        return _all_gather_object(call, object_list, data)


def _all_gather_object(call: Call, object_list: list[Any], data: torch.Tensor) -> Outcome:
    """First the sizes, then the bytes, padded to the largest."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in call.ranks]
    size = torch.tensor([data.numel()], dtype=torch.int64)
    work: Execution = AllGather(sizes, size, call.ranks, ONE, closing=False)
    outcome = call.run(work, size, "sizes", ("sizes",), True)
    if isinstance(outcome, FailedOutcome):  # asking for a field would count as if the caller had looked
        return outcome
    longest = int(max(int(size) for size in sizes))
    plan, closing = call.plan(longest, None, 1), longest * len(sizes) > call.config.closing_nbytes
    slots: list[torch.Tensor] = []
    try:
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        slots = [torch.empty(longest, dtype=torch.uint8) for _ in call.ranks]
        work = AllGather(slots, padded, call.ranks, plan, closing)
    except (RuntimeError, MemoryError) as error:
        padded, work = _without_memory(longest), Refused(plan, closing, str(error))
    outcome = call.run(work, padded, f"{longest} bytes", ("bytes", longest), True)
    if not isinstance(outcome, FailedOutcome):
        places = [place for place, rank in enumerate(call.ranks) if rank in outcome.participants]
        objects = [unpickled(slots[place][: int(sizes[place])]) for place in places]
        for place, obj in zip(places, objects, strict=True):
            object_list[place] = obj
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

    Written only when everything has arrived. Raises TypeError or ValueError for a wrong call or an object that cannot
    be pickled, before anything is sent.

    >>> import ncclguard as ng
    >>> ng.safe_broadcast_object_list(["a", 1], src=0).ok
    True
    """
    check_objects(object_list)
    call = Call("broadcast_object_list", group, timeout, 0, max_attempts, on_lost, name)
    source = call.member(src)
    if call.solo:
        return call.alone(0, 0)
    sending = dist.get_rank() == source
    data = pickled(object_list) if sending else torch.empty(0, dtype=torch.uint8)
    with engine_section():
        return _broadcast_object_list(call, object_list, data, source)


def _broadcast_object_list(call: Call, object_list: list[Any], data: torch.Tensor, source: int) -> Outcome:
    """First the size, then the bytes."""
    sending = dist.get_rank() == source
    size = torch.tensor([data.numel()], dtype=torch.int64)
    work: Execution = Broadcast(size, source, dist.get_rank(), ONE, closing=False, staged=False)
    key = (source, len(object_list))
    outcome = call.run(work, size, f"size, src={source}", ("size", *key), True, needs=source)
    if isinstance(outcome, FailedOutcome):  # asking for a field would count as if the caller had looked
        return outcome
    numel = int(size)
    plan, closing = call.plan(numel, None, 1), numel > call.config.closing_nbytes
    try:
        received = data if sending else torch.empty(numel, dtype=torch.uint8)
        work = Broadcast(received, source, dist.get_rank(), plan, closing, staged=False)
    except (RuntimeError, MemoryError) as error:
        received, work = _without_memory(numel), Refused(plan, closing, str(error))
    outcome = call.run(work, received, f"{numel} bytes, src={source}", ("bytes", numel, *key), True, needs=source)
    if not (sending or isinstance(outcome, FailedOutcome)):
        object_list[:] = unpickled(received)
    return outcome


def _without_memory(nbytes: int) -> torch.Tensor:
    """Of the kind that the others have, so that it is the same operation, in one byte."""
    return torch.empty(1, dtype=torch.uint8).expand(nbytes)
