"""A few kilobytes of every rank to every rank in one exchange: votes, and small operations as a whole.

Each rank's slot reaches all ranks in ceil(log2 n) hops (the dissemination all-gather of Bruck et al., IEEE TPDS 8(11),
1997): in hop k a rank sends the 2**k slots it has to the rank 2**k before it, and receives as many from the one 2**k
behind. The caller's own thread does it, in slices that signals interrupt, on sockets that any thread may shut.

A slot begins with the vote of its rank and the length of what comes with it. Both are looked at in the first bytes of
every message, before any other is taken for more than noise: two ranks in different operations find out at once, and
do not need to expect the same number of bytes for it.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from .base import Agreement, TransportError
from .links import BLOCKS_FOR, NOW, Link, Links, await_events, distances
from .memory import Arithmetic, view_of

HEADER = 16  # bytes before the payload in a slot: vote and length
_HEADER = struct.Struct("=qq")
#: Bytes of all slots together. An exchange sends each rank's slot n - 1 times, a ring twice at most, but in 2(n - 1)
#: steps that wait for each other: measured on 2 cores, 2 to 8 ranks, the ring is ahead above about this.
_ALL_SLOTS = 256 << 10
_LARGEST_SLOT = 64 << 10
_FEW = 8  # ranks, up to which adding up their rows one by one costs less than copying them into one tensor first
_CACHED = 64  # layouts, and forms of payloads, that are kept: programs make the same few calls over and over


def slot_nbytes(size: int) -> int:
    """The longest slot in a group of ``size`` ranks, header included."""
    return max(HEADER, min(_LARGEST_SLOT, _ALL_SLOTS // size // HEADER * HEADER))


class Exchange(Agreement):
    """One exchange at a time; itself the `Agreement` of the one under way, valid until the next is started.

    An exchange that failed or was not waited for to its end leaves the streams in the middle of a message: the
    communicator ends with it.
    """

    def __init__(self, ranks: Sequence[int], links: Links, using: threading.Lock) -> None:
        self.payload_nbytes = slot_nbytes(len(ranks)) - HEADER
        self._ranks = tuple(ranks)
        self._index = links.index
        self._links = links
        self._using = using
        with torch.inference_mode(False):  # else later calls outside of that mode could not write into it
            self._memory = torch.zeros(len(ranks) * slot_nbytes(len(ranks)), dtype=torch.uint8, device="cpu")
        self._address = self._memory.data_ptr()
        self._whole = self._memory.numpy().data.cast("B")
        self._layouts: dict[int, list[tuple[Link, Link, memoryview, memoryview]]] = {}
        self._layout = self._laid_out(0)
        self._payloads: dict[tuple[torch.dtype, int], _Payloads] = {}
        self._into = list({id(hop[1]): hop[1] for hop in self._layout}.values())
        self._own = b""  # the header that all ranks have to send
        self._hop = len(self._layout)  # none is under way
        self._sent = self._received = 0
        self._agreed = True
        self._waited = False
        self._turns = links.turns

    def start(self, vote: int, payload: torch.Tensor | None) -> Exchange:
        """Send this rank's vote, and the memory of a contiguous CPU tensor of up to `payload_nbytes`.

        Raises TransportError when the exchange before this one was not complete, or was stopped.
        """
        if self._links.stopped or not self._complete or not self._agreed:
            why = "was stopped" if self._links.stopped else "has an exchange that did not complete"
            raise TransportError(f"the communicator {why}: build the next one")
        nbytes = 0 if payload is None else payload.numel() * payload.element_size()
        self._layout = self._laid_out(nbytes)
        self._own = _HEADER.pack(vote, nbytes)
        self._whole[:HEADER] = self._own
        if payload is not None and nbytes:
            ctypes.memmove(self._address + HEADER, payload.data_ptr(), nbytes)
        self._hop = self._sent = self._received = 0
        self._waited = False
        return self

    def wait(self, seconds: float) -> bool:
        if self._complete:
            return True
        mine = False
        try:
            mine = self._using.acquire(timeout=seconds)
            return mine and self._move(time.monotonic() + seconds)
        finally:
            if mine:
                self._using.release()

    def _move(self, end: float) -> bool:
        while self._hop < len(self._layout):
            out, into, outgoing, incoming = self._layout[self._hop]
            if self._turns.busy and not (self._sent or self._received) and end - time.monotonic() >= BLOCKS_FOR:
                self._hop_asleep(out, into, outgoing, incoming)
            self._turns.moved()
            while self._agreed and (self._received < len(incoming) or self._sent < len(outgoing)):
                sent = self._sent < len(outgoing) and self._send(out, outgoing)
                received = self._received < len(incoming) and self._receive(into, incoming)
                if sent or received:
                    self._turns.moved()
                    continue
                self._waited = True
                if time.monotonic() >= end or not self._await(out, into, outgoing, incoming, end):
                    return False
            if not self._agreed:
                self._hop = len(self._layout)
                return True
            self._hop += 1
            self._sent = self._received = 0
        if not self._waited:
            for link in self._into:
                self._check_open(link)
        return True

    def _hop_asleep(self, out: Link, into: Link, outgoing: memoryview, incoming: memoryview) -> None:
        """A whole hop, as a rule, in two system calls; what is left of it, errors too, is for the caller's loop."""
        self._turns.slept()
        try:
            self._sent = out.socket.send(outgoing, NOW)
            if self._sent == len(outgoing) and self._waited:
                self._received = into.socket.recv_into(incoming)
        except OSError:
            return
        if self._received >= HEADER and incoming[:HEADER] != self._own:
            self._agreed = False

    def _check_open(self, link: Link) -> None:
        """Raise TransportError if the peer has stopped since it sent its part.

        A rank that comes late finds the parts of all others, without waiting for one, and they may have failed the
        operation long ago. One that has ended in peace says so before it closes (`Links.close`).
        """
        try:
            if link.socket.recv(1, socket.MSG_PEEK | NOW):
                return
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broken(link, error) from None
        raise self._broken(link, ConnectionResetError("closed by the peer"))

    def _send(self, out: Link, outgoing: memoryview) -> bool:
        try:
            self._sent += out.socket.send(outgoing[self._sent :] if self._sent else outgoing, NOW)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._broken(out, error) from None
        return True

    def _receive(self, into: Link, incoming: memoryview, flags: int = NOW) -> bool:
        before = self._received
        try:
            count = into.socket.recv_into(incoming[before:] if before else incoming, 0, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._broken(into, error) from None
        if not count:
            raise self._broken(into, ConnectionResetError("closed by the peer"))
        self._received = before + count
        # What a rank passes on, it has compared before: who agrees with all that it hears from, agrees with all.
        if before < HEADER <= self._received and incoming[:HEADER] != self._own:
            self._agreed = False
        return True

    def _await(self, out: Link, into: Link, outgoing: memoryview, incoming: memoryview, end: float) -> bool:
        """Whether there may be something to do before `end`."""
        if self._sent == len(outgoing):
            if self._turns.give_way():
                return True
            if end - time.monotonic() >= BLOCKS_FOR:
                self._receive(into, incoming, 0)
                return True
        wants = []
        if self._received < len(incoming):
            wants.append((into.socket.fileno(), select.POLLIN))
        if self._sent < len(outgoing):
            wants.append((out.socket.fileno(), select.POLLOUT))
        if len(wants) == 2 and out is into:
            wants = [(out.socket.fileno(), select.POLLIN | select.POLLOUT)]
        return await_events(tuple(wants), end)

    @property
    def _complete(self) -> bool:
        return self._hop == len(self._layout)

    @property
    def agreed(self) -> bool:
        if not self._complete:
            raise RuntimeError("the vote is not over: call wait() until it returns True")
        return self._agreed

    def rows(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._payload(dtype, numel).rows()

    def reduced(self, dtype: torch.dtype, numel: int, op: ReduceOp.RedOpType) -> torch.Tensor:
        return self._payload(dtype, numel).reduced(op)

    def _laid_out(self, nbytes: int) -> list[tuple[Link, Link, memoryview, memoryview]]:
        """What each hop sends and receives, for a payload of so many bytes."""
        slot = HEADER + -(-nbytes // HEADER) * HEADER  # so that every dtype is aligned
        found = self._layouts.get(slot)
        if found is None:
            size, index = len(self._ranks), self._index
            found = []
            for distance in distances(size):
                count = min(distance, size - distance)
                outgoing = self._whole[: count * slot]
                incoming = self._whole[distance * slot : (distance + count) * slot]
                found.append(
                    (self._links[(index - distance) % size], self._links[(index + distance) % size], outgoing, incoming)
                )
            if len(self._layouts) >= _CACHED:
                self._layouts.clear()
            self._layouts[slot] = found
        return found

    def _payload(self, dtype: torch.dtype, numel: int) -> _Payloads:
        found = self._payloads.get((dtype, numel))
        if found is None:
            if len(self._payloads) >= _CACHED:
                self._payloads.clear()
            size, nbytes = len(self._ranks), numel * dtype.itemsize
            slot = HEADER + -(-nbytes // HEADER) * HEADER
            slots = self._memory[: size * slot].view(size, slot)[:, HEADER : HEADER + nbytes].view(dtype)
            found = self._payloads[dtype, numel] = _Payloads(slots, -self._index % size)
        return found

    def _broken(self, link: Link, error: OSError) -> TransportError:
        rank = self._ranks[link.peer]
        if self._links.stopped:
            return TransportError(f"stopped on this rank: {error}")
        return TransportError(f"the connection with rank {rank} broke: {error}", peer=rank)


class _Payloads:
    """The payloads of one dtype and length: ``slots`` as they lie, that of the first rank of the group at ``first``.

    All views are made once. They are combined by halves, the first half of the ranks each with one of the second:
    ceil(log2 n) calls instead of n - 1 where there are many (measured: 16 instead of 1,300 us for 1,000 ranks). Element
    by element, and in an order that only n decides, so with the same bits on every rank; a sum over a dimension would
    depend on each CPU's vectors.
    """

    __slots__ = ("_arithmetic", "_array_folds", "_arrays", "_folds", "_parts", "_rows", "_slots")

    def __init__(self, slots: torch.Tensor, first: int) -> None:
        self._parts = (slots[first:], slots[:first])
        with torch.inference_mode(False):  # else later calls outside of that mode could not write into it
            self._rows = rows = torch.empty(slots.shape, dtype=slots.dtype, device="cpu")
        # Few rows are combined where they lie: copying them into one tensor first costs more than the calls.
        self._slots = (*slots[first:], *slots[:first]) if 1 < len(slots) <= _FEW else ()
        self._arithmetic: dict[ReduceOp.RedOpType, tuple[Arithmetic, list[Any], list[Any]]] = {}
        self._arrays: list[tuple[Any, Any]] = []
        self._array_folds: list[tuple[Any, Any]] = []
        self._folds: list[tuple[torch.Tensor, torch.Tensor]] = []
        left = len(rows)
        while left > 1:
            half = (left + 1) // 2
            self._folds.append((rows[: left - half], rows[half:left]))
            left = half

    def rows(self) -> torch.Tensor:
        return torch.cat(self._parts, out=self._rows)

    def reduced(self, op: ReduceOp.RedOpType) -> torch.Tensor:
        if self._slots and len(self._rows[0]):
            return self._reduced_by_rows(op)
        arithmetic = Arithmetic(op, self._rows.dtype)
        if arithmetic.by_numpy:
            for part, rows in self._as_arrays():
                rows[...] = part
            folds = self._array_folds
        else:
            self.rows()
            folds = self._folds
        for low, high in folds:
            arithmetic.combine(low, high, low)
        return self._rows[0]

    def _as_arrays(self) -> list[tuple[Any, Any]]:
        """The slots with the rows that they are copied into; and the folds, made with the first call."""
        if not self._arrays:
            first = len(self._parts[0])
            halves = (self._rows[:first], self._rows[first:])
            self._arrays = [(part.numpy(), rows.numpy()) for part, rows in zip(self._parts, halves, strict=True)]
            self._array_folds = [(low.numpy(), high.numpy()) for low, high in self._folds]
        return self._arrays

    def _reduced_by_rows(self, op: ReduceOp.RedOpType) -> torch.Tensor:
        prepared = self._arithmetic.get(op)
        if prepared is None:
            arithmetic = Arithmetic(op, self._rows.dtype)
            slots = [arithmetic.array(view_of(slot)) for slot in self._slots]
            prepared = self._arithmetic[op] = (
                arithmetic,
                slots,
                [arithmetic.array(view_of(row)) for row in self._rows],
            )
        arithmetic, slots, rows = prepared
        left, found = len(slots), list(slots)
        while left > 1:
            half = (left + 1) // 2
            for row in range(left - half):
                arithmetic.combine(found[row], found[half + row], rows[row])
                found[row] = rows[row]
            left = half
        return self._rows[0]
