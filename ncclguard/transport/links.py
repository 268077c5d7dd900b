"""The connections of one generation of one group: one for each pair of ranks that needs it, made on first need.

Every rank listens on the job's interface. Of a pair, the rank with the lower place in the group connects. It shows the
key that the listener has published in the job's store, before anything else is read from it, so that a stranger (a
port scanner, a rank of another job, one of an earlier generation) costs a socket and no time. Then both say where a
random number lies in their memory: whoever can read the other's number there (same host, same user, permitted by the
kernel) reads large parts from the other's memory instead of a socket, with one copy instead of two. The number proves
that it is the right process, whatever the namespaces of the two.

Everything here runs in the thread of the caller, as a generator that yields what it waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace

from ncclguard.torch_compat.groups import Store
from ncclguard.torch_compat.sockets import resend_often
from ncclguard.transport.base import TransportError
from ncclguard.transport.memory import read_process
from ncclguard_explain.language import tr

Wants = tuple[tuple[int, int], ...]
"""What a step waits for: descriptors with the events of `select.poll`. Empty: nothing, but the clock may be read."""

Steps = Generator[Wants, None, None]
"""Something that moves without ever blocking."""

_KEY = 16
_CARD = struct.Struct("=IIQ16s")  # place in the group, pid, address of the random number, the random number
_FLAG = 1
BLOCKS_FOR = 0.05  # seconds
NOW = socket.MSG_DONTWAIT
_TIMEVAL = struct.Struct("@ll")
_FAREWELL = b"\xff"
#: The most ranks of one host that exchange through the first of them, where they are more than its cores: sleeping
#: once for each hop costs nothing for a thread with a core, and else the turn of another thread.
_LARGEST_STAR = 256
#: Seconds between two questions for the addresses of other ranks; doubled up to the longest.
ADDRESS_POLL = (0.002, 0.05)
_STRANGERS = 64  # connections at a time that have not shown the key yet; beyond that the oldest is closed
_ADDRESS = struct.Struct("=16sH64s")  # key, port, host: an address as ranks exchange it


class LinkError(Exception):
    """The connection with the rank at ``peer`` of the group broke."""

    def __init__(self, peer: int, error: OSError) -> None:
        super().__init__(str(error))
        self.peer = peer
        self.error = error


@dataclass(slots=True)
class Link:
    """A connection with the rank at ``peer`` of the group, for both directions.

    Its socket blocks, in a receive for up to `BLOCKS_FOR`: one system call instead of three for who has nothing else to
    do. Whoever has gives `NOW` along.
    ``reads``: this process can read the peer's memory, the peer being process ``pid``; ``is_read``: and the reverse.
    """

    socket: socket.socket
    peer: int
    pid: int
    reads: bool
    is_read: bool


@dataclass(frozen=True, slots=True)
class Address:
    """The address on which a rank listens, and the key that a peer has to show."""

    host: str
    port: int
    key: bytes
    star: bool = False  # set by the first rank of a group, see `Links.star`

    def to_json(self) -> str:
        return json.dumps({"host": self.host, "port": self.port, "key": self.key.hex(), "star": self.star})

    @classmethod
    def from_json(cls, text: str | bytes) -> Address:
        """Read an address. Raises ValueError for text that is none."""
        try:
            values = json.loads(text)
            return cls(str(values["host"]), int(values["port"]), bytes.fromhex(values["key"]), bool(values["star"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not an address: {text!r}") from error

    def pack(self) -> bytes:
        """Encode the address in `Address.SIZE` bytes."""
        return _ADDRESS.pack(self.key, self.port, self.host.encode())

    @classmethod
    def unpack(cls, record: bytes) -> Address:
        key, port, host = _ADDRESS.unpack(record)
        return cls(host.rstrip(b"\0").decode(), port, key)

    SIZE = _ADDRESS.size


class Links:
    """All connections of one rank in one generation, and its listening socket.

    ``addresses`` may be extended at any time; `meet` needs those of higher places only. Any thread may call `stop`, and
    whoever moves bytes holds ``using``. ``star``, the same on all ranks: an exchange goes through the first rank, which
    all others have a connection with.
    """

    def __init__(self, host: str, size: int, index: int, direct: bool) -> None:
        self.size = size
        self.index = index
        self.addresses: dict[int, Address] = {}
        self._links: dict[int, Link] = {}
        self._greetings: list[_Greeting] = []
        self._direct = direct
        self._number = ctypes.create_string_buffer(secrets.token_bytes(16), 16)
        self._key = secrets.token_bytes(_KEY)
        self._pid = os.getpid()
        self._listener = _listen(host, backlog=max(128, size))
        self.star = False
        self.stopped = False
        self.turns = Turns()
        self.using = threading.Lock()  # held by the one thread that moves bytes
        name = self._listener.getsockname()
        self.own = Address(host, name[1], self._key)

    def __getitem__(self, peer: int) -> Link:
        return self._links[peer]

    def __contains__(self, peer: int) -> bool:
        return peer in self._links

    @property
    def peers(self) -> Mapping[int, Link]:
        """The connections that there are."""
        return self._links

    # --- connecting -------------------------------------------------------------------------------------------------

    def meet(self, peers: Iterable[int]) -> Steps:
        """Connect with these ranks, which do the same; returns at once for those that are connected."""
        missing = {peer for peer in peers if peer != self.index and peer not in self._links}
        for peer in sorted(missing):
            if peer > self.index and all(greeting.peer != peer for greeting in self._greetings):
                self._greetings.append(self._reach(peer))
        while missing := {peer for peer in missing if peer not in self._links}:
            if self.stopped:
                raise LinkError(min(missing), OSError(errno.ESHUTDOWN, "stopped"))
            moved = self._accept()
            for greeting in tuple(self._greetings):
                moved |= self._hear(greeting)
            if not moved:
                yield ((self._listener.fileno(), select.POLLIN), *(greeting.wants for greeting in self._greetings))
            else:
                yield ()

    def _reach(self, peer: int) -> _Greeting:
        address = self.addresses[peer]
        stream: socket.socket | None = None
        try:
            stream = socket.socket(_family(address.host), socket.SOCK_STREAM)
            stream.setblocking(False)
            code = stream.connect_ex(_sockaddr(address.host, address.port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
        except OSError as error:
            if stream is not None:
                stream.close()
            raise LinkError(peer, error) from None
        return _Greeting(stream, peer)

    def _accept(self) -> bool:
        """Accept all connections that wait; return whether there was one."""
        taken = False
        while True:
            try:
                stream, _ = self._listener.accept()
            except BlockingIOError:
                return taken
            except OSError as error:
                if self.stopped or error.errno in (errno.EBADF, errno.EINVAL):
                    raise LinkError(self.index, error) from None
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise LinkError(self.index, error) from None
                continue  # the peer was gone before it was accepted
            stream.setblocking(False)
            taken = True
            strangers = [greeting for greeting in self._greetings if greeting.peer is None]
            if len(strangers) >= _STRANGERS + self.size:  # among them may be ranks whose key was not read yet
                self._drop(strangers[0])
            self._greetings.append(_Greeting(stream, None))

    def _hear(self, greeting: _Greeting) -> bool:
        """Go on with one connection that is being made; return whether anything has happened."""
        try:
            return self._hear_out(greeting)
        except BlockingIOError:
            return False
        except (OSError, ValueError) as error:
            reached = greeting.reached
            self._drop(greeting)
            if reached is not None:
                broken = error if isinstance(error, OSError) else OSError(errno.EPROTO, str(error))
                raise LinkError(reached, broken) from None
            return True

    def _hear_out(self, greeting: _Greeting) -> bool:
        if greeting.reached is not None and not greeting.sent:
            if not await_events((greeting.wants,), 0.0):
                return False
            code = greeting.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            greeting.send(self.addresses[greeting.reached].key + self._card())
            greeting.sent = True
            greeting.expect(_CARD.size + _FLAG)
        if not greeting.receive():
            return False
        got = bytes(greeting.got)
        if greeting.reached is not None:
            place, pid, where, number = _CARD.unpack(got[: _CARD.size])
            if place != greeting.reached:
                raise ValueError(f"the rank at {place} answers for the one at {greeting.reached}")
            reads = self._can_read(pid, where, number)
            greeting.send(bytes([reads]))
            self._keep(greeting, place, pid, reads, bool(got[_CARD.size]))
        elif not greeting.known:
            if not secrets.compare_digest(got, self._key):
                raise ValueError("a stranger")
            greeting.known = True
            greeting.expect(_CARD.size)
        elif greeting.peer is None:
            place, pid, where, number = _CARD.unpack(got)
            if not 0 <= place < self.index or place in self._links:
                raise ValueError(f"the rank at {place} has no reason to connect")
            greeting.reads = self._can_read(pid, where, number)
            greeting.peer, greeting.pid = place, pid
            greeting.send(self._card() + bytes([greeting.reads]))
            greeting.expect(_FLAG)
        else:
            self._keep(greeting, greeting.peer, greeting.pid, greeting.reads, bool(got[0]))
        return True

    def _keep(self, greeting: _Greeting, peer: int, pid: int, reads: bool, is_read: bool) -> None:
        stream = greeting.stream
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        resend_often(stream)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(BLOCKS_FOR * 1e6)))
        stream.setblocking(True)
        self._greetings.remove(greeting)
        self._links[peer] = Link(stream, peer, pid, reads and self._direct, is_read and self._direct)
        if self.stopped:  # meanwhile, by another thread, which has not seen this connection
            _shut(stream)

    def _drop(self, greeting: _Greeting) -> None:
        self._greetings.remove(greeting)
        greeting.stream.close()

    def _card(self) -> bytes:
        where = ctypes.addressof(self._number) if self._direct else 0
        return _CARD.pack(self.index, self._pid, where, self._number.raw if self._direct else b"")

    def _can_read(self, pid: int, where: int, number: bytes) -> bool:
        """Return whether the process ``pid`` of this host is the peer, and its memory may be read."""
        if not self._direct or not where:
            return False
        found = bytearray(16)
        try:
            read_process(pid, where, memoryview(found))
        except OSError:
            return False
        return secrets.compare_digest(bytes(found), number)

    # --- ending -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything that is under way, also for the peers; may be called from any thread, and returns at once."""
        self.stopped = True
        if self._pid != os.getpid():
            return  # the connections belong to the parent
        for stream in (*(link.socket for link in tuple(self._links.values())), self._listener):
            _shut(stream)
        for greeting in tuple(self._greetings):
            _shut(greeting.stream)

    def close(self) -> None:
        """Give the descriptors back; nobody may be waiting on them. In a forked child the parent's stay open.

        One byte before the end says that nothing was broken off, unless `stop` was called.
        """
        if not self.stopped and self._pid == os.getpid():
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.socket.send(_FAREWELL, NOW)
        self.stopped = True
        for stream in (
            *(link.socket for link in self._links.values()),
            *(greeting.stream for greeting in self._greetings),
            self._listener,
        ):
            with contextlib.suppress(OSError):
                stream.close()


class _Greeting:
    """A connection that is being made. ``reached``: the place that was connected to; None for one that has come."""

    __slots__ = ("got", "known", "peer", "pid", "reached", "reads", "sent", "stream", "want")

    def __init__(self, stream: socket.socket, reached: int | None) -> None:
        self.stream = stream
        self.reached = reached
        self.peer = reached
        self.sent = self.known = self.reads = False
        self.pid = 0
        self.want = _KEY
        self.got = bytearray()

    @property
    def wants(self) -> tuple[int, int]:
        connecting = self.reached is not None and not self.sent
        return self.stream.fileno(), select.POLLOUT if connecting else select.POLLIN

    def expect(self, count: int) -> None:
        self.want = count
        self.got.clear()

    def receive(self) -> bool:
        """Return whether all that is expected has come; not a byte more is read."""
        while len(self.got) < self.want:
            more = self.stream.recv(self.want - len(self.got))
            if not more:
                raise ConnectionResetError(errno.ECONNRESET, tr("closed by the peer"))
            self.got += more
        return True

    def send(self, message: bytes) -> None:
        """A few bytes into an empty buffer, which takes them whole."""
        if self.stream.send(message) != len(message):
            raise OSError(errno.ENOBUFS, "the connection did not take a greeting")


def neighbours(size: int, index: int, star: bool = False) -> list[int]:
    """Return who votes and rings connect with: those 1, 2, 4, ... away on both sides; in a star, beside and first."""
    if star and index == 0:
        return list(range(1, size))
    reach = [1] if star else distances(size)
    found = {(index + sign * distance) % size for distance in reach for sign in (1, -1)} | ({0} if star else set())
    return sorted(found - {index})


def _crowded(size: int) -> bool:
    """Return whether all ranks of the job are on this host, as its launcher says, and outnumber its cores."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    one_host = local is not None and local == os.environ.get("WORLD_SIZE")
    return one_host and max(2, os.cpu_count() or 1) < size <= _LARGEST_STAR


def distances(size: int) -> list[int]:
    """Return the distance to the peer of each hop of a vote."""
    return [1 << hop for hop in range((size - 1).bit_length())]


def connect(
    keys: Store,
    host: str,
    size: int,
    index: int,
    end: float,
    direct: bool,
    star: bool | None = None,
    given_up: threading.Event | None = None,
) -> Links:
    """Connect with all `neighbours` through ``keys``, until ``end`` (time.monotonic()). Raises TransportError.

    Another thread ends it before that by setting ``given_up``.

    ``host`` is the address to listen on. ``direct``: read large parts from the memory of peers where that is possible.
    ``star``: see `Links`, as the first rank has it; None: where more ranks than cores are on one host.
    """
    links: Links | None = None
    given_up = given_up or threading.Event()

    def higher() -> set[int]:
        """Return the peers that this rank connects to."""
        assert links is not None
        return {peer for peer in neighbours(size, index, links.star) if peer > index}

    try:
        links = Links(host, size, index, direct)
        # Equal on all ranks as a rule, so that one question is enough; else the first rank decides.
        links.star = size > 2 and (_crowded(size) if star is None else star)
        if index == 0:
            links.own = replace(links.own, star=links.star)
        keys.set(f"streams/{index}", links.own.to_json())
        if index and size > 2:
            _ask(keys, links, {0, *higher()}, end, given_up)
            links.star = links.addresses[0].star
        _ask(keys, links, higher(), end, given_up)
        peers = neighbours(size, index, links.star)
        meeting = links.meet(peers)
        while not advance(meeting, min(end, time.monotonic() + ADDRESS_POLL[1])):
            if time.monotonic() < end and not given_up.is_set():
                continue
            missing = [peer for peer in peers if peer not in links]
            raise TransportError(tr("the ranks at {missing} of the group did not come to connect", missing=missing))
        return links
    except (OSError, ValueError, RuntimeError) as error:
        failure: Exception = TransportError(
            tr("asking the store where the ranks of the group listen: {error}", error=error)
        )
    except LinkError as error:
        failure = TransportError(
            tr("connecting with the rank at {peer} of the group: {error}", peer=error.peer, error=error)
        )
    except BaseException:
        if links is not None:
            links.close()
        raise
    if links is not None:
        links.close()
    raise failure


def _ask(keys: Store, links: Links, peers: set[int], end: float, given_up: threading.Event) -> None:
    """Read the addresses of ``peers``, unless they are known; raises TransportError where one has none at ``end``.

    In questions that are answered at once, again and again, so that others may use the same connection to the store.
    """
    asked = sorted(peers - links.addresses.keys())
    names = [f"streams/{peer}" for peer in asked]
    pause, longest = ADDRESS_POLL
    while names and not keys.check(names):
        if time.monotonic() >= end or given_up.is_set():
            missing = [peer for peer, name in zip(asked, names, strict=True) if not keys.check([name])]
            raise TransportError(tr("the ranks at {missing} of the group did not come to connect", missing=missing))
        time.sleep(pause)
        pause = min(2 * pause, longest)
    found = map(Address.from_json, keys.multi_get(names)) if names else ()
    links.addresses.update(zip(asked, found, strict=True))


# ---------------------------------------------------------------------- waiting


class Turns:
    """Decides whether a thread that waits for a peer yields its core, again and again, or sleeps.

    Yielding is the fastest way to wait for a peer that is about to answer, by the 50 to 100 us that waking a thread
    takes. Where others compute on all cores (data loaders, OpenMP, more ranks than cores) it costs this thread its
    turn, for milliseconds; a thread that sleeps gets it back at once. So it is measured, and tried again later.
    """

    __slots__ = ("_asleep", "_since", "_sleeps")

    def __init__(self) -> None:
        self._asleep = 0  # waits left in which yielding is not tried
        self._sleeps = _SLEEPS  # what that is set to when a yield takes too long
        self._since = 0.0  # time.monotonic() at which this wait has begun, 0.0 between waits

    @property
    def busy(self) -> bool:
        """Return whether others compute on the cores, as far as is known."""
        return self._asleep > 0

    def slept(self) -> None:
        """Count a wait in which this thread has slept."""
        self._asleep = max(0, self._asleep - 1)

    def moved(self) -> None:
        """Note that the wait has ended."""
        if self._since and not self._asleep and self._sleeps > _SLEEPS:  # yielding was quick
            self._sleeps -= 1
        self._since = 0.0

    def give_way(self) -> bool:
        """Yield the core once; return False if this thread had better sleep."""
        if self._asleep:
            self._asleep -= 1
            return False
        now = time.monotonic()
        if not self._since:
            self._since = now
        elif now > self._since + _SPIN:
            return False
        os.sched_yield()
        if time.monotonic() > now + _YIELD_TOOK:
            self._asleep = self._sleeps
            self._sleeps = min(2 * self._sleeps, _SLEEPS_AT_MOST)
        return True


_SPIN = 1e-4  # seconds after which this thread sleeps: the cost of waking it
_YIELD_TOOK = 2e-4  # a yield that takes more seconds means that somebody else computes on the core
_SLEEPS = 64  # following waits in which this thread sleeps at once, twice as many each time that this happens again
_SLEEPS_AT_MOST = 4096


def advance(steps: Steps, end: float, turns: Turns | None = None) -> bool:
    """Advance until all is done (True), or until ``end`` (time.monotonic()) while it waits for peers (False)."""
    for wants in steps:
        if not wants:
            if turns is not None:
                turns.moved()
            if time.monotonic() >= end:
                return False
        elif turns is not None and len(wants) == 1 and wants[0][1] == select.POLLIN and turns.give_way():
            if time.monotonic() >= end:
                return False
        elif not await_events(wants, end):
            return False
        elif turns is not None:
            turns.moved()
    return True


def wants_of(into: Link | None, out: Link | None) -> Wants:
    """Return the events to wait for: bytes from ``into``, room to send to ``out``; either may be None."""
    if into is not None and into is out:
        return ((into.socket.fileno(), select.POLLIN | select.POLLOUT),)
    asked = ((into, select.POLLIN), (out, select.POLLOUT))
    return tuple((link.socket.fileno(), events) for link, events in asked if link is not None)


def await_events(wants: Wants, end: float) -> bool:
    """Return whether one of the events came, or its connection broke, before ``end`` (time.monotonic())."""
    left = end - time.monotonic()
    poll = select.poll()
    for descriptor, events in wants:
        if descriptor < 0:
            return True  # closed meanwhile: its next use finds out
        poll.register(descriptor, events)
    return bool(poll.poll(max(0, int(left * 1000 + 0.999))))


# ------------------------------------------------------------------------------------ sockets


def _listen(host: str, backlog: int) -> socket.socket:
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.bind(_sockaddr(host, 0))
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected any more: the peer was faster
        stream.shutdown(socket.SHUT_RDWR)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _sockaddr(host: str, port: int) -> tuple[object, ...]:
    """Return a socket address, with the interface of a link-local IPv6 address, which the text does not tell."""
    if "%" in host:
        plain, _, interface = host.partition("%")
        return plain, port, 0, socket.if_nametoindex(interface)
    return host, port
