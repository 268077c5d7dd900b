"""Every call takes its place in the group's sequence on every rank, also one that raises, or never gets its turn."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults, torch_compat
from ncclguard.coordination.group_state import GroupState
from ncclguard.engine import runtime
from ncclguard.engine.execution import AllReduce
from ncclguard.faults.injection import reset_own_connections
from ncclguard.transport.base import Communicator, Pending


def summed(value: float, **keywords: Any) -> list[Any]:
    """The verdict on one all_reduce, and its result."""
    tensor = torch.full((3,), value)
    outcome = ng.safe_all_reduce(tensor, **keywords)
    return [outcome.ok, str(outcome.cause), list(outcome.culprits), float(tensor[0])]


def one_rank_looks() -> None:
    """A barrier fails; rank 0 looks at what it returned, the others have it raised at the next call, and go on."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == 1:
        time.sleep(2)
    outcome = ng.safe_barrier(timeout=0.5)
    if rank == 0:
        assert not outcome
    found: list[Any] = []
    notes: list[str] = []
    for step in range(4):
        try:
            found.append(summed(10.0**step, timeout=20))
        except ng.CollectiveFailed as error:
            found.append(type(error).__name__)
            notes = getattr(error, "__notes__", [])
    faults.report(found=found, notes=notes)
    dist.destroy_process_group()


def test_a_failure_that_one_rank_looked_at_shifts_no_later_call() -> None:
    """The call in which the others raise fails for rank 0, who is told of it; all later ones add up the same step."""
    result = faults.run_ranks(one_rank_looks, 3, timeout=60)
    found = result.values("found")
    assert found[1][0] == found[2][0] == "CollectiveTimeout", found
    if sys.version_info >= (3, 11):
        assert all("of an earlier call" in str(result[rank].reports["notes"]) for rank in (1, 2)), result
    assert found[0][0] == [False, "unknown", [], 1.0], found  # the others are not to blame for an earlier call's error
    for rank in range(3):
        assert found[rank][1:] == [[True, "None", [], 3 * 10.0**step] for step in (1, 2, 3)], found


def no_turn() -> None:
    """On rank 0 a thread waits in a barrier for rank 1 while the main thread calls something else, which gets no turn."""
    dist.init_process_group("gloo")
    rank, store = dist.get_rank(), torch_compat.default_store()
    ng.safe_barrier(timeout=30).raise_if_failed()
    if rank == 0:
        thread = threading.Thread(target=lambda: ng.safe_barrier(timeout=30).raise_if_failed())
        group = runtime.current().group(dist.group.WORLD, torch.device("cpu"))
        before = group.calls
        thread.start()
        while group.calls == before:  # the thread has the turn from then on
            time.sleep(0.01)
        first = summed(1.0, timeout=0.2)
        store.set("refused", "1")
        thread.join()
    else:
        store.wait(["refused"])
        ng.safe_barrier(timeout=30).raise_if_failed()
        first = summed(1.0, timeout=20)
    faults.report(found=[first, summed(10.0, timeout=20), summed(100.0, timeout=20)])
    dist.destroy_process_group()


def test_a_call_that_got_no_turn_is_not_paired_with_a_later_one() -> None:
    result = faults.run_ranks(no_turn, 2, timeout=60)
    for found in result.values("found").values():
        assert found[0] == [False, "unknown", [], 1.0], result.values("found")
        assert found[1:] == [[True, "None", [], 20.0], [True, "None", [], 200.0]], result.values("found")


def interrupted_on_resume() -> None:
    """Connections break, which all survive by trying again, but Ctrl-C comes to rank 1 while it waits for that verdict."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=30).raise_if_failed()
    awaited = GroupState.await_verdict

    def interrupted(self: GroupState, *args: Any) -> Any:
        GroupState.await_verdict = awaited  # type: ignore[method-assign]
        raise KeyboardInterrupt

    if rank == 1:
        GroupState.await_verdict = interrupted  # type: ignore[method-assign]
    if rank == 2:
        threading.Timer(0.2, reset_own_connections).start()
        time.sleep(1)  # the others are in it
    started = time.monotonic()
    try:
        found = summed(1.0, timeout=30)
    except KeyboardInterrupt:
        found = ["interrupted"]
    faults.report(found=[found, summed(10.0, timeout=20)], seconds=time.monotonic() - started)
    dist.destroy_process_group()


def test_ctrl_c_while_the_others_are_told_to_try_again_reaches_them() -> None:
    """Failed, by rank 1, long before the deadline: nobody waits for it."""
    result = faults.run_ranks(interrupted_on_resume, 3, timeout=90)
    found = result.values("found")
    assert found[1][0] == ["interrupted"], found
    assert found[0][0] == found[2][0] == [False, "failed", [1], 1.0], found
    assert [rows[1] for rows in found.values()] == [[True, "None", [], 30.0]] * 3, found
    assert max(result.values("seconds").values()) < 20


def interrupted_twice() -> None:
    """Rank 2 stops in the middle of a transfer; rank 0 gets Ctrl-C, and again while its input is being restored."""
    dist.init_process_group("gloo")
    rank, own = dist.get_rank(), os.getpid()
    ng.safe_barrier(timeout=30).raise_if_failed()
    submit = AllReduce.submit

    def stopping(self: AllReduce, communicator: Communicator, piece: int) -> Pending:
        if piece == 5:
            child = os.fork()
            if child == 0:  # resumes its parent: a stopped process cannot
                time.sleep(4)
                os.kill(own, signal.SIGCONT)
                os._exit(0)
            os.kill(own, signal.SIGSTOP)
            os.waitpid(child, 0)
        return submit(self, communicator, piece)

    if rank == 2:
        AllReduce.submit = stopping  # type: ignore[method-assign]
    tensor = torch.full((10_000_000,), float(rank))
    if rank == 0:
        for seconds in (1.5, 2.0):
            threading.Timer(seconds, os.kill, (own, signal.SIGINT)).start()
    interrupted = False
    try:
        ng.safe_all_reduce(tensor, timeout=30, chunk_numel=1_000_000).raise_if_failed()
    except KeyboardInterrupt:
        interrupted = True
    except ng.CollectiveFailed as error:
        faults.report(culprits=list(error.outcome.culprits))
    AllReduce.submit = submit  # type: ignore[method-assign]
    faults.report(interrupted=interrupted, intact=bool((tensor == rank).all()), after=summed(1.0, timeout=20))
    dist.destroy_process_group()


def test_ctrl_c_twice_still_leaves_the_input_as_it_was() -> None:
    result = faults.run_ranks(interrupted_twice, 3, timeout=90)
    assert result.values("interrupted") == {0: True, 1: False, 2: False}, str(result)
    assert result.values("intact") == {0: True, 1: True, 2: True}, str(result)
    assert result.values("culprits") == {1: [0], 2: [0]}, str(result)
    assert result.values("after") == {rank: [True, "None", [], 3.0] for rank in range(3)}, str(result)


def other_settings() -> None:
    """The same call, cut in other pieces or tried another number of times: compared, and not in its text."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for keywords in ({"max_attempts": rank + 1}, {"chunk_numel": 1000 * (1 + rank // 2)}):
        outcome = ng.safe_all_reduce(torch.ones(4000), timeout=20, **keywords)
        assert not outcome and outcome.incident is not None
        found.append([list(outcome.culprits), outcome.incident.summary])
    faults.report(found=found)
    dist.destroy_process_group()


def test_settings_that_differ_are_said_to_and_not_groups() -> None:
    (apart, odd) = faults.run_ranks(other_settings, 3, timeout=60).values("found")[0]
    assert apart[0] == [] and "different `chunk_numel`, `max_attempts` or `on_lost`" in apart[1], apart
    assert odd[0] == [2] and "with another `chunk_numel`, `max_attempts` or `on_lost`" in odd[1], odd
