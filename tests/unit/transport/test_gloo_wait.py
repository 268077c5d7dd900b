"""Waiting for the others before gloo connects: one counter in the store, however many ranks there are."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from ncclguard.transport.base import TransportError
from ncclguard.transport.gloo_builder import _await_peers


class Counting(HashStore):
    """Counts the keys that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0
        self.added = 0

    def check(self, keys: list[str]) -> bool:
        self.checked += len(keys)
        return bool(super().check(keys))

    def add(self, key: str, value: int) -> int:
        self.added += 1
        return int(super().add(key, value))


def test_a_thousand_ranks_that_come_one_after_the_other_cost_one_counter_each_look() -> None:
    store, size = Counting(), 1000
    first = threading.Thread(target=_await_peers, args=(store, 0, size, time.monotonic() + 60.0))
    first.start()
    for index in range(1, size - 1):
        store.set(f"ready/{index}", "1")
        store.add("ready", 1)
    _await_peers(store, size - 1, size, time.monotonic() + 60.0)
    first.join(60.0)
    assert not first.is_alive()
    assert store.checked == 0


def test_those_that_did_not_come_are_named_once_the_time_is_over() -> None:
    store = Counting()
    store.set("ready/1", "1")
    store.add("ready", 1)
    with pytest.raises(TransportError, match=r"the ranks at \[2, 3\] of the group did not come"):
        _await_peers(store, 0, 4, time.monotonic() - 1.0)
    assert store.checked == 4
