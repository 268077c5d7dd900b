"""Collectives that C++ code calls.

They arrive at torch's operators, which hand them to the guarded group where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

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
            found = {name: getattr(self, name) for name, method in OPERATORS.items() if backend_has(method)}
            if not tells_reduce_op():  # then these stay torch's, for plain groups too, which would fail otherwise
                found = {name: kernel for name, kernel in found.items() if name not in REDUCING}
            self._hook = Hook({name: kernel for name, kernel in found.items() if not names or name in names})

    def remove(self) -> None:
        """Torch's kernels are in force again."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _target(self, group: Any, tensor: torch.Tensor) -> Any:
        unboxed = group_of(group)
        guarded = self._route(unboxed)
        return backend_of(unboxed, tensor.device) if guarded is None else guarded

    # Named like the operators, with their arguments; torch leaves trailing defaults out.

    def allreduce_(
        self, tensors: Any, group: Any, op: Any, sparse: Any = None, asynchronous: bool = True, ms: int = -1
    ) -> Any:
        asked = _asked("Allreduce", asynchronous, ms, reduceOp=reduce_op_of(op))
        if sparse is not None:
            asked.sparseIndices = sparse
        return tensors, boxed_work(self._target(group, tensors[0]).allreduce(tensors, asked))

    def allreduce_coalesced_(self, tensors: Any, group: Any, op: Any, asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("AllreduceCoalesced", asynchronous, ms, reduceOp=reduce_op_of(op))
        return boxed_work(self._target(group, tensors[0]).allreduce_coalesced(tensors, asked))

    def reduce_(
        self, tensors: Any, group: Any, op: Any, root: int, root_tensor: int, asynchronous: bool = True, ms: int = -1
    ) -> Any:
        asked = _asked("Reduce", asynchronous, ms, reduceOp=reduce_op_of(op), rootRank=root, rootTensor=root_tensor)
        return boxed_work(self._target(group, tensors[0]).reduce(tensors, asked))

    def broadcast_(
        self, tensors: Any, group: Any, root: int, root_tensor: int, asynchronous: bool = True, ms: int = -1
    ) -> Any:
        asked = _asked("Broadcast", asynchronous, ms, rootRank=root, rootTensor=root_tensor)
        return tensors, boxed_work(self._target(group, tensors[0]).broadcast(tensors, asked))

    def allgather_(self, outputs: Any, inputs: Any, group: Any, asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("Allgather", asynchronous, ms)
        return outputs, boxed_work(self._target(group, inputs[0]).allgather(outputs, inputs, asked))

    def _allgather_base_(self, output: Any, tensor: Any, group: Any, asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("Allgather", asynchronous, ms)
        return output, boxed_work(self._target(group, tensor)._allgather_base(output, tensor, asked))

    def allgather_coalesced_(self, outputs: Any, inputs: Any, group: Any, asynchronous: bool = True) -> Any:
        asked = _asked("Allgather", asynchronous, -1)
        return boxed_work(self._target(group, inputs[0]).allgather_coalesced(outputs, inputs, asked))

    def reduce_scatter_(
        self, outputs: Any, inputs: Any, group: Any, op: Any, asynchronous: bool = True, ms: int = -1
    ) -> Any:
        asked = _asked("ReduceScatter", asynchronous, ms, reduceOp=reduce_op_of(op))
        return outputs, boxed_work(self._target(group, outputs[0]).reduce_scatter(outputs, inputs, asked))

    def _reduce_scatter_base_(
        self, output: Any, tensor: Any, group: Any, op: Any, asynchronous: bool = True, ms: int = -1
    ) -> Any:
        asked = _asked("ReduceScatter", asynchronous, ms, reduceOp=reduce_op_of(op))
        return output, boxed_work(self._target(group, tensor)._reduce_scatter_base(output, tensor, asked))

    def gather_(self, outputs: Any, inputs: Any, group: Any, root: int, asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("Gather", asynchronous, ms, rootRank=root)
        return boxed_work(self._target(group, inputs[0]).gather(outputs, inputs, asked))

    def scatter_(
        self, outputs: Any, inputs: Any, group: Any, root: int, asynchronous: bool = True, ms: int = -1
    ) -> Any:
        asked = _asked("Scatter", asynchronous, ms, rootRank=root)
        return outputs, boxed_work(self._target(group, outputs[0]).scatter(outputs, inputs, asked))

    def alltoall_(self, outputs: Any, inputs: Any, group: Any, asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("AllToAll", asynchronous, ms)
        return outputs, boxed_work(self._target(group, inputs[0]).alltoall(outputs, inputs, asked))

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
        asked = _asked("AllToAll", asynchronous, ms)
        target = self._target(group, tensor)
        return boxed_work(target.alltoall_base(output, tensor, list(output_splits), list(input_splits), asked))

    def barrier(self, tensor: Any, group: Any, devices: Sequence[int], asynchronous: bool = True, ms: int = -1) -> Any:
        asked = _asked("Barrier", asynchronous, ms, device_ids=list(devices))
        return boxed_work(self._target(group, tensor).barrier(asked))

    def monitored_barrier_(self, tensor: Any, group: Any, devices: Any, ms: int, wait_all_ranks: bool) -> None:
        self._target(group, tensor).monitored_barrier(timedelta(milliseconds=ms), wait_all_ranks)

    def send(self, tensors: Any, group: Any, peer: int, tag: int) -> Any:
        return boxed_work(self._target(group, tensors[0]).send(tensors, peer, tag))

    def recv_(self, tensors: Any, group: Any, peer: int, tag: int) -> Any:
        return boxed_work(self._target(group, tensors[0]).recv(tensors, peer, tag))

    def recv_any_source_(self, tensors: Any, group: Any, tag: int) -> Any:
        return boxed_work(self._target(group, tensors[0]).recv_anysource(tensors, tag))


#: Operator -> the method of a backend that carries it out.
OPERATORS = {
    "allreduce_": "allreduce",
    "allreduce_coalesced_": "allreduce_coalesced",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "allgather",
    "_allgather_base_": "_allgather_base",
    "allgather_coalesced_": "allgather_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "_reduce_scatter_base",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "alltoall",
    "alltoall_base_": "alltoall_base",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv_anysource",
}

#: Those of them that are given a reduce op.
REDUCING = frozenset({"allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_"})

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
    """Have C++ callers reach guarded groups also with the collectives that torch's trampolines lack.

    It lasts until the job is left.
    """
    _for_guarded.install(*WITHOUT_TRAMPOLINE)


_for_guarded = Kernels(lambda group: None)  # a guarded group says that it is its own backend
lifecycle.at_end(lifecycle.End.QUEUES, _for_guarded.remove)


def _asked(kind: str, asynchronous: bool, ms: int, **fields: Any) -> Any:
    asked = options(kind)
    asked.timeout = timedelta(milliseconds=ms)
    if hasattr(asked, "asyncOp"):
        asked.asyncOp = asynchronous
    for name, value in fields.items():
        setattr(asked, name, value)
    return asked
