"""Runs the collectives of one group in the order in which they were issued.

A blocking call runs in the caller's own thread, where signals arrive and its stack shows what it does, unless something
is pending; then, and when it is asynchronous, a thread of the lane runs it. The thread is started with the first such
call.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from ncclguard import runtime
from ncclguard.errors import CollectiveFailed, GuardError
from ncclguard.guard import Guard
from ncclguard.outcome import Outcome
from ncclguard.process_group.work import GuardedWork
from ncclguard.streams import drained

log = logging.getLogger("ncclguard")

#: Seconds that leaving the job waits for the threads of all lanes; what they run has been ended before.
JOIN_WITHIN = 3.0
#: Seconds that the last copies of a result may take on the GPU.
COPIED_WITHIN = 5.0
#: Seconds between two looks at what is to be called off.
CALL_OFF_EVERY = 0.05


@dataclass(slots=True)
class Task:
    """One collective: what it is called, what carries it out, and what its caller holds."""

    text: str
    perform: Callable[[], None]
    work: GuardedWork
    stream: torch.cuda.Stream | None = None
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def run(self) -> None:
        self.perform()
        if (
            self.stream is not None
        ):  # where it may have queued more copies of its result, which callbacks must find done
            drained(self.stream.device, time.monotonic() + COPIED_WITHIN)


class Lane:
    """One sequence of collectives. `failed` is told of each failure, once."""

    def __init__(self, name: str, failed: Callable[[Outcome], None]) -> None:
        self._name = name
        self._failed = failed
        self._state = threading.Condition()
        self._turn = threading.Lock()  # held while a collective runs
        self._queue: deque[Task] = deque()
        self._unfinished = 0  # tasks that were given to the thread
        self._running: Guard | None = None
        self._thread: threading.Thread | None = None
        self._closed = ""
        _lanes.add(self)

    # ------------------------------------------------------------------ issuing

    def issue(self, task: Task, blocking: bool) -> GuardedWork:
        """Have `task` run after all that were issued before; a blocking one has ended on
        return, or raises its error.
        """
        if threading.current_thread() is self._thread:  # a callback of a future: nobody else would run it
            self._drain()
            self._perform(task)
            if blocking:
                task.work.wait()
            return task.work
        with self._state:
            if self._closed:
                raise GuardError(f"{task.text} cannot run: {self._closed}")
            inline = blocking and self._unfinished == 0 and self._turn.acquire(blocking=False)
            if not inline:
                task.work.run_now = self._help
                self._unfinished += 1
                self._queue.append(task)
                self._start()
                self._state.notify_all()
        if inline:
            try:
                task.run()
            except BaseException as error:
                self._record(error)
                task.work.end(error)
                raise
            finally:
                self._turn.release()
            task.work.end()
        elif blocking:
            self._wait(task)
        return task.work

    def _wait(self, task: Task) -> None:
        try:
            task.work.wait()
        except Exception:
            raise
        except BaseException as interruption:  # Ctrl-C: the caller will not look at the tensors again
            self.call_off(type(interruption).__name__)
            raise

    def running(self, guard: Guard | None) -> None:
        """What the collective in progress waits in, so that it can be called off."""
        self._running = guard

    # ------------------------------------------------------------------ the thread

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"ncclguard-{self._name}", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._queue and not self._closed:
                    self._state.wait()
                if not self._queue:
                    return
            self._drain()

    def _help(self) -> None:
        """A wait in the lane's own thread, from a callback of a future: nobody else would run what is waited for."""
        if threading.current_thread() is self._thread:
            self._drain()

    def _drain(self) -> None:
        while True:
            with self._state:
                if not self._queue:
                    return
                task = self._queue.popleft()
            self._perform(task)
            with self._state:
                self._unfinished -= 1
                self._state.notify_all()

    def _perform(self, task: Task) -> None:
        error: BaseException | None = None
        try:
            with self._turn, _on(task.stream):
                task.context.run(task.run)
        except BaseException as raised:  # noqa: BLE001 - handed to whoever waits for it
            error = raised
            self._record(raised)
            log.error("ncclguard: %s failed: %s", task.text, raised)
        task.work.end(error)

    def _record(self, error: BaseException) -> None:
        if isinstance(error, CollectiveFailed):
            self._failed(error.outcome)

    # ------------------------------------------------------------------ ending

    def drain(self, why: str = "") -> None:
        """Wait until nothing is pending in the thread; what is ends by its own deadline, or
        is called off as `why` says.
        """
        while True:
            with self._state:
                if self._state.wait_for(lambda: self._unfinished == 0, timeout=CALL_OFF_EVERY):
                    return
            if why:  # again and again, because it may have been about to start
                self.call_off(why)

    def drop(self, why: str) -> None:
        """Forget what has not started, and fail what runs for all ranks, as if this one had raised `why`."""
        with self._state:
            dropped = list(self._queue)
            self._queue.clear()
            self._unfinished -= len(dropped)
            self._state.notify_all()
        for task in dropped:
            task.work.end(GuardError(f"{task.text} was not started: {why}"))
        self.call_off(why)

    def call_off(self, why: str) -> None:
        """Fail the collective that runs now, for all ranks."""
        guard = self._running
        if guard is not None:
            guard.call_off(why)

    def close(self, why: str) -> None:
        """Take nothing more; the thread ends when what it runs has ended."""
        with self._state:
            self._closed = self._closed or why
            dropped = list(self._queue)
            self._queue.clear()
            self._unfinished -= len(dropped)
            self._state.notify_all()
        for task in dropped:
            task.work.end(GuardError(f"{task.text} was not started: {why}"))

    def join(self, seconds: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, seconds))


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def _end_all() -> None:
    """After leaving the job, when the engine has ended what was running: no thread may
    come back into a dying interpreter.
    """
    end = time.monotonic() + JOIN_WITHIN
    lanes = list(_lanes)
    for lane in lanes:
        lane.close("this process has left the job")
    for lane in lanes:
        lane.join(end - time.monotonic())


runtime.on_end(_end_all)
