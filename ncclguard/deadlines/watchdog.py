"""One thread per process that looks after every block whose time limit may pass while its own thread cannot act."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Final, Protocol

from ncclguard import lifecycle

logger = logging.getLogger(__name__)

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
        """Whether ``watched`` is still entered."""
        return id(watched) in self._watched

    @property
    def lock(self) -> threading.Condition:
        """Held by whoever decides something that must not happen after ``leave``."""
        return self._changed

    def watched(self) -> tuple[Watched, ...]:
        """Everything entered at present."""
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
        """In a forked child, where the thread does not exist and the lock may be held for
        good: leave nothing to do at exit.
        """
        lifecycle.forget(self.close)

    def _start(self) -> None:
        if self._closing:
            logger.warning("a time limit was entered while the interpreter exits: no watchdog looks after it any more")
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
                    logger.exception("looking after a time limit failed; trying again in a second")
                    watched.look_at = time.monotonic() + 1.0
