"""Sinks, to which monitoring sends its records: named ("log", "prometheus:9400"), or a function, or an object."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ncclguard.metrics.records import Record
from ncclguard.metrics.sinks.dashboards import PrometheusSink, TensorBoardSink, WandbSink
from ncclguard.metrics.sinks.text import JsonlSink, LogSink

__all__ = [
    "JsonlSink",
    "LogSink",
    "PrometheusSink",
    "Sink",
    "SinkLike",
    "SinkThread",
    "TensorBoardSink",
    "WandbSink",
    "make_sinks",
]

log = logging.getLogger("ncclguard")

#: Records that wait for a slow sink; the oldest is dropped for a new one.
QUEUE_LENGTH = 64


class Sink(Protocol):
    """Takes records, in a thread of its own, one at a time; what it raises is logged once and the job goes on."""

    def write(self, record: Record) -> None:
        """Take a `Snapshot`, `Failure` or `Change`."""

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
        """Nothing to do: a function has nothing to close."""


SinkLike = str | Sink | Callable[[Record], object]
#: Name -> what has to be installed, "" for nothing.
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
    for one in wanted:
        if not isinstance(one, str):
            made.append(_given(one))
            continue
        name, _, detail = one.partition(":")
        _check(one, name, detail)
        try:
            made.append(_named(name, detail, rank))
        except Exception as error:  # noqa: BLE001 - a missing package, a port that is taken, a folder that cannot be written, ...
            package = PACKAGES[name] if isinstance(error, ImportError) else ""
            advice = f"install it with: pip install {package}" if package else "the job goes on without this sink"
            log.warning("ncclguard: monitoring goes without %r (%s: %s); %s", one, type(error).__name__, error, advice)
    return made


def _given(one: Any) -> Sink:
    if callable(getattr(one, "write", None)) and callable(getattr(one, "close", None)):
        sink: Sink = one
        return sink
    if callable(one):
        return CallableSink(one)
    raise TypeError(
        f"a sink must be a name, a function of a record or an object with write(record) and close(), not {type(one).__name__}"
    )


def _check(text: str, name: str, detail: str) -> None:
    if name not in PACKAGES:
        raise ValueError(f"there is no sink {text!r}: use one of {', '.join(PACKAGES)}, an object or a function")
    if name == "jsonl" and not detail:
        raise ValueError("the sink 'jsonl' needs a path: write 'jsonl:guard-{rank}.jsonl'")
    if name == "prometheus" and detail and not (detail.isdecimal() and int(detail) < 65536):
        raise ValueError(f"the sink {text!r} needs a port, 0 to 65535: write for example 'prometheus:9400'")


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
        log.warning(
            "ncclguard: the monitoring sink %s failed (%s: %s): the job goes on, later errors of this sink are not logged",
            self.name, type(error).__name__, error,
        )  # fmt: skip
