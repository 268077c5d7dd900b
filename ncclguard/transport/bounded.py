"""Calls that may block in C++ without end, and that return in time all the same."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ncclguard import lifecycle, torch_compat
from ncclguard.transport.base import TransportError

T = TypeVar("T")

_EXIT_GRACE = 2.0  # seconds that interpreter exit waits for a call that was given up
_LOOK = 0.05  # seconds between two questions whether the result of a call is still wanted
_RELEASE_GRACE = 0.25  # seconds for a call to end after it was released

_running: set[_Call[Any]] = set()
_lock = threading.RLock()  # reentrant, because a signal handler may stop a communicator


class _Call(threading.Thread, Generic[T]):
    def __init__(self, what: str, call: Callable[[], T], release: Callable[[], object]) -> None:
        super().__init__(name=f"ncclguard-{what}", daemon=True)
        self.result: T | None = None
        self.error: BaseException | None = None
        self.release = release
        self.exit_within = _EXIT_GRACE
        self._call: Callable[[], T] | None = call
        self._finished = threading.Event()
        self._given_up = False

    def run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            torch_compat.leave_captures_alone()
            result = call()
            if not self._given_up:  # else it is dropped in this thread, because its destructor may block
                self.result = result
        except BaseException as error:  # noqa: BLE001 - handed to the caller of bounded()
            self.error = error
        finally:
            del call
            with _lock:
                _running.discard(self)
            self._finished.set()

    def ended(self, seconds: float, wanted: Callable[[], bool] | None = None) -> bool:
        until = time.monotonic() + seconds
        while wanted is not None and until - time.monotonic() > _LOOK:
            if not wanted() or self._finished.wait(_LOOK):
                return self._finished.is_set()
        return self._finished.wait(max(0.0, until - time.monotonic()))

    def give_up(self) -> None:
        self._given_up = True
        with contextlib.suppress(Exception):
            self.release()


class Background(Protocol):
    """A call that `in_background` has begun."""

    error: BaseException | None

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` and return whether the call has come back."""


def bounded(
    what: str,
    call: Callable[[], T],
    seconds: float,
    release: Callable[[], object],
    wanted: Callable[[], bool] | None = None,
) -> T:
    """Return the result of ``call()``, run in a helper thread, within ``seconds`` plus at most a quarter of a second.

    When the time is over, or the result is not ``wanted()`` any more, ``release()`` is called, which should make the
    call end (shut the socket it waits on); then TransportError is raised, whether it ended or not. A call that did not
    is left to its thread and its late result dropped. At interpreter exit such calls are released again and waited for,
    two seconds each: a thread that comes back from C++ into an interpreter that is being torn down would end the
    process with SIGABRT.

    RuntimeError of the call (torch's errors of store and network) is raised as TransportError, anything else as it is.
    """
    thread = _Call(what, call, release)
    with _lock:
        _running.add(thread)
    try:
        thread.start()
    except RuntimeError as error:  # the program has ended: Python 3.12 starts no threads any more
        with _lock:
            _running.discard(thread)
        raise TransportError(f"{what} was not begun: {error}") from error
    try:
        ended = thread.ended(seconds, wanted)
    except BaseException:  # Ctrl-C, or the alarm of a timeout handler
        thread.give_up()
        raise
    if not ended:
        thread.give_up()
        thread.ended(_RELEASE_GRACE)
        why = f": {thread.error}" if thread.error is not None else ""
        if wanted is not None and not wanted():
            raise TransportError(f"{what} is not wanted any more and was given up{why}")
        raise TransportError(f"{what} took longer than {seconds:.1f} s and was given up{why}")
    if isinstance(thread.error, RuntimeError):
        raise TransportError(f"{what} failed: {thread.error}") from thread.error
    if thread.error is not None:
        raise thread.error
    result = thread.result
    assert result is not None
    return result


def in_background(
    what: str,
    call: Callable[[], object],
    release: Callable[[], object] = lambda: None,
    exit_within: float = _EXIT_GRACE,
) -> Background | None:
    """Run ``call()`` in a thread that nobody has to wait for; return None if no thread can be started any more.

    What it raises is kept in ``error`` and goes no further. Interpreter exit waits for it, ``exit_within`` seconds.
    """
    thread = _Call(what, call, release)
    thread.exit_within = exit_within
    with _lock:
        _running.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the program has ended: Python 3.12 starts no threads any more
        with _lock:
            _running.discard(thread)
        return None
    return thread


def keep_for_ever(value: object) -> None:
    """Keep an object for ever, so that its destructor, which may block, never runs, not even at interpreter exit."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _end_all() -> None:
    start = time.monotonic()
    with _lock:
        left = list(_running)
    for thread in left:
        thread.give_up()
    for thread in left:
        thread.ended(start + thread.exit_within - time.monotonic())


def _forget_in_child() -> None:
    """Forget all calls in a forked child, which has none of the threads."""
    global _lock
    _lock = threading.RLock()
    _running.clear()


lifecycle.at_end(lifecycle.End.CALLS, _end_all)
lifecycle.in_child(_forget_in_child)
