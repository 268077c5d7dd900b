"""Programs of the ranks in test_stream_transport.py."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ncclguard import faults, torch_compat
from ncclguard.transport.base import Communicator, Pending, TransportError
from ncclguard.transport.links import Links
from ncclguard.transport.streams import StreamBuilder, StreamCommunicator


def join() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    atexit.register(time.sleep, 0.2)  # else the exit may be a SIGABRT, see join() in mechanisms_cases.py
    return dist.get_rank()


def build(generation: int, seconds: float = 10.0) -> StreamCommunicator:
    store = torch_compat.clone_store(torch_compat.default_store())
    ranks = tuple(range(dist.get_world_size()))
    prefix = f"transport/{generation}"
    return StreamBuilder().build(store, prefix, ranks, dist.get_rank(), generation, seconds)


def finish(pending: Pending, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not pending.wait(0.1):
        if time.monotonic() > end:
            raise AssertionError(f"not complete after {seconds} s")


def error_of(pending: Pending) -> TransportError:
    """The error that the operation ends with."""
    try:
        finish(pending)
    except TransportError as error:
        return error
    raise AssertionError("the operation completed")


def refusal_of(communicator: Communicator) -> str:
    """What a submission after `stop` is told."""
    try:
        communicator.all_reduce(torch.ones(1), ReduceOp.SUM)
    except TransportError as error:
        return str(error)
    raise AssertionError("a stopped communicator took an operation")


def took(start: float) -> float:
    return time.monotonic() - start


def stop_while_blocked() -> None:
    """Rank 2 comes a second after the others have stopped."""
    rank = join()
    communicator = build(1)
    big = 3_000_000
    tensors = [torch.full((big,), float(rank)) for _ in range(3)]
    if rank == 2:
        faults.wait_until_told("come")
        start = time.monotonic()
        error = error_of(communicator.all_reduce(tensors[0], ReduceOp.SUM))
        faults.report(late=str(error), late_after=took(start), late_peer=error.peer)
        communicator.close()
        return
    vote = communicator.agree(1)
    pending = [communicator.all_reduce(tensor, ReduceOp.SUM) for tensor in tensors]
    stopped: list[float] = []

    def stop() -> None:
        time.sleep(0.3)
        start = time.monotonic()
        communicator.stop()
        stopped.append(took(start))

    threading.Thread(target=stop).start()
    texts = [str(error_of(one)) for one in (vote, *pending)]
    quiet = communicator.quiet(2.0)
    after = [tensor.clone() for tensor in tensors]
    communicator.stop()
    faults.report(texts=texts, quiet=quiet, refused=refusal_of(communicator))
    faults.wait_until_told("look")
    unchanged = all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, after, strict=True))
    faults.report(unchanged=unchanged, stop_took=stopped[0])
    communicator.close()


def stop_in_every_way() -> None:
    join()
    counts: dict[str, Any] = {}

    idle = build(1)  # no operation was ever started
    idle.stop()
    idle.stop()
    counts["idle"] = [idle.quiet(0.0), refusal_of(idle)]
    idle.close()

    busy = build(2)  # another thread stops while this one submits one operation after the other
    threading.Timer(0.3, busy.stop).start()
    counts["busy"] = submit_until_refused(busy)
    busy.close()

    many = build(3)  # ten threads stop at the same time
    dist.barrier()
    stoppers = [threading.Thread(target=many.stop) for _ in range(10)]
    for stopper in stoppers:
        stopper.start()
    counts["many"] = submit_until_refused(many)
    for stopper in stoppers:
        stopper.join()
    many.close()

    signalled = build(4)  # a signal handler stops in the thread that submits
    previous = signal.signal(signal.SIGALRM, lambda *_: signalled.stop())
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    counts["signalled"] = submit_until_refused(signalled)
    signal.setitimer(signal.ITIMER_REAL, 0)  # the peer's stop may have come before this rank's alarm
    signal.signal(signal.SIGALRM, previous)
    signalled.close()

    last = build(5)  # all of that has not touched a later generation, nor the default group
    tensor = torch.ones(1)
    finish(last.all_reduce(tensor, ReduceOp.SUM))
    dist.all_reduce(tensor)
    counts["last"] = float(tensor)
    last.close()
    faults.report(**counts)


def submit_until_refused(communicator: StreamCommunicator) -> list[object]:
    completed, tensor, end = 0, torch.ones(100), time.monotonic() + 20
    while time.monotonic() < end:
        try:
            finish(communicator.all_reduce(tensor, ReduceOp.MAX))
            completed += 1
        except TransportError:
            # The end may come as the error of an operation first, when a peer was faster.
            communicator.stop()
            return [completed >= 0, communicator.quiet(2.0), "was stopped" in refusal_of(communicator)]
    return ["never refused"]


def stop_beside_a_stopped_peer() -> None:
    rank = join()
    communicator = build(1)
    tensor = torch.ones(20_000_000)
    faults.report(ready=1)
    pending = communicator.all_reduce(tensor, ReduceOp.SUM)
    if rank == 1:
        faults.report(inside=1)
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Timer(1.0, communicator.stop).start()  # a send under way is not told of its connection's end
        faults.report(woken=str(error_of(pending)), quiet=communicator.quiet(2.0))
    else:
        time.sleep(1.0)
        communicator.stop()
        error = error_of(pending)
        faults.report(error=str(error), quiet=communicator.quiet(2.0))
    communicator.close()


def lose_the_network() -> None:
    join()
    communicator = build(1)
    tensor = torch.ones(400_000)
    finish(communicator.all_reduce(tensor, ReduceOp.MAX))
    faults.report(ready=1)
    end = time.monotonic() + 30
    pending: Pending | None = None
    while time.monotonic() < end:
        pending = communicator.all_reduce(tensor, ReduceOp.MAX)
        if not pending.wait(1.5):
            break
    assert pending is not None
    start = time.monotonic()
    communicator.stop()
    error = error_of(pending)
    quiet = communicator.quiet(2.0)
    communicator.close()
    faults.report(ended=took(start), error=str(error), quiet=quiet)
    os._exit(0)  # the store is on the other side too: leaving it in peace is not what this is about


def stop_beside_a_forked_child() -> None:
    rank = join()
    communicator = build(1)
    if rank == 0:
        child = os.fork()  # holds a copy of every connection, as a DataLoader worker does
        if child == 0:
            try:
                faults.report(in_child=refusal_of(communicator))
                communicator.stop()
                communicator.close()
                time.sleep(1.0)
            finally:
                os._exit(0)  # as workers end; torch's own gloo group would wait for ever in its destructor here
        time.sleep(0.5)
        tensor = torch.ones(1)
        finish(communicator.all_reduce(tensor, ReduceOp.SUM))  # the child's stop() was not the parent's
        communicator.stop()
        stopped = time.monotonic()
        os.waitpid(child, 0)
        faults.report(sum=float(tensor), child_lived_on=took(stopped))
    else:
        finish(communicator.all_reduce(torch.ones(1), ReduceOp.SUM))
        start = time.monotonic()
        error = error_of(communicator.all_reduce(torch.ones(1), ReduceOp.SUM))
        faults.report(error=str(error), peer=error.peer, released=took(start))
    communicator.close()


def survive_a_kill() -> None:
    rank = join()
    communicator = build(1)
    faults.report(ready=1)
    if rank == 1:
        time.sleep(60)
    error = error_of(communicator.all_reduce(torch.ones(4), ReduceOp.SUM))
    faults.report(error=str(error), peer=error.peer)
    communicator.close()


def close_early() -> None:
    rank = join()
    sums = []
    for generation in range(8):
        communicator = build(generation)
        tensor = torch.ones(3_000_000)
        if rank == 1:
            time.sleep(0.02)
        finish(communicator.all_reduce(tensor, ReduceOp.SUM))
        communicator.close()  # while the others may still be reading what this rank has sent
        sums.append(float(tensor.sum()))
    faults.report(sums=sums)


def leave_without_closing() -> None:
    rank = join()
    communicator = build(1)
    if rank == 0:
        communicator.all_reduce(torch.ones(4), ReduceOp.SUM)  # never joined by rank 1, never waited for, kept alive:
        globals()["communicator"] = communicator
    else:
        faults.wait_until_told("leave")


def build_without_a_peer() -> None:
    rank = join()
    faults.report(joined=1)
    if rank == 2:
        faults.wait_until_told("leave")
        return
    start = time.monotonic()
    try:
        build(1, seconds=1.0)
    except TransportError as error:
        faults.report(error=str(error), after=took(start))


def build_with_a_peer_that_ends() -> None:
    """Rank 2 says that it is about to connect, and is killed or stopped instead."""
    rank = join()
    if rank == 2:
        links = Links("127.0.0.1", 3, 2, direct=False)
        keys = torch_compat.PrefixStore("transport/1", torch_compat.default_store())
        keys.set("streams/2", links.own.to_json())
        faults.report(ready=1)
        faults.wait_until_told("never", 60.0)
    start = time.monotonic()
    try:
        build(1, seconds=2.0)
        faults.report(error="built", after=took(start))
    except TransportError as error:
        faults.report(error=str(error), after=took(start))


def build_on_a_stopped_store() -> None:
    rank = join()
    if rank == 0:
        faults.wait_until_told("build")
        return
    store = torch_compat.clone_store(torch_compat.default_store())
    faults.report(cloned=1)
    faults.wait_until_told("build")
    start = time.monotonic()
    try:
        StreamBuilder().build(store, "transport/1", (0, 1, 2), rank, 1, 1.0)
    except TransportError as error:
        faults.report(error=str(error), after=took(start))
    time.sleep(0.5)
    names = [thread.name for thread in threading.enumerate() if "connecting" in thread.name]
    faults.report(left=names)
    sys.stdout.flush()
