"""One guarded call: what the program asks for, checked before anything is sent, and what it is for the ranks.

`Terms` say where, how long and how often; `Call` is what the group, the protocol and the outcome need to know.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import numbers
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch.distributed import ProcessGroup

from ncclguard import lifecycle, torch_compat
from ncclguard.config import GuardConfig, checked_attempts, current_config
from ncclguard.engine.chunking import ChunkPlan, plan
from ncclguard.engine.table import Arguments, Collective
from ncclguard.groups import group_of, is_outside
from ncclguard.metrics.settings import adjusted, config_of
from ncclguard.phases import resolve_timeout
from ncclguard.protocol.decision import EVERYBODY, Operation
from ncclguard_explain.language import joined, say, told, tr

Time = float | timedelta | None
OnLost = Literal["fail", "shrink"] | None
Atomic = bool | Literal["require"] | None
_NO_SHAPE = torch.Size()
_CPU = torch.device("cpu")


class Terms(NamedTuple):
    """The place of a call and its limits: checked, with settings in the place of what was not given.

    `group` is None without a process group. `ranks`: its global ranks, of which `rank` is this one. `deadline`: by
    time.monotonic(). `shrink`: the call may go on without ranks that are lost. `atomic`: True, False or "require".
    `solo`: there is nobody to communicate with. One call may take several operations, such as sizes and then data: all
    of them have these terms.
    """

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    rank: int
    config: GuardConfig
    deadline: float
    max_attempts: int
    shrink: bool
    atomic: bool | str
    name: str | None
    solo: bool

    def plan(self, numel: int, chunk_numel: float | None, element_size: int) -> ChunkPlan:
        """Decide how a tensor is cut: as the caller says, else as the settings say, else by size."""
        chosen = self.config.chunk_numel if chunk_numel is None else _checked_chunk(chunk_numel)
        return plan(numel, chosen, element_size)

    def member(self, rank: int, what: str) -> int:
        """Return `rank` if it is a global rank of the group, else raise; `what`: the argument it was given as."""
        if isinstance(rank, bool) or not isinstance(rank, int):
            needed = tr("{name} must be a global rank, not {kind}", name=what, kind=type(rank).__name__)
            meant = tr("give a number")
            if isinstance(rank, ProcessGroup):
                meant = tr("give a number, and the group by its name, group=...")
            raise TypeError(say(joined(": ", (needed, meant))))
        if rank not in self.ranks:
            some = list(self.ranks)[:16]
            text = told(
                "{name} {rank} is not a global rank of the group, which has {some}", name=what, rank=rank, some=some
            )
            raise ValueError(text)
        return rank

    def check_length(self, values: Sequence[Any], what: str) -> None:
        """Raise when a list has not one entry for each rank of the group."""
        if len(values) != len(self.ranks):
            text = told(
                "{name} has {count} entries, the group has {number} ranks: give one for each",
                name=what,
                count=len(values),
                number=len(self.ranks),
            )
            raise ValueError(text)


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of call, as the group, the protocol and the outcome need it; equal calls are one object.

    `nbytes` and `numel` are counted as nccl-tests count. `operation`: what the ranks compare and agree on, without its
    place in the group's sequence.
    """

    op: str
    numel: int
    nbytes: int
    atomic: bool | str
    operation: Operation

    @property
    def text(self) -> str:
        """The call for people: all_reduce(float32[1000], SUM, name='loss', phase='eval')."""
        return self.operation.text


def terms_of(
    group: ProcessGroup | None,
    timeout: Time,
    numel: int,
    *,
    max_attempts: int | None = None,
    atomic: Atomic = None,
    on_lost: OnLost = None,
    name: str | None = None,
) -> Terms:
    """Check what all collectives have in common; raises TypeError or ValueError.

    `numel`: elements that the call moves, by which its limit goes where none is set.
    """
    chosen = group_of(group)
    config = current_config()
    if adjusted and chosen is not None:  # a group of this job has changed settings while it ran
        config = config_of(torch_compat.group_name(chosen), config)
    deadline = time.monotonic() + resolve_timeout(timeout, numel, config)
    attempts = config.max_attempts if max_attempts is None else checked_attempts(max_attempts)
    shrink = _checked_on_lost(on_lost, config) == "shrink"
    kept = _checked_atomic(atomic, config)
    if shrink and not kept:
        text = told(
            'atomic=False and on_lost="shrink" contradict each other: the survivors start again from their inputs, '
            "which atomic=False does not keep; change one of the two, argument or setting"
        )
        raise ValueError(text)
    ranks: tuple[int, ...] = (0,)
    rank = 0
    if chosen is not None:
        ranks = torch_compat.group_ranks(chosen)
        rank = ranks[chosen.rank()]
    solo = len(ranks) == 1 or (lifecycle.is_joining() and chosen is not None and not is_outside(chosen))
    return Terms(chosen, ranks, rank, config, deadline, attempts, shrink, kept, _checked_name(name), solo)


@lru_cache(maxsize=4096)
def described(
    collective: Collective,
    op: str,
    root: int,
    detail: str | None,
    key: tuple[object, ...] | None,
    dtype: torch.dtype | None,
    shape: torch.Size,
    pieces: int,
    longest: int,
    closing: bool,
    shrink: bool,
    max_attempts: int,
    name: str | None,
    phase: str | None,
    atomic: bool | str,
    numel: int,
    element: int,
) -> Call:
    """Return what describes a call; programs make the same few calls over and over, so it is made once."""
    arguments = Arguments(op=op, root=root)
    needs = collective.awaited(arguments)
    if detail is None:
        tensor = "" if dtype is None else _described(dtype, shape)
        detail = ", ".join(filter(None, (tensor, collective.detail(arguments))))
    if key is None:
        key = collective.key(arguments)
    parts = [detail] if detail else []
    parts += [f"{word}={value!r}" for word, value in (("name", name), ("phase", phase)) if value is not None]
    operation = Operation(
        sequence=0,
        fingerprint=_fingerprint(
            collective.name, dtype, shape, key, (pieces, longest), shrink, max_attempts, name, phase
        ),
        text=f"{collective.name}({', '.join(parts)})",
        closing=closing,
        shrink=shrink and needs != EVERYBODY,
        needs=needs,
        max_attempts=max_attempts,
    )
    return Call(collective.name, numel, numel * element, atomic, operation)


def _fingerprint(*parts: object) -> int:
    """A 63-bit hash that is the same in every process; never the salted `hash()`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def describe(tensor: torch.Tensor) -> str:
    """A tensor for people: float32[1000, 3]."""
    return _described(tensor.dtype, tensor.shape)


@lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------- bad input, refused before anything is sent


def check_tensor(tensor: object, what: str, written: bool = False) -> None:
    """Raise for what is no dense tensor; if it is to be `written`, also for one whose elements share memory."""
    if not isinstance(tensor, torch.Tensor):
        text = told(
            "{name} must be a torch.Tensor, not {kind}: give torch.tensor(...) of numbers, and one call to each of several "
            "tensors",
            name=what,
            kind=type(tensor).__name__,
        )
        raise TypeError(text)
    if tensor.is_nested:
        refusal = told(
            "{name} is a nested tensor: guarded collectives take dense tensors only; pad it first", name=what
        )
        raise ValueError(refusal)
    if tensor.layout is not torch.strided:
        text = told(
            "{name} is {kind}: guarded collectives take dense tensors only; call to_dense() first",
            name=what,
            kind=tensor.layout,
        )
        raise ValueError(text)
    if tensor.is_meta:
        raise ValueError(told("{name} is a meta tensor without memory: materialise it first", name=what))
    if written and _overlaps(tensor):
        text = told(
            "{name} of shape {shape} has strides {strides}, so several of its elements share memory (expand, unfold) and "
            "cannot hold a result each: pass a clone()",
            name=what,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )
        raise ValueError(text)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements have the same address; sees every overlap within two dimensions."""
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
        text = told(
            "{name} must be a list of tensors, not {kind}: give one for each rank of the group",
            name=what,
            kind=type(tensors).__name__,
        )
        raise TypeError(text)
    for index, tensor in enumerate(tensors):
        check_tensor(tensor, f"{what}[{index}]", written)
        if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.device != like.device:
            text = told(
                "{name} is {this} on {here}, but {that} on {there} is needed",
                name=f"{what}[{index}]",
                this=describe(tensor),
                here=tensor.device,
                that=describe(like),
                there=like.device,
            )
            raise ValueError(text)
    if written and like.numel() and len({tensor.data_ptr() for tensor in tensors}) < len(tensors):
        text = told(
            "{name} has the same memory more than once, as in [tensor] * {count}, and cannot hold a result for each "
            "rank: make a tensor for each, [torch.empty_like(tensor) for _ in range(world_size)]",
            name=what,
            count=len(tensors),
        )
        raise ValueError(text)


def check_objects(values: object) -> None:
    if not isinstance(values, list):
        text = told("object_list must be a list, which is written into, not {kind}", kind=type(values).__name__)
        raise TypeError(text)


def _checked_chunk(value: object) -> int:
    """People write 5e7 and 50_000_000."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        text = told(
            "chunk_numel must be a number of elements, not {kind}: give for example 5e7", kind=type(value).__name__
        )
        raise TypeError(text)
    if not isinstance(value, numbers.Integral) and not float(value).is_integer():
        refusal = told("chunk_numel must be a whole number of elements, got {value}: give for example 5e7", value=value)
        raise ValueError(refusal)
    return int(cast("int", value))


def _checked_on_lost(value: str | None, config: GuardConfig) -> str:
    if value is None:
        return config.on_lost
    if value not in ("fail", "shrink"):
        text = told(
            'on_lost must be "fail" or "shrink", got {value}: "fail" ends the call where a rank is lost, "shrink" goes on '
            "without it",
            value=repr(value),
        )
        raise ValueError(text)
    return value


def _checked_atomic(value: Atomic, config: GuardConfig) -> bool | str:
    if value is None:
        return config.atomic
    if value not in (True, False, "require"):
        raise ValueError(told('atomic must be True, False or "require", got {value}', value=repr(value)))
    return value


def _checked_name(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(told("name must be a string, not {kind}", kind=type(name).__name__))
    return name


def pickled(obj: Any) -> torch.Tensor:
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # whatever an object's own reduction raises
        text = told("the object cannot be pickled ({error}): send plain data instead", error=error)
        raise ValueError(text) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
