"""Collectives that the engine's communicator has no call of its own for: the
backend's, on memory that the caller never sees.

What is sent is only read, what arrives goes to staging memory and reaches the caller after the verdict: there is
nothing to restore. Every one has a closing round, because no rank could donate what another one misses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ncclguard.buffers import Arena, aligned
from ncclguard.calls import EMPTY, ONE
from ncclguard.execution import Execution, writable
from ncclguard.transport import dtypes
from ncclguard.transport.base import Communicator, Pending


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one row of bytes: a view where they lie so, else a copy. Any dtype can be moved in this form."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def divided(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Views of consecutive parts along the first dimension."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [tensor.narrow(0, start, size) for start, size in zip(starts, sizes, strict=True)]


def overwrite(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy bytes into a tensor of the caller, without autograd taking note, as with torch's own collectives."""
    with writable(tensor):
        tensor.data.copy_(data.view(tensor.dtype).view(tensor.shape))


class Staged(Execution):
    """One piece, carried by the backend. `received`: bytes of each part that arrives here."""

    closing = True

    def __init__(self, device: torch.device, received: Sequence[int], nothing: bool = False) -> None:
        super().__init__(EMPTY if nothing else ONE)
        self._device = device
        self._received = list(received)
        self._arena: Arena | None = None
        self.parts: list[torch.Tensor] = []

    def reserve(self, atomic: bool, in_flight: int) -> None:
        self._arena = Arena(sum(aligned(size) for size in self._received), self._device)
        self.parts = [self._arena.take(size, torch.uint8) for size in self._received]

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        self.submitted = 1
        return self.start(communicator)

    @abstractmethod
    def start(self, communicator: Communicator) -> Pending:
        """Start it with the backend; may be called again after a failure."""

    def restorable_after(self, piece: int) -> int:
        return 0

    def restore(self, from_piece: int) -> None:
        self.submitted = 0

    def _replace(self, from_piece: int) -> None:
        old = self._arena
        self.reserve(True, 0)
        if old is not None:
            old.release(reusable=False)

    def result(self) -> list[torch.Tensor]:
        return []

    def release(self) -> None:
        self.parts = []
        if self._arena is not None:
            self._arena.release(reusable=not self.busy)
            self._arena = None


class Gather(Staged):
    """`tensor` of every rank to the one at `root` of the group, which alone has `outputs`."""

    def __init__(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root: int) -> None:
        self._sent = as_bytes(tensor)
        super().__init__(tensor.device, [self._sent.numel()] * len(outputs), nothing=tensor.numel() == 0)
        self._outputs = outputs
        self._root = root

    def start(self, communicator: Communicator) -> Pending:
        options = dist.GatherOptions()
        options.rootRank = self._root
        outputs = [self.parts] if self._outputs else []
        return communicator.native(
            (self._sent, *self.parts), lambda group: group.gather(outputs, [self._sent], options)
        )

    def finish(self, participants: Sequence[int]) -> None:
        for output, part in zip(self._outputs, self.parts, strict=True):
            overwrite(output, part)


class Scatter(Staged):
    """`inputs[i]` of the rank at `root`, which alone has them, to `output` of the i-th rank."""

    def __init__(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        super().__init__(output.device, [output.numel() * output.element_size()], nothing=output.numel() == 0)
        self._output = output
        self._sent = [as_bytes(tensor) for tensor in inputs]
        self._root = root

    def start(self, communicator: Communicator) -> Pending:
        options = dist.ScatterOptions()
        options.rootRank = self._root
        inputs = [self._sent] if self._sent else []
        return communicator.native(
            (*self.parts, *self._sent), lambda group: group.scatter([self.parts[0]], inputs, options)
        )

    def finish(self, participants: Sequence[int]) -> None:
        overwrite(self._output, self.parts[0])


class AllToAll(Staged):
    """`inputs[i]` to the i-th rank of the group, `outputs[i]` from it; what is sent and
    what is expected must be known to agree.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], nothing: bool) -> None:
        self._sent_sizes = [tensor.numel() * tensor.element_size() for tensor in inputs]
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
        super().__init__(outputs[0].device, [sum(self._sizes)], nothing=nothing)
        self._outputs = outputs
        self._inputs = inputs
        self._sent = torch.empty(0)

    def start(self, communicator: Communicator) -> Pending:
        self._sent = torch.cat([as_bytes(tensor) for tensor in self._inputs])
        received = self.parts[0]
        return communicator.native(
            (received, self._sent),
            lambda group: group.alltoall_base(received, self._sent, self._sizes, self._sent_sizes),
        )

    def finish(self, participants: Sequence[int]) -> None:
        for output, part in zip(self._outputs, divided(self.parts[0], self._sizes), strict=True):
            overwrite(output, part)


class Reduce(Staged):
    """`tensor` of all ranks reduced into that of the rank at `root`; those of the others keep what they hold."""

    def __init__(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, root: int, index: int) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        super().__init__(tensor.device, [nbytes], nothing=nbytes == 0)
        self._tensor = tensor
        self._reduction = dtypes.reduction(op, tensor.device.type)
        self._root = root
        self._index = index

    def start(self, communicator: Communicator) -> Pending:
        options = dist.ReduceOptions()
        support = dtypes.NCCL if self._tensor.is_cuda else dtypes.GLOO
        options.reduceOp = support.wire_op(self._reduction.wire, self._tensor.dtype)  # type: ignore[assignment]
        options.rootRank = self._root
        staging = self.parts[0].view(self._tensor.dtype)
        staging.copy_(self._tensor.detach().reshape(-1))
        wire = dtypes.reducible_view(staging, self._tensor.device.type)
        return communicator.native((wire,), lambda group: group.reduce([wire], options))

    def finish(self, participants: Sequence[int]) -> None:
        if self._index != self._root:
            return
        self._reduction.finish(self.parts[0].view(self._tensor.dtype), len(participants))
        overwrite(self._tensor, self.parts[0])


class SparseReduce(Staged):
    """A sparse COO tensor summed over all ranks; each may have other elements."""

    def __init__(self, tensor: torch.Tensor, average: bool) -> None:
        super().__init__(tensor.device, [])
        self._tensor = tensor
        self._average = average
        self._sum = tensor

    def start(self, communicator: Communicator) -> Pending:
        self._sum = self._tensor.detach().clone().coalesce()
        options: Any = dist.AllreduceOptions()
        return communicator.native((), lambda group: group.allreduce([self._sum], options))

    def finish(self, participants: Sequence[int]) -> None:
        if self._average:
            self._sum = self._sum / len(participants)
        with torch.no_grad():  # not by a detached view: that has indices of its own
            self._tensor.copy_(self._sum)
