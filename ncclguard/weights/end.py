"""The common part of both ends of a channel: its keys in the store, and the group of the epoch that it is in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from ncclguard import torch_compat
from ncclguard.engine import runtime
from ncclguard.incident.model import Incident
from ncclguard.metrics.records import ChannelStatus
from ncclguard.metrics.registry import add_channel
from ncclguard.process_group.joined import open_group
from ncclguard.torch_compat import Store
from ncclguard.weights.board import Board, News

if TYPE_CHECKING:
    from typing_extensions import Self


class ChannelEnd:
    """A sender or a receiver, which makes `_board` when all that the board's thread looks at is there."""

    _board: Board

    def __init__(self, store: Store, name: str, label: str) -> None:
        self._store, self._name, self._label = store, name, label
        self._group: dist.ProcessGroup | None = None
        self._current: tuple[str | int, float, float] | None = None  # the version served, when, and the seconds it took
        self._versions = self._failed = 0
        self._hide: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Leave the channel."""
        self._hide()
        try:
            self._drop_group()
        finally:
            self._board.close()

    def _show(self) -> None:
        """Have metrics and `ncclguard top` show this end from now on."""
        self._hide = add_channel(self._status)

    def _count(self, version: str | int, took: float) -> None:
        self._versions, self._current = self._versions + 1, (version, time.monotonic(), took)

    def _status(self) -> ChannelStatus:
        """Return what metrics show; in their thread."""
        version, at, took = self._current or (None, None, 0.0)
        return ChannelStatus(
            channel=self._name, end=self._label, version=version, age=None if at is None else time.monotonic() - at,
            seconds=took, versions=self._versions, failed=self._failed,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _has_group(self) -> bool:
        """Return whether there is a group that works: the default one may have been destroyed, or its store gone."""
        group = self._group
        return group is not None and torch_compat.is_member(group) and not runtime.of(group).monitor.unavailable

    def _first_fault(self) -> Incident | None:
        """Return the incident that the failures in the group go back to, where one is agreed."""
        group = self._group
        return runtime.of(group).first_fault if group is not None and torch_compat.is_member(group) else None

    def _open_group(
        self, news: News, rank: int, label: str, until: float, wanted: Callable[[], bool] = lambda: True
    ) -> dist.ProcessGroup:
        """Meet the others of the news' epoch in a group of their own. Raises as `open_group` does."""
        key, name = f"epoch/{news.sender}/{news.epoch}", f"channel {self._name}"  # one label of metrics for all epochs
        size, until = 1 + len(news.members), min(until, time.monotonic() + news.limit)
        self._group = open_group(self._store, key, name, rank, size, label, until, has_store=False, wanted=wanted)
        return self._group

    def _drop_group(self) -> None:
        group, self._group = self._group, None
        if group is not None and torch_compat.is_member(group):
            dist.destroy_process_group(group)
