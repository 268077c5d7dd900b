"""Captures of CUDA graphs that other threads of the program have begun, and what a thread of the library may do then.

`torch.cuda.graph` captures in the mode "global", in which a "potentially unsafe" call of any thread, such as asking an
event or freeing memory, breaks the capture (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode). Measured on an H200
with torch 2.11 and NCCL 2.28.9: asking an event in a thread breaks it, and in one of mode "thread local" does not; an
abort of an NCCL communicator breaks it whatever the mode of the thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

_THREAD_LOCAL: Final = 1  # cudaStreamCaptureModeThreadLocal

_of_thread = threading.local()


def leave_captures_alone() -> None:
    """Have the CUDA calls of this thread, from now on, break no capture that another thread has begun.

    Nothing where CUDA is not in use yet, whose first call would begin it, or where the CUDA runtime is not to be found.
    """
    if getattr(_of_thread, "alone", False) or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    exchange = _exchange()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
    _of_thread.alone = True


@functools.cache
def _exchange() -> Callable[[Any], int] | None:
    """Return CUDA's function of the library that torch has loaded; ROCm's has no name of its own in torch."""
    if torch.version.cuda is None:
        return None
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
        found: Callable[[Any], int] = runtime.cudaThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return found


class Captures:
    """Streams of captures in which the program has issued a collective, for who is about to break them."""

    def __init__(self) -> None:
        self._streams: dict[int, torch.cuda.Stream] = {}

    def note(self) -> bool:
        """Note the current stream if it captures, and return whether it does; in the thread that issues."""
        if not torch.cuda.is_current_stream_capturing():
            return False
        stream = torch.cuda.current_stream()
        self._streams[stream.cuda_stream] = stream
        return True

    def wait(self, seconds: float) -> None:
        """Wait until these captures have ended, or until so many seconds have passed."""
        end = time.monotonic() + seconds
        for number, stream in [*self._streams.items()]:
            while _captures(stream) and time.monotonic() < end:
                time.sleep(0.01)
            self._streams.pop(number, None)


def _captures(stream: torch.cuda.Stream) -> bool:
    try:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # an error of the device, or of the capture
        return False
