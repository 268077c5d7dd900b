"""Calls that may block in C++ without end, made one after the other by a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .base import TransportError
from .bounded import in_background

T = TypeVar("T")


class Launch(Generic[T]):
    """One call, for `Launcher.submit`. Once it has ``finished`` it has left its
    ``result``, or the ``error`` that it raised.
    """

    __slots__ = ("_call", "_running", "error", "finished", "result")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._running = threading.Lock()  # cheaper than an Event, and there is one for each piece of a large tensor
        self._running.acquire()
        self.finished = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds``; whether it has come back."""
        if not self.finished and self._running.acquire(timeout=max(0.0, seconds)):
            self._running.release()
        return self.finished

    def run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self.result = call()
        except BaseException as error:  # noqa: BLE001 - for whoever waits for it
            self.error = error
        finally:
            del call
            self.finished = True
            self._running.release()


class Launcher:
    """The thread. It ends with `close`; a call that never comes back keeps it, and
    interpreter exit waits for it with a bound.
    """

    def __init__(self, what: str) -> None:
        self._queue: queue.SimpleQueue[Launch[object] | None] = queue.SimpleQueue()
        calls = self._queue  # the thread must not keep its owner alive
        if in_background(what, lambda: _run_all(calls), self.close) is None:
            raise TransportError(f"{what} cannot begin: the program has ended")

    def submit(self, launch: Launch[T]) -> None:
        """Have it run after all that were submitted before; returns at once."""
        self._queue.put(launch)  # type: ignore[arg-type]

    def close(self) -> None:
        """Take nothing more: the thread ends after what was submitted."""
        self._queue.put(None)


def _run_all(calls: queue.SimpleQueue[Launch[object] | None]) -> None:
    with torch.inference_mode():  # in which results that are inference tensors may be written, and all others too
        while (launch := calls.get()) is not None:
            launch.run()
            del launch  # with the tensors it holds, while the next one is waited for
