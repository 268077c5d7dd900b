"""What a rank that stops a process group leaves in the job's store, so that one that comes late hears of it in time.

A late rank that enters a collective which its peers have aborted is lost on NCCL: torch's watchdog finds an error there
and ends the process (torch 2.13: within a minute; nccl2 of 2.15: after 15 s). Told before, it has nothing in flight and
can go on. The store is asked only by a rank that has been away for long, and never waited for without a bound.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.coordination.store import AgreementStore, StoreUnavailable
from ncclguard.deadlines.stopping import backends
from ncclguard.transport.base import TransportError
from ncclguard.transport.bounded import bounded

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROOT: Final = "ncclguard-limits"  # of the keys; below it the number of the process group's life, then the group's name
ANSWER_WITHIN: Final = 0.5  # seconds; a store that takes longer is asked no more
AWAY: Final = 30.0  # seconds; a rank that was inside a block less long ago, or than half of its limit, asks nobody


@dataclass(frozen=True, slots=True)
class Notice:
    """A group was stopped by a rank whose limit had passed."""

    rank: int  # which
    limit: float  # seconds
    issued: Mapping[str, int]  # backend -> collectives that the rank had issued on the group

    def missing(self, group: dist.ProcessGroup) -> int | None:
        """The number of the first collective that the other had issued and this process has not, or None."""
        own = _issued(group)
        behind = [own[name] + 1 for name, number in self.issued.items() if name in own and own[name] < number]
        return min(behind, default=None)


class Board:
    """The notices of this process's groups: `post` before one is stopped, `heard` before one is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._life = 0  # of the default group in this process: equal on all ranks, as each makes it equally often
        self._store: torch_compat.Store | None = None
        self._silent = False
        self.gave_up = False  # this rank has stopped a group itself: what it had not called may be for that reason
        self._here_at: float | None = None
        self._known: weakref.WeakKeyDictionary[dist.ProcessGroup, Notice] = weakref.WeakKeyDictionary()

    def begin_life(self) -> None:
        """The default group has been made: what was said of others before has nothing to do with its groups."""
        with self._lock:
            self._life += 1
            self._store, self._silent, self._here_at, self.gave_up = None, False, None, False

    def leave_to_parent(self) -> None:
        """In a forked child: the groups and the connection are the parent's, and its threads may have held the lock."""
        self._lock = threading.Lock()
        self._store = None

    def left(self, now: float) -> None:
        """This rank leaves a block: until now it was not away."""
        self._here_at = now

    def post(self, group: dist.ProcessGroup, limit: float) -> None:
        """Say that this rank stops the group because its limit (seconds) passed; of several the first counts."""
        self.gave_up = True
        notice = {"rank": dist.get_rank(), "limit": limit, "issued": _issued(group)}
        self._ask(
            "announcing a stopped process group",
            lambda store: store.first(self._key(group), json.dumps(notice)),
        )

    def heard(self, groups: Iterable[dist.ProcessGroup], limit: float, now: float) -> dict[dist.ProcessGroup, Notice]:
        """Which of the groups a peer has stopped, as far as this rank knows; asks the store after a long absence."""
        groups = [group for group in groups if group.size() > 1]
        away = self._here_at is None or now - self._here_at > min(AWAY, limit / 2)
        self._here_at = now
        unknown = {self._key(group): group for group in groups if group not in self._known}
        if away and unknown:
            found = self._ask("asking for stopped process groups", lambda store: store.read_many(list(unknown)))
            for key, text in (found or {}).items():
                said = json.loads(text)
                self._known[unknown[key]] = Notice(int(said["rank"]), float(said["limit"]), dict(said["issued"]))
        return {group: self._known[group] for group in groups if group in self._known}

    def _key(self, group: dist.ProcessGroup) -> str:
        return f"{self._life}/{torch_compat.group_name(group)}"

    def _ask(self, what: str, question: Callable[[AgreementStore], T]) -> T | None:
        """The answer of the store, on a connection of its own; None where there is none in time."""
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
                    "%s failed: %s. A rank that comes late is not told before its collective that its peers have given up.",
                    what,
                    error,
                )
                return None


def _issued(group: dist.ProcessGroup) -> dict[str, int]:
    counted = {backend: torch_compat.sequence_number(group, backend) for backend in backends(group)}
    return {backend: number for backend, number in counted.items() if number is not None}
