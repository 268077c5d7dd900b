"""Tensors on their way: large ones as they are, many small ones in one piece of memory, and a digest of all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

#: Bytes from which on a tensor goes by itself, without a copy.
LARGE: Final = 1 << 20
#: Bytes to which each of the others is aligned: those of the largest element, complex128.
_ALIGNED: Final = 16
#: Numbers of 64 bits in a row of a digest's table.
_ROW: Final = 4096
#: Rows whose sums are made together on CPUs: half a MiB, which the second sum finds in the processor's cache.
_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor; `start`: its place in bytes in what goes together, -1 where it goes by itself."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """The contents of a bucket, sent before it; `together`: bytes of the tensors that do not go by themselves."""

    pieces: tuple[Piece, ...]
    together: int


def device_of(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def bucketed(
    tensors: Iterable[tuple[str, torch.Tensor]], limit: int, device: torch.device
) -> Iterator[tuple[Header, list[torch.Tensor]]]:
    """Yield headers, and what is sent after each: uint8 tensors on `device`, of some `limit` bytes in all.

    Raises TypeError for what is no dense tensor, ValueError for a name that comes twice.
    """
    pieces: list[Piece] = []
    parts: list[torch.Tensor] = []
    names, total, together = set[str](), 0, 0
    for name, tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise TypeError(f"{name!r} is no dense tensor: give a tensor with memory of its own, such as full_tensor()")
        if name in names:
            raise ValueError(f"there are two tensors of the name {name!r}: give each name once")
        names.add(name)
        flat = tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
        flat = flat if _is_aligned(flat) else flat.clone()
        start = -1 if flat.numel() >= LARGE else together
        pieces.append(Piece(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), flat.numel(), start))
        parts.append(flat)
        total += flat.numel()
        together += 0 if start < 0 else -(-flat.numel() // _ALIGNED) * _ALIGNED
        if total >= limit:
            yield _bucket(pieces, parts, together, device)
            pieces, parts, total, together = [], [], 0, 0
    if pieces:
        yield _bucket(pieces, parts, together, device)


def _bucket(
    pieces: list[Piece], parts: list[torch.Tensor], together: int, device: torch.device
) -> tuple[Header, list[torch.Tensor]]:
    sent = [part for piece, part in zip(pieces, parts, strict=True) if piece.start < 0]
    if together:
        packed = torch.zeros(together, dtype=torch.uint8, device=device)
        for piece, part in zip(pieces, parts, strict=True):
            if piece.start >= 0:
                packed[piece.start : piece.start + piece.nbytes] = part
        sent.append(packed)
    return Header(tuple(pieces), together), sent


@dataclass(frozen=True, slots=True)
class Arriving:
    """Memory for a bucket: `parts` as they are sent, and the tensors, by name, that they are."""

    parts: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]


def arriving(header: Header, device: torch.device, into: Mapping[str, torch.Tensor]) -> Arriving:
    """Return memory for a bucket; a tensor `into` which one fits takes it, where that goes by itself."""
    packed = torch.empty(header.together, dtype=torch.uint8, device=device)
    parts, tensors = [], {}
    for piece in header.pieces:
        dtype = getattr(torch, piece.dtype)
        if piece.start >= 0:
            flat = packed[piece.start : piece.start + piece.nbytes]
        else:
            given = into.get(piece.name)
            fits = given is not None and (given.shape, given.dtype, given.device) == (piece.shape, dtype, device)
            flat = torch.empty(0, dtype=torch.uint8, device=device)
            if given is not None and fits and given.is_contiguous():
                flat = given.detach().reshape(-1).view(torch.uint8)
            if flat.numel() != piece.nbytes or not _is_aligned(flat):
                flat = torch.empty(piece.nbytes, dtype=torch.uint8, device=device)
            parts.append(flat)
        tensors[piece.name] = flat.view(dtype).view(piece.shape)
    return Arriving([*parts, packed] if header.together else parts, tensors)


def _is_aligned(flat: torch.Tensor) -> bool:
    """Return whether bytes can be read as numbers of 64 bits where they lie."""
    return flat.storage_offset() % 8 == 0 and flat.data_ptr() % 8 == 0


class Digest:
    """A hash of everything that was sent, which the sender and each receiver make of what they have in memory.

    It is one of the sums, modulo 2**64, of the rows and of the columns of the bytes as a table of numbers, which read
    at the speed of the memory: any change of one number changes it, and so does any other that is not made to cancel
    itself in both.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, header: Header, parts: Iterable[torch.Tensor]) -> None:
        """Add a bucket."""
        self._hash.update(repr(header).encode())
        for part in parts:
            whole = part.numel() // (8 * _ROW) * (8 * _ROW)
            if whole:
                for sums in _sums(part[:whole].view(torch.int64).view(-1, _ROW)):
                    self._hash.update(sums.cpu().numpy().data)
            self._hash.update(part[whole:].cpu().numpy().data)

    def text(self) -> str:
        return self._hash.hexdigest()


def _sums(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of the columns and those of the rows of a table."""
    if table.is_cuda:
        return table.sum(0), table.sum(1)
    columns, rows = torch.zeros_like(table[0]), table.new_empty(len(table))
    for part, sums in zip(torch.split(table, _ROWS), torch.split(rows, _ROWS), strict=True):
        columns += part.sum(0)
        torch.sum(part, 1, out=sums)
    return columns, rows
