"""Operations of an NCCL group under way."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import distributed as dist

from .base import Pending, TransportError
from .launching import Launch

_LAUNCH_SLICE = 0.05  # seconds between two looks at the communicator while a launch does not come back
_LONGEST_PAUSE = 0.001  # seconds between two looks at a CUDA event
_ASK_EVERY = 0.1  # seconds between two questions for errors of the communicator

Launched = tuple[dist.Work, torch.cuda.Event]


class Owner(Protocol):
    """The communicator, as its operations see it."""

    @property
    def aborted(self) -> bool:
        """Whether it was aborted, and that has ended."""

    def check(self) -> None:
        """Raise TransportError once it was stopped."""

    def ask(self, work: dist.Work) -> None:
        """Raise TransportError if NCCL has an error to report."""

    def complete(self, pending: NcclPending) -> None:
        """Forget an operation that is complete, with the tensors that were kept for it."""


class NcclPending(Pending):
    """One operation of an NCCL group; complete when its event has been reached on the GPU and nobody has aborted."""

    __slots__ = ("_ask_at", "_done", "_owner", "launch")

    def __init__(self, owner: Owner, launch: Launch[Launched]) -> None:
        self.launch = launch
        self._owner = owner
        self._done = False
        self._ask_at = 0.0

    def wait(self, seconds: float) -> bool:
        """See `Pending.wait`. Polls: ``Work.wait`` would block, and with a timeout abort
        the communicator when that is over.
        """
        if self._done:
            return True
        end = time.monotonic() + seconds
        self._owner.check()
        while not self.launch.ended(min(_LAUNCH_SLICE, end - time.monotonic())):
            self._owner.check()
            if time.monotonic() >= end:
                return False
        work, event = self._launched()
        pause = 0.00002
        while not self._poll(work, event):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._done = True
        self._owner.complete(self)
        return True

    def _launched(self) -> Launched:
        """What the launch has left. Raises its error as what it means to the guard."""
        error = self.launch.error
        if error is not None:
            self._owner.check()  # "communicator was aborted" is the consequence
            raise failure(error) from error
        assert self.launch.result is not None
        return self.launch.result

    def _poll(self, work: dist.Work, event: torch.cuda.Event) -> bool:
        self._owner.check()
        try:
            reached = bool(event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TransportError(str(error)) from error
        self._owner.check()  # an abort makes the event come too, and sets its flag before
        now = time.monotonic()
        if self._ask_at == 0.0:
            self._ask_at = now + _ASK_EVERY
        if reached or now >= self._ask_at:
            self._owner.ask(work)
            self._ask_at = now + _ASK_EVERY
        return reached

    def over(self) -> bool:
        """Whether nothing of it can touch its tensors any more, for whatever reason."""
        if self._done:
            return True
        if not self.launch.finished:
            return False
        if self.launch.error is not None:
            # RuntimeError is torch's: NCCL may have queued a part of the operation, which only an abort ends for sure.
            return self._owner.aborted or not isinstance(self.launch.error, RuntimeError)
        assert self.launch.result is not None
        try:
            return bool(self.launch.result[1].query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # CUDA itself is broken: nothing is known
            return False


def failure(error: BaseException) -> BaseException:
    """What an error of torch means to the guard: RuntimeError is the communicator's,
    out of memory this rank's, others are what they are.
    """
    if isinstance(error, torch.OutOfMemoryError):  # a RuntimeError too
        return MemoryError(str(error))
    return TransportError(str(error)) if isinstance(error, RuntimeError) else error
