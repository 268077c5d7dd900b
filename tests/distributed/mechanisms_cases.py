"""Programs of the ranks in test_mechanisms.py: plain torch, nothing of the guard."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ncclguard import faults


def join(seconds: float = 60.0) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    # Without it about 1 exit in 30 is a SIGABRT: gloo's worker drops the last reference to the tensor of an operation, needs
    # the GIL for it, and meets an interpreter that is being torn down.
    atexit.register(time.sleep, 0.2)
    return dist.get_rank()


def gloo() -> Any:
    """The default group's gloo backend."""
    return dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]


def new_gloo(name: str, timeout: float = 60.0) -> Any:
    """A gloo group of all ranks on a fresh prefix of the default store."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    return dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=timeout))


def reduce_on(group: Any, tensor: torch.Tensor, timeout: float | None = None) -> Any:
    options = dist.AllreduceOptions()
    if timeout is not None:
        options.timeout = timedelta(seconds=timeout)
    return group.allreduce([tensor], options)


def error_of(call: Callable[[], object]) -> str:
    """The text of the RuntimeError that ``call`` raises, or "" if it returns."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def poison(group: Any, peer: int) -> None:
    error_of(lambda: group.recv([torch.empty(1)], peer, 123_456).wait(timedelta(milliseconds=1)))


def sockets(listening: bool) -> list[socket.socket]:
    """Duplicates of this process's TCP sockets: the listening or the connected ones. Not the store's, opened before."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        if bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listening:
            found.append(one)
    return found


def inodes(found: list[socket.socket]) -> set[int]:
    return {os.fstat(one.fileno()).st_ino for one in found}


def alarm_around_all_reduce() -> None:
    rank = join()
    tensor = torch.ones(4)
    dist.barrier()  # the ranks start apart
    if rank == 1:
        time.sleep(6)
        dist.all_reduce(tensor)
        return

    def expire(*_: object) -> None:
        raise TimeoutError("the alarm's handler ran")

    signal.signal(signal.SIGALRM, expire)
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        dist.all_reduce(tensor)
        faults.report(raised=False)
    except TimeoutError:
        faults.report(raised=True, after=time.monotonic() - start, tensor=tensor.tolist())


def wait_then_go_on() -> None:
    rank = join()
    tensor = torch.ones(4)
    if rank == 1:
        faults.wait_until_told("come")
        dist.all_reduce(tensor)
        faults.report(sum=tensor.tolist())
        return
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    start = time.monotonic()
    text = error_of(lambda: work.wait(timedelta(seconds=0.3)))
    faults.report(error=text, after=time.monotonic() - start, completed=work.is_completed(), at_error=tensor.tolist())
    tensor.fill_(100.0)  # the caller believes it failed and goes on with its tensor
    faults.report(abandoned=1)
    faults.wait_until_told("look")
    faults.report(later=tensor.tolist())


def abort_and_shutdown() -> None:
    rank = join()
    group = new_gloo("own", timeout=12.0)  # it holds for connecting too
    if rank == 1:
        faults.wait_until_told("leave")
        return
    work = reduce_on(group, torch.ones(4))
    start = time.monotonic()
    if hasattr(group, "abort"):
        group.abort()
        group.shutdown()
    returned = time.monotonic() - start
    time.sleep(0.5)
    faults.report(returned=returned, unblocked=work.is_completed())
    start = time.monotonic()
    holder = [group, work]
    del group, work
    holder.clear()  # the destructor
    faults.report(deleted=time.monotonic() - start)


def late_by_two_seconds() -> None:
    rank = join()
    defaults = dist.distributed_c10d
    faults.report(
        nccl=defaults.default_pg_nccl_timeout.total_seconds() if defaults.default_pg_nccl_timeout else 600.0,  # type: ignore[attr-defined]
        other=defaults.default_pg_timeout.total_seconds(),  # type: ignore[attr-defined]
    )
    if rank == 1:
        time.sleep(2.0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    faults.report(sum=float(tensor))


def time_out_one_operation() -> None:
    """Rank 0 has 1 s, rank 1 has 8 s, rank 2 comes later than both."""
    rank = join()
    group = new_gloo("one")
    tensor = torch.full((1000,), float(rank))
    if rank == 2:
        faults.wait_until_told("come")
        start = time.monotonic()
        error = error_of(lambda: reduce_on(group, tensor).wait())
        faults.report(error=error, after=time.monotonic() - start, arrived=1)
    else:
        error = error_of(lambda: reduce_on(group, tensor, timeout=1.0 if rank == 0 else 8.0).wait())
        copy = tensor.clone()
        faults.report(error=error)
        faults.wait_until_told("look")
        faults.report(unchanged=torch.equal(tensor, copy))
    second = new_gloo("two")
    again = torch.ones(1)
    reduce_on(second, again).wait()
    faults.report(again=float(again))


def lose_a_peer() -> None:
    rank = join()
    group = new_gloo("own")
    tensor = torch.full((3_000_000,), float(rank + 1))
    faults.report(ready=1)
    if rank == 2:
        faults.wait_until_told("never")
    work = reduce_on(group, tensor)
    end = time.monotonic() + 3.0  # one of the two gets nothing before rank 2 sends
    while not bool((tensor != float(rank + 1)).any()) and time.monotonic() < end:
        time.sleep(0.05)
    faults.report(moved=1)
    error = error_of(work.wait)
    changed = int((tensor != float(rank + 1)).sum())
    faults.report(error=error, changed=changed, complete=int((tensor == 6.0).sum()))


def abort_from_another_thread() -> None:
    """All wait for rank 3, which does not come. Rank 0 poisons itself, later rank 1 shuts its sockets down."""
    rank = join()
    before = inodes(sockets(listening=False))
    group = new_gloo("own")
    mine = [one for one in sockets(listening=False) if inodes([one]).isdisjoint(before)]
    if rank == 3:
        faults.wait_until_told("leave")
        return
    ended: dict[str, float] = {}

    def end_after(word: str, how: Callable[[], object]) -> None:
        faults.wait_until_told(word)
        ended["at"] = time.monotonic()
        how()

    def shut() -> None:
        for one in mine:
            one.shutdown(socket.SHUT_RDWR)

    how: Callable[[], object] = shut if rank == 1 else lambda: poison(group, 3)
    threading.Thread(target=end_after, args=("first" if rank == 0 else "second", how), daemon=True).start()
    source = dist.ScatterOptions()
    source.rootRank = 3  # everybody waits for rank 3 alone
    faults.report(waiting=1)
    error = error_of(lambda: group.scatter([torch.ones(4)], [], source).wait())
    faults.report(error=error, after=time.monotonic() - ended.get("at", 0.0) if ended else None, connections=len(mine))


def shut_the_listening_socket() -> None:
    join()
    before = inodes(sockets(listening=True))
    group = new_gloo("own")
    found = [one for one in sockets(listening=True) if inodes([one]).isdisjoint(before)]
    faults.report(found=len(found))
    faults.wait_until_told("shut")
    found[0].shutdown(socket.SHUT_RDWR)
    time.sleep(5.0)
    faults.report(survived=group.size())


def other_sizes() -> None:
    rank = join(seconds=10.0)
    tensor = torch.ones(4 if rank == 0 else 1000)
    try:
        dist.all_reduce(tensor)
        faults.report(end="completed")
    except RuntimeError as error:
        faults.report(end=str(error))


def wait_less_than_a_millisecond() -> None:
    rank = join()
    dist.barrier()  # the ranks start apart
    if rank == 1:
        time.sleep(5)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    start = time.monotonic()
    error = error_of(lambda: work.wait(timedelta(microseconds=900)))
    faults.report(error=error, after=time.monotonic() - start)


def read_the_stack_of_a_blocked_rank() -> None:
    rank = join()
    main = threading.get_ident()

    def look() -> None:
        time.sleep(0.5)
        frame = sys._current_frames()[main]
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        faults.report(names=names)

    if rank == 1:
        faults.wait_until_told("come")
    else:
        threading.Thread(target=look).start()
    dist.all_reduce(torch.ones(1))


class CountingGroup(dist.ProcessGroup):
    """A process group in Python: hands everything to a gloo group that it could also exchange."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self.inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        return getattr(self.inner, name)

    def allreduce(self, *args: Any) -> Any:
        return self._count("allreduce")(*args)

    def broadcast(self, *args: Any) -> Any:
        return self._count("broadcast")(*args)

    def allgather(self, *args: Any) -> Any:
        return self._count("allgather")(*args)

    def barrier(self, *args: Any) -> Any:
        return self._count("barrier")(*args)

    def getBackendName(self) -> str:
        return "counting"


def train_through_a_python_group() -> None:
    dist.Backend.register_backend("counting", CountingGroup, devices=["cpu"])
    dist.init_process_group("counting", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
        optimizer.step()
    group: Any = dist.group.WORLD
    faults.report(weights=[round(value, 5) for value in model.module.weight.view(-1).tolist()], calls=group.calls)


def record_gloo() -> None:
    join()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    trace = json.loads(dump()) if dump is not None else {}
    faults.report(names=[entry["profiling_name"] for entry in trace.get("entries", [])])


def keep_pieces_in_flight() -> None:
    rank = join()
    group = new_gloo("own")
    tensor = torch.arange(1_000_000, dtype=torch.float64) * (rank + 1)
    works = [reduce_on(group, piece) for piece in tensor.chunk(4)]
    for work in works:
        work.wait()
    faults.report(exact=torch.equal(tensor, torch.arange(1_000_000, dtype=torch.float64) * 6))


def serve_and_misbehave(what: str) -> None:
    from torch._C._distributed_c10d import _WorkerServer

    server = _WorkerServer("127.0.0.1", 0)
    faults.report(port=server.port)
    faults.wait_until_told("go")
    if what == "hold the GIL":
        faults.report(holding=1)
        ctypes.PyDLL(None).sleep(12)  # unlike CDLL, PyDLL does not release the GIL
        faults.report(held=1)
    else:
        faults.wait_until_told("leave")
    os._exit(0)  # server.shutdown() would hold the GIL while it waits for a handler that needs it
