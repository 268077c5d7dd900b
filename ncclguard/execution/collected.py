"""All-gather and reduce-scatter: the result is put together apart from the input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from ncclguard.buffers import Arena, aligned
from ncclguard.chunking import ChunkPlan
from ncclguard.execution.base import Execution
from ncclguard.execution.memory import copied, put, writable
from ncclguard.transport.base import Agreement, Communicator, Pending


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
        return self._input if self._fits(self._input, limit) else None

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
