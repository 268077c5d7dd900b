"""Every hook of this process, and the order of its end.

A process begins to take part with `init_process_group` and ends in one of these ways, each of which the others in the
job have to hear of: `destroy_process_group`, the end of the program, an uncaught exception, SIGTERM, or the end of a
process that `multiprocessing` started. No other module registers hooks with Python or the operating system; those
around torch's `init_process_group` and `destroy_process_group` go through `torch_compat.on_init` and its siblings.

At the end of the interpreter, in this order:

1. the callbacks of `before_end`, the last first: the last snapshot of monitoring, the watchdog of time limits, the
   last line of a drill. These stand before the exit handlers of packages that were imported before, such as a sink's.
2. `End.JOB`: this rank says goodbye, the monitor ends, the guarded groups are closed.
3. `End.QUEUES`: the threads that run asynchronous collectives, which have been ended by then; torch's own kernels.
4. `End.TRANSPORT`: connections and communicators that are still there.
5. `End.CALLS`: calls into C++ that were given up are released and waited for. A thread that comes back from C++ into an
   interpreter that is being torn down would end the process with SIGABRT.

`destroy_process_group` does 2 and 3 only. A forked child has none of the threads and takes no part in the job: it runs
the callbacks of `in_child`, in the order of registration.

SIGTERM: a Python handler runs only between two bytecodes of the main thread, which may sit in a C call for minutes;
without more, catching SIGTERM would keep a process alive that the signal used to end at once. So the signal is noticed
by a thread of its own, through the descriptor that CPython's C handler writes to (`signal.set_wakeup_fd`), and that
thread ends the process by SIGTERM's default action. A program that has a handler of its own keeps it, and nothing is
announced then: such programs often go on for a while.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import logging
import math
import multiprocessing.process
import multiprocessing.util
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from types import FrameType, TracebackType
from typing import Final

from ncclguard import frames
from ncclguard.incident.stacks import describe_exception
from ncclguard_explain.language import told, tr

_log = logging.getLogger("ncclguard")


class End(IntEnum):
    """The stages of the end of the interpreter, in their order."""

    JOB = 1
    QUEUES = 2
    TRANSPORT = 3
    CALLS = 4


_at_end: list[tuple[End, Callable[[], None]]] = []
_before_fork: list[Callable[[], None]] = []
_after_fork: list[Callable[[], None]] = []
_in_child: list[Callable[[], None]] = []


#: Set by `ncclguard run` for a process that takes a lost rank's place, to the number of processes that had it before.
JOINS: Final = "NCCLGUARD_JOINS"
#: Set by `ncclguard run` for its ranks: the folder for their words to it.
RUN_FOLDER: Final = "NCCLGUARD_RUN_DIR"
_joined = False
_goes_on = False


def is_joining() -> bool:
    """Return whether this process is to take a lost rank's place in a running job and has not done so yet.

    Till then the others are in other collectives, so its own are carried out as if it were alone.
    """
    return not _joined and bool(os.environ.get(JOINS))


def joined() -> None:
    """Note that the other ranks have taken this process into the job."""
    global _joined
    _joined = True


def going_on() -> None:
    """Note that `resilient_step` goes on in this process when other ranks are lost."""
    global _goes_on
    _goes_on = True


def goes_on() -> bool:
    """Return whether this process goes on when other ranks are lost: a launcher without this folder ends it then."""
    return _goes_on and bool(os.environ.get(RUN_FOLDER))


def at_end(stage: End, callback: Callable[[], None]) -> None:
    """Call `callback()` at this stage of the end of the interpreter."""
    _at_end.append((stage, callback))
    _at_end.sort(key=lambda entry: entry[0])  # stable: within a stage in the order of registration


def before_end(callback: Callable[[], object]) -> None:
    """Call `callback()` before all stages, and before exit handlers that exist already."""
    atexit.register(callback)


def forget(callback: Callable[[], object]) -> None:
    """Drop a callback of `before_end`."""
    atexit.unregister(callback)


def reach(*stages: End) -> None:
    """Run the callbacks of these stages now: in `destroy_process_group`, or where no exit handlers run."""
    _run([callback for stage, callback in _at_end if stage in stages])


def around_fork(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before()` in a process that forks, and `after()` in it once it has."""
    _before_fork.append(before)
    _after_fork.append(after)


def in_child(callback: Callable[[], None]) -> None:
    """Call `callback()` in every forked child, where locks that other threads held stay locked for good."""
    _in_child.append(callback)


def _run(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # noqa: BLE001 - the process is ending, and the next callback matters as much
            _log.exception(
                "ncclguard: %s",
                told("{what} failed and was skipped; the process goes on to its end", "log", what=callback),
            )


atexit.register(lambda: _run([callback for _, callback in _at_end]))
os.register_at_fork(
    before=lambda: _run(_before_fork[::-1]),
    after_in_parent=lambda: _run(_after_fork),
    after_in_child=lambda: _run(_in_child),
)

around_fork(frames.hold, frames.let_go)
in_child(frames.let_go)

# ---------------------------------------------------------------------- SIGTERM

#: Seconds that SIGTERM's default action has to end the process; after them `_exit` does, with the shell's code for it.
_GRACE: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


class Termination:
    """Calls `tell` when SIGTERM is about to end this process, then lets it end.

    Only `install` in the main thread has an effect.

    `tell` runs in a thread that is neither the main nor the monitor's; it must end by itself within a few seconds.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._ours = self._handle  # one object: a bound method is a new one each time
        self._begun = _thread.allocate_lock()
        self._writer: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._installed = False
        self._masks = threading.local()  # signal masks of the threads that are forking

    def install(self) -> bool:
        """Take SIGTERM over; return False outside the main thread, or where its action is not the default."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return False
        signal.signal(signal.SIGTERM, self._ours)
        self._installed = True
        with contextlib.suppress(OSError):  # no descriptors left: the handler alone has to do
            self._listen()
        return True

    def uninstall(self) -> None:
        """Give SIGTERM back; a handler that the program has put there since stays."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) is self._ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._close()
        if self._listener is not None:
            self._listener.join(1.0)  # at once, unless it is about to end this process
            self._listener = None

    def forget_in_child(self) -> None:
        """Restore SIGTERM's default action in a forked child, such as a data loader's worker.

        The child must end by SIGTERM as ever, and must not wake the parent's thread.
        """
        if self._installed:
            self._installed = False
            if signal.getsignal(signal.SIGTERM) is self._ours:
                _default_action()
                with contextlib.suppress(ValueError):  # forked from another thread than the main one
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._close()
        self.after_fork()

    def before_fork(self) -> None:
        """Hold SIGTERM back in the thread that forks: Python forgets what reaches a child before `forget_in_child`."""
        if self._installed:
            self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork(self) -> None:
        """Let SIGTERM through again, in the thread that has forked."""
        before = self._masks.__dict__.pop("before", None)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _listen(self) -> None:
        reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop has set one and keeps it; the handler alone has to do
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._writer = writer
        self._listener = threading.Thread(target=self._watch, args=(reader,), name="ncclguard-sigterm", daemon=True)
        self._listener.start()

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            while True:
                heard, extra, _, _ = reader.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
                if not heard:
                    return
                # From the fork until `forget_in_child`, a child writes to this socket too: its signals do not count.
                own = any(_CREDENTIALS.unpack(data)[0] == os.getpid() for _, _, data in extra)
                if own and signal.SIGINT in heard:
                    _note_interrupt()
                if own and signal.SIGTERM in heard and signal.getsignal(signal.SIGTERM) is self._ours:
                    self._end()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The main thread may hold any lock, so another thread does the work, started without Python's own locks. Where
        # a program's handler has replaced this one and calls it, it does nothing, like the default action.
        if signal.getsignal(signal.SIGTERM) is self._ours:
            with contextlib.suppress(RuntimeError):  # the program ends by itself: Python 3.12 starts no threads then
                _thread.start_new_thread(self._end, ())

    def _end(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._tell()
        finally:
            _default_action()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(_GRACE)
            os._exit(128 + signal.SIGTERM)

    def _close(self) -> None:
        """Give the descriptor back; the thread sees the end of its socket and ends."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        with contextlib.suppress(ValueError):  # not in the main thread
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, writer.fileno()):  # set by somebody else since
                signal.set_wakeup_fd(current)
        writer.close()


_interrupted = -math.inf  # time.monotonic()


def _note_interrupt() -> None:
    global _interrupted
    _interrupted = time.monotonic()


def since_interrupt() -> float:
    """Return the seconds since SIGINT has come, as far as it is listened for; the main thread may sit in a C call."""
    return time.monotonic() - _interrupted


def _default_action() -> None:
    """Restore SIGTERM's default action from any thread; `signal.signal` works in the main thread only."""
    function = ctypes.CDLL(None).signal
    function.argtypes, function.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    function(int(signal.SIGTERM), None)  # SIG_DFL is 0


#: The reason that a rank gives for its end when a launcher or a scheduler has asked for it.
SENT_SIGTERM = tr("was sent SIGTERM")

_dead_threads: list[str] = []


def dead_threads() -> str:
    """Describe the first three threads of this process that ended with an exception; "" for none."""
    return "; ".join(_dead_threads)


def watch_threads() -> None:
    """Note exceptions that end a thread: its program may wait for that thread, and its peers for the program."""
    previous = threading.excepthook

    def note(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and len(_dead_threads) < 3:
            name = arguments.thread.name if arguments.thread is not None else "a thread"
            error = describe_exception(arguments.exc_value)
            _dead_threads.append(tr("its thread {name!r} had ended with {exception}", name=name, exception=error))
        previous(arguments)

    threading.excepthook = note


def watch_uncaught(announce: Callable[[BaseException], None]) -> None:
    """Call `announce` with the exception that ends the program, before other threads and exit handlers keep it busy."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        announce(error)
        previous(kind, error, trace)

    sys.excepthook = hook


_raises: list[Callable[[], None]] = []  # called while the exception that ends a `multiprocessing` process is handled


def _note_what_ends_a_process() -> None:
    """Call `_raises` while an exception ends a process of `multiprocessing`.

    From Python 3.13 on, finalizers run too late to see that exception.
    """
    run = multiprocessing.process.BaseProcess.run

    @functools.wraps(run)
    def noted(process: multiprocessing.process.BaseProcess) -> None:
        try:
            run(process)
        except BaseException:
            _run(_raises)
            raise

    multiprocessing.process.BaseProcess.run = noted  # type: ignore[method-assign,assignment]


if sys.version_info >= (3, 13):
    _note_what_ends_a_process()


def watch_multiprocessing(announce: Callable[[BaseException], None]) -> None:
    """Do as `watch_uncaught` in a process that `multiprocessing` started, and then leave the job.

    Such a process ends without `sys.excepthook`, and a forked one without exit handlers.
    """

    def end() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            error = error.__context__  # torch.multiprocessing catches a rank's exception and raises SystemExit
        if isinstance(error, Exception):
            announce(error)
        reach(End.JOB, End.QUEUES)

    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, end, exitpriority=0)
        _raises.append(end)
