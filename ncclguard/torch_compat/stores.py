"""torch's private names for the stores behind a job.

Ran on torch 2.6.0, 2.8.0, 2.11.0, 2.13.0 and 2.15.0 (TCPStore, FileStore); the versions between are declared, not run.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c
from torch.distributed import distributed_c10d as c10d

from ncclguard.torch_compat import sockets
from ncclguard_explain.language import told

_log = logging.getLogger("ncclguard")

Store = _c.Store
PrefixStore = _c.PrefixStore
TCPStore = _c.TCPStore

_cloning = threading.Lock()
#: A store's port -> descriptor and inode of the connections that existed before the clone in progress.
_known: dict[int, set[tuple[int, int]]] = {}
_connections: weakref.WeakKeyDictionary[Store, tuple[sockets.Connection, ...]] = weakref.WeakKeyDictionary()


def default_store() -> Store:
    """Return the default group's store with its prefixes. Raises ValueError before ``init_process_group``."""
    return c10d._get_default_store()


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store through which the group's ranks met. Raises KeyError for a group that was destroyed."""
    return c10d._world.pg_map[group][1]


def base_store(store: Store) -> Store:
    """Return the store beneath all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def is_same_store(one: Store, other: Store) -> bool:
    """Return whether two stores keep their keys in one place, which they may reach by connections of their own."""
    one, other = base_store(one), base_store(other)
    if one is other:
        return True
    names = ("host", "port") if isinstance(one, TCPStore) else ("path",)
    return type(one) is type(other) and all(getattr(one, name, None) == getattr(other, name, "") for name in names)


def store_host(store: Store) -> str:
    """Return the host of a TCPStore as this process knows it; "" for a store of another kind."""
    base = base_store(store)
    return str(base.host) if isinstance(base, TCPStore) else ""


def clone_store(store: Store) -> Store:
    """Open the same keys through a connection of its own, so that a call that blocks here blocks nobody else.

    TCPStore: a new connection (about 1 ms). FileStore and HashStore have no connection; their object may be shared.
    torch 2.6 has no ``Store.clone``: there a new client is opened and wrapped in the same prefixes, as far as they are
    known (those of ``init_process_group``; put your own prefix on the clone, not below it); for an unknown prefix the
    given store itself is returned, with a warning. Blocks while the host of the store is stopped: call it from a helper
    thread.

    Raises torch.distributed.DistNetworkError when the store cannot be reached.
    """
    base = base_store(store)
    if not isinstance(base, TCPStore):
        return store.clone() if hasattr(store, "clone") else store
    port = base.port
    with _cloning:  # two clones at a time could not tell whose connection is whose
        _known[port] = {(c.fd, c.inode) for c in sockets.connections(lambda _, remote: remote[1] == port)}
        try:
            copy: Store = store.clone() if hasattr(store, "clone") else _reopen(store, base)
            _connections[copy] = _new_connections(port)
            for stream in sockets.hold(_connections[copy]):
                with stream:
                    sockets.resend_often(stream)
        finally:
            del _known[port]
    return copy


def _new_connections(port: int) -> tuple[sockets.Connection, ...]:
    known = _known.get(port)
    if known is None:
        return ()
    found = sockets.connections(lambda _, remote: remote[1] == port)
    return tuple(c for c in found if (c.fd, c.inode) not in known)


def cut_clone(store: Store) -> bool:
    """End a blocked `clone_store` of this store by DistNetworkError there; return False if there is none."""
    base = base_store(store)
    return isinstance(base, TCPStore) and sockets.shut(_new_connections(base.port)) > 0


def disconnect(store: Store) -> bool:
    """End the calls that are blocked in a store made by `clone_store`: they raise DistNetworkError within milliseconds.

    Any thread may call it; the store is unusable afterwards, others on the same host are not touched. False where the
    store has no connection of its own.
    """
    return sockets.shut(_connections.get(store, ())) > 0


def _reopen(store: Store, base: TCPStore) -> Store:
    """Clone a store on torch 2.6, without ``Store.clone``: try the known prefixes, as a PrefixStore hides its own."""
    depth = 0
    level = store
    while isinstance(level, PrefixStore):
        depth, level = depth + 1, level.underlying_store
    limit: timedelta = getattr(base, "timeout")  # noqa: B009 - torch's stub lacks it
    client = TCPStore(base.host, base.port, None, False, limit, wait_for_workers=False)
    probe = f"ncclguard/probe/{os.getpid()}/{id(store)}"
    store.set(probe, "1")
    store.get(probe)  # a set is not acknowledged; once this returns, it has been done
    known = ["default_pg", *(f"{name}/" for name in c10d._world.pg_names.values())]
    for prefixes in itertools.product(known, repeat=depth):
        wrapped: Store = client
        for prefix in prefixes:
            wrapped = PrefixStore(prefix, wrapped)
        if bool(wrapped.check([probe])):
            store.delete_key(probe)
            return wrapped
    store.delete_key(probe)
    _log.warning(
        "%s",
        told(
            "torch {version} does not tell the prefix of a PrefixStore and it is none that init_process_group sets: the guard shares the "
            "connection of the caller's store. torch 2.7 or later gives it one of its own.",
            "log",
            version=torch.__version__,
        ),
    )
    return store
