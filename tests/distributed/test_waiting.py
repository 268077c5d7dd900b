"""A long wait: one rank says who is awaited and where that rank is; a stuck rank may end it early; a healthy one never does."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.faults.injection import hold_gil


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def lines_of_this_rank() -> list[str]:
    """The list that every later log line of the guard is put into."""
    handler = Lines()
    logging.getLogger("ncclguard").addHandler(handler)
    return handler.lines


def load_the_next_shard(seconds: float) -> None:
    time.sleep(seconds)


def wait_for_a_late_rank() -> None:
    lines = lines_of_this_rank()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=60).raise_if_failed()
    lines.clear()  # on a busy machine the ranks come to the first barrier seconds apart
    if rank == 2:
        load_the_next_shard(7.0)
    outcome = ng.safe_barrier(timeout=40)
    faults.report(ok=outcome.ok, lines=[line for line in lines if "has been waiting" in line])


def test_one_rank_says_who_is_awaited_and_where_it_is_and_the_call_goes_on() -> None:
    result = faults.run_ranks(wait_for_a_late_rank, 4, env={"NCCLGUARD_WARN_AFTER": "4"}, timeout=90)
    assert result.values("ok") == dict.fromkeys(range(4), True), result
    logged = [line for lines in result.values("lines").values() for line in lines]
    # A rank that is idle looks twice a second at what it is asked; the next line would come after twice the time.
    assert len([line for line in logged if re.search("waiting for [4-7] s", line)]) == 1, logged
    assert all("rank 2 has not come: it is at" in line and "load_the_next_shard" in line for line in logged), logged


def hold_the_interpreter() -> None:
    """Rank 1 is in C code that keeps the GIL, as one pickle.loads of a large checkpoint does: no thread of it can answer."""
    lines = lines_of_this_rank()
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=20).raise_if_failed()
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).usleep(6_000_000)
    outcome = ng.safe_barrier(timeout=40)
    again = ng.safe_barrier(timeout=40)
    faults.report(ok=[outcome.ok, again.ok], attempts=outcome.attempts, lines=lines)


def test_a_rank_that_holds_the_gil_for_long_is_healthy() -> None:
    """It is said that it does not answer; it is waited for, and the same operation completes."""
    result = faults.run_ranks(hold_the_interpreter, 3, env={"NCCLGUARD_WARN_AFTER": "2"}, timeout=90)
    assert result.values("ok") == {rank: [True, True] for rank in range(3)}, result
    assert result.values("attempts") == dict.fromkeys(range(3), 1), result
    logged = [line for lines in result.values("lines").values() for line in lines]
    assert any("rank 1 does not answer: stuck" in line for line in logged), logged


def load_a_large_checkpoint() -> None:
    """Rank 2 holds the GIL for 20 s while the others wait in a guarded and in a raw call, and again while they leave."""
    lines = lines_of_this_rank()
    ng.configure(warn_after=4.0)
    watch = ng.watch(timeout=60)
    dist.init_process_group("gloo")
    raw_group = dist.new_group()
    dist.barrier(group=raw_group)
    ng.safe_barrier(timeout=60).raise_if_failed()
    if dist.get_rank() == 2:
        hold_gil(20.0)
    started = time.monotonic()
    raw = torch.ones(3)
    thread = threading.Thread(target=dist.all_reduce, args=(raw,), kwargs={"group": raw_group})
    thread.start()
    outcome = ng.safe_barrier(timeout=60)
    thread.join()
    waited = time.monotonic() - started
    again = ng.safe_barrier(timeout=60)
    dist.barrier(group=raw_group)
    faults.report(ok=[outcome.ok, again.ok], attempts=outcome.attempts, raw=raw.tolist(), waited=waited)
    if dist.get_rank() == 2:
        hold_gil(5.0)  # longer than rank 0 keeps the store for those that are still there
    dist.destroy_process_group()
    faults.report(incidents=[str(incident) for incident in watch.incidents], lines=lines)


@pytest.mark.slow
def test_nobody_takes_a_rank_for_dead_that_holds_the_gil_for_twenty_seconds() -> None:
    """Neither the guard nor watch(): it is said, twice, that it does not answer, all goes on, and the job ends well."""
    result = faults.run_ranks(load_a_large_checkpoint, 3, timeout=110)
    assert all(rank.ok for rank in result), str(result)
    assert result.values("ok") == {rank: [True, True] for rank in range(3)}, result
    assert result.values("attempts") == dict.fromkeys(range(3), 1), result
    assert result.values("raw") == {rank: [3.0] * 3 for rank in range(3)}
    assert result.values("incidents") == {rank: [] for rank in range(3)}
    assert min(result[0].reports["waited"], result[1].reports["waited"]) > 15  # both were waiting meanwhile
    logged = [line for lines in result.values("lines").values() for line in lines]
    for call in ("has been waiting", "has made no progress"):  # a guarded call, a raw one
        assert any(call in line and "rank 2 does not answer: stuck" in line for line in logged), logged
    assert not [line for line in logged if " lost" in line or "incident" in line], logged


def stop_one() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=20).raise_if_failed()
    if rank == 1:
        child = os.fork()
        if child == 0:  # resumes its parent: a stopped process cannot
            time.sleep(9)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    started = time.monotonic()
    outcome = ng.safe_barrier(timeout=60)
    faults.report(verdict=[outcome.ok, str(outcome.cause), list(outcome.culprits)], seconds=time.monotonic() - started)
    faults.report(next=ng.safe_barrier(timeout=60).ok)


def test_stuck_timeout_ends_the_wait_for_a_stopped_rank_long_before_the_deadline() -> None:
    result = faults.run_ranks(stop_one, 3, env={"NCCLGUARD_STUCK_TIMEOUT": "2"}, timeout=90)
    assert result.values("verdict") == {rank: [False, "stuck", [1]] for rank in range(3)}, result
    assert all(result[rank].reports["seconds"] < 8 for rank in (0, 2)), result  # before rank 1 is resumed
    assert result.values("next") == dict.fromkeys(range(3), True), result


def crossed() -> None:
    """Rank 2 waits in another group than the others, who all give up at the same time."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    other: Any = dist.new_group([0, 1, 2])
    ng.safe_barrier(timeout=30).raise_if_failed()
    ng.safe_barrier(other, timeout=30).raise_if_failed()
    outcome = ng.safe_barrier(other if rank == 2 else None, timeout=2)
    faults.report(culprits=list(outcome.culprits), ok=outcome.ok)
    time.sleep(5)  # a rank that leaves is rightly named by those who still wait for it
    dist.destroy_process_group()


def test_ranks_that_wait_in_another_group_are_not_late_for_this_one() -> None:
    result = faults.run_ranks(crossed, 3, timeout=60).check()
    assert result.values("ok") == {0: False, 1: False, 2: False}
    named = {rank for culprits in result.values("culprits").values() for rank in culprits}
    assert named <= {2}, result.values("culprits")
