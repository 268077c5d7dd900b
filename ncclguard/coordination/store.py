"""What the ranks of a job write for each other in its store: keys, numbered logs, the session's name, who has left.

A TCPStore `set` is not acknowledged: on another connection a later `check` missed it in 187 of 5,000 tries. So whatever
a decision rests on is written with `compare_set` (acknowledged, the first writer wins), and a plain `set` is only used
in front of one on the same connection, whose requests the server handles in order.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # ncclguard.coordination.liveness needs this module, but no torch
    from ncclguard.torch_compat.groups import Store
import secrets
from collections.abc import Iterable
from dataclasses import replace

from ncclguard.coordination.host_page import HostPage, Known
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Departure
from ncclguard.protocol.timing import Pace

T = TypeVar("T")

#: Under the default group's own prefix chain; everything of one session lies below its nonce.
ROOT = "ncclguard"
#: Keys of one request: a server that answers a request for many cannot answer anybody else meanwhile.
BATCH = 256
#: Keys that a rank looks up one by one in what its host has read; more are asked for together, in two requests.
FEW = 16
#: Characters from which on a value is written compressed, and how such a value begins.
LONG = 2048
_COMPRESSED = "zlib:"


class StoreUnavailable(Exception):
    """The store refused, broke off or does not know the key: the agreement cannot go on over this connection."""


class Connection:
    """One connection to the job's store, and what its process has learnt of how the store answers.

    `page` is what the ranks of this host share of what they have read. `answered` is when the store last said
    something to this host, by time.monotonic(), and `pace` how long answers take.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.page: HostPage | None = None
        self.answered = float("-inf")
        self.pace = Pace()

    def ask(self, what: str, request: Callable[[], T]) -> T:
        began = time.monotonic()
        try:
            answer = request()
        except Exception as error:  # torch raises RuntimeError, DistNetworkError, DistStoreError and more, by version
            raise StoreUnavailable(f"{what}: {error}") from error
        now = time.monotonic()
        self.answered = max(self.answered, now)
        self.pace.met(now - began, now)
        return answer


class AgreementStore:
    """One connection to the job's store, used by one thread; a call that does not answer is abandoned, never joined."""

    def __init__(self, store: Store | Connection, prefix: str = ROOT) -> None:
        self.connection = store if isinstance(store, Connection) else Connection(store)
        self._prefix = prefix

    @property
    def _store(self) -> Store:
        return self.connection.store

    def below(self, prefix: str) -> AgreementStore:
        """Return the same connection for the keys below `prefix`."""
        return AgreementStore(self.connection, f"{self._prefix}/{prefix}")

    def first(self, key: str, value: str) -> str:
        """Write `value` if nobody has written `key`; return what is there now. Acknowledged."""
        return self.replace(key, "", value)

    def replace(self, key: str, expected: str, value: str) -> str:
        """Write `value` if `expected` is there, or nothing where that is empty; return what
        is there now. Acknowledged.
        """
        full, expected, value = self._key(key), expected and _short(expected), _short(value)
        return _plain(self.connection.ask(f"compare_set {key}", lambda: self._store.compare_set(full, expected, value)))

    def put(self, key: str, value: str) -> None:
        """Write `value` over whatever is there. Not acknowledged."""
        try:
            self._store.set(self._key(key), _short(value))
        except Exception as error:
            raise StoreUnavailable(f"set {key}: {error}") from error

    def read(self, key: str) -> str | None:
        """Return the value, or None when nobody has written it yet; never waits for it."""
        written = self._read(key)
        return None if written is None else _plain(written)

    def read_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the values of those keys that somebody has written; where all have been,
        in two round trips for many keys.
        """
        found: dict[str, str] = {}
        for start in range(0, len(keys), BATCH):
            self._read_batch(keys[start : start + BATCH], found)
        return found

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter and return it. Acknowledged."""
        full = self._key(key)
        return int(self.connection.ask(f"add {key}", lambda: self._store.add(full, amount)))

    # ------------------------------------------------------------------ by way of the page that this host's ranks share

    def recent(self, key: str, within: float) -> int:
        """A counter that only grows, as it was in the last `within` seconds, or twice that
        while another rank of this host asks.
        """
        page = self.connection.page
        if page is None:
            return self.count(key)
        now, full = time.monotonic(), self._key(key)
        known = page.look(full)
        if known is not None and known.fresh(now, within):
            self._told(known)
            return known.value
        page.claim(full, now)
        value = self.count(key)
        page.publish(full, now, value)
        return value

    def find(self, key: str, within: float = 0.0) -> str | None:
        """A value that is written once and stays. Where it was missing in the last `within`
        seconds, the store is not asked.
        """
        page = self.connection.page
        if page is None:
            return self.read(key)
        now, full = time.monotonic(), self._key(key)
        known = page.look(full)
        if known is not None and known.text is not None:
            self._told(known)
            return _plain(known.text)
        if known is not None and not known.value and known.fresh(now, within):
            self._told(known)
            return None
        page.claim(full, now)
        written = self._read(key)
        page.publish(full, now, 0 if written is None else 1, written)
        return None if written is None else _plain(written)

    def find_many(self, keys: Sequence[str]) -> dict[str, str]:
        """Several such values: those that this host has not read yet from the store, or all where they are many."""
        page = self.connection.page
        if page is None or len(keys) > FEW:
            return self.read_many(keys)
        now = time.monotonic()
        known = {key: page.look(self._key(key)) for key in keys}
        found = {key: _plain(one.text) for key, one in known.items() if one is not None and one.text is not None}
        missing = [key for key in keys if key not in found]
        for key, text in self.read_many(missing).items() if missing else ():
            found[key] = text
            page.publish(self._key(key), now, 1, _short(text).encode())
        return found

    def turn(self, what: str, within: float) -> bool:
        """Whether it is for this rank to do what one rank of a host does every `within` seconds."""
        page = self.connection.page
        return page is None or page.turn(self._key(what), time.monotonic(), within)

    def _told(self, known: Known) -> None:
        self.connection.answered = max(self.connection.answered, known.asked)

    def _read(self, key: str) -> bytes | None:
        full = self._key(key)
        if not self.connection.ask(f"check {key}", lambda: self._store.check([full])):
            return None
        return self.connection.ask(f"get {key}", lambda: self._store.get(full))

    def _read_batch(self, keys: Sequence[str], found: dict[str, str]) -> None:
        full, what = [self._key(key) for key in keys], f"multi_get {keys[0]} and {len(keys) - 1} more"
        if self.connection.ask(what, lambda: self._store.check(full)):
            values = self.connection.ask(what, lambda: self._store.multi_get(full))
            found.update(zip(keys, map(_plain, values), strict=True))
            return
        middle = len(keys) // 2
        if middle:
            self._read_batch(keys[:middle], found)
            self._read_batch(keys[middle:], found)

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


#: Seconds for which an entry that was counted but not yet written is looked for each
#: time; from then on once in so many seconds.
ENTRY_PATIENCE = 10.0


class Entries:
    """One list, under the key `counter` and the keys ``<entry>/<number>``; a reader of
    its own for each object, and each thread.
    """

    def __init__(self, counter: str, entry: str) -> None:
        self._counter = counter
        self._entry = entry
        self._counted = 0
        self._awaited: dict[int, float] = {}  # numbers without an entry yet, and since when they are known
        self._next_rare = 0.0

    def add(self, store: AgreementStore, text: str) -> int:
        """Append an entry; returns its number, from 1."""
        number = store.count(self._counter, 1)
        store.first(f"{self._entry}/{number}", text)
        return number

    def count(self, store: AgreementStore, within: float = 0.0) -> int:
        """How many there are, or were in the last `within` seconds; those included whose
        writer has not come to write them.
        """
        return store.recent(self._counter, within) if within else store.count(self._counter)

    def new(self, store: AgreementStore, within: float = 0.0) -> list[str]:
        """Those that were written since the last call, in order of their numbers, by the count of `within` seconds."""
        now, count = time.monotonic(), self.count(store, within)
        self._awaited.update(dict.fromkeys(range(self._counted + 1, count + 1), now))
        self._counted = max(self._counted, count)
        rare = now >= self._next_rare
        if rare:
            self._next_rare = now + ENTRY_PATIENCE
        due = [number for number, since in self._awaited.items() if rare or now - since <= ENTRY_PATIENCE]
        find = store.find_many if within else store.read_many
        found = find([f"{self._entry}/{number}" for number in due]) if due else {}
        texts = [(number, found.get(f"{self._entry}/{number}")) for number in due]
        for number, text in texts:
            if text is not None:
                del self._awaited[number]
        return [text for _, text in texts if text is not None]


#: Characters of a single text in an entry.
TEXT = 400

Place = tuple[int, ...]


class HighWaterMarks:
    """This process's view of such keys. Places are compared like tuples and only grow:
    generation, then number, then level.
    """

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}  # key -> what was there last

    def enter(self, store: AgreementStore, key: str, place: Place, entry: list[int | str]) -> list[int | str] | None:
        """Write `entry` for a place that nobody has come to; return the entry of its first,
        None when others are further.
        """
        mine = json.dumps([place, *(item[:TEXT] if isinstance(item, str) else item for item in entry)])
        expected = self._seen.get(key, "")
        while True:
            found = self._seen[key] = store.replace(key, expected, mine)
            at, *said = json.loads(found)
            if tuple(at) >= place:
                return said if tuple(at) == place else None
            if found == expected:
                return None  # the store has lost it
            expected = found


class Departures:
    """Used by the monitor's thread of one `rank` only; every method that talks to the store is given it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[int, tuple[Departure, dict[str, int]]] = {}
        self._entries = Entries("departures", "departure")

    def __contains__(self, rank: int) -> bool:
        return rank in self._known

    def __bool__(self) -> bool:
        return bool(self._known)

    def post(self, store: AgreementStore, departure: Departure, done: dict[str, int]) -> bool:
        """Enter a departure once per rank, whoever is first: the rank itself or a witness.
        True when all should be told to look.

        That is with the first, second, fourth, eighth and so on, so that the end of a large job is no flood of news.
        """
        text = codec.dumps_departure(departure, done, self._rank)
        entered = store.first(f"departed/{departure.rank}", text)
        if entered != text:
            self._learn(entered)
            return False
        number = self._entries.add(store, text)
        return number & (number - 1) == 0

    def read(self, store: AgreementStore, within: float = 0.0) -> None:
        """Learn what was entered since, but for the last `within` seconds."""
        for text in self._entries.new(store, within):
            self._learn(text)

    def count(self, store: AgreementStore, within: float = 0.0) -> int:
        """How many have been entered."""
        return self._entries.count(store, within)

    def _learn(self, text: str) -> None:
        departure, done = codec.loads_departure(text)
        self._known.setdefault(departure.rank, (departure, done))

    def among(self, ranks: Iterable[int], group: str = "") -> dict[int, Departure]:
        """Those of some ranks, with the highest sequence they completed in a group."""
        if not self._known:  # in every step of every monitor
            return {}
        members = frozenset(ranks)
        return {
            rank: replace(departure, done=done.get(group, 0))
            for rank, (departure, done) in self._known.items()
            if rank in members
        }

    def all(self) -> dict[int, Departure]:
        """Every one that is known."""
        return {rank: departure for rank, (departure, _) in self._known.items()}


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
