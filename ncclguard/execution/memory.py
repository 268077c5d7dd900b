"""Reading and writing the memory of tensors without torch in between."""

from __future__ import annotations

import ctypes

import torch


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
