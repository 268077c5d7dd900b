"""The protocol of sinks, and the thread that keeps a slow or failing one away from the job."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ncclguard.metrics.records import Record

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
    """Any function of a record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def write(self, record: Record) -> None:
        self._function(record)

    def close(self) -> None:
        """A function has nothing to close."""


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
