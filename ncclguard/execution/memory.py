"""Reading and writing the memory of tensors without torch in between."""

from __future__ import annotations

import contextlib
import ctypes
from contextlib import AbstractContextManager

import torch


def copied(flat: torch.Tensor) -> bytes:
    """The memory of a contiguous tensor; on every small call's path, where a `clone` costs ten times as much."""
    host = flat.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()) if host.numel() else b""


def put(data: bytes, flat: torch.Tensor) -> None:
    """The reverse of `copied`, for memory on the CPU."""
    ctypes.memmove(flat.data_ptr(), data, len(data))


def writable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Where a detached view of `tensor` may be written in place: inference tensors only in inference mode."""
    return torch.inference_mode() if tensor.is_inference() else _ANYWHERE


_ANYWHERE = contextlib.nullcontext()
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is its elements, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
