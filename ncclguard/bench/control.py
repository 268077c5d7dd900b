"""The bench's own small group: the barrier before each timed call, decisions all ranks share, and the results."""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import Sequence
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ncclguard.bench.arguments import BenchError
from ncclguard.bench.launch import Heartbeat


class Wish(IntEnum):
    """What a rank wants next; the strongest wish of all ranks counts."""

    GO_ON = 0
    ENOUGH = 1  # honoured between two cycles
    STOP = 2  # Ctrl-C: honoured before the next call


class Control:
    """A gloo group beside those that are compared, so that neither slows the other down or breaks it."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.interrupted = False
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self._heartbeat = Heartbeat()
        self._wish = torch.zeros(1, dtype=torch.int64)

    def beat(self) -> None:
        """Show that this rank moves on, in a step that may take long."""
        self._heartbeat.beat()

    def align(self, wish: Wish = Wish.GO_ON) -> tuple[float, Wish]:
        """Wait for all ranks: the seconds that took here, and the strongest wish."""
        self.beat()
        self._wish.fill_(int(Wish.STOP if self.interrupted else wish))
        started = time.perf_counter()
        dist.all_reduce(self._wish, dist.ReduceOp.MAX, group=self._group)
        return time.perf_counter() - started, Wish(int(self._wish.item()))

    def gather(self, mine: object) -> list[Any]:
        """Everybody's object, in the order of the ranks, on all ranks."""
        self.beat()
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine, group=self._group)
        return everybody

    def agree_to_start(self, objection: str | None) -> None:
        """Go on only if no rank objects.

        Raises:
            BenchError: on every rank, with the objection of the lowest rank that has one.
        """
        raise_first(self.gather(objection))

    def catch_signals(self) -> None:
        """Turn SIGINT and SIGTERM into a wish to stop, so that all ranks leave together and print what there is."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)


def raise_first(objections: Sequence[str | None]) -> None:
    """Raise a BenchError with the objection of the lowest rank, if any rank has one."""
    for rank, text in enumerate(objections):
        if text is not None:
            raise BenchError(text if rank == 0 else f"rank {rank}: {text}")
