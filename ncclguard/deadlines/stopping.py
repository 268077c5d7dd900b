"""Stop what waits in native code: which groups have collectives in flight, whether a thread sleeps, and the stop."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.torch_compat import sockets

_INTERVAL = 0.01  # seconds a thread must have slept through


def asleep(threads: frozenset[int], seconds: float = _INTERVAL) -> bool:
    """Whether all ``threads`` slept, without running once, through the next 10 ms, or ``seconds`` (or have ended).

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
    """How long a sleeping thread has run in all (nanoseconds, and how often), "" for
    one that has ended; None if it runs.
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

    It is on unless ``TORCH_FR_BUFFER_SIZE`` is 0. It does not know gloo's point-to-point operations nor
    ``monitored_barrier`` (seen on torch 2.13), so a group in neither list may still have one of those in flight.
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
        logger.warning("torch's flight recorder of %s could not be read: taken as unknown", recorder, exc_info=True)
        return None


def in_c10d_call(thread: int) -> bool:
    """Whether the thread with this ident is inside a Python function of torch.distributed's collectives."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            return True
        frame = frame.f_back
    return False


class Stop:
    """Ends what is in flight on some process groups, each from a thread of its own
    because an abort of NCCL may hang.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], announce: Callable[[dist.ProcessGroup], object] | None = None
    ) -> None:
        """``announce`` is called with each group, from its thread, before anything of it is ended."""
        self.groups = tuple(groups)
        self._announce = announce
        self.names = tuple(describe(group) for group in groups)  # now: a group may be destroyed before it is spoken of
        self.failures: list[str] = []
        self._done = tuple(threading.Event() for _ in groups)

    def start(self) -> None:
        """Begin."""
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
                self.failures.append(f"{name}: not done after {STOP_BOUND:g} s")

    def _run(self, group: dist.ProcessGroup, name: str, done: threading.Event) -> None:
        if self._announce is not None:
            try:
                self._announce(group)
            except Exception:
                logger.exception("%s is stopped without a word to ranks that come late", name)
        try:
            gloo = torch_compat.gloo_backend(group)
            if gloo is not None:
                torch_compat.poison_gloo(gloo)
            if backends(group) - {"gloo"}:
                torch_compat.abort_group(group)
            if torch_compat.under_detail():
                _cut_checker(group)
        except Exception as error:
            logger.exception("%s could not be stopped", name)
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


def describe(group: dist.ProcessGroup) -> str:
    """Name a group in a message, such as ``process group '0' (default_pg, gloo, 4 ranks)``."""
    own_name = "" if group.group_desc == "undefined" else f"{group.group_desc}, "
    return f"process group {group.group_name!r} ({own_name}{'/'.join(sorted(backends(group)))}, {group.size()} ranks)"
