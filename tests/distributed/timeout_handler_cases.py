"""The ranks' side of test_timeout_handler.py: raw collectives that wait for a rank which does not come, in blocks.

Each case has a process group of its own, with a timeout far beyond the limit under test; rank 2 is the one that is late.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ncclguard import faults, torch_compat
from ncclguard.deadlines import engine_section, nccl_timeout_handler
from ncclguard.errors import CollectiveTimeout

GROUP_TIMEOUT = 40.0  # what the cases end by without the handler
WRITTEN_BY = 15.0
PLAIN_TIMEOUT = 5.0

Case = Callable[[dist.ProcessGroup, int], dict[str, Any]]


def bounded(call: Callable[[], object], limit: float | timedelta, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Make ``call`` in a block and tell how it ended."""
    started = time.monotonic()
    try:
        with nccl_timeout_handler(limit, group):
            call()
        ended, text, cause, torn = "returned", "", "", None
    except CollectiveTimeout as error:
        ended, text, cause, torn = "CollectiveTimeout", str(error), type(error.__cause__).__name__, error.outcome.torn
    except Exception as error:  # noqa: BLE001 - reported
        ended, text, cause, torn = type(error).__name__, str(error), type(error.__cause__).__name__, None
    return {"ended": ended, "text": text, "cause": cause, "torn": torn, "seconds": time.monotonic() - started}


def reduce_one(group: dist.ProcessGroup) -> None:
    """The raw collective of most cases."""
    dist.all_reduce(torch.ones(1), group=group)


def works(group: dist.ProcessGroup | None) -> bool:
    """Whether ranks 0 and 1 can still talk on ``group``; it has to have these two ranks."""
    tensor = torch.ones(1)
    try:
        dist.all_reduce(tensor, group=group)
    except RuntimeError:
        return False
    return tensor.item() == 2


def plain_alarm(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    def ring(signum: int, frame: object) -> None:
        raise TimeoutError("plain alarm")

    signal.signal(signal.SIGALRM, ring)
    started = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        dist.all_reduce(torch.ones(1), group=group)
    except (TimeoutError, RuntimeError) as error:
        return {"ended": type(error).__name__, "seconds": time.monotonic() - started}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise AssertionError("the collective completed without rank 2")


def all_reduce(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    said = bounded(lambda: dist.all_reduce(torch.ones(4), group=group), 0.5, group)
    try:
        dist.all_reduce(torch.ones(1), group=group)
        said["again"] = "returned"
    except RuntimeError as error:
        said["again"] = str(error)
    return said


def timedelta_of_a_large_tensor(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    return bounded(lambda: dist.all_reduce(torch.ones(10**6), group=group), timedelta(milliseconds=200), group)


def recv(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    return bounded(lambda: dist.recv(torch.ones(1), src=2, group=group), 0.3, group)


def monitored_barrier(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    return bounded(lambda: dist.monitored_barrier(group, timedelta(seconds=GROUP_TIMEOUT)), 0.3, group)


def wait_of_a_work(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Nothing shows that this wait is a collective's: no frame of torch.distributed, no record."""
    work = dist.irecv(torch.ones(1), src=2, group=group)
    assert work is not None
    return bounded(work.wait, 0.3, group)


def another_thread(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: said.update(bounded(partial(reduce_one, group), 0.3, group)))
    thread.start()
    thread.join()
    return said


def two_threads(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """The main thread waits for another thread's collective with a longer limit of its own."""
    said: dict[str, Any] = {}

    def main() -> None:
        thread = threading.Thread(target=lambda: said.update(inner=bounded(partial(reduce_one, group), 0.3, group)))
        thread.start()
        thread.join()

    return {**bounded(main, GROUP_TIMEOUT, group), **said}


def nested(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    call = partial(reduce_one, group)
    outer = bounded(lambda: inner.update(bounded(call, GROUP_TIMEOUT, group)), 1.0, group)
    return {"inner": {**inner, "seconds": outer["seconds"]}, "outer": outer}  # its time ran before it began


def in_time(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    said = bounded(partial(reduce_one, group), 30, group)
    return {**said, "works": bounded(partial(reduce_one, group), 30, group)["ended"]}


def sleeping(pair: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Ranks 0 and 1 have talked on the group, then sleep in the block: nothing is in flight."""
    assert works(pair)
    said = bounded(lambda: time.sleep(GROUP_TIMEOUT), 0.3, pair)
    return {**said, "works": works(pair)}


def polling(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """Python code polls an operation that is in flight; rank 2 joins it afterwards."""
    tensor = torch.ones(4)

    def poll() -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)

    said = bounded(poll, 0.3, group)
    before = tensor.tolist()
    torch_compat.default_store().set(f"polling/{rank}", "over")  # let rank 2 join
    time.sleep(0.5)
    return {**said, "written_after": tensor.tolist() != before}


def polling_unguarded(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """The same without the handler: what is given up is completed by the late rank, into the caller's tensor."""
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    time.sleep(0.3)
    before = tensor.tolist()
    torch_compat.default_store().set(f"polling_unguarded/{rank}", "over")
    ended = time.monotonic() + WRITTEN_BY
    while tensor.tolist() == before and time.monotonic() < ended:
        time.sleep(0.01)
    del work
    return {"written_after": tensor.tolist() != before}


def after_an_engine_section(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """The limit passes inside a guarded operation, and the block goes on with a raw call."""
    slept: list[float] = []

    def call() -> None:
        with engine_section():
            time.sleep(0.5)
        time.sleep(0.3)
        slept.append(0.8)
        dist.all_reduce(torch.ones(1), group=group)

    return {**bounded(call, 0.2, group), "slept": slept}


def computing(pair: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """The collective has completed at once; then one native call computes for longer than the limit, and than any patience."""
    numbers = torch.rand(10, 400, 400)
    torch.linalg.svdvals(numbers)  # the first call loads what it needs
    rounds: list[float] = []
    fastest = math.inf
    for _ in range(4):  # on a busy machine one alone may take several times as long as it does later
        started = time.monotonic()
        torch.linalg.svdvals(numbers)
        fastest = min(fastest, time.monotonic() - started)
    many = numbers.repeat(int(4 / fastest) + 1, 1, 1)

    def call() -> None:
        reduce_one(pair)
        began = time.monotonic()
        torch.linalg.svdvals(many)
        rounds.append(time.monotonic() - began)

    assert works(pair)  # from here on together: none waits in the collective until the limit
    return {**bounded(call, 1.0, pair), "computed": rounds, "works": works(pair)}


def engine_section_alone(pair: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """A guarded operation waits 0.8 s for its peer under a limit of 0.2 s: its group is left alone."""

    def call() -> None:
        with engine_section():
            dist.all_reduce(torch.ones(1), group=pair)

    assert works(pair)
    if rank == 1:
        time.sleep(0.8)
    return {**bounded(call, 0.2, pair), "works": works(pair)}


def own_exception(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    def call() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            raise KeyError("mine") from error

    return bounded(call, 0.3, group)


def forked_child(pair: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """A child is forked inside the block and outlives the limit, in its own block as well: the parent's group lives."""
    assert works(pair)
    with nccl_timeout_handler(0.3, pair):
        pid = os.fork()
        if pid == 0:
            with nccl_timeout_handler(0.1, pair):
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # looks like a native call to the watchdog
                time.sleep(2)
            os._exit(0)
    code = os.waitpid(pid, 0)[1]
    return {"child": code, "works": works(pair)}


def no_group_named(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """The call that hangs is not on the default group, and is found all the same; the default group lives."""
    said = bounded(partial(reduce_one, group), 0.3, None)
    torch_compat.default_store().set(f"no_group_named/{rank}", "over")
    tensor = torch.ones(1)
    if RECORDED:
        dist.all_reduce(tensor)
    return {**said, "default_lives": tensor.item() == 3}


def broken_by_a_peer(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """The limit of rank 1 passes, which breaks rank 0's call; a later block that names no group is not about this one."""
    said = bounded(partial(reduce_one, group), 0.3 if rank == 1 else GROUP_TIMEOUT, group)
    time.sleep(1.2)  # longer than half the limit that follows: the store is asked for what peers have stopped
    return {**said, "later": bounded(lambda: time.sleep(0.01), 2.0, None)}


def no_group_named_and_no_record(group: dist.ProcessGroup, rank: int) -> dict[str, Any]:
    """As before with a call that the flight recorder does not know: the default group goes first, then all others."""
    return bounded(lambda: dist.recv(torch.ones(1), src=2, group=group), 0.3, None)


# In this order: without a flight recorder of gloo (torch < 2.8) the last two cost all process groups.
CASES: tuple[Case, ...] = (
    plain_alarm, all_reduce, timedelta_of_a_large_tensor, recv, monitored_barrier, wait_of_a_work, another_thread,
    two_threads, nested, in_time, polling, polling_unguarded, after_an_engine_section, own_exception, sleeping,
    computing, engine_section_alone, forked_child, broken_by_a_peer, no_group_named,
    no_group_named_and_no_record,
)  # fmt: skip
PAIRED: tuple[Case, ...] = (
    sleeping,
    computing,
    engine_section_alone,
    forked_child,
)  # cases of ranks 0 and 1 among themselves
# Ranks 0 and 1 wait for rank 2 each in a group of its own with it: in a common one the limit that passes first, by a
# moment, ends the other one's call too.
APART: tuple[Case, ...] = (
    all_reduce, timedelta_of_a_large_tensor, wait_of_a_work, nested, own_exception, no_group_named,
    no_group_named_and_no_record,
)  # fmt: skip
RECORDED = torch_compat.VERSION >= (2, 8)  # the flight recorder knows gloo's collectives


def late(case: Case, group: dist.ProcessGroup, store: torch_compat.Store) -> None:
    """What rank 2 does in a case."""
    if case is in_time:
        time.sleep(0.3)
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(1), group=group)
    if case in (polling, polling_unguarded, no_group_named):
        store.wait([f"{case.__name__}/0", f"{case.__name__}/1"], timedelta(seconds=60))
    if case is no_group_named and RECORDED:
        dist.all_reduce(torch.ones(1))
    if case in (polling, polling_unguarded):
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except RuntimeError as error:
            faults.report(**{f"late_{case.__name__}": str(error)})


def rank_program() -> None:
    """All cases on one rank, one after the other, in step by keys in the store."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    faults.report(recorded=RECORDED, plain_timeout=PLAIN_TIMEOUT)
    rank = dist.get_rank()
    store = torch_compat.default_store()
    for case in CASES:
        name, limit = case.__name__, PLAIN_TIMEOUT if case is plain_alarm else GROUP_TIMEOUT
        members = ([0, 2], [1, 2]) if case in APART else ([0, 1] if case in PAIRED else None,)
        groups = [dist.new_group(each, timeout=timedelta(seconds=limit)) for each in members]
        group = groups[min(rank, len(groups) - 1)]
        if rank < 2:
            faults.report(**{name: case(group, rank)})
            faults.report(timer=signal.getitimer(signal.ITIMER_REAL), handler=str(signal.getsignal(signal.SIGALRM)))
        else:
            late(case, group, store)
        store.add(f"done/{name}", 1)
        while store.add(f"done/{name}", 0) < 3:
            time.sleep(0.01)


def unrecorded_program() -> None:
    """Rank 1 does not take part in the check before a collective (DETAIL); later both ranks sleep, nothing recorded."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    store = torch_compat.default_store()
    checked, idle = (dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT)) for _ in range(2))
    if dist.get_rank() == 0:
        faults.report(checked=bounded(partial(reduce_one, checked), 0.3, checked))
        store.set("checked", "over")
    else:
        store.wait(["checked"], timedelta(seconds=60))
    assert works(idle)
    faults.report(sleeping=bounded(lambda: time.sleep(GROUP_TIMEOUT), 0.3, idle))


def late_program() -> None:
    """Rank 2 enters its block when the others have given up; another group of the same ranks goes on."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    rank, told = dist.get_rank(), []
    subgroup = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(1))
    for _ in range(2):  # at once, and again: what was heard once is not forgotten
        if rank == 2 and not told:
            time.sleep(10.0)
        try:
            with nccl_timeout_handler(3, dist.group.WORLD):
                dist.all_reduce(torch.ones(1))
            told.append(["returned"])
        except CollectiveTimeout as error:
            told.append([str(error.outcome.cause), list(error.outcome.culprits), error.outcome.torn, str(error)])
        if rank != 2:
            break
    with nccl_timeout_handler(20, subgroup):  # nobody has stopped this one
        other = torch.ones(1)
        dist.all_reduce(other, group=subgroup)
    faults.report(told=told, other=other.item())
