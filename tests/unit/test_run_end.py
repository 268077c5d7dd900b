"""For whom the launcher of a host waits when its own ranks have ended."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ncclguard.coordination.store import AgreementStore
from ncclguard.torch_compat.elastic import Agent
from ncclguard.training import places

#: Ranks of three hosts.
HOSTS = {0: [0, 1], 1: [2, 3], 2: [4, 5]}


def launcher(store: HashStore, host: int, present: set[int] | None, timeout: float = 20.0) -> Any:
    """As much of the agent of a host as waits at the end; `present`: who takes part, as its ranks have said."""
    guests = places.Guests()
    workers = [SimpleNamespace(global_rank=rank) for rank in HOSTS[host]]
    return SimpleNamespace(
        _worker_group=SimpleNamespace(group_world_size=len(HOSTS), group_rank=host, workers=workers),
        _store=store,
        _exit_barrier_timeout=timeout,
        judge=SimpleNamespace(
            taking_part=lambda ranks: present if list(ranks) == HOSTS[host] else None,
            elsewhere=lambda store: guests.look(places.beneath(store), time.monotonic()),
        ),
    )


@pytest.fixture
def store() -> HashStore:
    made = HashStore()
    for host, ranks in HOSTS.items():
        made.set(f"ncclguard/run/{host}/ranks", json.dumps(ranks))
    return made


def seconds(agent: Any) -> float:
    began = time.monotonic()
    Agent._exit_barrier(agent)
    return time.monotonic() - began


def test_a_host_without_a_rank_that_takes_part_is_not_waited_for(store: HashStore) -> None:
    other = threading.Timer(1.0, lambda: Agent._exit_barrier(launcher(store, 1, {0, 1, 2, 3})))
    other.start()
    assert 0.9 < seconds(launcher(store, 0, {0, 1, 2, 3})) < 15  # for host 1, and not for host 2
    other.join()


def test_one_that_ended_before_the_loss_learns_of_it_from_those_that_went_on(store: HashStore) -> None:
    later = threading.Timer(1.0, lambda: Agent._exit_barrier(launcher(store, 1, {2, 3})))
    later.start()
    assert 0.9 < seconds(launcher(store, 0, None)) < 15
    later.join()


@pytest.mark.parametrize("present", [None, {0, 1, 2, 5}])
def test_a_host_of_which_one_rank_takes_part_is_waited_for(store: HashStore, present: set[int] | None) -> None:
    store.set("ncclguard/run/1/ended", json.dumps(None))
    assert seconds(launcher(store, 0, present, timeout=1.5)) > 1.4


def joined(store: HashStore, rank: int, place: int) -> AgreementStore:
    """This rank's newest process has joined from a host that stands by (0: from its own)."""
    found = places.beneath(store)
    found.first(f"join/{found.count('joins', 1)}", json.dumps([rank, place, "0"]))
    return found


def test_ranks_that_a_host_which_stood_by_has_taken_over_are_waited_for_and_their_own_host_is_not(
    store: HashStore,
) -> None:
    """Rank 5 was lost there once more before it was taken over again."""
    everybody = {0, 1, 2, 3, 4, 5}
    for place, rank in ((1, 4), (2, 5), (3, 5)):
        found = joined(store, rank, place)
        places.vouch(found, place, 7)
    places.vouch(found, 1, None)
    places.vouch(found, 2, None)
    guest = threading.Timer(1.0, places.vouch, (found, 3, None))
    other = threading.Thread(target=Agent._exit_barrier, args=(launcher(store, 1, everybody),))
    other.start()
    guest.start()
    assert 0.9 < seconds(launcher(store, 0, everybody)) < 15
    other.join()
    guest.join()


def test_a_rank_whose_launcher_vouches_for_it_no_more_is_not_waited_for(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PATIENCE", 1.5)
    everybody = {0, 1, 2, 3, 4, 5}
    for place, rank in ((1, 4), (2, 5)):
        places.vouch(joined(store, rank, place), place, 7)
    other = threading.Thread(target=Agent._exit_barrier, args=(launcher(store, 1, everybody),))
    other.start()
    assert 1.4 < seconds(launcher(store, 0, everybody)) < 15
    other.join()


@pytest.mark.parametrize("how", ["one by one", "with all others"])
def test_a_host_whose_ranks_have_come_back_to_it_is_waited_for(store: HashStore, how: str) -> None:
    for rank, place in ((4, 1), (5, 2), (4, 0), (5, 0)):
        if place or how == "one by one":
            places.vouch(joined(store, rank, place), place, None)
    if how == "with all others":
        places.begin(store, 1, 0, 1)
    for host in (1, 2):
        threading.Timer(1.0 * host, Agent._exit_barrier, (launcher(store, host, set(range(6))),)).start()
    assert 1.9 < seconds(launcher(store, 0, set(range(6)))) < 15
