"""Backup and staging memory: one reused buffer per device, handed to one operation at a time.

A fresh buffer the size of a large tensor costs seconds of page faults (measured: a clone of 5e8 floats took 1.2 to 6.9 s, a
copy into a reused buffer 0.2 s), so the largest one of each device is kept between operations.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
_idle: dict[torch.device, torch.Tensor] = {}

#: Elements of every dtype start on a multiple of this many bytes.
ALIGNMENT = 64


class Arena:
    """Memory of one operation, in bytes, taken from the pool of its device; give it back with `release`.

    Raises MemoryError when the device has not enough.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with _lock:
            buffer = _idle.pop(device, None)
        if buffer is None or buffer.numel() < nbytes:
            buffer = None  # free it before asking for the larger one
            try:
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                raise MemoryError(f"no memory for a copy of {nbytes} bytes on {device}: {error}") from error
        self._buffer: torch.Tensor | None = buffer
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised one-dimensional tensor inside the arena."""
        assert self._buffer is not None
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        stop = start + numel * dtype.itemsize
        self._used = stop
        return self._buffer[start:stop].view(dtype)

    def release(self, reusable: bool = True) -> None:
        """Give the memory back; nothing may read or write the tensors taken from it any more, else it is not `reusable`."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or not reusable:
            return
        with _lock:
            kept = _idle.get(buffer.device)
            if kept is None or kept.numel() < buffer.numel():
                _idle[buffer.device] = buffer


def aligned(nbytes: int) -> int:
    """Bytes that one `take` of `nbytes` may use."""
    return nbytes + ALIGNMENT


def drop_idle() -> None:
    """Free the buffers that are kept for the next operation."""
    with _lock:
        _idle.clear()
