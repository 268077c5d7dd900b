"""What a long job leaves in the store and in memory: as much after a thousand slow collectives as after a few."""

from __future__ import annotations

import logging
import types
from typing import cast

import pytest
from torch.distributed import HashStore

from ncclguard.coordination.group_state import OpenCall
from ncclguard.coordination.monitor import Monitor
from ncclguard.coordination.store import AgreementStore, HighWaterMarks
from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Operation
from ncclguard.watch.coordination import WatchCoordination, WatchState
from ncclguard.watch.recorder import Observation, Pending
from tests.protocol.test_scale import Job


def test_the_first_at_a_place_is_told_to_all_who_come_to_it_until_somebody_is_further() -> None:
    store, ranks = AgreementStore(HashStore()), [HighWaterMarks() for _ in range(4)]
    assert ranks[0].enter(store, "open", (0, 1), ["zero"]) == ["zero"]
    assert ranks[1].enter(store, "open", (0, 1), ["one"]) == ["zero"]
    assert ranks[1].enter(store, "open", (0, 2), ["one"]) == ["one"]
    assert ranks[0].enter(store, "open", (0, 2), ["zero"]) == ["one"]
    assert ranks[2].enter(store, "open", (0, 2), ["two"]) == ["one"]  # it has seen nothing before
    assert ranks[3].enter(store, "open", (0, 1), ["three"]) is None
    assert ranks[3].enter(store, "open", (1, 1), ["three"]) == ["three"]
    assert ranks[1].enter(store, "open", (0, 3), ["one"]) is None


def test_a_key_that_the_store_has_lost_ends_nothing() -> None:
    store, rank = HashStore(), HighWaterMarks()
    agreement = AgreementStore(store, "here")
    assert rank.enter(agreement, "open", (0, 1), ["zero"]) == ["zero"]
    store.delete_key("here/open")
    assert rank.enter(agreement, "open", (0, 2), ["zero"]) is None


def operations(job: Job, number: int) -> None:
    """Collectives in which rank 0 comes after 70 s: who waits publishes what it called, and asks twice where rank 0 is."""
    for _ in range(number):
        job.enter(range(1, job.size))
        job.step(140, seconds=0.5)
        job.enter([0])
        for state in job.states:
            assert state.member.ready(0) and state.member.done(0)
            state.wait_in(None)


def test_slow_operations_and_the_questions_about_them_do_not_fill_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(4, monkeypatch)
    with caplog.at_level(logging.WARNING, logger="ncclguard"):
        operations(job, 2)
        early = set(job.shared)
        operations(job, 6)
    assert len([r for r in caplog.records if "rank 0 has not come" in r.getMessage()]) == 16
    new = {key.rpartition("/")[0].rpartition("/")[2] for key in set(job.shared) - early}
    assert new <= {"event"}  # of the job's log: the questions
    answers = {key: value for key, value in job.shared.items() if "/answer/" in key}
    assert answers and not any(answers.values())


def test_a_mismatch_is_seen_also_after_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(4, monkeypatch)
    operations(job, 3)
    job.enter([0])
    job.step(3, seconds=0.5)
    state = job.states[2]
    state.member.enter(Operation(0, 8, "barrier()"))
    state.wait_in(OpenCall("barrier()", job.now, job.now + 60.0, thread=0))
    job.step(6, seconds=0.5)
    assert state.decided is not None
    verdict = state.decided[1]
    assert (verdict.cause, verdict.sides) == (Cause.DIVERGED, (("all_reduce(1)", (0,)), ("barrier()", (2,))))


def pending(number: int) -> Pending:
    return Pending("0:gloo", (0, 1), number, 5, f"all_reduce(number {number})", 1, 0, "gloo/0")


def test_watch_keeps_the_newest_of_each_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 collectives that stall, each is written down, and asked about once."""
    store = HashStore()
    agreement = AgreementStore(store, "here")
    member = types.SimpleNamespace(generation=0, frozen=False, trouble=None, participants=(0, 1), members=(0, 1))
    state = types.SimpleNamespace(member=member, observation=Observation(), asked=0.0, key="watch", age=lambda p: 40.0)
    posted: list[dict[str, object]] = []
    monitor = types.SimpleNamespace(post=posted.append)
    said: list[str] = []
    watch = WatchCoordination(
        cast(Monitor, monitor), cast(WatchState, state), 0, 30.0, lambda kind, text: said.append(text), lambda: None
    )
    for number in range(1, 1001):
        watch.waiting = (pending(number),)
        state.observation = Observation(recent=tuple(pending(n) for n in range(max(1, number - 7), number + 1)))
        watch._publish(agreement)
        watch._ask_if_due(100.0 * number, agreement)
        watch._ask_if_due(100.0 * number, agreement)
        watch._question = None
    assert len(posted) == 1000 and not said
    assert len(watch._published) == 4 and len(watch._warned) == 1
    assert store.num_keys() <= 4 + 1 + 1  # what was called, who asks, how many have answered
    other = WatchCoordination(
        cast(Monitor, monitor), cast(WatchState, state), 1, 30.0, lambda kind, text: said.append(text), lambda: None
    )
    state.observation = Observation(recent=(pending(999), pending(1000)))
    other.waiting = (Pending("0:gloo", (0, 1), 1000, 6, "barrier(number 1000)", 0, 0, "gloo/0"),)
    other._publish(agreement)
    assert said == ["rank 0 is in all_reduce(number 1000), rank 1 in barrier(number 1000)"]
