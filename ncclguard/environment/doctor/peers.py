"""Connections between ranks: a small server on every rank, and the questions that the others ask it."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncclguard.environment.links import family_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: A host in the same building answers in well under a millisecond; one retransmitted SYN takes a second.
CONNECT_SECONDS = 3.0
_PINGS = 10
_BLOCK = bytes(1 << 20)
BANDWIDTH_SECONDS = 1.0
BANDWIDTH_BYTES = 64 << 20

_REASONS = {
    errno.ECONNREFUSED: "refused: a firewall rejects, or the process is gone",
    errno.ETIMEDOUT: "no answer: a firewall drops packets, or they are not routed",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "no route to the network",
}


class _Handler(socketserver.BaseRequestHandler):
    """One connection: p = echo one byte, t = this host's clock, b = count bytes."""

    def handle(self) -> None:
        self.request.settimeout(10.0)
        with contextlib.suppress(OSError):  # the other rank went away, which its own side reports
            while command := self.request.recv(1):
                if command == b"p":
                    self.request.sendall(b"p")
                elif command == b"t":
                    self.request.sendall(struct.pack("!d", time.time()))
                elif command == b"b":
                    self._count()

    def _count(self) -> None:
        (wanted,) = struct.unpack("!Q", _receive(self.request, 8))
        got = 0
        while got < wanted:
            part = self.request.recv(min(len(_BLOCK), wanted - got))
            if not part:
                return
            got += len(part)
        self.request.sendall(struct.pack("!Q", got))


def _receive(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "the other side closed")
        data += part
    return data


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 1024


class PeerServer:
    """Answers the other ranks on a port of the chosen interface, as gloo does; a context manager."""

    def __init__(self, address: str) -> None:
        """Raises OSError when the address cannot be listened on."""
        kind = type("_Server", (_Server,), {"address_family": family_of(address)})
        self._server: _Server = kind((address, 0), _Handler)
        self.address, self.port = address, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="ncclguard-doctor-peer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Reach:
    """How one rank reaches another; ``fault`` is None when it does. Times in seconds."""

    rank: int
    fault: str | None
    round_trip: float | None = None
    clock_skew: float | None = None


def _connect(address: str, port: int, source: str) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS, source_address=(source, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def describe(error: OSError) -> str:
    """Why a connection failed, in words that say what to look for."""
    if isinstance(error, TimeoutError):
        return _REASONS[errno.ETIMEDOUT]
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


def reach(rank: int, address: str, port: int, source: str) -> Reach:
    """Connects from the chosen interface's own address, measures round trip and clock; never raises OSError."""
    try:
        with _connect(address, port, source) as connection:
            return Reach(rank, None, *_measure(connection))
    except OSError as error:
        return Reach(rank, describe(error))


def _measure(connection: socket.socket) -> tuple[float, float]:
    times = []
    for _ in range(_PINGS):
        begun = time.perf_counter()
        connection.sendall(b"p")
        _receive(connection, 1)
        times.append(time.perf_counter() - begun)
    sent = time.time()
    connection.sendall(b"t")
    (theirs,) = struct.unpack("!d", _receive(connection, 8))
    return min(times), float(theirs) - (sent + time.time()) / 2


def reach_all(peers: dict[int, tuple[str, int]], source: str) -> list[Reach]:
    """All peers at once, so that one that does not answer costs no more than its own time limit."""
    if not peers:
        return []
    with ThreadPoolExecutor(max_workers=min(64, len(peers))) as pool:
        return list(pool.map(lambda item: reach(item[0], item[1][0], item[1][1], source), sorted(peers.items())))


def bandwidth(address: str, port: int, source: str) -> float | None:
    """Bytes per second to a peer over one connection, for a second at most; None when it broke."""
    sent, begun = 0, time.perf_counter()
    try:
        with _connect(address, port, source) as connection:
            connection.settimeout(CONNECT_SECONDS)
            begun = time.perf_counter()
            while sent < BANDWIDTH_BYTES and time.perf_counter() - begun < BANDWIDTH_SECONDS:
                connection.sendall(b"b" + struct.pack("!Q", len(_BLOCK)))
                connection.sendall(_BLOCK)
                _receive(connection, 8)
                sent += len(_BLOCK)
            return sent / (time.perf_counter() - begun)
    except OSError:
        return None
