"""A few kilobytes of every rank to every rank in one exchange: votes, and small operations as a whole.

Each rank's slot reaches all ranks in ceil(log2 n) hops (the dissemination all-gather of Bruck et al., IEEE TPDS 8(11),
1997): in hop k a rank sends the 2**k slots it has to the rank 2**k before it, and receives as many from the one 2**k
behind. Where the ranks of one host are more than its cores, every hop costs somebody a turn on a core: there all send
theirs to the first rank, which hands all of them out (`Links.star`). The caller's own thread does it, in slices that
signals interrupt, on sockets that any thread may shut.

A slot begins with the vote of its rank and the length of what comes with it. Both are looked at in the first bytes of
every message, before any other is taken for more than noise: two ranks in different operations find out at once, and
do not need to expect the same number of bytes for it.
"""

from __future__ import annotations

import operator
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import ReduceOp

from ncclguard.transport import memory
from ncclguard.transport.base import Agreement, TransportError
from ncclguard.transport.links import BLOCKS_FOR, NOW, Link, Links, await_events, distances, wants_of
from ncclguard.transport.memory import Arithmetic, copy_bytes, view_of
from ncclguard_explain.language import tr

HEADER = 16  # bytes before the payload in a slot: vote and length
_HEADER = struct.Struct("=qq")
#: Bytes of all slots together. An exchange sends each rank's slot n - 1 times, a ring twice at most, but in 2(n - 1)
#: steps that wait for each other: measured on 2 cores, 2 to 8 ranks, the ring is ahead above about this.
_ALL_SLOTS = 256 << 10
_LARGEST_SLOT = 64 << 10
_FEW = 8  # ranks up to which adding their rows one by one costs less than copying them into one tensor first
#: dtypes that fit Python's numbers, and their native formats, in which a sum too large for a float32 becomes infinite.
_SCALARS = {torch.float32: "f", torch.float64: "d"}
_SCALAR_NBYTES = 32  # a payload of up to so many is added up as Python's numbers
_CACHED = 64  # cached layouts and combining functions: programs make the same few calls over and over


def slot_nbytes(size: int) -> int:
    """Return the longest slot in a group of ``size`` ranks, header included."""
    return max(HEADER, min(_LARGEST_SLOT, _ALL_SLOTS // size // HEADER * HEADER))


def _slot_of(nbytes: int) -> int:
    """Return the bytes of a slot with a payload of so many: whole headers, so that every dtype is aligned."""
    return HEADER + -(-nbytes // HEADER) * HEADER


#: The rank that a hop sends to, the rank that it receives from, and the memory of both.
_Hop = tuple["Link | None", "Link | None", memoryview, memoryview]


class Exchange(Agreement):
    """One exchange at a time; itself the `Agreement` of the one under way, valid until the next is started.

    An exchange that failed or was not waited for to its end leaves the streams in the middle of a message: the
    communicator ends with it.
    """

    def __init__(self, ranks: Sequence[int], links: Links) -> None:
        self.payload_nbytes = slot_nbytes(len(ranks)) - HEADER
        self._ranks = tuple(ranks)
        self._index = links.index
        self._links = links
        with torch.inference_mode(False):  # else later calls outside of that mode could not write into it
            self._memory = torch.zeros(len(ranks) * slot_nbytes(len(ranks)), dtype=torch.uint8, device="cpu")
        self._address = self._memory.data_ptr()
        self._whole = self._memory.numpy().data.cast("B")
        #: Places in the memory count from the first rank of the group in a star, else from this one.
        self._first = 0 if links.star else links.index
        self._layouts: dict[int, list[_Hop]] = {}
        self._layout = self._laid_out(0)
        self._folds: dict[tuple[int, torch.dtype, str], Callable[[], bytes]] = {}
        self._nbytes = 0  # length of the payload of the exchange under way
        self._own = b""  # the header that every rank has to send
        self._hop = len(self._layout)  # no exchange is under way
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
        self._layout, self._nbytes = self._laid_out(nbytes), nbytes
        self._own = _HEADER.pack(vote, nbytes)
        start = self._start_of(self._index)
        self._whole[start : start + HEADER] = self._own
        if payload is not None and nbytes:
            copy_bytes(self._address + start + HEADER, payload.data_ptr(), nbytes)
        self._hop = self._sent = self._received = 0
        self._waited = False
        return self

    def wait(self, seconds: float) -> bool:
        if self._complete:
            return True
        mine, end = False, time.monotonic() + seconds
        try:
            mine = self._links.using.acquire(timeout=seconds)
            return mine and self._move(end)
        finally:
            if mine:
                self._links.using.release()

    def _move(self, end: float) -> bool:
        while self._hop < len(self._layout):
            out, into, outgoing, incoming = self._layout[self._hop]
            if self._turns.busy and not (self._sent or self._received) and end - time.monotonic() >= BLOCKS_FOR:
                self._hop_asleep(out, into, outgoing, incoming)
            self._turns.moved()
            while self._agreed and (self._received < len(incoming) or self._sent < len(outgoing)):
                sent = out is not None and self._sent < len(outgoing) and self._send(out, outgoing)
                received = into is not None and self._received < len(incoming) and self._receive(into, incoming)
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
            for _, into, _, _ in self._layout:
                if into is not None:
                    self._check_open(into)
        return True

    def _hop_asleep(self, out: Link | None, into: Link | None, outgoing: memoryview, incoming: memoryview) -> None:
        """Do a whole hop in two system calls, as a rule; the caller's loop does the rest of it, errors too."""
        self._turns.slept()
        try:
            if out is not None:
                self._sent = out.socket.send(outgoing, NOW)
            if into is not None and self._sent == len(outgoing) and self._waited:
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
        raise self._broken(link, ConnectionResetError(tr("closed by the peer")))

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
            raise self._broken(into, ConnectionResetError(tr("closed by the peer")))
        self._received = before + count
        # A rank compares every slot before it passes it on, so a rank that agrees with its peers agrees with all ranks.
        if before < HEADER <= self._received and incoming[:HEADER] != self._own:
            self._agreed = False
        return True

    def _await(
        self, out: Link | None, into: Link | None, outgoing: memoryview, incoming: memoryview, end: float
    ) -> bool:
        """Return whether there may be something to do before `end`."""
        if into is not None and self._sent == len(outgoing):
            if self._turns.give_way():
                return True
            if end - time.monotonic() >= BLOCKS_FOR:
                self._receive(into, incoming, 0)
                return True
        wants = wants_of(into if self._received < len(incoming) else None, out if self._sent < len(outgoing) else None)
        return await_events(wants, end)

    @property
    def _complete(self) -> bool:
        return self._hop == len(self._layout)

    @property
    def agreed(self) -> bool:
        if not self._complete:
            raise RuntimeError("the vote is not over: call wait() until it returns True")
        return self._agreed

    def payload(self, index: int) -> bytes:
        start = self._start_of(index) + HEADER
        return self._whole[start : start + self._nbytes].tobytes()

    def _start_of(self, index: int) -> int:
        """Return the offset of a rank's slot, in the exchange under way."""
        return (index - self._first) % len(self._ranks) * _slot_of(self._nbytes)

    def reduced(self, dtype: torch.dtype, op: str) -> bytes:
        fold = self._folds.get((self._nbytes, dtype, op))
        if fold is None:
            if len(self._folds) >= _CACHED:
                self._folds.clear()
            fold = self._folds[self._nbytes, dtype, op] = self._fold_of(dtype, op)
        return fold()

    def _fold_of(self, dtype: torch.dtype, op: str) -> Callable[[], bytes]:
        """Return a function that combines payloads like those of the exchange under way."""
        size, nbytes, slot = len(self._ranks), self._nbytes, _slot_of(self._nbytes)
        if op == "SUM" and dtype in _SCALARS and size <= _FEW and 0 < nbytes <= _SCALAR_NBYTES:
            layout = struct.Struct(f"{nbytes // dtype.itemsize}{_SCALARS[dtype]}")
            return partial(_added, layout, self._whole, [self._start_of(index) + HEADER for index in range(size)])
        slots = self._memory[: size * slot].view(size, slot)[:, HEADER : HEADER + nbytes]
        return _Fold(slots, -self._first % size, dtype, op)

    def _laid_out(self, nbytes: int) -> list[_Hop]:
        """Return the layout of each hop's messages, for a payload of so many bytes."""
        slot = _slot_of(nbytes)
        found = self._layouts.get(slot)
        if found is None:
            if len(self._layouts) >= _CACHED:
                self._layouts.clear()
            found = self._layouts[slot] = self._through_first(slot) if self._links.star else self._disseminated(slot)
        return found

    def _disseminated(self, slot: int) -> list[_Hop]:
        size, index = len(self._ranks), self._index
        hops: list[_Hop] = []
        for distance in distances(size):
            count = min(distance, size - distance)
            outgoing, incoming = self._whole[: count * slot], self._whole[distance * slot : (distance + count) * slot]
            hops.append(
                (self._links[(index - distance) % size], self._links[(index + distance) % size], outgoing, incoming)
            )
        return hops

    def _through_first(self, slot: int) -> list[_Hop]:
        """Lay out an exchange through the first rank.

        All get the slots of all; in votes alone only the first rank's, which has found all others equal.
        """
        size, index, nothing = len(self._ranks), self._index, memoryview(b"")
        everything = self._whole[: size * slot if slot > HEADER else HEADER]
        if index:
            first = self._links[0]
            return [(first, first, self._whole[index * slot : (index + 1) * slot], everything)]
        peers = range(1, size)
        hops: list[_Hop] = [
            (None, self._links[peer], nothing, self._whole[peer * slot : (peer + 1) * slot]) for peer in peers
        ]
        return hops + [(self._links[peer], None, everything, nothing) for peer in peers]

    def _broken(self, link: Link, error: OSError) -> TransportError:
        rank = self._ranks[link.peer]
        if self._links.stopped:
            return TransportError(tr("stopped on this rank: {error}", error=error))
        return TransportError(tr("the connection with rank {rank} broke: {error}", rank=rank, error=error), peer=rank)


def _added(layout: struct.Struct, memory: memoryview, starts: Sequence[int]) -> bytes:
    """Return the sums of a few floating-point numbers of each rank, added in rank order and rounded once.

    By the interpreter, whose code is in the core's cache when a thread wakes up: numpy's is not, and takes 30 us for
    one element of 4 ranks on busy cores, this 5.
    """
    sums = layout.unpack_from(memory, starts[0])
    for start in starts[1:]:
        sums = tuple(map(operator.add, sums, layout.unpack_from(memory, start)))
    return layout.pack(*sums)


class _Fold:
    """Combines payloads of one length, dtype and reduce op: ``slots`` as they lie, the group's first rank at ``first``.

    All views are made once. They are combined by halves, the first half of the ranks each with one of the second:
    ceil(log2 n) calls instead of n - 1 where there are many (measured: 16 instead of 1,300 us for 1,000 ranks). Element
    by element, and in an order that only n decides, so with the same bits on every rank; a sum over a dimension would
    depend on each CPU's vectors.
    """

    __slots__ = ("_arithmetic", "_copies", "_folds", "_result")

    def __init__(self, slots: torch.Tensor, first: int, dtype: torch.dtype, op: str) -> None:
        dtype = dtype.to_real() if dtype.is_complex else dtype
        self._arithmetic = Arithmetic(memory.CPU.wire_op(getattr(ReduceOp, op), dtype), dtype)
        with torch.inference_mode(False):  # else later calls outside of that mode could not write into it
            slots = slots.view(dtype)
            table = torch.empty(slots.shape, dtype=dtype, device="cpu")
            by_numpy = self._arithmetic.by_numpy
            rows, *parts = ((each.numpy() if by_numpy else each) for each in (table, slots[first:], slots[:first]))
            self._result = view_of(table[0])
            #: The copies, as (to, from), and the combinations, as (left, right, into).
            self._copies: list[tuple[Any, Any]] = []
            self._folds: list[tuple[Any, Any, Any]] = []
            left = len(rows)
            if 1 < left <= _FEW:
                # A few ranks are combined in place: copying them into one table first costs more than the calls.
                found = [*parts[0], *parts[1]]
                while left > 1:
                    half = (left + 1) // 2
                    self._folds += [(found[row], found[half + row], rows[row]) for row in range(left - half)]
                    found[: left - half] = [rows[row] for row in range(left - half)]
                    left = half
                return
            self._copies = [(rows[: len(parts[0])], parts[0]), (rows[len(parts[0]) :], parts[1])]
            while left > 1:
                half = (left + 1) // 2
                self._folds.append((rows[: left - half], rows[half:left], rows[: left - half]))
                left = half

    def __call__(self) -> bytes:
        for rows, part in self._copies:
            rows[...] = part
        self._arithmetic.combine_all(self._folds)
        return self._result.tobytes()
