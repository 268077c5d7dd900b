"""`join`: a guarded process group of any processes, such as a trainer and its engines, each in its own job."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ncclguard import torch_compat
from ncclguard.collectives import safe_barrier
from ncclguard.config import seconds
from ncclguard.coordination.store import StoreUnavailable
from ncclguard.engine import runtime
from ncclguard.engine.call import Time
from ncclguard.environment.network import is_here
from ncclguard.errors import CollectiveTimeout, GuardConfigError, GuardError
from ncclguard.process_group.group import NAME, told_of_world
from ncclguard.torch_compat import Store, TCPStore
from ncclguard.transport.base import TransportError
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import told
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")

#: Seconds for one try to reach a store, and between two.
_PROBE, _PAUSE = 1.0, 0.2
#: Held while a group is made: another thread may make one of the same name.
_making = threading.Lock()
#: Seconds in which `ncclguard store`, started together with rank 0, has to listen.
_PATIENCE = 5.0


def join(
    address: str | Store, *, name: str, rank: int, world_size: int, label: str = "", timeout: Time = 300.0
) -> dist.ProcessGroup:
    """Return a guarded process group of `world_size` processes, which need have no job, or not the same one, in common.

    All of `torch.distributed` and `safe_*` work on it, with and without a default group beside it; a process may be in
    several. Its ranks are 0 to `world_size` - 1, also where a rank is asked for as a global one. `address`:
    "tcp://HOST:PORT" of the store where the processes meet, or a store of torch's. Run that store as
    ``ncclguard store`` in a process of its own; where nobody listens there, rank 0 does, and when that process is
    stopped the others cannot tell who holds them up. `name`: the same on all, and no other group's in that store.
    `label`: what reports call this process, such as "engine 2". `timeout`: seconds or timedelta for all to come; each
    call has its own, or that of the settings.
    `torch.distributed.destroy_process_group(group)` ends it, and it can be joined again, by all, under the same name.

    Raises GuardConfigError, TypeError or ValueError for arguments that cannot be, or are other ranks'; GuardError when
    the store cannot be reached or a rank has not come, CollectiveFailed when one has failed or ended meanwhile.

    >>> import torch, torch.distributed as dist
    >>> import ncclguard as ng
    >>> group = ng.join(dist.HashStore(), name="weights", rank=0, world_size=1)
    >>> ng.safe_broadcast(torch.ones(2), src=0, group=group).ok
    True
    >>> dist.destroy_process_group(group)
    """
    limit = seconds(timeout, "timeout") or 300.0
    _check(name, rank, world_size)
    until = time.monotonic() + limit
    store, hosts = store_at(address, name, rank, limit) if isinstance(address, str) else (address, True)
    if not isinstance(store, torch_compat.Store):
        text = told(
            'address must be "tcp://HOST:PORT" or a store of torch.distributed, not {kind}: give where the processes meet',
            kind=type(address).__name__,
        )
        raise TypeError(text)
    return open_group(store, name, name, rank, world_size, label, until, has_store=hosts)


def open_group(
    store: Store,
    key: str,
    name: str,
    rank: int,
    world_size: int,
    label: str,
    until: float,
    *,
    has_store: bool,
    wanted: Callable[[], bool] = lambda: True,
) -> dist.ProcessGroup:
    """Return the group of those that meet below `key` in a store, once all have come; it is checked already.

    `name`: the same on all; `has_store`: see `World`. While rank 0 does not come, it is given up where the
    group is not `wanted()` any more. Raises GuardError and CollectiveFailed as `join`.
    """
    within = max(0.001, min(until - time.monotonic(), runtime.CONNECT_WITHIN))
    keys = torch_compat.PrefixStore(f"ncclguard/{key}", store)
    told_of = {"store": keys, "group": name, "label": label, "has_store": has_store, "within": within}
    token = told_of_world.set(told_of)
    try:
        with _making:
            taken = name in torch_compat.group_names()  # by another engine of this process: torch knows each name once
            here = f"{name} ({label})" if taken else name
            group = torch_compat.new_outside_group(NAME, keys, rank, world_size, here, default_pg_timeout)
    finally:
        told_of_world.reset(token)
    if world_size > 1:
        try:
            _meet(group, name, until, wanted)
        except BaseException:
            dist.destroy_process_group(group)
            raise
    return group


def _check(name: str, rank: int, world_size: int) -> None:
    for what, value in (("rank", rank), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(told("{name} must be a whole number, not {kind}", name=what, kind=type(value).__name__))
    if world_size < 1:
        raise GuardConfigError(told("world_size is {count}: give the number of processes", count=world_size))
    if not 0 <= rank < world_size:
        refusal = told(
            "rank is {rank} of {count}: give one of 0 to {last}", rank=rank, count=world_size, last=world_size - 1
        )
        raise GuardConfigError(refusal)
    if not isinstance(name, str) or not name:
        raise GuardConfigError(told("name is {name}: give a text that is the same on all ranks", name=repr(name)))
    if name in torch_compat.group_names():
        text = told(
            "this process has a group {name} already: end that one with destroy_process_group(group), or give another name",
            name=repr(name),
        )
        raise GuardConfigError(text)


def _meet(group: dist.ProcessGroup, name: str, until: float, wanted: Callable[[], bool]) -> None:
    """Return once all ranks are in the group."""
    began, joined = time.monotonic(), runtime.of(group)
    ready = joined.monitor.session_ready
    while not ready.wait(_PAUSE) and time.monotonic() < until and wanted():
        pass
    if not ready.is_set() and group.rank() == 0:
        raise GuardError(
            told(
                "the store of group {name} has not answered in {seconds:.3g} s: look whether the process that has it is stopped",
                name=repr(name),
                seconds=time.monotonic() - began,
            )
        )
    if not ready.is_set():
        refusal = told(
            "rank 0 has not come to group {name}, or another process is its rank {rank}: start rank 0 with the same name at "
            "the same address, or give join() a longer timeout",
            name=repr(name),
            rank=group.rank(),
        )
        raise GuardError(refusal)
    try:
        wrong = joined.misplaced(max(_PROBE, until - time.monotonic()))
    except (TransportError, StoreUnavailable) as error:
        refusal = told("the store of group {name} does not answer: {error}", name=repr(name), error=error)
        raise GuardError(refusal) from error
    if wrong:
        runtime.end_outside(group, Cause.FAILED, wrong)
        raise GuardConfigError(wrong)
    try:
        safe_barrier(group, timeout=max(0.001, until - time.monotonic()), name=f"join {name}").raise_if_failed()
    except CollectiveTimeout as error:
        if joined.is_replaced():
            text = told(
                "another process has joined group {name} as rank 0: end one of the two, and join again", name=repr(name)
            )
        elif error.outcome.culprits:
            text = told(
                "{ranks} of {count} did not come to group {name} in {seconds:.3g} s: start them with the same name at the same "
                "address, or give join() a longer timeout",
                ranks=ranks_text(error.outcome.culprits),
                count=group.size(),
                name=repr(name),
                seconds=time.monotonic() - began,
            )
        else:
            raise
        raise GuardError(text) from error


def store_at(address: str, name: str, rank: int, limit: float) -> tuple[Store, bool]:
    """Open the store at "tcp://HOST:PORT", which rank 0 makes on its host if none is there; and whether it did."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None or parts.path:
        text = told(
            'the address is {value}: give it as "tcp://HOST:PORT", such as "tcp://10.0.0.1:29700"',
            value=repr(address),
        )
        raise GuardConfigError(text)
    host, port = parts.hostname, parts.port
    until = time.monotonic() + limit
    refused: Exception | None = None
    if rank == 0 and is_here(host) and not answers(host, port, min(_PATIENCE, limit / 2)):
        try:
            store = TCPStore(host, port, None, True, timedelta(seconds=limit), wait_for_workers=False)
        except (RuntimeError, OSError) as error:  # another process has taken the port in this moment
            refused = error
        else:
            log.warning(
                "%s",
                told(
                    "ncclguard: nobody listens at {address}: this process, rank 0, has the store of group {name}. While it is "
                    "stopped or gone the others cannot agree who is; `ncclguard store --listen HOST:PORT` is a store of its own.",
                    address=address,
                    name=repr(name),
                ),
            )
            return store, True
    if not answers(host, port, limit if refused is None else min(_PATIENCE, limit / 2)):  # torch would print C++ for it
        if refused is not None:
            text = told(
                "this process cannot listen at {address}, and nobody answers there ({error}): give a port that no other program "
                "uses, and that the system does not give to connections (on Linux one below 32768)",
                address=address,
                error=str(refused).partition("\n")[0],
            )
            raise GuardError(text) from refused
        text = told(
            "no store has answered at {address} in {seconds:g} s: start `ncclguard store --listen HOST:PORT` there, or rank 0 "
            "on that host",
            address=address,
            seconds=limit,
        )
        raise GuardError(text)
    left = timedelta(seconds=max(_PROBE, until - time.monotonic()))
    try:
        return TCPStore(host, port, None, False, left, wait_for_workers=False), False
    except (RuntimeError, OSError) as error:
        text = told(
            "what listens at {address} is no store of torch.distributed ({error}): give the address of `ncclguard store`",
            address=address,
            error=str(error).partition("\n")[0],
        )
        raise GuardError(text) from error


def answers(host: str, port: int, within: float) -> bool:
    """Return whether somebody listens there, or begins to in so many seconds."""
    until = time.monotonic() + within
    while True:
        try:
            with socket.create_connection((host, port), timeout=_PROBE) as probe:
                if probe.getsockname() != probe.getpeername():  # a probe that is given this very port finds itself
                    return True
        except OSError:
            pass
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE)
