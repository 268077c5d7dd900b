"""All-gather and reduce-scatter: the result is put together apart from the input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ncclguard._inference import writable
from ncclguard.buffers import Arena, aligned
from ncclguard.chunking import ChunkPlan
from ncclguard.execution.base import Execution
from ncclguard.execution.memory import in_a_row, plain, put, share_memory, tensor_of
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
