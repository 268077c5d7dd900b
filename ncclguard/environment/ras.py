"""NCCL's RAS (2.24 and newer): one bounded question to its port, and what it says of the communicators of a job.

`explain --ras`, `doctor` and the report of an incident ask it. RAS is a witness for communicators that no process group
of torch stands for; it decides nothing and accuses nobody. Nothing here imports torch, and no caller of a collective
ever waits for it.

What it said when an incident began is quoted in the report, beside the verdict. RAS sees communicators of an inference
engine, of a weight exchange, and of the ranks that a job's other programs have. What it cannot see is who is to blame:
its counts are those of launches and not of ends, a process that is stopped and one that is gone look alike to it for a
minute, and a communicator that the guard ends is one that RAS calls aborted.

The protocol is that of NCCL's src/ras/client_support.cc (2.24 to 2.30, ``rasClientEventLoop``): lines of commands, each
with one line for an answer, and after ``STATUS`` a document until the server closes the connection.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal

from pydantic import BaseModel, ValidationError

from ncclguard.environment.nccl_names import read_conf
from ncclguard.environment.network import resolve
from ncclguard.incident.model import Incident, ranks_text
from ncclguard.incident.timeline import Quoted, RasQuote
from ncclguard.language import joined, tr

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

#: Values of ncclResult_t that are no errors (nccl.h): ncclSuccess and ncclInProgress.
SUCCESS, IN_PROGRESS = 0, 7
#: What the others are called (``ncclErrorToString`` in src/ras/client_support.cc).
ERRORS: Final = {
    1: "an unhandled CUDA error",
    2: "a system error",
    3: "an internal error",
    4: "an invalid argument",
    5: "invalid usage",
    6: "a remote process error",
}
#: Ranks of one communicator of which something is said one by one; of more, their numbers.
SHOWN_RANKS: Final = 4

Form = Literal["text", "json"]


class NoWitness(Exception):
    """RAS was not asked, or has not answered in time and form; the text is the reason, in one sentence."""


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
        raise NoWitness(f"RAS is switched off by NCCL_RAS_ENABLE={settings['NCCL_RAS_ENABLE']}")
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
        raise NoWitness(f"{address} is no address of RAS: give HOST:PORT")
    found = resolve(host or "localhost", min(within, 5.0))
    if not found:
        raise NoWitness(f"{address}: the name {host} cannot be resolved")
    silent = closed = 0
    while True:
        try:
            with _connect(address, found, int(port), end) as connection:
                return _converse(connection, address, end, FIRST_LINE * LONGER**silent, form, at_most)
        except _Silent as error:
            silent, closed = silent + (not error.args), closed + bool(error.args)
            if closed >= CLOSED_BEFORE:
                raise NoWitness(f"{address}: the connection is closed without an answer, {closed} times") from None
            if time.monotonic() >= end:
                raise NoWitness(
                    f"{address}: {silent + closed} connection{'s' * (silent + closed > 1)} without an answer in "
                    f"{within:g} s; what listens there may be stopped, or is not RAS"
                ) from None
        except TimeoutError:
            raise NoWitness(f"{address}: no whole answer within {within:g} s") from None
        except ConnectionResetError:
            raise NoWitness(f"{address}: the connection was closed within the answer") from None
        except OSError as error:
            raise NoWitness(f"{address}: {error.strerror or error}") from None


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
        raise NobodyListens(
            f"nobody listens at {address}: RAS does while a job with NCCL 2.24 or newer runs on that host"
        ) from None


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
        raise NoWitness(f"{address}: something else than RAS listens there; its first line is {first[:60]!r}")
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
            raise NoWitness(f"{address}: the answer is longer than {at_most >> 20} MiB; read it with ncclras")
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


# ---------------------------------------------------------------------- the document, and what it comes to


class RankState(BaseModel):
    """How far a rank has come with its communicator; `init_state` and `async_error` are values of ncclResult_t."""

    init_state: int = SUCCESS
    async_error: int = SUCCESS
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False


class Member(BaseModel):
    """A rank, by its number in the communicator."""

    rank: int
    host: str = ""
    pid: int = 0


class Rank(Member):
    """A rank that has answered, with the operations that it has launched."""

    status: RankState = RankState()
    collective_counts: dict[str, int] = {}


class Absence(BaseModel):
    """Why a rank has not answered; both False: its process answers, and has no such communicator any more."""

    unresponsive: bool = False
    considered_dead: bool = False


class MissingRank(Member):
    """A rank that has not answered."""

    status: Absence = Absence()


class Communicator(BaseModel):
    """One communicator of the job; `ranks` are those that have answered."""

    hash: str
    size: int
    ranks: tuple[Rank, ...] = ()
    missing_ranks: tuple[MissingRank, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of all ranks, in order of rank."""
        found = {one.rank: one.pid for one in (*self.ranks, *self.missing_ranks)}
        return tuple(found[rank] for rank in sorted(found))

    def troubles(self) -> tuple[str, ...]:
        """What is not in order, as a person reads it, with the communicator's own numbers of ranks; empty if all is.

        The counts of launches differ in every job that runs, for a moment; in one that stands still they tell who is
        behind.
        """
        return (*self.defects(), *self.uneven())

    def defects(self) -> tuple[str, ...]:
        """Ranks that are missing, have met an error, or are in another state than others."""
        dead = [one for one in self.missing_ranks if one.status.considered_dead]
        silent = [one for one in self.missing_ranks if one.status.unresponsive and not one.status.considered_dead]
        without = [one for one in self.missing_ranks if one not in dead and one not in silent]
        told = [
            _said(dead, "considered dead by RAS", "considered dead by RAS"),
            _said(silent, "does not answer RAS", "do not answer RAS"),
            _said(without, "has left it: the process answers RAS", "have left it: their processes answer RAS"),
        ]
        for value in sorted({error for one in self.ranks for error in _errors(one)}):
            name = ERRORS.get(value, f"error {value}")
            told.append(
                _said((one for one in self.ranks if value in _errors(one)), f"has met {name}", f"have met {name}")
            )
        aborting = [one for one in self.ranks if one.status.abort_flag]
        begun = [one for one in self.ranks if one.status.init_state == IN_PROGRESS and one not in aborting]
        told.append(_said(aborting, "is aborting it", "are aborting it"))
        told.append(_said(begun, "has not finished making it", "have not finished making it"))
        return tuple(filter(None, told))

    def uneven(self) -> tuple[str, ...]:
        """The operations that some ranks have launched more often than others; a count says nothing of their ends."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.collective_counts)
        found = []
        for name in names:
            by_count: dict[int, list[int]] = {}
            for rank in self.ranks:
                by_count.setdefault(rank.collective_counts.get(name, 0), []).append(rank.rank)
            if len(by_count) > 1:
                sides = sorted(by_count.items(), key=lambda side: (-len(side[1]), -side[0]))
                said = ", ".join(f"{count} by {ranks_text(numbers)}" for count, numbers in sides[:SHOWN_RANKS])
                found.append(f"{name} launched {said}{', ...' if len(sides) > SHOWN_RANKS else ''}")
        return tuple(found)


class _Document(BaseModel):
    nccl_version: str
    communicators: tuple[Communicator, ...]


class Report(BaseModel):
    """What RAS says of a job. `text` is all there is of NCCL before 2.28.7; `communicators` is None then."""

    address: str
    nccl_version: str
    communicators: tuple[Communicator, ...] | None = None
    text: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """What RAS itself lists under "Errors" and "Warnings", where it answered in text."""
        _, _, found = self.text.partition("\nErrors\n")
        lines = [line.strip() for line in found.splitlines()]
        return tuple(line for line in lines if line and line != "Warnings" and set(line) != {"="})


def report(address: str, *, within: float, at_most: int = AT_MOST) -> Report:
    """Ask RAS at `address` and return what it says of the job, after `within` seconds at the latest.

    Raises:
        NoWitness: nobody answers there, or not with what RAS says.
    """
    text = ask(address, within=within, form="json", at_most=at_most)
    if not text.lstrip().startswith("{"):
        words = text.split("\n", 1)[0].split()
        if words[:2] != ["NCCL", "version"] or len(words) < 3:
            raise NoWitness(f"{address}: the answer is none of RAS; it begins with {text[:60]!r}")
        return Report(address=address, nccl_version=words[2], text=text)
    try:
        found = _Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        raise NoWitness(f"{address}: the answer ({len(text)} bytes) cannot be read: {where}{first['msg']}") from None
    return Report(address=address, nccl_version=found.nccl_version, communicators=found.communicators)


def _said(ranks: Iterable[Member], one: str, several: str) -> str:
    found = list(ranks)
    if not found:
        return ""
    names: str = ranks_text(rank.rank for rank in found)
    if len(found) <= SHOWN_RANKS:
        places = ", ".join(f"pid {rank.pid} on {rank.host}" for rank in found)
        names += f" ({places})"
    return f"{names} {one if len(found) == 1 else several}"


def _errors(rank: Rank) -> set[int]:
    return {rank.status.init_state, rank.status.async_error} - {SUCCESS, IN_PROGRESS}


#: Seconds that RAS is given, of which it gives a third to the processes that do not answer it; nobody waits for it.
WITHIN: Final = 6.0
#: An answer that was asked for less than so many seconds ago serves for another incident too: a rank that is away holds
#: up all of its groups.
SHARED: Final = 5.0
#: Bytes of an answer that a training process reads: 7,000 ranks.
QUOTED_AT_MOST: Final = 4 << 20
#: Communicators that are quoted, and lines of RAS itself where it has no JSON.
QUOTED: Final = 8
LINES: Final = 24


def quote(
    report: Report, groups: Mapping[str, Sequence[int]], pids: Mapping[int, int], own: int | None = None
) -> RasQuote:
    """Quote what is not in order; communicators that no process group of torch stands for come first.

    `groups`: the ranks of the process groups by name; `pids`: the processes of ranks, as far as they are known; `own`:
    this process. An answer in which it does not appear is that of another job and quoted nowhere; one in text names no
    process of ranks that are in order, so it cannot be told whose it is.
    """
    head = RasQuote(address=report.address, nccl=report.nccl_version)
    if report.communicators is None:
        lines = report.lines
        return head.model_copy(update={"lines": lines[:LINES], "more": len(lines[LINES:])})
    own = os.getpid() if own is None else own
    if not any(own in one.pids for one in report.communicators):
        reason = tr(
            "{address} answers for {count} communicators, and this process ({pid}) is in none: they may be another job's",
            address=report.address,
            count=len(report.communicators),
            pid=own,
        )
        return head.model_copy(update={"reason": reason})
    found = [_quoted(one, troubles, groups, pids) for one in report.communicators if (troubles := one.troubles())]
    found.sort(key=lambda one: bool(one.groups))
    quoted = {"communicators": tuple(found[:QUOTED]), "more": len(found[QUOTED:])}
    return head.model_copy(update={"count": len(report.communicators), **quoted})


def _quoted(
    communicator: Communicator,
    troubles: tuple[str, ...],
    groups: Mapping[str, Sequence[int]],
    pids: Mapping[int, int],
) -> Quoted:
    same = tuple(name for name, ranks in groups.items() if _same(communicator.pids, ranks, pids))
    if same:
        members = tr("the ranks of process group {group}", group=same[0])
        if len(same) > 1:
            members = tr("the ranks of process groups {groups}", groups=", ".join(same))
    else:
        known = _members(communicator.pids, pids)
        members = tr("{members}, for which torch has no process group here", members=known)
    return Quoted(hash=communicator.hash, size=communicator.size, groups=same, members=members, troubles=troubles)


def _same(processes: Sequence[int], ranks: Sequence[int], pids: Mapping[int, int]) -> bool:
    """Whether a communicator has the ranks of a group, in their order, as far as their processes are known."""
    if len(processes) != len(ranks):
        return False
    known = [(pids[rank], pid) for rank, pid in zip(ranks, processes) if rank in pids]
    return bool(known) and all(expected == pid for expected, pid in known)


def _members(processes: Sequence[int], pids: Mapping[int, int]) -> str:
    count = Counter(pids.values())
    ranks = {pid: rank for rank, pid in pids.items() if count[pid] == 1}  # two hosts may have a process of one number
    known = [ranks[pid] for pid in processes if pid in ranks]
    others = len(processes) - len(known)
    parts = [ranks_text(known)] if known else []
    if others:
        one, many = tr("1 process"), tr("{count} processes", count=others)
        if known:
            one, many = tr("1 other process"), tr("{count} other processes", count=others)
        parts.append(many if others > 1 else one)
    return joined(" and ", parts)


class Witness:
    """Asks RAS in a thread of its own, for reports of incidents; `quote` waits, and is for threads nobody waits for.

    `wanted`: whether this process may have communicators of NCCL at all; `known`: the ranks of its process groups by
    name, and the processes of ranks, of which an incident may know more than the others.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        known: Callable[[Incident], tuple[Mapping[str, Sequence[int]], Mapping[int, int]]],
    ) -> None:
        self._wanted = wanted
        self._known = known
        self._lock = threading.Lock()
        self._begun = float("-inf")
        self._done = threading.Event()
        self._done.set()
        self._found: Report | NoWitness = NoWitness(tr("it was not asked"))

    @property
    def patience(self) -> float:
        """Seconds within which an answer comes, or none."""
        return 2 * WITHIN

    def begin(self) -> bool:
        """Ask, unless that was done a moment ago; False where there is nothing to ask about."""
        if not self._wanted():
            return False
        with self._lock:
            now = time.monotonic()
            if self._done.is_set() and now - self._begun >= SHARED:
                self._begun, self._done = now, threading.Event()
                self._found = NoWitness(tr("the question to it failed"))
                try:
                    threading.Thread(target=self._ask, args=(self._done,), name="ncclguard-ras", daemon=True).start()
                except RuntimeError:  # the program has ended: Python 3.12 starts no threads any more
                    self._found = NoWitness(tr("the program had ended before it could be asked"))
                    self._done.set()
        return True

    def quote(self, incident: Incident, seconds: float) -> RasQuote | None:
        """What RAS says, or why there is nothing; None if that takes longer than `seconds`."""
        if not self._done.wait(seconds):
            return None
        found = self._found
        return RasQuote(reason=str(found)) if isinstance(found, NoWitness) else quote(found, *self._known(incident))

    def _ask(self, done: threading.Event) -> None:
        try:
            self._found = report(address_of(), within=WITHIN, at_most=QUOTED_AT_MOST)
        except NoWitness as why:
            self._found = why
        finally:
            done.set()
