"""What one rank measures on the way to another: reach, round trip, clock, bandwidth, packet size, and an all-reduce.

Every rank answers on two ports of its chosen interface: TCP (`PeerServer`) and UDP (`EchoServer`). The all-reduce is a
real one of gloo and runs in a process of its own, so that it cannot hang the doctor: this module as a program.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from ncclguard.environment.network import family_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: A host in the same building answers in well under a millisecond; one retransmitted SYN takes a second.
CONNECT_SECONDS = 3.0
BANDWIDTH_SECONDS = 1.0
BANDWIDTH_BYTES = 64 << 20
_PINGS = 10
_BLOCK = bytes(1 << 20)

_REASONS = {
    errno.ECONNREFUSED: "refused: a firewall rejects, or the process is gone",
    errno.ETIMEDOUT: "no answer: a firewall drops packets, or they are not routed",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "no route to the network",
}

# ---------------------------------------------------------------------------------------------------- connections


class _Handler(socketserver.BaseRequestHandler):
    """One connection: p = echo one byte, t = this host's clock, b = one block taken."""

    def handle(self) -> None:
        self.request.settimeout(10.0)
        with contextlib.suppress(OSError):  # the other rank went away, which its own side reports
            while command := self.request.recv(1):
                if command == b"p":
                    self.request.sendall(b"p")
                elif command == b"t":
                    self.request.sendall(struct.pack("!d", time.time()))
                elif command == b"b":
                    _receive(self.request, len(_BLOCK))
                    self.request.sendall(b"b")


def _receive(connection: socket.socket, length: int) -> bytearray:
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed")
        data += part
    return data


class PeerServer(socketserver.ThreadingTCPServer):
    """Answers the other ranks on a TCP port of the chosen interface, as gloo does; a context manager."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, address: str) -> None:
        """Raises OSError when the address cannot be listened on."""
        self.address_family = family_of(address)
        super().__init__((address, 0), _Handler)
        self.port = int(self.server_address[1])
        self._thread = threading.Thread(target=self.serve_forever, name="ncclguard-doctor-peer", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5.0)


@dataclass(frozen=True, slots=True)
class Reach:
    """How one rank reaches another; ``fault`` is None when it does. Times in seconds."""

    fault: str | None
    round_trip: float | None = None
    clock_skew: float | None = None


def _connect(address: str, port: int, source: str) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS, source_address=(source, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def reach(address: str, port: int, source: str) -> Reach:
    """Connects from the chosen interface's own address, measures round trip and clock; never raises OSError."""
    try:
        with _connect(address, port, source) as connection:
            times = []
            for _ in range(_PINGS):
                begun = time.perf_counter()
                connection.sendall(b"p")
                _receive(connection, 1)
                times.append(time.perf_counter() - begun)
            sent = time.time()
            connection.sendall(b"t")
            (theirs,) = struct.unpack("!d", _receive(connection, 8))
            return Reach(None, min(times), float(theirs) - (sent + time.time()) / 2)
    except TimeoutError:
        return Reach(_REASONS[errno.ETIMEDOUT])
    except OSError as error:
        return Reach(_REASONS.get(error.errno or 0, error.strerror or str(error)))


def reach_all(peers: Mapping[int, tuple[str, int]], source: str) -> dict[int, Reach]:
    """All peers at once, so that one that does not answer costs no more than its own time limit."""
    with ThreadPoolExecutor(max_workers=64) as pool:
        return dict(zip(peers, pool.map(lambda peer: reach(peer[0], peer[1], source), peers.values()), strict=True))


def bandwidth(address: str, port: int, source: str) -> float | None:
    """Bytes per second to a peer over one connection, for a second at most; None when it broke."""
    sent = 0
    try:
        with _connect(address, port, source) as connection:
            begun = time.perf_counter()
            while sent < BANDWIDTH_BYTES and time.perf_counter() - begun < BANDWIDTH_SECONDS:
                connection.sendall(b"b" + _BLOCK)
                _receive(connection, 1)
                sent += len(_BLOCK)
            return sent / (time.perf_counter() - begun)
    except OSError:
        return None


# ----------------------------------------------------------------------------- the largest packet that gets through


class _Family(NamedTuple):
    """Options of linux/in.h and linux/in6.h, for which the socket module has no names; sizes in bytes."""

    level: int
    discover: int
    known_mtu: int
    headers: int
    smallest: int


_FAMILIES = {
    int(socket.AF_INET): _Family(socket.IPPROTO_IP, 10, 14, 28, 576),
    int(socket.AF_INET6): _Family(socket.IPPROTO_IPV6, 23, 24, 48, 1280),
}
#: Values of the option ``discover``: obey what routers say of the path's MTU, or ignore it. No packet is fragmented.
_OBEY, _IGNORE = 2, 3
_TRIES, _TRY_SECONDS = 3, 0.3


@dataclass(frozen=True, slots=True)
class PathMtu:
    """The size of the largest packet that arrived, in bytes with headers, and what the kernel learned on the way.

    ``largest`` is None when no packet arrived, ``reported`` when no router said which size it takes.
    """

    largest: int | None
    reported: int | None


class EchoServer:
    """Answers each datagram with its number only, so that the way back does not matter; a context manager."""

    def __init__(self, address: str) -> None:
        """Raises OSError when the address cannot be bound."""
        self._socket = socket.socket(family_of(address), socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.settimeout(0.2)
        self.port = int(self._socket.getsockname()[1])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ncclguard-doctor-echo", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError):  # nothing came within the slice, or the answer found no way
                data, sender = self._socket.recvfrom(65536)
                self._socket.sendto(data[:4], sender)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._socket.close()


def probe_mtu(address: str, port: int, source: str, mtu: int) -> PathMtu:
    """The path MTU to a peer's `EchoServer`, up to the own interface's ``mtu``; a few seconds at most."""
    family = _FAMILIES[family_of(address)]

    def connected(discover: int) -> socket.socket:
        sock = socket.socket(family_of(address), socket.SOCK_DGRAM)
        sock.setsockopt(family.level, family.discover, discover)
        sock.bind((source, 0))
        sock.connect((address, port))
        return sock

    def arrives(size: int) -> bool:
        with connected(_IGNORE) as sock:
            return any(_is_echoed(sock, size - family.headers, number) for number in range(_TRIES))

    if arrives(mtu):
        return PathMtu(mtu, None)
    if not arrives(family.smallest):
        return PathMtu(None, None)
    sizes = range(family.smallest, mtu)
    largest = sizes[bisect_left(sizes, True, lo=1, key=lambda size: not arrives(size)) - 1]
    with connected(_OBEY) as sock:
        for number in range(_TRIES):
            _is_echoed(sock, mtu - family.headers, number)
        known = sock.getsockopt(family.level, family.known_mtu)
    return PathMtu(largest, known if known < mtu else None)


def _is_echoed(sock: socket.socket, length: int, number: int) -> bool:
    head = struct.pack("!I", number)
    try:
        sock.send(head + bytes(length - len(head)))
        while select.select([sock], [], [], _TRY_SECONDS)[0]:
            if sock.recv(16) == head:
                return True
    except OSError:  # "message too long", or what a router said of the packet before
        return False
    return False


# ------------------------------------------------------------------------------- an all-reduce in another process

_REDUCE_SECONDS = 8.0


def all_reduce(interface: str, rank: int, world_size: int, address: str, port: int, seconds: float) -> str | None:
    """None when the all-reduce gave the right sum, else why not, in one line; ends after ``seconds`` at the latest."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
    command = [sys.executable, "-m", __name__, str(rank), str(world_size), address, str(port)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else f"exit code {done.returncode}"


def _all_reduce_rank(rank: int, world_size: int, address: str, port: int) -> int:
    """One rank of a gloo group whose store rank 0 hosts; returns the exit code of its process."""
    import torch  # only here: it takes seconds
    import torch.distributed as dist

    limit = timedelta(seconds=_REDUCE_SECONDS)
    store = dist.TCPStore(address, port, world_size, rank == 0, limit, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    tensor = torch.full((1 << 18,), float(rank + 1))
    dist.all_reduce(tensor)
    expected = world_size * (world_size + 1) / 2
    if tensor[-1].item() != expected:
        print(f"the sum is {tensor[-1].item()}, not {expected}", file=sys.stderr)
        return 1
    dist.barrier()
    store.add("done", 1)
    if rank == 0:  # the others' last request must find the store's host alive
        while store.add("done", 0) < world_size:
            time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(_all_reduce_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
