"""The caller's CUDA stream, seen from the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_LONGEST_PAUSE = 0.001  # seconds between two looks at an event


def queues(device: torch.device) -> bool:
    """Whether the host does not wait for what is queued there; asked once for each group."""
    return device.type == "cuda"


def drained(device: torch.device, end: float, called_off: Callable[[], bool] = lambda: False) -> bool:
    """Wait until all that the current stream of `device` has been given so far is done.

    False when `end` passes first, or `called_off()` says so. True at once for the CPU, which has none. Raises
    RuntimeError when CUDA itself is broken.
    """
    if device.type != "cuda":
        return True
    event = torch.cuda.current_stream(device).record_event()
    pause = 0.00002
    while not event.query():
        if time.monotonic() >= end or called_off():
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
