"""How large tensors are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from ncclguard.engine.chunking import MAX_PIECES, PAGE, default_count, plan

numels = st.one_of(st.integers(0, 10_000), st.integers(0, 10**12))
element_sizes = st.sampled_from([1, 2, 4, 8, 16])


@pytest.mark.parametrize(
    ("numel", "fewest", "most"),
    [
        (1, 1, 1),
        (99_999_999, 1, 1),
        (100_000_000, 2, 5),
        (300_000_000, 2, 5),
        (500_000_000, 2, 5),
        (500_000_001, 10, 20),
        (1_000_000_000, 10, 20),
        (10**12, 10, 20),
    ],
)
@pytest.mark.parametrize("element_size", [1, 2, 4, 8, 16])
def test_pieces_by_size(numel: int, fewest: int, most: int, element_size: int) -> None:
    assert fewest <= len(plan(numel, None, element_size)) <= most


@given(numels, element_sizes)
def test_pieces_cover_the_tensor_in_order_without_gap(numel: int, element_size: int) -> None:
    cut = plan(numel, None, element_size)
    assert [start for start, _ in cut.pieces] == [0, *(stop for _, stop in cut.pieces)][: len(cut)]
    assert all(start < stop for start, stop in cut.pieces)
    assert (cut.pieces[-1][1] if cut.pieces else 0) == numel
    assert cut.longest == max((stop - start for start, stop in cut.pieces), default=0)
    assert len(cut) <= default_count(numel)


@given(numels, element_sizes)
def test_every_piece_starts_on_a_page_of_the_tensor(numel: int, element_size: int) -> None:
    assert all(start * element_size % PAGE == 0 for start, _ in plan(numel, None, element_size).pieces)


@given(st.integers(1, 10**9), st.integers(1, 10**9))
def test_chunk_numel_is_taken_exactly(numel: int, chunk_numel: int) -> None:
    count = -(-numel // chunk_numel)
    if count > MAX_PIECES:
        with pytest.raises(ValueError, match="give at least"):
            plan(numel, chunk_numel)
        return
    pieces = plan(numel, chunk_numel).pieces
    assert len(pieces) == count
    assert all(stop - start == chunk_numel for start, stop in pieces[:-1])
    assert pieces[-1][1] == numel


def test_the_least_piece_that_the_message_names_is_accepted() -> None:
    with pytest.raises(ValueError, match="chunk_numel=1 would cut 500,000,000 elements.*give at least 7630"):
        plan(500_000_000, 1)
    assert len(plan(500_000_000, 7630)) <= MAX_PIECES


def test_a_tensor_without_elements_has_no_pieces() -> None:
    assert plan(0).pieces == ()
    assert plan(0, 5).pieces == ()
    assert plan(0).longest == 0


@pytest.mark.parametrize(("numel", "chunk_numel"), [(-1, None), (10, 0), (10, -5)])
def test_nonsense_is_refused(numel: int, chunk_numel: int | None) -> None:
    with pytest.raises(ValueError, match="numel must"):
        plan(numel, chunk_numel)
