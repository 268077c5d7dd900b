"""One bounded question to the port of NCCL's RAS (2.24 and newer).

No caller of a collective ever waits for it. The protocol is that of NCCL's src/ras/client_support.cc (2.24 to 2.30,
``rasClientEventLoop``): lines of commands, each with one line for an answer, and after ``STATUS`` a document until the
server closes the connection.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from ncclguard_explain.host import read_conf, resolve
from ncclguard_explain.language import Message, joined, tr

DEFAULT_ADDRESS: Final = "localhost:28028"
#: Seconds for the first line of an answer. All processes of a host listen on the one port (SO_REUSEPORT) and the kernel
#: gives a client to any of them: one that does not answer by then may be stopped, and the next connection may meet
#: another. Each time that has happened the next is given half as much again, for a machine that is slow.
FIRST_LINE: Final = 0.5
LONGER: Final = 1.5
#: Connections that may be closed before a first line; a process that is about to end closes them too.
CLOSED_BEFORE: Final = 3
#: Characters that the answer to a command may have; NCCL's have less than 40.
LINE: Final = 1024
#: Bytes of a document. The JSON of a communicator with 1,000 ranks has about 600,000.
AT_MOST: Final = 64 << 20

Form = Literal["text", "json"]


class NoWitness(Exception):
    """RAS was not asked, or has not answered in time and form; `reason` says why, in one sentence."""

    def __init__(self, reason: Message) -> None:
        super().__init__(reason)
        self.reason = reason


class NobodyListens(NoWitness):
    """There is no server at the address: no job with RAS runs on that host, or it has another address."""


class _Silent(Exception):
    """The process that the kernel chose has not said its first line, or has closed the connection."""


def address_of(environ: Mapping[str, str] | None = None) -> str:
    """Return where RAS listens by ``NCCL_RAS_ADDR``, from the environment or NCCL's files.

    Raises:
        NoWitness: ``NCCL_RAS_ENABLE`` switches RAS off.
    """
    environ = os.environ if environ is None else environ
    settings = {**{name: value for name, (value, _) in read_conf(environ).items()}, **environ}
    try:
        enabled = int(settings.get("NCCL_RAS_ENABLE", "1"), 0) == 1
    except ValueError:  # NCCL takes its default then (src/misc/param.cc)
        enabled = True
    if not enabled:
        raise NoWitness(tr("RAS is switched off by NCCL_RAS_ENABLE={value}", value=settings["NCCL_RAS_ENABLE"]))
    return settings.get("NCCL_RAS_ADDR") or DEFAULT_ADDRESS


def ask(address: str, *, within: float, form: Form, at_most: int = AT_MOST) -> str:
    """Return the document with which RAS answers ``VERBOSE STATUS``, after `within` seconds at the latest.

    `form` "json" needs NCCL 2.28.7; an older one answers in text. `at_most` bounds the document, in bytes.

    Raises:
        NobodyListens: there is no server at `address` ("host:port").
        NoWitness: nobody answers there, or not with what RAS says.
    """
    end = time.monotonic() + within
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise NoWitness(tr("{address} is no address of RAS: give HOST:PORT", address=address))
    found = resolve(host or "localhost", min(within, 5.0))
    if not found:
        raise NoWitness(_at(address, tr("the name {host} cannot be resolved", host=host)))
    silent = closed = 0
    while True:
        try:
            with _connect(address, found, int(port), end) as connection:
                return _converse(connection, address, end, FIRST_LINE * LONGER**silent, form, at_most)
        except _Silent as error:
            silent, closed = silent + (not error.args), closed + bool(error.args)
            if closed >= CLOSED_BEFORE:
                why = tr("the connection is closed without an answer, {count} times", count=closed)
                raise NoWitness(_at(address, why)) from None
            if time.monotonic() >= end:
                one = tr(
                    "1 connection without an answer in {seconds:g} s; what listens there may be stopped, or is not RAS",
                    seconds=within,
                )
                several = tr(
                    "{count} connections without an answer in {seconds:g} s; what listens there may be stopped, or is not RAS",
                    count=silent + closed,
                    seconds=within,
                )
                raise NoWitness(_at(address, one if silent + closed == 1 else several)) from None
        except TimeoutError:
            raise NoWitness(_at(address, tr("no whole answer within {seconds:g} s", seconds=within))) from None
        except ConnectionResetError:
            raise NoWitness(_at(address, tr("the connection was closed within the answer"))) from None
        except OSError as error:
            raise NoWitness(_at(address, error.strerror or str(error))) from None


def _at(address: str, what: str) -> Message:
    return joined(": ", (address, what))


def _connect(address: str, hosts: Sequence[str], port: int, end: float) -> socket.socket:
    """Connect to the first of the addresses that takes a connection."""
    for host in hosts[:-1]:
        try:
            return socket.create_connection((host, port), _left(end))
        except OSError:  # localhost is ::1 and 127.0.0.1, and RAS listens on one of them
            continue
    try:
        return socket.create_connection((hosts[-1], port), _left(end))
    except ConnectionRefusedError:
        text = tr(
            "nobody listens at {address}: RAS does while a job with NCCL 2.24 or newer runs on that host",
            address=address,
        )
        raise NobodyListens(text) from None


def _converse(
    connection: socket.socket, address: str, end: float, first_within: float, form: Form, at_most: int
) -> str:
    first_by = min(time.monotonic() + first_within, end)
    received = bytearray()
    try:
        connection.settimeout(_left(first_by))
        connection.sendall(b"CLIENT PROTOCOL 2\n")
        first = _line(connection, received, first_by)
    except (TimeoutError, ConnectionError) as error:
        raise _Silent(*(["closed"] if isinstance(error, ConnectionError) else [])) from None
    if not first.startswith("SERVER PROTOCOL "):
        raise NoWitness(
            _at(address, tr("something else than RAS listens there; its first line is {said}", said=repr(first[:60])))
        )
    # Seconds that RAS waits for processes that do not answer it; whole ones, which every version reads.
    commands = [f"TIMEOUT {max(1, int(_left(end) / 3))}", *(["SET FORMAT json"] if form == "json" else [])]
    for command in commands:
        connection.settimeout(_left(end))
        connection.sendall(f"{command}\n".encode())
        _line(connection, received, end)  # "OK", or "ERROR: ..." of a version that does not know the command
    connection.settimeout(_left(end))
    connection.sendall(b"VERBOSE STATUS\n")
    while part := _receive(connection, end):
        received += part
        if len(received) > at_most:
            raise NoWitness(
                _at(address, tr("the answer is longer than {limit} MiB; read it with ncclras", limit=at_most >> 20))
            )
    return received.decode("utf-8", "replace")


def _line(connection: socket.socket, received: bytearray, end: float) -> str:
    """Take the next line of what was received."""
    while b"\n" not in received[: LINE + 1]:
        if len(received) > LINE:
            break
        part = _receive(connection, end)
        if not part:
            raise ConnectionResetError
        received += part
    line, newline, _ = bytes(received[: LINE + 1]).partition(b"\n")
    del received[: len(line) + len(newline)]
    return line.decode("utf-8", "replace").rstrip("\r")


def _receive(connection: socket.socket, end: float) -> bytes:
    connection.settimeout(_left(end))
    return connection.recv(1 << 16)


def _left(end: float) -> float:
    """Return the seconds until then. Raises TimeoutError when it has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
