"""Operations of a gloo group under way."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
from torch import distributed as dist

from .._inference import writable
from .base import Pending, TransportError


class Owner(Protocol):
    """The communicator, as its operations see it."""

    def broken(self, error: RuntimeError) -> TransportError:
        """What the backend's error means."""

    def check_parked(self) -> None:
        """Raise TransportError if an operation that is not complete never will be."""


class GlooPending(Pending):
    """One operation of a gloo group, see `Pending`."""

    __slots__ = ("_done", "_owner", "_work")

    def __init__(self, owner: Owner, work: dist.Work) -> None:
        self._owner = owner
        self._work = work
        self._done = False

    def wait(self, seconds: float) -> bool:
        if self._done:
            return True
        work = self._work
        try:
            if seconds >= 0.001:
                work.wait(timedelta(seconds=min(seconds, 3600.0)))
            elif not work.is_completed():  # a wait of less than a millisecond would mean no limit to torch
                self._owner.check_parked()
                return False
            else:
                work.wait()
        except RuntimeError:
            # The end of the slice raises too ("Operation timed out!"). Whether the operation failed is not
            # decided by texts: once it is complete, asking again answers at once, with its true result.
            if not work.is_completed():
                self._owner.check_parked()
                return False
            try:
                work.wait()
            except RuntimeError as error:
                raise self._owner.broken(error) from None
        self._done = True
        return True


class Copied(Pending):
    """An operation on memory of its own; once it is complete, ``source`` is copied into
    ``target`` in the caller's thread.
    """

    __slots__ = ("_done", "_operation", "_source", "_target")

    def __init__(self, operation: GlooPending, source: torch.Tensor, target: torch.Tensor) -> None:
        self._operation = operation
        self._source = source
        self._target = target
        self._done = False

    def wait(self, seconds: float) -> bool:
        if not self._done and self._operation.wait(seconds):
            with writable(self._target):
                self._target.copy_(self._source)
            self._done = True
        return self._done
