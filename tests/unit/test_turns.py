"""When a thread that waits for a peer yields its core, and when it sleeps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ncclguard.transport import links
from ncclguard.transport.links import Turns


class Machine:
    """A clock, and a yield that takes as long as others compute on the core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.others = 1.0, 0.0
        monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(links, "os", SimpleNamespace(sched_yield=self._yielded))

    def _yielded(self) -> None:
        self.now += 1e-6 + self.others


def sleeps(turns: Turns) -> int:
    """Return in how many waits the thread sleeps at once until it yields again."""
    count = 0
    while not turns.give_way():
        turns.moved()
        count += 1
    turns.moved()
    return count


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_on_an_idle_core_it_yields_for_as_long_as_waking_would_take(machine: Machine) -> None:
    turns = Turns()
    yields = 0
    while turns.give_way():
        yields += 1
    assert 90 <= yields <= 110 and not turns.busy
    turns.moved()
    assert turns.give_way()


def test_where_others_compute_it_tries_to_yield_less_and_less_often(machine: Machine) -> None:
    turns, machine.others = Turns(), 3e-3
    assert turns.give_way() and turns.busy
    found = [sleeps(turns) for _ in range(9)]
    assert found[:3] == [64, 128, 256] and found[-1] == found[-2] == 4096


def test_when_the_others_are_gone_it_yields_again_and_forgets_them(machine: Machine) -> None:
    turns, machine.others = Turns(), 3e-3
    assert turns.give_way()
    turns.moved()
    assert [sleeps(turns) for _ in range(2)] == [64, 128]
    machine.others = 0.0
    assert sleeps(turns) == 256
    for _ in range(1000):  # each wait in which yielding was quick makes the next sleep shorter
        assert sleeps(turns) == 0
    machine.others = 3e-3
    assert sleeps(turns) == 0
    assert sleeps(turns) == 64
