"""Bounded questions to the network: does a name resolve, is an address's name known, does a host answer."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Callable

from ncclguard.environment.links import family_of

#: For the variable of this name, which the C library's resolver reads: a lost answer costs 1 s, not 5 and more.
RES_OPTIONS = "timeout:1 attempts:1"
# What a host that can be reached says of a port on which nobody listens.
_ANSWERED = frozenset({0, errno.ECONNREFUSED})


def resolve(name: str, seconds: float = 5.0) -> tuple[str, ...]:
    """The addresses of a host name, in the resolver's order; none when it has none or does not answer in time.

    >>> resolve("127.0.0.1")
    ('127.0.0.1',)
    """
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError):  # no such name: the empty answer says so
            return
        found.extend(str(answer[4][0]).partition("%")[0] for answer in answers)

    _wait_for(ask, seconds)
    return tuple(dict.fromkeys(found))


def name_seconds(address: str, seconds: float = 5.0) -> float:
    """How long the system's resolver takes for the name of an address, which may have none; ``seconds`` at most.

    Asked for as torch's TCPStore does it when somebody connects: an IPv4 address as one of IPv6 (``::ffff:10.0.0.1``).

    >>> 0.0 < name_seconds("127.0.0.1") <= 5.0
    True
    """
    mapped = address if ":" in address else f"::ffff:{address}"

    def ask() -> None:
        with contextlib.suppress(OSError):  # the resolver says that it does not know: an answer too
            socket.getnameinfo((mapped.partition("%")[0], 1, 0, 0), socket.NI_NUMERICSERV)

    started = time.monotonic()
    _wait_for(ask, seconds)
    return min(time.monotonic() - started, seconds)


def _wait_for(ask: Callable[[], None], seconds: float) -> None:
    """The system's resolver takes no time limit, so it runs in a thread that is left behind when it is too slow."""
    thread = threading.Thread(target=ask, name="ncclguard-resolve", daemon=True)
    thread.start()
    thread.join(seconds)


def answers(address: str, port: int, device: str, seconds: float = 1.0) -> bool:
    """Whether a host answers a TCP connection that is made through one interface; a refusal is an answer too.

    Linux only (``SO_BINDTODEVICE``). False when nothing came back within ``seconds``.
    """
    with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        except OSError:  # no such interface, or not permitted before Linux 5.7
            return False
        error = sock.connect_ex((address, port))
        if error == errno.EINPROGRESS:
            waiting = select.poll()  # select() takes no descriptor above 1023
            waiting.register(sock, select.POLLOUT)
            if not waiting.poll(1000 * seconds):
                return False
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error in _ANSWERED
