"""Collectives that C++ code calls.

They arrive at torch's operators, which hand them to the guarded group where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ncclguard import lifecycle
from ncclguard.torch_compat.groups import (
    Hook,
    backend_has,
    backend_of,
    boxed_work,
    group_of,
    options,
    reduce_op_of,
    tells_reduce_op,
)

Route = Callable[[dist.ProcessGroup], Any]


class Operator(NamedTuple):
    """An operator of torch's: the backend's method for it, and the arguments around its process group.

    `tensors`: how many come before the group, outputs first, which `returns_tensors` says to return beside the work;
    `options`: the type of the method's options object; `fields`: the fields of it that come behind the group, before
    whether the call is asynchronous, and its timeout.
    """

    method: str
    options: str = ""
    fields: tuple[str, ...] = ()
    tensors: int = 1
    returns_tensors: bool = False


class Kernels:
    """Kernels for torch's operators, one for each.

    `route(group)`: the guarded group for it, or None: then it goes on to the group's own backend.

    Two operators, the coalesced forms into one tensor, are left alone: their backend's side cannot be reached from
    Python.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._hook: Hook | None = None

    def install(self, *names: str) -> None:
        """Take the place of torch's kernels: of all, or of those with these names."""
        if self._hook is None:
            found = {
                name: partial(self._collective, operator) if operator.options else getattr(self, name)
                for name, operator in OPERATORS.items()
                if (not names or name in names)
                and backend_has(operator.method)
                # Else it stays torch's, for plain groups too, which would fail otherwise.
                and ("reduceOp" not in operator.fields or tells_reduce_op())
            }
            self._hook = Hook(found)

    def remove(self) -> None:
        """Torch's kernels are in force again."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _target(self, group: Any, tensors: Any) -> Any:
        unboxed = group_of(group)
        guarded = self._route(unboxed)
        if guarded is not None:
            return guarded
        tensor = first_tensor([tensors])
        assert tensor is not None  # torch has found the kernel by its device
        return backend_of(unboxed, tensor.device)

    def _collective(self, operator: Operator, *given: Any) -> Any:
        """Have a collective carried out by the backend's method that takes its tensors and an options object."""
        tensors, group, rest = given[: operator.tensors], given[operator.tensors], given[operator.tensors + 1 :]
        asked = _asked(operator.options, **dict(zip((*operator.fields, "asyncOp", "timeout"), rest)))
        work = boxed_work(getattr(self._target(group, tensors), operator.method)(*tensors, asked))
        return (tensors[0], work) if operator.returns_tensors else work

    # Named like the operators, with their arguments; torch leaves trailing defaults out.

    def alltoall_base_(
        self,
        output: Any,
        tensor: Any,
        group: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        asynchronous: bool = True,
        ms: int = -1,
    ) -> Any:
        asked = _asked("AllToAll", asyncOp=asynchronous, timeout=ms)
        target = self._target(group, tensor)
        return boxed_work(target.alltoall_base(output, tensor, list(output_splits), list(input_splits), asked))

    def barrier(self, tensor: Any, group: Any, devices: Sequence[int], asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("Barrier", asyncOp=asynchronous, timeout=ms, device_ids=list(devices))
        return boxed_work(self._target(group, tensor).barrier(asked))

    def monitored_barrier_(self, tensor: Any, group: Any, devices: Any, ms: int, wait_all_ranks: bool) -> None:
        self._target(group, tensor).monitored_barrier(timedelta(milliseconds=ms), wait_all_ranks)

    def send(self, tensors: Any, group: Any, peer: int, tag: int) -> Any:
        return boxed_work(self._target(group, tensors).send(tensors, peer, tag))

    def recv_(self, tensors: Any, group: Any, peer: int, tag: int) -> Any:
        return boxed_work(self._target(group, tensors).recv(tensors, peer, tag))

    def recv_any_source_(self, tensors: Any, group: Any, tag: int) -> Any:
        return boxed_work(self._target(group, tensors).recv_anysource(tensors, tag))


#: The operators by name; those without options have a kernel of their own above.
OPERATORS = {
    "allreduce_": Operator("allreduce", "Allreduce", ("reduceOp", "sparseIndices"), returns_tensors=True),
    "allreduce_coalesced_": Operator("allreduce_coalesced", "AllreduceCoalesced", ("reduceOp",)),
    "reduce_": Operator("reduce", "Reduce", ("reduceOp", "rootRank", "rootTensor")),
    "broadcast_": Operator("broadcast", "Broadcast", ("rootRank", "rootTensor"), returns_tensors=True),
    "allgather_": Operator("allgather", "Allgather", tensors=2, returns_tensors=True),
    "_allgather_base_": Operator("_allgather_base", "Allgather", tensors=2, returns_tensors=True),
    "allgather_coalesced_": Operator("allgather_coalesced", "Allgather", tensors=2),
    "reduce_scatter_": Operator("reduce_scatter", "ReduceScatter", ("reduceOp",), 2, returns_tensors=True),
    "_reduce_scatter_base_": Operator("_reduce_scatter_base", "ReduceScatter", ("reduceOp",), 2, returns_tensors=True),
    "gather_": Operator("gather", "Gather", ("rootRank",), 2),
    "scatter_": Operator("scatter", "Scatter", ("rootRank",), 2, returns_tensors=True),
    "alltoall_": Operator("alltoall", "AllToAll", tensors=2, returns_tensors=True),
    "alltoall_base_": Operator("alltoall_base"),
    "barrier": Operator("barrier"),
    "monitored_barrier_": Operator("monitored_barrier"),
    "send": Operator("send"),
    "recv_": Operator("recv"),
    "recv_any_source_": Operator("recv_anysource"),
}

#: Operators that a process group in Python cannot meet by a method of its own, because torch's trampolines lack them.
WITHOUT_TRAMPOLINE = (
    "reduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_coalesced_",
    "gather_",
    "scatter_",
    "alltoall_",
)


def serve_cpp_callers() -> None:
    """Have C++ callers reach guarded groups with collectives that torch's trampolines lack, while the job lasts."""
    _for_guarded.install(*WITHOUT_TRAMPOLINE)


_for_guarded = Kernels(lambda group: None)  # a guarded group says that it is its own backend
lifecycle.at_end(lifecycle.End.QUEUES, _for_guarded.remove)


def _asked(kind: str, asyncOp: bool = True, timeout: int = -1, **fields: Any) -> Any:
    """Make an options object; `timeout` in milliseconds."""
    asked = options(kind)
    asked.timeout = timedelta(milliseconds=timeout)
    if hasattr(asked, "asyncOp"):
        asked.asyncOp = asyncOp
    for name, value in fields.items():
        if value is not None:
            setattr(asked, name, reduce_op_of(value) if name == "reduceOp" else value)
    return asked


def first_tensor(values: Any) -> torch.Tensor | None:
    """Return the first tensor among the arguments of a collective, of which lists may be empty."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_tensor(value)
            if found is not None:
                return found
    return None
