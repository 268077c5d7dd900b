"""Runs the collectives of one guarded process group in the order in which they were issued, and returns their works.

A blocking call runs in the caller's own thread, where signals arrive and its stack shows what it does, unless something
is pending. An asynchronous collective is run by whoever comes first: a thread that waits for it, or the queue's own
thread. Waking that thread costs more than a small collective takes, so it is not woken where the last collective was
run by a thread that waited: the queue's thread looks by itself then, for as long as collectives keep coming. It is
started with the first such call.
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
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ncclguard import lifecycle, torch_compat
from ncclguard.deadlines import engine_section
from ncclguard.errors import CollectiveFailed, GuardError
from ncclguard.outcome import Outcome
from ncclguard.transport.memory import drained
from ncclguard_explain.language import told


class NotComplete(RuntimeError, TimeoutError):
    """A wait has ended at its own limit, before the collective; torch's backends raise a RuntimeError then."""


class GuardedWork(dist.Work):
    """A collective that was started; its deadline is the operation's own, so that every wait ends.

    `results`: the tensors that the future holds. Python callers get the typed error of `ncclguard.errors` from `wait`;
    C++ callers and futures, which know no Python types, a RuntimeError with the same text.
    """

    def __init__(self, text: str, results: Any, device: torch.device | None) -> None:
        super().__init__()
        self._text = text
        self._results = results
        self._device = device
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._promise: Any = None
        self._future: Any = None
        #: Called by a wait, with whether that has a limit of its own: may carry the collective out in the same thread.
        self.run_now: Callable[[GuardedWork, bool], None] | None = None
        #: Somebody has waited to its end, or waits for its future.
        self.attended = False
        #: Of a receive: the source's rank within the group, once it is known.
        self.sources: list[int] = []

    # ------------------------------------------------------------------ the caller

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended; raises its typed error, and NotComplete when `timeout` passes first."""
        limit = None if timeout is None else timeout.total_seconds()
        if self.run_now is not None and not self._ended.is_set():
            self.run_now(self, bool(limit))
        with engine_section():
            ended = self._ended.wait(limit if limit else None)  # torch's zero means: no limit but the operation's own
        if not ended:
            raise NotComplete(
                f"the wait timed out: {self._text} is not complete after {limit:.3g} s; it goes on until its own limit: wait for it again"
            )
        self.attended = True
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors, once complete."""
        self.wait()
        return list(self._results)

    def source_rank(self) -> int:
        """Wait for the end of a receive and return the rank within the group that its message is from."""
        self.wait()
        if not self.sources:
            raise RuntimeError(f"{self._text} has no source rank: only a receive has one")
        return self.sources[0]

    _source_rank = source_rank  # as torch.distributed.recv asks

    def get_future(self) -> Any:
        """A future with the tensors; it is completed whether or not anybody waits."""
        with self._lock:
            if self._future is None:
                on_cuda = self._device is not None and self._device.type == "cuda"
                devices: Any = [self._device] if on_cuda else []
                self._promise = torch.futures.Future(devices=devices)
                self._future = self._promise.then(self._value)
                self.attended = True
            promise, future, ended = self._promise, self._future, self._ended.is_set()
            if ended:
                self._promise = None
        if ended and promise is not None:
            promise.set_result(None)
        return future

    def _value(self, _: Any) -> Any:
        # Raised inside a callback, because only then does the future carry an error that C++ sees as one.
        if self._error is not None:
            raise self._error
        return self._results

    # ------------------------------------------------------------------ who carries it out

    @property
    def error(self) -> BaseException | None:
        return self._error

    def end(self, error: BaseException | None = None) -> None:
        """The collective has ended; callbacks of the future run in this thread."""
        callbacks = self.mark_ended(error)
        if callbacks is not None:
            callbacks()

    def mark_ended(self, error: BaseException | None) -> Callable[[], None] | None:
        """The collective has ended; returns what runs its future's callbacks, None without one."""
        with self._lock:
            self._error = error
            self._ended.set()
            promise, self._promise = self._promise, None
        return None if promise is None else lambda: promise.set_result(None)


log = logging.getLogger("ncclguard")

#: Seconds that leaving the job waits for the threads of all queues; what they run has been ended before.
JOIN_WITHIN = 3.0
#: Seconds that the last copies of a result may take on the GPU.
COPIED_WITHIN = 5.0
#: Seconds between two looks of the queue's thread while it expects others to run what is issued, and how long it looks.
LOOK_EVERY, LOOK_FOR = 0.005, 1.0
#: Bytes from which a collective is begun at once by the queue's thread: it takes longer than waking that.
LARGE = 64 << 10
#: Works that nobody has waited for yet and that are kept where C++ does not keep them: more than it holds at once.
KEPT = 256
#: A callback of a future runs in this thread. It may wait for the future of a collective that it issues, as the hooks
#: of PowerSGD do, so that one's own callbacks are not kept until it has returned.
_in_callback: contextvars.ContextVar[bool] = contextvars.ContextVar("_in_callback", default=False)
#: Seconds between two looks at what is to be called off.
CALL_OFF_EVERY = 0.05


@dataclass(slots=True)
class Task:
    """One collective: what it is called, what carries it out, and what its caller holds."""

    text: str
    perform: Callable[[], None]
    work: GuardedWork
    stream: torch.cuda.Stream | None = None
    nbytes: int = 0
    issued: float = field(default_factory=time.monotonic)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def run(self) -> None:
        self.perform()
        if (
            self.stream is not None
        ):  # where it may have queued more copies of its result, which callbacks must find done
            drained(self.stream.device, time.monotonic() + COPIED_WITHIN)


class CallsOff(Protocol):
    """The wait of a collective in progress."""

    def call_off(self, why: str) -> None:
        """End the wait, for all ranks that take part."""


class WorkQueue:
    """One sequence of collectives. `failed` is told of each failure, once."""

    def __init__(self, name: str, failed: Callable[[Outcome], None]) -> None:
        self._name = name
        self._failed = failed
        lock = threading.RLock()
        self._state = threading.Condition(lock)
        self._drained = threading.Condition(lock)  # apart, so that the queue's thread sleeps on
        self._turn = threading.Lock()  # held while a collective runs
        self._queue: deque[Task] = deque()
        self._unfinished = 0  # tasks that were given to the thread
        self._running: CallsOff | None = None
        self._thread: threading.Thread | None = None
        self._closed = ""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._calling_back = False  # a thread runs them
        self._caller: threading.Thread | None = None
        self._by_waiters = False  # the last asynchronous collective was run by a thread that waited for it
        self._issued = 0.0  # when the last one was
        self._kept: list[GuardedWork] = []
        self._idle = True  # the thread sleeps until it is told that there is something
        _queues.add(self)

    # ------------------------------------------------------------------ issuing

    def issue(self, task: Task, blocking: bool) -> GuardedWork:
        """Have `task` run after all that were issued before; a blocking one has ended on return, or raises."""
        if threading.current_thread() is self._thread:  # a callback of a future: nobody else would run it
            self._drain()
            self._perform(task)
            if blocking:
                task.work.wait()
            return task.work
        with self._state:
            if self._closed:
                raise GuardError(f"{task.text} cannot run: {self._closed}")
            if not torch_compat.CPP_KEEPS_WORKS:
                self._kept = [work for work in self._kept if not work.attended][-KEPT:]
                self._kept.append(task.work)
            inline = blocking and self._unfinished == 0 and self._turn.acquire(blocking=False)
            if not inline:
                task.work.run_now = self._help
                self._start()
                self._unfinished += 1
                self._queue.append(task)
                self._issued = task.issued
                if task.nbytes >= LARGE:
                    self._by_waiters = False
                if self._idle or not self._by_waiters:  # else the thread looks by itself
                    self._idle = False
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

    @property
    def busy(self) -> bool:
        """Return whether something runs, or is to run."""
        return self._unfinished > 0 or self._turn.locked()

    def running(self, group: CallsOff | None) -> None:
        """Return what the collective in progress waits in, so that it can be called off."""
        self._running = group

    # ------------------------------------------------------------------ the thread

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"ncclguard-{self._name}", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._state:
                while not self._closed:
                    left = self._left_to_others()
                    if self._queue and not left:
                        break
                    self._idle = not left
                    self._state.wait(LOOK_EVERY if left else None)
                self._idle = False
                if not self._queue:
                    return
                self._by_waiters = False
            torch_compat.leave_captures_alone()
            self._drain()

    def _left_to_others(self) -> bool:
        """Return whether what is next, or may come, is to be left to threads that wait for it, for now."""
        if not self._by_waiters:
            return False
        now = time.monotonic()
        return now < (self._queue[0].issued + LOOK_EVERY if self._queue else self._issued + LOOK_FOR)

    def _help(self, work: GuardedWork, limited: bool) -> None:
        """A wait for `work`: run what is next in this thread until it has ended, unless another thread does.

        In the queue's own thread, from a callback of a future, nobody else would. A `limited` wait could not be ended.
        """
        if threading.current_thread() is self._thread:
            self._drain()
            return
        while not limited and not work.is_completed() and self._turn.acquire(blocking=False):
            if work.is_completed():  # since it was looked at
                self._turn.release()
                return
            self._by_waiters = True
            if not self._run_next():
                return

    def _drain(self) -> None:
        while self._turn.acquire() and self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the first collective of the queue and give the turn, which this thread has, back; False for none."""
        task: Task | None = None
        error: BaseException | None = None
        interruption: BaseException | None = None
        callbacks: Callable[[], None] | None = None
        awaited = False  # a callback that runs waits for this one's future
        try:
            with self._state:
                task = self._queue.popleft() if self._queue else None
            if task is not None:
                error = self._error_of(task)
        except BaseException as raised:  # noqa: BLE001 - Ctrl-C a moment before the collective, or after it
            error = raised
        try:
            if error is not None and not isinstance(error, Exception):
                interruption = error  # of this thread
            if task is not None:
                if interruption is not None:  # whoever else waits is told in other words
                    error = GuardError(
                        f"{task.text} was given up: {type(error).__name__} in a thread that waited for it"
                    )
                callbacks = task.work.mark_ended(error)
                awaited = task.context.get(_in_callback, False)
                if (
                    callbacks is not None and not awaited
                ):  # in the order of the collectives, while this thread has the turn
                    with self._state:
                        self._callbacks.append(callbacks)
        finally:
            self._turn.release()
            if task is not None and callbacks is None:
                self._finished()
        if callbacks is not None and awaited:
            self._complete(callbacks)
        elif callbacks is not None:
            self._call_back()
        if interruption is not None and threading.current_thread() is not self._thread:
            raise interruption
        return task is not None

    def _finished(self) -> None:
        with self._state:
            self._unfinished -= 1
            self._drained.notify_all()

    def _call_back(self) -> None:
        """Run callbacks of futures, in the order of the collectives and not in the way of the next one."""
        with self._state:
            if self._calling_back:
                return
            self._calling_back = True
            elsewhere = threading.current_thread() is self._thread and not self._closed
        if elsewhere:
            name = f"ncclguard-{self._name}-callbacks"
            caller = threading.Thread(target=self._run_callbacks, name=name, daemon=True)
            with contextlib.suppress(RuntimeError):  # the program has ended: there are no threads any more
                caller.start()
                self._caller = caller
                return
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while True:
            with self._state:
                if not self._callbacks:
                    self._calling_back = False
                    return
                callbacks = self._callbacks.popleft()
            try:
                self._complete(callbacks)
            except BaseException:  # Ctrl-C in a thread that waited
                with self._state:
                    self._calling_back = False
                raise

    def _complete(self, callbacks: Callable[[], None]) -> None:
        """Run the callbacks of one collective's future."""
        within = _in_callback.set(True)
        try:
            callbacks()
        except Exception:
            log.exception(
                "ncclguard: %s", told("a callback of a collective on {group} failed", "log", group=self._name)
            )
        finally:
            _in_callback.reset(within)
            self._finished()

    def _perform(self, task: Task) -> None:
        with self._turn:
            error = self._error_of(task)
        task.work.end(error)

    def _error_of(self, task: Task) -> BaseException | None:
        """Run a collective; what it raises is for whoever waits for it."""
        try:
            with _on(task.stream):
                task.context.run(task.run)
        except BaseException as raised:  # noqa: BLE001
            self._record(raised)
            if not getattr(raised, "_given_up", False):
                log.error("ncclguard: %s", told("{operation} failed: {error}", operation=task.text, error=str(raised)))
            return raised
        return None

    def _record(self, error: BaseException) -> None:
        if isinstance(error, CollectiveFailed):
            self._failed(error.outcome)

    # ------------------------------------------------------------------ ending

    def drain(self, why: str = "") -> None:
        """Wait until nothing is pending: it ends by its own deadline, or is called off as `why` says."""
        while True:
            with self._state:
                if self._drained.wait_for(lambda: self._unfinished == 0, timeout=CALL_OFF_EVERY):
                    return
            if why:  # again and again, because it may have been about to start
                self.call_off(why)

    def drop(self, why: str) -> None:
        """Forget what has not started, and fail what runs for all ranks, as if this one had raised `why`."""
        self._forget(why)
        self.call_off(why)

    def call_off(self, why: str) -> None:
        """Fail the collective that runs now, for all ranks."""
        group = self._running
        if group is not None:
            group.call_off(why)

    def close(self, why: str) -> None:
        """Take nothing more; the thread ends when what it runs has ended."""
        self._forget(why, closes=True)

    def _forget(self, why: str, closes: bool = False) -> None:
        """End what has not started."""
        with self._state:
            if closes:
                self._closed = self._closed or why
            dropped = list(self._queue)
            self._queue.clear()
            self._unfinished -= len(dropped)
            self._state.notify_all()
            self._drained.notify_all()
        for task in dropped:
            task.work.end(GuardError(f"{task.text} was not started: {why}"))

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        _join(self._thread, end)
        _join(self._caller, end)  # read only now: the first may just have started it


def _join(thread: threading.Thread | None, end: float) -> None:
    """Wait for a thread, unless it is this one, until ``time.monotonic()`` is `end`."""
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(max(0.0, end - time.monotonic()))


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()


def _end_all() -> None:
    """End all threads after leaving the job: none may come back into a dying interpreter."""
    end = time.monotonic() + JOIN_WITHIN
    queues = list(_queues)
    for queue in queues:
        queue.close("this process has left the job")
    for queue in queues:
        queue.join(end - time.monotonic())


lifecycle.at_end(lifecycle.End.QUEUES, _end_all)
