"""Looking after ranks that do not answer a revoke: a live rank of the same host
fetches their stacks for the verdict.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ncclguard.agreement.store import BATCH, AgreementStore

log = logging.getLogger("ncclguard")

#: Seconds after the deadline (or the revoke, if later) at which a rank that has not answered is looked at; and how much
#: later each further rank of the host does it, should those before it not.
LOOK_AFTER: Final = 0.35
NEXT_AFTER: Final = 0.15

Details = dict[str, object]
Fetch = Callable[[int], Details | None]


class Onlooker:
    """Belongs to one revocation; `step` in every step of it, by the monitor."""

    def __init__(self, store: AgreementStore, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._claimed: dict[int, bool] = {}  # rank -> whether it is for this one to look at it
        self._found: dict[int, Details] = {}
        self._written: set[int] = set()
        self.closed = False

    def step(self, overdue: float, members: Iterable[int], here: Iterable[int], fetch: Fetch) -> None:
        """Look at the members of this host that have not answered; `overdue`, from
        LOOK_AFTER on: seconds since they should have.
        """
        neighbours = sorted({*here} & {*members})
        order = sorted({*neighbours, self._rank}).index(self._rank)
        for rank in neighbours:
            if rank not in self._claimed and overdue >= LOOK_AFTER + NEXT_AFTER * order:
                silent = self._store.read(f"report/{rank}") is None
                mine = silent and self._store.first(f"looker/{rank}", str(self._rank)) == str(self._rank)
                self._claimed[rank] = mine
                if mine:
                    self._store.count("lookers", 1)
                    threading.Thread(target=self._run, args=(rank, fetch), name="ncclguard-stacks", daemon=True).start()
        for rank, details in list(self._found.items()):
            if rank not in self._written:
                self._written.add(rank)
                self._store.first(f"stacks/{rank}", json.dumps(details, default=str))

    def sightings(self, ranks: Sequence[int]) -> tuple[dict[int, Details], bool]:
        """For the coordinator: what was fetched of these ranks, of the first where they are
        many, and whether some is still fetched.
        """
        found: dict[int, Details] = {}
        pending = False
        for rank in ranks[:BATCH] if self._store.count("lookers") else ():
            text = self._store.read(f"stacks/{rank}")
            if text is not None:
                found[rank] = json.loads(text)
            else:
                pending = pending or self._store.read(f"looker/{rank}") is not None
        return found, pending

    def _run(self, rank: int, fetch: Fetch) -> None:
        try:
            details = fetch(rank) or {}
        except Exception:
            log.exception("ncclguard: the stacks of rank %d could not be fetched", rank)
            return
        self._found[rank] = details
        if self.closed and details:  # the verdict could not wait for them
            frames = details.get("stack")
            text = "\n  ".join(str(frame) for frame in frames) if isinstance(frames, (list, tuple)) else ""
            log.error("ncclguard: rank %d: %s%s", rank, details.get("note"), f"\n  {text}" if text else "")
