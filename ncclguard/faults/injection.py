"""Arms faults in a rank and lets them strike when that rank enters the operation they are meant for."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ncclguard.errors import GuardConfigError
from ncclguard.faults import drill_recorder, effects
from ncclguard.faults.fault import PERMISSION, VARIABLE, Alteration, Fault, parse

log = logging.getLogger("ncclguard")

_lock = threading.Lock()
_armed: tuple[Fault, ...] | None = None  # None, and not an empty tuple, so that a look costs one comparison


def at(*, rank: int, op: int, fault: str, **how: Any) -> Fault:
    """Arm a fault: at rank 2's operation 3, be late by 5 seconds. It strikes once; call this on any rank, or on all.

    Operations are counted from 0, in each group for itself; the first that fits is struck. Faults and what they take:

    - ``late`` (seconds): sleeps before it enters the operation
    - ``kill`` (children, after, after_bytes): SIGKILL; ``children`` forked before keep its sockets open
    - ``stop`` (seconds, after, after_bytes): SIGSTOP, and SIGCONT after ``seconds``
    - ``gil`` (seconds, after, after_bytes): a C call that holds the GIL
    - ``exception``: raises InjectedFault; ``oom``: raises torch.OutOfMemoryError
    - ``exit`` (code): ends the program normally, early
    - ``mismatch`` (of="shape" or "dtype"), ``skip``, ``extra``: another call than the peers', none, or one more
    - ``reset`` (times, after, after_bytes): resets the process's connections, but those to the store
    - ``partition`` (seconds, after, after_bytes): drops all that its connections send and receive, the store's too, in
      silence

    ``raw=True``: ``op`` counts the collectives of the default process group instead, whoever issues them (DDP, FSDP,
    DeepSpeed). The fault then strikes from outside, so not in the call: all but ``mismatch``, ``skip`` and ``extra``
    can.

    Raises GuardConfigError for a fault or a combination that cannot be.

    >>> from ncclguard import faults
    >>> str(faults.at(rank=2, op=3, fault="late", seconds=5))
    'late@rank=2,op=3,seconds=5'
    >>> faults.disarm()
    """
    try:
        made = Fault(fault=fault, rank=rank, op=op, **how)
    except TypeError as error:  # an unknown keyword
        raise GuardConfigError(f"{error}; see help(ncclguard.faults.at)") from None
    _arm((made,))
    return made


def from_environment(environ: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """Arm the faults that NCCLGUARD_FAULT names, so that an unmodified program can be drilled; returns them.

    Refused with GuardConfigError unless NCCLGUARD_ALLOW_DRILL is 1: a variable left in a shell must not break a run.

    >>> from ncclguard import faults
    >>> faults.from_environment({})
    ()
    """
    text = environ.get(VARIABLE)
    if text is None:
        return ()
    if environ.get(PERMISSION) != "1":
        raise GuardConfigError(
            f"{VARIABLE} is set to {text!r}, which would break this job, and {PERMISSION} is not 1; "
            f"set {PERMISSION}=1 for a drill, or unset {VARIABLE}"
        )
    found = parse(text)
    _arm(found)
    drill_recorder.start()
    return found


def disarm() -> None:
    """Forget every fault that has not struck yet."""
    global _armed
    with _lock:
        _armed = None


def armed() -> tuple[Fault, ...]:
    """The faults that have not struck yet."""
    return _armed or ()


def before_operation(rank: int, sequence: int) -> Alteration | None:
    """Let the faults strike that are armed for this rank and operation; called on entering each guarded operation.

    Costs one comparison when none is armed. Returns what the caller must do to its call itself.
    """
    if _armed is None:
        return None
    return _strike_all(rank, sequence)


def _arm(faults: tuple[Fault, ...]) -> None:
    global _armed
    with _lock:
        _armed = (*(_armed or ()), *(fault for fault in faults if not fault.raw)) or None
    for fault in faults:
        if fault.raw:
            # No daemon thread: it would be inside torch's C++ when the interpreter ends.
            threading.Thread(target=_follow, args=(fault,), name=f"ncclguard drill {fault}").start()


def _strike_all(rank: int, sequence: int) -> Alteration | None:
    global _armed
    with _lock:
        struck = [fault for fault in _armed or () if (fault.rank, fault.op) == (rank, sequence)]
        _armed = tuple(fault for fault in _armed or () if fault not in struck) or None
    alteration = None
    for fault in struck:
        _say(fault)
        alteration = _strike(fault) or alteration
    return alteration


def _strike(fault: Fault) -> Alteration | None:
    if fault.after or fault.after_bytes:
        threading.Thread(target=_strike_later, args=(fault,), name=f"ncclguard drill {fault}", daemon=True).start()
    elif fault.fault == "late":
        effects.late(fault.seconds or 0.0)
    elif fault.fault == "exception":
        raise effects.InjectedFault(f"injected fault: {fault}")
    elif fault.fault == "exit":
        sys.exit(fault.code)
    elif fault.fault == "oom":
        effects.run_out_of_memory()
    elif fault.fault == "mismatch":
        return Alteration.OTHER_SHAPE if fault.of == "shape" else Alteration.OTHER_DTYPE
    elif fault.fault in ("skip", "extra"):
        return Alteration(fault.fault)
    else:
        _strike_process(fault)
    return None


def _strike_later(fault: Fault) -> None:
    """In a thread of its own: wait for the moment in mid-operation, then strike."""
    time.sleep(fault.after)
    for _ in range(fault.times):
        if fault.after_bytes:
            effects.wait_for_traffic(fault.after_bytes)
        _strike_process(fault)


def _strike_process(fault: Fault) -> None:
    if fault.fault == "kill":
        effects.kill(fault.children)
    elif fault.fault == "stop":
        effects.stop(fault.seconds)
    elif fault.fault == "gil":
        effects.hold_gil(fault.seconds or 0.0)
    elif fault.fault == "partition":
        effects.cut_off(fault.seconds or 0.0)
    else:
        log.warning("injected fault: %d connections reset", effects.reset_own_connections())


# A raw fault strikes a rank by the number of collectives that torch has counted in the default group, whoever issues
# them. For jobs under `watch`: ncclguard is not in the way of such a collective, so a thread looks at the sequence
# number of the group and strikes from outside. What only the main thread can do, that thread is made to do between two
# of its bytecodes.

_callbacks: list[object] = []  # kept alive, because C code holds them


def _in_main_thread(action: Callable[[], object]) -> None:
    """Have the main thread do this; it does not while it is in a C call."""

    def call(_: object) -> int:
        action()
        return 0

    callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
    _callbacks.append(callback)
    ctypes.pythonapi.Py_AddPendingCall(callback, None)


def _raise_in_main_thread(error: BaseException) -> None:
    """Raise this in the main thread; asynchronous exceptions are classes, so this one is made to need no arguments."""
    kind = type(error)
    members = {
        "__init__": lambda self: kind.__init__(self, *error.args),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made = type(kind.__name__, (kind,), members)
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(made))


def _follow(fault: Fault) -> None:
    """Strike in the struck rank once its default group has issued `fault.op` collectives; at once if it has."""
    if not drill_recorder.wait_for_collectives(fault.op) or dist.get_rank() != fault.rank:
        return
    if fault.fault == "late":
        _in_main_thread(lambda: _be_late(fault))
        return
    _say(fault)
    if fault.fault == "exception":
        _raise_in_main_thread(effects.InjectedFault(f"injected fault: {fault}"))
    elif fault.fault == "oom":
        _raise_in_main_thread(effects.out_of_memory())
    elif fault.fault == "exit":
        _raise_in_main_thread(SystemExit(fault.code))
    else:
        _strike(fault)


def _be_late(fault: Fault) -> None:
    _say(fault)
    effects.late(fault.seconds or 0.0)


def _say(fault: Fault) -> None:
    log.warning("injected fault on rank %d: %s", fault.rank, fault)
    drill_recorder.event("struck", rank=fault.rank, fault=str(fault))
