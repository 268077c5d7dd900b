"""Inputs differ per rank and per element, their sum is exact in any order, and every wrong element is counted."""

from __future__ import annotations

import pytest
import torch

from ncclguard.bench.arguments import DTYPES
from ncclguard.bench.measure import Blocks, choose_pattern, count_wrong, fill, largest_exact

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_largest_exact_is_exact_and_the_next_is_not(dtype: torch.dtype) -> None:
    """Every whole number up to it is held; the one above it is not, or does not exist."""
    limit = largest_exact(dtype)
    assert int(torch.tensor(limit, dtype=torch.int64).to(dtype).to(torch.int64)) == limit
    assert int(torch.tensor(limit - 1, dtype=torch.int64).to(dtype).to(torch.int64)) == limit - 1
    if dtype is not torch.int64:
        assert int(torch.tensor(limit + 1, dtype=torch.int64).to(dtype).to(torch.int64)) != limit + 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64, 200])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_sum_is_exact_in_both_orders(dtype: torch.dtype, world_size: int) -> None:
    """Adding rank by rank in the dtype, forwards and backwards, gives exactly the total; int8 ends at 63 ranks."""
    try:
        pattern = choose_pattern(dtype, world_size)
    except ValueError as refused:
        assert "use --dtype float32" in str(refused)
        assert 2 * world_size > largest_exact(dtype) - 1 - world_size // 2
        return
    blocks = Blocks(pattern, 1000, CPU)
    for order in (range(world_size), reversed(range(world_size))):
        total = torch.zeros_like(blocks.total(3))
        for rank in order:
            total += blocks.contribution(rank, 3)
        assert torch.equal(total, blocks.total(3))
    exact = torch.stack([blocks.contribution(rank, 3).to(torch.int64) for rank in range(world_size)]).sum(0)
    assert torch.equal(exact, blocks.total(3).to(torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float16], ids=str)
def test_inputs_differ_per_rank_and_per_element(dtype: torch.dtype) -> None:
    """No two of 8 ranks hold the same at a position, no two neighbours are equal, and another salt is another input."""
    blocks = Blocks(choose_pattern(dtype, 8), 5000, CPU)
    inputs = torch.stack([blocks.contribution(rank, 0) for rank in range(8)])
    assert all(len(set(column.tolist())) == 8 for column in inputs[:, :300].T)
    assert bool((inputs[:, 1:] != inputs[:, :-1]).all())
    assert bool((blocks.contribution(0, 0) != blocks.contribution(0, 1)).all())
    assert bool((blocks.total(0) != blocks.total(1)).all())


@pytest.mark.parametrize("numel", [1, 250, 251, 252, 1000, (1 << 20) + 77, 3 * (1 << 20) + 1])
def test_a_block_covers_any_length_seamlessly(numel: int) -> None:
    """Laid end to end the pattern goes on across block borders: element i is (i + salt) % modulus + 1 + rank."""
    pattern = choose_pattern(torch.float32, 4)
    flat = torch.full((numel,), -1.0)
    block = Blocks(pattern, numel, CPU).contribution(3, 5)
    fill(flat, block)
    expected = (torch.arange(numel) + 5) % pattern.modulus + 4
    assert torch.equal(flat, expected.to(torch.float32))
    assert count_wrong(flat, block) == 0


@pytest.mark.parametrize("place", [0, 1, (1 << 20) - 1, 1 << 20, 2_100_000 - 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_single_wrong_element_is_found_wherever_it_is(place: int, value: float) -> None:
    """First, last, at a block border; NaN too."""
    blocks = Blocks(choose_pattern(torch.float32, 2), 2_100_000, CPU)
    flat = torch.empty(2_100_000)
    fill(flat, blocks.total(0))
    flat[place] = value
    assert count_wrong(flat, blocks.total(0)) == 1


def test_a_collective_that_did_nothing_is_all_wrong() -> None:
    """The input is nowhere the result."""
    for rank in range(2):
        blocks = Blocks(choose_pattern(torch.float32, 2), 1000, CPU)
        flat = torch.empty(1000)
        fill(flat, blocks.contribution(rank, 0))
        assert count_wrong(flat, blocks.total(0)) == 1000


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_spoiling_by_one_changes_every_element(dtype: torch.dtype) -> None:
    """What the bench writes into results beforehand is never the result."""
    blocks = Blocks(choose_pattern(dtype, 4), 5000, CPU)
    assert bool((blocks.total(0) + 1 != blocks.total(0)).all())
    assert bool((blocks.contribution(3, 0) + 1 != blocks.contribution(3, 0)).all())
