"""Stop process groups whose collectives wait in native code.

Here is which groups have collectives in flight, whether a thread sleeps, the stop itself, and its announcement in the
job's store, so that a rank that comes late learns of it in time.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.coordination.store import AgreementStore, StoreUnavailable
from ncclguard.frames import thread_frames
from ncclguard.torch_compat import sockets
from ncclguard.transport.base import TransportError
from ncclguard.transport.bounded import bounded
from ncclguard_explain.language import Message, told, tr

_INTERVAL = 0.01  # seconds a thread must have slept through


def asleep(threads: frozenset[int], seconds: float = _INTERVAL) -> bool:
    """Return whether all ``threads`` slept without running once for the next ``seconds``, or have ended.

    False where it cannot be seen: no threads given, or a kernel without scheduler statistics.
    """
    if not threads:
        return False
    before = [_sleeping(thread) for thread in threads]
    if None in before:
        return False
    time.sleep(seconds)
    return before == [_sleeping(thread) for thread in threads]


def _sleeping(thread: int) -> str | None:
    """Return a sleeping thread's run time as text, "" if the thread has ended, None if it runs.

    The text is the kernel's: nanoseconds on a core, nanoseconds waiting for one, and how often it ran.
    """
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            return file.read() if state == "S" else None
    except FileNotFoundError:
        return "" if not os.path.exists(f"/proc/self/task/{thread}") else None
    except OSError:  # ended between opening and reading
        return None


logger = logging.getLogger(__name__)

STOP_BOUND: Final = 10.0  # seconds; an abort of NCCL that has not returned by then is reported and left behind


@dataclass(frozen=True, slots=True)
class InFlight:
    """Groups that have a collective in flight, and groups of which the flight recorder cannot tell."""

    busy: tuple[dist.ProcessGroup, ...]
    unknown: tuple[dist.ProcessGroup, ...]


def backends(group: dist.ProcessGroup) -> frozenset[str]:
    """Names of the backends behind a group, such as {"gloo", "nccl"}."""
    return frozenset(pair.rpartition(":")[2] for pair in dist.get_backend_config(group).split(","))


def in_flight(groups: Iterable[dist.ProcessGroup]) -> InFlight:
    """Ask torch's flight recorder which of ``groups`` have a collective that was started and has not ended.

    It is on from torch 2.11 on unless ``TORCH_FR_BUFFER_SIZE`` is 0, before only where that is set, as `watch` does.
    It does not know gloo's point-to-point operations nor ``monitored_barrier`` (seen on torch 2.13), so a group in
    neither list may still have one of those in flight.
    Takes up to 0.1 s with a full recorder: for use at a deadline, not on the healthy path.
    """
    dumps: dict[str, set[str] | None] = {}
    busy, unknown = [], []
    for group in groups:
        if group.size() == 1:
            continue
        for backend in backends(group):
            recorder = torch_compat.recorder_name(group, backend)
            if recorder not in dumps:
                dumps[recorder] = _unfinished(recorder)
            names = dumps[recorder]
            if names is None:
                if torch_compat.sequence_number(group, backend) != 0:  # a group that is not connected yet has no record
                    unknown.append(group)
            elif group.group_name in names:
                busy.append(group)
    return InFlight(tuple(busy), tuple(unknown))


def _unfinished(recorder: str) -> set[str] | None:
    """Names of the groups with an unfinished collective in a recorder; None where nothing is recorded."""
    trace = torch_compat.recorder_dump(recorder, entries=True)
    if trace is None:
        return None
    try:
        return {entry["process_group"][0] for entry in trace.get("entries", ()) if not torch_compat.recorded_end(entry)}
    except (LookupError, TypeError, AttributeError):
        logger.warning(
            "%s",
            told("torch's flight recorder of {name} could not be read: taken as unknown", "log", name=recorder),
            exc_info=True,
        )
        return None


def in_c10d_call(thread: int) -> bool:
    """Return whether the thread with this ident is inside a Python function of torch.distributed's collectives."""
    modules = (frame.f_globals.get("__name__") for frame in thread_frames(thread))
    return "torch.distributed.distributed_c10d" in modules


class Stop:
    """Ends what is in flight on some groups, each from a thread of its own, because an abort of NCCL may hang."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], announce: Callable[[dist.ProcessGroup], object] | None = None
    ) -> None:
        """``announce`` is called with each group, from its thread, before anything of it is ended."""
        self.groups = tuple(groups)
        self._announce = announce
        self.names = tuple(describe(group) for group in groups)  # now: a group may be destroyed before the message
        self.failures: list[str] = []
        self._done = tuple(threading.Event() for _ in groups)

    def start(self) -> None:
        """Start a thread for each group."""
        for item in zip(self.groups, self.names, self._done, strict=True):
            try:
                threading.Thread(target=self._run, args=item, name="ncclguard-stop", daemon=True).start()
            except RuntimeError:  # no thread to be had: the interpreter exits, or a limit is reached
                self._run(*item)

    def wait(self) -> None:
        """Wait until done, for ``STOP_BOUND`` seconds at most; that it took longer counts as a failure."""
        end = time.monotonic() + STOP_BOUND
        for name, done in zip(self.names, self._done, strict=True):
            if not done.wait(max(0.0, end - time.monotonic())):
                self.failures.append(told("{name}: not done after {seconds:g} s", name=name, seconds=STOP_BOUND))

    def _run(self, group: dist.ProcessGroup, name: str, done: threading.Event) -> None:
        if self._announce is not None:
            try:
                self._announce(group)
            except Exception:
                logger.exception(
                    "%s", told("{what} is stopped without a word to ranks that come late", "log", what=name)
                )
        try:
            gloo = torch_compat.gloo_backend(group)
            if gloo is not None:
                torch_compat.poison_gloo(gloo)
            if backends(group) - {"gloo"}:
                torch_compat.abort_group(group)
            if torch_compat.under_detail():
                _cut_checker(group)
        except Exception as error:
            logger.exception("%s", told("{what} could not be stopped", "log", what=name))
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
        finally:
            done.set()


def _cut_checker(group: dist.ProcessGroup) -> None:
    """End a wait in the check that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes before each collective.

    It runs on a gloo group of its own that Python has no handle on (distributed_c10d.py,
    ``_create_process_group_wrapper``), but the addresses that its ranks listen at are in the store, and so its
    connections can be found and shut.
    """
    store = torch_compat.store_of(group)
    listening = set()
    for device in ("cpu", "cuda"):
        keys = torch_compat.PrefixStore(f"pg_wrapper:{group.group_name}", torch_compat.PrefixStore(f"{device}/", store))
        for rank in range(group.size()):
            for context in itertools.count():  # one for each interface in GLOO_SOCKET_IFNAME
                if not keys.check([f"{context}/{rank}"]):
                    break
                listening.add(sockets.gloo_address(keys.get(f"{context}/{rank}")))
    sockets.shut(sockets.connections(lambda local, remote: local in listening or remote in listening))


def describe(group: dist.ProcessGroup) -> Message:
    """Name a group in a message, such as ``process group '0' (default_pg, gloo, 4 ranks)``."""
    name, given, count = repr(group.group_name), "/".join(sorted(backends(group))), group.size()
    if group.group_desc == "undefined":
        return tr("process group {name} ({given}, {count} ranks)", name=name, given=given, count=count)
    kind = str(group.group_desc)
    return tr("process group {name} ({kind}, {given}, {count} ranks)", name=name, kind=kind, given=given, count=count)


T = TypeVar("T")

ROOT: Final = "ncclguard-limits"  # prefix of the keys; then the number of the process group's life, the group's name
ANSWER_WITHIN: Final = 0.5  # seconds; a store that takes longer is not asked again
AWAY: Final = 30.0  # seconds, or half of the limit: a rank that left its last block more recently does not ask


@dataclass(frozen=True, slots=True)
class Notice:
    """The notice that a rank has stopped a group because its limit had passed."""

    rank: int  # the rank that stopped the group
    limit: float  # seconds
    issued: Mapping[str, int]  # backend -> collectives that the rank had issued on the group

    def missing(self, group: dist.ProcessGroup) -> int | None:
        """Return the number of the first collective that the other had issued and this process has not, or None."""
        own = _issued(group)
        behind = [own[name] + 1 for name, number in self.issued.items() if name in own and own[name] < number]
        return min(behind, default=None)


class Board:
    """The notices of this process's groups: `post` before one is stopped, `heard` before one is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = 0  # default groups made in this process: equal on all ranks, which make them together
        self._store: torch_compat.Store | None = None
        self._silent = False
        self.gave_up = False  # this rank has stopped a group itself, which may be why it has not called a collective
        self._here_at: float | None = None
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, Notice] = weakref.WeakKeyDictionary()

    def begin_life(self) -> None:
        """Begin anew for a new default group: earlier notices have nothing to do with its groups."""
        with self._lock:
            self._life += 1
            self._store, self._silent, self._here_at, self.gave_up = None, False, None, False

    def leave_to_parent(self) -> None:
        """Leave the groups and the store's connection to the parent; its threads may have held the lock at the fork."""
        self._lock = threading.Lock()
        self._store = None

    def left(self, now: float) -> None:
        """Note that this rank leaves a block: until now it was not away."""
        self._here_at = now

    def post(self, group: dist.ProcessGroup, limit: float) -> None:
        """Announce that this rank stops the group because its limit (seconds) passed; the first notice counts."""
        self.gave_up = True
        notice = {"rank": torch_compat.own_rank(group), "limit": limit, "issued": _issued(group)}
        self._ask(
            "announcing a stopped process group",
            lambda store: store.first(self._key(group), json.dumps(notice)),
        )

    def heard(self, groups: Iterable[dist.ProcessGroup], limit: float, now: float) -> dict[dist.ProcessGroup, Notice]:
        """Return the groups that a peer has stopped, as far as this rank knows; asks the store after a long absence."""
        groups = [group for group in groups if group.size() > 1]
        away = self._here_at is None or now - self._here_at > min(AWAY, limit / 2)
        self._here_at = now
        unknown = {self._key(group): group for group in groups if group not in self._known}
        if away and unknown:
            found = self._ask("asking for stopped process groups", lambda store: store.read_many(list(unknown)))
            for key, text in (found or {}).items():
                notice = json.loads(text)
                self._known[unknown[key]] = Notice(int(notice["rank"]), float(notice["limit"]), dict(notice["issued"]))
        return {group: self._known[group] for group in groups if group in self._known}

    def _key(self, group: dist.ProcessGroup) -> str:
        return f"{self._life}/{torch_compat.group_name(group)}"

    def _ask(self, what: str, question: Callable[[AgreementStore], T]) -> T | None:
        """Ask the store on a connection of its own; return None if no answer comes in time."""
        with self._lock:
            if self._silent or not dist.is_initialized():
                return None
            try:
                if self._store is None:
                    base = torch_compat.default_store()
                    self._store = bounded(
                        what,
                        lambda: torch_compat.clone_store(base),
                        ANSWER_WITHIN,
                        lambda: torch_compat.cut_clone(base),
                    )
                store = self._store
                return bounded(
                    what,
                    lambda: question(AgreementStore(store, ROOT)),
                    ANSWER_WITHIN,
                    lambda: torch_compat.disconnect(store),
                )
            except (TransportError, StoreUnavailable, ValueError) as error:
                self._silent = True
                logger.warning(
                    "%s",
                    told(
                        "{what} failed: {error}. A rank that comes late is not told before its collective that its peers have given up.",
                        "log",
                        what=what,
                        error=error,
                    ),
                )
                return None


def _issued(group: dist.ProcessGroup) -> dict[str, int]:
    counted = {backend: torch_compat.sequence_number(group, backend) for backend in backends(group)}
    return {backend: number for backend, number in counted.items() if number is not None}
