"""Jobs that nothing was prepared in, for `ncclguard hang`: `python hang_jobs.py` forks the ranks of each job that it is told.

It reads "WORLD_SIZE CASE" lines, prints "PID PID ..." once the job stands where its fault strikes, and ends the job at
the next line or at the end of its input. A fork shows in /proc/PID/environ what a launcher gives a rank, as its
parent's environment has room for it. Started with a case as its argument it is one rank, as torchrun starts it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STRUCK = 2
ROOM = "HANG_JOB_ROOM"
ROOM_BYTES = 400
#: Past any look: a healthy job goes on for as long, a struck rank sleeps for as long.
LONG = 600.0


def save_checkpoint() -> None:
    time.sleep(LONG)


def held_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def locked_file() -> None:
    """Wait for another process's lock on a file, as filelock does: by asking again and again."""
    with tempfile.NamedTemporaryFile() as file, open(file.name, "w") as other:
        fcntl.flock(file, fcntl.LOCK_EX)
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)


class StuckSamples(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 2:
            time.sleep(LONG)
        return torch.ones(1)


def stuck_loader() -> None:
    for _ in DataLoader(StuckSamples(), num_workers=1, multiprocessing_context="fork"):
        pass


def download() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urllib.request.urlopen(f"http://127.0.0.1:{silent.getsockname()[1]}/weights").read()


def with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(int(LONG))


def child_process() -> None:
    subprocess.run(["sleep", str(int(LONG))], check=False)


def pipe_nobody_writes() -> None:
    os.read(os.pipe()[0], 1)


def raise_and_hang_at_exit() -> None:
    threading.Thread(target=time.sleep, args=(LONG,)).start()
    raise ValueError("a sample of this rank is empty")


def hang_in_an_exit_handler_of_c() -> None:
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
    raise SystemExit


def another_collective() -> None:
    dist.broadcast(torch.ones(4), src=0)


#: What strikes one rank of a job that goes on with all-reduces.
FAULTS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(LONG),
    "save": save_checkpoint,
    "lock": held_lock,
    "file-lock": locked_file,
    "loader": stuck_loader,
    "download": download,
    "gil": with_the_gil,
    "child": child_process,
    "pipe": pipe_nobody_writes,
    "raise": raise_and_hang_at_exit,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "other": another_collective,
    "exit": lambda: os._exit(3),
    "leave": lambda: os._exit(0),
    "exit-handler": hang_in_an_exit_handler_of_c,
}
#: Ways of waiting for requests.
REQUESTS: dict[str, Callable[[], object]] = {
    "queue": lambda: queue.Queue().get(),
    "event": lambda: threading.Event().wait(),
    "future": lambda: Future().result(),
    "poll": lambda: poll_nobody(),
    "line": lambda: read_a_line_of(*socket.socketpair()),
}


def read_a_line_of(client: socket.socket, _: socket.socket) -> None:
    client.makefile().readline()


def poll_nobody() -> None:
    watched = select.epoll()
    while not (found := watched.poll()):
        del found


def train(step: Callable[[], object], fault: str, ready: Callable[[], None]) -> None:
    for number in range(10**9):
        if number == 3:
            ready()
            if dist.get_rank() == STRUCK and fault:
                time.sleep(0.1)
                FAULTS[fault]()
        step()


def raw(fault: str, ready: Callable[[], None]) -> None:
    tensor = torch.ones(4)
    train(lambda: dist.all_reduce(tensor), fault, ready)


def waited(fault: str, ready: Callable[[], None]) -> None:
    """Wait by a work's own method: no frame of torch is in the stack."""
    tensor = torch.ones(4)

    def step() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()

    train(step, fault, ready)


def ddp(fault: str, ready: Callable[[], None]) -> None:
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    train(lambda: model(torch.ones(2, 16)).sum().backward(), fault, ready)


def skipped(_: str, ready: Callable[[], None]) -> None:
    ready()
    if dist.get_rank() != STRUCK:
        dist.all_reduce(torch.ones(4))
    dist.barrier()
    dist.all_reduce(torch.ones(4))


def crossed(_: str, ready: Callable[[], None]) -> None:
    """Let two ranks begin with one group, two with another."""
    first, second = dist.new_group(range(4)), dist.new_group(range(4))
    ready()
    for group in (first, second) if dist.get_rank() < 2 else (second, first):
        if group is first:
            dist.all_reduce(torch.ones(4), group=group)
        else:
            dist.broadcast(torch.ones(4), src=0, group=group)


def beside(_: str, ready: Callable[[], None]) -> None:
    """Train two models on two ranks each; rank 2 sleeps, and only rank 3 waits for it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(torch.nn.Linear(16, 16), process_group=groups[dist.get_rank() // 2])

    def step() -> None:
        time.sleep(0.02)
        model(torch.ones(2, 16)).sum().backward()

    train(step, "sleep", ready)


def beside_one(_: str, ready: Callable[[], None]) -> None:
    """Train on ranks 1 to 3, of which rank 2 sleeps; rank 0 has nothing to do."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        ready()
        save_checkpoint()
    model = DistributedDataParallel(torch.nn.Linear(16, 16), process_group=group)
    train(lambda: model(torch.ones(2, 16)).sum().backward(), "lock", ready)


def pipeline(_: str, ready: Callable[[], None]) -> None:
    """Pass an activation from stage to stage; stage 2 hangs in its layer."""
    rank, size, activation = dist.get_rank(), dist.get_world_size(), torch.ones(4)

    def layer() -> None:
        if rank == STRUCK:
            time.sleep(LONG)

    ready()
    for _ in range(1000):
        if rank > 0:
            dist.recv(activation, src=rank - 1)
        layer()
        if rank < size - 1:
            dist.send(activation, dst=rank + 1)
        else:
            dist.send(activation, dst=0)
        if rank == 0:
            dist.recv(activation, src=size - 1)


def stored(fault: str, ready: Callable[[], None]) -> None:
    """Wait for a key that one rank sets in the job's store: nobody's connection breaks when it ends."""
    store = dist.distributed_c10d._get_default_store()
    ready()
    if dist.get_rank() == STRUCK:
        time.sleep(0.1)
        FAULTS[fault]()
    store.get("checkpoint-is-written")


def aborted(_: str, ready: Callable[[], None]) -> None:
    """Kill one rank, and have another end as torch's watchdog ends those that waited for too long."""
    store = dist.distributed_c10d._get_default_store()
    ready()
    if dist.get_rank() == STRUCK:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == STRUCK + 1:
        time.sleep(0.3)
        os.abort()
    store.get("checkpoint-is-written")


def served(way: str, ready: Callable[[], None]) -> None:
    """Have one rank wait for requests, as an inference engine's first one does."""
    ready()
    if dist.get_rank() == STRUCK:
        REQUESTS[way]()
    dist.broadcast(torch.ones(4), src=STRUCK)


def grouped(_: str, ready: Callable[[], None]) -> None:
    """Have rank 3 wait in its group for rank 2, which sleeps, and the other two for requests."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    dist.barrier()
    ready()
    time.sleep(0.1)  # what has been written to connect them is older then
    if dist.get_rank() == STRUCK:
        save_checkpoint()
    if dist.get_rank() < STRUCK:
        queue.Queue().get()
    dist.all_reduce(torch.ones(4), group=groups[1])


def ahead(_: str, ready: Callable[[], None]) -> None:
    """Have the last stage wait for the one before, which sleeps; the first two have done their part, and do others."""
    ready()
    if dist.get_rank() == 3:
        dist.recv(torch.ones(4), src=STRUCK)
    [held_lock, pipe_nobody_writes, save_checkpoint][dist.get_rank()]()


def circle(_: str, ready: Callable[[], None]) -> None:
    """Have two ranks wait for a message of each other, and the other two compute."""
    ready()
    if dist.get_rank() < 2:
        dist.recv(torch.ones(4), src=1 - dist.get_rank())
    while True:
        sum(range(100000))


def called(_: str, ready: Callable[[], None]) -> None:
    """Have rank 0 call one that does not answer; all others serve."""
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=4, rpc_backend_options=options)
    ready()
    if rank == 0:
        rpc.rpc_sync(f"worker{STRUCK}", save_checkpoint, timeout=0)
    rpc.shutdown()


def spawned(index: int, shared: object, port: int) -> None:
    """Be one of two ranks that torch.multiprocessing.spawn has started, the last one first; the second one sleeps."""
    rank = 1 - index
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        save_checkpoint()
    dist.all_reduce(torch.ones(4))


def spawn(port: int) -> None:
    """Start two ranks, after a server of shared objects, which is a process of multiprocessing too."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        torch.multiprocessing.spawn(spawned, (manager.dict(), port), nprocs=2)


def held(fault: str, ready: Callable[[], None]) -> None:
    """Have every rank go on to exist after it has raised, by a thread that does not end."""
    threading.Thread(target=time.sleep, args=(LONG,)).start()
    raw(fault, ready)


def healthy_compute(_: str, ready: Callable[[], None]) -> None:
    """Compute for longer on one rank than on the others."""
    matrix = torch.ones(400, 400)

    def step() -> None:
        for _ in range(60 if dist.get_rank() == STRUCK else 1):
            matrix @ matrix
        dist.all_reduce(torch.ones(4))

    train(step, "", ready)


def healthy_sleep(_: str, ready: Callable[[], None]) -> None:
    """Stand for a device that works: the steps take time and no processor."""

    def step() -> None:
        time.sleep(0.2 if dist.get_rank() == STRUCK else 0.0)
        dist.all_reduce(torch.ones(4))

    train(step, "", ready)


def healthy_save(_: str, ready: Callable[[], None]) -> None:
    """Save on one rank for seconds, all others at a barrier."""
    ready()
    with tempfile.TemporaryDirectory() as folder:
        while True:
            if dist.get_rank() == STRUCK:
                for _ in range(100):
                    torch.save(torch.ones(1 << 22), Path(folder, "checkpoint.pt"))
            dist.barrier()


def timed(_: str, ready: Callable[[], None]) -> None:
    """Write when each step of rank 0 ended and how long it took, for benchmarks/hang_cost.py."""
    ready()
    with open(os.environ["HANG_JOB_STEPS"] if dist.get_rank() == 0 else os.devnull, "w", buffering=1) as file:
        while True:
            start = time.monotonic()
            time.sleep(0.005)
            dist.all_reduce(torch.ones(1000))
            print(time.monotonic(), time.monotonic() - start, file=file)


class WorkingSamples(Dataset):
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        total, end = 0, time.monotonic() + 1.5
        while time.monotonic() < end:
            total += sum(range(1000))
        return torch.full((1,), float(total))


def healthy_load(_: str, ready: Callable[[], None]) -> None:
    """Wait on one rank for its data loader's worker, which computes."""
    ready()  # first: the worker would inherit the pipe by which it tells
    samples = iter(DataLoader(WorkingSamples(), num_workers=1, multiprocessing_context="fork"))
    while True:
        if dist.get_rank() == STRUCK:
            next(samples)
        dist.all_reduce(torch.ones(4))


def healthy_evaluate(_: str, ready: Callable[[], None]) -> None:
    """Evaluate on one rank in Python for seconds."""
    ready()
    while True:
        if dist.get_rank() == STRUCK:
            end = time.monotonic() + 5
            while time.monotonic() < end:
                sorted(range(2000))
        dist.barrier()


def healthy_child(_: str, ready: Callable[[], None]) -> None:
    """Have one rank wait for a program that computes, and that it starts again and again, as a compiler."""
    ready()
    program = "import time; end = time.monotonic() + 2\nwhile time.monotonic() < end: sum(range(1000))"
    while True:
        if dist.get_rank() == STRUCK:
            subprocess.run([sys.executable, "-S", "-c", program], check=True)
        dist.barrier()


def never_joins(_: str, ready: Callable[[], None]) -> None:
    """Have one rank work on before it joins the job."""
    ready()
    if os.environ["RANK"] == str(STRUCK):
        time.sleep(LONG)
    join()


def watched(limit: str, ready: Callable[[], None]) -> None:
    """Have one rank be late in a program that calls `watch`, perhaps with a limit that passes, so that it reports."""
    import ncclguard

    ncclguard.watch(timeout=float(limit or LONG))
    join()
    raw("sleep", ready)


def guarded(fault: str, ready: Callable[[], None]) -> None:
    """Call the guard's own all-reduce, in which the others wake up again and again to ask."""
    import ncclguard

    join()
    tensor = torch.ones(4)
    train(lambda: ncclguard.safe_all_reduce(tensor, timeout=LONG).raise_if_failed(), fault, ready)


def backend(fault: str, ready: Callable[[], None]) -> None:
    import ncclguard

    ncclguard.configure(timeout=LONG)
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=LONG))
    raw(fault, ready)


def never_comes(_: str, ready: Callable[[], None]) -> None:
    if os.environ["RANK"] == str(STRUCK):
        os._exit(3)
    ready()
    join()


def join() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=LONG))


JOBS: dict[str, Callable[[str, Callable[[], None]], None]] = {
    "raw": raw,
    "waited": waited,
    "ddp": ddp,
    "skipped": skipped,
    "crossed": crossed,
    "beside": beside,
    "beside-one": beside_one,
    "pipeline": pipeline,
    "stored": stored,
    "timed": timed,
    "held": held,
    "aborted": aborted,
    "served": served,
    "grouped": grouped,
    "ahead": ahead,
    "circle": circle,
    "healthy-compute": healthy_compute,
    "healthy-sleep": healthy_sleep,
    "healthy-save": healthy_save,
    "healthy-load": healthy_load,
    "healthy-evaluate": healthy_evaluate,
    "healthy-child": healthy_child,
}
EARLY = {
    "never-joins": never_joins,
    "never-comes": never_comes,
    "called": called,
    "watched": watched,
    "guarded": guarded,
    "backend": backend,
}


def main(case: str, ready: Callable[[], None]) -> None:
    """Be one rank of a job: a case is "JOB" or "JOB:FAULT"."""
    job, _, fault = case.partition(":")
    torch.set_num_threads(1)
    if job in EARLY:
        EARLY[job](fault, ready)
        return
    join()
    JOBS[job](fault, ready)


def show(variables: dict[str, str]) -> None:
    """Have /proc/PID/environ show these variables, in the room that this process's environment has for them."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    place = libc.getenv(ROOM.encode())
    text = "\0".join(f"{name}={value}" for name, value in variables.items()).encode()
    ctypes.memmove(place - len(ROOM) - 1, text.ljust(len(ROOM) + 1 + ROOM_BYTES, b"\0"), len(ROOM) + 1 + ROOM_BYTES)


def fork(world_size: int, case: str) -> list[int]:
    """Fork the ranks of one job and wait until all of them are ready."""
    reserved = socket.socket()  # until rank 0 listens there: nobody else is given the port
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    reading, writing = os.pipe()
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.setpgid(0, 0)  # with what it starts, which would outlive it
            sys.stdin = open(os.devnull)  # noqa: SIM115
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            told = {name: str(value) for name, value in variables.items()}
            show(told)
            os.environ.update(told)
            try:
                main(case, lambda: os.close(writing))
            except BaseException:  # noqa: BLE001 - what Python does at the end of a program, and os._exit would not
                sys.excepthook(*sys.exc_info())
            threading._shutdown()
            os._exit(0)
        pids.append(pid)
    os.close(writing)
    os.read(reading, 1)  # its end: every rank has closed its side, or is gone
    os.close(reading)
    reserved.close()
    return pids


def serve(lines: Sequence[str]) -> None:
    pids: list[int] = []

    def end() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    for line in lines:
        end()
        world_size, case = line.split()
        pids = fork(int(world_size), case)
        print(*pids, flush=True)
    end()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        spawn(int(sys.argv[2]))
    elif len(sys.argv) > 1:
        main(sys.argv[1], lambda: None)
    else:
        print("ready", flush=True)
        serve(sys.stdin)  # type: ignore[arg-type]
