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
from typing import NamedTuple

from ncclguard.coordination.store import AgreementStore, Entries
from ncclguard.protocol.decision import Departure


class Envelope(NamedTuple):
    """A message that its source waits to be rid of: the `number`-th from there, counted from 0."""

    source: int
    number: int
    tag: int


class Envelopes:
    """The envelopes that this process tells and reads; thread-safe.

    The monitor calls `hear` and `step`, the program's threads the rest. A `box` is the name of all messages to one rank
    of one group, alike on all its ranks.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._wanted: set[str] = set()  # boxes that their ranks read
        self._open: dict[str, Envelope] = {}  # the send that this process is in, by box
        self._unsaid: list[tuple[str, Envelope]] = []
        self._readers: dict[str, Entries] = {}
        self._unasked: list[tuple[str, tuple[int, ...]]] = []
        self._come: dict[str, list[Envelope]] = {}
        self._reading: list[str] = []
        self._steps = 0
        #: Ranks that have left, as the monitor has last read.
        self.departed: Mapping[int, Departure] = {}

    # ------------------------------------------------------------------ the program

    @contextmanager
    def sending(self, box: str, envelope: Envelope) -> Iterator[None]:
        """Have the owner of the box told that this process waits in a send to it, if it wants to know."""
        with self._changed:
            self._open[box] = envelope
            told = box in self._wanted
            if told:
                self._unsaid.append((box, envelope))
        if told:
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._open.pop(box, None)

    @contextmanager
    def reading(self, box: str, senders: tuple[int, ...]) -> Iterator[None]:
        """Have the monitor look for new envelopes meanwhile; the senders hear the first time that somebody does."""
        with self._changed:
            self._reading.append(box)
            if box not in self._readers:
                self._readers[box] = Entries(f"{box}/sent", f"{box}/envelope")
                self._unasked.append((box, senders))
        try:
            yield
        finally:
            with self._changed:
                self._reading.remove(box)

    def new(self, box: str, seconds: float) -> list[Envelope]:
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

    def hear(self, box: str) -> None:
        """Somebody reads this box: from now on tell it what is sent, beginning with what waits already."""
        with self._changed:
            self._wanted.add(box)
            if box in self._open:
                self._unsaid.append((box, self._open[box]))

    def step(
        self, store: AgreementStore, post: Callable[[dict[str, object]], None], departed: Mapping[int, Departure]
    ) -> None:
        """Tell what is unsaid, and read what has come."""
        with self._changed:
            unsaid, self._unsaid = self._unsaid, []
            unasked, self._unasked = self._unasked, []
            readers = {box: self._readers[box] for box in self._reading}
        for box, senders in unasked:
            post({"kind": "receives", "box": box, "members": list(senders)})
        for box, envelope in unsaid:
            Entries(f"{box}/sent", f"{box}/envelope").add(store, " ".join(map(str, envelope)))
        found = {box: [_read(text) for text in entries.new(store)] for box, entries in readers.items()}
        with self._changed:
            for box, envelopes in found.items():
                self._come.setdefault(box, []).extend(envelopes)
            self.departed = departed
            self._steps += 1
            self._changed.notify_all()


def _read(text: str) -> Envelope:
    source, number, tag = map(int, text.split())
    return Envelope(source, number, tag)
