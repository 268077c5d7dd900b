"""The memory of tensors as plain bytes: views, arithmetic between them, and the memory of another process.

A collective writes here and not through tensors, so that autograd counts nothing and inference tensors can be written
outside of inference mode.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import ReduceOp

COMBINE: dict[ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""Reduce op -> the function of two tensors that it repeats."""

#: numpy adds these as torch does, with a tenth of torch's cost for a call, and never in several threads.
_BY_NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
#: Elements up to which torch computes in the calling thread (at::internal::GRAIN_SIZE): waking its other threads costs
#: more than they bring at the lengths used here, and far more on a machine whose cores are busy.
_ONE_THREAD = 32768


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. The tensor must be kept for as long as the view is used."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def address_of(view: memoryview) -> int:
    """Where the first byte of a writable, non-empty view lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses of this process, which must not overlap; in this thread, with the GIL released."""
    ctypes.memmove(target, source, nbytes)


class Arithmetic:
    """One reduce op on one dtype, on bytes: ``array`` makes an operand of a view, ``combine`` computes with them.

    Element by element and in the order of its arguments, so that equal inputs give equal bits on every host. Raises
    KeyError for a reduce op that is none of `COMBINE`.
    """

    def __init__(self, op: ReduceOp.RedOpType, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._torch = COMBINE[op]
        self._numpy: Any = {ReduceOp.SUM: np.add, ReduceOp.PRODUCT: np.multiply}.get(op)
        if dtype not in _BY_NUMPY:
            self._numpy = None

    @property
    def by_numpy(self) -> bool:
        """Whether operands may be arrays of numpy."""
        return self._numpy is not None

    def array(self, view: memoryview) -> Any:
        """An operand over the memory of a non-empty view; may be sliced by elements."""
        if self._numpy is not None:
            return np.frombuffer(view, dtype=_BY_NUMPY[self._dtype])
        with torch.inference_mode(False):
            return torch.frombuffer(view, dtype=self._dtype)

    def combine(self, left: Any, right: Any, out: Any) -> None:
        """``out[i] = left[i] op right[i]``, with ``out`` one of the others or memory apart from both."""
        self.combine_all(((left, right, out),))

    def combine_all(self, folds: Sequence[tuple[Any, Any, Any]]) -> None:
        """The same for each ``(left, right, out)``, one after the other."""
        if self._numpy is not None:
            with np.errstate(all="ignore"):  # entered once: it costs three times what adding few elements does
                for left, right, out in folds:
                    self._numpy(left, right, out)
            return
        for left, right, out in folds:
            for start in range(0, len(out), _ONE_THREAD):
                part = slice(start, start + _ONE_THREAD)
                self._torch(left[part], right[part], out=out[part])


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _find_reader() -> Any:
    reader = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if reader is not None:
        piece = ctypes.POINTER(_Piece)
        reader.argtypes = [ctypes.c_int, piece, ctypes.c_ulong, piece, ctypes.c_ulong, ctypes.c_ulong]
        reader.restype = ctypes.c_ssize_t
    return reader


_reader = _find_reader()
_read = 0  # bytes that this process has read from others


def bytes_read() -> int:
    """How much this process has read from the memory of others, in bytes: traffic that no socket shows."""
    return _read


def read_process(pid: int, address: int, view: memoryview) -> None:
    """Fill a writable, non-empty view from ``address`` on of another process of this host (Linux, process_vm_readv).

    Raises OSError: the kernel or a container does not permit it (EPERM), there is no such process (ESRCH), or nothing
    is mapped there any more (EFAULT).
    """
    global _read
    if _reader is None:
        raise OSError("this system cannot read the memory of another process")
    target, length, done = address_of(view), len(view), 0
    while done < length:
        here, there = _Piece(target + done, length - done), _Piece(address + done, length - done)
        count = _reader(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            error = ctypes.get_errno()
            raise OSError(error, f"reading {length} bytes of process {pid}: {os.strerror(error)}")
        done += count
    _read += length
