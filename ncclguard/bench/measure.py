"""Timing: inputs with known results, and all variants in turn on the same buffers, behind a barrier."""

from __future__ import annotations

import datetime
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard.bench.arguments import BenchError
from ncclguard.bench.ranks import Heartbeat
from ncclguard.engine.table import bus_factor
from ncclguard.outcome import Outcome

_BLOCK = 1 << 20  # elements written or compared at a time: a few MB, so no full-size temporary
_LARGEST_MODULUS = 251  # prime: pieces, pages and vectors never line up with the pattern


def largest_exact(dtype: torch.dtype) -> int:
    """Return the largest n such that `dtype` holds every whole number from 0 to n.

    Example:
        >>> largest_exact(torch.bfloat16), largest_exact(torch.float32), largest_exact(torch.int8)
        (256, 16777216, 127)
    """
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


@dataclass(frozen=True, slots=True)
class Pattern:
    """Rank r holds `(position + salt) % modulus + 1 + r % spread`: another value on each rank and beside each element.

    All are whole numbers above 0 and their sum over the ranks is at most `largest_exact(dtype)`: every partial sum is
    exact in any order, the result can be compared bit by bit, and no rank's input is right anywhere as a result.
    """

    dtype: torch.dtype
    world_size: int
    modulus: int
    spread: int

    @property
    def rank_sum(self) -> int:
        return _rank_sum(self.world_size, self.spread)


class Blocks:
    """The pattern's values for a flat tensor of `numel` elements on one device, one block at a time.

    A block laid end to end covers the tensor: its length is a whole number of periods of the pattern.
    """

    def __init__(self, pattern: Pattern, numel: int, device: torch.device) -> None:
        self._pattern = pattern
        self._length = pattern.modulus * max(1, min(_BLOCK, numel) // pattern.modulus)
        # One period longer than a block: another salt is then another place to start in it.
        positions = torch.arange(self._length + pattern.modulus, device=device)
        self._phase = (positions % pattern.modulus + 1).to(pattern.dtype)

    def contribution(self, rank: int, salt: int) -> torch.Tensor:
        return self._shifted(salt) + rank % self._pattern.spread

    def total(self, salt: int) -> torch.Tensor:
        return self._shifted(salt) * self._pattern.world_size + self._pattern.rank_sum

    def _shifted(self, salt: int) -> torch.Tensor:
        start = salt % self._pattern.modulus
        return self._phase[start : start + self._length]


def choose_pattern(dtype: torch.dtype, world_size: int) -> Pattern:
    """Return the pattern with the most different values whose sum over `world_size` ranks is exact in `dtype`.

    Raises:
        ValueError: so many ranks that not even two values per position fit.
    """
    limit = largest_exact(dtype) - 1  # so that adding one, which spoils a result beforehand, gives another value
    spread = world_size
    while spread > 1 and _rank_sum(world_size, spread) > limit // 2:
        spread //= 2
    modulus = min(_LARGEST_MODULUS, (limit - _rank_sum(world_size, spread)) // world_size)
    if modulus < 2:
        raise ValueError(
            f"the sum over {world_size} ranks is not exact in {str(dtype).removeprefix('torch.')}, which counts in "
            f"ones only up to {limit + 1}; use --dtype float32."
        )
    return Pattern(dtype, world_size, modulus, spread)


def fill(flat: torch.Tensor, block: torch.Tensor) -> None:
    """Lay `block` end to end over the one-dimensional tensor `flat`."""
    for start in range(0, flat.numel(), block.numel()):
        piece = flat[start : start + block.numel()]
        piece.copy_(block[: piece.numel()])


def count_wrong(flat: torch.Tensor, block: torch.Tensor) -> int:
    """Return how many elements of `flat` differ from `block` laid end to end; NaN always differs."""
    wrong = 0
    for start in range(0, flat.numel(), block.numel()):
        piece = flat[start : start + block.numel()]
        expected = block[: piece.numel()]
        if not torch.equal(piece, expected):
            wrong += int(torch.count_nonzero(piece != expected).item())
    return wrong


def _rank_sum(world_size: int, spread: int) -> int:
    whole, rest = divmod(world_size, spread)
    return whole * (spread * (spread - 1) // 2) + rest * (rest - 1) // 2


_SLOT_BYTES = 1 << 20  # small operations run back to back on as many buffers as fit in this
_MOST_SLOTS = 32
SOURCE = 0  # the rank that broadcasts


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of one call: `numel` elements in the larger of its send and receive side, on `world_size` ranks."""

    op: str
    numel: int
    dtype: torch.dtype
    world_size: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        return bus_factor(self.op, self.world_size)

    @property
    def slots(self) -> int:
        """Buffers, and so calls back to back, per timed batch: 1 from half a MiB up."""
        return max(1, min(_MOST_SLOTS, _SLOT_BYTES // max(1, self.nbytes)))


def shape_for(op: str, numel: int, dtype: torch.dtype, world_size: int) -> Shape:
    """Return the shape nearest to `numel`: what is scattered or gathered is rounded up to equal parts for all ranks."""
    if op in ("all_gather", "reduce_scatter"):
        numel = -(-numel // world_size) * world_size
    return Shape(op, numel, dtype, world_size)


class Workload(ABC):
    """Buffers of one operation on one rank, for `slots` calls back to back."""

    checked = 0  # elements of the result that are checked after one batch

    def __init__(self, shape: Shape, slots: int, rank: int, device: torch.device, timeout: float) -> None:
        self.shape, self.slots, self.rank, self.device, self.timeout = shape, slots, rank, device, timeout

    @abstractmethod
    def fill(self, salt: int) -> None:
        """Write the inputs, and spoil what the result must overwrite."""

    @abstractmethod
    def plain(self, slot: int) -> None:
        """The call of torch.distributed; it may return before the device is done."""

    @abstractmethod
    def guarded(self, slot: int, atomic: bool, group: dist.ProcessGroup | None) -> Outcome:
        """The guarded call; returns its outcome."""

    @abstractmethod
    def count_wrong(self, salt: int) -> int:
        """Return how many elements of the result are wrong, over all slots."""


class _Elements(Workload):
    """The base of operations that move elements: the pattern's blocks, and flat tensors cut into slots.

    `whole` says whether the reduced or sent tensor is the whole operation or one rank's part of it.
    """

    whole = True

    def __init__(self, shape: Shape, slots: int, rank: int, device: torch.device, timeout: float) -> None:
        super().__init__(shape, slots, rank, device, timeout)
        self.length = (shape.numel if self.whole else shape.numel // shape.world_size) * slots
        self.blocks = Blocks(choose_pattern(shape.dtype, shape.world_size), self.length, device)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.length, dtype=self.shape.dtype, device=self.device)

    def slot(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        length = self.length // self.slots
        return flat[index * length : (index + 1) * length]


class AllReduce(_Elements):
    def __init__(self, shape: Shape, slots: int, rank: int, device: torch.device, timeout: float) -> None:
        super().__init__(shape, slots, rank, device, timeout)
        self.data = self.empty()
        self.checked = self.length

    def fill(self, salt: int) -> None:
        fill(self.data, self.blocks.contribution(self.rank, salt))

    def plain(self, slot: int) -> None:
        dist.all_reduce(self.slot(self.data, slot))

    def guarded(self, slot: int, atomic: bool, group: dist.ProcessGroup | None) -> Outcome:
        return ng.safe_all_reduce(self.slot(self.data, slot), group=group, atomic=atomic, timeout=self.timeout)

    def count_wrong(self, salt: int) -> int:
        return count_wrong(self.data, self.blocks.total(salt))


class Broadcast(_Elements):
    def __init__(self, shape: Shape, slots: int, rank: int, device: torch.device, timeout: float) -> None:
        super().__init__(shape, slots, rank, device, timeout)
        self.data = self.empty()
        self.checked = self.length

    def fill(self, salt: int) -> None:
        sent = self.blocks.contribution(SOURCE, salt)
        fill(self.data, sent if self.rank == SOURCE else sent + 1)

    def plain(self, slot: int) -> None:
        dist.broadcast(self.slot(self.data, slot), SOURCE)

    def guarded(self, slot: int, atomic: bool, group: dist.ProcessGroup | None) -> Outcome:
        return ng.safe_broadcast(self.slot(self.data, slot), SOURCE, group=group, atomic=atomic, timeout=self.timeout)

    def count_wrong(self, salt: int) -> int:
        return count_wrong(self.data, self.blocks.contribution(SOURCE, salt))


class AllGather(_Elements):
    whole = False

    def __init__(self, shape: Shape, slots: int, rank: int, device: torch.device, timeout: float) -> None:
        super().__init__(shape, slots, rank, device, timeout)
        self.mine = self.empty()
        self.gathered = [self.empty() for _ in range(shape.world_size)]
        self.checked = self.length * shape.world_size

    def fill(self, salt: int) -> None:
        fill(self.mine, self.blocks.contribution(self.rank, salt))
        for source, part in enumerate(self.gathered):
            fill(part, self.blocks.contribution(source, salt) + 1)

    def plain(self, slot: int) -> None:
        dist.all_gather([self.slot(part, slot) for part in self.gathered], self.slot(self.mine, slot))

    def guarded(self, slot: int, atomic: bool, group: dist.ProcessGroup | None) -> Outcome:
        outputs = [self.slot(part, slot) for part in self.gathered]
        mine = self.slot(self.mine, slot)
        return ng.safe_all_gather(outputs, mine, group=group, atomic=atomic, timeout=self.timeout)

    def count_wrong(self, salt: int) -> int:
        parts = enumerate(self.gathered)
        return sum(count_wrong(part, self.blocks.contribution(source, salt)) for source, part in parts)


class ReduceScatter(_Elements):
    whole = False

    def __init__(self, shape: Shape, slots: int, rank: int, device: torch.device, timeout: float) -> None:
        super().__init__(shape, slots, rank, device, timeout)
        self.parts = [self.empty() for _ in range(shape.world_size)]
        self.reduced = self.empty()
        self.checked = self.length

    def fill(self, salt: int) -> None:
        for target, part in enumerate(self.parts):
            fill(part, self.blocks.contribution(self.rank, salt + target))  # a part that goes to the wrong rank is seen
        fill(self.reduced, self.blocks.total(salt + self.rank) + 1)

    def plain(self, slot: int) -> None:
        dist.reduce_scatter(self.slot(self.reduced, slot), [self.slot(part, slot) for part in self.parts])

    def guarded(self, slot: int, atomic: bool, group: dist.ProcessGroup | None) -> Outcome:
        inputs = [self.slot(part, slot) for part in self.parts]
        reduced = self.slot(self.reduced, slot)
        return ng.safe_reduce_scatter(reduced, inputs, group=group, atomic=atomic, timeout=self.timeout)

    def count_wrong(self, salt: int) -> int:
        return count_wrong(self.reduced, self.blocks.total(salt + self.rank))


class Barrier(Workload):
    def fill(self, salt: int) -> None:
        """A barrier has no data."""

    def plain(self, slot: int) -> None:
        dist.barrier()

    def guarded(self, slot: int, atomic: bool, group: dist.ProcessGroup | None) -> Outcome:
        return ng.safe_barrier(group=group, timeout=self.timeout)

    def count_wrong(self, salt: int) -> int:
        return 0


WORKLOADS: dict[str, type[Workload]] = {
    "all_reduce": AllReduce,
    "broadcast": Broadcast,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "barrier": Barrier,
}


class Wish(IntEnum):
    """The wish of a rank for the next cycle; the strongest wish of all ranks counts."""

    GO_ON = 0
    ENOUGH = 1  # takes effect between two cycles
    STOP = 2  # Ctrl-C: takes effect before the next call


class Control:
    """A gloo group beside those that are compared, so that neither slows the other down or breaks it."""

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.interrupted = False
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        self._heartbeat = Heartbeat()
        self._wish = torch.zeros(1, dtype=torch.int64)

    def beat(self) -> None:
        """Show that this rank moves on, in a step that may take long."""
        self._heartbeat.beat()

    def align(self, wish: Wish = Wish.GO_ON) -> tuple[float, Wish]:
        """Wait for all ranks; return the seconds that took here, and the strongest wish."""
        self.beat()
        self._wish.fill_(int(Wish.STOP if self.interrupted else wish))
        started = time.perf_counter()
        dist.all_reduce(self._wish, dist.ReduceOp.MAX, group=self._group)
        return time.perf_counter() - started, Wish(int(self._wish.item()))

    def gather(self, mine: object) -> list[Any]:
        """Return the objects of all ranks, in rank order, on all ranks."""
        self.beat()
        everybody: list[Any] = [None] * self.size
        dist.all_gather_object(everybody, mine, group=self._group)
        return everybody

    def agree_to_start(self, objection: str | None) -> None:
        """Raise a BenchError on all ranks if one of them objects.

        Raises:
            BenchError: on every rank, with the objection of the lowest rank that has one.
        """
        raise_first(self.gather(objection))

    def catch_signals(self) -> None:
        """Turn SIGINT and SIGTERM into a wish to stop, so that all ranks leave together and print what there is."""

        def note(number: int, frame: FrameType | None) -> None:
            self.interrupted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)


def raise_first(objections: Sequence[str | None]) -> None:
    """Raise a BenchError with the objection of the lowest rank, if any rank has one."""
    for rank, text in enumerate(objections):
        if text is not None:
            raise BenchError(text if rank == 0 else f"rank {rank}: {text}")


Array = npt.NDArray[np.float64]

LEAST_CYCLES = 5
MOST_CYCLES = 200
_LONG_NBYTES = 1 << 26  # from here on one warm-up cycle is enough: a cold start is short against the call


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to call the operation: plain torch, or guarded with or without a copy of the input."""

    name: str
    guarded: bool
    atomic: bool


PLAIN = Variant("plain", guarded=False, atomic=False)


def variants_for(op: str, atomics: Sequence[bool]) -> tuple[Variant, ...]:
    """Return the variants to compare, plain first. A barrier has no tensor, so nothing to copy."""
    if op == "barrier":
        return (PLAIN, Variant("guarded", guarded=True, atomic=False))
    return (PLAIN, *(Variant(f"guarded atomic={atomic}", guarded=True, atomic=atomic) for atomic in atomics))


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of cycles: `warmup` untimed ones, then `cycles` timed ones, or as many as fit in `seconds`."""

    slots: int
    warmup: int
    cycles: int | None
    seconds: float

    @property
    def most(self) -> int:
        return MOST_CYCLES if self.cycles is None else self.cycles


def plan_for(nbytes: int, slots: int, iters: int | None, warmup: int | None, seconds: float) -> Plan:
    """Cycles for at least `iters` calls per variant; without it by time, at least `LEAST_CYCLES`."""
    if warmup is None:
        warmup = 1 if nbytes >= _LONG_NBYTES else 3
    if iters is None:
        return Plan(slots, warmup, None, seconds)
    slots = min(slots, max(1, iters // LEAST_CYCLES))  # several cycles, so that the ratio has a spread
    return Plan(slots, warmup, -(-iters // slots), seconds)


class GuardedCallFailed(Exception):
    """A guarded call of a healthy job returned a failed outcome; the bench ends with it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(str(outcome.incident or outcome))
        self.outcome = outcome


@dataclass(slots=True)
class Samples:
    """The measurements of one rank for one variant. Only whole cycles of all variants are kept."""

    durations: list[list[float]] = field(default_factory=list)  # seconds: cycles x calls back to back
    waits: list[float] = field(default_factory=list)  # seconds in the barrier before each cycle
    wrong: int = 0
    checked: int = 0

    def duration_array(self) -> Array:
        return np.asarray(self.durations, dtype=np.float64)


def measure(
    workload: Workload,
    variants: Sequence[Variant],
    plan: Plan,
    control: Control,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[float], None] = lambda part: None,
) -> tuple[dict[str, Samples], bool]:
    """Run `plan` on this rank; return the samples by variant name, and whether Ctrl-C cut it short.

    `advance` is called with the part of the work that is done, from 0 to 1.

    Raises:
        GuardedCallFailed: a guarded call failed, with its outcome.
        RuntimeError: a plain call failed, as torch raises it.
    """
    samples = {variant.name: Samples() for variant in variants}
    started = time.perf_counter()
    for cycle in range(-plan.warmup, plan.most):
        if cycle == 0:
            started = time.perf_counter()
        spent = time.perf_counter() - started
        enough = plan.cycles is None and cycle >= LEAST_CYCLES and spent >= plan.seconds and control.rank == 0
        _, wish = control.align(Wish.ENOUGH if enough else Wish.GO_ON)
        if wish is Wish.ENOUGH:
            break
        order = variants if cycle % 2 == 0 else tuple(reversed(variants))
        found = None if wish is Wish.STOP else _cycle(workload, order, cycle + plan.warmup, control, group)
        if found is None:
            return samples, True
        if cycle >= 0:
            for name, (durations, wait, wrong) in found.items():
                kept = samples[name]
                kept.durations.append(durations)
                kept.waits.append(wait)
                kept.wrong += wrong
                kept.checked += workload.checked
            by_count, by_time = (cycle + 1) / plan.most, (time.perf_counter() - started) / plan.seconds
            by_time = min(by_time, (cycle + 1) / LEAST_CYCLES)
            advance(min(1.0, by_count if plan.cycles is not None else max(by_count, by_time)))
    return samples, False


def _cycle(
    workload: Workload, order: Sequence[Variant], salt: int, control: Control, group: dist.ProcessGroup | None
) -> dict[str, tuple[list[float], float, int]] | None:
    """Run each variant once: fill, wait for all ranks, time the calls, check. None when the ranks agreed to stop."""
    found: dict[str, tuple[list[float], float, int]] = {}
    for variant in order:
        workload.fill(salt)
        _synchronize(workload.device)
        wait, wish = control.align()
        if wish is Wish.STOP:
            return None
        durations = _timed(workload, variant, group)
        control.beat()
        found[variant.name] = (durations, wait, workload.count_wrong(salt))
    return found


def _timed(workload: Workload, variant: Variant, group: dist.ProcessGroup | None) -> list[float]:
    durations: list[float] = []
    for slot in range(workload.slots):
        started = time.perf_counter()
        if variant.guarded:
            outcome = workload.guarded(slot, variant.atomic, group)
            if not outcome:
                raise GuardedCallFailed(outcome)
        else:
            workload.plain(slot)
        _synchronize(workload.device)
        durations.append(time.perf_counter() - started)
    return durations


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
