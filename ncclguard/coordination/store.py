"""Entries of a job's ranks for each other in its store: keys, numbered logs, the session's name, who has left.

A TCPStore `set` is not acknowledged: on another connection a later `check` missed it in 187 of 5,000 tries. So whatever
a decision rests on is written with `compare_set` (acknowledged, the first writer wins), and a plain `set` is only used
in front of one on the same connection, whose requests the server handles in order.
"""

from __future__ import annotations

import base64
import functools
import json
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter

from ncclguard.coordination.host_page import NEVER, HostPage, Known
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Departure
from ncclguard.protocol.timing import SHARE, Pace

if TYPE_CHECKING:  # ncclguard.coordination.liveness needs this module, but no torch
    from typing_extensions import Self

    from ncclguard.torch_compat.groups import Store

T = TypeVar("T")

#: Under the default group's own prefix chain; everything of one session lies below its nonce.
ROOT = "ncclguard"
#: Keys of one request: a server that answers a request for many cannot answer anybody else meanwhile.
BATCH = 256
#: Keys that a rank looks up one by one in what its host has read; more are asked for together, in two requests.
FEW = 192
#: Characters from which on a value is written compressed, and how such a value begins.
LONG = 2048
_COMPRESSED = "zlib:"


class Stored:
    """The base of dataclasses that lie in the store, as JSON."""

    __slots__ = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote, without fields that this version has not. Raises ValueError for anything else."""
        try:
            return _adapter(cls).validate_json(text)  # type: ignore[no-any-return, arg-type]
        except ValueError as error:
            raise ValueError(
                f"{text!r} is no {cls.__name__.lower()} of a rank ({error!r}); all ranks must run the same version of ncclguard"
            ) from error


@functools.cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


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
        """Write `value` if `expected` is there (empty: nothing); return what is there now. Acknowledged."""
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
        """Return the values of those keys that somebody has written; where all have been, in two round trips."""
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
        """Return a counter that only grows, `within` seconds old at most, or twice as old while another rank asks."""
        page = self.connection.page
        if page is None:
            return self.count(key)
        now, full = time.monotonic(), self._key(key)
        known = page.look(full)
        if known is not None and known.asked != NEVER and known.fresh(now, within):
            self._told(known)
            return known.value
        page.claim(full, now)
        value = self.count(key)
        page.publish(full, now, value)
        return value

    def find(self, key: str, within: float = 0.0) -> str | None:
        """Return a value that is written once and stays; not asked for where it was missing `within` seconds ago."""
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

    def find_many(self, keys: Sequence[str], within: float = 0.0) -> dict[str, str]:
        """Several such values: those that this host has not read yet from the store, or all where they are many.

        What another rank of this host went to ask for in the last `within` seconds is not there yet.
        """
        page = self.connection.page
        if page is None or len(keys) > FEW:
            return self.read_many(keys)
        now, found, missing = time.monotonic(), dict[str, str](), list[str]()
        for key in keys:
            known = page.look(self._key(key))
            if known is not None and known.text is not None:
                found[key] = _plain(known.text)
            elif known is None or not known.asked_for(now, within):
                missing.append(key)
                page.claim(self._key(key), now)
        for key, text in self.read_many(missing).items() if missing else ():
            found[key] = text
            page.publish(self._key(key), now, 1, _short(text).encode())
        return found

    def written(self, key: str, within: float) -> bool:
        """Return whether somebody has written `key`, as it was in the last `within` seconds; once written it stays."""
        page, now, full = self.connection.page, time.monotonic(), self._key(key)
        known = None if page is None else page.look(full)
        if known is not None and (known.value or known.fresh(now, within)):
            return bool(known.value)
        found = self.connection.ask(f"check {key}", lambda: self._store.check([full]))
        if page is not None:
            page.publish(full, now, int(found))
        return found

    def tell_host(self, key: str, value: str | None = None) -> None:
        """The ranks of this host need not ask whether somebody has written `key`, nor what where that is given."""
        if self.connection.page is not None:
            text = None if value is None else _short(value).encode()
            self.connection.page.publish(self._key(key), time.monotonic(), 1, text)

    def told_here(self, key: str) -> str | None:
        """Return what a rank of this host has read or told of `key`, or None; the store is not asked."""
        known = None if self.connection.page is None else self.connection.page.look(self._key(key))
        return None if known is None or known.text is None else _plain(known.text)

    def left_to_another(self, key: str, within: float) -> bool:
        """Return whether another rank of this host did the same in the last `within` seconds; else this one does."""
        page, now, full = self.connection.page, time.monotonic(), self._key(key)
        if page is None or not within:
            return False
        known = page.look(full)
        if known is not None and known.asked_for(now, within):
            return True
        page.claim(full, now)
        return False

    def turn(self, what: str, within: float) -> bool:
        """Return whether it is for this rank to do what one rank of a host does every `within` seconds."""
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
    """Shorten what is written: a TCPStore's server closes the connection of whoever writes more than 8 MiB at once."""
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
    """A list in the store, under the key `counter` and the keys ``<entry>/<number>``.

    Each object, and each thread, has a reader of its own.
    """

    def __init__(self, counter: str, entry: str) -> None:
        self._counter = counter
        self._entry = entry
        self._counted = 0
        self._awaited: dict[int, float] = {}  # numbers without an entry yet, and since when they are known
        self._next_rare = 0.0
        self.more = False  # whether the last call of `new` has left some for another time

    def add(self, store: AgreementStore, text: str) -> int:
        """Append an entry; returns its number, from 1."""
        number = store.count(self._counter, 1)
        store.first(f"{self._entry}/{number}", text)
        return number

    def has(self, store: AgreementStore, number: int, text: str) -> bool:
        """Return whether this is the entry of that number."""
        return store.read(f"{self._entry}/{number}") == text

    def count(self, store: AgreementStore, within: float = 0.0) -> int:
        """Count how many there are, or were in the last `within` seconds, those that are not written yet too."""
        return store.recent(self._counter, within) if within else store.count(self._counter)

    def new(
        self, store: AgreementStore, within: float = 0.0, at_least: int = 0, at_most: int | None = None
    ) -> list[str]:
        """Return those written since the last call, in order of their numbers, by the count of `within` seconds.

        `at_least`: how many there are known to be; `at_most`: how many further ones to look for now, the others another
        time: `more` tells whether there are any.
        """
        now, count = time.monotonic(), max(at_least, self.count(store, within))
        self.more = at_most is not None and count > self._counted + at_most
        if self.more and at_most is not None:
            count = self._counted + at_most
        self._awaited.update(dict.fromkeys(range(self._counted + 1, count + 1), now))
        self._counted = max(self._counted, count)
        rare = now >= self._next_rare
        if rare:
            self._next_rare = now + ENTRY_PATIENCE
        due = [number for number, since in self._awaited.items() if rare or now - since <= ENTRY_PATIENCE]
        keys = [f"{self._entry}/{number}" for number in due]
        found = (store.find_many(keys, within) if within else store.read_many(keys)) if due else {}
        texts = [(number, found.get(f"{self._entry}/{number}")) for number in due]
        for number, text in texts:
            if text is not None:
                del self._awaited[number]
        return [text for _, text in texts if text is not None]


#: Characters of a single text in an entry.
TEXT = 400

#: Departures that a rank reads at first, which is twice as many each further time: one is enough to end a call of all
#: ranks, and when a launcher ends them, each host would else read as many as there are ranks.
PORTION = 16

Place = tuple[int, ...]


class HighWaterMarks:
    """The view that this process has of such keys, whose places only grow: generation, number, level."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}  # key -> what was there last

    def enter(self, store: AgreementStore, key: str, place: Place, entry: list[int | str]) -> list[int | str] | None:
        """Write `entry` for a place that nobody has come to; return its first entry, None when others are further."""
        told = store.told_here(key)
        if told is not None:
            at, *said = json.loads(told)
            if tuple(at) >= place:
                return said if tuple(at) == place else None
        mine = json.dumps([place, *(item[:TEXT] if isinstance(item, str) else item for item in entry)])
        expected = told or self._seen.get(key, "")
        while True:
            found = self._seen[key] = store.replace(key, expected, mine)
            store.tell_host(key, found)
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
        self._portion = PORTION

    @property
    def more(self) -> bool:
        """Return whether there are some that `read` has left for another time."""
        return self._entries.more

    def __contains__(self, rank: int) -> bool:
        return rank in self._known

    def __bool__(self) -> bool:
        return bool(self._known)

    def post(self, store: AgreementStore, departure: Departure, done: dict[str, int]) -> int:
        """Enter a departure once per rank, whoever is first: the rank itself or a witness.

        Return how many there are when all should be told to look, else 0.

        That is with the first, second, fourth, eighth and so on, so that the end of a large job is no flood of news.
        """
        key, text = f"departed/{departure.rank}", codec.dumps_departure(departure, done, self._rank)
        entered = store.told_here(key) or store.first(key, text)
        self._learn(entered)
        if entered != text:
            return 0
        store.tell_host(key, text)
        number = self._entries.add(store, text)
        return number if number & (number - 1) == 0 else 0

    def read(self, store: AgreementStore, within: float = 0.0, at_least: int = 0, *, in_portions: bool = False) -> None:
        """Learn what was entered since, but for the last `within` seconds; `at_least` so many were.

        `in_portions`: only some of them where they are many, the first ones first; then there are `more`.
        """
        for text in self._entries.new(store, within, at_least, self._portion if in_portions else None):
            self._learn(text)
        self._portion = 2 * self._portion if self.more else PORTION

    def count(self, store: AgreementStore, within: float = 0.0) -> int:
        return self._entries.count(store, within)

    def _learn(self, text: str) -> None:
        departure, done = codec.loads_departure(text)
        self._known.setdefault(departure.rank, (departure, done))

    def among(self, ranks: Iterable[int], group: str = "") -> dict[int, Departure]:
        """Return those of some ranks, with the highest sequence they completed in a group."""
        if not self._known:  # in every step of every monitor
            return {}
        members = frozenset(ranks)
        return {
            rank: replace(departure, done=done.get(group, 0))
            for rank, (departure, done) in self._known.items()
            if rank in members
        }

    def all(self) -> dict[int, Departure]:
        return {rank: departure for rank, (departure, _) in self._known.items()}


#: Seconds between two tries of a rank that waits for rank 0 in the handshake; doubled up to the longest, and not less
#: than so many times what the last one took: where thousands join at once they ask the less the slower the store is.
#: But not more than what the job's size accounts for: a try is slow, too, where this process was held up, by its own
#: imports say, and the rank would be missed in the first operation if it then stayed away for seconds.
HANDSHAKE_POLL = (0.01, 0.1)
GENTLY = 4.0
#: Tries after which a rank that is not acknowledged looks whether the session has another name by now.
RENAMED_AFTER = 4


class Handshake:
    """Agree on the session's nonce without a collective and without meeting the keys of an earlier life.

    A store may outlive a job's process groups (torchrun's agent store, a store the user made), so that everything in it
    can be stale. Rank 0 publishes a fresh nonce; each rank registers under the nonce it saw, and is given a number that
    nobody had before; rank 0 acknowledges the numbers that came to its own nonce, all that it has read at a time in one
    write. A rank believes a nonce when its own number is acknowledged under it. Cost: a few operations per rank; of
    rank 0 a few for each `BATCH` ranks. Nothing in it is a collective, so ranks may come minutes apart.

    `about`: what must be equal on all ranks, in words, which rank 0 publishes with its nonce; `about_first` is that of
    rank 0, as soon as its nonce is believed.
    """

    def __init__(self, store: AgreementStore, rank: int, world_size: int, about: str = "") -> None:
        self._store = store
        self._rank = rank
        self._missing = set(range(1, world_size)) if rank == 0 else set()
        self._acknowledged: set[int] = set()  # of rank 0: the numbers
        self._hello: str | None = None
        self._about = self.about_first = about
        self._number = 0
        self._tries = 0
        self._next_try = 0.0
        self._pause = HANDSHAKE_POLL[0]
        self._longest = HANDSHAKE_POLL[1] + SHARE * world_size
        self.nonce: str | None = None

    def step(self) -> bool:
        """Do what can be done without waiting; True when nothing is left to do (rank 0: everybody is acknowledged)."""
        if self._rank == 0:
            return self._acknowledge()
        now = time.monotonic()
        if self.nonce is None and now >= self._next_try:
            self._tries += 1
            if self._hello is None or self._tries % RENAMED_AFTER == 0:
                self._register()
            elif self._number in codec.ranks_of(self._store.read(f"acknowledged/{self._hello}") or ""):
                self.nonce = self._hello
            done = time.monotonic()
            self._next_try = done + max(self._pause, min(GENTLY * (done - now), self._longest))
            self._pause = min(2 * self._pause, HANDSHAKE_POLL[1])
        return self.nonce is not None

    def _register(self) -> None:
        hello, _, about = (self._store.read("hello") or "").partition(" ")
        if hello and hello != self._hello:
            self._hello, self._tries, self.about_first = hello, 0, about
            self._number = self._store.count(f"registrations/{hello}", 1)
            self._store.first(f"registration/{hello}/{self._number}", str(self._rank))
            self._pause = HANDSHAKE_POLL[0]

    def _acknowledge(self) -> bool:
        if self.nonce is None:
            self.nonce = secrets.token_hex(6)
            self._store.put("hello", f"{self.nonce} {self._about}")
        count = self._store.count(f"registrations/{self.nonce}")
        awaited = [number for number in range(1, count + 1) if number not in self._acknowledged]
        keys = {f"registration/{self.nonce}/{number}": number for number in awaited}
        found = self._store.read_many(list(keys)) if keys else {}
        if found:
            self._acknowledged.update(keys[key] for key in found)
            self._missing.difference_update(map(int, found.values()))
            self._store.put(f"acknowledged/{self.nonce}", codec.ranges(sorted(self._acknowledged)))
        return not self._missing
