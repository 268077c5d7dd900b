"""The few store operations the agreement needs, on a connection of its own, with keys that meet nothing old.

A TCPStore `set` is not acknowledged: on another connection a later `check` missed it in 187 of 5,000 tries. So whatever a
decision rests on is written with `compare_set` (acknowledged, first writer wins), and a plain `set` is only used in front of
one on the same connection, whose requests the server handles in order.
"""

from __future__ import annotations

import json
import secrets

from ncclguard._torch import Store

#: Under the default group's own prefix chain; everything of one session lies below its nonce.
ROOT = "ncclguard"


class StoreUnavailable(Exception):
    """The store refused, broke off or does not know the key: the agreement cannot go on over this connection."""


class AgreementStore:
    """One connection to the job's store, used by one thread; a call that does not answer is abandoned, never joined."""

    def __init__(self, store: Store, prefix: str = ROOT) -> None:
        self._store = store
        self._prefix = prefix

    def below(self, prefix: str) -> AgreementStore:
        """Return the same connection for the keys below `prefix`."""
        return AgreementStore(self._store, f"{self._prefix}/{prefix}")

    def first(self, key: str, value: str) -> str:
        """Write `value` if nobody has written `key`; return what is there now. Acknowledged."""
        try:
            return self._store.compare_set(self._key(key), "", value).decode()
        except Exception as error:  # torch raises RuntimeError, DistNetworkError, DistStoreError and more, by version
            raise StoreUnavailable(f"compare_set {key}: {error}") from error

    def put(self, key: str, value: str) -> None:
        """Write `value` over whatever is there. Not acknowledged."""
        try:
            self._store.set(self._key(key), value)
        except Exception as error:
            raise StoreUnavailable(f"set {key}: {error}") from error

    def read(self, key: str) -> str | None:
        """Return the value, or None when nobody has written it yet; never waits for it."""
        try:
            if not self._store.check([self._key(key)]):
                return None
            return self._store.get(self._key(key)).decode()
        except Exception as error:
            raise StoreUnavailable(f"get {key}: {error}") from error

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter and return it. Acknowledged."""
        try:
            return int(self._store.add(self._key(key), amount))
        except Exception as error:
            raise StoreUnavailable(f"add {key}: {error}") from error

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


class Handshake:
    """Agree on the session's nonce without a collective and without meeting the keys of an earlier life.

    A store may outlive a job's process groups (torchrun's agent store, a store the user made), so that everything in it can be
    stale. Rank 0 publishes a fresh nonce; each rank registers with a fresh token and the nonce it saw; rank 0 acknowledges
    those that saw its own. A rank believes a nonce when its own token is acknowledged under it. Cost: a few operations per
    rank, one reader that is linear in the number of ranks, once.
    """

    def __init__(self, store: AgreementStore, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._token = secrets.token_hex(8)
        self._missing = set(range(1, world_size)) if rank == 0 else set()
        self._hello: str | None = None
        self._registrations = -1
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
            self._store.put(f"registration/{self._rank}", json.dumps([hello, self._token]))
            self._store.count(f"registrations/{hello}", 1)
        if self._store.read(f"acknowledged/{hello}/{self._token}") is not None:
            self.nonce = hello

    def _acknowledge(self) -> bool:
        if self.nonce is None:
            self.nonce = secrets.token_hex(6)
            self._store.put("hello", self.nonce)
        registrations = self._store.count(f"registrations/{self.nonce}")
        if registrations == self._registrations:
            return not self._missing
        self._registrations = registrations
        for rank in sorted(self._missing):
            text = self._store.read(f"registration/{rank}")
            if text is None:
                continue
            hello, token = json.loads(text)
            if hello == self.nonce:
                self._store.put(f"acknowledged/{hello}/{token}", "1")
                self._missing.discard(rank)
        return not self._missing
