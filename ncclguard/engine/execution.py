"""What the guard drives: one call's data, piece by piece."""

from __future__ import annotations

import base64
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ncclguard.engine.chunking import ChunkPlan
from ncclguard.engine.memory import NOTHING, copied
from ncclguard.transport.base import Agreement, Communicator, Pending

log = logging.getLogger("ncclguard")


class InUse(Exception):
    """A communicator that cannot be stopped may still write into memory of the caller,
    and no other can take its place.
    """


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

    @abstractmethod
    def reserve(self, atomic: bool, in_flight: int) -> None:
        """Get the memory that will be needed. Raises MemoryError."""

    def obtain(self, atomic: bool | str, in_flight: int, text: str) -> None:
        """Get the memory for an `atomic` call, as asked for; without it the call goes on
        not atomic, unless that was required.
        """
        try:
            self.reserve(bool(atomic), in_flight)
        except MemoryError:
            if atomic == "require" or not atomic:
                raise
            log.warning("ncclguard: no memory to back up %s; a failure may leave it torn", text)
            self.reserve(False, in_flight)

    def payload(self, limit: int) -> torch.Tensor | None:
        """What to send along with the opening round, when up to `limit` bytes of each rank
        are all this operation needs.

        Contiguous, on the CPU. None, the same on all ranks: the pieces are to be moved instead.
        """
        return None

    def _fits(self, tensor: torch.Tensor, limit: int) -> bool:
        """Whether up to `limit` bytes of `tensor` are all that the operation moves; from
        values that all ranks compare.
        """
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

    @property
    def exposed(self) -> bool:
        """Whether the transport writes into the caller's own memory."""
        return False

    @property
    def may_be_torn(self) -> bool:
        """Whether the caller's memory is not what it was before, or may still be written into."""
        return self.torn or (self.busy and self.exposed)

    def renew(self, from_piece: int) -> None:
        """Where the transport is still `busy` with the memory: take other for the next try,
        with what is complete before `from_piece`.

        Raises MemoryError, and InUse where it is the caller's.
        """
        if self.busy and self.exposed:
            raise InUse("its last try could not be stopped and may still write into the tensor")
        if self.busy:
            self._replace(from_piece)
            self.busy = False

    def _replace(self, from_piece: int) -> None:
        """Take other staging memory, as `renew` says."""

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

    @abstractmethod
    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the result before `finish`, the same on every rank."""

    def accept(self, donated: str) -> None:
        """Take the result from a rank that completed, as if the opening round had brought
        it: no memory is needed but its own.
        """
        self.collected = [base64.b64decode(text) for text in donated.split(",")]

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

    def release(self) -> None:
        """Nothing was reserved."""


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

    def restorable_after(self, piece: int) -> int:
        return 0

    def restore(self, from_piece: int) -> None:
        """Nothing was written."""

    def finish(self, participants: Sequence[int]) -> None:
        raise AssertionError("an operation without memory does not succeed")

    def result(self) -> list[torch.Tensor]:
        return []

    def release(self) -> None:
        """Nothing was reserved."""


def encode(parts: Sequence[bytes]) -> str:
    """Serialise a kept result for the store."""
    return ",".join(base64.b64encode(part).decode() for part in parts)
