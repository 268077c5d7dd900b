"""What can be seen of other ranks' processes from here: those of the same host
directly, two others through their doors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, replace

from ncclguard.agreement.decision import Departure
from ncclguard.agreement.entries import Entries
from ncclguard.agreement.inquiry import silent_cause
from ncclguard.agreement.liveness import Identity, Liveness, Sight
from ncclguard.agreement.store import AgreementStore
from ncclguard.incident.dumps import Offer, fetch
from ncclguard.outcome import Cause

#: Seconds between two looks at the doors of ranks on other hosts, and at the list of this host's ranks.
LOOK_EVERY = 1.0


class Neighbours:
    """Knows this host's ranks and the two next to this one; every other rank is looked up when it is asked about."""

    def __init__(
        self, rank: int, world_size: int, liveness: Liveness, attentive_every: float = LOOK_EVERY / 10
    ) -> None:
        self._rank = rank
        self._liveness = liveness
        self._store: AgreementStore | None = None
        host = "host/" + hashlib.blake2b(liveness.identity.host_key.encode(), digest_size=8).hexdigest()
        self._list = Entries(host, host)
        self._known: dict[int, Identity] = {}  # this host's and the two beside: followed in every step
        self._met: dict[int, Identity] = {}  # others that were asked about once
        self._beside = [r % world_size for r in (rank - 1, rank + 1) if r % world_size != rank]
        self._next_look = 0.0
        self._attentive_every = max(attentive_every, LOOK_EVERY / 10)
        self._gone: dict[int, str] = {}
        self._sought: set[int] = set()  # ranks whose identity was looked for together with others

    def register(self, store: AgreementStore, stacks: Offer | None = None) -> None:
        """Publish this process under its rank and in its host's list."""
        self._store = store
        identity = self._liveness.identity
        text = (identity if stacks is None else replace(identity, stacks=astuple(stacks))).to_json()
        store.put(f"identity/{self._rank}", text)
        self._list.add(store, text)

    def step(self, now: float, attentive: bool) -> None:
        """Learn who is beside this rank; once a second, and oftener while it matters."""
        self._liveness.drain()
        if self._store is None or now < self._next_look:
            return
        self._next_look = now + (self._attentive_every if attentive else LOOK_EVERY)
        for text in self._list.new(self._store):
            identity = Identity.from_json(text)
            self._known[identity.rank] = identity
        for rank in list(self._beside):
            peer = self._identity(rank)
            if peer is not None:
                self._known[rank] = peer
                self._beside.remove(rank)
                if peer.host_key != self._liveness.identity.host_key:
                    self._liveness.befriend(peer)

    def departures(self) -> list[Departure]:
        """Ranks seen here whose process is gone: positive evidence, never silence."""
        found = []
        for rank in list(self._known):
            if rank == self._rank or rank in self._gone:
                continue
            sight, evidence = self._liveness.look(self._known[rank])
            if sight is Sight.GONE:
                self._gone[rank] = evidence
                found.append(Departure(rank, Cause.LOST, evidence))
        return found

    def first_here(self) -> bool:
        """Whether this is the lowest rank of its host that is not known to be gone."""
        return not any(peer.rank < self._rank and not self.gone(peer.rank) for peer in self.here())

    def here(self) -> list[Identity]:
        """The other ranks of this host that are known yet."""
        key = self._liveness.identity.host_key
        return [peer for rank, peer in list(self._known.items()) if peer.host_key == key and rank != self._rank]

    def fetch_stacks(self, rank: int) -> dict[str, object] | None:
        """The stacks of a rank of this host whose interpreter may not run, as details of a report; takes seconds."""
        peer = self._known.get(rank)
        if peer is None:
            return None
        found = fetch(peer.pid, None if peer.stacks is None else Offer(*peer.stacks))
        return {
            "host": peer.host,
            "pid": peer.pid,
            "stack": list(found.stack),
            "threads": [[name, list(frames)] for name, frames in found.threads],
            "note": found.note,
        }

    def gone(self, rank: int) -> str:
        """Evidence that a rank's process is gone, from what this process knows without the store; empty for none."""
        peer = self._known.get(rank) or self._met.get(rank)
        if rank not in self._gone and peer is not None:
            sight, evidence = self._liveness.look(peer)
            if sight is Sight.GONE:
                self._gone[rank] = evidence
        return self._gone.get(rank, "")

    def look(self, rank: int) -> tuple[Sight, str]:
        """What can be seen of a rank's process from here."""
        peer = self._identity(rank)
        if peer is None:
            return Sight.UNKNOWN, "it never started ncclguard; import it on every rank before init_process_group"
        return self._liveness.look(peer)

    def seek(self, ranks: Sequence[int], since: float) -> None:
        """Begin to look at ranks that may have to be looked at soon, many at once; each
        once after `since`. Never waits for them.
        """
        new = [rank for rank in ranks if rank not in self._known and rank not in self._met and rank not in self._sought]
        if new and self._store is not None:
            self._sought.update(new)
            for text in self._store.read_many([f"identity/{rank}" for rank in new]).values():
                identity = Identity.from_json(text)
                self._met[identity.rank] = identity
        peers = [self._known.get(rank) or self._met.get(rank) for rank in ranks]
        self._liveness.seek([peer for peer in peers if peer is not None], since)

    def silent_cause(self, rank: int) -> Cause:
        return silent_cause(self.look(rank)[0])

    def _identity(self, rank: int) -> Identity | None:
        peer = self._known.get(rank) or self._met.get(rank)
        if peer is None and self._store is not None:
            text = self._store.read(f"identity/{rank}")
            if text is not None:
                peer = self._met[rank] = Identity.from_json(text)
        return peer
