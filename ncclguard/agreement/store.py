"""The few store operations the agreement needs, on a connection of its own, with keys that meet nothing old.

A TCPStore `set` is not acknowledged: on another connection a later `check` missed it in 187 of 5,000 tries. So whatever
a decision rests on is written with `compare_set` (acknowledged, first writer wins), and a plain `set` is only used in
front of one on the same connection, whose requests the server handles in order.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence

from ncclguard._torch import Store

#: Under the default group's own prefix chain; everything of one session lies below its nonce.
ROOT = "ncclguard"
#: Keys of one request: a server that answers a request for many cannot answer anybody else meanwhile.
BATCH = 256
#: Characters from which on a value is written compressed, and how such a value begins.
LONG = 2048
_COMPRESSED = "zlib:"


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
        return self.replace(key, "", value)

    def replace(self, key: str, expected: str, value: str) -> str:
        """Write `value` if `expected` is there, or nothing where that is empty; return what
        is there now. Acknowledged.
        """
        try:
            return _plain(self._store.compare_set(self._key(key), expected and _short(expected), _short(value)))
        except Exception as error:  # torch raises RuntimeError, DistNetworkError, DistStoreError and more, by version
            raise StoreUnavailable(f"compare_set {key}: {error}") from error

    def put(self, key: str, value: str) -> None:
        """Write `value` over whatever is there. Not acknowledged."""
        try:
            self._store.set(self._key(key), _short(value))
        except Exception as error:
            raise StoreUnavailable(f"set {key}: {error}") from error

    def read(self, key: str) -> str | None:
        """Return the value, or None when nobody has written it yet; never waits for it."""
        try:
            if not self._store.check([self._key(key)]):
                return None
            return _plain(self._store.get(self._key(key)))
        except Exception as error:
            raise StoreUnavailable(f"get {key}: {error}") from error

    def read_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the values of those keys that somebody has written; where all have been,
        in two round trips for many keys.
        """
        found: dict[str, str] = {}
        for start in range(0, len(keys), BATCH):
            self._read_batch(keys[start : start + BATCH], found)
        return found

    def _read_batch(self, keys: Sequence[str], found: dict[str, str]) -> None:
        full = [self._key(key) for key in keys]
        try:
            if self._store.check(full):
                found.update(zip(keys, map(_plain, self._store.multi_get(full)), strict=True))
                return
        except Exception as error:
            raise StoreUnavailable(f"multi_get {keys[0]} and {len(keys) - 1} more: {error}") from error
        middle = len(keys) // 2
        if middle:
            self._read_batch(keys[:middle], found)
            self._read_batch(keys[middle:], found)

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter and return it. Acknowledged."""
        try:
            return int(self._store.add(self._key(key), amount))
        except Exception as error:
            raise StoreUnavailable(f"add {key}: {error}") from error

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def _short(value: str) -> str:
    """What is written: a TCPStore's server closes the connection of whoever writes more than 8 MiB at once."""
    if len(value) < LONG and not value.startswith(_COMPRESSED):
        return value
    return _COMPRESSED + base64.b64encode(zlib.compress(value.encode())).decode()


def _plain(written: bytes) -> str:
    text = written.decode()
    if not text.startswith(_COMPRESSED):
        return text
    return zlib.decompress(base64.b64decode(text[len(_COMPRESSED) :])).decode()
