"""`nccl_timeout_handler`: a block with a time limit, kept by a signal where Python runs, by a watchdog elsewhere."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from contextvars import ContextVar
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from ncclguard import config, lifecycle, torch_compat
from ncclguard.deadlines.deadline import Deadline
from ncclguard.deadlines.stopping import Board, Notice, Stop, asleep, backends, describe, in_c10d_call, in_flight
from ncclguard.deadlines.timers import TICK, Alarm, Watchdog
from ncclguard.errors import CollectiveFailed, CollectiveTimeout
from ncclguard.groups import check_group
from ncclguard.incident.model import Incident
from ncclguard.outcome import of_incident
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import Message, joined, say, told, tr

logger = logging.getLogger(__name__)

GRACE: Final = 0.05  # seconds after the deadline in which the main thread can show that it runs Python code
RECHECK: Final = 0.1
LOOKS: Final = 10  # checks of a native call that may be a collective or not: a matmul, a save, a bare Work.wait()
ASLEEP: Final = 6  # checks that must find its thread asleep, as it is in a wait; each tick of the alarm wakes it

FAILED_CALL: Final = tr("a call inside it failed by itself, or because a peer gave up")
RECREATE: Final = tr(
    "Destroy the group and create it again on all its ranks, or use safe_all_reduce and the other safe_* calls, which keep "
    "the process group and the tensor."
)


def ends_soon(text: str) -> Message:
    """Add to a text that this process cannot be kept."""
    return tr(
        "{text} torch's watchdog has seen an error on this rank, so this process cannot be kept: unless "
        "TORCH_NCCL_ASYNC_ERROR_HANDLING is 0 or 2 torch ends it (after up to a minute, nccl2 after 15 s), and until then "
        "destroy_process_group() may not return. Save what has to be saved, without collectives, and restart the job.",
        text=text,
    )


_current: ContextVar[TimeLimit | None] = ContextVar("ncclguard_time_limit", default=None)
_engine_depth: dict[int, int] = {}  # ident of a thread -> how many guarded operations it is inside of


def innermost() -> TimeLimit | None:
    """Return the block that the calling code is in, if any; its deadline is the soonest of all that enclose it."""
    limit = _current.get()
    while limit is not None and not limit.open:
        limit = limit.parent
    return limit


def enter_engine() -> None:
    """Begin a guarded operation in this thread."""
    thread = threading.get_ident()
    _engine_depth[thread] = _engine_depth.get(thread, 0) + 1


def leave_engine() -> None:
    """End a guarded operation; blocks whose limit has passed by now do not interrupt Python code from here on."""
    limit = innermost()
    if limit is not None:
        now = time.monotonic()
        while limit is not None:
            if limit.deadline <= now:
                limit.silent = True
            limit = limit.parent
    thread = threading.get_ident()
    depth = _engine_depth[thread] - 1
    if depth:
        _engine_depth[thread] = depth
    else:
        del _engine_depth[thread]


class TimeLimit:
    """The context manager that ``nccl_timeout_handler`` returns; entering it gives its ``Deadline``.

    It may be entered again after it was left, not before.
    """

    def __init__(self, limit: float, group: dist.ProcessGroup | None) -> None:
        self.limit = limit  # seconds
        self.open = False
        self._group = group

    def __enter__(self) -> Deadline:
        if self.open:
            raise RuntimeError(
                told("this time limit is already entered: call nccl_timeout_handler(...) for every with block")
            )
        self.parent = parent = innermost()
        self.entered = now = time.monotonic()
        self.deadline = now + self.limit
        self.binding: TimeLimit = self  # the block whose limit holds here
        self.silent = False  # do not interrupt Python code
        if parent is not None and parent.deadline <= self.deadline:
            self.deadline, self.binding, self.silent = parent.deadline, parent.binding, parent.silent
        self.look_at = self.deadline + GRACE
        self.thread = threading.get_ident()
        self._native = frozenset({threading.get_native_id()})
        self._asleep: deque[bool] = deque(maxlen=LOOKS)
        self._inner: TimeLimit | None = None
        self._process = os.getpid()
        self._noticed: float | None = None  # when the main thread first ran Python code past the deadline
        self._heard = self.deadline  # when the main thread last ran Python code
        self._interruption: CollectiveTimeout | None = None
        self._errors = _backend_errors(self._group)  # found by torch's watchdog before the block was entered
        self._found: dict[str, str] = {}  # found by it since, before anything was stopped here
        self._stops: tuple[Stop, ...] = ()
        if self.thread not in _engine_depth:
            self._heed_notices()
        self.open = True
        try:
            _watchdog.enter(self)
            _alarm.enter(self)
            _current.set(self)
            if parent is not None:
                parent._inner = self
        except BaseException:
            self._leave()
            raise
        return Deadline(self.deadline)

    def _heed_notices(self) -> None:
        """Raise CollectiveTimeout if a peer has stopped one of this block's groups: a call on it could only fail."""
        groups = [g for g in torch_compat.known_groups() if self._group in (None, g) and g not in _not_to_stop]
        for group, notice in _board.heard(groups, self.deadline - self.entered, self.entered).items():
            if self._group is None and group in _broken:
                continue  # this rank knows already, and may be using another group now
            _broken.add(group)
            raise self._stopped_before(group, notice)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._process != os.getpid():
            return
        if self._group is not None and error is not None and torch_compat.from_collective(error):
            _broken.add(self._group)
        if time.monotonic() >= self.deadline:
            self._judge(error)
        elif error is None:
            self._check_backends()

    def _leave(self) -> None:
        self.open = False
        try:
            _alarm.leave(self)
        finally:
            _watchdog.leave(self)
            _board.left(time.monotonic())
            if _current.get() is self:
                _current.set(self.parent)

    # --- past the deadline, in the main thread ----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Note that the main thread runs Python code."""
        self._heard = now
        if self._noticed is None:
            self._noticed = now

    def interruption(self, now: float) -> CollectiveTimeout | None:
        """Return what to raise in the Python code that runs now, once, or None.

        Not at the first tick but at the next: a call that returned in time, or just as the limit passed, gets to leave
        its block in between.
        """
        if self.silent or self._noticed is None or now - self._noticed < 0.9 * TICK:
            return None
        error = self._timeout(tr("Python code inside it was interrupted"))
        limit: TimeLimit | None = self
        while limit is not None:  # one interruption serves all the blocks whose deadline this is
            limit.silent = True
            limit._interruption = error
            limit = limit.parent if limit is not self.binding else None
        return error

    # --- past the deadline, in the watchdog's thread ----------------------------------------------------------------

    def look(self, now: float) -> float:
        """Stop process groups if the block's thread sits in a native call; return when to look again."""
        inner = self._inner
        if self.thread in _engine_depth or (inner is not None and inner.open and inner.thread == self.thread):
            self._heard = now  # an inner block, due at the same time or before, looks after this one's groups too
        heard = self._heard
        if now - heard < GRACE:
            self._asleep.clear()
            return heard + GRACE
        groups = self._bounded()
        if not groups:
            return now + LOOKS * RECHECK
        busy = in_flight(groups).busy
        if not busy and not in_c10d_call(self.thread):
            self._asleep.append(asleep(self._native))
            if len(self._asleep) < LOOKS or sum(self._asleep) < ASLEEP:  # computing, or not watched long enough
                return now + RECHECK
        with _watchdog.lock:
            if not _watchdog.guards(self) or self._heard != heard or self.thread in _engine_depth:
                return now + GRACE
            stop = self._stop(busy or (groups if self._stops else groups[:1]))  # all, if one was not enough
            self._heard = time.monotonic()
        stop.start()
        logger.warning(
            "%s",
            told(
                "the limit of {seconds:g} s of nccl_timeout_handler passed and a call inside it has not ended: stopping {operation}",
                "log",
                seconds=self.binding.limit,
                operation=joined(", ", stop.names),
            ),
        )
        if self._found:  # on nccl2 the call may not come back, so this may be the only message
            found = ", ".join(f"{kind} in {name}:" for name, kind in self._found.items())
            logger.error("%s", say(ends_soon(found)))
        return self._heard + GRACE

    def _bounded(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups whose operations must end, the default group first.

        They are this block's, and those of enclosing blocks whose limits have passed.
        """
        now = time.monotonic()
        named = set()
        limit: TimeLimit | None = self
        while limit is not None:
            if limit.deadline <= now:
                named.add(limit._group)
            limit = limit.parent
        return tuple(g for g in torch_compat.known_groups() if (None in named or g in named) and g not in _not_to_stop)

    def _stop(self, groups: tuple[dist.ProcessGroup, ...]) -> Stop:
        self._found |= self._new_errors()  # now: an abort leaves one as well
        stop = Stop(groups, functools.partial(_board.post, limit=self.binding.limit))
        self._stops += (stop,)
        _not_to_stop.update(groups)
        return stop

    # --- past the deadline, on leaving ------------------------------------------------------------------------------

    def _judge(self, error: BaseException | None) -> None:
        """Raise ``CollectiveTimeout`` unless the block ended by itself; ``error`` is what it is left with."""
        if self._interruption is not None:  # a collective in flight must not outlive the block that bounds it
            flight = in_flight(self._bounded())
            if flight.busy or flight.unknown:
                self._stop((*flight.busy, *flight.unknown)).start()
        for stop in self._stops:
            stop.wait()
        if self._interruption is not None and error is self._interruption:
            if self._stops:
                error_now = self._timeout(tr("Python code inside it was interrupted"))
                self._interruption.args, self._interruption.outcome = error_now.args, error_now.outcome
        elif error is None and self._stops:
            raise self._timeout(tr("the calls inside it returned just as they were being ended"))
        elif error is not None and torch_compat.from_collective(error):
            raise self._timeout(tr("a call inside it was ended") if self._stops else FAILED_CALL) from error
        elif self._stops:
            passes = tr("{kind} was raised inside it and passes", kind=type(error).__name__)
            logger.error("%s", self._timeout(passes))

    def _check_backends(self) -> None:
        """Raise CollectiveFailed when torch's watchdog has found an error inside the block: it may have aborted there.

        To the host an operation that was aborted looks complete (nccl2 with error handling 2, torch 2.15).
        """
        found = self._new_errors()
        if found:
            broken = ", ".join(f"{kind} in {name}" for name, kind in found.items())
            what = tr("torch's watchdog found an error inside the block ({details})", details=broken)
            raise CollectiveFailed(self._timeout(what, broken=True).outcome)

    def _new_errors(self) -> dict[str, str]:
        return {name: kind for name, kind in _backend_errors(self._group).items() if name not in self._errors}

    def _timeout(self, what: Message, *, broken: bool = False) -> CollectiveTimeout:
        """Build the error of this block, with an outcome that is this rank's view alone."""
        elapsed, failed = time.monotonic() - self.binding.entered, what == FAILED_CALL
        stopped = joined(", ", (name for stop in self._stops for name in stop.names))
        advice: Message = RECREATE
        if not broken:
            what = tr("the limit of {seconds:g} s passed and {because}", seconds=self.binding.limit, because=what)
        if broken:
            state = tr("the group is unusable from now on, and tensors that were in flight hold no defined values.")
            advice = tr("See torch's own lines above for the error. {advice}", advice=RECREATE)
        elif stopped:
            state = tr(
                "{groups} was stopped for that and is unusable from now on, on all ranks, and tensors that were in flight hold "
                "no defined values.",
                groups=stopped,
            )
        elif failed:
            state = tr(
                "on gloo the process group it was made on is unusable from now on, and tensors that were in flight hold no "
                "defined values."
            )
            advice = tr("See the error it failed with. {advice}", advice=RECREATE)
        else:
            state = tr("no process group was stopped.")
            advice = tr(
                "Give the block a longer limit if it only needed more time. Where others wait in a collective of the block, this "
                "rank's next one on the group would meet that: leave the group as it is on all ranks, or make it anew."
            )
        if self._found or self._new_errors():
            advice = ends_soon(advice)
        summary = joined("; ", (what, state))
        for failure in (failure for stop in self._stops for failure in stop.failures):
            summary = tr("{text} Stopping failed for {details}.", text=summary, details=failure)
        return self._error(
            elapsed,
            group=stopped,
            deadline_expired=not broken,
            summary=summary,
            advice=advice,
            torn=bool(stopped) or broken or failed,
        )

    def _stopped_before(self, group: dist.ProcessGroup, notice: Notice) -> CollectiveTimeout:
        """Build the error of a rank that comes after a peer has stopped the group, naming it if it was awaited."""
        name, rank = describe(group), torch_compat.own_rank(group)
        missing = None if _board.gave_up else notice.missing(group)
        begun = tr(
            "rank {rank} stopped {group} because its limit of {seconds:g} s passed",
            rank=notice.rank,
            group=name,
            seconds=notice.limit,
        )
        waited = tr("what it waited for is not known here")
        if missing is not None:
            waited = tr(
                "rank {rank}, this one, was late: it had not called collective {number} of the group",
                rank=rank,
                number=missing,
            )
        state = tr(
            "the group is unusable from now on, on all ranks. Nothing was sent from here, and no tensor was touched."
        )
        summary = joined("; ", (begun, waited, state))
        return self._error(
            0.0,
            group=name,
            cause=Cause.UNKNOWN if missing is None else Cause.LATE,
            culprits=() if missing is None else (rank,),
            summary=summary,
            advice=RECREATE,
        )

    def _error(self, elapsed: float, **facts: Any) -> CollectiveTimeout:
        """Build an error that is this rank's view alone."""
        fields = {"cause": Cause.UNKNOWN, "culprits": (), "deadline_expired": True, "torn": False, **facts}
        incident = Incident(
            id=f"limit-{self._process}-{self.thread}-{self.entered:.6f}",
            device=torch_compat.emulated_device(),
            op="nccl_timeout_handler",
            op_id="this rank",
            generation=0,
            timeout=self.binding.limit,
            agreed=False,
            attempts=1,
            participants=(),
            **fields,
        )
        return CollectiveTimeout(of_incident(incident, elapsed, incident.torn))


def _backend_errors(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the errors that torch's watchdog has found on a group, or on all, by the group's name and backend."""
    found = {}
    for known in torch_compat.known_groups():
        if group in (None, known) and known not in _not_to_stop:
            for backend in backends(known):
                kind = torch_compat.backend_error(known, backend)
                if kind is not None:
                    found[f"process group {known.group_name!r} ({backend})"] = kind
    return found


def _expired(now: float) -> CollectiveTimeout | None:
    """Return the error to raise in the main thread: only for the block that the interrupted code itself is in.

    In an asyncio program that may be another task, or the event loop.
    """
    limit = innermost()
    if limit is None or limit.thread != threading.get_ident() or limit.thread in _engine_depth:
        return None
    return limit.interruption(now)


_alarm: Final = Alarm(_expired)
_alarm.own_code.update(
    function.__code__ for function in (TimeLimit.__enter__, TimeLimit.__exit__, enter_engine, leave_engine)
)
_watchdog = Watchdog()
_board: Final = Board()
_not_to_stop: Final[weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakSet()  # stopped already, or a parent process's
_broken: Final[weakref.WeakSet[dist.ProcessGroup]] = weakref.WeakSet()  # a call failed here, or a notice was raised


def _after_fork_in_child() -> None:
    """Forget the parent's blocks and groups: stopping a group here would cut the connections of both."""
    global _watchdog
    for watched in _watchdog.watched():
        watched.open = False
    _watchdog.abandon()
    _watchdog = Watchdog()
    _alarm.forget_timers()
    _engine_depth.clear()
    _board.leave_to_parent()
    _not_to_stop.update(torch_compat.known_groups())


lifecycle.in_child(_after_fork_in_child)
if dist.is_available() and dist.is_initialized():
    _board.begin_life()
torch_compat.on_init(_board.begin_life)


def nccl_timeout_handler(seconds: float | timedelta = 1800, group: dist.ProcessGroup | None = None) -> TimeLimit:
    """Return a context manager that bounds the raw ``torch.distributed`` calls inside it.

    ``seconds`` is a number of seconds, fractions included, or a ``timedelta``. When they have passed and the block is
    still inside, then

    - Python code of the main thread (a loop, ``time.sleep``) is interrupted with ``CollectiveTimeout``, through
      SIGALRM. The groups are left alone, except one that has a collective in flight, or may have (flight recorder off,
      as it is by default before torch 2.11);
    - a call that waits in C++ is ended by stopping ``group`` on this rank (gloo: its connections are closed; NCCL: its
      communicators are aborted), and the error with which it returns is raised as ``CollectiveTimeout``. Without
      ``group`` those with a collective in flight are stopped, or else the default group, and if the block still does
      not end, every other group. A stopped group is unusable from then on, on all ranks; the error says which that is.

    What has ended when the block is left is not reported, also if it ended late; another exception passes unchanged:
    where a peer stops the group first, a healthy rank sees torch's own error of that moment (gloo: "Connection closed
    by peer"), and the peer's ``CollectiveTimeout`` says why.
    A rank that stops a group says so in the job's store: one that comes to a block later, after a long absence, raises
    ``CollectiveTimeout`` when it enters, before it has sent anything, and names itself where it had not called what
    was waited for. Blocks nest: the sooner limit holds. Around ``safe_*`` a block shortens their budget and never
    interrupts them; prefer those, they keep the process group. A SIGALRM timer that the program had set still reaches
    its own handler on time. In an asyncio task the block bounds blocking calls of that task; it does not interrupt an
    ``await``.

    Not bounded: a collective that was only queued (on NCCL, synchronise inside the block); building a group, which
    waits in the store; ``recv`` from any source on gloo, which ends with the group's own timeout. A native call of
    another kind that goes on for a second past the limit is taken for a collective.

    Entering raises ``CollectiveTimeout`` for a group of this block that a peer has stopped, until it is destroyed.
    Raises ``TypeError`` or ``ValueError`` for a bad limit, and ``ValueError`` for a group that was destroyed or that
    this rank is not a member of.

    >>> with nccl_timeout_handler(30) as deadline:
    ...     print(deadline.remaining() <= 30)
    True
    """
    limit = config.seconds(seconds, tr("the limit of nccl_timeout_handler"))
    if limit is None:
        raise TypeError(told("nccl_timeout_handler needs a limit: pass seconds or a timedelta (1800 s is the default)"))
    return TimeLimit(limit, check_group(group))


def remaining_limit() -> float | None:
    """Return the seconds left under the enclosing ``nccl_timeout_handler`` blocks, never below zero; None outside."""
    limit = innermost()
    return None if limit is None else max(0.0, limit.deadline - time.monotonic())


class engine_section:
    """Mark the code inside as a guarded operation, which ends by itself.

    No limit interrupts it or stops a group for it.

    The enclosing limit is not lifted by that, see ``remaining_limit``. Code that goes on in a block whose limit passed
    inside such a section is not interrupted either, because the guarded operation has told of the failure; a raw call
    made there is still ended.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        enter_engine()

    def __exit__(self, *exc_info: object) -> None:
        leave_engine()
