"""Time limits without process groups: deadlines, and the signal side of ``nccl_timeout_handler``."""

from __future__ import annotations

import hashlib
import math
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ncclguard.deadlines import Deadline, engine_section, get_adaptive_timeout, nccl_timeout_handler, remaining_limit
from ncclguard.errors import CollectiveTimeout
from ncclguard.outcome import Cause

LONG = 30.0  # seconds that nothing here may take: a test that gets there has hung


@pytest.fixture(autouse=True)
def alarm_is_put_back() -> Iterator[None]:
    """No test leaves a handler or a running timer behind."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    found, left = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)
    assert found is handler
    assert (left[0] > 0) == (timer[0] > 0)


def measured_hashes_per_second() -> float:
    """How fast this machine is, at least: the quickest of three."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 20_000)
        times.append(time.perf_counter() - started)
    return 20_000 / min(times)


HASHES_PER_SECOND = measured_hashes_per_second()


def native_call(seconds: float) -> None:
    """Stay in one C call for ``seconds`` or more, with the GIL released, as a collective does."""
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", int(1.2 * seconds * HASHES_PER_SECOND))


# --- deadlines and limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "seconds"),
    [(0, 300), (9_999_999, 300), (10_000_000, 900), (99_999_999, 900), (100_000_000, 1800), (5 * 10**8, 1800)],
)
def test_adaptive_timeout_by_size(numel: int, seconds: float) -> None:
    assert get_adaptive_timeout(numel) == seconds


@pytest.mark.parametrize(("numel", "error"), [(-1, ValueError), (1e7, TypeError), ("5", TypeError), (True, TypeError)])
def test_adaptive_timeout_of_what_is_no_size_is_a_typed_error(numel: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="pass tensor.numel"):
        get_adaptive_timeout(numel)


def test_deadlines_count_down_and_compare() -> None:
    near, far = Deadline.after(10), Deadline.after(timedelta(minutes=1))
    assert near < far and near.sooner(far) is near and far.sooner(near) is near and far.sooner(None) is far
    assert 0 < near.remaining() <= 10 < far.remaining() <= 60
    assert not near.expired and Deadline.after(0).expired and Deadline.after(-5).remaining() == 0.0
    assert Deadline.after(math.inf).remaining() == math.inf


@pytest.mark.parametrize(
    ("seconds", "error"), [(math.nan, ValueError), ("1", TypeError), (None, TypeError), (True, TypeError)]
)
def test_deadline_after_what_is_no_time_is_a_typed_error(seconds: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Deadline.after(seconds)


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, 0.0005, timedelta(0)])
def test_handler_refuses_a_limit_that_is_none(seconds: Any) -> None:
    with pytest.raises(ValueError):
        nccl_timeout_handler(seconds)


@pytest.mark.parametrize("seconds", ["10", True, None, [1]])
def test_handler_refuses_a_limit_of_another_type(seconds: Any) -> None:
    with pytest.raises(TypeError):
        nccl_timeout_handler(seconds)


def test_handler_refuses_what_is_no_group_of_this_rank() -> None:
    with pytest.raises(TypeError, match="ProcessGroup"):
        nccl_timeout_handler(10, group="default")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not a member"):
        nccl_timeout_handler(10, group=dist.GroupMember.NON_GROUP_MEMBER)  # type: ignore[arg-type]


# --- Python code in the main thread ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.2, timedelta(milliseconds=200)])
def test_sleep_is_interrupted_at_a_sub_second_limit(seconds: float | timedelta) -> None:
    expected = pytest.raises(
        CollectiveTimeout, match=r"timeout .* limit of 0.2 s passed .* no process group was stopped"
    )
    with expected, nccl_timeout_handler(seconds) as deadline:
        assert deadline.remaining() <= 0.2
        time.sleep(LONG)
    assert remaining_limit() is None


def test_error_is_a_timeout_error_with_an_outcome_of_this_rank() -> None:
    with pytest.raises(TimeoutError) as caught, nccl_timeout_handler(0.05):
        while True:
            pass
    error = caught.value
    assert isinstance(error, CollectiveTimeout)
    outcome = error.outcome
    assert not outcome and not outcome.agreed and outcome.cause is Cause.UNKNOWN and outcome.culprits == ()
    assert outcome.seconds >= 0.05 and outcome.incident is not None and outcome.incident.timeout == 0.05
    assert isinstance(outcome.error, CollectiveTimeout)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("wait", [threading.Event().wait, threading.Lock().acquire])
def test_waits_of_python_are_interrupted(wait: Any) -> None:
    if wait.__name__ == "acquire":
        wait()
    with pytest.raises(CollectiveTimeout), nccl_timeout_handler(0.1):
        wait(timeout=LONG)


def test_a_block_that_ends_in_time_leaves_no_alarm_behind() -> None:
    for _ in range(50):
        with nccl_timeout_handler(0.02):
            pass
    time.sleep(0.1)


def test_native_call_that_returned_is_not_reported_by_its_pending_alarm() -> None:
    """The alarm of a plain handler fires as soon as the call returns, late and for nothing: shown here first."""

    def plain(signum: int, frame: object) -> None:
        raise TimeoutError("late")

    with pytest.raises(TimeoutError, match="late"):
        old = signal.signal(signal.SIGALRM, plain)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            native_call(0.4)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)

    with nccl_timeout_handler(0.1) as deadline:
        native_call(0.4)
    assert deadline.expired
    with pytest.raises(ValueError):  # nor in the handlers and finally blocks after it
        try:
            with nccl_timeout_handler(0.1):
                native_call(0.4)
                raise ValueError
        finally:
            time.sleep(0.05)


def test_another_exception_passes_unchanged() -> None:
    mine = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught, nccl_timeout_handler(10):
        raise mine
    assert caught.value is mine and mine.__context__ is None
    late = RuntimeError("raised after the limit")
    with pytest.raises(RuntimeError) as caught, nccl_timeout_handler(0.05):
        native_call(0.2)
        raise late
    assert caught.value is late


def test_interruption_caught_inside_the_block_is_not_repeated() -> None:
    interruptions = 0
    with nccl_timeout_handler(0.05):
        try:
            time.sleep(LONG)
        except CollectiveTimeout:
            interruptions += 1
            cleaned = time.monotonic()
            while time.monotonic() < cleaned + 0.2:  # a second interruption would leave this, and the block
                pass
    assert interruptions == 1


def test_keyboard_interrupt_passes_and_everything_is_put_back() -> None:
    with pytest.raises(KeyboardInterrupt), nccl_timeout_handler(LONG):
        signal.raise_signal(signal.SIGINT)


# --- nesting --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outer", "inner"), [(0.1, LONG), (LONG, 0.1)])
def test_the_sooner_of_two_nested_limits_holds(outer: float, inner: float) -> None:
    expected = pytest.raises(CollectiveTimeout, match="limit of 0.1 s")
    with expected, nccl_timeout_handler(outer), nccl_timeout_handler(inner):
        left = remaining_limit()
        assert left is not None and left <= 0.1
        time.sleep(LONG)
    assert remaining_limit() is None


def test_outer_limit_still_holds_after_the_inner_block() -> None:
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"limit of 0.3 s"), nccl_timeout_handler(0.3):
        with pytest.raises(CollectiveTimeout, match=r"limit of 0.1 s"), nccl_timeout_handler(0.1):
            time.sleep(LONG)
        with nccl_timeout_handler(LONG):
            left = remaining_limit()
            assert left is not None and left <= 0.3
            time.sleep(LONG)
    assert time.monotonic() - started >= 0.3


def test_one_limit_interrupts_once_though_two_blocks_end_at_it() -> None:
    with pytest.raises(CollectiveTimeout), nccl_timeout_handler(0.1):
        try:
            with nccl_timeout_handler(LONG):
                time.sleep(LONG)
        finally:
            cleaned = time.monotonic()
            while time.monotonic() < cleaned + 0.1:  # a second interruption would end this
                pass
            cleaned = math.inf
    assert cleaned == math.inf


def test_a_block_may_be_entered_again_but_not_twice_at_a_time() -> None:
    block = nccl_timeout_handler(LONG)
    for _ in range(2):
        with block, pytest.raises(RuntimeError, match="already entered"):
            block.__enter__()


def test_alarm_that_became_due_during_the_block_fires_after_it() -> None:
    fired: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda signum, frame: fired.append(signum))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with nccl_timeout_handler(LONG):
            native_call(0.3)
        while not fired:
            time.sleep(0.01)
        assert fired == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


# --- guarded operations inside a block ------------------------------------------------------------------------------


def test_engine_section_is_never_interrupted_and_sees_the_limit() -> None:
    with nccl_timeout_handler(0.1):
        with engine_section(), engine_section():
            time.sleep(0.3)
            assert remaining_limit() == 0.0
        time.sleep(0.2)  # the guarded operation has told of the timeout: what follows is left alone


def test_limit_that_passes_after_the_engine_section_interrupts() -> None:
    with pytest.raises(CollectiveTimeout), nccl_timeout_handler(0.2):
        with engine_section():
            pass
        time.sleep(LONG)
