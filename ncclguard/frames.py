"""The Python frames of other threads, read while those go on.

In CPython 3.11 a frame of a running function becomes an object when somebody asks for it (`frame.f_back`, and the
dictionary behind `frame.f_locals`), and making one may begin a garbage collection in the midst of it. What that
destroys may let another thread run, whose function returns meanwhile: the interpreter then writes into memory that is
another's, and the process ends with SIGSEGV. The collector is held off here; from 3.12 on it begins between two
instructions only.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

_COLLECTS_WITHIN: Final = sys.version_info[:2] == (3, 11)

# A reader that has the collector switched on again must not do so beneath another one, nor a fork come between.
_lock = threading.RLock()


def thread_frames(thread: int) -> list[FrameType]:
    """Return the frames of a thread, by its ident, innermost first; nothing of one that has ended.

    >>> thread_frames(threading.get_ident())[0].f_code.co_name
    'thread_frames'
    """
    with _uncollected():
        return frames_from(sys._current_frames().get(thread))


def frames_of_threads() -> dict[int, list[FrameType]]:
    """Return the frames of all threads by ident, each innermost first."""
    with _uncollected():
        return {thread: frames_from(innermost) for thread, innermost in sys._current_frames().items()}


def local_of(frame: FrameType, name: str, default: Any = None) -> Any:
    """Return a local variable of a frame of any thread, or ``default`` where it has none of that name."""
    with _uncollected():
        return frame.f_locals.get(name, default)


def hold() -> None:
    """Wait until no thread reads, and let none begin before `let_go`: `lifecycle` does so around a fork."""
    _lock.acquire()


def let_go() -> None:
    """Let threads read again, in the process that forked and in the forked one."""
    _lock.release()


def frames_from(frame: FrameType | None) -> list[FrameType]:
    """Return a frame of the caller's own thread, which cannot return meanwhile, and all that it was called from."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    if not _COLLECTS_WITHIN:
        yield
        return
    with _lock:
        collects = gc.isenabled()
        try:
            if collects:
                gc.disable()
            yield
        finally:
            if collects:
                gc.enable()
