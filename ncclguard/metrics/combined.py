"""What all ranks of a group have told at one exchange, combined: thousands of ranks in well under a millisecond."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ncclguard.metrics import statistics
from ncclguard.metrics.statistics import HOST_BYTES, NUMBERS, PHASES, UNSET, RankStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """All that follows from an exchange follows from this; equal on all ranks, because the bytes are.

    `first`: the first rank's statistics; `newest`: those with the newest proposal. By phase: `limits`, the highest,
    None where they go by size on some rank; `longest`; `expired`, the most. `operations`: the fewest; `retries`: the
    most; `piece`: the longest; `rate`: of the rank whose large operations moved slowest, bytes/s, 0 where one moved
    none. `waits`: ranks x operations, seconds, negative where nothing was measured. `processes`: host and pid by rank.
    """

    first: RankStatistics
    newest: RankStatistics
    limits: tuple[float | None, ...]
    longest: tuple[float, ...]
    expired: tuple[int, ...]
    operations: int
    retries: int
    piece: int
    rate: float
    waits: npt.NDArray[np.float32]
    processes: npt.NDArray[np.void]


def combine(parts: Sequence[bytes]) -> Combined:
    """Combine what `statistics.encode` made on each rank, in the order of the ranks.
    Raises ValueError for other bytes.
    """
    if len({len(part) for part in parts}) != 1:
        raise ValueError(
            "the ranks have sent statistics of different lengths: all must run the same version of ncclguard"
        )
    first = statistics.decode(parts[0])
    table = np.frombuffer(b"".join(parts), _dtype(len(first.waits)))
    most, least = table["numbers"].max(axis=0), table["numbers"].min(axis=0)
    at = statistics.COLUMNS
    newest = int(table["numbers"][:, at["proposal"]].argmax())
    limits = slice(at["limits"], at["limits"] + len(PHASES))
    moved, spent = table["numbers"][:, at["moved_bytes"]], table["numbers"][:, at["moved_seconds"]]
    return Combined(
        first=first,
        newest=first if newest == 0 else statistics.decode(parts[newest]),
        limits=tuple(
            None if low == UNSET else float(high) for low, high in zip(least[limits], most[limits], strict=True)
        ),
        longest=tuple(most[at["longest"] : at["longest"] + len(PHASES)].tolist()),
        expired=tuple(map(int, most[at["expired"] : at["expired"] + len(PHASES)])),
        operations=int(least[at["operations"]]),
        retries=int(most[at["retries"]]),
        piece=int(most[at["piece"]]),
        rate=float((moved / spent).min()) if least[at["moved_seconds"]] > 1e-9 else 0.0,
        waits=table["waits"],
        processes=table[["host", "pid"]],
    )


@functools.lru_cache(maxsize=8)
def _dtype(waits: int) -> np.dtype[np.void]:
    """The layout of `encode`, with the pid seen a second time."""
    end = 8 * NUMBERS
    return np.dtype(
        {
            "names": ["numbers", "pid", "waits", "host"],
            "formats": [(np.float64, (NUMBERS,)), np.float64, (np.float32, (waits,)), f"S{HOST_BYTES}"],
            "offsets": [0, 8 * statistics.COLUMNS["pid"], end, end + 4 * waits],
            "itemsize": end + 4 * waits + HOST_BYTES,
        }
    )
