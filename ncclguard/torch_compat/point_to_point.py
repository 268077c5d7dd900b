"""Sends, receives and monitored barriers: torch's flight recorder of gloo has none, so they are noted in Python.

torch issues them from Python only, by three methods of `ProcessGroup`, and a program waits in `wait` of a work. These
methods are replaced by functions that call them: `torch.distributed.isend` and its siblings stay the objects that they
are, because `P2POp` and programs compare them. Ran on torch 2.8.0 and 2.13.0 (gloo).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from threading import get_ident
from typing import Any, Final

import torch
import torch.distributed as dist

Note = Callable[[dist.ProcessGroup, str, Sequence[Any], torch.Tensor, dist.Work], None]

#: The work that each thread is inside `wait` of, by `threading.get_ident()`; None after it.
_awaited: dict[int, dist.Work | None] = {}
_METHODS: Final = ("send", "recv", "recv_anysource")


def awaited_works() -> dict[int, dist.Work]:
    """Return, for each thread that waits for a work of torch, that work, by ``threading.get_ident()``."""
    return {thread: work for thread, work in tuple(_awaited.items()) if work is not None}


def note_monitored_barriers(entered: Callable[[dist.ProcessGroup], AbstractContextManager[None]]) -> None:
    """Have each monitored barrier of a group in the context that `entered(group)` returns; once for each process.

    A process group that is written in Python and has a method of its own is not seen.
    """
    kind: Any = dist.ProcessGroup  # whose stubs do not have the method
    original = kind.monitored_barrier
    if getattr(original, "_ncclguard_wrapped", False):
        return

    @functools.wraps(original)
    def monitored_barrier(self: Any, *args: Any, **kwargs: Any) -> None:
        with entered(self):
            original(self, *args, **kwargs)

    made: Any = monitored_barrier
    made._ncclguard_wrapped = True
    kind.monitored_barrier = made


def note_transfers(note: Note) -> None:
    """Call `note` with each send and receive of a CPU tensor after it was issued; once for each process.

    Its arguments: the group, the method's name, what was given behind the tensor (the peer's rank in the group, but not
    for "recv_anysource", and the tag), the tensor and the work. It must not raise, and is on every transfer's path. A
    process group that is written in Python and has methods of its own is not seen.
    """
    if getattr(dist.Work.wait, "_ncclguard_wrapped", False):
        return
    for name in _METHODS:
        setattr(dist.ProcessGroup, name, _noted(name, getattr(dist.ProcessGroup, name), note))
    dist.Work.wait = _noted_wait(dist.Work.wait)  # type: ignore[method-assign]


def _noted(name: str, original: Callable[..., Any], note: Note) -> Callable[..., Any]:
    given = 1 if name == "recv_anysource" else 2

    @functools.wraps(original)
    def issue(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, tensors, *args, **kwargs)
        if work is not None and len(args) == given and tensors[0].is_cpu:  # as torch calls it
            note(self, name, args, tensors[0], work)
        return work

    # pybind11 tells a method of a subclass that calls the one above it by this name.
    made: Any = issue
    made.__code__ = made.__code__.replace(co_name=name)
    made._ncclguard_wrapped = True
    return issue


def _noted_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    awaited, thread_of = _awaited, get_ident

    @functools.wraps(original)
    def wait(self: Any, timeout: timedelta | None = None) -> Any:
        thread = thread_of()
        awaited[thread] = self
        try:
            return original(self) if timeout is None else original(self, timeout)
        finally:
            awaited[thread] = None

    wait._ncclguard_wrapped = True  # type: ignore[attr-defined]
    return wait
