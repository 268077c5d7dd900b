"""The messages that wait for a rank which receives from any source: told by their senders, and read by it.

A message between two ranks is a collective of these two, in a sequence of its own, so a receiver has to know whose it
is before it can take part. The senders tell it in the job's store: source, number in the sequence, and tag, which MPI
calls the envelope of a message. Nothing is told before a rank says in the job's log that it receives so: then all that
wait in a send to it tell what they wait in, and from then on each send to it is told as it begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from ncclguard.coordination.store import AgreementStore
from ncclguard.protocol.decision import Departure


class Envelope(NamedTuple):
    """A message that its source waits to be rid of: the `number`-th from there, counted from 0."""

    source: int
    number: int
    tag: int


#: Envelopes for each sender that a box has room for. A sender is in one message at a time, so more than one of its
#: envelopes is unread only after messages that nobody came for have ended at their limit.
ROOM: Final = 4


class Box(NamedTuple):
    """All messages to one rank of one group, by a `name` that is alike on all its ranks; `senders`: global ranks."""

    name: str
    senders: tuple[int, ...]

    @property
    def _room(self) -> int:
        return ROOM * max(1, len(self.senders))

    def put(self, store: AgreementStore, envelope: Envelope) -> None:
        """Count an envelope, and write it where an older one stood."""
        count = store.count(f"{self.name}/sent", 1)
        store.put(f"{self.name}/envelope/{count % self._room}", " ".join(map(str, (count, *envelope))))

    def read(self, store: AgreementStore, awaited: set[int], counted: int) -> tuple[list[Envelope], int]:
        """Return the envelopes since the `counted`-th, and how many have been counted.

        `awaited`: which of them were counted and not yet written; brought up to date.
        """
        count = store.count(f"{self.name}/sent")
        awaited |= set(range(counted + 1, count + 1))
        awaited -= set(range(count - self._room + 1))
        keys = {number: f"{self.name}/envelope/{number % self._room}" for number in sorted(awaited)}
        texts = store.read_many(list(keys.values())) if keys else {}
        found = []
        for number, key in keys.items():
            told = [int(part) for part in texts.get(key, "0").split()]
            if told[0] == number:
                awaited.discard(number)
                found.append(Envelope(*told[1:]))
        return found, count


class Envelopes:
    """The envelopes that this process tells and reads; the monitor calls `hear` and `step`, the program the rest."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._wanted: set[str] = set()  # names of boxes that their ranks read
        self._open: dict[str, tuple[Box, Envelope]] = {}  # the send that this process is in, by the box's name
        self._unsaid: list[tuple[Box, Envelope]] = []
        self._known: dict[Box, tuple[set[int], int]] = {}  # of boxes that are read: what is awaited, and the count
        self._unasked: list[Box] = []
        self._come: dict[Box, list[Envelope]] = {}
        self._reading: list[Box] = []
        self._steps = 0
        #: Ranks that have left, as the monitor has last read.
        self.departed: Mapping[int, Departure] = {}

    # ------------------------------------------------------------------ the program

    @contextmanager
    def sending(self, box: Box, envelope: Envelope) -> Iterator[None]:
        """Have the owner of the box told that this process waits in a send to it, if it wants to know."""
        with self._changed:
            self._open[box.name] = box, envelope
            told = box.name in self._wanted
            if told:
                self._unsaid.append((box, envelope))
        if told:
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._open.pop(box.name, None)

    @contextmanager
    def reading(self, box: Box) -> Iterator[None]:
        """Have the monitor look for new envelopes meanwhile; the senders hear the first time that somebody does."""
        with self._changed:
            self._reading.append(box)
            if box not in self._known:
                self._known[box] = set(), 0
                self._unasked.append(box)
        try:
            yield
        finally:
            with self._changed:
                self._reading.remove(box)

    def new(self, box: Box, seconds: float) -> list[Envelope]:
        """Have the monitor look once, within so many seconds, and return what has come since the last call."""
        with self._changed:
            before = self._steps
            self._wake()
            self._changed.wait_for(lambda: self._steps > before or bool(self._come.get(box)), seconds)
            return self._come.pop(box, [])

    # ------------------------------------------------------------------ the monitor

    @property
    def busy(self) -> bool:
        """Return whether somebody waits for an envelope."""
        return bool(self._reading)

    def hear(self, name: str) -> None:
        """Somebody reads the box of this name: from now on tell it what is sent, beginning with what waits already."""
        with self._changed:
            self._wanted.add(name)
            if name in self._open:
                self._unsaid.append(self._open[name])

    def step(
        self, store: AgreementStore, post: Callable[[dict[str, object]], None], departed: Mapping[int, Departure]
    ) -> None:
        """Tell what is unsaid, and read what has come."""
        with self._changed:
            unsaid, self._unsaid = self._unsaid, []
            unasked, self._unasked = self._unasked, []
            known = {box: self._known[box] for box in self._reading}
        for box in unasked:
            post({"kind": "receives", "box": box.name, "members": list(box.senders)})
        for box, envelope in unsaid:
            box.put(store, envelope)
        found = {box: (awaited, *box.read(store, awaited, counted)) for box, (awaited, counted) in known.items()}
        with self._changed:
            for box, (awaited, envelopes, counted) in found.items():
                self._known[box] = awaited, counted
                self._come.setdefault(box, []).extend(envelopes)
            self.departed = departed
            self._steps += 1
            self._changed.notify_all()
