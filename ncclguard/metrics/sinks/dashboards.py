"""Sinks for dashboards: Prometheus, Weights & Biases and TensorBoard, each through its client, imported when used."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ncclguard.metrics.records import SIZE_BOUNDS, TIME_BOUNDS, Change, Failure, Record, SeriesSnapshot, Snapshot
from ncclguard.metrics.sinks.text import line

#: The labels of a Prometheus series.
LABELS = ("rank", "group", "op", "phase")
#: Ranks of a group that get a Prometheus gauge of their own: the slowest.
MAX_GAUGES = 16
#: Ranks of a group that get a scalar of their own on the other dashboards: the slowest.
MAX_SCALARS = 8


class PrometheusSink:
    """Shows the newest snapshot on a registry of the Prometheus client, and serves that over HTTP if a port is given.

    `port` 0 means a free port; the attribute `port` has its number. Every label is bounded: at most 128 series of
    group, op and phase, 8 causes, 64 culprits. The gauge `ncclguard_hang` is 1 while a call has been open for longer
    than `warn_after`. Raises ImportError without prometheus_client, OSError for a port that is taken.
    """

    name = "prometheus"

    def __init__(self, port: int | None = None, *, address: str = "0.0.0.0", registry: Any = None) -> None:
        import prometheus_client

        self._registry = prometheus_client.REGISTRY if registry is None else registry
        self._snapshot: Snapshot | None = None
        self._server: Any = None
        self._thread: Any = None
        self.port = port
        self._registry.register(self)
        if port is not None:
            try:
                self._server, self._thread = prometheus_client.start_http_server(port, address, self._registry)
            except BaseException:
                self._registry.unregister(self)
                raise
            self.port = self._server.server_address[1]

    def write(self, record: Record) -> None:
        if isinstance(record, Snapshot):
            self._snapshot = record

    def close(self) -> None:
        self._registry.unregister(self)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(1.0)

    def describe(self) -> Iterable[Any]:
        """Nothing is known before the first snapshot; without this the registry would ask `collect` at once."""
        return ()

    def collect(self) -> Iterator[Any]:
        """The families of the newest snapshot; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        snapshot = self._snapshot
        if snapshot is None:
            return
        rank = str(snapshot.rank)
        yield _one(GaugeMetricFamily, "ncclguard_hang", "1 while a call is open for too long", rank, int(snapshot.hang))
        oldest = max((call.age for call in snapshot.open), default=0.0)
        yield _one(GaugeMetricFamily, "ncclguard_open_seconds", "age of the oldest open call", rank, oldest)
        counters: Sequence[tuple[str, str, Any]] = (
            ("ncclguard_operations", "guarded operations that ended", lambda one: one.count),
            ("ncclguard_attempts", "tries of them", lambda one: one.attempts),
            ("ncclguard_bytes", "bytes of them, counted as nccl-tests do", lambda one: one.nbytes),
        )
        family: Any
        for name, what, value in counters:
            family = CounterMetricFamily(name, what, labels=LABELS)
            for series in snapshot.series:
                family.add_metric(_labels(rank, series), value(series))
            yield family
        histograms: Sequence[tuple[str, str, Sequence[float], Any, Any]] = (
            ("ncclguard_duration_seconds", "how long they took", TIME_BOUNDS, "durations", "seconds"),
            ("ncclguard_wait_seconds", "from the call until all ranks had come", TIME_BOUNDS, "waits", "waited"),
            ("ncclguard_size_bytes", "their sizes", SIZE_BOUNDS, "sizes", "nbytes"),
        )
        for name, what, bounds, counts, total in histograms:
            family = HistogramMetricFamily(name, what, labels=LABELS)
            for series in snapshot.series:
                buckets = _cumulative(getattr(series, counts), bounds)
                family.add_metric(_labels(rank, series), buckets, getattr(series, total))
            yield family
        failures = CounterMetricFamily("ncclguard_failures", "failed operations", labels=(*LABELS, "cause"))
        culprits = CounterMetricFamily("ncclguard_culprits", "ranks to blame", labels=(*LABELS, "culprit"))
        for series in snapshot.series:
            for cause, count in series.failures.items():
                failures.add_metric((*_labels(rank, series), cause), count)
            for culprit, count in series.culprits.items():
                culprits.add_metric((*_labels(rank, series), culprit), count)
        yield failures
        yield culprits
        behind = GaugeMetricFamily(
            "ncclguard_behind_seconds", "mean arrival after the first rank", labels=("rank", "group", "straggler")
        )
        for table in snapshot.stragglers:
            for row in table.rows[:MAX_GAUGES]:
                behind.add_metric((rank, table.group, str(row.rank)), row.behind)
        yield behind


def _one(kind: Any, name: str, what: str, rank: str, value: float) -> Any:
    family = kind(name, what, labels=("rank",))
    family.add_metric((rank,), value)
    return family


def _labels(rank: str, series: SeriesSnapshot) -> tuple[str, str, str, str]:
    return rank, series.group, series.op, series.phase


def _cumulative(counts: Sequence[int], bounds: Sequence[float]) -> list[tuple[str, int]]:
    buckets, total = [], 0
    for bound, count in zip((*map(repr, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


# ---------------------------------------------------------------------- dashboards that take named numbers


def scalars(record: Record) -> dict[str, float]:
    """A snapshot as numbers with names such as `ncclguard/0:cpu/all_reduce/train/median_ms`; {} of other records."""
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
        for row in table.rows[:MAX_SCALARS]:
            values[f"ncclguard/{table.group}/behind_ms/rank{row.rank}"] = row.behind * 1e3
    return values


class WandbSink:
    """Logs to the W&B run given, else to the program's current run, else to a run of its own.

    `init` are keywords of `wandb.init` for a run of its own. In a run of the program's the values join its next `log`
    call, so its steps stay its own. Raises ImportError without wandb.
    """

    name = "wandb"

    def __init__(self, run: Any = None, **init: Any) -> None:
        import wandb

        self._run: Any = run or wandb.run
        self._own = self._run is None
        if self._run is None:
            self._run = wandb.init(**{"project": "ncclguard", **init})

    def write(self, record: Record) -> None:
        if isinstance(record, Failure):
            self._run.summary["ncclguard/last_failure"] = line(record)
        values = scalars(record)
        if values:
            self._run.log(values, commit=self._own)

    def close(self) -> None:
        if self._own:
            self._run.finish()


class TensorBoardSink:
    """Writes TensorBoard's event files into `folder`, in which `{rank}` stands for the rank.

    A `SummaryWriter` of the program may be given in place of a folder. The step is the number of seconds since
    monitoring began. Raises ImportError without tensorboard.
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
