"""The places of lost ranks: what is offered, by whom it is taken, and until when it counts as taken."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ncclguard.coordination.store import AgreementStore
from ncclguard.training import declaration, places, stand_by


class Waiting:
    """What the first rank has heard of newcomers."""

    def __init__(self, *missing: int) -> None:
        self.missing = frozenset(missing)
        self.awaited: set[int] = set()

    def is_awaited(self, rank: int, now: float) -> bool:
        return rank in self.awaited

    def joined(self) -> list[tuple[int, int]]:
        return []


@pytest.fixture
def store() -> AgreementStore:
    return AgreementStore(HashStore(), "ncclguard")


@pytest.fixture
def found(store: AgreementStore) -> AgreementStore:
    return places.beneath(store.connection.store)


def offered(offers: Any, store: AgreementStore, start: float, seconds: float) -> float:
    """The first rank's monitor steps for so long, by its own clock; returns the time then."""
    steps = int(seconds / places.LOOK_EVERY) + 1
    for step in range(1, steps + 1):
        offers.look(start + step * places.LOOK_EVERY, store)
    return start + steps * places.LOOK_EVERY


def opened(waiting: Waiting, store: AgreementStore) -> tuple[places.Offers, float]:
    """The offers of missing ranks for whose places nobody of their own host has come, and the time then."""
    offers = places.Offers(waiting)  # type: ignore[arg-type]
    return offers, offered(offers, store, 0.0, places.OWN_HOST_FIRST + 1)


def test_a_place_is_offered_when_nobody_of_its_own_host_has_come(store: AgreementStore, found: AgreementStore) -> None:
    waiting = Waiting(3)
    offers, search = places.Offers(waiting), places.Search(found, "who")  # type: ignore[arg-type]
    now = offered(offers, store, 0.0, places.OWN_HOST_FIRST - 1)
    assert (search.look(), found.count("offers")) == (None, 0)
    now = offered(offers, store, now, 2)
    assert search.look() is None  # an offer counts when its counter moves
    now = offered(offers, store, now, 1)
    place = search.look()
    assert place is not None
    assert (place.rank, place.env["RANK"], place.env[declaration.PLACE]) == (3, "3", "1")
    assert places.Search(found, "another").look() is None


def test_an_offer_holds_where_only_one_of_two_hosts_has_started_its_ranks_again(
    store: AgreementStore, found: AgreementStore
) -> None:
    for host in (0, 1):
        places.begin(store.connection.store, 0, host, 2)
    places.begin(store.connection.store, 1, 1, 2)
    assert places.generation(found) == "0"
    places.begin(store.connection.store, 1, 0, 2)
    assert places.generation(found) == "1"
    places.begin(store.connection.store, 2, 0, 2)
    assert places.generation(found) == "1"


def test_the_place_of_a_rank_that_would_end_again_is_not_offered(store: AgreementStore, found: AgreementStore) -> None:
    places.refuse(found, 3, "0")
    offers: Any = places.Offers(Waiting(2, 3))  # type: ignore[arg-type]
    offered(offers, store, 0.0, places.OWN_HOST_FIRST * 3)
    assert found.count("offers") == 1
    text = found.read("offer/1")
    assert text is not None
    assert places.Place.from_json(text).rank == 2


def test_nobody_takes_a_place_that_is_refused_after_it_was_offered(
    store: AgreementStore, found: AgreementStore
) -> None:
    search = places.Search(found, "who")
    offers, now = opened(Waiting(3), store)
    search.look()
    places.refuse(found, 3, "0")
    offered(offers, store, now, 1)
    assert search.look() is None


def test_its_own_host_comes_first_each_time_that_a_rank_is_lost(store: AgreementStore, found: AgreementStore) -> None:
    waiting = Waiting(3)
    offers: Any = places.Offers(waiting)  # type: ignore[arg-type]
    now = offered(offers, store, 0.0, 2)
    waiting.missing = frozenset()
    now = offered(offers, store, now, places.OWN_HOST_FIRST)
    waiting.missing = frozenset({3})
    now = offered(offers, store, now, places.OWN_HOST_FIRST - 1)
    assert found.count("offers") == 0
    offered(offers, store, now, 2)
    assert found.count("offers") == 1


def test_nobody_takes_the_place_of_a_rank_that_is_back(store: AgreementStore, found: AgreementStore) -> None:
    search = places.Search(found, "who")
    offers, now = opened(Waiting(3), store)
    assert search.look() is None
    offered(offers, store, now, 1)
    search._counted = {1: (0, time.monotonic() - 30)}  # it was stopped since
    assert search.look() is None


def test_an_offer_of_an_earlier_generation_is_nobodys(
    store: AgreementStore, found: AgreementStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = places.Search(found, "who")
    places.begin(store.connection.store, 1, 0, 1)
    offers, now = opened(Waiting(3), store)
    search.look()
    offered(offers, store, now, 1)
    assert search.look() is None
    ended: list[int] = []
    monkeypatch.setattr(places, "os", SimpleNamespace(environ={}, getpid=lambda: 1, kill=lambda *_: ended.append(1)))
    places.Seat().look(0.0, store)
    assert ended == [1]
    places.begin(store.connection.store, 0, 0, 1)
    places.Seat().look(0.0, store)
    assert ended == [1]


def test_a_place_is_offered_again_when_nobody_vouches_for_who_has_taken_it(
    store: AgreementStore, found: AgreementStore
) -> None:
    """And by a new first rank too, which finds out who has it; the making of a model may take minutes."""
    waiting = Waiting(3)
    offers, now = opened(waiting, store)
    found.first("taken/1", "who")
    for count in range(60):
        places.vouch(found, 1, count)
        now = offered(offers, store, now, 2)
        if count == 30:
            offers = places.Offers(waiting)  # type: ignore[arg-type]
    assert found.count("offers") == 1
    now = offered(offers, store, now, places.VOUCHED_FOR - 5)
    assert found.count("offers") == 1
    now = offered(offers, store, now, 8)
    assert found.count("offers") == 2
    found.first("taken/2", "another")
    now = offered(offers, store, now, 1)
    places.vouch(found, 2, None)
    offered(offers, store, now, 1)
    assert found.count("offers") == 3


def test_an_offer_is_withdrawn_when_somebody_of_its_own_host_waits(
    store: AgreementStore, found: AgreementStore
) -> None:
    waiting = Waiting(3)
    offers, now = opened(waiting, store)
    waiting.awaited = {3}
    counted = found.count("open/1")
    offered(offers, store, now, 10)
    assert (found.count("open/1"), counted > 0) == (counted, True)


def test_a_process_that_has_got_a_place_holds_no_descriptor_of_its_launcher_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Popen:
        pid = 1

        def __init__(self, command: list[str], *, pass_fds: tuple[int], **_: Any) -> None:
            os.write(pass_fds[0], b'{}\n{"rank": 3, "number": 1, "generation": "0"}\n')

        def poll(self) -> None:
            return None

    monkeypatch.setattr(stand_by.subprocess, "Popen", Popen)
    before = len(os.listdir("/proc/self/fd"))
    process = stand_by._Process(("127.0.0.1", 1), 0, ["true"])
    process.look(str(tmp_path), 1.0)
    process.look(str(tmp_path), 2.0)
    assert (process.rank, len(os.listdir("/proc/self/fd"))) == (3, before)


@pytest.mark.parametrize(
    ("joined", "ended", "goes_on", "code"),
    [
        (False, 1, True, 1),
        (False, -11, True, 1),
        (False, 1, False, 0),
        (False, 0, True, 0),
        (False, -9, True, 0),
        (True, 1, True, 1),
    ],
)
def test_a_host_whose_processes_fail_before_they_join_does_not_leave_in_silence(
    joined: bool, ended: int, goes_on: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Popen:
        pid = 1

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def wait(self, _: float | None = None) -> int:
            return ended

    def watch(_: object, processes: list[stand_by._Process], *__: object) -> None:
        processes[0].rank, processes[0].joined = 1, joined

    said: list[str] = []
    monkeypatch.setattr(stand_by.subprocess, "Popen", Popen)
    monkeypatch.setattr(stand_by, "_watch", watch)
    there = iter([True, goes_on])
    monkeypatch.setattr(stand_by, "_is_there", lambda *_: next(there))
    monkeypatch.setattr(stand_by.signal, "signal", lambda *_: None)
    monkeypatch.setattr(stand_by._Process, "end", lambda *_: None)
    assert stand_by.run(("127.0.0.1", 1), ["train.py"], 1, "", said.append) == code
    assert any("no process stands by any more" in line for line in said) == (code == 1 and not joined)
