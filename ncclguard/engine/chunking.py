"""The plan: how a large tensor is cut into pieces, from values that all ranks compare before data moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ncclguard_explain.language import told

#: Elements below which a tensor goes as one piece, and above which it is cut finely (the users' original recipe).
MEDIUM, LARGE = 100_000_000, 500_000_000
#: A plan is a tuple that is kept; more pieces than this would cost more than they bring.
MAX_PIECES = 65_536
#: Bytes; without `chunk_numel` every piece starts at a multiple of it, aligned like the tensor itself.
PAGE = 4096


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Consecutive half-open ranges of elements that cover the flattened tensor; none for a tensor without elements."""

    numel: int
    pieces: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def longest(self) -> int:
        return self.pieces[0][1] if self.pieces else 0


@lru_cache(maxsize=256)
def plan(numel: int, chunk_numel: int | None = None, element_size: int = 4) -> ChunkPlan:
    """Cut `numel` elements of `element_size` bytes: below 1e8 one piece, up to 5e8 two to five, above that 10 to 20.

    `chunk_numel`, elements of a piece, overrides that; the last piece has the rest. Raises ValueError for a negative
    `numel`, for a `chunk_numel` that is not positive, and for one that would give more than 65,536 pieces.

    >>> [len(plan(n)) for n in (10, 100_000_000, 500_000_000, 600_000_000, 5_000_000_000)]
    [1, 2, 5, 12, 20]
    >>> plan(10, chunk_numel=4).pieces
    ((0, 4), (4, 8), (8, 10))
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}: pass tensor.numel()")
    if chunk_numel is not None and chunk_numel < 1:
        text = told(
            "chunk_numel must be at least 1, got {value}: give the elements of one piece, or None",
            value=chunk_numel,
        )
        raise ValueError(text)
    if numel == 0:
        return ChunkPlan(0, ())
    if chunk_numel is None:
        chunk_numel = _aligned(-(-numel // default_count(numel)), element_size)
    count = -(-numel // chunk_numel)
    if count > MAX_PIECES:
        text = told(
            "chunk_numel={value} would cut {numel:,} elements into {count:,} pieces, more than {most:,}: give at least "
            "{least}",
            value=chunk_numel,
            numel=numel,
            count=count,
            most=MAX_PIECES,
            least=-(-numel // MAX_PIECES),
        )
        raise ValueError(text)
    return ChunkPlan(numel, tuple((start, min(start + chunk_numel, numel)) for start in range(0, numel, chunk_numel)))


def default_count(numel: int) -> int:
    """Pieces of the recipe: up to 1e8 elements each until 5e8, then 5e7 each, but 10 at least and 20 at most."""
    if numel < MEDIUM:
        return 1
    if numel <= LARGE:
        return max(2, min(5, -(-numel // MEDIUM)))
    return max(10, min(20, -(-numel // 50_000_000)))


def _aligned(piece: int, element_size: int) -> int:
    """`piece` elements, rounded up to whole pages where elements divide them."""
    unit = PAGE // element_size if element_size > 0 and PAGE % element_size == 0 else 1
    return -(-piece // unit) * unit


#: How a tensor without elements is cut, and one that goes as a whole.
EMPTY, ONE = plan(0), plan(1)
