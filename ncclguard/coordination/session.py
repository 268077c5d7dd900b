"""How the ranks of a job agree on the name of their session, without a collective."""

from __future__ import annotations

import json
import secrets

from ncclguard.coordination.store import AgreementStore, Entries


class Handshake:
    """Agree on the session's nonce without a collective and without meeting the keys of an earlier life.

    A store may outlive a job's process groups (torchrun's agent store, a store the user made), so that everything in it
    can be stale. Rank 0 publishes a fresh nonce; each rank registers with a fresh token and the nonce it saw; rank 0
    acknowledges those that saw its own. A rank believes a nonce when its own token is acknowledged under it. Cost: a
    few operations per rank, one reader that is linear in the number of ranks, once; nothing in it is a collective, so
    ranks may come minutes apart.
    """

    def __init__(self, store: AgreementStore, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._token = secrets.token_hex(8)
        self._missing = set(range(1, world_size)) if rank == 0 else set()
        self._hello: str | None = None
        self._registrations = _registrations("")
        self.nonce: str | None = None

    def step(self) -> bool:
        """Do what can be done without waiting; True when nothing is left to do (rank 0: everybody is acknowledged)."""
        if self._rank == 0:
            return self._acknowledge()
        if self.nonce is None:
            self._register()
        return self.nonce is not None

    def _register(self) -> None:
        hello = self._store.read("hello")
        if hello is None:
            return
        if hello != self._hello:
            self._hello = hello
            _registrations(hello).add(self._store, json.dumps([self._rank, self._token]))
        if self._store.read(f"acknowledged/{hello}/{self._token}") is not None:
            self.nonce = hello

    def _acknowledge(self) -> bool:
        if self.nonce is None:
            self.nonce = secrets.token_hex(6)
            self._registrations = _registrations(self.nonce)
            self._store.put("hello", self.nonce)
        for text in self._registrations.new(self._store):
            rank, token = json.loads(text)
            self._store.put(f"acknowledged/{self.nonce}/{token}", "1")
            self._missing.discard(rank)
        return not self._missing


def _registrations(hello: str) -> Entries:
    return Entries(f"registrations/{hello}", f"registration/{hello}")
