"""Evidence about other ranks' processes: on the same host from /proc, on another one from a listening socket.

Absence of evidence is UNKNOWN, never GONE. A process is GONE only when the kernel says so: its pid does not exist or
belongs to a later process, the process is a zombie, or its host refuses connections at a liveness port that this
process had reached before (a firewall that rejects looks the same, but then the port was not reached before).

A liveness port costs no thread: the kernel completes connections in the queue of a listening socket also while its
process is stopped or holds the GIL, which is what makes them a sign that the process exists. Connections that gloo
keeps are no such sign: forked DataLoader workers hold them open for seconds after the rank died.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import select
import socket
import struct
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from enum import Enum

from ncclguard import lifecycle
from ncclguard.coordination.store import BATCH, AgreementStore, Entries, Stored
from ncclguard.environment.network import address_towards
from ncclguard.incident.stacks import Offer, exit_status, observe, process_state
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import tr

Port = tuple[str, int]  # (numeric address, port)

PROBE_AGAIN = 1.0  # seconds between the end of a probe and the next one of the same liveness port
PROBE_LIMIT = 1.0  # seconds after which a connection that nobody answers is given up
RETURNED_FOR = 10.0  # seconds for which a host that did not answer is not long enough back to be called well
WAIT = 0.02  # seconds that one `look` may wait for an answer, so that the first look at a near host already has one
WAIT_AGAIN = 0.1  # seconds between two such waits: together the looks of a monitor's step stay far below 50 ms
PROBES = 256  # connections to liveness ports under way at a time: a process has a limit of open files
QUEUE = (
    1024  # connections that a liveness port holds while its process does not collect them; the kernel may allow fewer
)


#: What the kernel says of a host from which nothing comes back.
UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN})
#: `tcpi_total_retrans`, behind eight bytes and 23 other numbers.
TOTAL_RETRANSMITS = struct.Struct("100xI")


class Sight(str, Enum):
    """The states of a peer's process, as far as they can be seen."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"
    PRESENT = "present"  # the process exists, no more is known
    RETURNED = "returned"  # the process exists, and could not be reached a moment ago
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Identity(Stored):
    """The process of a rank, as it publishes it.

    ``host_key`` is equal only where pids mean the same processes and addresses the same hosts. ``start_ticks`` is the
    start time of the process in clock ticks since boot (/proc/<pid>/stat field 22, see proc(5)), so a reused pid is
    told apart.
    """

    rank: int
    host: str
    host_key: str
    pid: int
    start_ticks: int
    port: Port | None  # where it listens, so that others see that it exists
    stacks: tuple[int, int, int, int] | None = None  # how to have it write its stacks, see incident/stacks.py


@dataclass(slots=True)
class _Probe:
    """The knowledge of one peer's liveness port, and the connection under way to it."""

    reached: bool = False
    gone: str = ""
    answer: tuple[Sight, str] | None = None
    connection: socket.socket | None = None
    started: float = 0.0
    missed: float = float("-inf")  # when it was last found that nothing comes back from its host
    ended: float = field(default=-PROBE_AGAIN)

    def end(self, now: float) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection, self.ended = None, now


class Liveness:
    """Makes this process visible to its peers, and looks at theirs; safe to use from several threads.

    ``advertise_address`` is the numeric address at which peers on other hosts reach this one; by default the local
    address from which ``towards``, or else MASTER_ADDR, is reached. ``label``: what people call this process.

    >>> liveness = Liveness(rank=0)
    >>> liveness.look(liveness.identity)[0] is Sight.RUNNING
    True
    >>> liveness.close()
    """

    def __init__(self, rank: int, advertise_address: str | None = None, towards: str = "", label: str = "") -> None:
        self._lock = threading.Lock()
        self._probes: dict[Identity, _Probe] = {}
        self._under_way: dict[Identity, _Probe] = {}  # those with a connection, and some that had one
        self._last_wait = -WAIT_AGAIN
        self._listener = _open_port(advertise_address or address_towards(towards))
        port: Port | None = None
        if self._listener is not None:
            address, number = self._listener.getsockname()[:2]
            if address in ("0.0.0.0", "::"):  # the advertised one is not an address of this host's own interfaces
                address = advertise_address
            port = (address, number)
        start = process_state(os.getpid())
        self.identity = Identity(
            rank=rank,
            host=f"{socket.gethostname()} ({label})" if label else socket.gethostname(),
            host_key=host_key(),
            pid=os.getpid(),
            start_ticks=0 if start is None else start[1],
            port=port,
        )
        _open.add(self)

    def look(self, peer: Identity) -> tuple[Sight, str]:
        """Return what can be seen of a peer's process now, and the evidence in words.

        It blocks for 20 ms at most, as a rule not at all.

        For a peer on another host this connects to its liveness port, or collects the answer of a connection under way;
        the last answer stands until the next one is there.
        """
        if peer.host_key == self.identity.host_key:
            return look_here(peer)
        with self._lock:
            return self._look_there(peer)

    def befriend(self, peer: Identity) -> None:
        """Reach a peer's port once, so that its being refused later is evidence; `look` goes on with it."""
        self.look(peer)

    def seek(self, peers: Iterable[Identity], since: float) -> None:
        """Reach for the liveness ports of several peers at once; never waits.

        A `look` a moment later finds their answers.

        Each is probed once after ``since`` (time.monotonic()), PROBES at a time: call it again for those that had to
        wait.
        """
        with self._lock:
            self._tidy(0.0)
            for peer in peers:
                if len(self._under_way) >= PROBES:
                    return
                if peer.port is None or peer.host_key == self.identity.host_key:
                    continue
                probe = self._probes.setdefault(peer, _Probe())
                if not probe.gone and probe.connection is None and probe.started < since:
                    self._begin(probe, peer, peer.port)

    def drain(self) -> None:
        """Accept and close what has queued at the own port, and end probes that nobody asks about; never blocks."""
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
        """Close the port and every connection under way; peers then see this process as gone. Safe to call twice."""
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
        if peer.port is None:
            return Sight.UNKNOWN, tr(
                "rank {rank} on {host} could not open a port that shows it is there", rank=peer.rank, host=peer.host
            )
        probe = self._probes.setdefault(peer, _Probe())
        if probe.gone:
            return Sight.GONE, probe.gone
        now = time.monotonic()
        if probe.connection is None and now - probe.ended >= PROBE_AGAIN:
            self._begin(probe, peer, peer.port)
        if probe.connection is not None:
            self._collect(probe, peer, WAIT if now - self._last_wait >= WAIT_AGAIN else 0.0)
        if probe.answer is None:
            return Sight.UNKNOWN, tr(
                "{who} has not answered for {seconds:.1f} s", who=_named(peer), seconds=time.monotonic() - probe.started
            )
        return probe.answer

    def _tidy(self, age: float) -> None:
        """Take the answers of the probes that were started so many seconds ago."""
        for peer, probe in list(self._under_way.items()):
            if probe.connection is not None and time.monotonic() - probe.started >= age:
                self._collect(probe, peer, 0.0)
            if probe.connection is None:
                del self._under_way[peer]

    def _begin(self, probe: _Probe, peer: Identity, port: Port) -> None:
        """Start a connection to the peer's liveness port."""
        probe.started = time.monotonic()
        family = socket.AF_INET6 if ":" in port[0] else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # no descriptor left
            probe.answer = (
                Sight.UNKNOWN,
                tr("{who} cannot be looked for from here: {error}", who=_named(peer), error=error.strerror),
            )
            probe.end(probe.started)
            return
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # leaves no TIME_WAIT behind
        probe.connection = connection
        self._under_way[peer] = probe
        error_number = connection.connect_ex(port)
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
            if probe.connection is not None and _was_sent_again(probe.connection):
                probe.missed = probe.started
            away = now - probe.missed
            if away < RETURNED_FOR:
                why = tr(
                    "{where} answers, and did not {seconds:.1f} s ago: the process exists, and may not have come to "
                    "answer yet",
                    where=where,
                    seconds=away,
                )
                probe.answer = Sight.RETURNED, why
            else:
                probe.answer = Sight.PRESENT, tr("{where} answers: the process exists", where=where)
        elif error == errno.ECONNREFUSED and probe.reached:
            probe.gone = tr("{where} refuses connections and answered before: the process has ended", where=where)
            probe.answer = Sight.GONE, probe.gone
        elif error == errno.ECONNREFUSED:
            why = tr(
                "{where} refuses connections and was never reached before: it has ended, or a firewall rejects",
                where=where,
            )
            probe.answer = Sight.UNKNOWN, why
        elif error == errno.ETIMEDOUT:
            probe.answer = (
                Sight.UNKNOWN,
                tr("{where} did not answer within {seconds:.1f} s", where=where, seconds=now - probe.started),
            )
        else:
            probe.answer = (
                Sight.UNKNOWN,
                tr("{where} cannot be reached: {error}", where=where, error=os.strerror(error)),
            )
        if error in UNREACHABLE:
            probe.missed = now
        probe.end(now)


def _was_sent_again(connection: socket.socket) -> bool:
    """Return whether the first packet of this connection was lost; see `struct tcp_info` in linux/tcp.h."""
    try:
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TOTAL_RETRANSMITS.size)
        return bool(TOTAL_RETRANSMITS.unpack(information)[0])
    except (OSError, struct.error):
        return False


def look_here(peer: Identity) -> tuple[Sight, str]:
    """Return what /proc says of a peer's process on this host, and the evidence in words."""
    who = tr("process {pid} of rank {rank} on {host}", pid=peer.pid, rank=peer.rank, host=peer.host)
    state = process_state(peer.pid)
    if state is None:
        try:  # a /proc that hides other users' processes (hidepid) shows nothing of one that exists
            os.kill(peer.pid, 0)
        except ProcessLookupError:
            return Sight.GONE, tr("{who} does not exist any more", who=who)
        except PermissionError:
            return Sight.PRESENT, tr("{who} exists, and belongs to another user", who=who)
        return Sight.PRESENT, tr("{who} exists, and /proc does not show it", who=who)
    letter, start_ticks = state
    if start_ticks != peer.start_ticks:
        return Sight.GONE, tr(
            "{who} does not exist any more: its pid belongs to a process that was started later", who=who
        )
    if letter in "ZX":
        how = exit_status(peer.pid) or tr("its parent has not collected it yet")
        return Sight.GONE, tr("{who} has ended: {how}", who=who, how=how)
    if letter in "Tt":
        if letter == "t":
            return Sight.STOPPED, tr("{who} is stopped (by a debugger)", who=who)
        return Sight.STOPPED, tr("{who} is stopped (by a signal)", who=who)
    return Sight.RUNNING, tr("{who} exists (state {letter})", who=who, letter=letter)


def silent_cause(sight: Sight) -> Cause:
    """A silent rank whose process exists is stuck; where nobody can look, the truth is unknown."""
    return Cause.STUCK if sight in (Sight.RUNNING, Sight.STOPPED, Sight.PRESENT) else Cause.UNKNOWN


@functools.cache
def host_key() -> str:
    """Return a key that is equal only for processes that share the host, its pids and its network.

    It is unlike all others if that is not known.

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
    assert peer.port is not None
    return tr(
        "rank {rank}'s process on {host} ({address} port {port})",
        rank=peer.rank,
        host=peer.host,
        address=peer.port[0],
        port=peer.port[1],
    )


def _open_port(address: str) -> socket.socket | None:
    """Open a listening socket at the address, or at all addresses where it is not of this host; None if neither."""
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


_open: weakref.WeakSet[Liveness] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for liveness in list(_open):
        liveness._close_in_child()


lifecycle.in_child(_close_all_in_child)


#: Seconds between two looks at the liveness ports of ranks on other hosts, and at the list of this host's ranks.
LOOK_EVERY = 1.0
#: Seconds up to which that list is looked at less and less often while nobody new is found in it.
LONGEST_LOOK = 2.0


class Neighbours:
    """Knows this host's ranks and the two next to this one; every other rank is looked up when it is asked about."""

    def __init__(
        self, rank: int, world_size: int, liveness: Liveness, attentive_every: float = LOOK_EVERY / 10
    ) -> None:
        self._rank = rank
        self._liveness = liveness
        self._store: AgreementStore | None = None
        host = "host/" + hashlib.blake2b(liveness.identity.host_key.encode(), digest_size=8).hexdigest()
        self._list = Entries(host, host)
        self._known: dict[int, Identity] = {}  # this host's and the two beside: followed in every step
        self._met: dict[int, Identity] = {}  # others that were asked about once
        self._beside = [r % world_size for r in (rank - 1, rank + 1) if r % world_size != rank]
        self.here: list[Identity] = []  # the other ranks of this host that are known yet
        self._beside_elsewhere: list[Identity] = []
        self._next_look = 0.0
        self._attentive_every = max(attentive_every, LOOK_EVERY / 10)
        self._unchanged = 0  # looks at the list in which nobody was new
        self._gone: dict[int, str] = {}
        self._told: set[int] = set()  # of these, what `departures` has returned
        self._sought: set[int] = set()  # ranks whose identity was looked for together with others

    def register(self, store: AgreementStore, stacks: Offer | None = None) -> None:
        """Publish this process under its rank and in its host's list."""
        self._store = store
        identity = self._liveness.identity
        text = (identity if stacks is None else replace(identity, stacks=astuple(stacks))).to_json()
        store.put(f"identity/{self._rank}", text)
        store.tell_host(f"identity/{self._rank}", text)
        self._list.add(store, text)

    def step(self, now: float, attentive: bool) -> None:
        """Learn who is beside this rank; once a second, and oftener while it matters."""
        self._liveness.drain()
        if self._store is None or now < self._next_look:
            return
        if (
            not self._next_look and self._attentive_every > LOOK_EVERY / 10
        ):  # in a large job: the others register now, too
            self._next_look = now + self._attentive_every
            return
        every = self._attentive_every if attentive else LOOK_EVERY
        every = min(every * 2**self._unchanged, max(LONGEST_LOOK, 4 * self._attentive_every))
        self._next_look = now + every
        self._unchanged = 0 if self._beside else min(self._unchanged + 1, 8)
        for text in self._list.new(self._store, every):
            self._learn(Identity.from_json(text))
            self._unchanged = 0
        for rank in list(self._beside):
            peer = self._identity(rank)
            if peer is not None:
                self._learn(peer)
                self._beside.remove(rank)
                if peer.host_key != self._liveness.identity.host_key:
                    self._beside_elsewhere.append(peer)
                    self._liveness.befriend(peer)

    def look_at_once(self) -> None:
        """Have the next `step` learn who is here, however short before that was done."""
        self._next_look = min(self._next_look, time.monotonic())

    def _learn(self, peer: Identity) -> None:
        self._known[peer.rank] = peer
        key = self._liveness.identity.host_key
        self.here = [one for rank, one in self._known.items() if one.host_key == key and rank != self._rank]

    def departures(self, within: float = 0.0) -> list[tuple[int, str]]:
        """Ranks seen here whose process is gone, with the evidence: never silence.

        One rank of the host looks at the others every `within` seconds: with each at all, 64 ranks that wait would keep
        a core busy with /proc.
        """
        found = []
        looks = not within or self._store is None or self._store.turn("processes", within)
        for peer in list(self._known.values()) if looks else self._beside_elsewhere:
            rank = peer.rank
            if rank == self._rank or rank in self._told:
                continue
            evidence = self.gone(rank)  # which a caller's thread may have asked before
            if evidence:
                self._told.add(rank)
                found.append((rank, evidence))
        return found

    def first_here(self) -> bool:
        """Return whether this is the lowest rank of its host that is not known to be gone."""
        return not any(peer.rank < self._rank and not self.gone(peer.rank) for peer in self.here)

    def fetch_stacks(self, rank: int) -> dict[str, object] | None:
        """The stacks of a rank of this host whose interpreter may not run, as details of a report; takes seconds.

        `runs`: whether it does, or might if it got a processor.
        """
        peer = self._known.get(rank)
        if peer is None:
            return None
        stopped = look_here(peer)[0] is Sight.STOPPED  # before, because who fetches may stop it for a moment
        found = observe(peer.pid, None if peer.stacks is None else Offer(*peer.stacks))
        return {
            "host": peer.host,
            "pid": peer.pid,
            "stopped": stopped,
            "runs": found.runs,
            "stack": list(found.stack),
            "threads": [[name, list(frames)] for name, frames in found.threads],
            "note": found.note,
        }

    def gone(self, rank: int) -> str:
        """Evidence that a rank's process is gone, from what this process knows without the store; empty for none."""
        peer = self._known.get(rank) or self._met.get(rank)
        if rank not in self._gone and peer is not None:
            sight, evidence = self._liveness.look(peer)
            if sight is Sight.GONE:
                self._gone[rank] = evidence
        return self._gone.get(rank, "")

    def look(self, rank: int) -> tuple[Sight, str]:
        """Return what can be seen of a rank's process from here."""
        peer = self._identity(rank)
        if peer is None:
            return Sight.UNKNOWN, tr("it never started ncclguard; import it on every rank before init_process_group")
        return self._liveness.look(peer)

    def seek(self, ranks: Sequence[int], since: float) -> None:
        """Begin to look at ranks that may have to be looked at soon, each once after `since`; waits for none."""
        new = [rank for rank in ranks if rank not in self._known and rank not in self._met and rank not in self._sought]
        if new and self._store is not None:
            self._sought.update(new)
            for text in self._store.read_many([f"identity/{rank}" for rank in new]).values():
                identity = Identity.from_json(text)
                if identity.host_key == self._liveness.identity.host_key:
                    self._learn(identity)  # the list of this host's has not been read since: its stacks can be fetched
                else:
                    self._met[identity.rank] = identity
        peers = [self._known.get(rank) or self._met.get(rank) for rank in ranks]
        self._liveness.seek([peer for peer in peers if peer is not None], since)

    def hosts(self, ranks: Sequence[int]) -> dict[int, str]:
        """On which host each of these ranks is, as far as that is known here or one request to the store tells."""
        new = [rank for rank in ranks if rank not in self._known and rank not in self._met][:BATCH]
        if new and self._store is not None:
            for text in self._store.read_many([f"identity/{rank}" for rank in new]).values():
                identity = Identity.from_json(text)
                self._met[identity.rank] = identity
        found = {rank: self._known.get(rank) or self._met.get(rank) for rank in ranks}
        return {rank: peer.host for rank, peer in found.items() if peer is not None}

    def silent_cause(self, rank: int) -> Cause:
        return silent_cause(self.look(rank)[0])

    def _identity(self, rank: int) -> Identity | None:
        peer = self._known.get(rank) or self._met.get(rank)
        if peer is None and self._store is not None:
            text = self._store.find(f"identity/{rank}")
            if text is not None:
                peer = self._met[rank] = Identity.from_json(text)
        return peer
