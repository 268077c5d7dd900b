"""Large tensors: rings and chains of segments between the ranks, and pairs of ranks one after the other.

Every operation is a generator of steps in the caller's thread: one stream of bytes out, one in, both at once, and the
arithmetic in between, while what has just come is still in the core's cache. All ranks cut a tensor in the same way and
send in the same order, so nothing on the wire says what comes next but the mark at the beginning of each stream: the
fingerprint of the operation, which the receiver compares before it lets a byte into the caller's memory.

Where a link allows it (`Link.is_read`), and the operation has a closing round, the stream holds addresses instead of
the bytes, and the receiver copies them from this process's memory. What is sent in this form stays as it is until the
receiver says that it has read all, with one byte at the end of the operation. A rank that has failed meanwhile, and
whose memory is somebody else's by then, does not come to the closing round: what was read there is never a result.

The ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009). Each element is summed along one path, from one rank to the next, and its sum is handed on
from there: the order depends on the number of ranks alone, and all ranks get the same bits.
"""

from __future__ import annotations

import errno
import select
import struct
import time
from collections.abc import Iterable, Iterator, Sequence

from ncclguard.transport.base import Save
from ncclguard.transport.links import NOW, Address, Link, LinkError, Links, Steps, wants_of
from ncclguard.transport.memory import Arithmetic, address_of, copy_bytes, read_process

#: Bytes of one segment: long enough that handling it costs little beside moving it, short enough that it is still in
#: the second-level cache when it is added up and passed on. Measured on 2 cores with 2 and 4 ranks, 128 KiB to 1 MiB.
SEGMENT = 256 << 10
_MARK = struct.Struct("=q")
_POINTER = struct.Struct("=Q")
_CLOCK_EVERY = 16  # segments between two readings of the clock


class Mismatch(Exception):
    """The rank at ``peer`` of the group is in another operation."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


class Ring:
    """The operations of one rank in one generation, one at a time, see `Communicator` for what each one does.

    ``mark`` is what each stream of the operation under way begins with. ``met`` is when it was known that all ranks are
    in it (time.monotonic()), 0.0 before. ``direct``: whether memory may be read where a link allows it, see
    `Communicator.closes`. All three are set by whoever moves it.
    """

    def __init__(self, links: Links) -> None:
        self.mark = 0
        self.direct = False
        self.met = 0.0
        self._links = links
        self._size = links.size
        self._index = links.index
        self._next = (links.index + 1) % links.size
        self._previous = (links.index - 1) % links.size
        self._scratch = memoryview(bytearray(SEGMENT))
        self._announced = False  # whether all ranks know all addresses

    # --- the operations ---------------------------------------------------------------------------------------------

    def all_reduce(self, data: memoryview, itemsize: int, arithmetic: Arithmetic, save: Save) -> Steps:
        size, index = self._size, self._index
        if size == 1:
            return
        rounds = size - 1
        cut = _Cut(len(data) // itemsize, size, itemsize)
        whole, scratch = arithmetic.array(data), arithmetic.array(self._scratch)
        arrived = [0] * cut.blocks  # steps of each block that have come

        def receives() -> Iterator[tuple[memoryview, bool]]:
            for block, step in _order(cut.blocks, 2 * rounds):
                chunk = (index - step - 1 if step < rounds else index - step + rounds) % size
                start, stop = cut.part(block, chunk)
                if start == stop:
                    continue
                first, last = start * itemsize, stop * itemsize
                if step < rounds:
                    yield self._scratch[: last - first], True
                    save(first, last)
                    arithmetic.combine(whole[start:stop], scratch[: stop - start], whole[start:stop])
                else:
                    if step == rounds:  # this rank's own chunk, which was only read until now
                        save(first, last)
                    yield data[first:last], True
                arrived[block] = step + 1
                if step == rounds - 1:  # now it is the sum over all ranks
                    self.met = self.met or time.monotonic()

        def sends() -> Iterator[tuple[memoryview, bool] | None]:
            for block, step in _order(cut.blocks, 2 * rounds):
                start, stop = cut.part(block, (index - step if step < rounds else index - step + rounds + 1) % size)
                while start < stop and arrived[block] < step:
                    yield None
                if start < stop:
                    yield data[start * itemsize : stop * itemsize], True

        yield from self._flow(self._links[self._next], sends(), self._links[self._previous], receives())

    def reduce_scatter(
        self, output: memoryview, inputs: Sequence[memoryview], itemsize: int, arithmetic: Arithmetic
    ) -> Steps:
        size, index = self._size, self._index
        if size == 1:
            _copy(output, inputs[0])
            return
        last_step = size - 2
        segments = _segments(len(output), itemsize)
        scratch, result = arithmetic.array(self._scratch), arithmetic.array(output)
        own = [arithmetic.array(view) for view in inputs]
        free: list[memoryview] = []
        held: dict[tuple[int, int], memoryview] = {}  # sums that are to be passed on

        def receives() -> Iterator[tuple[memoryview, bool]]:
            for number, step in _order(len(segments), size - 1):
                first, last = segments[number]
                start, stop = first // itemsize, last // itemsize
                mine = own[(index - step - 2) % size][start:stop]
                yield self._scratch[: last - first], step == 0
                if step == last_step:
                    arithmetic.combine(mine, scratch[: stop - start], result[start:stop])
                    self.met = self.met or time.monotonic()
                else:
                    room = free.pop() if free else memoryview(bytearray(SEGMENT))
                    arithmetic.combine(mine, scratch[: stop - start], arithmetic.array(room)[: stop - start])
                    held[number, step] = room

        def sends() -> Iterator[tuple[memoryview, bool] | None]:
            for number, step in _order(len(segments), size - 1):
                first, last = segments[number]
                if not step:
                    yield inputs[(index - 1) % size][first:last], True
                    continue
                while (number, step - 1) not in held:
                    yield None
                room = held.pop((number, step - 1))
                yield room[: last - first], False  # through the socket, because the memory is used again
                free.append(room)

        yield from self._flow(self._links[self._next], sends(), self._links[self._previous], receives())

    def all_gather(self, parts: Sequence[memoryview], own: memoryview) -> Steps:
        """Gather every rank's ``own`` bytes on all; ``parts[index]`` may be the same memory, and lengths may differ."""
        size, index = self._size, self._index
        _copy(parts[index], own)
        if size == 1:
            return
        cut = [_segments(len(part), 1) for part in parts]
        longest = max(map(len, cut))
        arrived: set[tuple[int, int]] = set()

        def receives() -> Iterator[tuple[memoryview, bool]]:
            for number, step in _order(longest, size - 1):
                chunk = (index - step - 1) % size
                if number < len(cut[chunk]):
                    first, last = cut[chunk][number]
                    yield parts[chunk][first:last], True
                    arrived.add((number, step))

        def sends() -> Iterator[tuple[memoryview, bool] | None]:
            for number, step in _order(longest, size - 1):
                chunk = (index - step) % size
                if number < len(cut[chunk]):
                    while step and (number, step - 1) not in arrived:
                        yield None
                    arrived.discard((number, step - 1))
                    first, last = cut[chunk][number]
                    yield parts[chunk][first:last], True

        yield from self._flow(self._links[self._next], sends(), self._links[self._previous], receives())
        self.met = time.monotonic()

    def broadcast(self, data: memoryview, source: int, save: Save) -> Steps:
        """Broadcast along a chain.

        A rank that has completed it knows that all after it have, so that none runs far ahead.
        """

        def receives() -> Iterator[tuple[memoryview, bool]]:
            for first, last in _segments(len(data), 1):
                save(first, last)
                yield data[first:last], True

        yield from self._chain(data, 1, (self._index - source) % self._size, receives())

    def reduce(self, data: memoryview, itemsize: int, arithmetic: Arithmetic, root: int) -> Steps:
        """Reduce along a chain that ends at ``root``, whose ``data`` is the result; the others' ``data`` is used up."""
        whole, scratch = arithmetic.array(data), arithmetic.array(self._scratch)

        def receives() -> Iterator[tuple[memoryview, bool]]:
            for first, last in _segments(len(data), itemsize):
                yield self._scratch[: last - first], True
                mine = whole[first // itemsize : last // itemsize]
                arithmetic.combine(mine, scratch[: len(mine)], mine)

        yield from self._chain(data, itemsize, (self._index - root - 1) % self._size, receives())

    def _chain(self, data: memoryview, itemsize: int, place: int, receives: Iterator[tuple[memoryview, bool]]) -> Steps:
        """Pass the segments of ``data`` on, each once ``receives`` has done with it; the rank at ``place`` 0 begins."""
        ready = 0

        def counted() -> Iterator[tuple[memoryview, bool]]:
            nonlocal ready
            asked = next(receives, None)
            while asked is not None:
                yield asked
                asked = next(receives, None)
                ready += 1

        def sends() -> Iterator[tuple[memoryview, bool] | None]:
            for number, (first, last) in enumerate(_segments(len(data), itemsize)):
                while place and ready <= number:
                    yield None
                yield data[first:last], True

        out = self._links[self._next] if place < self._size - 1 else None
        into = self._links[self._previous] if place else None
        yield from self._flow(out, sends() if out else (), into, counted() if into else (), chain=True)

    def gather(self, sent: memoryview, parts: Sequence[memoryview], root: int) -> Steps:
        """Gather at ``root``: its ``parts`` receive the bytes that each rank has ``sent``; the others have none."""
        if self._index != root:
            yield from self._meet([root])
            yield from self._flow(self._links[root], _whole(sent), None, ())
            return
        yield from self._meet(range(self._size))
        for peer, part in enumerate(parts):
            if peer == root:
                _copy(part, sent)
            else:
                yield from self._flow(None, (), self._links[peer], _whole(part))

    def scatter(self, part: memoryview, sent: Sequence[memoryview], root: int) -> Steps:
        """Scatter from ``root``: ``part`` of each rank receives its bytes of ``sent``, which the others do not have."""
        if self._index != root:
            yield from self._meet([root])
            yield from self._flow(None, (), self._links[root], _whole(part))
            return
        yield from self._meet(range(self._size))
        for peer, whole in enumerate(sent):
            if peer == root:
                _copy(part, whole)
            else:
                yield from self._flow(self._links[peer], _whole(whole), None, ())

    def all_to_all(self, received: Sequence[memoryview], sent: Sequence[memoryview]) -> Steps:
        yield from self._meet(range(self._size))
        _copy(received[self._index], sent[self._index])
        for distance in range(1, self._size):
            to, by = (self._index + distance) % self._size, (self._index - distance) % self._size
            out = self._links[to] if sent[to] else None  # the lengths agree, so nobody waits for what is not sent
            into = self._links[by] if received[by] else None
            yield from self._flow(out, _whole(sent[to]), into, _whole(received[by]))

    # --- connections that votes and rings do not need -----------------------------------------------------------------

    def _meet(self, peers: Iterable[int]) -> Steps:
        """Connect with further ranks. All ranks of the group have to be in the same operation."""
        if self._size == 2:
            return
        if not self._announced:
            records = [bytearray(Address.SIZE) for _ in range(self._size)]
            own = memoryview(bytearray(self._links.own.pack()))
            yield from self.all_gather([memoryview(record) for record in records], own)
            for peer, record in enumerate(records):
                try:
                    self._links.addresses[peer] = Address.unpack(bytes(record))
                except ValueError as error:
                    raise LinkError(peer, OSError(errno.EPROTO, f"no address: {error}")) from None
            self._announced = True
        yield from self._links.meet(peers)

    # --- one stream out, one in ---------------------------------------------------------------------------------------

    def _flow(
        self,
        out: Link | None,
        sends: Iterable[tuple[memoryview, bool] | None],
        into: Link | None,
        receives: Iterable[tuple[memoryview, bool]],
        chain: bool = False,
    ) -> Steps:
        """Send what ``sends`` has, None for "not yet", and fill what ``receives`` asks for, each at its own pace.

        With each view: whether its memory stays as it is until the end of the operation. In a ``chain`` a rank says
        that it has read all when those after it have said so.
        """
        outgoing = _Outgoing(out, sends, self.mark, self.direct)
        incoming = _Incoming(into, receives, self.mark, self.direct)
        looks = _CLOCK_EVERY
        while True:
            moved = incoming.move() if not incoming.over else False
            if not outgoing.over and outgoing.move():
                moved = True
            if incoming.over and outgoing.over:
                break
            if moved:
                looks -= 1
                if looks == 0:
                    looks = _CLOCK_EVERY
                    yield ()
            else:
                yield wants_of(incoming.waiting, outgoing.waiting)
        if chain:
            yield from _confirmed(out)
            yield from _confirm(into)
        else:
            yield from _confirm(into if incoming.read else None)
            yield from _confirmed(out if outgoing.shown else None)


class _Outgoing:
    """The stream to one rank."""

    __slots__ = ("_direct", "_link", "_sends", "_sent", "_view", "over", "shown")

    def __init__(
        self, link: Link | None, sends: Iterable[tuple[memoryview, bool] | None], mark: int, direct: bool
    ) -> None:
        self._link = link
        self._direct = direct and link is not None and link.is_read
        self._sends = iter(sends)
        self._view: memoryview | None = memoryview(_MARK.pack(mark)) if link is not None else None
        self._sent = 0
        self.shown = False  # whether the peer was given addresses
        self.over = link is None

    @property
    def waiting(self) -> Link | None:
        """The link whose buffer is full; None while there is nothing to send yet, or nothing more."""
        return self._link if self._view is not None else None

    def move(self) -> bool:
        """Send until the buffer is full, or there is nothing to send yet; return whether anything was sent."""
        link, moved = self._link, False
        assert link is not None
        while True:
            view = self._view
            if view is None:
                found = next(self._sends, _OVER)
                if found is None:
                    return moved
                if found is _OVER:
                    self.over = True
                    return True
                view, stays = found
                if stays and self._direct and len(view) >= DIRECT_FROM:
                    view = memoryview(_POINTER.pack(address_of(view)))
                    self.shown = True
                self._view, self._sent = view, 0
            try:
                self._sent += link.socket.send(view[self._sent :] if self._sent else view, NOW)
            except BlockingIOError:
                return moved
            except OSError as error:
                raise LinkError(link.peer, error) from None
            moved = True
            if self._sent == len(view):
                self._view = None


class _Incoming:
    """The stream from one rank."""

    __slots__ = ("_direct", "_got", "_link", "_mark", "_pointer", "_receives", "_target", "_view", "over", "read")

    def __init__(self, link: Link | None, receives: Iterable[tuple[memoryview, bool]], mark: int, direct: bool) -> None:
        self._link = link
        self._direct = direct and link is not None and link.reads
        self._receives = iter(receives)
        self._mark = _MARK.pack(mark)
        self._pointer = memoryview(bytearray(8))
        self._view = self._pointer  # receives the next bytes of the stream: first the mark
        self._target: memoryview | None = None  # receives the bytes from the peer's memory, at the pointer's address
        self._got = 0
        self.read = False  # whether the peer's memory was read
        self.over = link is None

    @property
    def waiting(self) -> Link | None:
        """The link from which bytes are awaited; None once all have come."""
        return None if self.over else self._link

    def move(self) -> bool:
        """Take the bytes that have come, up to one segment; return whether there were any."""
        link, moved = self._link, False
        assert link is not None
        while True:
            view = self._view
            try:
                count = link.socket.recv_into(view[self._got :] if self._got else view, 0, NOW)
            except BlockingIOError:
                return moved
            except OSError as error:
                raise LinkError(link.peer, error) from None
            if not count:
                raise LinkError(link.peer, ConnectionResetError(errno.ECONNRESET, "closed by the peer"))
            self._got += count
            moved = True
            if self._got == len(view):
                self._take(link)
                return True

    def _take(self, link: Link) -> None:
        """Use the bytes that have come in full: the mark, an address, or data; then set up the next."""
        if self._mark:
            if bytes(self._pointer) != self._mark:
                raise Mismatch(link.peer)
            self._mark = b""
        elif self._target is not None:
            try:
                read_process(link.pid, _POINTER.unpack(self._pointer)[0], self._target)
            except OSError as error:
                raise LinkError(link.peer, error) from None
            self.read = True
        found = next(self._receives, None)
        if found is None:
            self.over = True
            return
        view, stays = found
        direct = stays and self._direct and len(view) >= DIRECT_FROM
        self._view, self._target, self._got = (self._pointer, view, 0) if direct else (view, None, 0)


_OVER = (memoryview(b""), False)
#: Bytes from which a part is read from the peer's memory: below, the socket costs less than asking for it.
DIRECT_FROM = 32 << 10


def _confirm(link: Link | None) -> Steps:
    """Tell the rank before this one that its memory was read."""
    while link is not None:
        try:
            link.socket.send(b"\1", NOW)
            return
        except BlockingIOError:
            yield ((link.socket.fileno(), select.POLLOUT),)
        except OSError as error:
            raise LinkError(link.peer, error) from None


def _confirmed(link: Link | None) -> Steps:
    """Wait until the rank after this one says that it has read this one's memory."""
    while link is not None:
        try:
            if link.socket.recv(1, NOW) == b"\1":
                return
            raise LinkError(link.peer, ConnectionResetError(errno.ECONNRESET, "closed by the peer"))
        except BlockingIOError:
            yield ((link.socket.fileno(), select.POLLIN),)
        except OSError as error:
            raise LinkError(link.peer, error) from None


# ---------------------------------------------------------------------- how a tensor is cut


class _Cut:
    """A tensor's elements cut into blocks, and each block into one part for each rank, of at most `SEGMENT` bytes."""

    __slots__ = ("_block", "_numel", "_size", "blocks")

    def __init__(self, numel: int, size: int, itemsize: int) -> None:
        self._numel = numel
        self._size = size
        self._block = max(1, SEGMENT // itemsize) * size
        self.blocks = -(-numel // self._block)

    def part(self, block: int, chunk: int) -> tuple[int, int]:
        """Return the range of elements of a part, half-open; the last block is divided like the others."""
        first = block * self._block
        length = min(self._block, self._numel - first)
        return first + length * chunk // self._size, first + length * (chunk + 1) // self._size


def _segments(nbytes: int, itemsize: int) -> list[tuple[int, int]]:
    """Yield half-open ranges of bytes, each of whole elements."""
    length = max(1, SEGMENT // itemsize) * itemsize
    return [(start, min(start + length, nbytes)) for start in range(0, nbytes, length)]


def _order(blocks: int, steps: int) -> Iterator[tuple[int, int]]:
    """Yield block and step, each block one step behind the one before, so that no rank waits for what it has just sent.

    >>> list(_order(3, 2))
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    """
    for turn in range(blocks + steps - 1):
        for step in range(min(steps - 1, turn), max(-1, turn - blocks), -1):
            yield turn - step, step


def _whole(view: memoryview) -> Iterator[tuple[memoryview, bool]]:
    for first, last in _segments(len(view), 1):
        yield view[first:last], True


def _copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes, unless both are the same memory."""
    if len(source) and address_of(target) != address_of(source):
        copy_bytes(address_of(target), address_of(source), len(source))
