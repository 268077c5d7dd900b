"""`setup_nccl_monitoring`: counts guarded operations from now on and hands records to the sinks."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ncclguard.config import seconds
from ncclguard.metrics import hook, identity
from ncclguard.metrics.observer import RecordingObserver, open_operations
from ncclguard.metrics.records import Record, Snapshot
from ncclguard.metrics.sinks.base import Sink, SinkThread
from ncclguard.metrics.sinks.named import SinkLike, make_sinks

if TYPE_CHECKING:
    from typing_extensions import Self

    from ncclguard.metrics.control import ControlSocket

log = logging.getLogger("ncclguard")

#: Seconds between two looks at what is open, so that a hang shows soon whatever the interval is.
TICK = 1.0
#: Seconds that closing waits for slow sinks, all together.
CLOSE_WITHIN = 5.0


class Monitoring:
    """What `setup_nccl_monitoring` returns; also a context manager that closes itself at its end."""

    def __init__(self, sinks: Sequence[Sink], interval: float, job: str, serve: bool) -> None:
        self.job = job
        self._interval = interval
        self._serve = serve
        self._sinks = [SinkThread(sink) for sink in sinks]
        self._observer = RecordingObserver(job, self._emit)
        self._control: ControlSocket | None = None
        self._pid = os.getpid()
        self._closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclguard-monitoring", daemon=True)

    def start(self) -> None:
        """Begin to count; called by `setup_nccl_monitoring`."""
        hook.observer = self._observer
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """Everything counted so far, and the calls that are open now.

        >>> import ncclguard as ng
        >>> with ng.setup_nccl_monitoring(print, serve=False) as monitoring:
        ...     monitoring.snapshot().hang
        False
        Snapshot(...)
        """
        return self._observer.snapshot({sink.name: sink.dropped for sink in self._sinks if sink.dropped})

    def close(self) -> None:
        """Stop counting, hand a last snapshot to the sinks and wait up to 5 s for them;
        again is a no-op. Raises nothing.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        if hook.observer is self._observer:
            hook.observer = None
        until = time.monotonic() + CLOSE_WITHIN
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_WITHIN)
        if self._control is not None:
            self._control.close()
        try:
            self._emit(self.snapshot())
        except Exception:
            log.exception("ncclguard: the last snapshot could not be made")
        for sink in self._sinks:
            sink.finish()
        slow = [sink.name for sink in self._sinks if not sink.join(until)]
        if slow:
            log.warning(
                "ncclguard: the monitoring sinks %s were not done within %g s of closing and are left behind; records may "
                "be missing there", ", ".join(slow), CLOSE_WITHIN,
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        due, hang, complained = time.monotonic() + self._interval, False, False
        while True:
            try:
                self._open_control()
                hanging = any(call.late for call in open_operations())
                if hanging != hang or time.monotonic() >= due:
                    hang = hanging
                    due = time.monotonic() + self._interval
                    self._emit(self.snapshot())
            except Exception:
                if not complained:
                    log.exception(
                        "ncclguard: monitoring met an unexpected error and goes on; later ones are not logged"
                    )
                complained = True
            if self._stop.wait(max(0.01, min(TICK, due - time.monotonic()))):
                return

    def _emit(self, record: Record) -> None:
        for sink in self._sinks:
            sink.put(record)

    def _open_control(self) -> None:
        """Once the rank is known: before that all ranks would want the same address."""
        if self._serve and self._control is None and identity.initialised():
            from ncclguard.metrics.control import open_control

            self._serve = False  # one try
            self._control = open_control(self.job, identity.rank(), self.snapshot)


_current: Monitoring | None = None
_lock = threading.Lock()


def setup_nccl_monitoring(
    *sinks: SinkLike, interval: float | timedelta = 30.0, job: str | None = None, serve: bool = True
) -> Monitoring:
    """Count every guarded operation of this process from now on, and hand records to the sinks.

    `sinks`: "log", "jsonl:PATH", "prometheus" or "prometheus:PORT", "wandb", "tensorboard:FOLDER" (`{rank}` in a path
    stands for the rank), an object with `write(record)` and `close()`, or any function of a record; none means "log".
    Each has a thread of its own; one that fails or is slow is logged once and never holds the job up. `interval`:
    seconds or timedelta between two snapshots; failures are handed over at once. `job`: the name that `ncclguard top`
    and `ncclguard set` find it by; `serve=False` keeps them out. May be called on some ranks only; again replaces what
    was set up before. Raises TypeError or ValueError for a wrong call; a sink whose package is missing is logged and
    left out.

    >>> import ncclguard as ng
    >>> monitoring = ng.setup_nccl_monitoring("log", interval=60, serve=False)
    >>> monitoring.snapshot().series
    ()
    >>> monitoring.close()
    """
    global _current
    period = seconds(interval, "interval")
    if period is None:
        raise TypeError("interval must be seconds or a timedelta, not None: give for example 30")
    name = identity.job_name(job)
    made = make_sinks(sinks or ("log",), identity.rank())
    with _lock:
        previous, _current = _current, None
        if previous is not None:
            previous.close()
        monitoring = _current = Monitoring(made, period, name, serve)
        # After the sinks were made, so that what their packages do at exit is done after this.
        atexit.register(monitoring.close)
        monitoring.start()
    return monitoring


def _after_fork() -> None:
    global _current, _lock
    _current = None
    _lock = threading.Lock()
    hook.after_fork()


os.register_at_fork(after_in_child=_after_fork)
