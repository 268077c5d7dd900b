"""Who is slow, out of shares of time that ranks measured: simulated ones with noise, and real frames."""

from __future__ import annotations

import gc
import random
import sys
import time
import types
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import given, strategies as st

from ncclguard.metrics.records import SlowRanks
from ncclguard.phases import phase
from ncclguard.watch.pace import PERIOD, Sampler, _doing
from ncclguard.watch.recorder import Recorder
from ncclguard.watch.slow import (
    AGAIN,
    COLLECTING,
    COMPUTING,
    HOST,
    KEPT,
    LENGTHS,
    LOADING,
    PERIODIC,
    SAVING,
    WAITING,
    Doing,
    Pace,
    Told,
    judge,
)

STEP = Doing(COMPUTING, "train.py:20 in step")
EXTRA = "train.py:30 in extra"


class Job:
    """Ranks whose steps take 1 s of computing, `transfer` s of it in collectives, and `factor` s on slow ranks."""

    def __init__(
        self,
        seed: int,
        ranks: int = 8,
        slow: Sequence[int] = (),
        factor: float = 1.0,
        transfer: float = 0.2,
        doing: Doing = STEP,
        per_host: int = 8,
    ) -> None:
        self._random = random.Random(seed)
        self._slow, self._doing, self._per_host = slow, doing, per_host
        total = factor + transfer
        self._busy = [(factor if rank in slow else 1.0) / total for rank in range(ranks)]
        self._more = (factor - 1.0) / total
        self._noise = [0.0] * ranks
        self.waited: list[list[float]] = [[] for _ in range(ranks)]

    def window(self, pausing: int | None = None) -> None:
        """One window more: noise of all, noise of each rank, half of it left of the window before, and of sampling."""
        common = self._random.gauss(0.0, 0.05)
        for rank, busy in enumerate(self._busy):
            own = self._noise[rank] = 0.5 * self._noise[rank] + self._random.gauss(0.0, 0.0175)
            paused = 0.0 if pausing is None else -0.6 * busy if rank == pausing else 0.6 * busy
            share = 1.0 - busy + common + own + paused + self._random.gauss(0.0, 0.03)
            self.waited[rank].append(min(1.0, max(0.0, share)))

    def windows(self, number: int) -> Job:
        for _ in range(number):
            self.window()
        return self

    def paces(self) -> list[Pace]:
        return [self._pace(rank) for rank in range(len(self._busy))]

    def _pace(self, rank: int) -> Pace:
        doings = {STEP: self._busy[rank], Doing(WAITING, "train.py:40 in step"): 1.0 - self._busy[rank]}
        if rank in self._slow and self._doing != STEP:
            doings[STEP] -= self._more
            doings[self._doing] = self._more
        host = f"node{rank // self._per_host}"
        return Pace(rank, host, tuple(self.waited[rank][-KEPT:]), 10.0, doings)


def named(job: Job, windows: int = 40) -> SlowRanks | None:
    """What the ranks have been told after so many windows."""
    told = Told()
    for _ in range(windows):
        job.window()
        told.add(judge(job.paces()))
    return told.now


@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0])
def test_a_rank_20_percent_slower_is_named_and_nobody_else(factor: float) -> None:
    right = 0
    for seed in range(50):
        slow = named(Job(seed, slow=[seed % 8], factor=factor))
        assert slow is None or slow.ranks == (seed % 8,), f"seed {seed}: {slow}"
        right += slow is not None
    assert right >= 48


def test_how_much_is_lost() -> None:
    slow = named(Job(0, slow=[3], factor=1.5))
    assert slow is not None
    assert slow.factor == pytest.approx(1.5, abs=0.1)
    assert slow.lost == pytest.approx(0.5 / 1.7, abs=0.05)
    assert slow.sure
    assert str(slow).startswith("slow: rank 3 on node0, 1.48 times the others' time in each step")
    assert "most of it at train.py:20 in step; the others wait at train.py:40 in step" in str(slow)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nobody_is_named_in_an_hour_of_healthy_running(ranks: int) -> None:
    """1,440 windows of 2.5 s."""
    for seed in range(3):
        job, told = Job(seed, ranks=ranks), Told()
        for _ in range(1440):
            job.window()
            assert not told.add(judge(job.paces())), f"seed {seed}: {told.now}"


@hypothesis.settings(max_examples=60, deadline=None)
@given(
    shares=st.integers(2, 12).flatmap(
        lambda ranks: st.lists(st.lists(st.floats(0.0, 1.0), min_size=0, max_size=KEPT), min_size=ranks, max_size=ranks)
    ),
    order=st.randoms(use_true_random=False),
)
def test_whatever_is_measured_most_are_never_named_and_the_order_does_not_matter(
    shares: list[list[float]], order: random.Random
) -> None:
    paces = [Pace(rank, "node0", tuple(waited), 10.0, {}) for rank, waited in enumerate(shares)]
    slow = judge(paces)
    if slow is not None:
        assert 2 * len(slow.ranks) <= len(paces)
        assert 0.0 < slow.lost <= 1.0 and slow.factor >= 1.0
    order.shuffle(paces)
    assert judge(paces) == slow
    assert [Pace.of_json(pace.to_json()).rank for pace in paces] == [pace.rank for pace in paces]


def test_ranks_that_differ_by_degrees_are_none_of_them_named() -> None:
    """Every rank has a little more to do than the one before: there is no gap between who is slow and who is not."""
    waited = [tuple([0.5 - 0.05 * rank] * KEPT) for rank in range(8)]
    assert judge([Pace(rank, "node0", shares, 10.0, {}) for rank, shares in enumerate(waited)]) is None


def test_ranks_with_another_role_are_not_compared() -> None:
    """Two ranks generate and wait little; they issue few collectives, and the six that train issue many."""
    paces = [
        Pace(rank, "node0", tuple([0.5 if rank < 6 else 0.1] * KEPT), 10.0 if rank < 6 else 1.0, {})
        for rank in range(8)
    ]
    assert judge(paces) is None


@pytest.mark.parametrize(
    ("doing", "kind"),
    [
        (STEP, COMPUTING),
        (Doing(LOADING, EXTRA), LOADING),
        (Doing(SAVING, EXTRA), SAVING),
        (Doing(COLLECTING, ""), COLLECTING),
        (Doing(COMPUTING, EXTRA, "eval"), "one phase: eval"),
    ],
)
def test_kinds_are_told_apart(doing: Doing, kind: str) -> None:
    slow = named(Job(1, slow=[2], factor=1.4, doing=doing))
    assert slow is not None and slow.kind == kind, slow
    assert slow.place == doing.place


def test_all_ranks_of_one_host() -> None:
    slow = named(Job(2, slow=[4, 5, 6, 7], factor=1.3, per_host=4, ranks=12))
    assert slow is not None
    assert (slow.ranks, slow.hosts, slow.kind) == ((4, 5, 6, 7), ("node1",), HOST)


@pytest.mark.parametrize(("every", "found"), [(3, True), (60, False)])
def test_a_rank_that_pauses_again_and_again(every: int, found: bool) -> None:
    """Half of the windows would have to look slow for medians to see it; a pause that comes once is nobody's habit."""
    job, told = Job(3), Told()
    for number in range(60):
        job.window(pausing=5 if number % every == every // 2 else None)
        told.add(judge(job.paces()))
    if found:
        assert told.now is not None and (told.now.ranks, told.now.kind) == ((5,), PERIODIC), told.now
    else:
        assert told.now is None


def test_it_is_told_once_and_that_it_is_over_once() -> None:
    slow, told = judge(Job(4, slow=[1], factor=2.0).windows(LENGTHS[0]).paces()), Told()
    assert slow is not None
    changes = [told.add(slow) for _ in range(2 * AGAIN)]
    assert changes.count(True) == 1 and changes[AGAIN - 1]
    assert not told.add(None) and not told.add(slow), "one window in which nobody is named changes nothing"
    changes = [told.add(None) for _ in range(2 * AGAIN)]
    assert changes.count(True) == 1 and told.now is None


def test_a_thread_waits_only_where_one_waits() -> None:
    """Counters of gloo may say for a while that the last collective has not ended, whatever the thread does."""
    frame = sys._getframe()
    found = _doing([frame], in_flight=True)
    assert found.kind == COMPUTING
    assert found.place.startswith("test_slow.py:") and found.place.endswith(f" in {frame.f_code.co_name}")
    as_torch = types.FunctionType(
        (lambda: sys._getframe()).__code__, {"sys": sys, "__name__": "torch.distributed.c10d"}
    )
    waiting = [as_torch()]
    assert _doing(waiting, in_flight=True).kind == WAITING
    assert _doing(waiting, in_flight=False).kind == COMPUTING
    with phase("eval"):
        assert _doing([frame], in_flight=False).phase == "eval"


def test_samples_leave_the_random_numbers_of_the_program_alone() -> None:
    before = random.getstate()
    sampler = Sampler(Recorder(), 0, lambda: False)
    try:
        for _ in range(3):
            sampler.pause()
            sampler._planned = 0.0
    finally:
        sampler.close()
    assert random.getstate() == before


class Flights(Recorder):
    """Answers with `flight`, and counts how often it was asked."""

    def __init__(self, flight: tuple[int, bool] | None) -> None:
        self.answer, self.asked = flight, 0

    def flight(self) -> tuple[int, bool] | None:
        self.asked += 1
        return self.answer


def test_nothing_is_looked_at_where_that_is_switched_off() -> None:
    callbacks, recorder = list(gc.callbacks), Flights((1, True))
    sampler = Sampler(recorder, 0, lambda: False, wanted=False)
    sampler.sample()
    assert sampler.pause() == float("inf")
    assert (recorder.asked, gc.callbacks) == (0, callbacks)
    sampler.close()


def test_samples_are_rare_where_a_device_hides_what_is_waited_for() -> None:
    sampler = Sampler(Flights(None), 0, lambda: False)
    try:
        time.sleep(0.001)
        sampler.sample()
        assert sampler.pause() > 5 * PERIOD
    finally:
        sampler.close()
