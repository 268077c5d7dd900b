"""The error of an aborted collective, raised in the thread that waits for it on the host.

On NCCL a thread waits in ``torch.cuda.synchronize()``, ``item()`` or a copy, which knows of no collective: an abort
ends the kernel, and the wait returns as after a success, with a tensor that was never reduced (torch 2.13 and 2.15).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable

from ncclguard.errors import CollectiveFailed, error_for
from ncclguard.incident.model import Incident
from ncclguard.outcome import Outcome


def interrupt(threads: Iterable[int], incident: Incident, seconds: float) -> None:
    """Have the typed error of an incident raised in threads, by ``threading.get_ident()``, and in the main thread.

    Where one sits in a native call it is raised as soon as that returns. Threads that are not Python's are left out.
    """
    error = _error_without_arguments(incident, seconds)
    living = {thread.ident for thread in threading.enumerate()}
    for thread in {threading.main_thread().ident or 0, *threads} & living:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _error_without_arguments(incident: Incident, seconds: float) -> type[CollectiveFailed]:
    """A class of its own, because CPython makes the instance of such an exception by itself."""
    outcome = Outcome(
        ok=False,
        agreed=incident.agreed,
        op=incident.op,
        op_id=incident.op_id,
        cause=incident.cause,
        culprits=incident.culprits,
        attempts=1,
        chunks=0,
        numel=0,
        nbytes=0,
        seconds=seconds,
        algbw=0.0,
        busbw=0.0,
        participants=(),
        torn=True,
        incident=incident,
    )
    kind = type(error_for(outcome))

    def make(self: CollectiveFailed) -> None:
        kind.__init__(self, outcome)

    names = {"__init__": make, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "ended_by_watch": True}
    return type(kind.__name__, (kind,), names)
