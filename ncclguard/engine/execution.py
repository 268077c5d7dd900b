"""Movements of one call's data, piece by piece: in place (all-reduce, broadcast), or staged apart from the input.

The staged ones (all-gather, scatter and their like) send from the caller's memory, receive into staging memory, and
write the caller's memory after the verdict.
"""

from __future__ import annotations

import base64
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ncclguard.engine.chunking import EMPTY, ONE, ChunkPlan
from ncclguard.transport import memory
from ncclguard.transport.base import Agreement, Communicator, Pending, Save
from ncclguard.transport.memory import (
    NOTHING,
    Arena,
    aligned,
    copied,
    copy_bytes,
    flattened,
    in_a_row,
    plain,
    put,
    share_memory,
    tensor_of,
    writable,
)
from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")


class InUse(Exception):
    """A communicator that cannot be stopped may still write into the caller's memory, and none can take its place."""


class Execution(ABC):
    """One call's data. `ranks` are the group's global ranks in order; `participants` those that take part."""

    closing = True
    #: Whether no rank can complete a piece before all have entered the operation, because something of each is in it.
    meets = False

    def __init__(self, plan: ChunkPlan) -> None:
        self.plan = plan
        self.pieces = len(plan.pieces)
        self.submitted = 0  # pieces handed to the transport since the last restore
        self.collected: list[bytes] | None = None  # the result, where the opening round or another rank brought it
        self.torn = False
        self.busy = False  # the transport did not become quiet: its memory must never be used for anything else
        self._arena: Arena | None = None

    def reserve(self, atomic: bool, in_flight: int) -> None:
        """Get the memory that will be needed, none by default. Raises MemoryError."""

    def obtain(self, atomic: bool | str, in_flight: int, text: str) -> None:
        """Get the memory for an `atomic` call, which goes on not atomic without it, unless that was required."""
        try:
            self.reserve(bool(atomic), in_flight)
        except MemoryError:
            if atomic == "require" or not atomic:
                raise
            log.warning(
                "ncclguard: %s",
                told("no memory to back up {operation}; a failure may leave it torn", "log", operation=text),
            )
            self.reserve(False, in_flight)

    def payload(self, limit: int) -> torch.Tensor | None:
        """Return what to send along with the opening round.

        It is there when up to `limit` bytes of each rank are all this operation needs.

        Contiguous, on the CPU. None, the same on all ranks: the pieces are to be moved instead.
        """
        return None

    def _fits(self, tensor: torch.Tensor, limit: int) -> bool:
        """Return whether up to `limit` bytes of `tensor`, alike on all ranks, are all that the operation moves."""
        return self.pieces == 1 and tensor.numel() * tensor.element_size() <= limit

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        """Make the result of what `ranks` have sent along; the caller's memory is left alone until `finish`."""
        raise AssertionError("an operation without a payload has nothing to collect")

    @abstractmethod
    def submit(self, communicator: Communicator, piece: int) -> Pending:
        """Make the piece's input restorable, then start it."""

    @property
    def restorable_from(self) -> int:
        """The first piece whose input `restore` can bring back."""
        return self.restorable_after(self.submitted - 1)

    def restorable_after(self, piece: int) -> int:
        """Return what `restorable_from` will be once `piece` has been submitted: all where the input stays as it is."""
        return 0

    def restore(self, from_piece: int) -> None:
        """Bring the inputs of the pieces from `from_piece` on back; the transport is quiet when this is called."""
        self.collected = None
        self.submitted = min(self.submitted, from_piece)

    @property
    def exposed(self) -> bool:
        """Return whether the transport writes into the caller's own memory."""
        return False

    @property
    def may_be_torn(self) -> bool:
        """Return whether the caller's memory is not what it was before, or may still be written into."""
        return self.torn or (self.busy and self.exposed)

    def renew(self, from_piece: int) -> None:
        """Take other memory for the next try where the transport is still `busy` with this.

        It has what is complete before `from_piece`.

        Raises MemoryError, and InUse where it is the caller's.
        """
        if self.busy and self.exposed:
            raise InUse("its last try could not be stopped and may still write into the tensor")
        if self.busy:
            self._replace(from_piece)
            self.busy = False

    def _replace(self, from_piece: int) -> None:
        """Take other staging memory, as `renew` says."""
        old = self._arena
        self.reserve(True, 0)
        if old is not None:
            old.release(reusable=False)

    def _length_before(self, piece: int) -> int:
        """Elements of the pieces before `piece`."""
        return self.plan.pieces[piece - 1][1] if piece > 0 else 0

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

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result before `finish`, where it is the same on every rank."""
        return []

    def accept(self, donated: str) -> None:
        """Take the result from a rank that completed, as if the opening round had brought it."""
        self.collected = [base64.b64decode(text) for text in donated.split(",")]

    def release(self) -> None:
        """Give reserved memory back."""
        if self._arena is not None:
            self._arena.release(reusable=not self.busy)
            self._arena = None


class Barrier(Execution):
    """No data: the opening round is the barrier."""

    closing = False

    def payload(self, limit: int) -> torch.Tensor | None:
        return NOTHING

    def collect(self, opening: Agreement, ranks: Sequence[int]) -> None:
        self.collected = []

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        raise AssertionError("a barrier has no pieces")

    def finish(self, participants: Sequence[int]) -> None:
        """There is nothing to hand over."""


class Refused(Execution):
    """In place of an operation that this rank has no memory for: it fails for all, and `why` is what they are told."""

    def __init__(self, plan: ChunkPlan, closing: bool, why: str) -> None:
        super().__init__(plan)
        self.closing = closing
        self._why = why

    def reserve(self, atomic: bool, in_flight: int) -> None:
        raise MemoryError(self._why)

    def submit(self, communicator: Communicator, piece: int) -> Pending:
        raise AssertionError("an operation without memory does not start")

    def finish(self, participants: Sequence[int]) -> None:
        raise AssertionError("an operation without memory does not succeed")


def encode(parts: Sequence[bytes]) -> str:
    """Serialise a kept result for the store."""
    return ",".join(base64.b64encode(part).decode() for part in parts)


_NO_ELEMENTS = torch.empty(0, device="cpu")


class _InPlace(Execution):
    """A tensor that is reduced or overwritten where it lies, or in a contiguous staging copy of it."""

    def __init__(self, tensor: torch.Tensor, plan: ChunkPlan, closing: bool, staged: bool) -> None:
        super().__init__(plan)
        self.closing = closing
        self._tensor = tensor
        self._staged = staged or not plain(tensor)
        self._flat = _NO_ELEMENTS if self._staged else flattened(tensor)
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
        """Do what is left to do with the result where `_unfinished` says so, in place, once for all pieces."""

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
        super().release()


class AllReduce(_InPlace):
    """Reduce `tensor` in place; AVG is summed and divided by the participants once, after the verdict."""

    meets = True

    def __init__(self, tensor: torch.Tensor, op: str, plan: ChunkPlan, closing: bool, staged: bool) -> None:
        super().__init__(tensor, plan, closing, staged)
        self._reduction = memory.reduction(op, "cuda" if staged and tensor.is_cuda else "cpu")
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


class _Collected(Execution):
    """A result in staging memory that is copied to the caller after the verdict (or directly, not atomic)."""

    meets = True

    def __init__(self, outputs: Sequence[torch.Tensor], plan: ChunkPlan, closing: bool) -> None:
        super().__init__(plan)
        self.closing = closing
        self._outputs = list(outputs)
        self._parts: list[torch.Tensor] = []

    def reserve(self, atomic: bool, in_flight: int) -> None:
        first = self._outputs[0]
        # CUDA results are always staged: a communicator that does not abort must not hold the caller's memory.
        if not atomic and not first.is_cuda and all(plain(output) for output in self._outputs):
            self._parts = [output.detach().view(-1) for output in self._outputs]
            return
        sizes = [output.numel() for output in self._outputs]
        self._arena = Arena(sum(aligned(size * first.dtype.itemsize) for size in sizes), first.device)
        self._parts = [self._arena.take(size, first.dtype) for size in sizes]

    def abandon(self) -> None:
        self.torn = self._arena is None and self.submitted > 0
        self.submitted = 0

    @property
    def exposed(self) -> bool:
        return self._arena is None

    def _replace(self, from_piece: int) -> None:
        complete = [part[: self._length_before(from_piece)] for part in self._parts]
        super()._replace(from_piece)
        for part, done in zip(self._parts, complete, strict=True):
            with writable(self._outputs[0]):
                part[: done.numel()].copy_(done)

    def result(self) -> list[torch.Tensor]:
        return self._parts

    def _copy_out(self, index: int) -> None:
        output = self._outputs[index]
        if self._arena is not None:
            with writable(output):
                output.detach().copy_(self._parts[index].view(output.shape))

    def _put(self, index: int, data: bytes) -> None:
        """Put the result there from bytes, which need no staging."""
        output = self._outputs[index]
        if plain(output) and not output.is_cuda:
            put(data, output)
        else:
            with writable(output):
                output.detach().copy_(tensor_of(data, output.dtype).view(output.shape))

    def release(self) -> None:
        self._parts = []
        super().release()


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
        """Return where the slots of `ranks` are among those of the whole group."""
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
        self._reduction = memory.reduction(op, output.device.type)

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

    def release(self) -> None:
        self.parts = []
        super().release()


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
    """An exchange: `inputs[i]` goes to the i-th rank, `outputs[i]` comes from it, in sizes known to agree."""

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
        self._reduction = memory.reduction(op, tensor.device.type)
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
    """The numbers of elements of each rank, then all of them: places and values."""

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
