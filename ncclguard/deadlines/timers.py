"""Wake-ups for a block whose time is up: SIGALRM on the main thread, a watchdog thread where no signal arrives.

One SIGALRM handler serves all blocks of the main thread, and shares the process's only real-time timer with its owner.
One watchdog thread per process looks after every block whose limit may pass while its own thread cannot act.
"""

from __future__ import annotations

import asyncio
import dis
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final, Protocol

from ncclguard import lifecycle
from ncclguard_explain.language import told

# CPython's own functions beneath those of `signal`, whose search for an enum member is two thirds of a block's cost
try:
    import _signal as quick  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    quick = signal

logger = logging.getLogger(__name__)

SIGALRM: Final = int(signal.SIGALRM)
TICK: Final = 0.01
EARLY: Final = 1e-4  # the timer takes whole microseconds, so it may fire a little before the clock reads the deadline
LONGEST: Final = 1e6  # seconds; the timer is armed again when it fires early
#: Ticks in a row for which an exception waits for a better place: a loop may have no other place for a signal.
HELD: Final = 100
JUMP_BACKWARD: Final = dis.opmap.get(
    "JUMP_BACKWARD", -1
)  # Python 3.10, which has no exception tables, has no such jump

_CALLS_BACK: Final = asyncio.Handle._run.__code__
_HANDLES_RECORD: Final = logging.Handler.handle.__code__


class Alarmed(Protocol):
    """A block of the main thread with a deadline."""

    deadline: float  # reading of time.monotonic()

    def tick(self, now: float) -> None:
        """Note the time `now`; called in the main thread at the deadline and every ``TICK`` seconds after it."""


@dataclass(slots=True)
class _Found:
    """The handler and timer found before this library's own, and put back after it."""

    handler: Any  # as signal.signal returned it
    due: float | None  # reading of time.monotonic() at which the timer found would have fired
    interval: float


class Alarm:
    """Delivers ticks to blocks of the main thread from their deadline on, and interrupts what Python waits for there.

    Ticks arrive only while the main thread runs Python code or sleeps interruptibly; that they stay out is how the
    watchdog knows that the thread sits in a native call. ``expired`` is asked after the ticks for an exception to
    raise, unless one of ``own_code`` is on the interrupted stack: a block that is being entered or left is never
    disturbed; nor, for a second, is a jump that no ``with`` or ``except`` around it would see raise, nor code whose
    exceptions are swallowed before they reach the block: a callback of asyncio's, a logging handler, a ``__del__``.

    An alarm that the program had set goes on counting: it is delivered to its own handler on time, and what remains of
    it is armed again when the last block is left.
    """

    def __init__(self, expired: Callable[[float], BaseException | None]) -> None:
        self._expired = expired
        self._handler = self._on_alarm  # one object, so that "is it installed?" is an identity
        self._found: list[_Found] = []
        self._blocks: dict[int, tuple[Alarmed, _Found]] = {}
        self._next: dict[int, float] = {}
        self._held = 0  # ticks in a row
        self.own_code: set[CodeType] = set()

    def enter(self, block: Alarmed) -> bool:
        """Deliver ticks to ``block``; return False outside the main thread, or if C code has set the handler."""
        if threading.get_ident() != threading.main_thread().ident:
            return False
        current = quick.getsignal(SIGALRM)
        if current is not self._handler:
            if current is None:  # set by C code: it could not be put back
                return False
            remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0.0)
            due = time.monotonic() + remaining if remaining else None
            try:
                quick.signal(SIGALRM, self._handler)  # runs what was pending under the old handler first
            except ValueError:  # a subinterpreter
                signal.setitimer(signal.ITIMER_REAL, remaining, interval)
                return False
            except BaseException:
                signal.setitimer(signal.ITIMER_REAL, remaining, interval)
                raise
            self._found.append(_Found(current, due, interval))
        self._blocks[id(block)] = (block, self._found[-1])
        self._next[id(block)] = block.deadline
        self._arm()
        return True

    def leave(self, block: Alarmed) -> None:
        """Deliver no tick to ``block`` any more and, after the last block, put back what was found.

        Also what an ``enter`` that did not get to its end (Ctrl-C) has installed.
        """
        self._blocks.pop(id(block), None)
        self._next.pop(id(block), None)
        if not self._found or threading.get_ident() != threading.main_thread().ident:
            return
        self._put_back_unused()
        if self._found and quick.getsignal(SIGALRM) is self._handler:
            self._arm()

    def _put_back_unused(self) -> None:
        while self._found and all(used is not self._found[-1] for _, used in self._blocks.values()):
            self._put_back(self._found.pop())

    def _put_back(self, found: _Found) -> None:
        if quick.getsignal(SIGALRM) is not self._handler:
            return  # the code inside installed a handler of its own, and keeps it
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # signal.signal first runs a pending alarm under the handler that is still installed,
        # i.e. ours, which ignores it.
        quick.signal(SIGALRM, found.handler)
        if found.due is not None:
            signal.setitimer(signal.ITIMER_REAL, max(found.due - time.monotonic(), EARLY), found.interval)

    def forget_timers(self) -> None:
        """Forget the timers in a forked child: they are not inherited, so none is put back or waited for."""
        for found in self._found:
            found.due = None
        self._next.clear()

    def _arm(self, soonest: float = EARLY) -> None:
        now = time.monotonic()
        due = min(self._next.values(), default=now + LONGEST)
        found = self._found[-1]
        if found.due is not None:
            due = min(due, found.due)
        signal.setitimer(signal.ITIMER_REAL, min(max(due - now, soonest), LONGEST))

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        if not self._found:
            return
        now = time.monotonic() + EARLY
        between, swallowed = _between_handlers(frame), _is_swallowed(frame)
        self._held = self._held + 1 if between or swallowed else 0
        held = 0 < self._held <= HELD
        inside = (between and held) or any(code in self.own_code for code in _codes(frame))
        try:
            for key, (block, _) in list(self._blocks.items()):
                if self._next.get(key, now + 1) <= now:
                    self._next[key] = now + TICK
                    block.tick(now)
            if inside:
                return
            self._deliver_found(signum, frame, now)
            error = None if swallowed and held else self._expired(now)
            if error is not None:
                raise error
        finally:
            # The handler found may raise, and so waits until the block has been entered or left.
            if not inside:
                self._put_back_unused()  # there is one if a generator's block was closed by another thread
            if self._found:
                self._arm(TICK if inside else EARLY)

    def _deliver_found(self, signum: int, frame: FrameType | None, now: float) -> None:
        found = self._found[-1]
        if found.due is None or found.due > now:
            return
        found.due = now + found.interval if found.interval else None
        if callable(found.handler):
            found.handler(signum, frame)
        elif found.handler == signal.SIG_DFL:
            # An alarm without a handler ends the process, and the program asked for that.
            quick.signal(SIGALRM, found.handler)
            signal.raise_signal(signal.SIGALRM)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _is_swallowed(frame: FrameType | None) -> bool:
    """Return whether what is raised here is logged by a caller and goes no further.

    A callback of asyncio's runs in the context, and so in the blocks, of the task that made it, which may wait for it
    for good then.
    """
    for code in _codes(frame):
        if code is _HANDLES_RECORD or code.co_name == "__del__":
            return True
        if code is _CALLS_BACK:  # or takes a step of a task
            return asyncio.current_task() is None
    return False


def _between_handlers(frame: FrameType | None) -> bool:
    """Return whether the frame is at the jump at the end of a ``while`` loop that its exception table leaves out.

    Python 3.12 and 3.13 compile a loop with a condition so (CPython's issue 130279). What is raised there by a handler
    of a signal passes by every ``with`` and ``except`` of the frame: no block would be left.
    """
    if frame is None or frame.f_lasti < 2:
        return False
    code, at = frame.f_code, frame.f_lasti
    return code.co_code[at] == JUMP_BACKWARD and _is_covered(code, at - 2) and not _is_covered(code, at)


def _is_covered(code: CodeType, offset: int) -> bool:
    """Return whether an exception at this instruction finds a handler in its own code.

    The table is a sequence of start, length, target, and depth, the first three counted in code units of two bytes,
    each in groups of six bits with a bit for "more follows": Objects/exception_handling_notes.txt of CPython.
    """
    table = iter(code.co_exceptiontable)

    def number() -> int:
        byte = next(table)
        value = byte & 63
        while byte & 64:
            byte = next(table)
            value = value << 6 | byte & 63
        return value

    try:
        while True:
            start, length, _, _ = number(), number(), number(), number()
            if start <= offset // 2 < start + length:
                return True
    except StopIteration:
        return False


LONGEST_SLEEP: Final = 3600.0  # Condition.wait refuses more than threading.TIMEOUT_MAX
EXIT_BOUND: Final = 5.0


class Watched(Protocol):
    """Something with a time at which the watchdog has to look at it."""

    look_at: float  # reading of time.monotonic()
    open: bool

    def look(self, now: float) -> float:
        """Act if need be, from the watchdog's thread; return when to look again."""


class Watchdog:
    """Calls ``look`` on everything entered, when it is due.

    The thread starts with the first block and then stays, since starting one per block costs ten times as much as the
    rest of the block. It is woken only for a block that is due sooner than all that it knew: in a loop of blocks
    with equal limits that is once. It is a daemon that is stopped and joined at exit: a thread that was inside torch's
    C++ code while the interpreter went away would end the process with SIGABRT, and a thread that is no daemon would be
    waited for before any exit hook could stop it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._watched: dict[int, Watched] = {}
        self._wake_at = math.inf
        self._thread: threading.Thread | None = None
        self._closing = False

    def enter(self, watched: Watched) -> None:
        """Look after ``watched`` from now on."""
        with self._changed:
            self._watched[id(watched)] = watched
            if self._thread is None:
                self._start()
            elif watched.look_at < self._wake_at:
                self._wake_at = watched.look_at
                self._changed.notify()

    def leave(self, watched: Watched) -> None:
        """Forget ``watched``; once this has returned, nothing that ``guards`` admits happens for it any more."""
        with self._changed:
            self._watched.pop(id(watched), None)

    def guards(self, watched: Watched) -> bool:
        return id(watched) in self._watched

    @property
    def lock(self) -> threading.Condition:
        """The lock to hold while deciding something that must not happen after ``leave``."""
        return self._changed

    def watched(self) -> tuple[Watched, ...]:
        return tuple(self._watched.values())

    def close(self) -> None:
        """Stop the thread and wait for it, for a bounded time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(EXIT_BOUND)

    def abandon(self) -> None:
        """Leave nothing to do at exit in a forked child: it has no such thread, and the lock may be held for good."""
        lifecycle.forget(self.close)

    def _start(self) -> None:
        if self._closing:
            logger.warning(
                "%s",
                told(
                    "a time limit was entered while the interpreter exits: no watchdog looks after it any more", "log"
                ),
            )
            return
        self._thread = threading.Thread(target=self._run, name="ncclguard-deadlines", daemon=True)
        self._thread.start()
        lifecycle.before_end(self.close)

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                due = [w for w in self._watched.values() if w.look_at <= now]
                if self._closing:
                    return
                if not due:
                    self._wake_at = min((w.look_at for w in self._watched.values()), default=math.inf)
                    self._changed.wait(min(self._wake_at - now, LONGEST_SLEEP))
                    continue
            for watched in due:
                try:
                    watched.look_at = watched.look(now)
                except Exception:
                    # One block's trouble must not leave the others without a limit; it is looked at again later.
                    logger.exception("%s", told("looking after a time limit failed; trying again in a second", "log"))
                    watched.look_at = time.monotonic() + 1.0
