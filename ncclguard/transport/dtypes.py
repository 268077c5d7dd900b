"""Which dtypes and reduce ops the backends carry, and in which form.

CPU tensors: the guard's own transport, torch does the arithmetic. "no" is refused before anything is sent.

======================================  ======================  ===============  ==============  =====================
dtype on the CPU                        SUM PRODUCT MIN MAX     BAND BOR BXOR    AVG             broadcast, all_gather
======================================  ======================  ===============  ==============  =====================
float16 bfloat16 float32 float64        yes                     no               SUM and divide  yes
int8 uint8 int16 int32 int64            yes                     yes              no              yes
bool                                    SUM any, PRODUCT all    yes              no              yes
complex32 complex64 complex128          SUM only, as real       no               SUM and divide  yes
uint16 uint32 uint64 float8_*           no (torch adds none)    no               no              as bytes
quantized                               no                      no               no              no
======================================  ======================  ===============  ==============  =====================

NCCL (from the sources of ProcessGroupNCCL; run on an emulated GPU): the same without int16, BAND, BOR and BXOR, and AVG
is NCCL's own, which divides before it adds: the sum of two float16 of 40,000 is infinite, their average is not.
PREMUL_SUM is refused on both: a scaled tensor and SUM do the same.

A bool is summed with MAX: True where any rank has it. gloo's SUM counts in the byte, so that torch leaves 2 in a bool
tensor of two ranks, and with 256 ranks 0, which is False.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch.distributed import ReduceOp

from ncclguard import torch_compat
from ncclguard.transport.base import Kind, Reduction

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
    """What one backend can reduce. ``wire_ops``: the reduce ops that it is told to carry out itself; ``dtypes``: on
    what, besides complex numbers.
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
                raise TypeError(f"{kind} does not take quantized tensors ({dtype}): send int_repr() and the scale")
            return
        name = torch_compat.reduce_op_name(op)
        wire = reduction(name, self.device_type).wire
        if wire not in self.wire_ops:
            raise ValueError(f"{self.backend} does not have {name}: move the tensor to the CPU for it")
        if dtype not in self.dtypes and dtype not in _COMPLEX:
            raise TypeError(
                f"{self.backend} cannot reduce {dtype}: convert it, for example to torch.int32 or torch.float32"
            )
        if dtype in _COMPLEX and name not in ("SUM", "AVG"):
            raise ValueError(
                f"{name} has no meaning for complex numbers ({dtype}): use SUM or AVG, or view_as_real(tensor)"
            )
        if name in _BITWISE and dtype not in _CPU_INTEGERS:
            raise ValueError(f"{name} needs an integer or bool tensor, not {dtype}")
        if name == "AVG" and dtype in _CPU_INTEGERS:
            raise ValueError(
                f"AVG of {dtype} is not a whole number: use SUM and divide, or convert to torch.float32 first"
            )

    def wire_op(self, op: ReduceOp.RedOpType, dtype: torch.dtype) -> ReduceOp.RedOpType:
        """What the backend is told to do for ``op``, one of ``wire_ops``, on this dtype.
        Raises ValueError for any other op.
        """
        if op not in self.wire_ops:
            name = torch_compat.reduce_op_name(op)
            raise ValueError(f"{name} is not sent by {self.backend} as it is: use the wire of reduction()")
        return _OF_BOOL.get(op, op) if dtype is torch.bool else op


@lru_cache(maxsize=64)
def reduction(name: str, device_type: str = "cpu") -> Reduction:
    """How the reduce op of this name is carried out: on the CPU AVG as SUM, divided at the end; others as they are.

    Raises ValueError for PREMUL_SUM, which no backend is asked for.
    """
    if name == "AVG" and device_type == "cpu":
        return Reduction("SUM", ReduceOp.SUM, average=True)
    if name == "PREMUL_SUM":
        raise ValueError("PREMUL_SUM is not supported by the guard: scale the tensor and use SUM")
    return Reduction(name, cast("ReduceOp.RedOpType", getattr(ReduceOp, name)))


_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
CPU = Support(
    "the CPU transport", "cpu", (*_ARITHMETIC, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR), _FLOATS | _CPU_INTEGERS
)
NCCL = Support("NCCL", "cuda", (*_ARITHMETIC, ReduceOp.AVG), _NATIVE)


def reducible_view(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """The same memory in the form that is reduced: complex numbers as pairs of real
    ones. Raises ValueError if not possible.
    """
    _check_memory(tensor, device_type)
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def movable_view(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """The same memory in a form that is copied: bytes, for what there is no type of.
    Raises ValueError if not possible.
    """
    _check_memory(tensor, device_type)
    return tensor if tensor.dtype in _NATIVE else tensor.reshape(-1).view(torch.uint8)


def _check_memory(tensor: torch.Tensor, device_type: str) -> None:
    if tensor.device.type != device_type or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"the transport takes contiguous {device_type} tensors without a pending conjugation: pass a contiguous copy"
        )
