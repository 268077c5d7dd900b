"""Records as lines of the `logging` module."""

from __future__ import annotations

import logging

from ncclguard.incident.render import ranks_text
from ncclguard.metrics.records import Change, Failure, Record, Snapshot
from ncclguard.metrics.settings import shown

#: Series that one line names.
MAX_NAMED = 4


class LogSink:
    """One line for each record, on the logger `ncclguard.metrics` or the one given: failures and hangs as warnings."""

    name = "log"

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._log = logger or logging.getLogger("ncclguard.metrics")
        self._level = level

    def write(self, record: Record) -> None:
        serious = isinstance(record, Failure) or (isinstance(record, Snapshot) and record.hang)
        self._log.log(logging.WARNING if serious else self._level, "rank %d: %s", record.rank, line(record))

    def close(self) -> None:
        """The logger belongs to the program."""


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
    """The busiest series, what is open for long, and the rank that comes last."""
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
