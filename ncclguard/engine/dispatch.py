"""The way of a checked call: from its row of the table to its guarded group, and the outcome back."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from ncclguard.engine import runtime
from ncclguard.engine.call import Call, Terms, described, nbytes_of
from ncclguard.engine.chunking import EMPTY, ChunkPlan
from ncclguard.engine.execution import Barrier, Execution
from ncclguard.engine.inputs import look_at
from ncclguard.engine.table import NO_TENSOR, Arguments, Collective, Conditions
from ncclguard.faults.fault import Alteration
from ncclguard.faults.injection import before_operation
from ncclguard.outcome import Outcome
from ncclguard.phases import current_place
from ncclguard.transport.base import Kind
from ncclguard_explain.language import told

_NO_SHAPE = torch.Size()
_CPU = torch.device("cpu")


def check_carried(collective: Collective, tensor: torch.Tensor, terms: Terms, op: str | None = None) -> None:
    """Raise for a dtype or reduce op that the backend cannot carry, and while a CUDA graph is captured."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        text = told("a guarded collective blocks the host and cannot be captured in a CUDA graph: call it outside")
        raise ValueError(text)
    device = tensor.device
    if terms.solo and device.type != "cuda":  # nothing is carried, so any device will do
        device = _CPU
    if collective.carrier is not None:
        _check_supported(device, collective.carrier, tensor.dtype, op)


def alone(collective: Collective, terms: Terms, tensor: torch.Tensor | None = None) -> Outcome:
    """The outcome of a call with nobody to communicate with: a success that moved nothing."""
    numel, nbytes = (0, 0) if tensor is None else (tensor.numel(), nbytes_of(tensor))
    return Outcome(op=collective.name, op_id="", numel=numel, nbytes=nbytes, participants=terms.ranks)


class Queue(NamedTuple):
    """A sequence of calls beside the group's own: its name, and who takes part where not all of the group do."""

    name: str = ""
    ranks: tuple[int, ...] | None = None


OWN = Queue()


def run(
    collective: Collective,
    arguments: Arguments,
    terms: Terms,
    cut: ChunkPlan,
    *,
    like: torch.Tensor | None = None,
    detail: str | None = None,
    key: tuple[object, ...] | None = None,
    work: Execution | None = None,
    queue: Queue = OWN,
) -> Outcome:
    """Carry out one collective to its outcome; the arguments and the `terms` have been checked.

    `like`: the tensor whose shape and dtype must be equal on all ranks, if it is not the argument's. `detail` and
    `key`: in the place of what the table says, for people and for the comparison of the ranks. `work`: in the place of
    the table's execution.
    """
    given = work
    tensor = arguments.tensor if like is None else like
    shape, dtype, device, numel, element = _NO_SHAPE, None, _CPU, 0, 0
    if tensor is not NO_TENSOR:
        shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
        numel, element = tensor.numel(), tensor.element_size()
    if work is None:
        closing = collective.closes(numel * element, len(terms.ranks), terms.config.closing_nbytes)
        work = collective.execution(arguments, Conditions(queue.ranks or terms.ranks, terms.rank, cut, closing))
    if arguments.outputs:  # sizes differ by rank: what the ranks compare has none, and this rank's own are its traffic
        numel = sum(sent.numel() for sent in arguments.others)
    call = described(
        collective, arguments.op, arguments.root, detail, key, dtype, shape, work.pieces, work.plan.longest,
        work.closing, terms.shrink, terms.max_attempts, terms.name, current_place(), terms.atomic,
        numel * (len(terms.ranks) if collective.whole else 1), element,
    )  # fmt: skip
    assert terms.group is not None
    current = runtime.of(terms.group, terms.deadline - time.monotonic())
    group = current.group(terms.group, device, queue.name, queue.ranks)
    if group.device != device:
        text = told(
            "the tensor is on {device}, the first operation of this group was on {other}, and a group's communicator "
            "serves one device of a process: move the tensor there, or use another group (new_group) for {device}",
            device=device,
            other=group.device,
        )
        raise ValueError(text)
    if given is None and terms.config.closing_nbytes != group.closing_nbytes:  # configure() has been called since
        agreed = terms.config.model_copy(update={"closing_nbytes": group.closing_nbytes})
        terms = terms._replace(config=agreed)
        return run(collective, arguments, terms, cut, like=like, detail=detail, key=key, queue=queue)
    if terms.config.numerics == "watch" and arguments.op:
        brought = arguments.others or (arguments.tensor,)
        look_at(brought, arguments.op, call.text, group, current.monitor.nonfinite)
    alteration = before_operation(group.rank, group.calls)
    if alteration is not None:
        if alteration is Alteration.SKIP:
            group.calls += 1
            return alone(collective, terms, tensor)
        call, work = _altered(alteration, call, work)
    return group.run(call, work, terms.deadline - time.monotonic())


def _altered(alteration: Alteration, call: Call, work: Execution) -> tuple[Call, Execution]:
    """An injected fault wants another call than the peers' here: one more, or one with another fingerprint."""
    operation = call.operation
    if alteration is Alteration.EXTRA:
        text = "barrier(), one more by an injected fault"
        operation = replace(operation, text=text, fingerprint=1, closing=False)
        return replace(call, op="barrier", operation=operation), Barrier(EMPTY)
    text = f"{call.text} with {alteration.value} by an injected fault"
    return replace(call, operation=replace(operation, text=text, fingerprint=operation.fingerprint ^ 1)), work


@lru_cache(maxsize=256)
def _check_supported(device: torch.device, carrier: Kind, dtype: torch.dtype, op: str | None) -> None:
    """Remembers what was found in order; what is refused raises each time."""
    runtime.builder(device).check_supported(carrier, dtype, op and getattr(ReduceOp, op))
