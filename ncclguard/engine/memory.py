"""The memory of callers' tensors as bytes, the stream it is filled on, and buffers that are kept for the next call."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

_ANYWHERE = contextlib.nullcontext()


def writable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Where a detached view of `tensor` may be written in place: inference tensors only in inference mode."""
    return torch.inference_mode() if tensor.is_inference() else _ANYWHERE


def copied(flat: torch.Tensor) -> bytes:
    """The memory of a contiguous tensor; on every small call's path, where a `clone` costs ten times as much."""
    host = flat.cpu() if flat.is_cuda else flat
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def put(data: bytes, flat: torch.Tensor) -> None:
    """The reverse of `copied`, for memory on the CPU."""
    ctypes.memmove(flat.data_ptr(), data, len(data))


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """What `copied` has returned, as a one-dimensional tensor with memory of its own."""
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a byte may belong to both: by the ranges of addresses that they span."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    """torch has no negative strides, so the last element is the furthest."""
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (furthest + 1) * tensor.element_size()


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """The elements one after the other, without dimensions: a view where the memory is that already, else a copy.

    `contiguous()` is not enough: it leaves a conjugation or a negation pending, and what reads the memory would miss
    it.
    """
    return flattened(tensor if plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous())


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """A view without dimensions of a tensor whose elements are one after the other in memory."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


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
