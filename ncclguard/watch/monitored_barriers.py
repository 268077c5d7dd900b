"""Monitored barriers of this process: gloo makes them of sends and receives in C++, of which no recorder knows."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from ncclguard import lifecycle, torch_compat


class MonitoredBarrier(NamedTuple):
    """One that this process has entered; `number` is which of its group, from 1, `since` by time.time_ns()."""

    group: dist.ProcessGroup
    number: int
    thread: int
    since: int

    @property
    def channel(self) -> str:
        """The name of those of its group, beside those of the group's collectives."""
        return _channel(self.group)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that have to come to it; ValueError when the group was destroyed."""
        return tuple(sorted(torch_compat.group_ranks(self.group)))

    @property
    def text(self) -> str:
        return f"monitored_barrier(group {torch_compat.group_name(self.group)}, number {self.number})"


def _channel(group: dist.ProcessGroup) -> str:
    return f"{torch_compat.group_name(group)}:gloo monitored_barrier"


class MonitoredBarriers:
    """The monitored barriers that were entered since `start`; any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: no group is left, or this process is a fork."""
        self._lock = threading.Lock()
        self._counts: dict[dist.ProcessGroup, int] = {}
        self._messages: dict[dist.ProcessGroup, int] = {}  # which gloo has counted with its collectives
        self._inside: dict[int, tuple[MonitoredBarrier, int]] = {}  # by thread, with gloo's number when it began
        self.failed: MonitoredBarrier | None = None  # the one that has raised, until another one begins

    def forget_group(self, group: dist.ProcessGroup) -> None:
        """The group is about to be destroyed; a later one may have its name."""
        with self._lock:
            self._counts.pop(group, None)
            self._messages.pop(group, None)
            if self.failed is not None and self.failed.group is group:
                self.failed = None

    @contextlib.contextmanager
    def entered(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Count one, and show it as awaited by this thread, until it returns or raises."""
        thread, before = threading.get_ident(), _number(group)
        with self._lock:
            self._counts[group] = number = self._counts.get(group, 0) + 1
            one = MonitoredBarrier(group, number, thread, time.time_ns())
            self._inside[thread], self.failed = (one, before), None
        try:
            yield
        except BaseException:
            self.failed = one
            raise
        finally:
            with self._lock:
                self._inside.pop(thread, None)
                if group in self._counts:
                    self._messages[group] = self._messages.get(group, 0) + _number(group) - before

    def waiting(self) -> list[MonitoredBarrier]:
        """Return the barriers that threads are in at this moment."""
        return [one for one, _ in tuple(self._inside.values())]

    def issued(self) -> dict[str, int]:
        """Return by channel how many were entered."""
        found = {}
        for group, count in tuple(self._counts.items()):
            with contextlib.suppress(ValueError):  # the group was destroyed meanwhile
                found[_channel(group)] = count
        return found

    def messages(self, group: dist.ProcessGroup, number: int) -> int:
        """Return how many of a group's collectives, of which gloo counts `number`, were messages of such barriers."""
        inside = [before for one, before in tuple(self._inside.values()) if one.group is group]
        return self._messages.get(group, 0) + sum(number - before for before in inside)


def _number(group: dist.ProcessGroup) -> int:
    return torch_compat.sequence_number(group, "gloo") or 0


monitored_barriers = MonitoredBarriers()


def start() -> None:
    """Note every monitored barrier of this process from now on."""
    torch_compat.note_monitored_barriers(monitored_barriers.entered)
    torch_compat.on_destroy(monitored_barriers.forget)
    torch_compat.on_destroy_group(monitored_barriers.forget_group)
    lifecycle.in_child(monitored_barriers.forget)
