"""The ranks of a bench: those that torchrun or srun started, or its own, which it starts and always ends."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ncclguard.bench.arguments import BenchError

PIPE_VARIABLE = "_NCCLGUARD_BENCH_PIPE"  # in ranks that the bench started: the pipe to the process that started them
_LOOPBACK = Path("/sys/class/net/lo")  # without a name gloo resolves the hostname, which may lead anywhere
_SLURM_PORTS = (20000, 20000)  # first port and their number, below the ephemeral range; the job's number chooses


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks, as its launcher gave it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """Return the variables of torch's env:// rendezvous that name this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


def detect(environment: Mapping[str, str]) -> World | None:
    """Return the world that a launcher described in `environment`, or None when there is none.

    torchrun, and whatever else sets RANK and WORLD_SIZE, wins over srun. An sbatch script or an salloc shell is not a
    launcher: only a step that srun started has SLURM_STEP_NUM_TASKS with SLURM_PROCID.

    Raises:
        BenchError: a launcher's variables are incomplete or contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = _number(environment, "WORLD_SIZE")
        world = World(
            rank=_number(environment, "RANK"),
            size=size,
            local_rank=_number(environment, "LOCAL_RANK", _number(environment, "RANK")),
            local_size=_number(environment, "LOCAL_WORLD_SIZE", size),
            launcher=_launcher(environment),
        )
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in environment:
                raise BenchError(
                    f"RANK and WORLD_SIZE are set but {name} is not; start with torchrun, or unset RANK and WORLD_SIZE "
                    f"to let the bench start its own ranks."
                )
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        size = _number(environment, "SLURM_STEP_NUM_TASKS")
        world = World(
            rank=_number(environment, "SLURM_PROCID"),
            size=size,
            local_rank=_number(environment, "SLURM_LOCALID", 0),
            local_size=_tasks_here(environment, size),
            launcher="srun",
        )
    else:
        return None
    if not 0 <= world.rank < world.size:
        raise BenchError(f"{world.launcher}: rank {world.rank} is not in a world of {world.size}; start the job again.")
    return world


def rendezvous_variables(world: World, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which torch's env:// finds the world; those already set keep their values."""
    variables = world.environment()
    if world.launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        first, count = _SLURM_PORTS
        job = int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        variables["MASTER_ADDR"] = first_host(nodes)
        variables["MASTER_PORT"] = str(first + job % count)
    return {name: environment.get(name, value) for name, value in variables.items()}


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list.

    Example:
        >>> first_host("gpu[003-006,9],login1"), first_host("a1,a2")
        ('gpu003', 'a1')
    """
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodelist)
    return "".join(part or "" for part in match.groups()) if match else nodelist


def choose_backend(asked: str | None) -> str:
    """Return the backend to compare on: NCCL where torch has it and sees a GPU, else gloo.

    Raises:
        BenchError: `asked` is nccl and this machine cannot run it.
    """
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    if asked == "nccl" and not usable:
        reason = "torch sees no GPU" if dist.is_nccl_available() else f"torch {torch.__version__} has no NCCL"
        raise BenchError(f"--backend nccl: {reason}; leave --backend away to use gloo.")
    return asked or ("nccl" if usable else "gloo")


def choose_ranks(asked: int | None, backend: str, fault: bool) -> int:
    """Return how many ranks to start on this host when no launcher did."""
    if asked is not None:
        return asked
    if fault:
        return 4
    return torch.cuda.device_count() if backend == "nccl" else 2


def device_of(world: World, backend: str) -> torch.device:
    """Return the device this rank's tensors are on; ranks beyond the number of GPUs share them."""
    if backend != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def ranks_sharing(world: World, device: torch.device) -> int:
    """Return how many ranks of this host take their tensors from the same memory as this one."""
    if device.type == "cpu":
        return world.local_size
    count = torch.cuda.device_count()
    return len(range(world.local_rank % count, world.local_size, count))


def own_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment of one rank that the bench starts itself, whose store the starting process keeps."""
    place = World(rank, ranks, rank, ranks, "the bench").environment()
    threads = max(1, (os.cpu_count() or 1) // ranks)  # the same for every variant: they run in the same processes
    return {
        **os.environ,
        **place,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects like the others, so it may die without the store
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        **({} if "GLOO_SOCKET_IFNAME" in os.environ or not _LOOPBACK.exists() else {"GLOO_SOCKET_IFNAME": "lo"}),
    }


def _launcher(environment: Mapping[str, str]) -> str:
    if PIPE_VARIABLE in environment:
        return "the bench"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "RANK and WORLD_SIZE"


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise BenchError(f"{name}={text!r} is not a whole number; start the job again with its launcher.") from None


def _tasks_here(environment: Mapping[str, str], size: int) -> int:
    """Return this node's number of tasks, entry SLURM_NODEID of SLURM_STEP_TASKS_PER_NODE, which reads `4(x2),3`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return size
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else size


STALL_GRACE = 120.0  # seconds without a sign from any rank, beyond the limit of one call
EXIT_GRACE = 30.0  # seconds for the other ranks to end after one failed or after Ctrl-C
_POLL = 0.1


class Heartbeat:
    """The rank's end of the pipe to the process that started it; does nothing under a launcher.

    Raises:
        BrokenPipeError: from `beat`, when the starting process is gone: the rank must not outlive it.
    """

    def __init__(self) -> None:
        pipe = os.environ.pop(PIPE_VARIABLE, None)
        self._pipe = None if pipe is None else int(pipe)
        if self._pipe is not None:
            os.set_inheritable(self._pipe, False)

    def beat(self) -> None:
        """Tell the starting process that this rank moves on."""
        if self._pipe is not None:
            os.write(self._pipe, b".")


class Supervisor:
    """The ranks as child processes: watched until all have ended, killed when nothing moves any more."""

    def __init__(self, argv: Sequence[str], ranks: int, stall: float, spare: int | None = None) -> None:
        """`spare` is a rank whose violent end is part of the job and does not hurry the others."""
        self._argv, self._ranks, self._stall, self._spare = list(argv), ranks, stall, spare
        self._children: list[subprocess.Popen[bytes]] = []
        self._signals = 0

    def run(self) -> int:
        """Start the ranks and return the exit code of the whole: 0 only if every rank returned 0."""
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in torch.distributed.__all__
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        with selectors.DefaultSelector() as pipes, self._forwarding():
            try:
                for rank in range(self._ranks):
                    self._start(rank, store.port, pipes)
                problem = self._watch(pipes)
            finally:
                self._kill()
                for key in list(pipes.get_map().values()):
                    os.close(int(key.fd))
        return self._exit_code(problem)

    def _start(self, rank: int, port: int, pipes: selectors.BaseSelector) -> None:
        reader, writer = os.pipe()
        pipes.register(reader, selectors.EVENT_READ)
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "ncclguard.bench", *self._argv],
                env={**own_environment(rank, self._ranks, port), PIPE_VARIABLE: str(writer)},
                stdin=subprocess.DEVNULL,
                pass_fds=[writer],
                start_new_session=True,  # a terminal's Ctrl-C reaches this process only, which passes it on once
            )
        finally:
            os.close(writer)
        self._children.append(child)

    def _watch(self, pipes: selectors.BaseSelector) -> str | None:
        """Wait until every rank has ended; return a sentence if some had to be killed."""
        moved = time.monotonic()
        hurry: float | None = None
        forwarded = 0
        while any(child.poll() is None for child in self._children):
            if pipes.get_map():
                for key, _ in pipes.select(_POLL):
                    if os.read(key.fd, 4096):
                        moved = time.monotonic()
                    else:
                        pipes.unregister(key.fd)
                        os.close(key.fd)
            else:
                time.sleep(_POLL)
            now = time.monotonic()
            if self._signals > forwarded:
                forwarded = self._signals
                hurry = hurry or now + EXIT_GRACE
                self._send(signal.SIGINT)
            if hurry is None and self._someone_failed():
                hurry = now + EXIT_GRACE
            if self._signals > 1:
                return f"a second signal came; killed: {self._running()}."
            if hurry is not None and now > hurry:
                return f"not ended within {EXIT_GRACE:.0f} s, so killed: {self._running()}."
            if now - moved > self._stall:
                return f"no rank moved for {self._stall:.0f} s; killed: {self._running()}."
        return None

    def _exit_code(self, problem: str | None) -> int:
        codes = {rank: child.returncode for rank, child in enumerate(self._children)}
        killed = [f"rank {rank} by signal {-code}" for rank, code in codes.items() if code < 0 and rank != self._spare]
        if problem is not None:
            print(f"# FAILED: {problem} What is printed above is complete.", flush=True)
        elif killed:
            hint = (
                " (an unexpected signal 9 is often the out-of-memory killer: see dmesg)" if -9 in codes.values() else ""
            )
            print(f"# FAILED: ended {', '.join(killed)}{hint}. What is printed above is complete.", flush=True)
        if self._signals:
            return 130
        if problem is not None or killed:
            return 1
        return max(code for rank, code in codes.items() if code >= 0 or rank != self._spare)

    def _someone_failed(self) -> bool:
        return any(child.poll() not in (None, 0) for rank, child in enumerate(self._children) if rank != self._spare)

    def _running(self) -> str:
        alive = [str(rank) for rank, child in enumerate(self._children) if child.poll() is None]
        return f"rank{'s' if len(alive) > 1 else ''} {', '.join(alive) or 'none'}"

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def _kill(self) -> None:
        """Kill every rank with its session; SIGKILL also ends stopped processes."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self._children:
            child.wait()

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Count SIGINT and SIGTERM in place of ending by them; only the main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
