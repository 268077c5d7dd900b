"""Strikes a rank by the number of collectives that torch has counted in the default group, whoever issues them.

For jobs under `watch`: nothing of ours is in the way of such a collective, so a thread looks at the group's sequence
number and strikes from outside. What only the main thread can do, it is made to do between two of its bytecodes.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import torch.distributed as dist

from ncclguard import _torch
from ncclguard.faults import effects, record
from ncclguard.faults.fault import Fault

log = logging.getLogger("ncclguard")

_PAUSE: Final = 0.001  # seconds between two looks at the sequence number
_kept: list[object] = []  # callbacks that C code holds


def follow(fault: Fault, strike: Callable[[Fault], object]) -> None:
    """Call `strike` in the struck rank once its default group has issued `fault.op` collectives; at once if it has."""
    # No daemon: it would be inside torch's C++ when the interpreter ends.
    threading.Thread(target=_follow, args=(fault, strike), name=f"ncclguard drill {fault}").start()


def when_more(issued: int, then: Callable[[], object]) -> None:
    """Call `then` in a thread once more than `issued` collectives have been issued in the default group."""
    threading.Thread(target=lambda: _wait_for(issued + 1) and then(), name="ncclguard drill progress").start()


def issued() -> int:
    """The collectives that this process has issued in the default group; 0 where there is none."""
    group = dist.group.WORLD
    try:
        return 0 if group is None else _torch.sequence_number(group) or 0
    except (RuntimeError, ValueError):  # destroyed meanwhile
        return 0


def in_main_thread(action: Callable[[], object]) -> None:
    """Have the main thread do this; it does not while it is in a C call."""

    def call(_: object) -> int:
        action()
        return 0

    callback = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)
    _kept.append(callback)
    ctypes.pythonapi.Py_AddPendingCall(callback, None)


def raise_in_main_thread(error: BaseException) -> None:
    """Raise this in the main thread; an asynchronous exception is given as a class, so
    one is made that needs no arguments.
    """
    kind = type(error)
    members = {
        "__init__": lambda self: kind.__init__(self, *error.args),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    made = type(kind.__name__, (kind,), members)
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(made))


def _follow(fault: Fault, strike: Callable[[Fault], object]) -> None:
    if not _wait_for(fault.op):
        return
    if dist.get_rank() != fault.rank:
        return
    if fault.fault == "late":
        in_main_thread(lambda: _be_late(fault))
        return
    _say(fault)
    if fault.fault == "exception":
        raise_in_main_thread(effects.InjectedFault(f"injected fault: {fault}"))
    elif fault.fault == "oom":
        raise_in_main_thread(effects.out_of_memory())
    elif fault.fault == "exit":
        raise_in_main_thread(SystemExit(fault.code))
    else:
        strike(fault)


def _be_late(fault: Fault) -> None:
    _say(fault)
    effects.late(fault.seconds or 0.0)


def _say(fault: Fault) -> None:
    log.warning("injected fault on rank %d: %s", fault.rank, fault)
    record.event("struck", rank=fault.rank, fault=str(fault))


def _wait_for(number: int) -> bool:
    """Whether so many were issued before the program ended."""
    while threading.main_thread().is_alive():
        found = issued()
        record.count(found)
        if dist.is_initialized() and found >= number:
            return True
        time.sleep(_PAUSE)
    return False
