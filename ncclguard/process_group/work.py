"""What a collective on a guarded group returns: a `torch.distributed.Work` that ends, with the engine's typed error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ncclguard.deadlines import engine_section


class GuardedWork(dist.Work):
    """A collective that was started; its deadline is the operation's own, so that every wait ends.

    `results`: the tensors that the future holds. Python callers get the typed error of `ncclguard.errors` from `wait`;
    C++ callers and futures, which know no Python types, a RuntimeError with the same text.
    """

    def __init__(self, text: str, results: Any, device: torch.device | None) -> None:
        super().__init__()
        self._text = text
        self._results = results
        self._device = device
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._examined = False
        self._lock = threading.Lock()
        self._promise: Any = None
        self._future: Any = None
        #: Called by a wait, with whether that has a limit of its own: may carry the collective out in the same thread.
        self.run_now: Callable[[GuardedWork, bool], None] | None = None

    # ------------------------------------------------------------------ the caller

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended; raises its typed error, and TimeoutError when `timeout` passes first."""
        limit = None if timeout is None else timeout.total_seconds()
        if self.run_now is not None and not self._ended.is_set():
            self.run_now(self, bool(limit))
        with engine_section():
            ended = self._ended.wait(limit if limit else None)  # torch's zero means: no limit but the operation's own
        if not ended:
            raise TimeoutError(
                f"{self._text} is not complete after {limit:.3g} s; it goes on until its own limit: wait for it again"
            )
        self._examined = True
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait`: the host has seen the end of the collective."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait`: the host has seen the end of the collective."""
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Any:
        self._examined = True
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors, once complete."""
        self.wait()
        return list(self._results)

    def source_rank(self) -> int:
        raise RuntimeError(f"{self._text} has no source rank: only a receive from any source has one")

    def get_future(self) -> Any:
        """A future with the tensors; it is completed whether or not anybody waits."""
        with self._lock:
            if self._future is None:
                on_cuda = self._device is not None and self._device.type == "cuda"
                devices: Any = [self._device] if on_cuda else []
                self._promise = torch.futures.Future(devices=devices)
                self._future = self._promise.then(self._value)
            promise, future, ended = self._promise, self._future, self._ended.is_set()
            if ended:
                self._promise = None
        if ended and promise is not None:
            promise.set_result(None)
        return future

    def _value(self, _: Any) -> Any:
        # Raised inside a callback, because only then does the future carry an error that C++ sees as one.
        self._examined = True
        if self._error is not None:
            raise self._error
        return self._results

    # ------------------------------------------------------------------ who carries it out

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def examined(self) -> bool:
        """Whether anybody waited for the end or asked for the error."""
        return self._examined

    def end(self, error: BaseException | None = None) -> None:
        """The collective has ended; callbacks of the future run in this thread."""
        callbacks = self.mark_ended(error)
        if callbacks is not None:
            callbacks()

    def mark_ended(self, error: BaseException | None) -> Callable[[], None] | None:
        """The collective has ended; returns what runs its future's callbacks, None without one."""
        with self._lock:
            self._error = error
            self._ended.set()
            promise, self._promise = self._promise, None
        return None if promise is None else lambda: promise.set_result(None)
