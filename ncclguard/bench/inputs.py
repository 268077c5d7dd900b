"""Inputs whose result is known exactly at every position, and the count of elements that differ from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
