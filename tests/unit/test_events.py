"""What a listener is told of a guarded group: each call's beginning and end in order, and calls that had no turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ncclguard as ng
from ncclguard import events
from ncclguard.config import GuardConfig
from ncclguard.coordination.group_state import GroupState, OpenCall
from ncclguard.engine.call import Call
from ncclguard.engine.chunking import EMPTY
from ncclguard.engine.execution import Barrier
from ncclguard.engine.group import GuardedGroup
from ncclguard.outcome import Outcome
from ncclguard.protocol.decision import Operation
from ncclguard.transport.base import TransportError

KEY, RANKS = "0:cpu:ab12", (0, 1)


class Together:
    """A communicator on which the other rank is always in the same operation, once the test lets it come."""

    ranks, payload_nbytes, compares_marks, agreed = RANKS, 0, False, True

    def __init__(self) -> None:
        self.come = threading.Event()
        self.come.set()
        self.entered = threading.Event()
        self.interruption: BaseException | None = None

    def agree(self, value: int, payload: object) -> Together:
        return self

    def wait(self, seconds: float) -> bool:
        self.entered.set()
        if self.interruption is not None:
            raise self.interruption
        return self.come.wait(seconds)


class Communicators:
    """What a guarded group needs of its communicators."""

    device, in_flight = torch.device("cpu"), 2

    def __init__(self) -> None:
        self.communicator = Together()
        self.broken = False

    def get(self, generation: int, deadline: float, slice_seconds: float) -> Together:
        if self.broken:
            raise TransportError("broken")
        return self.communicator

    def stop(self, generation: int) -> None:
        """Nothing is in flight."""

    def quiet(self, generation: int, seconds: float) -> bool:
        return True

    def gone(self, rank: int, since: float) -> str:
        return ""

    def gives_up(self) -> None:
        """Nobody is told."""


class Heard(events.Listener):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, object]] = []
        self.calls: list[OpenCall] = []

    def call_started(self, group: str, call: OpenCall) -> None:
        self.all.append(("started", group, call.text))
        self.calls.append(call)

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        self.all.append(("ended", group, call.text if outcome is None or not outcome.failed else str(outcome.cause)))
        self.calls.append(call)

    def call_refused(self, group: str, outcome: Outcome) -> None:
        self.all.append(("refused", group, outcome.op))


@pytest.fixture
def heard() -> Iterator[Heard]:
    listener = Heard()
    events.listen(listener)
    yield listener
    events.leave(listener)


class Group:
    """A guarded group of two ranks, of which the other is played."""

    def __init__(self, **settings: Any) -> None:
        self.state = GroupState(KEY, 0, RANKS)
        self.communicators: Any = Communicators()
        self.guarded = GuardedGroup(self.state, self.communicators, lambda: None, GuardConfig(**settings))

    def barrier(self, name: str, timeout: float = 30.0) -> Outcome:
        call = Call("barrier", 0, 0, True, Operation(0, 7, f"barrier({name})", closing=False))
        return self.guarded.run(call, Barrier(EMPTY), timeout)


def test_every_call_is_told_of_as_it_begins_and_as_it_ends(heard: Heard) -> None:
    group = Group()
    assert group.barrier("first") and group.barrier("second")
    assert heard.all == [
        ("started", KEY, "barrier(first)"),
        ("ended", KEY, "barrier(first)"),
        ("started", KEY, "barrier(second)"),
        ("ended", KEY, "barrier(second)"),
    ]
    first, again, second, _ = heard.calls
    assert first is again  # one object from beginning to end, by which a listener knows a call again
    assert (first.sequence, second.sequence) == (1, 2)
    assert first.participants == RANKS
    assert first.entered <= first.opened <= second.entered


@pytest.mark.parametrize("on_failure", ["return", "raise"])
def test_a_failure_is_told_of_before_its_caller_learns_of_it(heard: Heard, on_failure: str) -> None:
    group = Group(on_failure=on_failure)
    group.communicators.broken = True
    group.state.make_unavailable("the store is gone")
    if on_failure == "raise":
        with pytest.raises(ng.CollectiveFailed):
            group.barrier("alone")
    else:
        assert not group.barrier("alone")
    assert heard.all == [("started", KEY, "barrier(alone)"), ("ended", KEY, "unknown")]


def test_a_call_that_gets_no_turn_is_refused_between_the_others_beginning_and_end(heard: Heard) -> None:
    group = Group()
    group.communicators.communicator.come.clear()
    thread = threading.Thread(target=group.barrier, args=["long"])
    thread.start()
    assert group.communicators.communicator.entered.wait(30)
    assert not group.barrier("short", timeout=0.01)
    group.communicators.communicator.come.set()
    thread.join(30)
    assert heard.all == [
        ("started", KEY, "barrier(long)"),
        ("refused", KEY, "barrier"),
        ("ended", KEY, "barrier(long)"),
    ]


def test_an_interrupted_call_ends_without_an_outcome(heard: Heard) -> None:
    group = Group()
    group.state.grace = 0.01
    group.communicators.communicator.interruption = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        group.barrier("interrupted")
    assert heard.all == [("started", KEY, "barrier(interrupted)"), ("ended", KEY, "barrier(interrupted)")]


def test_who_has_left_is_told_nothing_more_and_may_leave_again(heard: Heard) -> None:
    group, other = Group(), Heard()
    events.listen(other)
    assert group.barrier("first")
    events.leave(other)
    events.leave(other)
    assert group.barrier("second")
    assert [what[2] for what in other.all] == ["barrier(first)"] * 2
    assert len(heard.all) == 4


def test_leaving_from_within_a_call_takes_nothing_from_the_others(heard: Heard) -> None:
    class Once(Heard):
        def call_started(self, group: str, call: OpenCall) -> None:
            super().call_started(group, call)
            events.leave(self)

    first, last = Once(), Heard()
    events.listen(first)
    events.listen(last)
    try:
        assert Group().barrier("only")
    finally:
        events.leave(last)
    assert len(first.all) == 1
    assert heard.all == last.all == [("started", KEY, "barrier(only)"), ("ended", KEY, "barrier(only)")]


def test_a_listener_that_overrides_nothing_is_told_everything_without_harm() -> None:
    listener = events.Listener()
    events.listen(listener)
    try:
        assert Group().barrier("one")
    finally:
        events.leave(listener)
    assert listener not in events.listeners


def test_two_threads_that_begin_to_listen_at_once_are_both_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first is about to write what it has read."""
    listeners = [events.Listener(), events.Listener()]
    threads: list[threading.Thread] = []
    replace = events._replace

    def interrupted(wanted: tuple[events.Listener, ...]) -> None:
        if not threads:
            threads.append(threading.Thread(target=events.listen, args=(listeners[1],)))
            threads[0].start()
            threads[0].join(0.2)
        replace(wanted)

    monkeypatch.setattr(events, "_replace", interrupted)
    events.listen(listeners[0])
    try:
        threads[0].join()
        assert {*listeners} <= {*events.listeners}
    finally:
        for listener in listeners:
            events.leave(listener)
