"""The part of the doctor that all ranks do together: they exchange facts over a store, measure, and rank 0 sums up."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ncclguard.environment.doctor import measure, rank_checks
from ncclguard.environment.doctor.checks import Check, Context, error, merge, ok, skipped, warning
from ncclguard.environment.doctor.rank_checks import Facts, Measured, leaders
from ncclguard.environment.network import family_of

T = TypeVar("T")

#: How long a store host may take to answer; it takes well under a millisecond.
ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.02
#: Time for the ranks to measure; the slowest of them probes the MTU of a path that swallows packets.
MEASURE_SECONDS = 60.0
_REDUCE_SECONDS = 25.0


class Unreachable(Exception):
    """The store host could not be reached, or did not answer in time."""


class Exchange:
    """What the ranks write for each other in a store; every call has a time limit.

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

        self._store = self._call(connect, connect_seconds + 2.0, "connecting to the store")

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
        """What ranks have written under a key within ``seconds``; silent ones are missing."""
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

    def _call(self, function: Callable[[], T], seconds: float = ANSWER_SECONDS, what: str = "the store host") -> T:
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
            raise Unreachable(f"{what}: no answer within {seconds:g} s") from None
        except RuntimeError as failure:  # torch's store errors are RuntimeErrors
            raise Unreachable(str(failure).splitlines()[0]) from None


@dataclass(frozen=True, slots=True)
class Survey:
    """What rank 0 knows in the end; other ranks have the checks of their own host only."""

    checks: list[Check]
    facts: dict[int, Facts]
    measured: list[Measured]


def take_survey(context: Context, local: Sequence[Check], exchange: Exchange, wait: float) -> Survey | None:
    """Does this rank's part; on rank 0 returns the merged result, on the other ranks None. Raises Unreachable."""
    checks = [*local, _check_store(exchange)]
    address = context.choice.address
    with ExitStack() as stack:
        own = rank_checks.own_facts(context)
        if address is not None:
            server = stack.enter_context(measure.PeerServer(address))
            echo = stack.enter_context(measure.EchoServer(address))
            own = rank_checks.own_facts(context, server.port, echo.port)
        said = exchange.gather("facts", own.model_dump(), wait)
        facts = {rank: Facts.model_validate(entry) for rank, entry in said.items()}
        measured = [] if address is None else _measure(own, address, facts, exchange)
        checks += _all_reduce(own, facts, exchange)
        # Nobody stops its servers before all have measured.
        exchange.gather("measured", True, MEASURE_SECONDS, facts)
    mine = {
        "host": context.host,
        "checks": [check.model_dump() for check in checks],
        "measured": [entry.model_dump() for entry in measured],
    }
    exchange.put("results", mine)
    if context.rank != 0:
        return None
    results = exchange.collect("results", facts, MEASURE_SECONDS).values()
    # A rank that came a moment too late for rank 0 may have been in time for another one.
    entries = [entry for result in results for entry in result["measured"] if entry["target"] in facts]
    measured = [Measured.model_validate(entry) for entry in entries]
    by_host = [(str(result["host"]), [Check.model_validate(entry) for entry in result["checks"]]) for result in results]
    joined = [
        rank_checks.check_ranks(facts, context.world_size, wait),
        *merge(by_host),
        rank_checks.check_agreement(facts),
        rank_checks.check_versions(facts),
        *rank_checks.check_measured(facts, measured),
    ]
    return Survey(joined, facts, measured)


def _check_store(exchange: Exchange) -> Check:
    seconds = max(exchange.answer_seconds() for _ in range(5))
    detail = f"the store host answers within {seconds * 1e3:.1f} ms"
    if seconds > 1.0:
        return warning("store", detail, "the host of rank 0 is overloaded or far away: top; ping")
    return ok("store", detail)


def _measure(own: Facts, address: str, facts: dict[int, Facts], exchange: Exchange) -> list[Measured]:
    peers = {
        rank: (entry.address, entry.port)
        for rank, entry in facts.items()
        if rank != own.rank and entry.address is not None and entry.port is not None
    }
    measured = {
        rank: Measured(source=own.rank, target=rank, **asdict(reached))
        for rank, reached in measure.reach_all(peers, address).items()
    }
    exchange.gather("reached", True, MEASURE_SECONDS, facts)
    for rank in _turns(own, facts):
        if rank in measured and measured[rank].fault is None:
            more: dict[str, Any] = {"bandwidth": measure.bandwidth(*peers[rank], address)}
            echo_port = facts[rank].echo_port
            if own.mtu is not None and echo_port is not None:
                found = measure.probe_mtu(peers[rank][0], echo_port, address, own.mtu)
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
        return [skipped("all-reduce", "one host")]
    first = facts[chiefs[0]]
    chosen = {facts[rank].interface for rank in chiefs}
    common = set.intersection(*(set(facts[rank].candidates) for rank in chiefs))
    checks = []
    for number, name in enumerate([own.interface, *sorted(name for name in common if chosen != {name})]):
        if name is None or first.address is None:
            continue
        port = _meeting_port(number, own, first.address, exchange, chiefs)
        place = (chiefs.index(own.rank), len(chiefs), first.address, port)
        fault = measure.all_reduce(name, *place, _REDUCE_SECONDS)
        exchange.gather(f"reduced/{number}", fault, _REDUCE_SECONDS + 5.0, chiefs)
        title = "all-reduce" if number == 0 else f"all-reduce over {name}"
        if fault is None:
            checks.append(ok(title, f"gloo over {name}: right sum"))
        elif number == 0:
            advice = "see the connections of this interface in this table"
            checks.append(error(title, f"gloo over {name}: {fault}", advice))
        else:
            checks.append(ok(title, f"gloo over {name}, which setup_env() does not take: {fault}"))
    return checks


def _meeting_port(number: int, own: Facts, address: str, exchange: Exchange, chiefs: list[int]) -> int:
    """Where the group's store listens: a free port of the first host's address."""
    port = None
    if own.rank == chiefs[0]:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
            port = int(sock.getsockname()[1])
    ports = exchange.gather(f"meeting/{number}", port, MEASURE_SECONDS, chiefs)
    if ports.get(chiefs[0]) is None:
        raise Unreachable("the first host did not say where to meet")
    return int(ports[chiefs[0]])
