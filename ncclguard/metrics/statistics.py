"""The statistics that ranks of a group exchange, how they are combined, and the table of who comes last.

All ranks leave an opening round together (to within the time of a message), so whoever waited least in it came last,
and the difference of two waits is the difference of two arrivals.
"""

from __future__ import annotations

import functools
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ncclguard.metrics.records import StragglerRow, StragglerTable
from ncclguard.metrics.settings import SETTINGS, UNCHANGED, Settings

#: Operations whose waits one exchange can carry; with so many it fits into a vote of a group of up to 64 ranks.
MAX_WAITS = 32
#: Phases in the order of the numbers by phase; "none" is a call outside `with phase(...)`.
PHASES = ("none", "train", "eval", "small")
#: Raised with every change of the layout; ranks with another one refuse to build a group together. With `MAX_WAITS`
#: waits it has 472 bytes, and must not exceed the 496 that a vote carries in groups of up to 64 ranks: else each
#: exchange there is a collective.
LAYOUT = 2
HOST_BYTES = 32
#: Numbers before the waits, and where the first of each kind is.
NUMBERS = 11 + 3 * len(PHASES) + 2 * len(SETTINGS)
COLUMNS = {
    "pid": 1,
    "operations": 2,
    "retries": 3,
    "moved_bytes": 4,
    "moved_seconds": 5,
    "piece": 6,
    "proposal": 7,
    "limits": 11,
    "longest": 11 + len(PHASES),
    "expired": 11 + 2 * len(PHASES),
}
UNSET = -1.0  # stands for None; NaN stands for a setting that was not changed


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """One rank's numbers since the last exchange.

    Times are in seconds; `waits` are oldest first, negative where nothing was measured.

    `limits`: this rank's budgets by phase, None where they go by size. `longest`: the longest success by phase.
    `expired`: failures by phase in which a deadline passed and everybody was alive. `moved_bytes`, `moved_seconds`:
    large operations without their waiting. `piece`: elements of the longest piece moved, 0 for none. `proposal` is the
    newest that this rank knows, 0 for none, and `proposed` its settings; `settings` are those in force here.
    """

    pid: int
    host: str
    waits: tuple[float, ...]
    limits: tuple[float | None, ...] = (None,) * len(PHASES)
    longest: tuple[float, ...] = (0.0,) * len(PHASES)
    expired: tuple[int, ...] = (0,) * len(PHASES)
    operations: int = 0
    retries: int = 0
    moved_bytes: float = 0.0
    moved_seconds: float = 0.0
    piece: int = 0
    proposal: int = 0
    proposed: tuple[tuple[str, float | None], ...] = ()
    settings: Settings = UNCHANGED


def size(waits: int) -> int:
    """Return the number of bytes of `encode` with that many waits."""
    return _layout(waits).size


def encode(statistics: RankStatistics) -> bytes:
    """Encode statistics: fixed length for a number of waits, every number exact except the waits (32 bits)."""
    s = statistics
    proposed, held = dict(s.proposed), dict(s.settings.values)
    return _layout(len(s.waits)).pack(
        LAYOUT, s.pid, s.operations, s.retries, s.moved_bytes, s.moved_seconds, s.piece, s.proposal,
        s.settings.proposal, s.settings.rate, s.settings.direction,
        *map(_number, s.limits), *s.longest, *s.expired,
        *[_number(proposed[name]) if name in proposed else math.nan for name in SETTINGS],
        *[_number(held[name]) if name in held else math.nan for name in SETTINGS],
        *s.waits,
        s.host.encode("ascii", "replace")[:HOST_BYTES],
    )  # fmt: skip


def decode(data: bytes) -> RankStatistics:
    """Read the bytes of `encode`. Raises ValueError for another length."""
    waits, odd = divmod(len(data) - size(0), 4)
    if odd or waits < 0:
        raise ValueError(f"{len(data)} bytes are no statistics: all ranks must run the same version of ncclguard")
    numbers = _layout(waits).unpack(data)
    take = _Reader(numbers)
    _, pid, operations, retries, moved_bytes, moved_seconds, piece, proposal, adopted, rate, direction = take(11)
    limits, longest, expired = take(len(PHASES)), take(len(PHASES)), take(len(PHASES))
    proposed, held = take(len(SETTINGS)), take(len(SETTINGS))
    return RankStatistics(
        pid=int(pid),
        host=numbers[-1].rstrip(b"\0").decode("ascii", "replace"),
        waits=tuple(take(waits)),
        limits=tuple(map(_value, limits)),
        longest=tuple(longest),
        expired=tuple(map(int, expired)),
        operations=int(operations),
        retries=int(retries),
        moved_bytes=moved_bytes,
        moved_seconds=moved_seconds,
        piece=int(piece),
        proposal=int(proposal),
        proposed=_named(proposed),
        settings=Settings(_named(held), int(adopted), rate, int(direction)),
    )


@functools.lru_cache(maxsize=8)
def _layout(waits: int) -> struct.Struct:
    return struct.Struct(f"={NUMBERS}d{waits}f{HOST_BYTES}s")


class _Reader:
    def __init__(self, numbers: Sequence[float]) -> None:
        self._numbers = numbers
        self._at = 0

    def __call__(self, count: int) -> Sequence[float]:
        part = self._numbers[self._at : self._at + count]
        self._at += count
        return part


def _number(value: float | None) -> float:
    return UNSET if value is None else float(value)


def _value(number: float) -> float | None:
    return None if number == UNSET else number


def _named(numbers: Sequence[float]) -> tuple[tuple[str, float | None], ...]:
    return tuple(
        (name, _value(number)) for name, number in zip(SETTINGS, numbers, strict=True) if not math.isnan(number)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Combined:
    """The numbers of all ranks combined: all decisions follow from them, and they are equal on all ranks.

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
    """Combine the bytes of `encode` of each rank, in the order of the ranks. Raises ValueError for other bytes."""
    if len({len(part) for part in parts}) != 1:
        raise ValueError(
            "the ranks have sent statistics of different lengths: all must run the same version of ncclguard"
        )
    first = decode(parts[0])
    table = np.frombuffer(b"".join(parts), _dtype(len(first.waits)))
    most, least = table["numbers"].max(axis=0), table["numbers"].min(axis=0)
    at = COLUMNS
    newest = int(table["numbers"][:, at["proposal"]].argmax())
    limits = slice(at["limits"], at["limits"] + len(PHASES))
    moved, spent = table["numbers"][:, at["moved_bytes"]], table["numbers"][:, at["moved_seconds"]]
    return Combined(
        first=first,
        newest=first if newest == 0 else decode(parts[newest]),
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
    """Return the layout of `encode`, with the pid seen a second time."""
    end = 8 * NUMBERS
    return np.dtype(
        {
            "names": ["numbers", "pid", "waits", "host"],
            "formats": [(np.float64, (NUMBERS,)), np.float64, (np.float32, (waits,)), f"S{HOST_BYTES}"],
            "offsets": [0, 8 * COLUMNS["pid"], end, end + 4 * waits],
            "itemsize": end + 4 * waits + HOST_BYTES,
        }
    )


#: The number of operations that the table covers.
WINDOW = 256
#: Bytes that the waits of a group may take; of very large groups fewer operations are kept.
MAX_BYTES = 1 << 22


class Stragglers:
    """The last waits of all ranks of one group, equal on all ranks because their input is."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._ranks: tuple[int, ...] = ()
        self._columns: deque[npt.NDArray[np.float32]] = deque(maxlen=WINDOW)
        self._known: tuple[str, float, npt.NDArray[np.void]] | None = None
        self._lock = threading.Lock()

    def add(self, ranks: Sequence[int], gathered: Combined, through: str) -> None:
        """Take the waits of one exchange; operations in which a rank has measured nothing are left out.

        `through`: id of the operation that carried it, the last one of the table.
        """
        with self._lock:
            self._add(ranks, gathered)
            self._known = through, time.monotonic(), gathered.processes

    def _add(self, ranks: Sequence[int], gathered: Combined) -> None:
        if tuple(ranks) != self._ranks:  # ranks have gone, so older rows do not fit any more
            self._ranks = tuple(ranks)
            self._columns = deque(maxlen=max(1, min(WINDOW, MAX_BYTES // (4 * len(self._ranks)))))
        waits = gathered.waits
        self._columns.extend(np.ascontiguousarray(waits.T[waits.min(axis=0) >= 0.0]))

    def table(self) -> StragglerTable | None:
        """Return the table through the last exchange, None before the first; made on demand, in any thread."""
        with self._lock:
            if self._known is None:
                return None
            through, taken, processes = self._known
            ranks, columns = self._ranks, list(self._columns)
        age = time.monotonic() - taken
        if not columns:
            return StragglerTable(group=self._group, through=through, age=age, operations=0, rows=())
        waits = np.stack(columns, axis=1).astype(np.float64)  # ranks x operations
        behind = waits.max(axis=0) - waits
        last = waits.argmin(axis=0)
        ordered = np.sort(waits, axis=0)
        missing = ordered[1] - ordered[0] if len(ranks) > 1 else np.zeros(waits.shape[1])
        rows = [
            StragglerRow(
                rank=rank,
                host=host.decode("ascii", "replace"),
                pid=int(pid),
                last=int((last == index).sum()),
                behind=float(behind[index].mean()),
                behind_longest=float(behind[index].max()),
                held_up=float(missing[last == index].sum()),
                waited=float(waits[index].mean()),
            )
            for index, (rank, (host, pid)) in enumerate(zip(ranks, processes.tolist(), strict=True))
        ]
        rows.sort(key=lambda row: (-row.behind, row.rank))
        return StragglerTable(group=self._group, through=through, age=age, operations=waits.shape[1], rows=tuple(rows))
