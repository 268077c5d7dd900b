"""Steps of the doctor that all ranks do together.

They exchange facts over a store, measure each other, and rank 0 sums up.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ncclguard.environment.doctor.checks import (
    Check,
    Context,
    Facts,
    Measured,
    check_agreement,
    check_measured,
    check_ranks,
    check_versions,
    error,
    leaders,
    merge,
    ok,
    own_facts,
    skipped,
    warning,
)
from ncclguard.environment.network import family_of
from ncclguard_explain.command_line import Tell
from ncclguard_explain.language import joined, packed, told, tr, unpacked

if TYPE_CHECKING:
    from typing_extensions import Self


#: A host in the same building answers in well under a millisecond; one retransmitted SYN takes a second.
CONNECT_SECONDS = 3.0
BANDWIDTH_SECONDS = 1.0
BANDWIDTH_BYTES = 64 << 20
_PINGS = 10
_BLOCK = bytes(1 << 20)

_REASONS = {
    errno.ECONNREFUSED: tr("refused: a firewall rejects, or the process is gone"),
    errno.ETIMEDOUT: tr("no answer: a firewall drops packets, or they are not routed"),
    errno.EHOSTUNREACH: tr("no route to the host"),
    errno.ENETUNREACH: tr("no route to the network"),
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
    """The way from one rank to another; ``fault`` is None when it works. Times in seconds."""

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

_SMALL_REDUCE_SECONDS = 8.0


def all_reduce(interface: str, rank: int, world_size: int, address: str, port: int, seconds: float) -> str | None:
    """Return None for the right sum, else why not, in one line; ends after ``seconds`` at the latest."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
    command = [sys.executable, "-m", __name__, str(rank), str(world_size), address, str(port)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return tr("did not end within {seconds:g} s", seconds=seconds)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else tr("exit code {code}", "drill", code=done.returncode)


def _all_reduce_rank(rank: int, world_size: int, address: str, port: int) -> int:
    """One rank of a gloo group whose store rank 0 hosts; returns the exit code of its process."""
    import torch  # only here: it takes seconds
    import torch.distributed as dist

    limit = timedelta(seconds=_SMALL_REDUCE_SECONDS)
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


T = TypeVar("T")

#: How long a store host may take to answer; it takes well under a millisecond.
ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02
#: Time for the ranks to measure; the slowest of them probes the MTU of a path that swallows packets.
MEASURE_SECONDS = 60.0
_REDUCE_SECONDS = 25.0


class Unreachable(Exception):
    """The store host could not be reached, or did not answer in time; `reason` says why, for people."""

    @property
    def reason(self) -> str:
        return str(self) if not self.args else self.args[0]  # which `str` would take the template from


class Exchange:
    """The store in which the ranks write for each other; every call has a time limit.

    ``abandoned`` is True when a call has not returned: a thread still waits inside the store's client.
    """

    def __init__(self, context: Context, connect_seconds: float) -> None:
        """Connects to the store (rank 0 hosts it, unless the launcher does); raises Unreachable."""
        import torch.distributed as dist  # only here: it takes seconds

        self.abandoned = False
        self._rank, self._world_size = context.rank, context.world_size
        address, port = context.job.master_addr or "localhost", context.job.master_port
        hosts = self._rank == 0 and not context.launcher_hosts_store
        limit = timedelta(seconds=connect_seconds)

        generation = context.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

        def connect() -> Any:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, self._world_size, hosts, limit, wait_for_workers=False
            )
            return dist.PrefixStore(f"ncclguard-doctor/{generation}", store)  # type: ignore[attr-defined]

        self._store = self._call(connect, connect_seconds + 2.0, tr("connecting to the store"))

    def answer_seconds(self) -> float:
        """The round trip of one acknowledged store operation."""
        begun = time.perf_counter()
        self._call(lambda: self._store.add("roundtrip", 1))
        return time.perf_counter() - begun

    def put(self, key: str, value: Any) -> None:
        """Write this rank's JSON-able value for the others, once for each key."""
        text = json.dumps(value)
        self._call(lambda: self._store.set(f"{key}/{self._rank}", text))
        self._call(lambda: self._store.add(f"{key}/count", 1))

    def gather(self, key: str, value: Any, seconds: float, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """This rank's value to all, and what ``ranks`` (all, without it) have written within ``seconds``."""
        self.put(key, value)
        return self.collect(key, range(self._world_size) if ranks is None else ranks, seconds)

    def collect(self, key: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """Collect what ranks have written under a key within ``seconds``; silent ones are missing."""
        wanted = list(ranks)
        deadline = time.monotonic() + seconds
        while True:
            # One request a turn, however many ranks there are; who has written is asked only at the end.
            count = self._call(lambda: self._store.add(f"{key}/count", 0))
            late = time.monotonic() > deadline
            if count >= len(wanted) or late:
                there = [rank for rank in wanted if self._has(f"{key}/{rank}")]
                if late or len(there) == len(wanted):
                    break
            time.sleep(_POLL_SECONDS)
        texts = self._call(lambda: self._store.multi_get([f"{key}/{rank}" for rank in there])) if there else []
        return {rank: json.loads(text) for rank, text in zip(there, texts, strict=True)}

    def _has(self, name: str) -> bool:
        return bool(self._call(lambda: self._store.check([name])))

    def _call(self, function: Callable[[], T], seconds: float = ANSWER_SECONDS, what: str = tr("the store host")) -> T:
        """The function's result; Unreachable when it takes longer than ``seconds`` or raises RuntimeError."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(function())
            except Exception as caught:  # noqa: BLE001 - raised again by `result`
                future.set_exception(caught)

        # A daemon: the interpreter's end would wait for a thread of an executor.
        threading.Thread(target=work, name="ncclguard-doctor", daemon=True).start()
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError:
            self.abandoned = True
            raise Unreachable(joined(": ", (what, tr("no answer within {seconds:g} s", seconds=seconds)))) from None
        except RuntimeError as failure:  # torch's store errors are RuntimeErrors
            raise Unreachable(str(failure).splitlines()[0]) from None


@dataclass(frozen=True, slots=True)
class Survey:
    """The results of all ranks on rank 0; other ranks have the checks of their own host only."""

    checks: list[Check]
    facts: dict[int, Facts]
    measured: list[Measured]


def take_survey(
    context: Context, local: Sequence[Check], exchange: Exchange, wait: float, tell: Tell = lambda text: None
) -> Survey | None:
    """Does this rank's part; on rank 0 returns the merged result, on the other ranks None. Raises Unreachable.

    ``tell`` gets what is being done, for people.
    """
    checks = [*local, _check_store(exchange)]
    address = context.choice.address
    with ExitStack() as stack:
        own = own_facts(context)
        if address is not None:
            server = stack.enter_context(PeerServer(address))
            echo = stack.enter_context(EchoServer(address))
            own = own_facts(context, server.port, echo.port)
        said = exchange.gather("facts", own.model_dump(), wait)
        facts = {rank: Facts.model_validate(entry) for rank, entry in said.items()}
        measured = [] if address is None else _measure(own, address, facts, exchange, tell)
        tell(told("a real all-reduce between {count} hosts", count=len(leaders(facts))))
        checks += _all_reduce(own, facts, exchange)
        tell(told("waiting until all have measured"))
        # Nobody stops its servers before all have measured.
        exchange.gather("measured", True, MEASURE_SECONDS, facts)
    mine = {
        "host": context.host,
        "checks": [_sent(check) for check in checks],
        "measured": [_sent(entry) for entry in measured],
    }
    exchange.put("results", mine)
    if context.rank != 0:
        return None
    results = exchange.collect("results", facts, MEASURE_SECONDS).values()
    # A rank that came a moment too late for rank 0 may have been in time for another one.
    entries = [entry for result in results for entry in result["measured"] if entry["target"] in facts]
    measured = [Measured.model_validate(_received(entry)) for entry in entries]
    by_host = [
        (str(result["host"]), [Check.model_validate(_received(entry)) for entry in result["checks"]])
        for result in results
    ]
    merged = [
        check_ranks(facts, context.world_size, wait),
        *merge(by_host),
        check_agreement(facts),
        check_versions(facts),
        *check_measured(facts, measured),
    ]
    return Survey(merged, facts, measured)


def _sent(found: Check | Measured) -> dict[str, Any]:
    """The fields as JSON has them, with texts that rank 0 can say in its own language."""
    return {name: packed(value) if isinstance(value, str) else value for name, value in found}


def _received(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: unpacked(value) for name, value in fields.items()}


def _check_store(exchange: Exchange) -> Check:
    seconds = max(exchange.answer_seconds() for _ in range(5))
    detail = tr("the store host answers within {time:.1f} ms", time=seconds * 1e3)
    if seconds > 1.0:
        return warning("store", detail, tr("the host of rank 0 is overloaded or far away: top; ping"))
    return ok("store", detail)


def _measure(own: Facts, address: str, facts: dict[int, Facts], exchange: Exchange, tell: Tell) -> list[Measured]:
    peers = {
        rank: (entry.address, entry.port)
        for rank, entry in facts.items()
        if rank != own.rank and entry.address is not None and entry.port is not None
    }
    tell(told("connecting to {count} ranks", count=len(peers)))
    measured = {
        rank: Measured(source=own.rank, target=rank, **asdict(reached))
        for rank, reached in reach_all(peers, address).items()
    }
    exchange.gather("reached", True, MEASURE_SECONDS, facts)
    turns = _turns(own, facts)
    for number, rank in enumerate(turns, 1):
        host = facts[rank].host
        text = told(
            "bandwidth and path MTU: host {number} of {count}, {host}", number=number, count=len(turns), host=host
        )
        tell(text)
        if rank in measured and measured[rank].fault is None:
            more: dict[str, Any] = {"bandwidth": bandwidth(*peers[rank], address)}
            echo_port = facts[rank].echo_port
            if own.mtu is not None and echo_port is not None:
                found = probe_mtu(peers[rank][0], echo_port, address, own.mtu)
                more |= {"mtu": own.mtu, **asdict(found)}
            measured[rank] = measured[rank].model_copy(update=more)
    return list(measured.values())


def _turns(own: Facts, facts: dict[int, Facts]) -> list[int]:
    """The leaders of the other hosts, so that at a time each host sends to one and hears from one."""
    chiefs = list(leaders(facts).values())
    if own.rank not in chiefs:
        return []
    here = chiefs.index(own.rank)
    return [*chiefs[here + 1 :], *chiefs[:here]]


def _all_reduce(own: Facts, facts: dict[int, Facts], exchange: Exchange) -> list[Check]:
    """A real all-reduce over the choice of each host, then over every other interface that all hosts have."""
    chiefs = list(leaders(facts).values())
    if own.rank not in chiefs:
        return []
    if len(chiefs) < 2:
        return [skipped("all-reduce", tr("one host"))]
    first = facts[chiefs[0]]
    chosen = {facts[rank].interface for rank in chiefs}
    common = set.intersection(*(set(facts[rank].candidates) for rank in chiefs))
    checks = []
    for number, name in enumerate([own.interface, *sorted(name for name in common if chosen != {name})]):
        if name is None or first.address is None:
            continue
        port = _meeting_port(number, own, first.address, exchange, chiefs)
        place = (chiefs.index(own.rank), len(chiefs), first.address, port)
        fault = all_reduce(name, *place, _REDUCE_SECONDS)
        exchange.gather(f"reduced/{number}", fault, _REDUCE_SECONDS + 5.0, chiefs)
        title = "all-reduce" if number == 0 else tr("all-reduce over {name}", name=name)
        if fault is None:
            checks.append(ok(title, tr("gloo over {name}: right sum", name=name)))
        elif number == 0:
            advice = tr("see the connections of this interface in this table")
            checks.append(error(title, tr("gloo over {name}: {fault}", name=name, fault=fault), advice))
        else:
            other = tr("gloo over {name}, which setup_env() does not take: {fault}", name=name, fault=fault)
            checks.append(ok(title, other))
    return checks


def _meeting_port(number: int, own: Facts, address: str, exchange: Exchange, chiefs: list[int]) -> int:
    """Find where the group's store listens: a free port of the first host's address."""
    port = None
    if own.rank == chiefs[0]:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
            port = int(sock.getsockname()[1])
    ports = exchange.gather(f"meeting/{number}", port, MEASURE_SECONDS, chiefs)
    if ports.get(chiefs[0]) is None:
        raise Unreachable(tr("the first host did not say where to meet"))
    return int(ports[chiefs[0]])
