"""torch's private names for the operators behind a process group's methods; the others are in `_torch`.

Every method of `ProcessGroup` dispatches to an operator `c10d::...`, and C++ callers such as DDP's buffer broadcast, or
functional collectives, arrive there too. Ran on torch 2.13.0 and 2.15.0. Where a version lacks something nothing is
hooked: Python callers are met at the methods in any case.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c

_log = logging.getLogger("ncclguard")

_KEYS = ("CPU", "CUDA")
_SPARSE = ("SparseCPU", "SparseCUDA")
_hold_of = dist.ProcessGroup.barrier


def options(name: str) -> Any:
    """A new `name`Options object, such as "Allgather"."""
    return getattr(_c, f"{name}Options")()


def group_of(boxed: Any) -> dist.ProcessGroup:
    """The process group that an operator was given."""
    return _c.ProcessGroup.unbox(boxed)


def reduce_op_of(boxed: Any) -> dist.ReduceOp:
    """The reduce op that an operator was given."""
    return dist.ReduceOp(dist.ReduceOp.RedOpType(boxed.op()))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What an operator of torch's own hands its arguments to. Raises RuntimeError for a
    device the group does not serve.
    """
    return group._get_backend(device)


class _Holder(dist.ProcessGroup):
    """Makes torch wrap a Work of Python in one of C++ that keeps it alive: only its trampolines do."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]
        self.work: Any = None

    def barrier(self, *_: Any) -> Any:
        return self.work


def boxed_work(work: dist.Work) -> Any:
    """A work as an operator returns it. One that is written in Python stays alive for as long as C++ holds it."""
    if type(work).__module__.startswith("ncclguard"):
        holder = _Holder()
        holder.work = work
        work = _hold_of(holder)
    return work.boxed()


def backend_has(method: str) -> bool:
    """Whether a backend's method can be called from Python."""
    return hasattr(_c.Backend, method)


class Hook:
    """Kernels in the place of torch's own, until `remove`. `kernels`: by the operator's name without its namespace."""

    def __init__(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        library: Any = torch.library.Library  # untyped
        self._library: Any = library("c10d", "IMPL")  # noqa: TOR901 - ended by remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is replaced
            for name, kernel in kernels.items():
                if hasattr(torch.ops.c10d, name):
                    for key in (*_KEYS, *_SPARSE) if name == "allreduce_" else _KEYS:
                        self._library.impl(name, kernel, key)

    def remove(self) -> None:
        """Torch's own kernels again."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
