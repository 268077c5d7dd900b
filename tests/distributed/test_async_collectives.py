"""Who carries out an asynchronous collective of the backend "ncclguard", in which order, and what callbacks hold up."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults, torch_compat


def ordered() -> None:
    """Waited for in the reverse order, by two threads at once, and not at all."""
    dist.init_process_group("ncclguard")
    size = dist.get_world_size()
    found: list[list[float]] = []
    for numel in (1, 100_000):
        tensors = [torch.full((numel,), float(number)) for number in range(6)]
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        waiters = [threading.Thread(target=work.wait) for work in works[2:4]]
        for waiter in waiters:
            waiter.start()
        for work in reversed(works):
            work.wait()
        for waiter in waiters:
            waiter.join()
        found.append([float(tensor[-1]) / size for tensor in tensors])
    faults.report(found=found)
    dist.destroy_process_group()


def test_collectives_run_in_the_order_of_issue_whoever_waits_for_which() -> None:
    result = faults.run_ranks(ordered, 3, timeout=60).check()
    assert result.values("found") == {rank: [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2 for rank in range(3)}


def left_alone() -> None:
    """The first ones are waited for at once; then one is not."""
    dist.init_process_group("ncclguard")
    tensor = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
        tensor.fill_(1.0)
    work: Any = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.01)
    faults.report(completed=work.is_completed(), sum=float(tensor))
    dist.destroy_process_group()


def test_one_that_nobody_waits_for_is_carried_out_all_the_same() -> None:
    result = faults.run_ranks(left_alone, 2, timeout=60).check()
    assert result.values("completed") == {0: True, 1: True}
    assert result.values("sum") == {0: 2.0, 1: 2.0}


def slow_callback() -> None:
    """Rank 0's hook takes long; one more collective is in the queue when it begins, and another is issued meanwhile."""
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    released, seen = threading.Event(), []

    def hook(future: Any) -> None:
        seen.append(len(seen))
        if rank == 0 and len(seen) == 1:
            released.wait(30)

    store = torch_compat.default_store()
    if rank == 1:  # rank 0 has its hooks in place before the first one can end
        store.wait(["hooked"])
    works: list[Any] = [dist.all_reduce(torch.ones(100_000), async_op=True) for _ in range(2)]
    futures = [work.get_future().then(hook) for work in works]
    if rank == 0:
        store.set("hooked", "1")
        while not seen:
            time.sleep(0.01)
    works.append(dist.all_reduce(torch.ones(100_000), async_op=True))  # while the hook is running
    end = time.monotonic() + 20
    while not all(work.is_completed() for work in works) and time.monotonic() < end:
        time.sleep(0.01)
    faults.report(went_on=all(work.is_completed() for work in works), called=len(seen))
    released.set()
    for future in futures:
        future.wait()
    faults.report(order=seen)
    dist.destroy_process_group()


def test_a_callback_that_takes_long_does_not_hold_up_the_next_collective() -> None:
    """Collectives go on; the callbacks behind it wait for their turn."""
    result = faults.run_ranks(slow_callback, 2, timeout=60).check()
    assert result.values("went_on") == {0: True, 1: True}, result
    assert result[0].reports["called"] == 1
    assert result.values("order") == {0: [0, 1], 1: [0, 1]}


def chained() -> None:
    """A hook that waits for the future of a collective which it issues, twice; rank 1 comes when the others wait."""
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=20))
    issued: list[Any] = []

    def add_again(future: Any) -> Any:
        work: Any = dist.all_reduce(future.value()[0][:2].clone(), async_op=True)
        issued.append(work)
        return work.get_future().wait()

    found = []
    for numel in (1, 100_000):  # carried out by who waits, and by the queue's thread
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.5)
        work: Any = dist.all_reduce(torch.ones(numel), async_op=True)
        found.append(float(work.get_future().then(add_again).then(add_again).wait()[0][0]))
        dist.barrier()
    faults.report(found=found, issued=len(issued))
    dist.destroy_process_group()


def test_a_callback_may_wait_for_the_future_of_a_collective_that_it_issues() -> None:
    """torch's PowerSGD hooks do."""
    result = faults.run_ranks(chained, 2, timeout=60).check()
    assert result.values("found") == {0: [8.0, 8.0], 1: [8.0, 8.0]}, result
    assert result.values("issued") == {0: 4, 1: 4}


def overdue() -> None:
    """Twelve collectives are pending when their limit passes, because rank 2 issues all of its own too late."""
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=4))
    rank = dist.get_rank()
    ng.safe_barrier(timeout=60).raise_if_failed()  # the ranks start apart, on a busy machine by more than the limit
    if rank == 2:
        time.sleep(10)
    works: list[Any] = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(12)]
    culprits: set[int] = set()
    failed = 0
    for work in works:
        try:
            work.wait()
        except ng.CollectiveFailed as error:
            failed += 1
            culprits |= set(error.outcome.culprits)
    faults.report(culprits=sorted(culprits), failed=failed)
    dist.destroy_process_group()


def test_of_many_that_are_overdue_none_accuses_a_rank_that_was_there() -> None:
    """Ranks 0 and 1 were there all the time; those who still leave one collective are not late for the next."""
    result = faults.run_ranks(overdue, 3, timeout=120).check()
    named = result.values("culprits")
    assert set(named[0]) | set(named[1]) | set(named[2]) <= {2}, named
    assert 2 in named[0] and 2 in named[1], named
    assert all(result.values("failed").values()), result.values("failed")
