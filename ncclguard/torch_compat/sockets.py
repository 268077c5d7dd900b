"""Find and shut TCP connections of this process that a C++ library opened and keeps to itself.

gloo and TCPStore give Python no handle on their sockets, yet shutting a connection down is the one thing that always
ends a call blocked on it: it works while a peer is stopped or its host unreachable, and also while a forked child (a
DataLoader worker) still holds a copy of the descriptor, where a plain ``close`` would not tell the peer anything.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Address = tuple[str, int]  # (numeric host, port)

#: A constant of linux/tcp.h that Python's socket module lacks.
_TCP_THIN_LINEAR_TIMEOUTS, _TCP_RTO_MAX_MS = 16, 44
_SOCKADDR_STORAGE = 128  # sizeof(struct sockaddr_storage) on Linux


@dataclass(frozen=True, slots=True)
class Connection:
    """One connected TCP socket of this process.

    ``inode`` tells it from a later socket that was given the same descriptor.
    """

    fd: int
    inode: int
    local: Address
    remote: Address


def connections(wanted: Callable[[Address, Address], bool]) -> tuple[Connection, ...]:
    """Return the connected TCP sockets of this process for which ``wanted(local, remote)`` is true.

    Listening sockets are never among them: shutting gloo's listening socket ends the process. Empty where there is no
    ``/proc`` (not Linux).
    """
    found: list[Connection] = []
    for fd, copy in tcp_sockets():
        local, remote = _ends(copy)
        if local is not None and remote is not None and wanted(local, remote):
            found.append(Connection(fd, os.fstat(copy.fileno()).st_ino, local, remote))
    return tuple(found)


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Every TCP socket of this process, listening ones too: its descriptor, and a socket object on a duplicate of that.

    The object is closed when the next is asked for. None where there is no ``/proc``.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return
    for name in names:
        copy = _duplicate(int(name), None)
        if copy is not None:
            with copy:
                if _is_tcp(copy):
                    yield int(name), copy


def shut(found: Iterable[Connection]) -> int:
    """Shut connections in both directions, for all who share them, and return how many still were. Never blocks."""
    return shut_held(hold(found))


def hold(found: Iterable[Connection]) -> list[socket.socket]:
    """Return a socket object of one's own for each connection that still exists; end them with `shut_held`.

    Safe beside other threads: each descriptor is duplicated first and compared by inode, so one that was closed and
    given to somebody else's socket meanwhile is left alone.
    """
    return [copy for copy in (_duplicate(connection.fd, connection.inode) for connection in found) if copy is not None]


def shut_held(held: Iterable[socket.socket]) -> int:
    """Shut the sockets of `hold` as `shut` does."""
    count = 0
    for copy in held:
        with copy, contextlib.suppress(OSError):  # not connected any more: the peer was faster
            copy.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def resend_often(stream: socket.socket) -> None:
    """Have the kernel resend unacknowledged bytes once a second at least, however long the network has been away.

    The kernel doubles the pause each time, so that after an outage of 3.5 s a message lies for another 2.7 s (seen on
    Linux 6.18). Before Linux 6.15 it still does so, but only from the seventh time on. Elsewhere nothing changes.
    """
    if sys.platform == "linux":
        for option, value in ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000)):
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.IPPROTO_TCP, option, value)


def gloo_address(published: bytes) -> Address | None:
    """Return the listening address that a gloo rank has published in the store, or None if it is not readable.

    Layout (gloo/transport/tcp/context.cc ``Rank::bytes``; the same in torch 2.6 and 2.13): host name length and text,
    address length, ``sockaddr_storage``, sequence number.
    """
    try:
        (host_length,) = struct.unpack_from("=Q", published, 0)
        at = 8 + host_length
        (length,) = struct.unpack_from("=Q", published, at)
        if length < _SOCKADDR_STORAGE or len(published) < at + 8 + length:
            return None
        (family,), (port,) = struct.unpack_from("=H", published, at + 8), struct.unpack_from("!H", published, at + 10)
    except (struct.error, OverflowError):
        return None
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, published[at + 12 : at + 16]), port
    if family == socket.AF_INET6:
        return _plain(socket.inet_ntop(socket.AF_INET6, published[at + 16 : at + 32])), port
    return None


def _duplicate(fd: int, inode: int | None) -> socket.socket | None:
    """Return a socket object on a duplicate of ``fd``, or None if ``fd`` is not the open socket with ``inode``."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    return adopt(copy, inode)


def adopt(copy: int, inode: int | None = None) -> socket.socket | None:
    """Return a socket object that owns the descriptor ``copy``; None, with it closed, if it is another or no socket."""
    try:
        status = os.fstat(copy)
        if stat.S_ISSOCK(status.st_mode) and inode in (None, status.st_ino):
            # With this type the socket object leaves the flags alone. A plain socket.socket(fileno=...) would
            # switch the *shared* connection to non-blocking wherever the program called socket.setdefaulttimeout().
            return socket.socket(-1, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, -1, copy)
    except OSError:
        pass  # a socket of a family that Python does not know: not TCP, closed below like all others
    os.close(copy)
    return None


def _is_tcp(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
    except OSError:
        return False


def _ends(sock: socket.socket) -> tuple[Address | None, Address | None]:
    """Return both addresses of a TCP socket that is connected; (None, None) for any other."""
    try:
        local, remote = sock.getsockname(), sock.getpeername()
    except OSError:  # listening, or not connected any more
        return None, None
    return (_plain(local[0]), local[1]), (_plain(remote[0]), remote[1])


def _plain(host: str) -> str:
    """The IPv4 form of an IPv4 address that came through an IPv6 socket; anything else unchanged."""
    return host.removeprefix("::ffff:") if "." in host else host
