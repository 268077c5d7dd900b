"""The largest packet that reaches a peer, and whether a smaller hop on the way says so or swallows it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ncclguard.environment.links import family_of

if TYPE_CHECKING:
    from typing_extensions import Self

# linux/in.h and linux/in6.h; the socket module has no names for them.
_IP_MTU_DISCOVER, _IP_MTU, _IPV6_MTU_DISCOVER, _IPV6_MTU = 10, 14, 23, 24
_PMTUDISC_DO, _PMTUDISC_PROBE = 2, 3
_TRIES, _TRY_SECONDS = 3, 0.3
_SMALLEST = {socket.AF_INET: 576, socket.AF_INET6: 1280}


def _headers(family: int) -> int:
    return 48 if family == socket.AF_INET6 else 28


@dataclass(frozen=True, slots=True)
class PathMtu:
    """``largest`` is the size in bytes of the largest packet that arrived, headers included; None when none did.
    ``told`` is what the kernel learned from a router on the way, None when nothing was said."""

    rank: int
    largest: int | None
    told: int | None


class EchoServer:
    """Answers each datagram with its number only, so that the way back does not matter; a context manager."""

    def __init__(self, address: str) -> None:
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


class _Prober:
    def __init__(self, address: str, port: int, source: str) -> None:
        self._family = family_of(address)
        self._target = (address, port)
        self._source = source
        self._number = 0

    def arrives(self, size: int) -> bool:
        """Whether a packet of ``size`` bytes that nobody may cut arrives; asks several times."""
        with self._open(_PMTUDISC_PROBE) as sock:
            return any(self._ask(sock, size) for _ in range(_TRIES))

    def told(self, size: int) -> int | None:
        """What the kernel knows of the path's MTU after packets of ``size`` bytes; None when no router complained."""
        with self._open(_PMTUDISC_DO) as sock:
            for _ in range(_TRIES):
                self._ask(sock, size)
            level, option = (
                (socket.IPPROTO_IPV6, _IPV6_MTU) if self._family == socket.AF_INET6 else (socket.IPPROTO_IP, _IP_MTU)
            )
            known = sock.getsockopt(level, option)
        return known if known < size else None

    def _open(self, discovery: int) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_DGRAM)
        level, option = (
            (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER)
            if self._family == socket.AF_INET6
            else (socket.IPPROTO_IP, _IP_MTU_DISCOVER)
        )
        sock.setsockopt(level, option, discovery)
        sock.bind((self._source, 0))
        sock.connect(self._target)
        return sock

    def _ask(self, sock: socket.socket, size: int) -> bool:
        self._number += 1
        number = struct.pack("!I", self._number)
        try:
            sock.send(number + bytes(size - _headers(self._family) - len(number)))
            while select.select([sock], [], [], _TRY_SECONDS)[0]:
                if sock.recv(16) == number:
                    return True
        except OSError:  # "message too long", or what a router said of the packet before
            return False
        return False


def probe(rank: int, address: str, port: int, source: str, mtu: int) -> PathMtu:
    """The path MTU to a peer's :class:`EchoServer`, up to the own interface's ``mtu``; a few seconds at most."""
    prober = _Prober(address, port, source)
    low = _SMALLEST[socket.AddressFamily(family_of(address))]
    if prober.arrives(mtu):
        return PathMtu(rank, mtu, None)
    if not prober.arrives(low):
        return PathMtu(rank, None, None)
    arrived, lost = low, mtu
    while lost - arrived > 1:
        middle = (arrived + lost) // 2
        if prober.arrives(middle):
            arrived = middle
        else:
            lost = middle
    return PathMtu(rank, arrived, prober.told(mtu))
