"""Sinks, to which monitoring sends its records: named ("log", "prometheus:9400"), or a function, or an object."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from ncclguard.metrics.records import (
    SIZE_BOUNDS,
    TIME_BOUNDS,
    Change,
    ChannelStatus,
    Failure,
    Membership,
    Record,
    SeriesSnapshot,
    Snapshot,
    channel_text,
)
from ncclguard.metrics.settings import shown
from ncclguard_explain.language import told, tr
from ncclguard_explain.ranks import ranks_text

#: The labels of a Prometheus series.
LABELS = ("rank", "group", "op", "phase")
#: The number of ranks of a group, the slowest ones, that get a Prometheus gauge of their own.
MAX_GAUGES = 16
#: The number of ranks of a group, the slowest ones, that get a scalar of their own on the other dashboards.
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
        """Return no families: none is known yet, and without this method the registry would call `collect` at once."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Return the metric families of the newest snapshot; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        snapshot = self._snapshot
        if snapshot is None:
            return
        rank = str(snapshot.rank)
        yield _one(GaugeMetricFamily, "ncclguard_hang", "1 while a call is open for too long", rank, int(snapshot.hang))
        oldest = max((call.age for call in snapshot.open), default=0.0)
        yield _one(GaugeMetricFamily, "ncclguard_open_seconds", "age of the oldest open call", rank, oldest)
        losses: Sequence[tuple[str, str, float]] = (
            ("ncclguard_losses", "ranks that the job went on without", snapshot.losses),
            ("ncclguard_rejoins", "ranks that came back", snapshot.rejoins),
            ("ncclguard_lost_seconds", "what losses and rejoins cost", snapshot.lost_seconds),
        )
        for name, what, value in losses:
            yield _one(CounterMetricFamily, name, what, rank, value)
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
        lost = GaugeMetricFamily(
            "ncclguard_slow_lost_ratio",
            "share of the job's time that a slow rank costs",
            labels=("rank", "slow", "kind"),
        )
        if snapshot.slow is not None:
            for slow in snapshot.slow.ranks[:MAX_GAUGES]:
                lost.add_metric((rank, str(slow), snapshot.slow.kind), snapshot.slow.lost)
        yield lost
        yield from _channels(rank, snapshot.channels)


def _channels(rank: str, channels: Sequence[ChannelStatus]) -> Iterator[Any]:
    """Return the metric families of weight channels; none where this process has no end of one."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ("rank", "channel", "end")
    families: Sequence[tuple[Any, str, str, Callable[[ChannelStatus], float]]] = (
        (CounterMetricFamily, "versions", "versions of weights that were served", lambda one: one.versions),
        (CounterMetricFamily, "failed_versions", "versions of weights that were not", lambda one: one.failed),
        (GaugeMetricFamily, "version_seconds", "what the last version took", lambda one: one.seconds),
        (GaugeMetricFamily, "stale_engines", "engines without the last version", lambda one: len(one.stale)),
    )
    for kind, name, what, value in families if channels else ():
        family = kind(f"ncclguard_weights_{name}", what, labels=labels)
        for one in channels:
            family.add_metric((rank, one.channel, one.end), value(one))
        yield family
    left_out = CounterMetricFamily("ncclguard_weights_left_out", "engines left out", labels=(*labels, "engine"))
    for one in channels:
        known = dict.fromkeys((*one.engines, *one.stale), 0)  # from 0 on, or the first time would be no increase
        for engine, count in {**known, **one.left_out}.items():
            left_out.add_metric((rank, one.channel, one.end, engine), count)
    if channels:
        yield left_out


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
    """Return a snapshot as numbers by name, as `ncclguard/0:cpu/all_reduce/train/median_ms`; {} of other records."""
    if not isinstance(record, Snapshot):
        return {}
    values: dict[str, float] = {
        "ncclguard/hang": float(record.hang),
        "ncclguard/open_seconds": max((call.age for call in record.open), default=0.0),
        "ncclguard/losses": float(record.losses),
        "ncclguard/rejoins": float(record.rejoins),
        "ncclguard/lost_seconds": record.lost_seconds,
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
    for one in record.channels:
        name = f"ncclguard/weights/{one.channel}/{one.end}"
        values |= {f"{name}/versions": one.versions, f"{name}/failed": one.failed, f"{name}/seconds": one.seconds}
        values |= {f"{name}/engines": len(one.engines), f"{name}/stale": len(one.stale)}
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
        elif isinstance(record, (Failure, Change, Membership)):
            self._writer.add_text(f"ncclguard/{record.kind}", line(record), self._step, walltime=record.time)
            self._writer.flush()

    def close(self) -> None:
        if self._own:
            self._writer.close()


#: The number of series in one line.
MAX_NAMED = 4


class LogSink:
    """Logs one line for each record, on `ncclguard.metrics` or the logger given; failures and hangs are warnings."""

    name = "log"

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._log = logger or logging.getLogger("ncclguard.metrics")
        self._level = level

    def write(self, record: Record) -> None:
        serious = isinstance(record, (Failure, Membership)) or (isinstance(record, Snapshot) and record.hang)
        self._log.log(logging.WARNING if serious else self._level, "rank %d: %s", record.rank, line(record))

    def close(self) -> None:
        """Do nothing: the logger belongs to the program."""


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
            text = told(
                "max_bytes is {number}, backups {count}: give at least 1 byte and 0 backups",
                number=max_bytes,
                count=backups,
            )
            raise ValueError(text)
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
    """Describe a record in one line for people."""
    if isinstance(record, Snapshot):
        return snapshot_line(record)
    if isinstance(record, Failure):
        return record.summary or f"{record.op} {record.op_id} failed: {record.cause}, {ranks_text(record.culprits)}"
    if isinstance(record, Change):
        return f"{record.name} of group {record.group} is {shown(record.new)}, was {shown(record.old)}: {record.reason}"
    if isinstance(record, Membership):
        return record.text
    return str(record.to_dict())


def snapshot_line(snapshot: Snapshot) -> str:
    """Describe a snapshot in one line: the busiest series, the calls open for long, and the rank that comes last."""
    busiest = sorted(snapshot.series, key=lambda series: series.seconds, reverse=True)
    total, failed = sum(series.count for series in busiest), sum(series.failed for series in busiest)
    parts = [f"{total} guarded operations, {failed} failed"]
    if snapshot.losses:
        back = f", {snapshot.rejoins} came back" if snapshot.rejoins else ""
        parts.append(f"{snapshot.losses} ranks lost{back}, {snapshot.lost_seconds:.3g} s")
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
    if snapshot.slow is not None:
        parts.append(str(snapshot.slow))
    parts += [str(channel_text(status)) for status in snapshot.channels]
    return "; ".join(parts)


log = logging.getLogger("ncclguard")

#: The number of records that wait for a slow sink at most; the oldest is dropped for a new one.
QUEUE_LENGTH = 64


class Sink(Protocol):
    """Takes records, in a thread of its own, one at a time; what it raises is logged once and the job goes on."""

    def write(self, record: Record) -> None:
        """Take a `Snapshot`, `Failure`, `Membership` or `Change`."""

    def close(self) -> None:
        """Flush and release everything; called once, after the last record."""


class CallableSink:
    """A sink that calls a function with each record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def write(self, record: Record) -> None:
        self._function(record)

    def close(self) -> None:
        """Do nothing: a function has nothing to close."""


SinkLike = str | Sink | Callable[[Record], object]
#: Name -> the package that has to be installed, "" for none.
PACKAGES = {
    "log": "",
    "jsonl": "",
    "prometheus": "prometheus-client",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
}


def make_sinks(wanted: Iterable[SinkLike], rank: int) -> list[Sink]:
    """Make the sinks that can be made, and log those that cannot.

    Raises TypeError for what is no sink at all, and ValueError for a name that is none or lacks its path.
    """
    made: list[Sink] = []
    for sink in wanted:
        if not isinstance(sink, str):
            made.append(_given(sink))
            continue
        name, _, detail = sink.partition(":")
        _check(sink, name, detail)
        try:
            made.append(_named(name, detail, rank))
        except Exception as error:  # noqa: BLE001 - a missing package, a port that is taken, a folder that cannot be written, ...
            package = PACKAGES[name] if isinstance(error, ImportError) else ""
            advice = (
                tr("install it with: pip install {name}", name=package)
                if package
                else tr("the job goes on without this sink")
            )
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                port = f"prometheus:{{{int(detail)} + int(os.environ.get('LOCAL_RANK', 0))}}"
                advice = tr('where a host has several ranks give each a port of its own: f"{port}"', port=port)
            log.warning(
                "ncclguard: %s",
                told(
                    "monitoring goes without {given!r} ({kind}: {error}); {advice}",
                    "log",
                    given=sink,
                    kind=type(error).__name__,
                    error=error,
                    advice=advice,
                ),
            )
    return made


def _given(one: Any) -> Sink:
    if callable(getattr(one, "write", None)) and callable(getattr(one, "close", None)):
        sink: Sink = one
        return sink
    if callable(one):
        return CallableSink(one)
    text = told(
        "a sink must be a name, a function of a record or an object with write(record) and close(), not {kind}",
        kind=type(one).__name__,
    )
    raise TypeError(text)


def _check(text: str, name: str, detail: str) -> None:
    if name not in PACKAGES:
        known = ", ".join(PACKAGES)
        raise ValueError(
            told("there is no sink {given!r}: use one of {some}, an object or a function", given=text, some=known)
        )
    if name == "log" and detail:
        raise ValueError(told("the sink {given!r} takes nothing after its name: write 'log'", given=text))
    if name in ("jsonl", "tensorboard"):
        for other in set(re.findall(r"{.*?}", detail)) - {"{rank}"}:
            wrong = told(
                "the sink {given!r} has {other}, which stands for nothing: write {right} for the rank",
                given=text,
                other=other,
                right="{rank}",
            )
            raise ValueError(wrong)
    if name == "jsonl" and not detail:
        raise ValueError(told("the sink 'jsonl' needs a path: write {given!r}", given="jsonl:guard-{rank}.jsonl"))
    if name == "prometheus" and detail and not (detail.isdecimal() and int(detail) < 65536):
        raise ValueError(
            told("the sink {given!r} needs a port, 0 to 65535: write for example 'prometheus:9400'", given=text)
        )


def _named(name: str, detail: str, rank: int) -> Sink:
    if name == "jsonl":
        return JsonlSink(detail, rank=rank)
    if name == "prometheus":
        return PrometheusSink(int(detail) if detail else None)
    if name == "wandb":
        return WandbSink(**({"project": detail} if detail else {}))
    if name == "tensorboard":
        return TensorBoardSink(detail or None, rank=rank)
    return LogSink()


class SinkThread:
    """Feeds one sink from a bounded queue. `put` never waits and never raises."""

    def __init__(self, sink: Sink) -> None:
        self.name = str(getattr(sink, "name", type(sink).__name__))
        self.dropped = 0
        self._sink = sink
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUE_LENGTH)
        self._complained = False
        self._thread = threading.Thread(target=self._run, name=f"ncclguard-sink-{self.name}", daemon=True)
        self._thread.start()

    def put(self, record: Record | None) -> None:
        """Hand over a record, in place of the oldest one when the sink cannot follow."""
        while True:
            try:
                self._queue.put_nowait(record)
            except queue.Full:
                try:
                    self._queue.get_nowait()
                    self.dropped += 1
                except queue.Empty:
                    pass
            else:
                return

    def finish(self) -> None:
        """Let the sink write what is queued, then close it; `join` waits for that."""
        self.put(None)

    def join(self, until: float) -> bool:
        """Wait until the sink is closed or `until` (time.monotonic()) has come; False when it is busy still."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            record = self._queue.get()
            try:
                if record is None:
                    self._sink.close()
                    return
                self._sink.write(record)
            except Exception as error:  # noqa: BLE001 - whatever a sink raises, the job goes on
                self._complain(error)
                if record is None:
                    return

    def _complain(self, error: Exception) -> None:
        if self._complained:
            return
        self._complained = True
        log.warning("ncclguard: %s", told("the monitoring sink {name} failed ({kind}: {error}): the job goes on, later errors of this sink are not logged", "log", name=self.name, kind=type(error).__name__, error=error))  # fmt: skip
