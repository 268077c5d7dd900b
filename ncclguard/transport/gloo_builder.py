"""Connects the ranks of one generation over gloo."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from .. import _sockets, _threads, _torch, _torch_stores
from ..agreement.timing import period
from . import dtypes, exchange
from .base import Kind, TransportError
from .bounded import bounded
from .gloo import GlooCommunicator


class GlooBuilder:
    """Builds `GlooCommunicator`, see `Builder`.

    ``GLOO_SOCKET_IFNAME`` is honoured, ``TORCH_GLOO_LAZY_INIT`` overridden. Three ranks on one host: 4 to 5 ms.
    ``disconnects``: whether the store is disconnected afterwards.
    """

    max_in_flight = 2  # gloo runs two worker threads: more pieces in flight brought nothing (measured)

    def __init__(self, disconnects: bool = True) -> None:
        self.device = torch.device("cpu")
        self._disconnects = disconnects

    def check_supported(self, kind: Kind, dtype: torch.dtype, op: object = None) -> None:
        dtypes.GLOO.check(kind, dtype, op)

    def build(
        self,
        store: _torch.Store,
        prefix: str,
        ranks: tuple[int, ...],
        index: int,
        generation: int,
        backstop: float,
        seconds: float,
    ) -> GlooCommunicator:
        end = time.monotonic() + seconds

        def connect() -> GlooCommunicator:
            store.set_timeout(timedelta(seconds=seconds))
            keys = _torch.PrefixStore(prefix, store)
            _await_peers(keys, index, len(ranks), end - seconds / 5)
            # gloo waits five times its timeout for a peer to connect (gloo/transport/tcp/pair.h, waitUntil).
            limit = timedelta(seconds=max(1.0, (end - time.monotonic()) / 5))
            if not _torch.gloo_timeout_is_settable():
                limit = timedelta(seconds=backstop)
            before = _threads.native_threads()
            group = _torch.new_gloo_group(keys, index, len(ranks), limit)
            workers, movers = _kinds(_threads.native_threads() - before, _torch.gloo_contexts(group))
            _torch.set_gloo_timeout(group, timedelta(seconds=backstop))
            listening, mine = _listening(keys, ranks, index, _torch.gloo_contexts(group))
            found = _sockets.connections(lambda local, remote: local in mine or remote in listening)
            votes = exchange.connect(keys, _host(mine), ranks, index, end)
            if self._disconnects:
                # gloo holds the store for as long as it lives and does not use it any more: its host
                # has one descriptor less to keep.
                _torch_stores.disconnect(store)
            return GlooCommunicator(group, ranks, index, generation, found, listening, workers, movers, votes)

        what = f"connecting rank {ranks[index]} with {len(ranks) - 1} peers over gloo"
        return bounded(what, connect, seconds, lambda: _torch_stores.disconnect(store))


def _await_peers(keys: _torch.Store, index: int, size: int, end: float) -> None:
    """Wait until every rank is about to connect, so that gloo's constructor, which
    cannot be interrupted, has little to wait for.
    """
    keys.set(f"ready/{index}", "1")  # only looked at for the names of those that are missing
    come = keys.add("ready", 1)
    pause, longest = 0.0005, max(0.02, period(size))
    while come < size:
        if time.monotonic() >= end:
            missing = [peer for peer in range(size) if not keys.check([f"ready/{peer}"])]
            raise TransportError(f"the ranks at {missing} of the group did not come to connect")
        time.sleep(pause)
        pause = min(2 * pause, longest)
        come = keys.add("ready", 0)


def _listening(
    keys: _torch.Store, ranks: tuple[int, ...], index: int, contexts: int
) -> tuple[dict[_sockets.Address, int], set[_sockets.Address]]:
    """Where each peer accepts connections, with its global rank, and where this rank does."""
    theirs: dict[_sockets.Address, int] = {}
    mine: set[_sockets.Address] = set()
    for context in range(contexts):
        for peer, rank in enumerate(ranks):
            address = _sockets.gloo_address(keys.get(f"{context}/{peer}"))
            if address is not None and peer == index:
                mine.add(address)
            elif address is not None:
                theirs[address] = rank
    return theirs, mine


def _host(mine: set[_sockets.Address]) -> str:
    """The address that gloo chose for itself: the interface that GLOO_SOCKET_IFNAME names, or the host name's."""
    if not mine:
        raise TransportError(
            "gloo's address could not be read from the store: this version of torch may publish it otherwise"
        )
    return min(host for host, _ in mine)


def _kinds(started: frozenset[int], contexts: int) -> tuple[frozenset[int], frozenset[int]]:
    """The threads that run operations, of those that were started with the group, and those that move the data.

    Of these there is one for each set of connections, and none sleeps longer than 10 ms. They are started first and
    have a name in torch 2.13. Should other threads have been started at the same time, there are too many workers here,
    never too few.
    """
    movers = frozenset(thread for thread in started if _threads.name(thread) == "gloo_tcp_loop")
    movers = movers or frozenset(sorted(started)[:contexts])
    return started - movers, movers
