"""The part of the doctor that all ranks do together."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ncclguard.environment.doctor import facts as facts_module
from ncclguard.environment.doctor import network_checks, path_mtu, peers
from ncclguard.environment.doctor.context import Context
from ncclguard.environment.doctor.exchange import Exchange, Unreachable
from ncclguard.environment.doctor.facts import Facts, leaders
from ncclguard.environment.doctor.network_checks import Measured
from ncclguard.environment.doctor.reduce_probe import run_probe
from ncclguard.environment.doctor.result import Check, error, merge, ok, skipped, warning
from ncclguard.environment.links import family_of

#: Time for the ranks to measure; the slowest of them probes the MTU of a path that swallows packets.
MEASURE_SECONDS = 60.0
_REDUCE_SECONDS = 25.0


@dataclass(frozen=True, slots=True)
class Survey:
    """What rank 0 knows in the end; other ranks have the checks of their own host only."""

    checks: list[Check]
    facts: dict[int, Facts]
    measured: list[Measured]


def take_survey(context: Context, local: Sequence[Check], exchange: Exchange, wait: float) -> Survey | None:
    """Does this rank's part; on rank 0 returns the merged result, on the others None. Raises Unreachable."""
    checks = [_check_store(exchange)]
    address = context.choice.address
    with ExitStack() as stack:
        server, echo = None, None
        if address is not None:
            server = stack.enter_context(peers.PeerServer(address))
            echo = stack.enter_context(path_mtu.EchoServer(address))
        own = facts_module.own_facts(context, server.port if server else None, echo.port if echo else None)
        told = exchange.gather("facts", own.model_dump(), wait)
        facts = {rank: Facts.model_validate(entry) for rank, entry in told.items()}
        measured = _measure(own, facts, exchange)
        checks += _reduce(own, facts, exchange)
        # Nobody stops its servers before all have measured.
        exchange.gather("measured", True, MEASURE_SECONDS, facts)
    mine = {
        "host": context.host,
        "checks": [check.model_dump() for check in (*local, *checks)],
        "measured": [entry.model_dump() for entry in measured],
    }
    exchange.put("results", mine)
    if context.rank != 0:
        return None
    results = exchange.collect("results", facts, MEASURE_SECONDS)
    everything = [Measured.model_validate(entry) for result in results.values() for entry in result["measured"]]
    by_host = [
        (str(result["host"]), [Check.model_validate(entry) for entry in result["checks"]])
        for result in results.values()
    ]
    return Survey(_joined(context, facts, by_host, everything, wait), facts, everything)


def _joined(
    context: Context,
    facts: dict[int, Facts],
    by_host: Sequence[tuple[str, Sequence[Check]]],
    measured: Sequence[Measured],
    wait: float,
) -> list[Check]:
    return [
        facts_module.check_ranks(facts, context.world_size, wait),
        *merge(by_host),
        facts_module.check_agreement(facts),
        facts_module.check_versions(facts),
        network_checks.check_pairs(facts, measured),
        network_checks.check_round_trips(facts, measured),
        network_checks.check_bandwidth(facts, measured),
        network_checks.check_path_mtu(facts, measured),
        network_checks.check_clocks(facts, measured),
    ]


def _check_store(exchange: Exchange) -> Check:
    seconds = max(exchange.answer_seconds() for _ in range(5))
    detail = f"the store host answers within {seconds * 1e3:.1f} ms"
    if seconds > 1.0:
        return warning("store", detail, "the host of rank 0 is overloaded or far away: top; ping")
    return ok("store", detail)


def _measure(own: Facts, facts: dict[int, Facts], exchange: Exchange) -> list[Measured]:
    if own.address is None:
        return []
    others = {
        rank: (entry.address, entry.port)
        for rank, entry in facts.items()
        if rank != own.rank and entry.address is not None and entry.port is not None
    }
    reached = {entry.rank: entry for entry in peers.reach_all(others, own.address)}
    measured = {
        rank: Measured(
            source=own.rank, target=rank, fault=entry.fault, round_trip=entry.round_trip, clock_skew=entry.clock_skew
        )
        for rank, entry in reached.items()
    }
    exchange.gather("reached", True, MEASURE_SECONDS, facts)
    for target in _turns(own, facts):
        entry = measured[target]
        if entry.fault is None:
            address, port = others[target]
            speed = peers.bandwidth(address, port, own.address)
            found = _probe_mtu(own, facts[target])
            measured[target] = entry.model_copy(
                update={
                    "bandwidth": speed,
                    "mtu": own.mtu if found else None,
                    "largest": found.largest if found else None,
                    "told": found.told if found else None,
                }
            )
    return list(measured.values())


def _probe_mtu(own: Facts, target: Facts) -> path_mtu.PathMtu | None:
    if own.mtu is None or own.address is None or target.address is None or target.echo_port is None:
        return None
    if family_of(own.address) != family_of(target.address):
        return None
    return path_mtu.probe(target.rank, target.address, target.echo_port, own.address, own.mtu)


def _turns(own: Facts, facts: dict[int, Facts]) -> list[int]:
    """The leaders of the other hosts, so that at a time each host sends to one and hears from one."""
    chiefs = list(leaders(facts).values())
    if own.rank not in chiefs or own.rank not in facts:
        return []
    here = chiefs.index(own.rank)
    return [
        chiefs[(here + step) % len(chiefs)]
        for step in range(1, len(chiefs))
        if facts[chiefs[(here + step) % len(chiefs)]].port is not None
    ]


def _reduce(own: Facts, facts: dict[int, Facts], exchange: Exchange) -> list[Check]:
    """A real all-reduce over the choice of each host, then over every other interface that all hosts have."""
    chiefs = list(leaders(facts).values())
    if own.rank not in chiefs:
        return []
    if len(chiefs) < 2:
        return [skipped("all-reduce", "one host")]
    rounds = [{rank: facts[rank].interface for rank in chiefs}]
    common = set.intersection(*(set(facts[rank].candidates) for rank in chiefs))
    rounds += [dict.fromkeys(chiefs, name) for name in sorted(common)]
    rounds = [entry for index, entry in enumerate(rounds) if entry not in rounds[:index]]
    checks = []
    for number, names in enumerate(rounds):
        name = names[own.rank]
        if name is None or facts[chiefs[0]].address is None:
            continue
        where = _meeting_point(number, own, facts[chiefs[0]], exchange, chiefs)
        fault = run_probe(name, chiefs.index(own.rank), len(chiefs), *where, _REDUCE_SECONDS)
        exchange.gather(f"reduced/{number}", fault, _REDUCE_SECONDS + 5.0, chiefs)
        title = "all-reduce" if number == 0 else f"all-reduce over {name}"
        checks.append(_judge(title, name, fault, chosen=number == 0))
    return checks


def _judge(title: str, name: str, fault: str | None, *, chosen: bool) -> Check:
    if fault is None:
        return ok(title, f"gloo over {name}: right sum")
    if chosen:
        return error(title, f"gloo over {name}: {fault}", "see the connections of this interface in this table")
    return ok(title, f"gloo over {name}, which setup_env() does not take: {fault}")


def _meeting_point(number: int, own: Facts, first: Facts, exchange: Exchange, chiefs: list[int]) -> tuple[str, int]:
    """Where the group's store listens: a free port on the first host."""
    address = str(first.address)
    port = None
    if own.rank == first.rank:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
            port = int(sock.getsockname()[1])
    told = exchange.gather(f"meeting/{number}", port, MEASURE_SECONDS, chiefs)
    if told.get(first.rank) is None:
        raise Unreachable("the first host did not say where to meet")
    return address, int(told[first.rank])
