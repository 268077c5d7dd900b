"""Who comes last, and by how much, from each rank's own waiting times: clocks of two hosts are never compared.

All ranks leave an opening round together (to within the time of a message), so whoever waited least in it came last,
and the difference of two waits is the difference of two arrivals.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ncclguard.metrics.records import StragglerRow, StragglerTable
from ncclguard.metrics.statistics import Combined

#: Operations that the table looks back on.
WINDOW = 256
#: Bytes that the waits of a group may take; of very large groups fewer operations are kept.
MAX_BYTES = 1 << 22


class Stragglers:
    """The last waits of all ranks of one group. Equal on all ranks, because what comes in is."""

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
        if tuple(ranks) != self._ranks:  # ranks have gone: rows of before do not fit any more
            self._ranks = tuple(ranks)
            self._columns = deque(maxlen=max(1, min(WINDOW, MAX_BYTES // (4 * len(self._ranks)))))
        waits = gathered.waits
        self._columns.extend(np.ascontiguousarray(waits.T[waits.min(axis=0) >= 0.0]))

    def table(self) -> StragglerTable | None:
        """The table through the last exchange, None before the first. Made when somebody looks, in any thread."""
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
