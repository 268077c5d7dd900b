"""Tensors in one piece of memory, so that many small ones are one collective, and back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

#: Bytes to which each tensor in a bucket is aligned: those of the largest element, complex128.
_ALIGNED: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """The place of one tensor in a bucket; `start` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a bucket holds, as it goes before it."""

    pieces: tuple[Piece, ...]
    nbytes: int


def packed(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[Header, torch.Tensor]]:
    """Yield buckets of `limit` bytes at most, or of one larger tensor, on `device`.

    A bucket is uint8[nbytes]. Raises TypeError for what is no dense tensor, ValueError for a name that comes twice.
    """
    waiting: list[tuple[Piece, torch.Tensor]] = []
    end, names = 0, set[str]()
    for name, tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"{name!r} is no dense tensor: give a tensor with memory of its own, such as full_tensor()")
        if name in names:
            raise ValueError(f"there are two tensors of the name {name!r}: give each name once")
        names.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        if waiting and end + nbytes > limit:
            yield _bucket(waiting, end, device)
            waiting, end = [], 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        waiting.append((Piece(name, tuple(tensor.shape), dtype, end, nbytes), tensor.detach()))
        end += -(-nbytes // _ALIGNED) * _ALIGNED
    if waiting:
        yield _bucket(waiting, end, device)


def _bucket(
    waiting: list[tuple[Piece, torch.Tensor]], nbytes: int, device: torch.device
) -> tuple[Header, torch.Tensor]:
    flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for piece, tensor in waiting:
        part = flat[piece.start : piece.start + piece.nbytes]
        part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return Header(tuple(piece for piece, _ in waiting), nbytes), flat


def unpacked(header: Header, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a bucket, which share its memory."""
    for piece in header.pieces:
        part = flat[piece.start : piece.start + piece.nbytes]
        yield piece.name, part.view(getattr(torch, piece.dtype)).view(piece.shape)


class Digest:
    """A hash of everything that was sent, which the sender and each receiver make of what they have in memory."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, header: Header, flat: torch.Tensor) -> None:
        """Add a bucket."""
        self._hash.update(repr(header).encode())
        self._hash.update(flat.cpu().numpy().data)

    def text(self) -> str:
        """Return the hash so far."""
        return self._hash.hexdigest()
