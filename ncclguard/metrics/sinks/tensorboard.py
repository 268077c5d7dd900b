"""Metrics for TensorBoard, through torch's own writer, which needs the package `tensorboard`."""

from __future__ import annotations

import os
from typing import Any

from ncclguard.metrics.records import Change, Failure, Record, Snapshot
from ncclguard.metrics.sinks.scalars import scalars
from ncclguard.metrics.sinks.text import line


class TensorBoardSink:
    """Writes event files into `folder`, in which `{rank}` stands for the rank; a writer
    of the program's may be given instead.

    The step is the number of seconds since monitoring began. Raises ImportError without tensorboard.
    """

    name = "tensorboard"

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, rank: int = 0, writer: Any = None) -> None:
        self._own = writer is None
        if writer is None:
            from torch.utils.tensorboard import SummaryWriter

            path = os.fspath(folder or "runs/ncclguard-{rank}").replace("{rank}", str(rank))
            writer = SummaryWriter(path)
        self._writer = writer
        self._step = 0

    def write(self, record: Record) -> None:
        if isinstance(record, Snapshot):
            self._step = int(record.uptime)
            for name, value in scalars(record).items():
                self._writer.add_scalar(name, value, self._step, walltime=record.time)
            self._writer.flush()
        elif isinstance(record, (Failure, Change)):
            self._writer.add_text(f"ncclguard/{record.kind}", line(record), self._step, walltime=record.time)
            self._writer.flush()

    def close(self) -> None:
        if self._own:
            self._writer.close()
