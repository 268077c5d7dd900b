"""Lists in the store: an entry whose writer was killed before writing it hides none of those that follow."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from ncclguard.coordination import store as entries_module
from ncclguard.coordination.liveness import Identity, Liveness, Neighbours, Sight
from ncclguard.coordination.store import BATCH, ENTRY_PATIENCE, AgreementStore, Departures, Entries
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Departure


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(entries_module, "time", types.SimpleNamespace(monotonic=lambda: self.now))


def test_entries_after_one_that_was_never_written_are_read_at_once() -> None:
    store = AgreementStore(HashStore())
    writer, reader = Entries("list", "entry"), Entries("list", "entry")
    writer.add(store, "one")
    store.count("list", 1)  # counted, then killed
    writer.add(store, "three")
    assert reader.new(store) == ["one", "three"]
    assert reader.new(store) == []


def test_an_entry_that_is_written_late_is_read_once_and_soon_looked_for_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer was stopped between the two steps, or it is dead: nobody can know."""
    clock, reader = Clock(monkeypatch), Entries("list", "entry")
    asked: list[str] = []

    class Asked(HashStore):
        def check(self, keys: list[str]) -> bool:
            asked.extend(keys)
            return bool(super().check(keys))

    store = AgreementStore(Asked())
    store.count("list", 2)
    assert reader.new(store) == []
    store.first("entry/2", "two")
    clock.now += ENTRY_PATIENCE / 2
    assert reader.new(store) == ["two"]
    clock.now += ENTRY_PATIENCE
    assert reader.new(store) == []
    asked.clear()
    for _ in range(10):
        assert reader.new(store) == []
    assert not asked
    store.first("entry/1", "one")
    clock.now += ENTRY_PATIENCE
    assert reader.new(store) == ["one"]
    assert reader.new(store) == []


def test_more_entries_than_one_request_takes_come_in_order() -> None:
    store, reader = AgreementStore(HashStore()), Entries("list", "entry")
    numbers = range(1, 2 * BATCH + 10)
    for number in numbers:
        store.count("list", 1)
        if number % 100:
            store.first(f"entry/{number}", str(number))
    assert reader.new(store) == [str(number) for number in numbers if number % 100]


def test_a_departure_after_one_that_was_never_written_is_known() -> None:
    store, departures = AgreementStore(HashStore()), Departures(0)
    store.count("departures", 1)  # a witness that was killed
    Departures(3).post(store, Departure(2, Cause.LOST, "its pid does not exist"), {})
    departures.read(store)
    assert 2 in departures


def test_a_rank_of_this_host_after_one_that_never_registered_is_known() -> None:
    store = AgreementStore(HashStore())
    livenesses = [Liveness(rank, advertise_address="127.0.0.1") for rank in range(2)]
    try:
        first, second = (Neighbours(rank, 3, liveness) for rank, liveness in enumerate(livenesses))
        (host,) = {neighbours._list._counter for neighbours in (first, second)}
        store.count(host, 1)  # rank 2, killed before it wrote who it is
        first.register(store)
        second.register(store)
        for now in (100.0, 102.0):  # at the first step the others register just now, too
            first.step(now, True)
        assert [peer.rank for peer in first.here] == [1]
    finally:
        for liveness in livenesses:
            liveness.close()


class Looks:
    """A liveness that notes whom it is asked about."""

    def __init__(self, rank: int) -> None:
        self.identity = Identity(rank, f"host{rank}", f"host{rank}", pid=1, start_ticks=1, port=None)
        self.looked: list[int] = []
        self.sought: list[int] = []

    def look(self, peer: Identity) -> tuple[Sight, str]:
        self.looked.append(peer.rank)
        return Sight.PRESENT, "it answers"

    def seek(self, peers: Iterable[Identity], since: float) -> None:
        self.sought += [peer.rank for peer in peers]

    def befriend(self, peer: Identity) -> None: ...

    def drain(self) -> None: ...


def test_ranks_that_were_asked_about_once_are_not_followed_for_ever() -> None:
    """Else the coordinator of a large job keeps probing every rank that was silent once."""
    store, size = AgreementStore(HashStore()), 50
    everyone = [Neighbours(rank, size, cast(Liveness, Looks(rank))) for rank in range(size)]
    for neighbours in everyone:
        neighbours.register(store)
    looks = cast(Looks, everyone[0]._liveness)
    for now in (100.0, 102.0):
        everyone[0].step(now, True)
    everyone[0].seek(range(10, 40), 100.0)
    assert looks.sought == list(range(10, 40))
    assert {everyone[0].silent_cause(rank) for rank in range(10, 40)} == {Cause.STUCK}
    looks.looked.clear()
    everyone[0].departures()
    assert sorted(looks.looked) == [1, 49]  # the two beside it


def test_a_rank_that_was_found_gone_meanwhile_is_announced_too() -> None:
    """A caller's thread asks about it before the monitor looks."""
    store = AgreementStore(HashStore())
    everyone = [Neighbours(rank, 3, cast(Liveness, Looks(rank))) for rank in range(3)]
    for neighbours in everyone:
        neighbours.register(store)
    for now in (100.0, 102.0):
        everyone[0].step(now, True)
    cast(Any, everyone[0]._liveness).look = lambda peer: (Sight.GONE, "its pid does not exist")
    assert everyone[0].gone(1)
    assert sorted(rank for rank, _ in everyone[0].departures()) == [1, 2]
    assert everyone[0].departures() == []
