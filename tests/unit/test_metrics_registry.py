"""Counters and histograms: right numbers, constant memory, bounded labels."""

from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given, strategies as st

from ncclguard.incident.model import MembershipChange
from ncclguard.metrics.records import SIZE_BOUNDS, TIME_BOUNDS, Record, empty_times, quantile, size_bucket, time_bucket
from ncclguard.metrics.registry import MAX_CULPRITS, MAX_SERIES, RecordingListener, Registry


@given(st.floats(min_value=0, max_value=1e9))
def test_a_duration_lies_in_its_bucket(seconds: float) -> None:
    index = time_bucket(seconds)
    assert index == len(TIME_BOUNDS) or seconds < TIME_BOUNDS[index]
    assert index == 0 or seconds >= TIME_BOUNDS[index - 1]


@given(st.integers(min_value=0, max_value=1 << 60))
def test_a_size_lies_in_its_bucket(nbytes: int) -> None:
    index = size_bucket(nbytes)
    assert index == len(SIZE_BOUNDS) or nbytes <= SIZE_BOUNDS[index]
    assert index == 0 or nbytes > SIZE_BOUNDS[index - 1]


@given(st.floats(min_value=1e-5, max_value=1e3), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_a_quantile_is_right_to_within_its_bucket(value: float, q: float) -> None:
    counts = empty_times()
    counts[time_bucket(value)] += 10
    assert value / 2 <= quantile(counts, TIME_BOUNDS, q) <= value * 2


def test_the_median_of_two_kinds_of_operations() -> None:
    counts = empty_times()
    for value in [0.001] * 60 + [1.0] * 40:
        counts[time_bucket(value)] += 1
    assert 0.0005 <= quantile(counts, TIME_BOUNDS, 0.5) <= 0.002
    assert 0.5 <= quantile(counts, TIME_BOUNDS, 0.99) <= 2.0
    assert quantile(empty_times(), TIME_BOUNDS, 0.5) == 0.0


def test_successes_and_failures_are_counted_by_group_operation_and_phase() -> None:
    registry = Registry()
    registry.success("0:cpu:ab12", "all_reduce", "train", 4096, 0.5, 0.1, 1)
    registry.success("0:cpu:ab12", "all_reduce", "train", 4096, 1.5, -1.0, 3)
    registry.failure("0:cpu:ab12", "all_reduce", "train", 4096, 60.0, 1, "late", (2, 3))
    registry.failure("0:cpu:ab12", "barrier", None, 0, 2.0, 1, "lost", (2,))
    barrier, reduce = sorted(registry.snapshot(), key=lambda one: one.count)
    assert (reduce.group, reduce.op, reduce.phase) == ("0:cpu", "all_reduce", "train")
    assert (reduce.count, reduce.attempts, reduce.nbytes, reduce.failed) == (3, 5, 3 * 4096, 1)
    assert (reduce.seconds, reduce.waited, reduce.longest) == (62.0, pytest.approx(0.1), 60.0)
    assert reduce.failures == {"late": 1}
    assert reduce.culprits == {"2": 1, "3": 1}
    assert sum(reduce.durations) == sum(reduce.sizes) == 3
    assert sum(reduce.waits) == 1  # a later try says nothing about who came last
    assert (barrier.phase, barrier.failures, barrier.culprits) == ("none", {"lost": 1}, {"2": 1})


def test_losses_rejoins_and_what_they_cost_are_counted_and_told_at_once() -> None:
    told: list[Record] = []
    hearer = RecordingListener("job1", told.append)
    for kind, ranks, seconds in (("went on", (1, 3), 1.5), ("rejoined", (3,), 4.0)):
        change = MembershipChange(kind=kind, ranks=ranks, participants=2, seconds=seconds)
        hearer.membership_changed(change)
    snapshot = hearer.snapshot({})
    assert (snapshot.losses, snapshot.rejoins, snapshot.lost_seconds) == (2, 1, 5.5)
    assert [record.to_dict()["text"] for record in told] == [
        "went on without ranks 1, 3 after 1.5 s",
        "rank 3 rejoined, 4.0 s",
    ]


def test_memory_and_labels_stay_bounded() -> None:
    """A program with a new group name in every step must not grow its process, nor a Prometheus server."""
    registry = Registry()
    for number in range(3 * MAX_SERIES):
        registry.success(f"group{number}:cpu:ab", "all_reduce", None, 1, 0.1, 0.1, 1)
    for rank in range(10 * MAX_CULPRITS):
        registry.failure("group0:cpu:ab", "all_reduce", None, 1, 0.1, 1, "lost", (rank,))
    snapshot = registry.snapshot()
    assert len(snapshot) == MAX_SERIES + 1
    assert sum(one.count for one in snapshot) == 3 * MAX_SERIES + 10 * MAX_CULPRITS
    assert next(one for one in snapshot if one.group == "other").count == 2 * MAX_SERIES
    first = next(one for one in snapshot if one.group == "group0:cpu")
    assert len(first.culprits) == MAX_CULPRITS + 1
    assert sum(first.culprits.values()) == 10 * MAX_CULPRITS
    before = sum(map(sys.getsizeof, (first.durations, first.waits, first.sizes)))
    for _ in range(10_000):
        registry.success("group0:cpu:ab", "all_reduce", None, 1, 0.1, 0.1, 1)
    after = next(one for one in registry.snapshot() if one.group == "group0:cpu")
    assert sum(map(sys.getsizeof, (after.durations, after.waits, after.sizes))) == before


def test_threads_lose_no_count() -> None:
    registry = Registry()

    def work() -> None:
        for _ in range(5000):
            registry.success("0:cpu:ab", "all_reduce", None, 1, 0.1, 0.1, 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (series,) = registry.snapshot()
    assert series.count == series.nbytes == sum(series.durations) == 20_000
