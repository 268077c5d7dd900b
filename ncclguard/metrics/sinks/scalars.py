"""A snapshot as named numbers, for the dashboards that take nothing else."""

from __future__ import annotations

from ncclguard.metrics.records import Record, Snapshot

#: Ranks of a group that get a number of their own: the slowest.
MAX_STRAGGLERS = 8


def scalars(record: Record) -> dict[str, float]:
    """Names such as `ncclguard/0:cpu/all_reduce/train/median_ms`; empty for other records than snapshots."""
    if not isinstance(record, Snapshot):
        return {}
    values: dict[str, float] = {
        "ncclguard/hang": float(record.hang),
        "ncclguard/open_seconds": max((call.age for call in record.open), default=0.0),
    }
    for series in record.series:
        name = f"ncclguard/{series.group}/{series.op}/{series.phase}"
        values[f"{name}/count"] = series.count
        values[f"{name}/failed"] = series.failed
        values[f"{name}/bytes"] = series.nbytes
        values[f"{name}/seconds"] = series.seconds
        values[f"{name}/waited_seconds"] = series.waited
        values[f"{name}/median_ms"] = series.duration(0.5) * 1e3
        values[f"{name}/p99_ms"] = series.duration(0.99) * 1e3
    for table in record.stragglers:
        for row in table.rows[:MAX_STRAGGLERS]:
            values[f"ncclguard/{table.group}/behind_ms/rank{row.rank}"] = row.behind * 1e3
    return values
