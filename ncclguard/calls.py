"""One guarded call: its checked arguments, its description and fingerprint, and the way to the guard."""

from __future__ import annotations

import hashlib
import itertools
import math
import numbers
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from ncclguard import _torch, runtime
from ncclguard.agreement.decision import EVERYBODY, NOBODY
from ncclguard.chunking import ChunkPlan, plan
from ncclguard.config import GuardConfig, current_config
from ncclguard.execution import Barrier, Execution
from ncclguard.faults.fault import Alteration
from ncclguard.faults.injection import before_operation
from ncclguard.guard import Guard
from ncclguard.metrics import exchange
from ncclguard.metrics.settings import adjusted
from ncclguard.outcome import OF_THE_WHOLE, Outcome
from ncclguard.phases import current_place, resolve_timeout
from ncclguard.request import Request
from ncclguard.transport.base import Kind

Time = float | timedelta | None
OnLost = Literal["fail", "shrink"] | None
Atomic = bool | Literal["require"] | None
EMPTY, ONE = plan(0), plan(1)
_NO_SHAPE = torch.Size()
_CPU = torch.device("cpu")


class Call:
    """What all collectives share: the group, the settings, the budget, and the way to the guard.

    `solo` when there is nobody to communicate with: no process group, or a group of one.
    """

    def __init__(
        self,
        op: str,
        group: ProcessGroup | None,
        timeout: Time,
        numel: int,
        max_attempts: int | None,
        on_lost: OnLost,
        name: str | None,
    ) -> None:
        self.op = op
        self._group = _checked_group(group)
        self.config: GuardConfig = current_config()
        if adjusted and self._group is not None:  # a group of this job has changed settings while it ran
            self.config = exchange.config_of(_torch.group_name(self._group), self.config)
        self._deadline = time.monotonic() + resolve_timeout(timeout, numel, self.config)
        self._max_attempts = _checked_attempts(max_attempts, self.config)
        self._shrink = _checked_on_lost(on_lost, self.config) == "shrink"
        self._name = _checked_name(name)
        self.ranks: tuple[int, ...] = (0,) if self._group is None else _torch.group_ranks(self._group)
        self.solo = len(self.ranks) == 1

    def check(self, kind: Kind, tensor: torch.Tensor, op: str | None = None, atomic: Atomic = None) -> None:
        """Raise for a dtype or reduce op that the backend cannot carry, and for an `atomic` that `on_lost` excludes."""
        if not _checked_atomic(atomic, self.config) and self._shrink:
            raise ValueError(
                'atomic=False and on_lost="shrink" contradict each other: the survivors start again from their inputs, which '
                "atomic=False does not keep; change one of the two, argument or setting"
            )
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "a guarded collective blocks the host and cannot be captured in a CUDA graph: call it outside"
            )
        device = tensor.device
        if self.solo and device.type != "cuda":  # nothing is carried, so any device will do
            device = torch.device("cpu")
        _check_supported(device, kind, tensor.dtype, op)

    def check_length(self, values: Sequence[Any], what: str) -> None:
        """Raise when a list has not one entry for each rank of the group."""
        if len(values) != len(self.ranks):
            raise ValueError(
                f"{what} has {len(values)} entries, the group has {len(self.ranks)} ranks: give one for each"
            )

    def member(self, rank: int) -> int:
        """Return `rank` if it is a global rank of the group, else raise."""
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"src must be a global rank, not {type(rank).__name__}")
        if rank not in self.ranks:
            raise ValueError(f"src {rank} is not a global rank of the group, which has {list(self.ranks)[:16]}")
        return rank

    def plan(self, numel: int, chunk_numel: float | None, element_size: int) -> ChunkPlan:
        """How the tensor is cut: argument, else setting, else by size."""
        chosen = self.config.chunk_numel if chunk_numel is None else _checked_chunk(chunk_numel)
        return plan(numel, chosen, element_size)

    def alone(self, nbytes: int, numel: int) -> Outcome:
        """A successful no-op."""
        return Outcome(
            ok=True, agreed=True, op=self.op, op_id="", cause=None, culprits=(), attempts=1, chunks=0, numel=numel,
            nbytes=nbytes, seconds=0.0, algbw=0.0, busbw=0.0, participants=self.ranks, torn=False, incident=None,
        )  # fmt: skip

    def run(
        self,
        work: Execution,
        tensor: torch.Tensor | None,
        detail: str,
        key: tuple[object, ...],
        atomic: Atomic = None,
        *,
        needs: int = NOBODY,
        lane: str = "",
        ranks: tuple[int, ...] | None = None,
    ) -> Outcome:
        """Describe the operation and hand it to the guard; `key` is what must be equal on all ranks besides the tensor.

        `lane` and `ranks`: see `Runtime.guard`.
        """
        shape, dtype, device, numel, nbytes = _NO_SHAPE, None, _CPU, 0, 0
        if tensor is not None:
            shape, dtype, device = tensor.shape, tensor.dtype, tensor.device
            numel = tensor.numel() * (len(self.ranks) if self.op in OF_THE_WHOLE else 1)
            nbytes = numel * tensor.element_size()
        assert self._group is not None
        request = _request(
            self.op, detail, dtype, shape, key, (work.pieces, work.plan.longest), self._shrink,
            self._max_attempts, self._name, current_place(), _checked_atomic(atomic, self.config), numel, nbytes, needs,
        )  # fmt: skip
        guard = runtime.current(self._deadline - time.monotonic()).guard(self._group, device, lane, ranks)
        if guard.device != device:
            raise ValueError(
                f"the tensor is on {device}, the first operation of this group was on {guard.device}, and a group's communicator serves "
                f"one device of a process: move the tensor there, or use another group (new_group) for {device}"
            )
        alteration = before_operation(guard.rank, guard.calls)
        if alteration is not None:
            return self._drill(alteration, guard, work, request)
        return guard.run(work, request, self._deadline - time.monotonic())

    def _drill(self, alteration: Alteration, guard: Guard, work: Execution, request: Request) -> Outcome:
        """An injected fault wants another call than the peers' here: one less, one more, or
        with another fingerprint.
        """
        if alteration is Alteration.SKIP:
            guard.calls += 1
            return self.alone(request.nbytes, request.numel)
        if alteration is Alteration.EXTRA:
            work = Barrier(EMPTY)
            request = replace(request, op="barrier", text="barrier(), one more by an injected fault", fingerprint=1)
        else:
            text = f"{request.text} with {alteration.value} by an injected fault"
            request = replace(request, text=text, fingerprint=request.fingerprint ^ 1)
        return guard.run(work, request, self._deadline - time.monotonic())


@lru_cache(maxsize=256)
def _check_supported(device: torch.device, kind: Kind, dtype: torch.dtype, op: str | None) -> None:
    """Remembers what was found in order; what is refused raises each time."""
    runtime.builder(device).check_supported(kind, dtype, op and getattr(ReduceOp, op))


@lru_cache(maxsize=4096)
def _request(
    op: str,
    detail: str,
    dtype: torch.dtype | None,
    shape: torch.Size,
    key: tuple[object, ...],
    cut: tuple[int, int],
    shrink: bool,
    max_attempts: int,
    name: str | None,
    phase: str | None,
    atomic: bool | str,
    numel: int,
    nbytes: int,
    needs: int,
) -> Request:
    """Programs make the same few calls over and over, so what describes one is made once."""
    return Request(
        op=op,
        text=_text(op, detail, name, phase),
        fingerprint=_fingerprint(op, dtype, shape, key, cut, shrink, max_attempts, name, phase),
        max_attempts=max_attempts,
        shrink=shrink and needs != EVERYBODY,
        atomic=atomic,
        numel=numel,
        nbytes=nbytes,
        needs=needs,
    )


def _fingerprint(*parts: object) -> int:
    """A 63-bit hash that is the same in every process; never the salted `hash()`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def _text(op: str, detail: str, name: str | None, phase: str | None) -> str:
    """The operation for people: all_reduce(float32[1000], SUM, name='loss', phase='eval')."""
    parts = [detail] if detail else []
    parts += [f"{key}={value!r}" for key, value in (("name", name), ("phase", phase)) if value is not None]
    return f"{op}({', '.join(parts)})"


def describe(tensor: torch.Tensor) -> str:
    return _described(tensor.dtype, tensor.shape)


@lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------- bad input, refused before anything is sent


def _checked_group(group: ProcessGroup | None) -> ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError(
                "a group was given, but torch.distributed is not initialised: call init_process_group first"
            )
        return None
    chosen: Any = dist.group.WORLD if group is None else group
    if chosen is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group that was given: call guarded collectives on its members only"
        )
    if not isinstance(chosen, ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(chosen).__name__}")
    if not _torch.is_member(chosen):
        raise ValueError("the process group was destroyed: create it again with new_group() or init_process_group()")
    return chosen


def check_tensor(tensor: object, what: str, written: bool = False) -> None:
    """Raise for what is no dense tensor; if it is to be `written`, also for one whose elements share memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.is_nested:
        raise ValueError(f"{what} is a nested tensor: guarded collectives take dense tensors only; pad it first")
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{what} is {tensor.layout}: guarded collectives take dense tensors only; call to_dense() first"
        )
    if tensor.is_meta:
        raise ValueError(f"{what} is a meta tensor without memory: materialise it first")
    if written and _overlaps(tensor):
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, so several of its elements share memory (expand, "
            "unfold) and cannot hold a result each: pass a clone()"
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements have the same address. Sees every overlap within two
    dimensions, which is what expand and unfold make.
    """
    if tensor.is_contiguous():
        return False
    dimensions = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    if any(stride == 0 for stride, _ in dimensions):
        return True
    for (one, ones), (other, others) in itertools.combinations(dimensions, 2):
        both = math.lcm(one, other)  # the first address that steps along either dimension meet at
        if both // one < ones and both // other < others:
            return True
    return False


def check_list(tensors: object, like: torch.Tensor, what: str, written: bool = False) -> None:
    if not isinstance(tensors, Sequence) or isinstance(tensors, torch.Tensor):
        raise TypeError(f"{what} must be a list of tensors, not {type(tensors).__name__}")
    for index, tensor in enumerate(tensors):
        check_tensor(tensor, f"{what}[{index}]", written)
        if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.device != like.device:
            raise ValueError(
                f"{what}[{index}] is {describe(tensor)} on {tensor.device}, but {describe(like)} on {like.device} is needed"
            )


def check_objects(values: object) -> None:
    if not isinstance(values, list):
        raise TypeError(f"object_list must be a list, which is written into, not {type(values).__name__}")


def _checked_chunk(value: object) -> int:
    """People write 5e7 and 50_000_000."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"chunk_numel must be a number of elements, not {type(value).__name__}: give for example 5e7")
    if not isinstance(value, numbers.Integral) and not float(value).is_integer():
        raise ValueError(f"chunk_numel must be a whole number of elements, got {value}: give for example 5e7")
    return int(cast("int", value))


def _checked_attempts(value: int | None, config: GuardConfig) -> int:
    if value is None:
        return config.max_attempts
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_attempts must be a whole number, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"max_attempts must be at least 1, got {value}")
    return value


def _checked_on_lost(value: str | None, config: GuardConfig) -> str:
    if value is None:
        return config.on_lost
    if value not in ("fail", "shrink"):
        raise ValueError(f'on_lost must be "fail" or "shrink", got {value!r}')
    return value


def _checked_atomic(value: Atomic, config: GuardConfig) -> bool | str:
    if value is None:
        return config.atomic
    if value not in (True, False, "require"):
        raise ValueError(f'atomic must be True, False or "require", got {value!r}')
    return value


def _checked_name(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, not {type(name).__name__}")
    return name


def pickled(obj: Any) -> torch.Tensor:
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # whatever an object's own reduction raises
        raise ValueError(f"the object cannot be pickled ({error}): send plain data instead") from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
