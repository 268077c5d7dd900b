"""All-reduce and broadcast: the result takes the place of the input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ncclguard.engine.chunking import ChunkPlan
from ncclguard.engine.execution import Execution
from ncclguard.engine.memory import Arena, aligned, copied, flattened, in_a_row, plain, put, tensor_of, writable
from ncclguard.transport import dtypes
from ncclguard.transport.base import Agreement, Communicator, Pending, Save
from ncclguard.transport.memory import copy_bytes

_NO_ELEMENTS = torch.empty(0, device="cpu")


class _InPlace(Execution):
    """A tensor that is reduced or overwritten where it lies, or in a contiguous staging copy of it."""

    def __init__(self, tensor: torch.Tensor, plan: ChunkPlan, closing: bool, staged: bool) -> None:
        super().__init__(plan)
        self.closing = closing
        self._tensor = tensor
        self._staged = staged or not plain(tensor)
        self._flat = _NO_ELEMENTS if self._staged else flattened(tensor)
        self._arena: Arena | None = None
        self._backup: torch.Tensor | None = None
        self._saved = b""  # instead of a backup in the arena, for small tensors
        self._window = 0
        self._overwritten: dict[int, list[tuple[int, int]]] = {}  # piece -> bytes of it that its slot has a copy of
        self._writes = True
        self._unfinished = False  # whether something is left to do with what was moved

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
            self._overwritten[piece] = []
            self._overwritten.pop(piece - self._window, None)
        elif self._writes and not self._saved:
            self._saved = copied(self._flat)
        self.submitted = max(self.submitted, piece + 1)
        return part

    def _save(self, piece: int) -> Save | None:
        """Copies into the piece's slot what the transport is about to overwrite, while it is in the core's cache."""
        if self._backup is None:
            return None
        overwritten = self._overwritten[piece]
        start, stop = self.plan.pieces[piece]
        source, target = self._flat[start:stop].data_ptr(), self._slot(piece).data_ptr()

        def save(first: int, last: int) -> None:
            copy_bytes(target + first, source + first, last - first)
            overwritten.append((first, last))

        return save

    def _writes_input(self, piece: int) -> bool:
        return True

    def payload(self, limit: int) -> torch.Tensor | None:
        if not self._fits(self._tensor, limit):
            return None
        return in_a_row(self._tensor) if self._staged else self._flat

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
        if self._saved:
            if from_piece < self.submitted:  # the pieces before hold their result, and are not moved again
                start = self.plan.pieces[from_piece][0]
                put(self._saved[start * self._flat.element_size() :], self._flat[start:])
        elif not self._staged and self._backup is not None:
            for piece in range(from_piece, self.submitted):
                start, stop = self.plan.pieces[piece]
                source, target = self._slot(piece).data_ptr(), self._flat[start:stop].data_ptr()
                for first, last in self._overwritten.pop(piece, ()):
                    copy_bytes(target + first, source + first, last - first)
        self.submitted = min(self.submitted, from_piece)

    def result(self) -> list[torch.Tensor]:
        return [self._flat]

    def finish(self, participants: Sequence[int]) -> None:
        if not self._writes:
            return
        if self.collected is not None and not (self._staged or self._unfinished):
            put(self.collected[0], self._flat)  # all that most small operations need
            return
        with writable(self._tensor):
            # What came as bytes is completed apart, so that the caller's memory never holds a sum
            # that is not divided yet.
            result = self._flat if self.collected is None else tensor_of(self.collected[0], self._tensor.dtype)
            self._complete(result, len(participants))
            if result is not self._flat or self._staged:
                self._tensor.detach().copy_(result.view(self._tensor.shape))

    def _complete(self, result: torch.Tensor, participants: int) -> None:
        """What is left to do with the result where `_unfinished` says so, in place, once for all pieces."""

    @property
    def exposed(self) -> bool:
        return self._writes and not self._staged

    def _replace(self, from_piece: int) -> None:
        if self._arena is None:
            return  # the caller's own memory, which was only read
        old, complete = self._arena, self._flat[: self._length_before(from_piece)]
        self.reserve(True, 0)
        self._flat[: complete.numel()].copy_(complete)
        old.release(reusable=False)

    def release(self) -> None:
        self._flat = _NO_ELEMENTS
        self._backup = None
        if self._arena is not None:
            self._arena.release(reusable=not self.busy)
            self._arena = None


class AllReduce(_InPlace):
    """Reduce `tensor` in place; AVG is summed and divided by the participants once, after the verdict."""

    meets = True

    def __init__(self, tensor: torch.Tensor, op: str, plan: ChunkPlan, closing: bool, staged: bool) -> None:
        super().__init__(tensor, plan, closing, staged)
        self._reduction = dtypes.reduction(op, "cuda" if staged and tensor.is_cuda else "cpu")
        self._unfinished = self._reduction.average

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        with writable(self._tensor):
            return communicator.all_reduce(self._prepare(piece), self._reduction.wire, self._save(piece))

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        self.collected = [opening.reduced(self._tensor.dtype, self._reduction.name)]

    def _complete(self, result: torch.Tensor, participants: int) -> None:
        self._reduction.finish(result, participants)


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

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        # All ranks have sent as much, as an exchange needs it; only the source's is looked at.
        self.collected = [opening.payload(ranks.index(self._source))]

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        with writable(self._tensor):
            part, source = self._prepare(piece), communicator.ranks.index(self._source)
            return communicator.broadcast(part, source, self._save(piece))
