"""Backup and staging memory: one reused buffer per device, handed to one operation at a time.

A fresh buffer the size of a large tensor costs seconds of page faults (measured: a clone of 5e8 floats took 1.2 to 6.9
s, a copy into a reused buffer 0.2 s), so the largest one of each device is kept between operations.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()
#: A buffer that nobody uses, and the point in the stream of its last user from which on that is so; None on the CPU.
_idle: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event | None]] = {}

#: Elements of every dtype start on a multiple of this many bytes.
ALIGNMENT = 64


class Arena:
    """Memory of one operation, in bytes, taken from the pool of its device; give it back with `release`.

    On a GPU it is used in the order of the current stream, which must be the same when it is taken, used and given
    back; the next user may be on another. Raises MemoryError when the device has not enough.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        with _lock:
            buffer, free = _idle.pop(device, (None, None))
        try:
            if buffer is None or buffer.numel() < nbytes:
                buffer = None  # free it before asking for the larger one
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            elif free is not None:
                torch.cuda.current_stream(device).wait_event(free)  # of the GPU, not of this thread
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
        """Give the memory back; nothing may read or write the tensors taken from it any
        more, else it is not `reusable`.

        What the current stream still has ahead of it, such as copying a result out, may.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None or not reusable:
            return
        try:
            free = _end_of_use(buffer)
        except RuntimeError:  # CUDA itself is broken: whoever uses it next is told, this operation has ended
            return
        with _lock:
            kept = _idle.get(buffer.device)
            if kept is None or kept[0].numel() < buffer.numel():
                _idle[buffer.device] = buffer, free


def _end_of_use(buffer: torch.Tensor) -> torch.cuda.Event | None:
    """The point in the current stream after which nothing in it uses the buffer; None on the CPU."""
    if not buffer.is_cuda:
        return None
    stream = torch.cuda.current_stream(buffer.device)
    # Should it be freed, not used again: the allocator knows only of the stream on which it was allocated.
    buffer.record_stream(stream)
    event: torch.cuda.Event = stream.record_event()
    return event


def aligned(nbytes: int) -> int:
    """Bytes that one `take` of `nbytes` may use."""
    return nbytes + ALIGNMENT
