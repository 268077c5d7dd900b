"""One runtime per process and life of the default process group: the monitor, the guards, and a clean departure.

It starts by itself after `init_process_group` (so that a rank that is late for the very first guarded operation can still be
asked where it is), or with the first guarded call when ncclguard was imported later than that.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import torch.distributed as dist

from ncclguard import _torch
from ncclguard.agreement.decision import Report
from ncclguard.agreement.incidents import summarise
from ncclguard.agreement.liveness import Liveness
from ncclguard.agreement.monitor import Monitor, MonitorSettings
from ncclguard.agreement.seat import Seat
from ncclguard.agreement.store import AgreementStore
from ncclguard.assembly import Assembly
from ncclguard.config import GuardConfig, current_config
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.faults.injection import from_environment
from ncclguard.guard import Guard
from ncclguard.incident.stacks import call_site_of, describe_exception, main_thread_stack
from ncclguard.outcome import Cause
from ncclguard.transport.base import Builder

log = logging.getLogger("ncclguard")

#: Seconds that leaving may take: the announcement, and the end of the monitor.
LEAVE_WITHIN = 1.0
#: Seconds the transport's own limit lies beyond any guard deadline; it is a backstop, see docs/protocol.md.
BACKSTOP = 7 * 24 * 3600.0


class Runtime:
    """The monitor and the guards of this process; made by `current`, ended by `leave`."""

    def __init__(self, config: GuardConfig) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._config = config
        self._base = _torch.default_store()
        self._connection = _torch.clone_store(self._base)
        self._liveness = Liveness(self.rank)
        settings = MonitorSettings(
            poll_idle=config.poll_idle,
            poll_active=max(config.poll_active, self.world_size / 2000),  # at most 40,000 looks a second in all
            warn_after=config.warn_after,
            stuck_timeout=config.stuck_timeout,
            describe=self._describe,
            summarise=summarise,
        )
        self.monitor = Monitor(AgreementStore(self._connection), self.rank, self.world_size, self._liveness, settings)
        self._guards: dict[str, tuple[dist.ProcessGroup, Guard]] = {}
        self._lock = threading.Lock()
        self._left = False
        self.monitor.start()

    def guard(self, group: dist.ProcessGroup, device_type: str) -> Guard:
        """Return the guard of a group for one kind of device, made with the first operation on it."""
        name = f"{_torch.group_name(group)}:{device_type}"
        entry = self._guards.get(name)
        if entry is not None and entry[0] is group:
            return entry[1]
        with self._lock:
            entry = self._guards.get(name)
            if entry is None or entry[0] is not group:
                entry = self._guards[name] = (group, self._make(group, device_type))
            return entry[1]

    def _make(self, group: dist.ProcessGroup, device_type: str) -> Guard:
        ranks = _torch.group_ranks(group)
        members = hashlib.blake2b(repr(ranks).encode(), digest_size=4).hexdigest()
        seat = self.monitor.seat(f"{_torch.group_name(group)}:{device_type}:{members}", ranks)
        config = current_config()  # not the one of the start: configure() may have been called since
        assembly = Assembly(
            seat,
            self.monitor,
            builder(device_type),
            lambda: _torch.clone_store(self._base),
            {"rounds": config.rounds, "closing_nbytes": config.closing_nbytes},
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
            guards, self._guards = [guard for _, guard in self._guards.values()], {}
        try:
            self.monitor.depart(cause, text, LEAVE_WITHIN)
            if self.rank == 0:
                self._linger()
            if not self.monitor.stop(LEAVE_WITHIN):
                _torch.disconnect(self._connection)  # a store call that does not answer holds the thread: cut it
                self.monitor.stop(LEAVE_WITHIN)
            for guard in guards:
                guard.close()
            self._liveness.close()
        except Exception:
            log.exception("ncclguard: leaving failed; the process goes on to its end")

    def announce(self, cause: Cause, text: str) -> None:
        """Tell the others at once that this process is about to end."""
        self.monitor.depart(cause, text, LEAVE_WITHIN)

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
            "host": self._liveness.identity.host,
            "pid": os.getpid(),
            "stack": list(main_thread_stack()),
            "call_site": "" if call is None else call_site_of(call.thread),
            "last": seat.last_text,
            "call": "" if call is None else call.text,
        }
        return replace(report, elsewhere=self.monitor.waiting_elsewhere(seat.key), details=details)


_runtime: Runtime | None = None
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
            from_environment()
            try:
                _runtime = Runtime(current_config())
            except (RuntimeError, ValueError, OSError) as error:
                raise GuardError(
                    f"the store of the default process group cannot be reached: {error}. "
                    "Check that rank 0 (or the launcher's agent) is alive and that this host can connect to it."
                ) from error
        return _runtime


def builder(device_type: str) -> Builder:
    """The builder of communicators for tensors of this kind. Raises GuardConfigError for a device without one."""
    if device_type == "cpu":
        from ncclguard.transport.gloo import GlooBuilder

        return GlooBuilder()
    if device_type == "cuda":
        from ncclguard.transport.nccl import NcclBuilder

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
    global _runtime
    with _starting:
        runtime, _runtime = _runtime, None
    if runtime is not None:
        runtime.leave(cause, text)


_failure = ""


def _at_exit() -> None:
    if _failure:
        _end(Cause.FAILED, _failure)
    else:
        _end(Cause.EXITED, "ended its program")


def _hook_exceptions() -> None:
    """An uncaught exception is announced at once, before other threads and atexit handlers keep the process busy."""
    previous = sys.excepthook

    def announce(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failure
        _failure = describe_exception(error)
        runtime = _runtime
        if runtime is not None:
            runtime.announce(Cause.FAILED, _failure)
        previous(kind, error, trace)

    sys.excepthook = announce


def _forget_in_child() -> None:
    """A forked child has neither the threads nor the right to speak for its parent: the guard is off there."""
    global _runtime, _starting, _forked
    _runtime = None
    _starting = threading.Lock()
    _forked = True


_installed = False


def install() -> None:
    """Hook into `init_process_group`, interpreter exit, uncaught exceptions and fork; once."""
    global _installed
    if _installed:
        return
    _installed = True
    _torch.on_init(_after_init)
    _torch.on_destroy(_before_destroy)
    _hook_exceptions()
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_forget_in_child)
    if dist.is_available() and dist.is_initialized():
        _try(_after_init)


def _try(function: Callable[[], None]) -> None:
    try:
        function()
    except (GuardError, RuntimeError) as error:
        log.warning("ncclguard could not start with the process group that exists already: %s", error)
