"""Which ranks there are: those of a launcher (torchrun, srun), or none yet."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ncclguard.bench.arguments import BenchError

PIPE_VARIABLE = "_NCCLGUARD_BENCH_PIPE"  # only in ranks that the bench started: the pipe to the process that did
_LOOPBACK = Path("/sys/class/net/lo")  # without a name gloo resolves the hostname, which may lead anywhere
_SLURM_PORTS = (20000, 20000)  # first port and how many, the job's number chooses: below the ephemeral range


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the ranks, as its launcher gave it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """The variables of torch's env:// rendezvous that name this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


def detect(environment: Mapping[str, str]) -> World | None:
    """The world that a launcher described in `environment`, or None when there is none.

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
    """What to add to the environment so that torch's env:// finds the world; what is set already stays."""
    variables = world.environment()
    if world.launcher == "srun":
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        first, count = _SLURM_PORTS
        job = int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
        variables["MASTER_ADDR"] = first_host(nodes)
        variables["MASTER_PORT"] = str(first + job % count)
    return {name: environment.get(name, value) for name, value in variables.items()}


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list.

    Example:
        >>> first_host("gpu[003-006,9],login1"), first_host("a1,a2")
        ('gpu003', 'a1')
    """
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodelist)
    return "".join(part or "" for part in match.groups()) if match else nodelist


def choose_backend(asked: str | None) -> str:
    """The backend to compare on: NCCL where torch has it and sees a GPU, else gloo.

    Raises:
        BenchError: `asked` is nccl and this machine cannot run it.
    """
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    if asked == "nccl" and not usable:
        reason = "torch sees no GPU" if dist.is_nccl_available() else f"torch {torch.__version__} has no NCCL"
        raise BenchError(f"--backend nccl: {reason}; leave --backend away to use gloo.")
    return asked or ("nccl" if usable else "gloo")


def choose_ranks(asked: int | None, backend: str, fault: bool) -> int:
    """How many ranks to start on this host when no launcher did."""
    if asked is not None:
        return asked
    if fault:
        return 4
    return torch.cuda.device_count() if backend == "nccl" else 2


def device_of(world: World, backend: str) -> torch.device:
    """The device this rank's tensors are on; ranks beyond the number of GPUs share them."""
    if backend != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def ranks_sharing(world: World, device: torch.device) -> int:
    """How many ranks of this host take their tensors from the same memory as this one."""
    if device.type == "cpu":
        return world.local_size
    count = torch.cuda.device_count()
    return len(range(world.local_rank % count, world.local_size, count))


def own_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of one rank that the bench starts itself, whose store the starting process keeps."""
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
    """SLURM_STEP_TASKS_PER_NODE reads `4(x2),3`: the entry of this node, SLURM_NODEID."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if text is None:
        return size
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    node = _number(environment, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else size
