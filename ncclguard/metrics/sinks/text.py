"""Sinks of text: one line of the `logging` module for each record, or one line of JSON in a file that is rotated."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import TextIO

from ncclguard.incident.text import ranks_text
from ncclguard.metrics.records import Change, Failure, Record, Snapshot
from ncclguard.metrics.settings import shown

#: Series that one line names.
MAX_NAMED = 4


class LogSink:
    """Logs one line for each record, on `ncclguard.metrics` or the logger given; failures and hangs are warnings."""

    name = "log"

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._log = logger or logging.getLogger("ncclguard.metrics")
        self._level = level

    def write(self, record: Record) -> None:
        serious = isinstance(record, Failure) or (isinstance(record, Snapshot) and record.hang)
        self._log.log(logging.WARNING if serious else self._level, "rank %d: %s", record.rank, line(record))

    def close(self) -> None:
        """The logger belongs to the program."""


class JsonlSink:
    """Appends a line of JSON for each record to `path`, in which `{rank}` stands for the rank.

    `path.1` is the newest of `backups` older files. A file is rotated before it would exceed `max_bytes`. Raises
    ValueError for limits that cannot be kept, OSError when the folder cannot be made.
    """

    name = "jsonl"

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int = 0, max_bytes: int = 16_000_000, backups: int = 3
    ) -> None:
        if max_bytes < 1 or backups < 0:
            raise ValueError(f"max_bytes is {max_bytes}, backups {backups}: give at least 1 byte and 0 backups")
        self.path = Path(os.fspath(path).replace("{rank}", str(rank)))
        self._max_bytes = max_bytes
        self._backups = backups
        self._file: TextIO | None = None
        self._size = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        line = json.dumps(record.to_dict()) + "\n"  # ASCII, so characters are bytes
        file = self._file or self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            file = self._rotate(file)
        file.write(line)
        file.flush()  # whoever follows the file sees whole lines, and a killed process loses none
        self._size += len(line)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> TextIO:
        file = self._file = self.path.open("a", encoding="ascii")
        self._size = file.tell()
        return file

    def _rotate(self, file: TextIO) -> TextIO:
        file.close()
        self._file = None
        for number in range(self._backups - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._backup(number), self._backup(number + 1))
        if self._backups:
            os.replace(self.path, self._backup(1))
        else:
            self.path.unlink()
        return self._open()

    def _backup(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def line(record: Record) -> str:
    """A record in one line for people."""
    if isinstance(record, Snapshot):
        return snapshot_line(record)
    if isinstance(record, Failure):
        return record.summary or f"{record.op} {record.op_id} failed: {record.cause}, {ranks_text(record.culprits)}"
    if isinstance(record, Change):
        return f"{record.name} of group {record.group} is {shown(record.new)}, was {shown(record.old)}: {record.reason}"
    return str(record.to_dict())


def snapshot_line(snapshot: Snapshot) -> str:
    """A snapshot in one line: the busiest series, the calls that are open for long, and the rank that comes last."""
    busiest = sorted(snapshot.series, key=lambda series: series.seconds, reverse=True)
    total, failed = sum(series.count for series in busiest), sum(series.failed for series in busiest)
    parts = [f"{total} guarded operations, {failed} failed"]
    for series in busiest[:MAX_NAMED]:
        where = "" if series.phase == "none" else f" in {series.phase}"
        parts.append(
            f"{series.op}{where}: {series.count}, median {series.duration(0.5) * 1e3:.3g} ms, "
            f"99 % {series.duration(0.99) * 1e3:.3g} ms, waited {series.waited:.3g} of {series.seconds:.3g} s"
        )
    parts += [f"{call.text} open for {call.age:.3g} of {call.limit:.3g} s" for call in snapshot.open if call.late]
    for table in snapshot.stragglers:
        slowest = table.slowest
        if slowest is not None:
            parts.append(
                f"slowest to arrive in group {table.group}: rank {slowest.rank}, {slowest.behind * 1e3:.3g} ms after the "
                f"first on average, last in {slowest.last} of {table.operations}"
            )
    return "; ".join(parts)
