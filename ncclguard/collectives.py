"""The guarded collectives: each checks its arguments and hands them to its row of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from ncclguard import torch_compat
from ncclguard.deadlines import engine_section
from ncclguard.engine.call import (
    Atomic,
    OnLost,
    Terms,
    Time,
    check_list,
    check_objects,
    check_tensor,
    pickled,
    terms_of,
    unpickled,
)
from ncclguard.engine.chunking import EMPTY, ONE, ChunkPlan
from ncclguard.engine.dispatch import OWN, Queue, alone, check_carried, run
from ncclguard.engine.execution import Refused
from ncclguard.engine.table import (
    ALL_GATHER,
    ALL_GATHER_OBJECT,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    BROADCAST_OBJECT_LIST,
    REDUCE_SCATTER,
    Arguments,
    Collective,
)
from ncclguard.outcome import Outcome
from ncclguard.spelling import hinted
from ncclguard.transport.memory import writable


@hinted
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
    ValueError for a wrong call, before anything is sent; not for a failed communication, but for an earlier one on the
    group whose outcome nobody looked at: CollectiveFailed.

    >>> import torch
    >>> import ncclguard as ng
    >>> outcome = ng.safe_all_reduce(torch.ones(1000))
    >>> outcome.ok, outcome.culprits
    (True, ())
    """
    check_tensor(tensor, "tensor", written=True)
    kind = torch_compat.reduce_op_name(op)
    terms = terms_of(
        group, timeout, tensor.numel(), max_attempts=max_attempts, atomic=atomic, on_lost=on_lost, name=name
    )
    check_carried(ALL_REDUCE, tensor, terms, kind)
    pieces = terms.plan(tensor.numel(), chunk_numel, tensor.element_size())
    if terms.solo:
        return alone(ALL_REDUCE, terms, tensor)
    return _written(run(ALL_REDUCE, Arguments(tensor, op=kind), terms, pieces), tensor)


@hinted
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
    terms = terms_of(group, timeout, 0, atomic=True, on_lost=on_lost, name=name)
    if terms.solo:
        return alone(BARRIER, terms)
    return run(BARRIER, Arguments(), terms, EMPTY)


@hinted
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
    terms = terms_of(
        group, timeout, tensor.numel(), max_attempts=max_attempts, atomic=atomic, on_lost=on_lost, name=name
    )
    check_carried(BROADCAST, tensor, terms)
    source = terms.member(src, "src")
    pieces = terms.plan(tensor.numel(), chunk_numel, tensor.element_size())
    if terms.solo:
        return alone(BROADCAST, terms, tensor)
    outcome = run(BROADCAST, Arguments(tensor, root=source), terms, pieces)
    return outcome if terms.rank == source else _written(outcome, tensor)


@hinted
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
    terms = terms_of(
        group, timeout, tensor.numel(), max_attempts=max_attempts, atomic=atomic, on_lost=on_lost, name=name
    )
    terms.check_length(tensor_list, "tensor_list")
    check_carried(ALL_GATHER, tensor, terms)
    pieces = terms.plan(tensor.numel(), chunk_numel, tensor.element_size())
    if terms.solo:
        with torch.no_grad(), writable(tensor_list[0]):
            tensor_list[0].copy_(tensor)
        return alone(ALL_GATHER, terms, tensor)
    return _written(run(ALL_GATHER, Arguments(tensor, tensor_list), terms, pieces), *tensor_list)


@hinted
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
    kind = torch_compat.reduce_op_name(op)
    check_list(input_list, output, "input_list")
    terms = terms_of(
        group,
        timeout,
        output.numel() * len(input_list),
        max_attempts=max_attempts,
        atomic=atomic,
        on_lost=on_lost,
        name=name,
    )
    terms.check_length(input_list, "input_list")
    check_carried(REDUCE_SCATTER, output, terms, kind)
    pieces = terms.plan(output.numel(), chunk_numel, output.element_size())
    if terms.solo:
        with torch.no_grad(), writable(output):
            output.copy_(input_list[0])
        return alone(REDUCE_SCATTER, terms, output)
    return _written(run(REDUCE_SCATTER, Arguments(output, input_list, op=kind), terms, pieces), output)


@hinted
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
    terms = terms_of(group, timeout, data.numel(), max_attempts=max_attempts, atomic=True, on_lost=on_lost, name=name)
    terms.check_length(object_list, "object_list")
    if terms.solo:
        object_list[0] = obj
        return alone(ALL_GATHER_OBJECT, terms, data)
    with engine_section():
        return gather_objects(terms, object_list, data)


def gather_objects(terms: Terms, object_list: list[Any], data: torch.Tensor, queue: Queue = OWN) -> Outcome:
    """Gather the sizes, then the bytes, padded to the largest."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in terms.ranks]
    size = torch.tensor([data.numel()], dtype=torch.int64)
    outcome = run(ALL_GATHER_OBJECT, Arguments(size, sizes), terms, ONE, detail="sizes", key=("sizes",), queue=queue)
    if outcome.failed:
        return outcome
    longest = int(max(int(size) for size in sizes))
    cut, refused = terms.plan(longest, None, 1), None
    slots: list[torch.Tensor] = []
    try:
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: data.numel()] = data
        slots = [torch.empty(longest, dtype=torch.uint8) for _ in terms.ranks]
    except (RuntimeError, MemoryError) as error:
        padded, refused = _without_memory(longest), _refused(ALL_GATHER_OBJECT, terms, cut, error)
    arguments = Arguments(padded, slots)
    key = ("bytes", longest)
    outcome = run(
        ALL_GATHER_OBJECT, arguments, terms, cut, detail=f"{longest} bytes", key=key, work=refused, queue=queue
    )
    if not outcome.failed:
        places = [place for place, rank in enumerate(terms.ranks) if rank in outcome.participants]
        objects = [unpickled(slots[place][: int(sizes[place])]) for place in places]
        for place, obj in zip(places, objects, strict=True):
            object_list[place] = obj
    return outcome


@hinted
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
    terms = terms_of(group, timeout, 0, max_attempts=max_attempts, atomic=True, on_lost=on_lost, name=name)
    source = terms.member(src, "src")
    if terms.solo:
        return alone(BROADCAST_OBJECT_LIST, terms)
    sending = terms.rank == source
    data = pickled(object_list) if sending else torch.empty(0, dtype=torch.uint8)
    with engine_section():
        return broadcast_objects(terms, object_list, data, source)


def broadcast_objects(
    terms: Terms, object_list: list[Any], data: torch.Tensor, source: int, queue: Queue = OWN
) -> Outcome:
    """Broadcast the size, then the bytes."""
    sending = terms.rank == source
    size = torch.tensor([data.numel()], dtype=torch.int64)
    whose = (source, len(object_list))
    detail = f"size of {len(object_list)} object{'s' * (len(object_list) != 1)}, src={source}"
    arguments = Arguments(size, root=source)
    outcome = run(BROADCAST_OBJECT_LIST, arguments, terms, ONE, detail=detail, key=("size", *whose), queue=queue)
    if outcome.failed:
        return outcome
    numel = int(size)
    cut, refused = terms.plan(numel, None, 1), None
    try:
        received = data if sending else torch.empty(numel, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        received, refused = _without_memory(numel), _refused(BROADCAST_OBJECT_LIST, terms, cut, error)
    arguments = Arguments(received, root=source)
    detail, key = f"{numel} bytes, src={source}", ("bytes", numel, *whose)
    outcome = run(BROADCAST_OBJECT_LIST, arguments, terms, cut, detail=detail, key=key, work=refused, queue=queue)
    if not (sending or outcome.failed):
        object_list[:] = unpickled(received)
    return outcome


def _written(outcome: Outcome, *tensors: torch.Tensor) -> Outcome:
    """Count the writing of a collective as autograd counts each operation in place.

    A backward pass that still needs the values before then raises, where its gradients would be wrong in silence.
    """
    if not outcome.failed or outcome.torn:
        for tensor in tensors:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
    return outcome


def _without_memory(nbytes: int) -> torch.Tensor:
    """Return a tensor that looks to the other ranks like theirs, but takes one byte of memory."""
    return torch.empty(1, dtype=torch.uint8).expand(nbytes)


def _refused(collective: Collective, terms: Terms, cut: ChunkPlan, error: BaseException) -> Refused:
    """Return an operation that fails here for lack of memory; the other ranks take part in it and learn the reason."""
    return Refused(cut, collective.closes(cut.numel, len(terms.ranks), terms.config.closing_nbytes), str(error))
