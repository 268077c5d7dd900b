"""How the data of each collective moves, is kept restorable, and becomes the caller's result.

The guard drives an `Execution` piece by piece and knows nothing of tensors. Three rules make failure harmless: an input is
copied before anything may write into it; what is still missing on some rank stays restorable; results that were gathered
elsewhere reach the caller's memory only after the verdict.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch.distributed import ReduceOp

from ncclguard.buffers import Arena, aligned
from ncclguard.chunking import ChunkPlan
from ncclguard.transport import dtypes
from ncclguard.transport.base import Agreement, Communicator, Pending
from ncclguard.transport.exchange import reduced


class Execution(ABC):
    """One call's data. `ranks` are the group's global ranks in order; `participants` those that take part."""

    closing = True

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan
        self.submitted = 0  # pieces handed to the transport since the last restore
        self.collected: list[bytes] | None = None  # the result, where the opening round brought it
        self.torn = False
        self.busy = False  # the transport did not become quiet: its memory must never be used for anything else

    @property
    def pieces(self) -> int:
        return len(self.plan.pieces)

    @abstractmethod
    def reserve(self, atomic: bool, in_flight: int) -> None:
        """Get the memory that will be needed. Raises MemoryError."""

    def payload(self, limit: int) -> torch.Tensor | None:
        """What to send along with the opening round, when up to `limit` bytes of each rank are all this operation needs.

        Contiguous, on the CPU. None, the same on all ranks: the pieces are to be moved instead.
        """
        return None

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        """Make the result of what `ranks` have sent along; the caller's memory is left alone until `finish`."""
        raise NotImplementedError

    @abstractmethod
    def submit(self, communicator: Communicator, piece: int) -> Pending:
        """Make the piece's input restorable, then start it."""

    @property
    def restorable_from(self) -> int:
        """The first piece whose input `restore` can bring back."""
        return self.restorable_after(self.submitted - 1)

    @abstractmethod
    def restorable_after(self, piece: int) -> int:
        """What `restorable_from` will be once `piece` has been submitted."""

    @abstractmethod
    def restore(self, from_piece: int) -> None:
        """Bring the inputs of the pieces from `from_piece` on back; the transport is quiet when this is called."""

    def abandon(self) -> None:
        """The operation failed: leave the caller's memory as it was, or set `torn`."""
        if self.restorable_from == 0:
            self.restore(0)
        else:
            self.torn = True

    @abstractmethod
    def finish(self, participants: Sequence[int]) -> None:
        """The operation succeeded: make the result the caller's."""

    def keep(self) -> list[bytes]:
        """Copies of a small operation's result, for ranks that miss it."""
        return [copied(part) for part in self.result()] if self.collected is None else self.collected

    @abstractmethod
    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result before `finish`, the same on every rank."""

    def accept(self, donated: str) -> None:
        """Take the result from a rank that completed."""
        self.collected = None
        for part, text in zip(self.result(), donated.split(","), strict=True):
            data = bytearray(base64.b64decode(text))
            if data:
                part.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))

    @abstractmethod
    def release(self) -> None:
        """Give reserved memory back."""


def encode(parts: Sequence[bytes]) -> str:
    """Serialise a kept result for the store."""
    return ",".join(base64.b64encode(part).decode() for part in parts)


def copied(flat: torch.Tensor) -> bytes:
    """The memory of a contiguous tensor; on every small call's path, where a `clone` costs ten times as much."""
    host = flat.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def put(data: bytes, flat: torch.Tensor) -> None:
    """The reverse of `copied`, for memory on the CPU."""
    ctypes.memmove(flat.data_ptr(), data, len(data))


def writable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Where a detached view of `tensor` may be written in place: inference tensors only in inference mode."""
    return torch.inference_mode() if tensor.is_inference() else _ANYWHERE


_ANYWHERE = contextlib.nullcontext()
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def _plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _InPlace(Execution):
    """A tensor that is reduced or overwritten where it lies, or in a contiguous staging copy of it."""

    def __init__(self, tensor: torch.Tensor, plan: ChunkPlan, closing: bool, staged: bool) -> None:
        super().__init__(plan)
        self.closing = closing
        self._tensor = tensor
        self._staged = staged or not _plain(tensor)
        self._arena: Arena | None = None
        self._backup: torch.Tensor | None = None
        self._saved = b""  # instead of a backup in the arena, for small tensors
        self._window = 0
        self._writes = True
        self._flat = torch.empty(0) if self._staged else tensor.detach().view(-1)

    def reserve(self, atomic: bool, in_flight: int) -> None:
        tensor, numel, dtype = self._tensor, self._tensor.numel(), self._tensor.dtype
        if self._staged:
            self._arena = Arena(aligned(numel * dtype.itemsize), tensor.device)
            self._flat = self._arena.take(numel, dtype)
            return
        if not self._writes or numel == 0:
            return
        if not self.closing:
            self._window = self.pieces
            return
        longest = self.plan.longest
        self._window = self.pieces if atomic else min(self.pieces, 2 * in_flight)
        size = numel if self._window == self.pieces else self._window * longest
        self._longest = longest
        self._arena = Arena(aligned(size * dtype.itemsize), tensor.device)
        self._backup = self._arena.take(size, dtype)

    def _prepare(self, piece: int) -> torch.Tensor:
        start, stop = self.plan.pieces[piece]
        part = self._flat[start:stop]
        if self._staged:
            if self._writes_input(piece):
                part.copy_(self._source_part(start, stop))
        elif self._backup is not None:
            self._slot(piece).copy_(part)
        elif self._writes and not self._saved:
            self._saved = copied(self._flat)
        self.submitted = max(self.submitted, piece + 1)
        return part

    def _writes_input(self, piece: int) -> bool:
        return True

    def payload(self, limit: int) -> torch.Tensor | None:
        tensor = self._tensor
        if self.closing or self.pieces != 1 or tensor.numel() * tensor.element_size() > limit:
            return None
        return tensor.detach().contiguous().view(-1) if self._staged else self._flat

    def _source_part(self, start: int, stop: int) -> torch.Tensor:
        return self._tensor.detach().reshape(-1)[start:stop]

    def _slot(self, piece: int) -> torch.Tensor:
        assert self._backup is not None
        start, stop = self.plan.pieces[piece]
        if self._window < self.pieces:
            start, stop = (piece % self._window) * self._longest, (piece % self._window) * self._longest + stop - start
        return self._backup[start:stop]

    def restorable_after(self, piece: int) -> int:
        if self._staged or not self._writes:
            return 0
        return max(0, piece + 1 - self._window)

    def restore(self, from_piece: int) -> None:
        self.collected = None
        if self._saved and self.submitted > 0:
            put(self._saved, self._flat)
            from_piece = 0
        elif not self._staged and self._backup is not None:
            with writable(self._tensor):
                for piece in range(from_piece, self.submitted):
                    start, stop = self.plan.pieces[piece]
                    self._flat[start:stop].copy_(self._slot(piece))
        self.submitted = min(self.submitted, from_piece)

    def result(self) -> list[torch.Tensor]:
        return [self._flat]

    def finish(self, participants: Sequence[int]) -> None:
        if self._staged and self._writes:
            with writable(self._tensor):
                self._tensor.detach().copy_(self._flat.view(self._tensor.shape))

    def release(self) -> None:
        self._flat = torch.empty(0)
        self._backup = None
        if self._arena is not None:
            self._arena.release(reusable=not self.busy)
            self._arena = None


class AllReduce(_InPlace):
    """Reduce `tensor` in place; AVG is summed and divided by the participants once, after the verdict."""

    def __init__(
        self, tensor: torch.Tensor, op: ReduceOp.RedOpType, plan: ChunkPlan, closing: bool, staged: bool
    ) -> None:
        super().__init__(tensor, plan, closing, staged)
        self._average = op == ReduceOp.AVG
        self._op = ReduceOp.SUM if self._average else op

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        with writable(self._tensor):
            return communicator.all_reduce(self._prepare(piece), self._op)

    def payload(self, limit: int) -> torch.Tensor | None:
        flat = super().payload(limit)
        return torch.view_as_real(flat) if flat is not None and flat.is_complex() else flat

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        dtype, numel = self._tensor.dtype, self._tensor.numel()
        if dtype.is_complex:
            dtype, numel = dtype.to_real(), 2 * numel
        self.collected = [copied(reduced(opening.rows(dtype, numel), dtypes.GLOO.wire_op(self._op, dtype)))]

    def finish(self, participants: Sequence[int]) -> None:
        if self.collected is not None:
            put(self.collected[0], self._flat)
        if self._average:
            with writable(self._tensor):
                self._flat.div_(len(participants))
        super().finish(participants)


class Broadcast(_InPlace):
    """Overwrite `tensor` with the source's; the source's own memory is only read."""

    def __init__(
        self, tensor: torch.Tensor, source: int, rank: int, plan: ChunkPlan, closing: bool, staged: bool
    ) -> None:
        super().__init__(tensor, plan, closing, staged)
        self._source = source
        self._writes = rank != source

    def _writes_input(self, piece: int) -> bool:
        return not self._writes

    def payload(self, limit: int) -> torch.Tensor | None:
        flat = super().payload(limit)
        return flat if flat is None or not self._writes else _NOTHING

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        nbytes = self._tensor.numel() * self._tensor.element_size()
        self.collected = [copied(opening.rows(torch.uint8, nbytes)[ranks.index(self._source)])]

    def finish(self, participants: Sequence[int]) -> None:
        if self.collected is not None and self._writes:
            put(self.collected[0], self._flat)
        super().finish(participants)

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        with writable(self._tensor):
            return communicator.broadcast(self._prepare(piece), communicator.ranks.index(self._source))


class _Collected(Execution):
    """A result that is put together in staging memory and copied to the caller after the verdict (or directly, not atomic)."""

    def __init__(self, outputs: Sequence[torch.Tensor], plan: ChunkPlan, closing: bool) -> None:
        super().__init__(plan)
        self.closing = closing
        self._outputs = list(outputs)
        self._parts: list[torch.Tensor] = []
        self._arena: Arena | None = None

    def reserve(self, atomic: bool, in_flight: int) -> None:
        first = self._outputs[0]
        # CUDA results are always staged: a communicator that does not abort must not hold the caller's memory.
        if not atomic and not first.is_cuda and all(output.is_contiguous() for output in self._outputs):
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

    def result(self) -> list[torch.Tensor]:
        return self._parts

    def _copy_out(self, index: int) -> None:
        output = self._outputs[index]
        if self._arena is not None:
            with writable(output):
                output.detach().copy_(self._parts[index].view(output.shape))

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
        self._input = tensor.detach().contiguous().view(-1)
        self._ranks = tuple(ranks)

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        start, stop = self.plan.pieces[piece]
        self.submitted = max(self.submitted, piece + 1)
        parts = [self._parts[self._ranks.index(rank)][start:stop] for rank in communicator.ranks]
        with writable(self._outputs[0]):
            return communicator.all_gather(parts, self._input[start:stop])

    def payload(self, limit: int) -> torch.Tensor | None:
        tensor = self._input
        small = not self.closing and self.pieces == 1 and tensor.numel() * tensor.element_size() <= limit
        return tensor if small else None

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        rows = opening.rows(torch.uint8, self._input.numel() * self._input.element_size())
        self.collected = [copied(rows[ranks.index(rank)]) if rank in ranks else b"" for rank in self._ranks]

    def finish(self, participants: Sequence[int]) -> None:
        for index, rank in enumerate(self._ranks):
            if self.collected is not None:
                put(self.collected[index], self._parts[index])
            if rank in participants:
                self._copy_out(index)


class ReduceScatter(_Collected):
    """Reduce the inputs and keep this rank's; no other rank has the result, so it always has a closing round."""

    def __init__(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType, plan: ChunkPlan
    ) -> None:
        super().__init__([output], plan, closing=True)
        self._inputs = [tensor.detach().contiguous().view(-1) for tensor in inputs]
        self._average = op == ReduceOp.AVG
        self._op = ReduceOp.SUM if self._average else op

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        start, stop = self.plan.pieces[piece]
        self.submitted = max(self.submitted, piece + 1)
        inputs = [tensor[start:stop] for tensor in self._inputs]
        with writable(self._outputs[0]):
            return communicator.reduce_scatter(self._parts[0][start:stop], inputs, self._op)

    def finish(self, participants: Sequence[int]) -> None:
        if self._average:
            with writable(self._outputs[0]):
                self._parts[0].div_(len(participants))
        self._copy_out(0)


class Barrier(Execution):
    """No data: the opening round is the barrier."""

    closing = False

    def reserve(self, atomic: bool, in_flight: int) -> None:
        """A barrier needs no memory."""

    def payload(self, limit: int) -> torch.Tensor | None:
        return _NOTHING

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        self.collected = []

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        raise AssertionError("a barrier has no pieces")

    def restorable_after(self, piece: int) -> int:
        return 0

    def restore(self, from_piece: int) -> None:
        """There is nothing to restore."""

    def finish(self, participants: Sequence[int]) -> None:
        """There is nothing to hand over."""

    def result(self) -> list[torch.Tensor]:
        return []

    def accept(self, donated: str) -> None:
        """Having been told is all."""

    def release(self) -> None:
        """Nothing was reserved."""
