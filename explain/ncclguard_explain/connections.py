"""Connections and addresses that tell who is gone or out of reach; and errors of the fabric."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ncclguard_explain.cause import Cause
from ncclguard_explain.evidence import Evidence, World
from ncclguard_explain.facts import EXPIRED, WAITING, Fact, Kind, Verdict
from ncclguard_explain.language import Message, tr
from ncclguard_explain.ranks import ranks_text


def by_peer_closed(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's proxy threads say whose connection closed; after an abort that is only the teardown."""
    aborts: dict[int, int] = {}
    for fact in evidence.of(Kind.NOTE, name="abort_complete"):
        aborts.setdefault(fact.source, fact.line)
    facts = [fact for fact in evidence.of(Kind.PEER_CLOSED) if fact.line < aborts.get(fact.source, 1 << 60)]
    if not facts or not evidence.one_node or len({fact.host for fact in facts if fact.host}) > 1:
        return None
    local = facts[0].local_rank
    first = list(itertools.takewhile(lambda fact: fact.local_rank == local, facts))
    speakers = {fact.pid if fact.pid is not None else (fact.line, fact.order) for fact in first}
    own = any(fact.number == local for fact in first)  # it says so itself: an orderly end, in which each closes its own
    devices = [fact.number for fact in facts if fact.number is not None]
    size = world.size or evidence.local_size or max([local or 0, *devices]) + 1
    if local is None or own or len(speakers) < max(2, min(size, 8) - 2):
        return None
    reason = tr(
        "{count} processes say that the connection of local rank {local} closed", count=len(speakers), local=local
    )
    overturned = [tr("an abort of all communicators before these lines")]
    return Verdict((local,), Cause.LOST, "medium", "peer closed", reason, facts, overturned=overturned)


#: Interfaces that no other host reaches: of the host alone, of its containers and of its virtual machines.
_OWN_INTERFACE = re.compile(r"lo$|docker|virbr|podman|cni|br-|veth|flannel|cali")


def _on_own_interfaces(evidence: Evidence) -> list[Fact]:
    return [fact for fact in evidence.of(Kind.NCCL_INFO) if _OWN_INTERFACE.match(fact.name) and fact.host]


def own_addresses(evidence: Evidence) -> list[Fact]:
    """Return what hosts told NCCL to be reached at, where two have one and the same address and nothing came of it."""
    waited = evidence.of(*WAITING, *EXPIRED) or any(
        "KeyboardInterrupt" in one.name for one in evidence.of(Kind.EXCEPTION)
    )
    if not waited or evidence.of(Kind.JOINED, Kind.ALIVE, Kind.PROGRESS):
        return []
    told = [fact for fact in _on_own_interfaces(evidence) if fact.name != "lo"]
    shared = {
        one.detail for one in told if any(one.detail == other.detail and one.host != other.host for other in told)
    }
    return [fact for fact in told if fact.detail in shared][:4]


def by_unreachable(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks of one host have told NCCL an address that only this host has, and the others cannot reach it."""
    own = _on_own_interfaces(evidence)
    told = {fact.detail for fact in own}
    failed = [
        fact
        for fact in evidence.of(Kind.NCCL_WARN, name="connect")
        if any(f" {address}<" in f" {fact.detail}" for address in told)
    ]
    hosts = {fact.host for fact in own}
    if len(hosts) != 1 or not failed or any(fact.host in hosts for fact in failed):
        return None
    host = hosts.pop()
    ranks = tuple(sorted(evidence.ranks.hosts.get(host, ())))
    reason = tr("{host} has told NCCL the address of {name}, which no other host reaches", host=host, name=own[0].name)
    places = () if ranks else (host,)
    return Verdict(ranks, Cause.NETWORK, "medium", "unreachable", reason, own[:1] + failed, places=places)


def by_port(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks of one host say that their own port is down, and those of others that a peer does not answer."""
    own = [fact for fact in evidence.of(Kind.NCCL_WARN, name="ib_async") if "port error" in fact.detail]
    hosts = {fact.host for fact in own}
    told = [fact for fact in fabric_errors(evidence) if fact.name == "ib" and fact.host not in hosts]
    ranks = {fact.rank for fact in own if fact.rank is not None}
    if len(ranks) == 1 and not told:  # the one of its host whose card it is has its transfers fail, too
        told = [fact for fact in fabric_errors(evidence) if fact.name == "ib" and fact.rank in ranks]
        others = {fact.rank for fact in evidence.of(Kind.EXCEPTION, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION)} - {None}
        told = told if others - ranks else []
    if len(hosts) != 1 or not told or not ranks or any(fact.rank is None for fact in own):
        return None
    host = next(iter(hosts))
    there = evidence.ranks.ranks_on(host, evidence.local_size)
    ended = evidence.of(Kind.LAUNCHER, Kind.EXIT, Kind.ENDED_BY_LAUNCHER)
    there |= {one.rank for one in ended if one.rank is not None and one.host == host and one.rank_basis == "launcher"}
    ranks = there if 1 < len(ranks) and ranks < there else ranks  # the host's card, of which not all of its ranks tell
    return Verdict(tuple(sorted(ranks)), Cause.NETWORK, "medium", "port", _lost_link(ranks), own + told)


def _lost_link(ranks: Iterable[int]) -> Message:
    return tr(
        "the port of {ranks} has lost its link, and other hosts get no answer from a peer", ranks=ranks_text(ranks)
    )


def by_link(evidence: Evidence, world: World) -> Verdict | None:
    """The kernel of one host alone says that a card has lost its link, which has not come up again.

    Hosts have cards that are not used: so all ranks of the other hosts, and only they, say that they waited.
    """
    down = [
        fact for fact in evidence.of(Kind.NIC) if _DOWN.search(fact.detail) and _CARD.match(fact.detail) and fact.where
    ]
    up = {note.detail for note in evidence.of(Kind.NOTE, name="link_up")}
    hosts = {fact.where for fact in down}
    if len(hosts) != 1 or any(fact.detail.startswith(one) for fact in down for one in up):
        return None
    ranks = evidence.ranks.ranks_on(hosts.pop(), evidence.local_size)
    failed = {fact.rank for fact in evidence.of(*EXPIRED, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION)} - {None}
    size = max(world.size or 0, 1 + max((rank for there in evidence.ranks.hosts.values() for rank in there), default=0))
    if not ranks or 2 * len(ranks) > size or failed != {*range(size)} - ranks:
        return None
    return Verdict(tuple(sorted(ranks)), Cause.NETWORK, "medium", "link", _lost_link(ranks), down)


_DOWN = re.compile(r"(?i)link (?:is |status definitely )?down")
_CARD = re.compile(r"mlx\d_core|ib\w*\d|bnxt_en|irdma|\w*(?:mlx|roce|ib)\w*:")


def by_clients(evidence: Evidence, world: World) -> Verdict | None:
    """Tasks that had ended, pods that never started, or ranks with a wrong name: as many as torch's store misses."""
    for fact in [one for one in evidence.of(Kind.RENDEZVOUS, name="clients") if one.detail]:
        ended = [
            note
            for note in evidence.of(Kind.NOTE, name="tasks_ended")
            if note.source == fact.source and note.line < fact.line
        ]
        pods = evidence.of(Kind.NOTE, name="not started")
        ranks = {rank for note in ended + pods for rank in note.peers}
        came, size = (int(number) for number in re.findall(r"\d+", fact.detail))
        if ranks and len(ranks) == size - came and max(ranks) < size:
            reason = tr("{ranks} ended before the others had met", ranks=ranks_text(ranks))
            if not ended:
                reason = tr("the containers of {ranks} have never started", ranks=ranks_text(ranks))
            return Verdict(tuple(sorted(ranks)), Cause.LOST, "medium", "clients", reason, [*ended, *pods, fact])
        nodes = {
            one.node
            for one in evidence.of(Kind.LAUNCHER, Kind.EXIT)
            if one.source == fact.source and one.line < fact.line and one.node is not None and (one.number or 0) > 0
        }
        local = evidence.local_size or 0
        if nodes and evidence.nodes == size and len(nodes) == size - came and evidence.starts_ranks and local:
            ranks = {node * local + at for node in nodes if node is not None for at in range(local)}
            reason = tr("{ranks} ended before the others had met", ranks=ranks_text(ranks))
            return Verdict(tuple(sorted(ranks)), Cause.LOST, "medium", "clients", reason, [fact])
        nameless = [note for note in evidence.of(Kind.NOTE, name="no_address") if note.rank is not None]
        connects = evidence.of(Kind.RENDEZVOUS, name="connect")
        gave_up = {one.rank for one in connects}
        asked = {(one.rank, one.detail.partition(",")[0]) for one in connects}
        without = {note.rank for note in nameless if note.rank is not None and (note.rank, note.detail) in asked}
        if without and len(without) == size - came and gave_up == without and fact.rank not in without:
            reason = tr(
                "{ranks} looked for the store under a name without an address: {name}; the others have met there",
                ranks=ranks_text(without),
                name=nameless[0].detail,
            )
            facts = [*(note for note in nameless if note.rank in without), fact]
            return Verdict(tuple(sorted(without)), Cause.FAILED, "medium", "clients", reason, facts)
    return None


def fabric_errors(evidence: Evidence) -> list[Fact]:
    """Return what InfiniBand, RoCE or EFA report; completions with status 5 are flushes that follow from another."""
    return [fact for fact in evidence.of(Kind.NCCL_WARN) if fact.name in ("ib", "ib_async") and fact.number != 5]


def by_gone_peer(evidence: Evidence, world: World) -> Verdict | None:
    """All but one rank report that a peer's process ended; the one whose log is here and says nothing is that peer."""
    facts = [
        fact
        for fact in evidence.of(Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION, Kind.EXCEPTION)
        if fact.rank is not None and "remote process exited" in fact.text + fact.detail
    ]
    told = {fact.rank for fact in facts if fact.rank is not None}
    spoke = told | {row.rank for row in evidence.rows} | {fact.rank for fact in evidence.of(*EXPIRED)}
    silent = set(world.covered) - spoke
    if len(silent) != 1 or world.size is None or len(told) < max(2, world.size - 1) or fabric_errors(evidence):
        return None
    reason = tr(
        "{ranks} report that a peer's process ended or the network broke; {others} printed nothing of the kind",
        ranks=ranks_text(told),
        others=ranks_text(silent),
    )
    overturned = [
        tr(
            "a later line of {ranks}, or the same error in its log: then the network between them broke",
            ranks=ranks_text(silent),
        )
    ]
    return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts, overturned=overturned)
