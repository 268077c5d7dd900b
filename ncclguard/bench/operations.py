"""What is timed: the input whose result is known exactly, and for each collective its buffers, calls and check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard.engine.table import bus_factor
from ncclguard.outcome import Outcome

_BLOCK = 1 << 20  # elements written or compared at a time: a few MB, so no full-size temporary
_LARGEST_MODULUS = 251  # prime: pieces, pages and vectors never line up with the pattern


def largest_exact(dtype: torch.dtype) -> int:
    """The largest n such that `dtype` holds every whole number from 0 to n.

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
        """Sum over the ranks of `rank % spread`."""
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
        """What `rank` puts in."""
        return self._shifted(salt) + rank % self._pattern.spread

    def total(self, salt: int) -> torch.Tensor:
        """The exact sum over all ranks."""
        return self._shifted(salt) * self._pattern.world_size + self._pattern.rank_sum

    def _shifted(self, salt: int) -> torch.Tensor:
        start = salt % self._pattern.modulus
        return self._phase[start : start + self._length]


def choose_pattern(dtype: torch.dtype, world_size: int) -> Pattern:
    """The pattern with the most different values whose sum over `world_size` ranks is exact in `dtype`.

    Raises:
        ValueError: so many ranks that not even two values per position fit.
    """
    limit = largest_exact(dtype) - 1  # so that "one more" is another value: that is how results are spoilt beforehand
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
    """How many elements of `flat` differ from `block` laid end to end; NaN always differs."""
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
    """What one call moves: `numel` elements in the larger of its send and receive side, on `world_size` ranks."""

    op: str
    numel: int
    dtype: torch.dtype
    world_size: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def bus_factor(self) -> float:
        """busbw / algbw."""
        return bus_factor(self.op, self.world_size)

    @property
    def slots(self) -> int:
        """Buffers, and so calls back to back, per timed batch: 1 from half a MiB up."""
        return max(1, min(_MOST_SLOTS, _SLOT_BYTES // max(1, self.nbytes)))


def shape_for(op: str, numel: int, dtype: torch.dtype, world_size: int) -> Shape:
    """The shape nearest to `numel`: what is scattered or gathered is rounded up to equal parts for all ranks."""
    if op in ("all_gather", "reduce_scatter"):
        numel = -(-numel // world_size) * world_size
    return Shape(op, numel, dtype, world_size)


class Workload(ABC):
    """Buffers of one operation on one rank, for `slots` calls back to back."""

    checked = 0  # elements of the result that one batch checks

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
        """The same through the guard."""

    @abstractmethod
    def count_wrong(self, salt: int) -> int:
        """Elements of the result that are not what they must be, over all slots."""


class _Elements(Workload):
    """What the operations that move elements share: the pattern's blocks and flat tensors cut into slots.

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
