"""The memory of tensors as plain bytes: which dtypes and operations, views, arithmetic, memory of another process.

The stream that a tensor is filled on, and buffers that are kept for the next call, are here too.

A collective writes here and not through tensors, so that autograd counts nothing and inference tensors can be written
outside of inference mode.

CPU tensors: the guard's own transport, torch does the arithmetic. "no" is refused before anything is sent.

======================================  ======================  ===============  ==============  =====================
dtype on the CPU                        SUM PRODUCT MIN MAX     BAND BOR BXOR    AVG             broadcast, all_gather
======================================  ======================  ===============  ==============  =====================
float16 bfloat16 float32 float64        yes                     no               SUM and divide  yes
int8 uint8 int16 int32 int64            yes                     yes              no (*)          yes
bool                                    SUM any, PRODUCT all    yes              no              yes
complex32 complex64 complex128          SUM only, as real       no               SUM and divide  yes
uint16 uint32 uint64 float8_*           no (torch adds none)    no               no              as bytes
quantized                               no                      no               no              no
======================================  ======================  ===============  ==============  =====================

NCCL (from the sources of ProcessGroupNCCL; run on an emulated GPU): the same without int16, BAND, BOR and BXOR, and AVG
is NCCL's own, which divides before it adds: the sum of two float16 of 40,000 is infinite, their average is not.
(*) The process groups take it, and round towards zero as NCCL does.
PREMUL_SUM is refused on both: a scaled tensor and SUM do the same.

A bool is summed with MAX: True where any rank has it. gloo's SUM counts in the byte, so that torch leaves 2 in a bool
tensor of two ranks, and with 256 ranks 0, which is False.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch.distributed import ReduceOp

from ncclguard import torch_compat
from ncclguard.transport.base import Kind, Reduction
from ncclguard_explain.language import told

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_NATIVE = _FLOATS | _INTEGERS
_CPU_INTEGERS = _INTEGERS | {torch.int16}
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})

_OF_BOOL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
_BITWISE = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True, slots=True)
class Support:
    """The reductions that one backend can carry out.

    ``wire_ops``: the reduce ops that it is asked for itself; ``dtypes``: those it can reduce, besides complex numbers.
    """

    backend: str
    device_type: str
    wire_ops: tuple[ReduceOp.RedOpType, ...]
    dtypes: frozenset[torch.dtype]

    def check(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        """Raise TypeError for a dtype and ValueError for a reduce op that cannot be carried, saying what can.

        ``op`` is looked at for ``all_reduce`` and ``reduce_scatter`` only. Raises TypeError if it is no reduce op at
        all.

        >>> import torch
        >>> from torch.distributed import ReduceOp
        >>> CPU.check("all_reduce", torch.float32, ReduceOp.AVG)
        """
        if kind in ("broadcast", "all_gather"):
            if dtype in _QUANTIZED:
                text = told(
                    "{name} does not take quantized tensors ({dtype}): send int_repr() and the scale",
                    name=kind,
                    dtype=dtype,
                )
                raise TypeError(text)
            return
        name = torch_compat.reduce_op_name(op)
        wire = reduction(name, self.device_type).wire
        if wire not in self.wire_ops:
            text = told(
                "{backend} does not have {name}: move the tensor to the CPU for it", backend=self.backend, name=name
            )
            raise ValueError(text)
        if dtype not in self.dtypes and dtype not in _COMPLEX:
            text = told(
                "{backend} cannot reduce {dtype}: convert it, for example to torch.int32 or torch.float32",
                backend=self.backend,
                dtype=dtype,
            )
            raise TypeError(text)
        if dtype in _COMPLEX and name not in ("SUM", "AVG"):
            text = told(
                "{name} has no meaning for complex numbers ({dtype}): use SUM or AVG, or view_as_real(tensor)",
                name=name,
                dtype=dtype,
            )
            raise ValueError(text)
        if name in _BITWISE and dtype not in _CPU_INTEGERS:
            raise ValueError(told("{name} needs an integer or bool tensor, not {dtype}", name=name, dtype=dtype))
        if name == "AVG" and dtype in _CPU_INTEGERS:
            text = told(
                "AVG of {dtype} is not a whole number: use SUM and divide, or convert to torch.float32 first",
                dtype=dtype,
            )
            raise ValueError(text)

    def wire_op(self, op: ReduceOp.RedOpType, dtype: torch.dtype) -> ReduceOp.RedOpType:
        """Return the reduce op carried out for ``op`` on this dtype, one of ``wire_ops``; ValueError for any other."""
        if op not in self.wire_ops:
            name = torch_compat.reduce_op_name(op)
            raise ValueError(f"{name} is not sent by {self.backend} as it is: use the wire of reduction()")
        return _OF_BOOL.get(op, op) if dtype is torch.bool else op


@lru_cache(maxsize=64)
def reduction(name: str, device_type: str = "cpu") -> Reduction:
    """Return how the reduce op of this name is carried out: on the CPU AVG as SUM, divided at the end; others as is.

    Raises ValueError for PREMUL_SUM, which no backend is asked for.
    """
    if name == "AVG" and device_type == "cpu":
        return Reduction("SUM", ReduceOp.SUM, average=True)
    if name == "PREMUL_SUM":
        raise ValueError(told("PREMUL_SUM is not supported by the guard: scale the tensor and use SUM"))
    return Reduction(name, cast("ReduceOp.RedOpType", getattr(ReduceOp, name)))


_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
CPU = Support(
    "the CPU transport", "cpu", (*_ARITHMETIC, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR), _FLOATS | _CPU_INTEGERS
)
NCCL = Support("NCCL", "cuda", (*_ARITHMETIC, ReduceOp.AVG), _NATIVE)


def reducible_view(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return the memory as it is reduced: complex numbers as pairs of real ones. Raises ValueError where it cannot."""
    _check_memory(tensor, device_type)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def movable_view(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """Return the memory as it is copied: bytes, where the transport lacks the dtype. ValueError where it cannot."""
    _check_memory(tensor, device_type)
    return tensor if tensor.dtype in _NATIVE else tensor.reshape(-1).view(torch.uint8)


def _check_memory(tensor: torch.Tensor, device_type: str) -> None:
    if tensor.device.type != device_type or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"the transport takes contiguous {device_type} tensors without a pending conjugation: pass a contiguous copy"
        )


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
    """Return the bytes of a contiguous CPU tensor, writable; keep the tensor for as long as the view is used."""
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable, non-empty view."""
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
        """Return whether operands may be arrays of numpy."""
        return self._numpy is not None

    def array(self, view: memoryview) -> Any:
        """Return an operand over the memory of a non-empty view; may be sliced by elements."""
        if self._numpy is not None:
            return np.frombuffer(view, dtype=_BY_NUMPY[self._dtype])
        with torch.inference_mode(False):
            return torch.frombuffer(view, dtype=self._dtype)

    def combine(self, left: Any, right: Any, out: Any) -> None:
        """``out[i] = left[i] op right[i]``, with ``out`` one of the others or memory apart from both."""
        self.combine_all(((left, right, out),))

    def combine_all(self, folds: Sequence[tuple[Any, Any, Any]]) -> None:
        """Combine each ``(left, right, out)``, one after the other, as `combine` does."""
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
    """Return how many bytes this process has read from the memory of others: traffic that no socket shows."""
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


_ANYWHERE = contextlib.nullcontext()


def writable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return the context in which a detached view of `tensor` may be written: inference tensors need inference mode."""
    return torch.inference_mode() if tensor.is_inference() else _ANYWHERE


def copied(flat: torch.Tensor) -> bytes:
    """Return the memory of a contiguous tensor; every small call does it, and a `clone` costs ten times as much."""
    host = flat.cpu() if flat.is_cuda else flat
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def put(data: bytes, flat: torch.Tensor) -> None:
    """Copy the bytes of `copied` back into the memory of a CPU tensor."""
    ctypes.memmove(flat.data_ptr(), data, len(data))


def tensor_of(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a result of `copied` as a one-dimensional tensor with memory of its own."""
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)


NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def plain(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a byte may belong to both: by the ranges of addresses that they span."""
    if one.device != other.device or not one.numel() or not other.numel():
        return False
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's end: torch has no negative strides, so the last element is the furthest."""
    furthest = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (furthest + 1) * tensor.element_size()


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements one after the other, without dimensions: a view where memory permits it, else a copy.

    `contiguous()` is not enough: it leaves a conjugation or a negation pending, and what reads the memory would miss
    it.
    """
    return flattened(tensor if plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous())


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without dimensions of a tensor whose elements are one after the other in memory."""
    return tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().view(-1)


_lock = threading.Lock()
#: A free buffer, and the point in the stream of its last user from which on it is free; None on the CPU.
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
                torch.cuda.current_stream(device).wait_event(free)  # the GPU waits, and not this thread
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
        """Give the memory back to the pool, if it is `reusable`.

        It is not if anything may still read or write the tensors taken from it.

        Work that the current stream has queued already, such as copying a result out, does not count.
        """
        buffer, self._buffer = self._buffer, None
        if buffer is None or not reusable:
            return
        try:
            free = _end_of_use(buffer)
        except RuntimeError:  # CUDA itself is broken: its next user gets the error, as this operation has ended
            return
        with _lock:
            kept = _idle.get(buffer.device)
            if kept is None or kept[0].numel() < buffer.numel():
                _idle[buffer.device] = buffer, free


def _end_of_use(buffer: torch.Tensor) -> torch.cuda.Event | None:
    """Return the point in the current stream after which nothing in it uses the buffer; None on the CPU."""
    if not buffer.is_cuda:
        return None
    stream = torch.cuda.current_stream(buffer.device)
    # In case it is freed and not used again: the allocator knows only the stream on which it was allocated.
    buffer.record_stream(stream)
    event: torch.cuda.Event = stream.record_event()
    return event


def aligned(nbytes: int) -> int:
    """Return how many bytes one `take` of `nbytes` may use."""
    return nbytes + ALIGNMENT


_LONGEST_PAUSE = 0.001  # seconds between two queries of an event


def queues(device: torch.device) -> bool:
    """Return whether work on the device is queued and the host does not wait for it; asked once for each group."""
    return device.type == "cuda"


def drained(device: torch.device, end: float, called_off: Callable[[], bool] = lambda: False) -> bool:
    """Wait until the current stream of `device` has done all its work so far.

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
