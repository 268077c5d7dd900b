"""The interface of a communicator: start an operation, wait for it in slices, stop it from any thread.

A communicator is one generation of one group. It is never repaired: after an error, or after `Communicator.stop`, the
next generation is built beside it on a fresh prefix of the store. It belongs to the guard alone, so stopping it touches
none of the caller's process groups.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch.distributed import ReduceOp

from ncclguard import lifecycle
from ncclguard.torch_compat.groups import Store

Kind = Literal["all_reduce", "reduce_scatter", "broadcast", "all_gather"]
"""The collectives that carry the caller's data, by the names of torch.distributed."""


class TransportError(Exception):
    """The communicator broke, was stopped, or could not be built.

    ``detail`` is the text of the backend; ``peer`` is the global rank at the other end of the connection that broke,
    where the backend names it. That rank is often itself a victim: this is evidence, not a verdict.
    """

    def __init__(self, detail: str, peer: int | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.peer = peer


class Disagreement(TransportError):
    """A peer is in another operation than this rank; raised before any of its bytes is taken."""


Save = Callable[[int, int], None]
"""Called with the bounds, in bytes, of what an operation is about to overwrite in the caller's tensor."""


class Pending(ABC):
    """An operation that was started.

    ``met``: when it was known that all ranks are in it (time.monotonic()); 0.0 before, and where the backend does not
    tell.
    """

    __slots__ = ()

    met: float = 0.0

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` (0: only check) and return whether it is complete; may be called again either way.

        Signal handlers run only between two calls, so callers wait in slices of at most 100 ms. Raises TransportError
        when the communicator broke or was stopped before the operation was complete.
        """


class Agreement(Pending):
    """A vote under way, see `Communicator.agree`; it moves while it is waited for."""

    __slots__ = ()

    @property
    @abstractmethod
    def agreed(self) -> bool:
        """Return whether every rank gave the same value. Raises RuntimeError before `wait` returned True."""

    @abstractmethod
    def payload(self, index: int) -> bytes:
        """Return the payload of the rank at ``index`` of the group.

        May be asked for after `wait` returned True and before the next vote.
        """

    @abstractmethod
    def reduced(self, dtype: torch.dtype, op: str) -> bytes:
        """Return the payloads of all ranks combined, with the same bits on every rank; to be asked for as `payload` is.

        ``op``: the `Reduction.name` of what they are sent for.
        """


@dataclass(frozen=True, slots=True)
class Reduction:
    """The way in which a reduce op is carried out.

    It is sent as ``wire``, has this ``name``, and where it is an ``average``, the result is divided once by the number
    of participants.
    """

    name: str
    wire: ReduceOp.RedOpType
    average: bool = False

    def finish(self, result: torch.Tensor, participants: int) -> None:
        """Turn the reduction of ``participants`` ranks into the result, in place; once per tensor, after its pieces."""
        if self.average:
            # By parts, because torch divides complex32 in no other way; integers towards zero, as NCCL does.
            parts = torch.view_as_real(result) if result.is_complex() else result
            parts.div_(participants, rounding_mode=None if parts.is_floating_point() else "trunc")


class Communicator(ABC):
    """One generation of one group's own connections.

    Tensors must be contiguous and on ``device_type``. Operations are started in the same order on all ranks; any thread
    may call `stop`, `quiet` and `close` at any time, also from a signal handler.

    ``ranks``: global ranks in the order of the group. ``index``: position of this process in it. ``payload_nbytes``:
    what each rank may send along with a vote, the same on all ranks. ``mark``: to be set before an operation is
    started, to a number below 2**63 that is equal on all ranks which are in the same. ``compares_marks``: whether the
    backend compares it, and raises `Disagreement` before it takes a byte of a rank that has another. ``closes``: to be
    set likewise; whether all ranks meet once more before one of them calls the operation complete. Else what a rank
    sends must have left its memory when it returns: it may fail, and its caller overwrite the tensor, before a peer
    that was stopped goes on.
    """

    ranks: tuple[int, ...]
    index: int
    size: int
    generation: int
    device_type: str
    payload_nbytes: int
    mark: int = 0
    compares_marks: bool = False
    closes: bool = False

    @property
    @abstractmethod
    def host(self) -> Communicator:
        """The communicator of the same ranks for CPU tensors, which may be this one; stopped and closed with it."""

    @abstractmethod
    def agree(self, value: int, payload: torch.Tensor | None = None) -> Agreement:
        """Start a vote on ``value`` (0 <= value < 2**63): agreed when all ranks give the same.

        The memory of ``payload``, contiguous on the CPU and of up to `payload_nbytes`, reaches all ranks with it. One
        vote at a time; the one before must be complete.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, save: Save | None = None) -> Pending:
        """Reduce ``tensor`` over all ranks, in place. ``op`` is the ``wire`` of a `Reduction`.

        ``save`` is called before a part of ``tensor`` is written for the first time, once for each byte. On a GPU it
        must be None.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source_index: int, save: Save | None = None) -> Pending:
        """Copy the tensor of the rank at ``source_index`` into ``tensor`` of all; ``save`` as for `all_reduce`."""

    @abstractmethod
    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Pending:
        """Gather ``tensor`` of every rank into ``outputs``, one for each rank and of the same size."""

    @abstractmethod
    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp.RedOpType) -> Pending:
        """Reduce ``inputs[i]`` of all ranks into ``output`` of the rank at index i. ``inputs`` are left unchanged.

        ``output`` must not share memory with ``inputs`` but for the one of this rank.
        """

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, root_index: int, op: ReduceOp.RedOpType) -> Pending:
        """Reduce ``tensor`` over all ranks into that of the rank at ``root_index``; the others' are used up."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root_index: int) -> Pending:
        """Gather the bytes of all ranks' ``tensor`` into ``outputs`` of the one at ``root_index``; empty elsewhere."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root_index: int) -> Pending:
        """Copy ``inputs[i]``, bytes of the rank at ``root_index``, into ``output`` of the rank at index i."""

    @abstractmethod
    def all_to_all(self, output: torch.Tensor, sizes: Sequence[int], inputs: Sequence[torch.Tensor]) -> Pending:
        """Copy the bytes ``inputs[i]`` of the rank at index j into part j of ``output`` of the rank at index i.

        ``sizes``: bytes of each part, one after the other. The lengths must be known to agree.
        """

    @abstractmethod
    def all_gather_uneven(self, sizes: Sequence[int], data: torch.Tensor) -> tuple[Pending, list[torch.Tensor]]:
        """Gather bytes of which each rank has another number, ``sizes``, on the CPU; returned with where they come."""

    @abstractmethod
    def stop(self) -> None:
        """Make every operation in flight fail soon and every later one at once. Idempotent; returns within 100 ms."""

    @abstractmethod
    def quiet(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until no operation of this communicator can write into anybody's memory any more."""

    @abstractmethod
    def close(self) -> None:
        """Release everything, stopping what is still in flight. Takes at most about a second and never raises."""

    @abstractmethod
    def leave_to_parent(self) -> None:
        """Leave everything to the parent, in a forked child: the parent's connections must not be touched."""


class Builder(Protocol):
    """Builds the communicators of one backend, for tensors on ``device``.

    ``max_in_flight``: more operations at a time than this bring nothing; the same on all ranks, because what a rank
    keeps restorable rests on how far ahead of it another may be.
    ``shares``: whether the store may be a connection that others use at the same time, because it is only asked what is
    answered at once, and is never cut.
    """

    device: torch.device
    max_in_flight: int
    shares: bool

    def build(
        self,
        store: Store,
        prefix: str,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        seconds: float,
        wanted: Callable[[], bool] | None = None,
    ) -> Communicator:
        """Connect to the other ``ranks``, which must do the same within ``seconds``; else raises TransportError.

        It is given up, likewise, once it is not ``wanted()`` any more.

        ``store``, unless the builder ``shares``, is a connection of its own, made by `torch_compat.clone_store`: when
        the time is over it is cut, and is unusable then. ``prefix`` must never have been used before, neither by an
        attempt that failed: keys of two attempts do not mix.
        """

    def check_supported(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        """Raise TypeError or ValueError, with a sentence, if the backend cannot do this; nothing is sent."""


#: The communicators of this process that are not closed; each adds itself.
live: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _close_all() -> None:
    for communicator in tuple(live):
        communicator.close()


def _leave_all_to_parent() -> None:
    for communicator in tuple(live):
        communicator.leave_to_parent()


lifecycle.at_end(lifecycle.End.TRANSPORT, _close_all)
lifecycle.in_child(_leave_all_to_parent)
