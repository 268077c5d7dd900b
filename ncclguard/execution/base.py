"""What the guard drives: one call's data, piece by piece."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ncclguard.chunking import ChunkPlan
from ncclguard.execution.memory import NOTHING, copied
from ncclguard.transport.base import Agreement, Communicator, Pending


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

    def _fits(self, tensor: torch.Tensor, limit: int) -> bool:
        """Whether up to `limit` bytes of `tensor` are all that the operation moves; from values that all ranks compare."""
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


class Barrier(Execution):
    """No data: the opening round is the barrier."""

    closing = False

    def reserve(self, atomic: bool, in_flight: int) -> None:
        """A barrier needs no memory."""

    def payload(self, limit: int) -> torch.Tensor | None:
        return NOTHING

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


def encode(parts: Sequence[bytes]) -> str:
    """Serialise a kept result for the store."""
    return ",".join(base64.b64encode(part).decode() for part in parts)
