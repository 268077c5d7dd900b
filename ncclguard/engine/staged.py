"""Collectives whose result is put together apart from the input, in staging memory, such as all-gather and scatter.

All of them send from the caller's memory, receive into staging memory, and write the caller's memory after the verdict.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence

import torch

from ncclguard.engine.chunking import EMPTY, ONE, ChunkPlan
from ncclguard.engine.execution import Execution
from ncclguard.engine.memory import Arena, aligned, in_a_row, plain, put, share_memory, tensor_of, writable
from ncclguard.transport import dtypes
from ncclguard.transport.base import Agreement, Communicator, Pending


class _Collected(Execution):
    """A result that is put together in staging memory and copied to the caller after
    the verdict (or directly, not atomic).
    """

    meets = True

    def __init__(self, outputs: Sequence[torch.Tensor], plan: ChunkPlan, closing: bool) -> None:
        super().__init__(plan)
        self.closing = closing
        self._outputs = list(outputs)
        self._parts: list[torch.Tensor] = []
        self._arena: Arena | None = None

    def reserve(self, atomic: bool, in_flight: int) -> None:
        first = self._outputs[0]
        # CUDA results are always staged: a communicator that does not abort must not hold the caller's memory.
        if not atomic and not first.is_cuda and all(plain(output) for output in self._outputs):
            self._parts = [output.detach().view(-1) for output in self._outputs]
            return
        sizes = [output.numel() for output in self._outputs]
        self._arena = Arena(sum(aligned(size * first.dtype.itemsize) for size in sizes), first.device)
        self._parts = [self._arena.take(size, first.dtype) for size in sizes]

    def restorable_after(self, piece: int) -> int:
        return 0

    def restore(self, from_piece: int) -> None:
        self.collected = None
        self.submitted = min(self.submitted, from_piece)

    def abandon(self) -> None:
        self.torn = self._arena is None and self.submitted > 0
        self.submitted = 0

    @property
    def exposed(self) -> bool:
        return self._arena is None

    def _replace(self, from_piece: int) -> None:
        old, complete = self._arena, [part[: self._length_before(from_piece)] for part in self._parts]
        self.reserve(True, 0)
        for part, done in zip(self._parts, complete, strict=True):
            with writable(self._outputs[0]):
                part[: done.numel()].copy_(done)
        if old is not None:
            old.release(reusable=False)

    def result(self) -> list[torch.Tensor]:
        return self._parts

    def _copy_out(self, index: int) -> None:
        output = self._outputs[index]
        if self._arena is not None:
            with writable(output):
                output.detach().copy_(self._parts[index].view(output.shape))

    def _put(self, index: int, data: bytes) -> None:
        """The same from bytes, which need no staging."""
        output = self._outputs[index]
        if plain(output) and not output.is_cuda:
            put(data, output)
        else:
            with writable(output):
                output.detach().copy_(tensor_of(data, output.dtype).view(output.shape))

    def release(self) -> None:
        self._parts = []
        if self._arena is not None:
            self._arena.release(reusable=not self.busy)
            self._arena = None


class AllGather(_Collected):
    """Collect every participant's `tensor`; the slot of a rank that was lost is left as it was."""

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        ranks: Sequence[int],
        plan: ChunkPlan,
        closing: bool,
    ) -> None:
        super().__init__(outputs, plan, closing)
        self._input = in_a_row(tensor)
        self._ranks = tuple(ranks)

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        start, stop = self.plan.pieces[piece]
        self.submitted = max(self.submitted, piece + 1)
        parts = [self._parts[place][start:stop] for place in self._places(communicator.ranks)]
        with writable(self._outputs[0]):
            return communicator.all_gather(parts, self._input[start:stop])

    def payload(self, limit: int) -> torch.Tensor | None:
        return self._input if self._fits(self._input, limit) else None

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        self.collected = [b""] * len(self._ranks)
        for index, place in enumerate(self._places(ranks)):
            self.collected[place] = opening.payload(index)

    def finish(self, participants: Sequence[int]) -> None:
        for place in self._places(participants):
            if self.collected is None:
                self._copy_out(place)
            else:
                self._put(place, self.collected[place])

    def _places(self, ranks: Sequence[int]) -> Sequence[int]:
        """Where the slots of `ranks` are among those of the whole group."""
        if len(ranks) == len(self._ranks):  # in the same order, as the participants always are
            return range(len(ranks))
        places = {rank: place for place, rank in enumerate(self._ranks)}
        return [places[rank] for rank in ranks]


class ReduceScatter(_Collected):
    """Reduce the inputs and keep this rank's; no other rank has the result, so it always has a closing round."""

    def __init__(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: str, plan: ChunkPlan) -> None:
        super().__init__([output], plan, closing=True)
        self._inputs = [in_a_row(tensor) for tensor in inputs]
        self._in_place = any(share_memory(output, tensor) for tensor in self._inputs)
        self._reduction = dtypes.reduction(op, output.device.type)

    def reserve(self, atomic: bool, in_flight: int) -> None:
        # An input that was overwritten could not be added up again by another try.
        super().reserve(atomic or self._in_place, in_flight)

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        start, stop = self.plan.pieces[piece]
        self.submitted = max(self.submitted, piece + 1)
        inputs = [tensor[start:stop] for tensor in self._inputs]
        with writable(self._outputs[0]):
            return communicator.reduce_scatter(self._parts[0][start:stop], inputs, self._reduction.wire)

    def finish(self, participants: Sequence[int]) -> None:
        with writable(self._outputs[0]):
            self._reduction.finish(self._parts[0], len(participants))
        self._copy_out(0)


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
    """One piece. `received`: bytes of each part that arrives here."""

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
    """`tensor` of every rank to the global rank `root`, which alone has `outputs`."""

    def __init__(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root: int) -> None:
        self._sent = as_bytes(tensor)
        super().__init__(tensor.device, [self._sent.numel()] * len(outputs), nothing=tensor.numel() == 0)
        self._outputs = outputs
        self._root = root

    def start(self, communicator: Communicator) -> Pending:
        return communicator.gather(self._sent, self.parts, communicator.ranks.index(self._root))

    def finish(self, participants: Sequence[int]) -> None:
        for output, part in zip(self._outputs, self.parts, strict=True):
            overwrite(output, part)


class Scatter(Staged):
    """`inputs[i]` of the global rank `root`, which alone has them, to `output` of the i-th rank."""

    def __init__(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
        super().__init__(output.device, [output.numel() * output.element_size()], nothing=output.numel() == 0)
        self._output = output
        self._sent = [as_bytes(tensor) for tensor in inputs]
        self._root = root

    def start(self, communicator: Communicator) -> Pending:
        return communicator.scatter(self.parts[0], self._sent, communicator.ranks.index(self._root))

    def finish(self, participants: Sequence[int]) -> None:
        overwrite(self._output, self.parts[0])


class AllToAll(Staged):
    """`inputs[i]` to the i-th rank of the group, `outputs[i]` from it; what is sent and
    what is expected must be known to agree.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], nothing: bool) -> None:
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in outputs]
        super().__init__(outputs[0].device, [sum(self._sizes)], nothing=nothing)
        self._outputs = outputs
        self._inputs = inputs

    def start(self, communicator: Communicator) -> Pending:
        return communicator.all_to_all(self.parts[0], self._sizes, [as_bytes(tensor) for tensor in self._inputs])

    def finish(self, participants: Sequence[int]) -> None:
        for output, part in zip(self._outputs, divided(self.parts[0], self._sizes), strict=True):
            overwrite(output, part)


class Reduce(Staged):
    """`tensor` of all ranks reduced into that of the global rank `root`; those of the others keep what they hold."""

    def __init__(self, tensor: torch.Tensor, op: str, root: int, rank: int) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        super().__init__(tensor.device, [nbytes], nothing=nbytes == 0)
        self._tensor = tensor
        self._reduction = dtypes.reduction(op, tensor.device.type)
        self._root = root
        self._rank = rank

    def start(self, communicator: Communicator) -> Pending:
        staging = self.parts[0].view(self._tensor.dtype)
        staging.copy_(self._tensor.detach().reshape(-1))
        return communicator.reduce(staging, communicator.ranks.index(self._root), self._reduction.wire)

    def finish(self, participants: Sequence[int]) -> None:
        if self._rank != self._root:
            return
        self._reduction.finish(self.parts[0].view(self._tensor.dtype), len(participants))
        overwrite(self._tensor, self.parts[0])


class SparseReduce(Staged):
    """A sparse COO tensor summed over all ranks; each may have other elements."""

    def __init__(self, tensor: torch.Tensor, average: bool) -> None:
        super().__init__(tensor.device, [])
        self._tensor = tensor
        self._average = average
        self._gathering: _Elements | None = None

    def start(self, communicator: Communicator) -> Pending:
        self._gathering = _Elements(communicator.host, self._tensor.detach().coalesce())
        return self._gathering

    def finish(self, participants: Sequence[int]) -> None:
        assert self._gathering is not None
        total = self._gathering.total()
        if self._average:
            total = total / len(participants)
        with torch.no_grad():  # not by a detached view: that has indices of its own
            self._tensor.copy_(total)


class _Elements(Pending):
    """How many elements each rank has, then all of them: places and values."""

    __slots__ = ("_communicator", "_counts", "_like", "_parts", "_pending", "_stage")

    def __init__(self, communicator: Communicator, tensor: torch.Tensor) -> None:
        self._communicator = communicator
        self._like = tensor
        count = torch.tensor([tensor._nnz()], dtype=torch.int64)
        self._counts = [torch.zeros_like(count) for _ in communicator.ranks]
        self._pending = communicator.all_gather(self._counts, count)
        self._parts: list[list[torch.Tensor]] = []
        self._stage = 0

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._pending.wait(max(0.0, end - time.monotonic())):
            if self._stage == 2:
                return True
            own = (self._like.indices(), self._like.values())[self._stage]
            each = self._like.sparse_dim() if self._stage == 0 else math.prod(own.shape[1:])
            sizes = [int(count) * each * own.element_size() for count in self._counts]
            self._pending, parts = self._communicator.all_gather_uneven(sizes, as_bytes(own))
            self._parts.append(parts)
            self._stage += 1
        return False

    def total(self) -> torch.Tensor:
        """The sum, in the order of the ranks and so with the same bits on all."""
        like, indices, values = self._like, [], []
        for places, numbers in zip(*self._parts, strict=True):
            indices.append(places.view(torch.int64).view(like.sparse_dim(), -1))
            values.append(numbers.view(like.values().dtype).view(-1, *like.values().shape[1:]))
        return torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), like.shape).coalesce()
