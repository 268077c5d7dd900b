"""``nccl_timeout_handler`` beside what else a program does: alarms of its own, threads, tasks, generators, forks, exit."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from ncclguard.deadlines import nccl_timeout_handler, remaining_limit
from ncclguard.errors import CollectiveTimeout

LONG = 30.0  # seconds that nothing here may take: a test that gets there has hung
STARTED_AND_ENDED = 120.0  # the same of a process, which imports torch first


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


# --- a signal handler and timer of the program's own ----------------------------------------------------------------


def test_outer_timer_and_handler_are_put_back_with_the_time_that_remains() -> None:
    def mine(signum: int, frame: object) -> None:
        raise AssertionError("fired before its time")

    old = signal.signal(signal.SIGALRM, mine)
    try:
        signal.setitimer(signal.ITIMER_REAL, LONG, 7.0)
        with nccl_timeout_handler(LONG), nccl_timeout_handler(10):
            time.sleep(0.2)
        remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0)
        assert signal.getsignal(signal.SIGALRM) is mine
        assert LONG - 5 < remaining <= LONG - 0.2
        assert interval == 7.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_outer_alarm_fires_inside_the_block_on_time_and_repeats() -> None:
    fired: list[float] = []
    old = signal.signal(signal.SIGALRM, lambda signum, frame: fired.append(time.monotonic()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        with nccl_timeout_handler(LONG):
            while len(fired) < 3:
                time.sleep(0.01)
        inside = len(fired)
        while len(fired) == inside:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_outer_alarm_that_raises_ends_the_block_with_its_own_exception() -> None:
    class Mine(Exception):
        pass

    def raise_mine(signum: int, frame: object) -> None:
        raise Mine

    old = signal.signal(signal.SIGALRM, raise_mine)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Mine), nccl_timeout_handler(LONG):
            time.sleep(LONG)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_handler_that_the_block_installed_itself_is_kept() -> None:
    def mine(signum: int, frame: object) -> None:
        raise AssertionError

    old = signal.getsignal(signal.SIGALRM)
    try:
        with nccl_timeout_handler(LONG):
            signal.signal(signal.SIGALRM, mine)
            signal.setitimer(signal.ITIMER_REAL, LONG)
            with pytest.raises(CollectiveTimeout), nccl_timeout_handler(0.1):
                time.sleep(LONG)
            assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getsignal(signal.SIGALRM) is mine
        assert signal.getitimer(signal.ITIMER_REAL)[0] > LONG - 10
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.processes
def test_alarm_without_a_handler_still_ends_the_process() -> None:
    code = """
        import signal, time
        from ncclguard.deadlines import nccl_timeout_handler
        signal.alarm(1)
        with nccl_timeout_handler(50):
            time.sleep(50)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=STARTED_AND_ENDED, check=False)
    assert done.returncode == -signal.SIGALRM


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_no_interruption_while_a_block_is_entered_or_left(when: str) -> None:
    """Limits that end at every possible moment of leaving: the handler and the timer are put back each time."""
    handler = signal.getsignal(signal.SIGALRM)
    interrupted = 0
    for step in range(300):
        started = time.perf_counter()
        try:
            with nccl_timeout_handler(0.002):
                while when == "leaving" and time.perf_counter() < started + 0.0115 + step * 5e-6:
                    pass
                for _ in range(50 if when == "entering" else 0):
                    with nccl_timeout_handler(0.001 + step * 1e-5):
                        pass
        except CollectiveTimeout:
            interrupted += 1
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert when == "entering" or interrupted


# --- other threads, tasks, generators, forks ------------------------------------------------------------------------


def test_other_threads_have_their_own_limits_and_no_signal() -> None:
    seen: dict[str, object] = {}

    def work() -> None:
        seen["before"] = remaining_limit()
        with nccl_timeout_handler(0.05):
            seen["inside"] = remaining_limit()
            time.sleep(0.3)  # nothing to stop, and nothing to interrupt it: it ends by itself
        seen["after"] = remaining_limit()

    with nccl_timeout_handler(LONG):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert remaining_limit() is not None
    assert seen["before"] is None and isinstance(seen["inside"], float) and seen["after"] is None


def test_an_asyncio_task_is_not_interrupted_for_the_limit_of_another() -> None:
    async def bounded() -> str:
        with nccl_timeout_handler(0.1):
            try:
                await asyncio.sleep(0.4)
                time.sleep(LONG)  # noqa: ASYNC251 - a blocking call of the task itself is
            except CollectiveTimeout:
                return "interrupted"
        return "not interrupted"

    async def other() -> str:
        for _ in range(3):
            time.sleep(0.1)  # noqa: ASYNC251
            await asyncio.sleep(0)
        assert remaining_limit() is None
        return "not interrupted"

    async def main() -> list[str]:
        return list(await asyncio.gather(bounded(), other()))

    assert asyncio.run(main()) == ["interrupted", "not interrupted"]


@pytest.mark.parametrize("outside", [False, True], ids=["block of the task", "block around the loop"])
def test_a_callback_is_not_interrupted_for_the_task_that_made_it(outside: bool) -> None:
    """asyncio logs what a callback raises, and goes on: the task that waits for the callback would wait for good."""

    async def wait_for_a_callback() -> str:
        def call_back() -> None:
            spin(0.3)
            called.set_result(None)

        loop = asyncio.get_running_loop()
        called: asyncio.Future[None] = loop.create_future()
        with contextlib.nullcontext() if outside else nccl_timeout_handler(0.1):
            loop.call_soon(call_back)
            try:
                await asyncio.wait_for(called, LONG)
                time.sleep(LONG)  # noqa: ASYNC251
            except CollectiveTimeout:
                return "interrupted once it was called back" if called.done() else "interrupted"
        return "not interrupted"

    with nccl_timeout_handler(0.1) if outside else contextlib.nullcontext():
        assert asyncio.run(wait_for_a_callback()) == "interrupted once it was called back"


def spin(seconds: float) -> None:
    ended = time.monotonic() + seconds
    while time.monotonic() < ended:
        pass


RECORD = logging.makeLogRecord({"msg": "written in full"})


class SlowHandler(logging.StreamHandler[io.StringIO]):
    def format(self, record: logging.LogRecord) -> str:
        spin(0.3)
        return super().format(record)


class SlowToDelete:
    def __del__(self) -> None:
        spin(0.3)


@pytest.mark.parametrize("how", ["logging", "deleting"])
def test_code_whose_exceptions_go_no_further_is_not_interrupted(how: str) -> None:
    """`logging` prints what a handler raises, and the interpreter what `__del__` does: the block would go on for good."""
    text = io.StringIO()
    with pytest.raises(CollectiveTimeout), nccl_timeout_handler(0.1):
        SlowHandler(text).handle(RECORD) if how == "logging" else SlowToDelete()
        time.sleep(LONG)
    assert text.getvalue() == ("written in full\n" if how == "logging" else "")


def test_a_logging_handler_that_waits_for_good_is_interrupted_all_the_same() -> None:
    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(LONG)

    with pytest.raises(CollectiveTimeout), nccl_timeout_handler(0.1):
        Stuck().handle(RECORD)


def test_blocks_of_asyncio_tasks_may_overlap() -> None:
    async def bounded(seconds: float) -> None:
        with nccl_timeout_handler(LONG):
            await asyncio.sleep(seconds)

    async def main() -> None:
        await asyncio.gather(bounded(0.05), bounded(0.15), bounded(0.1))

    asyncio.run(main())
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_generator_that_holds_a_block_bounds_its_consumer() -> None:
    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        with nccl_timeout_handler(0.1):
            yield

    with pytest.raises(CollectiveTimeout), limited():
        time.sleep(LONG)
    with contextlib.ExitStack() as stack:
        stack.enter_context(nccl_timeout_handler(0.1))
        with pytest.raises(CollectiveTimeout):
            time.sleep(LONG)


def test_block_of_a_generator_that_another_thread_closes_is_put_back_by_its_alarm() -> None:
    def generate() -> Iterator[None]:
        with nccl_timeout_handler(0.2):
            yield

    handler = signal.getsignal(signal.SIGALRM)
    generator = generate()
    next(generator)
    thread = threading.Thread(target=generator.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    ended = time.monotonic() + LONG
    while signal.getsignal(signal.SIGALRM) is not handler and time.monotonic() < ended:
        time.sleep(0.01)
    assert remaining_limit() is None


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on fork beside threads
def test_forked_child_is_free_of_the_parents_limit_and_may_set_its_own() -> None:
    with nccl_timeout_handler(0.2):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert remaining_limit() is None
                time.sleep(0.5)
                code = 2
                with nccl_timeout_handler(0.05):
                    time.sleep(LONG)
            except CollectiveTimeout:
                code = 0 if code == 2 else code
            finally:
                os._exit(code)
        with pytest.raises(CollectiveTimeout):
            time.sleep(LONG)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.processes
def test_exit_code_is_zero_and_exit_is_quick_with_a_block_open_in_a_daemon_thread() -> None:
    code = """
        import threading, time
        from ncclguard.deadlines import nccl_timeout_handler
        def work():
            with nccl_timeout_handler(0.05):
                time.sleep(600)
        threading.Thread(target=work, daemon=True).start()
        time.sleep(0.3)
        with nccl_timeout_handler(1000):
            pass
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        timeout=STARTED_AND_ENDED,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
