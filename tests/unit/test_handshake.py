"""The session's nonce: all ranks get rank 0's of this life, never one that an earlier life left in the store."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from itertools import pairwise

import pytest
from torch.distributed import HashStore

from ncclguard.coordination import store as store_module
from ncclguard.coordination.store import AgreementStore, Handshake


@pytest.fixture(autouse=True)
def _a_second_between_two_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every step is a try."""
    seconds = itertools.count(1000.0)
    monkeypatch.setattr(store_module, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(store_module, "GENTLY", 0.0)


def agree(store: HashStore, ranks: range, order: list[int]) -> dict[int, str | None]:
    shakes = {rank: Handshake(AgreementStore(store), rank, len(ranks)) for rank in ranks}
    for _ in range(6):
        for rank in order:
            shakes[rank].step()
    return {rank: shake.nonce for rank, shake in shakes.items()}


def test_all_ranks_agree_on_rank_0s_nonce_in_any_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        nonces = agree(HashStore(), range(3), order)
        assert len(set(nonces.values())) == 1
        assert nonces[0]


def test_a_second_life_over_the_same_store_never_believes_the_first_ones_nonce() -> None:
    """The others start before rank 0, so everything they can read at first is stale."""
    store = HashStore()
    first = agree(store, range(3), [0, 1, 2])
    early = {rank: Handshake(AgreementStore(store), rank, 3) for rank in (1, 2)}
    for _ in range(3):
        for shake in early.values():
            assert not shake.step()
    zero = Handshake(AgreementStore(store), 0, 3)
    for _ in range(store_module.RENAMED_AFTER + 2):
        zero.step()
        for shake in early.values():
            shake.step()
    assert {shake.nonce for shake in early.values()} == {zero.nonce}
    assert zero.nonce != first[0]


def test_a_rank_that_never_comes_leaves_rank_0_waiting_and_the_others_served() -> None:
    store = HashStore()
    zero, one = Handshake(AgreementStore(store), 0, 3), Handshake(AgreementStore(store), 1, 3)
    for _ in range(4):
        finished = zero.step()
        one.step()
    assert one.nonce == zero.nonce is not None
    assert not finished


class Counting(AgreementStore):
    """Counts what it is asked to write, and to read."""

    written = read_ = 0

    def put(self, key: str, value: str) -> None:
        self.written += 1
        super().put(key, value)

    def read(self, key: str) -> str | None:
        self.read_ += 1
        return super().read(key)


def test_rank_0_acknowledges_all_that_have_come_with_one_write() -> None:
    store, size = HashStore(), 300
    counting = Counting(store)
    zero = Handshake(counting, 0, size)
    zero.step()
    others = [Handshake(AgreementStore(store), rank, size) for rank in range(1, size)]
    assert not any(shake.step() for shake in others)
    assert counting.written == 1
    assert zero.step()
    assert counting.written == 2
    assert all(shake.step() for shake in others)
    assert {shake.nonce for shake in others} == {zero.nonce}


def test_a_number_of_an_earlier_life_is_no_acknowledgement_in_this_one() -> None:
    """Rank 0 of the first life is gone: what it has acknowledged stays, and covers nobody who comes later."""
    store = HashStore()
    agree(store, range(3), [0, 1, 2])
    late = Handshake(AgreementStore(store), 1, 3)
    for _ in range(5):
        assert not late.step()


def test_a_rank_that_waits_for_rank_0_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(store_module, "time", types.SimpleNamespace(monotonic=lambda: now))
    counting = Counting(HashStore())
    one = Handshake(counting, 1, 2)
    for _ in range(1000):
        one.step()
        now += 0.01
    assert 80 <= counting.read_ <= 110


def reads(world_size: int, slow: Callable[[int], float], until: float, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a rank that waits for rank 0 reads, in seconds from 0 on, where its n-th read takes `slow(n)`."""
    now, times = 1000.0, list[float]()
    monkeypatch.setattr(store_module, "GENTLY", 4.0)
    monkeypatch.setattr(store_module, "time", types.SimpleNamespace(monotonic=lambda: now))

    class Slow(AgreementStore):
        def read(self, key: str) -> str | None:
            nonlocal now
            times.append(now - 1000.0)
            now += slow(len(times))
            return super().read(key)

    one = Handshake(Slow(HashStore()), 1, world_size)
    while now < 1000.0 + until:
        one.step()
        now += 0.01
    return times


def test_a_rank_asks_the_less_the_slower_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands that join at once would else keep it from answering anybody."""
    assert len(reads(16384, lambda number: 0.5, 100.0, monkeypatch)) * 0.5 <= 0.21 * 100


def test_a_rank_that_was_held_up_in_one_try_does_not_stay_away_for_four_times_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store was not slow: an import held the interpreter. The others' first operation would miss this rank."""
    times = reads(4, lambda number: 1.5 if number == 3 else 0.0, 20.0, monkeypatch)
    assert max(after - before for before, after in pairwise(times)) <= 1.5 + 0.15
