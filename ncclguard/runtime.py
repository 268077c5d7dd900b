"""One runtime per process and life of the default process group: the monitor, the guards, and a clean departure.

It starts by itself after `init_process_group` (so that a rank that is late for the very first guarded operation can still be
asked where it is), or with the first guarded call when ncclguard was imported later than that.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from ncclguard import _torch, _torch_stores
from ncclguard.agreement import incidents
from ncclguard.agreement.decision import Action, Phase, Report
from ncclguard.agreement.incidents import summarise
from ncclguard.agreement.inquiry import Patience
from ncclguard.agreement.liveness import Liveness
from ncclguard.agreement.monitor import Monitor, MonitorSettings
from ncclguard.agreement.revocation import Revocation
from ncclguard.agreement.seat import Seat
from ncclguard.agreement.store import AgreementStore
from ncclguard.assembly import Assembly
from ncclguard.config import GuardConfig, current_config
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.faults.injection import from_environment
from ncclguard.guard import Guard
from ncclguard.incident.dumps import offer
from ncclguard.incident.history import snapshot
from ncclguard.incident.model import Incident
from ncclguard.incident.report.writer import Writer
from ncclguard.incident.stacks import (
    call_site_of,
    describe_exception,
    main_thread_stack,
    other_threads,
    traceback_frames,
)
from ncclguard.metrics import exchange
from ncclguard.outcome import Cause
from ncclguard.termination import Termination, dead_threads, watch_multiprocessing, watch_threads, watch_uncaught
from ncclguard.transport.base import Builder
from ncclguard.transport.gloo import GlooBuilder
from ncclguard.transport.nccl import NcclBuilder
from ncclguard.watch.seat import make_seat

if TYPE_CHECKING:
    from ncclguard.watch.watcher import Watcher

log = logging.getLogger("ncclguard")

#: Seconds that leaving may take: the announcement, and the end of the monitor.
LEAVE_WITHIN = 1.0
#: Seconds that a report in the making may hold the exit up.
REPORT_WITHIN = 2.0
#: Seconds in which the others notice that rank 0 was sent SIGTERM, and ask for its last answer.
LINGER_AFTER = 0.5
#: What a call gets that comes too late, from another thread.
LEFT = "this process has left the job: its default process group is being destroyed, or its program has ended"
#: Seconds of the transport's own limit where it cannot be set for each operation (torch 2.6): beyond any guard deadline.
BACKSTOP = 7 * 24 * 3600.0


class Runtime:
    """The monitor and the guards of this process; made by `current`, ended by `leave`."""

    def __init__(self, config: GuardConfig) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._config = config
        self._base = _torch_stores.default_store()
        self._connection = _torch_stores.clone_store(self._base)
        self._liveness = Liveness(self.rank)
        self._writer = Writer(config.report_dir, config.report_panel, self.rank, self.world_size)
        settings = MonitorSettings(
            poll_idle=config.poll_idle,
            poll_active=max(config.poll_active, self.world_size / 2000),  # at most 40,000 looks a second in all
            patience=_patience,
            describe=self._describe,
            summarise=summarise,
            publish=self._publish,
            publish_alone=self._publish_alone,
            offer_stacks=lambda thread: offer(config.stack_signal, thread),
        )
        self.monitor = Monitor(AgreementStore(self._connection), self.rank, self.world_size, self._liveness, settings)
        self.monitor.make_seat = make_seat
        self.watcher: Watcher | None = None  # of watch(), when the program called it
        self._guards: dict[str, tuple[dist.ProcessGroup, Guard]] = {}
        self._lock = threading.Lock()
        self._left = False
        self.termination = Termination(self._terminate)
        self.monitor.start()
        if config.announce_sigterm:
            self.termination.install()

    def guard(
        self, group: dist.ProcessGroup, device_type: str, lane: str = "", ranks: tuple[int, ...] | None = None
    ) -> Guard:
        """Return the guard of a group for one kind of device, made with the first operation on it.

        A `lane` is a guard beside that one, with a sequence of its own, for all of the group or for some `ranks` (global) of it.
        """
        name = f"{_torch.group_name(group)}:{device_type}{lane}"
        entry = self._guards.get(name)
        if entry is not None and entry[0] is group:
            return entry[1]
        with self._lock:
            if self._left:
                raise GuardError(LEFT)
            entry = self._guards.get(name)
            if entry is None or entry[0] is not group:
                entry = self._guards[name] = (group, self._make(name, ranks or _torch.group_ranks(group), device_type))
            return entry[1]

    def _make(self, name: str, ranks: tuple[int, ...], device_type: str) -> Guard:
        members = hashlib.blake2b(repr(ranks).encode(), digest_size=4).hexdigest()
        seat = self.monitor.seat(f"{name}:{members}", ranks)
        config = current_config()  # not the one of the start: configure() may have been called since
        exchange.start(seat, config)
        assembly = Assembly(
            seat,
            self.monitor,
            builder(device_type),
            lambda: _torch_stores.clone_store(self._base),
            {"rounds": config.rounds, "closing_nbytes": config.closing_nbytes, **exchange.terms(config)},
            config.build_slice,
            config.pieces_in_flight,
            BACKSTOP,
        )
        return Guard(seat, assembly, self.monitor.wake, config)

    def leave(self, cause: Cause, text: str) -> None:
        """Say goodbye, end the monitor and release the communicators, each within a bound; raises nothing."""
        with self._lock:
            if self._left:
                return
            self._left = True
            self.termination.uninstall()
            guards, self._guards = [guard for _, guard in self._guards.values()], {}
        try:
            if self.watcher is not None:
                self.watcher.close()
            self.monitor.depart(cause, text, LEAVE_WITHIN)
            if self.rank == 0:
                self._linger()
            if not self.monitor.stop(LEAVE_WITHIN):
                _torch_stores.disconnect(self._connection)  # a store call that does not answer holds the thread: cut it
                self.monitor.stop(LEAVE_WITHIN)
            for guard in guards:
                guard.close()
            exchange.forget()
            self._liveness.close()
            self._writer.wait(REPORT_WITHIN)
        except Exception:
            log.exception("ncclguard: leaving failed; the process goes on to its end")

    def announce(self, cause: Cause, text: str, stack: tuple[str, ...] = (), told: bool = False) -> None:
        """Tell the others at once that this process is about to end; `told` when others made it."""
        self.monitor.depart(cause, text, LEAVE_WITHIN, {**self._identity(), "stack": list(stack)}, told=told)

    def _terminate(self) -> None:
        """SIGTERM: finish the verdict in progress, which may be about the rank that this is a consequence of; then go."""
        self.monitor.settle(LEAVE_WITHIN)
        self.announce(Cause.LOST, "was sent SIGTERM", main_thread_stack(), told=True)
        if self.rank == 0:  # usually hosts the store, which the others need for their verdict
            self.monitor.settle(LEAVE_WITHIN, LINGER_AFTER)
        self._writer.wait(REPORT_WITHIN)

    def _linger(self) -> None:
        """Rank 0 usually hosts the store: give the others a moment to finish with it."""
        until = time.monotonic() + self._config.exit_linger
        while time.monotonic() < until and not self.monitor.unavailable:
            if self.monitor.goodbyes() >= self.world_size:
                return
            time.sleep(0.02)

    def _describe(self, seat: Seat, report: Report) -> Report:
        call = seat.call
        details: dict[str, object] = {
            **self._identity(),
            "stack": list(main_thread_stack()),
            "call_site": "" if call is None else call_site_of(call.thread),
            "last": seat.last_text,
            "call": "" if call is None else call.text,
            "dead_threads": dead_threads(),
        }
        if report.phase is Phase.NONE:  # not in it: this may be the rank that is looked for
            details["threads"] = other_threads()
        details |= report.details
        return replace(report, elsewhere=self.monitor.waiting_elsewhere(seat.key), details=details)

    def _identity(self) -> dict[str, object]:
        return {"host": self._liveness.identity.host, "pid": os.getpid(), "history": self._history()}

    def _history(self) -> dict[str, object]:
        """The last operations of this rank, in all groups."""
        past = {}
        open_calls: list[tuple[str, int, str, float]] = []
        for seat in self.monitor.seats():
            with seat.condition:
                past[seat.key] = list(seat.past)
            open_calls += seat.open_calls()
        return snapshot(past, open_calls, time.monotonic())

    # ------------------------------------------------------------------ the report of an incident

    def _publish(self, revocation: Revocation) -> None:
        """Write the report if it is for this rank to do, by the agreed incident."""
        verdict = revocation.verdict
        if verdict is None or not (verdict.action is Action.FAIL or verdict.culprits):
            return  # committed, or tried again on all ranks
        incident = incidents.from_json(verdict.incident)
        if incident is None or incidents.writer(incident) != self.rank:
            return
        said = json.loads(revocation.histories() or "{}")
        self._writer.submit(incident, self.monitor.nonce, {int(rank): history for rank, history in said.items()})

    def _publish_alone(self, incident: Incident) -> None:
        """No agreement: one rank of each host reports what it sees."""
        if self.monitor.first_here():
            self._writer.submit(incident, self.monitor.nonce, {self.rank: self._history()})


def _patience(seat: Seat) -> Patience:
    config = exchange.config_of_seat(seat.key)
    return Patience(config.warn_after, config.stuck_timeout)


_runtime: Runtime | None = None
#: The default group that this process has said goodbye to: a thread that comes late must not start the runtime again.
_left: weakref.ref[object] | None = None
_exiting = False
_forked = False
_starting = threading.Lock()


def current() -> Runtime:
    """Return the runtime of the default process group that is initialised now, starting it if need be.

    Raises GuardError when the store cannot be reached.
    """
    global _runtime
    runtime = _runtime
    if runtime is not None:
        return runtime
    if _forked:
        raise GuardError("this process was forked from a rank: the guard works in the rank itself only")
    with _starting:
        if _runtime is None:
            if _exiting or (_left is not None and _left() is dist.group.WORLD):
                raise GuardError(LEFT)
            from_environment()
            try:
                _runtime = Runtime(current_config())
            except (RuntimeError, ValueError, OSError) as error:
                raise GuardError(
                    f"the store of the default process group cannot be reached: {error}. "
                    "Check that rank 0 (or the launcher's agent) is alive and that this host can connect to it."
                ) from error
            watch_multiprocessing(_announce, _at_exit)
        return _runtime


def builder(device_type: str) -> Builder:
    """The builder of communicators for tensors of this kind. Raises GuardConfigError for a device without one."""
    if device_type == "cpu":
        return GlooBuilder()
    if device_type == "cuda":
        return NcclBuilder()
    raise GuardConfigError(
        f"tensors on {device_type!r} cannot be guarded: ncclguard has gloo for CPU and NCCL for CUDA tensors. "
        "Move the tensor to one of these."
    )


# ---------------------------------------------------------------------- start and end with the process group


def _after_init() -> None:
    if current_config().autostart and dist.get_world_size() > 1:
        current()


def _before_destroy() -> None:
    _end(Cause.EXITED, "called destroy_process_group()")


def _end(cause: Cause, text: str) -> None:
    global _runtime, _left
    with _starting:
        runtime, _runtime = _runtime, None
        _left = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
    if runtime is not None:
        runtime.leave(cause, text)
    for callback in _on_end:
        callback()


_on_end: list[Callable[[], None]] = []


def on_end(callback: Callable[[], None]) -> None:
    """Call `callback()` after this process has left the job: the default group is about to go, or the interpreter to exit."""
    _on_end.append(callback)


_failure = ""


def _at_exit() -> None:
    global _exiting
    _exiting = True
    if _failure:
        _end(Cause.FAILED, _failure)
    else:
        _end(Cause.EXITED, "ended its program")


def _announce(error: BaseException) -> None:
    """An uncaught exception is about to end the program."""
    global _failure
    _failure = describe_exception(error)
    runtime = _runtime
    if runtime is not None:
        if runtime.watcher is not None:
            _failure = runtime.watcher.uncaught(error, _failure)
        runtime.announce(Cause.FAILED, _failure, traceback_frames(error))


def _before_fork() -> None:
    if _runtime is not None:
        _runtime.termination.before_fork()


def _after_fork() -> None:
    if _runtime is not None:
        _runtime.termination.after_fork()


def _forget_in_child() -> None:
    """A child of a rank has neither the threads nor the right to speak for it: the guard is off there.

    A child of a process that was in no job may become a rank itself: a notebook's launcher forks all of them.
    """
    global _runtime, _starting, _forked
    if _runtime is not None:
        _runtime.termination.forget_in_child()
    _forked = _forked or _runtime is not None or dist.is_initialized()
    _runtime = None
    _starting = threading.Lock()


_installed = False


def install() -> None:
    """Hook into `init_process_group`, interpreter exit, uncaught exceptions and fork; once."""
    global _installed
    if _installed:
        return
    _installed = True
    from ncclguard.process_group.backend import register

    register()
    _torch.on_init(_after_init)
    _torch.on_destroy(_before_destroy)
    watch_uncaught(_announce)
    watch_threads()
    atexit.register(_at_exit)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_in_child)
    if dist.is_available() and dist.is_initialized():
        _try(_after_init)


def _try(function: Callable[[], None]) -> None:
    try:
        function()
    except (GuardError, RuntimeError) as error:
        log.warning("ncclguard could not start with the process group that exists already: %s", error)
