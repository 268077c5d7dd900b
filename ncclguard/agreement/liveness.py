"""Evidence about other ranks' processes: on the same host from /proc, on another one from a listening socket, the door.

Absence of evidence is UNKNOWN, never GONE. A process is GONE only when the kernel says so: its pid does not exist or
belongs to a later process, it is a zombie, or its host refuses connections at a door that this process had reached
before (a firewall that rejects looks the same, but then the door was not reached before).

A door costs no thread: the kernel completes connections in the queue of a listening socket also while its process is
stopped or holds the GIL, which is what makes it a sign that the process exists. Connections that gloo keeps are no such
sign: forked DataLoader workers hold them open for seconds after the rank died.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import select
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum

Door = tuple[str, int]  # (numeric address, port)

PROBE_AGAIN = 1.0  # seconds between the end of a probe and the next one of the same door
PROBE_LIMIT = 1.0  # seconds after which a connection that nobody answers is given up
WAIT = 0.02  # seconds that one `look` may wait for an answer, so that the first look at a near host already has one
WAIT_AGAIN = 0.1  # seconds between two such waits: together the looks of a monitor's step stay far below 50 ms
PROBES = 256  # connections to doors under way at a time: a process has a limit of open files
QUEUE = 1024  # connections that a door holds while its process does not collect them; the kernel may allow fewer

_UNROUTED = ("192.0.2.1", 9)  # TEST-NET-1, RFC 5737: only asks the kernel for the way out, nothing is sent


class Sight(str, Enum):
    """What can be seen of a peer's process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    PRESENT = "present"  # the process exists, no more is known
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a rank's process is, as it publishes it.

    ``host_key`` is equal only where pids mean the same processes and addresses the same hosts. ``start_ticks`` is the
    start time of the process in clock ticks since boot (/proc/<pid>/stat field 22, see proc(5)), so a reused pid is
    told apart.
    """

    rank: int
    host: str
    host_key: str
    pid: int
    start_ticks: int
    door: Door | None
    stacks: tuple[int, int, int, int] | None = None  # how to have it write its stacks, see incident/dumps.py

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """The identity that ``to_json`` wrote; ValueError for anything else."""
        try:
            fields = json.loads(text)
            door = None if fields["door"] is None else (str(fields["door"][0]), int(fields["door"][1]))
            return cls(
                rank=int(fields["rank"]),
                host=str(fields["host"]),
                host_key=str(fields["host_key"]),
                pid=int(fields["pid"]),
                start_ticks=int(fields["start_ticks"]),
                door=door,
                stacks=None if fields.get("stacks") is None else tuple(int(n) for n in fields["stacks"][:4]),  # type: ignore[arg-type]
            )
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{text!r} is no identity of a rank ({error!r}); all ranks must run the same version of ncclguard"
            ) from error


@dataclass(slots=True)
class _Probe:
    """What is known of one peer's door, and the connection under way to it."""

    reached: bool = False
    gone: str = ""
    answer: tuple[Sight, str] | None = None
    connection: socket.socket | None = None
    started: float = 0.0
    ended: float = field(default=-PROBE_AGAIN)

    def end(self, now: float) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.ended = None, now


class Liveness:
    """Makes this process visible to its peers, and looks at theirs; safe to use from several threads.

    ``advertise_address`` is the numeric address at which peers on other hosts reach this one; by default the local
    address from which MASTER_ADDR is reached.

    >>> liveness = Liveness(rank=0)
    >>> liveness.look(liveness.identity)[0] is Sight.RUNNING
    True
    >>> liveness.close()
    """

    def __init__(self, rank: int, advertise_address: str | None = None) -> None:
        self._lock = threading.Lock()
        self._probes: dict[Identity, _Probe] = {}
        self._under_way: dict[Identity, _Probe] = {}  # those with a connection, and some that had one
        self._last_wait = -WAIT_AGAIN
        self._listener = _open_door(advertise_address or _discover_address())
        door: Door | None = None
        if self._listener is not None:
            address, port = self._listener.getsockname()[:2]
            if address in ("0.0.0.0", "::"):  # the advertised one is not an address of this host's own interfaces
                address = advertise_address
            door = (address, port)
        start = process_state(os.getpid())
        self.identity = Identity(
            rank=rank,
            host=socket.gethostname(),
            host_key=host_key(),
            pid=os.getpid(),
            start_ticks=0 if start is None else start[1],
            door=door,
        )
        _open.add(self)

    def look(self, peer: Identity) -> tuple[Sight, str]:
        """What can be seen of a peer's process now, and the evidence in words; blocks for
        20 ms at most, as a rule not at all.

        For a peer on another host this starts a connection to its door or collects the answer of one that is under way;
        the last answer stands until the next one is there.
        """
        if peer.host_key == self.identity.host_key:
            return look_here(peer)
        with self._lock:
            return self._look_there(peer)

    def befriend(self, peer: Identity) -> None:
        """Reach a peer's door once, so that its being refused later is evidence; returns at
        once, ``look`` goes on with it.
        """
        self.look(peer)

    def seek(self, peers: Iterable[Identity], since: float) -> None:
        """Reach for the doors of several peers at once, so that a `look` a moment later
        finds their answers; never waits.

        Each is probed once after ``since`` (time.monotonic()), PROBES at a time: call it again for those that had to
        wait.
        """
        with self._lock:
            self._tidy(0.0)
            for peer in peers:
                if len(self._under_way) >= PROBES:
                    return
                if peer.door is None or peer.host_key == self.identity.host_key:
                    continue
                probe = self._probes.setdefault(peer, _Probe())
                if not probe.gone and probe.connection is None and probe.started < since:
                    self._begin(probe, peer, peer.door)

    def drain(self) -> None:
        """Accept and close what has queued at the own door, and end probes that nobody asks
        about any more; never blocks.
        """
        if self._under_way:
            with self._lock:
                self._tidy(PROBE_LIMIT)
        while self._listener is not None:
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:
                return
            except ConnectionError:  # the other side had given up meanwhile
                continue
            except OSError:  # closed by another thread
                return

    def close(self) -> None:
        """Close the door and every connection under way; peers then see this process as gone. Safe to call twice."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        for probe in self._probes.values():
            probe.end(time.monotonic())

    def _close_in_child(self) -> None:
        self._lock = threading.Lock()  # the thread that may have held it does not exist in the child
        self._close()

    def _look_there(self, peer: Identity) -> tuple[Sight, str]:
        if peer.door is None:
            return Sight.UNKNOWN, f"rank {peer.rank} on {peer.host} could not open a port that shows it is there"
        probe = self._probes.setdefault(peer, _Probe())
        if probe.gone:
            return Sight.GONE, probe.gone
        now = time.monotonic()
        if probe.connection is None and now - probe.ended >= PROBE_AGAIN:
            self._begin(probe, peer, peer.door)
        if probe.connection is not None:
            self._collect(probe, peer, WAIT if now - self._last_wait >= WAIT_AGAIN else 0.0)
        if probe.answer is None:
            return Sight.UNKNOWN, f"{_named(peer)} has not answered for {time.monotonic() - probe.started:.1f} s"
        return probe.answer

    def _tidy(self, age: float) -> None:
        """Take the answers of the probes that were started so many seconds ago."""
        for peer, probe in list(self._under_way.items()):
            if probe.connection is not None and time.monotonic() - probe.started >= age:
                self._collect(probe, peer, 0.0)
            if probe.connection is None:
                del self._under_way[peer]

    def _begin(self, probe: _Probe, peer: Identity, door: Door) -> None:
        """Start a connection to the peer's door."""
        probe.started = time.monotonic()
        family = socket.AF_INET6 if ":" in door[0] else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # no descriptor left
            probe.answer = Sight.UNKNOWN, f"{_named(peer)} cannot be looked for from here: {error.strerror}"
            probe.end(probe.started)
            return
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # leaves no TIME_WAIT behind
        probe.connection = connection
        self._under_way[peer] = probe
        error_number = connection.connect_ex(door)
        if error_number != errno.EINPROGRESS:
            self._settle(probe, peer, error_number)

    def _collect(self, probe: _Probe, peer: Identity, wait: float) -> None:
        """Take the answer of the connection under way, if there is one within so many seconds."""
        assert probe.connection is not None
        poller = select.poll()  # not select(): a training process may have more than 1024 files open
        poller.register(probe.connection, select.POLLOUT)
        ready = bool(poller.poll(wait * 1000))
        if wait:
            self._last_wait = time.monotonic()
        if ready:
            self._settle(probe, peer, probe.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        elif time.monotonic() - probe.started >= PROBE_LIMIT:
            self._settle(probe, peer, errno.ETIMEDOUT)

    def _settle(self, probe: _Probe, peer: Identity, error: int) -> None:
        """Turn the end of a connection attempt, 0 or an errno, into evidence."""
        where, now = _named(peer), time.monotonic()
        if error == 0:
            probe.reached = True
            probe.answer = Sight.PRESENT, f"{where} answers: the process exists"
        elif error == errno.ECONNREFUSED and probe.reached:
            probe.gone = f"{where} refuses connections and answered before: the process has ended"
            probe.answer = Sight.GONE, probe.gone
        elif error == errno.ECONNREFUSED:
            why = "refuses connections and was never reached before: it has ended, or a firewall rejects"
            probe.answer = Sight.UNKNOWN, f"{where} {why}"
        elif error == errno.ETIMEDOUT:
            probe.answer = Sight.UNKNOWN, f"{where} did not answer within {now - probe.started:.1f} s"
        else:
            probe.answer = Sight.UNKNOWN, f"{where} cannot be reached: {os.strerror(error)}"
        probe.end(now)


def look_here(peer: Identity) -> tuple[Sight, str]:
    """What /proc says of a peer's process on this host, and the evidence in words."""
    who = f"process {peer.pid} of rank {peer.rank} on {peer.host}"
    state = process_state(peer.pid)
    if state is None:
        try:  # a /proc that hides other users' processes (hidepid) shows nothing of one that exists
            os.kill(peer.pid, 0)
        except ProcessLookupError:
            return Sight.GONE, f"{who} does not exist any more"
        except PermissionError:
            return Sight.PRESENT, f"{who} exists, and belongs to another user"
        return Sight.PRESENT, f"{who} exists, and /proc does not show it"
    letter, start_ticks = state
    if start_ticks != peer.start_ticks:
        return Sight.GONE, f"{who} does not exist any more: its pid belongs to a process that was started later"
    if letter in "ZX":
        return Sight.GONE, f"{who} has ended: it is a zombie, its parent has not collected it yet"
    if letter in "Tt":
        return Sight.STOPPED, f"{who} is stopped ({'by a debugger' if letter == 't' else 'by a signal'})"
    return Sight.RUNNING, f"{who} exists (state {letter})"


def process_state(pid: int) -> tuple[str, int] | None:
    """The state letter and the start ticks of a process, /proc/<pid>/stat fields 3 and 22; None if /proc has none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()  # the name in field 2 may contain spaces and parentheses
    return fields[0].decode(), int(fields[19])


@functools.cache
def host_key() -> str:
    """Equal for two processes only if they share the host, its pids and its network;
    unlike all others if that is not known.

    Boot id, pid namespace and network namespace, and the hostname: machines restored from one snapshot share the
    others.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    except OSError:
        return f"unknown {uuid.uuid4().hex}"
    return " ".join((boot, *spaces, socket.gethostname()))


def _named(peer: Identity) -> str:
    assert peer.door is not None
    return f"rank {peer.rank}'s process on {peer.host} ({peer.door[0]} port {peer.door[1]})"


def _open_door(address: str) -> socket.socket | None:
    """A listening socket at the address, or at all addresses where it is not one of
    this host's own; None if neither.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for bound in (address, "::" if family == socket.AF_INET6 else "0.0.0.0"):
        try:
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError:
            return None
        try:
            listener.bind((bound, 0))
            listener.listen(QUEUE)
            return listener
        except OSError:
            listener.close()
    return None


def _discover_address() -> str:
    """The local address from which the master, or else the default route, is reached; sends nothing."""
    master = _source_towards(os.environ.get("MASTER_ADDR", ""))
    several_hosts = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if master is None or (several_hosts and (master.startswith("127.") or master == "::1")):
        # On the master's own host its name often stands for a loopback address, which other hosts cannot use.
        return _source_towards(_UNROUTED[0]) or master or "127.0.0.1"
    return master


def _source_towards(host: str) -> str | None:
    if not host:
        return None
    try:
        found = socket.getaddrinfo(host, _UNROUTED[1], type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


_open: weakref.WeakSet[Liveness] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for liveness in list(_open):
        liveness._close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
