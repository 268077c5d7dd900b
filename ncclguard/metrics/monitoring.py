"""`setup_nccl_monitoring`: count guarded operations, hand records to sinks, and answer `ncclguard top` and `set`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ncclguard import events, lifecycle
from ncclguard.config import GuardConfig, current_config, seconds
from ncclguard.errors import GuardConfigError
from ncclguard.metrics import records
from ncclguard.metrics.control import ControlSocket, open_control
from ncclguard.metrics.exchange import exchanges, proposals
from ncclguard.metrics.records import Record, Snapshot
from ncclguard.metrics.registry import RecordingListener, Watched, add_watched, awaited_in_watched
from ncclguard.metrics.settings import SETTINGS
from ncclguard.metrics.sinks import Sink, SinkLike, SinkThread, make_sinks
from ncclguard_explain.language import told, tr

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ncclguard")

#: Seconds between two snapshots.
INTERVAL = 30.0
#: Seconds between two checks of the open calls, so that a hang shows soon whatever the interval is.
TICK = 1.0
#: Seconds that a command's question who is awaited may take.
AWAITED_WITHIN = 1.0
#: Seconds that closing waits for slow sinks, all together.
CLOSE_WITHIN = 5.0


class Monitoring:
    """The running monitoring, returned by `setup_nccl_monitoring`; as a context manager it closes itself."""

    def __init__(self, sinks: Sequence[Sink], interval: float, job: str, serve: bool) -> None:
        self.job = job
        self._interval = interval
        self._serve = serve
        self._sinks = [SinkThread(sink) for sink in sinks]
        self._listener = RecordingListener(job, self._emit)
        self._control: ControlSocket | None = None
        self._pid = os.getpid()
        self._closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ncclguard-monitoring", daemon=True)

    def start(self) -> None:
        """Begin to count; called by `setup_nccl_monitoring`."""
        events.listen(self._listener)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """Return all counts so far, and the calls that are open now.

        >>> import ncclguard as ng
        >>> with ng.setup_nccl_monitoring(print, serve=False) as monitoring:
        ...     monitoring.snapshot().hang
        False
        Snapshot(...)
        """
        return self._listener.snapshot({sink.name: sink.dropped for sink in self._sinks if sink.dropped})

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Stop counting, hand a last snapshot to the sinks and wait up to 5 s for them; a second call does nothing.

        Raises nothing.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        lifecycle.forget(self.close)
        self.stop_listening()
        until = time.monotonic() + CLOSE_WITHIN
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_WITHIN)
        if self._control is not None:
            self._control.close()
        try:
            self._emit(self.snapshot())
        except Exception:
            log.exception("ncclguard: %s", told("the last snapshot could not be made", "log"))
        for sink in self._sinks:
            sink.finish()
        slow = [sink.name for sink in self._sinks if not sink.join(until)]
        if slow:
            log.warning("ncclguard: %s", told("the monitoring sinks {some} were not done within {seconds:g} s of closing and are left behind; records may "
                "be missing there", "log", some=", ".join(slow), seconds=CLOSE_WITHIN))  # fmt: skip

    def stop_listening(self) -> None:
        """Stop counting."""
        events.leave(self._listener)

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
                hanging = any(call.late for call in self._listener.open_operations())
                if hanging != hang or time.monotonic() >= due:
                    hang = hanging
                    due = time.monotonic() + self._interval
                    self._emit(self.snapshot())
            except Exception:
                if not complained:
                    log.exception(
                        "ncclguard: %s",
                        told("monitoring met an unexpected error and goes on; later ones are not logged", "log"),
                    )
                complained = True
            if self._stop.wait(max(0.01, min(TICK, due - time.monotonic()))):
                return

    def _emit(self, record: Record) -> None:
        for sink in self._sinks:
            sink.put(record)

    def _open_control(self) -> None:
        """Open the control socket once the rank is known: before that, all ranks would want the same address."""
        if self._serve and self._control is None and records.initialised():
            self._serve = False  # it is tried once
            self._control = open_control(self.job, records.rank(), lambda question: answer(question, self.snapshot))


_current: Monitoring | None = None
_lock = threading.Lock()


def setup_nccl_monitoring(
    *sinks: SinkLike, interval: float | timedelta = INTERVAL, job: str | None = None, serve: bool = True
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
        raise TypeError(told("interval must be seconds or a timedelta, not None: give for example 30"))
    name = records.job_name(job)
    made = make_sinks(sinks or ("log",), records.rank())
    with _lock:
        previous, _current = _current, None
        if previous is not None:
            previous.close()
        monitoring = _current = Monitoring(made, period, name, serve)
        # After the sinks were made, so that this runs before the exit handlers of their packages.
        lifecycle.before_end(monitoring.close)
        monitoring.start()
    return monitoring


def show_watched(watched: Watched) -> Callable[[], None]:
    """Show the watched collectives and who is slow in `ncclguard top` and to sinks; return a function that ends that.

    Where the program has not set monitoring up, this process answers all the same, and no sink hears of it.
    """
    global _current
    own: Monitoring | None = None
    hide = add_watched(watched)
    with _lock:
        if _current is None or _current.closed:
            own = _current = Monitoring((), INTERVAL, records.job_name(), serve=True)
            lifecycle.before_end(own.close)
            own.start()

    def end() -> None:
        hide()
        if own is not None:
            own.close()

    return end


# ---------------------------------------------------------------------- what commands ask


def answer(question: dict[str, Any], snapshot: Callable[[], Snapshot]) -> dict[str, Any]:
    """Return the rank's answer to a question such as {"command": "status"}.

    Others are {"command": "job", "known": [key of a group]} and {"command": "set", "values": {name: number or null}}.
    """
    command = question.get("command")
    if command == "status":
        config = current_config()
        number, proposed = proposals.newest()
        return {
            "snapshot": snapshot().to_dict(),
            "statistics_every": config.exchange_every,
            "warn_after": config.warn_after,
            "proposal": number,
            "proposed": dict(proposed),
            "adopted": adopted(),
        }
    if command == "job":
        return _job(question.get("known"), snapshot())
    if command == "set":
        return _propose(question.get("values"))
    return {"error": f"the command {command!r} is not known; this rank knows status, job and set"}


def _job(known: object, snapshot: Snapshot) -> dict[str, Any]:
    """Return what this rank knows of its groups' ranks: each group's last exchange, and which ranks are awaited.

    Of groups that are `known` already no table is sent: it is the same on all ranks, and large.
    """
    left_out = known if isinstance(known, list) else []
    tables = {table.through.rpartition("/")[0]: table for table in snapshot.stragglers}
    monitored = next((one.awaited for one in exchanges() if one.awaited is not None), None)
    awaited = [] if monitored is None else monitored(AWAITED_WITHIN)
    config = current_config()
    return {
        "rank": snapshot.rank,
        "world_size": snapshot.world_size,
        "statistics_every": config.exchange_every,
        "warn_after": config.warn_after,
        "time": snapshot.time,
        "open": [asdict(call) for call in snapshot.open],
        "watched": dict(snapshot.watched),
        "tables": {
            key: {**asdict(replace(table, rows=())), "rows": [astuple(row) for row in table.rows]}
            for key, table in tables.items()
            if key not in left_out
        },
        "awaited": None if awaited is None else [*awaited, *awaited_in_watched()],
        "guarded": bool(snapshot.series),
    }


def adopted() -> dict[str, tuple[int, str]]:
    """Return for each group its newest adopted proposal and the operation after which that came into force."""
    return {exchange.group: (exchange.settings.proposal, exchange.adopted_after) for exchange in exchanges()}


def _propose(values: object) -> dict[str, Any]:
    config = current_config()
    if not config.exchange_every:
        return {
            "error": tr(
                "this job exchanges no statistics, so its ranks could not agree on a change; start it without "
                "NCCLGUARD_STATISTICS_EVERY=0 and NCCLGUARD_ROUNDS=false, on all ranks"
            )
        }
    if not isinstance(values, dict) or not values or not set(values) <= set(SETTINGS):
        known = ", ".join(SETTINGS)
        return {
            "error": tr("{given} cannot be set in a running job; these can: {some}", given=repr(values), some=known)
        }
    try:
        checked = GuardConfig(**{**config.model_dump(), **dict(proposals.newest()[1]), **values})
    except GuardConfigError as error:
        return {"error": str(error)}
    return {"proposal": proposals.make({name: getattr(checked, name) for name in values})}


def _after_fork() -> None:
    global _current, _lock
    if _current is not None:  # a forked child counts nothing
        _current.stop_listening()
    _current = None
    _lock = threading.Lock()


lifecycle.in_child(_after_fork)
