"""The job's list of ranks that are gone or going, in the store: each entered once,
by itself or by a witness, and read by all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ncclguard.coordination.store import AgreementStore, Entries
from ncclguard.protocol import codec
from ncclguard.protocol.decision import Departure


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

    def read(self, store: AgreementStore) -> None:
        """Learn what was entered since."""
        for text in self._entries.new(store):
            self._learn(text)

    def count(self, store: AgreementStore) -> int:
        """How many have been entered."""
        return self._entries.count(store)

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
