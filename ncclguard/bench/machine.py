"""The machine: what it is, for the head of the table, and how much memory a run needs and finds."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel

import ncclguard
from ncclguard.bench.measure import Shape
from ncclguard.bench.ranks import World
from ncclguard_explain.host import read_file

_PREFIXES = ("NCCL_", "NCCLGUARD_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "GLOO_", "OMP_NUM_")


class Environment(BaseModel, frozen=True):
    """One run's machine and software. `hosts` are the names of all ranks' hosts, in the order of their first rank."""

    ncclguard: str
    torch: str
    nccl: str | None
    python: str
    system: str
    cpu: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    hosts: tuple[str, ...]
    world_size: int
    launcher: str
    backend: str
    device: str
    threads: int
    variables: dict[str, str]

    def lines(self) -> list[str]:
        """Return the head of the table."""
        where = self.hosts[0] if len(self.hosts) == 1 else f"{len(self.hosts)} hosts ({self.hosts[0]}, ...)"
        gpus = f", {len(self.gpus)} x {self.gpus[0]}" if self.gpus else ""
        versions = f"torch {self.torch}, NCCL {self.nccl or 'none'}, Python {self.python}, {self.system}"
        memory = f"{self.memory_bytes / 2**30:.1f} GiB"
        lines = [
            f"# ncclguard {self.ncclguard}, {versions}",
            f"# {self.world_size} ranks on {where}, started by {self.launcher}; backend {self.backend}{gpus}",
            f"# each host {self.cores} cores ({self.cpu}), {memory}; torch threads a rank: {self.threads}",
        ]
        if self.variables:
            lines.append("# " + " ".join(f"{name}={value}" for name, value in sorted(self.variables.items())))
        return lines


def describe(world: World, backend: str, device: torch.device, hosts: Sequence[str]) -> Environment:
    """Describe the machine as this rank sees it; `hosts` are the host names of all ranks."""
    return Environment(
        ncclguard=ncclguard.__version__,
        torch=torch.__version__,
        nccl=_nccl_version(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu_model(),
        cores=_cores(),
        memory_bytes=int(psutil.virtual_memory().total),
        gpus=_gpus() if device.type == "cuda" else (),
        hosts=tuple(dict.fromkeys(hosts)),
        world_size=world.size,
        launcher=world.launcher,
        backend=backend,
        device=device.type,
        threads=torch.get_num_threads(),
        variables={name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)},
    )


def _gpus() -> tuple[str, ...]:
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def hostname() -> str:
    return socket.gethostname()


def _cores() -> int:
    """Cores this process may use, which in a container or under srun can be fewer than the host has."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _nccl_version() -> str | None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def _cpu_model() -> str:
    lines = read_file("/proc/cpuinfo").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


PROCESS_BYTES = 300 * 2**20  # a rank with torch loaded and no tensors: 227 MiB measured, torch 2.13 on CPU
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on one rank: the buffers of the call, the guard's copy, what the backend allocates inside, the process."""

    buffers: int
    backup: int
    backend: int
    process: int

    @property
    def total(self) -> int:
        return self.buffers + self.backup + self.backend + self.process


def need(shape: Shape, slots: int, guarded: bool, on_cuda: bool) -> Need:
    """Return the memory that one rank needs at its peak for `shape`; the variants take turns on the same buffers.

    Measured on torch 2.13 with gloo, two ranks, 1e8 float32: all_gather flattens its list once more (0.4 GB), the
    guarded reduce_scatter takes three times the whole (1.2 GB). The guard keeps what a failed call has to restore: the
    input of an all_reduce, the destination of the others; without `atomic` no more than that.
    """
    part = shape.nbytes // shape.world_size
    whole = shape.nbytes
    buffers, backup, backend = {
        "all_reduce": (whole, whole, 0),
        "broadcast": (whole, whole, 0),
        "all_gather": (whole + part, whole, whole),
        "reduce_scatter": (whole + part, part, 3 * whole),
        "barrier": (0, 0, 0),
    }[shape.op]
    return Need(buffers * slots, backup if guarded else 0, backend, 0 if on_cuda else PROCESS_BYTES)


def free_host_bytes(cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes this process and its children can still take: the host's, or those that its control group leaves."""
    available = int(psutil.virtual_memory().available)
    left = [_cgroup_left(folder) for folder in _cgroup_folders(cgroup_root, own_cgroup)]
    return min([available, *(value for value in left if value is not None)])


def free_device_bytes(device: torch.device) -> int:
    """Free bytes of one CUDA device, as its driver counts them."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def shortage(required: Need, ranks: int, free: int, what: str) -> str | None:
    """Return a sentence if `ranks` processes that share `free` bytes of `what` do not fit, else None."""
    wanted = required.total * ranks
    if wanted <= free:
        return None
    sharing = f"{ranks} ranks on {what}" if ranks > 1 else f"one rank on {what}"
    return (
        f"not enough memory: {wanted / _GIB:.1f} GiB are needed for {sharing} (each {required.buffers / _GIB:.1f} of "
        f"buffers, {required.backup / _GIB:.1f} for the guard's copy, {required.backend / _GIB:.1f} inside the "
        f"backend, {required.process / _GIB:.1f} for the process) and {free / _GIB:.1f} GiB are free. Nothing was "
        f"allocated; take a smaller --numel or fewer ranks."
    )


def peak_resident_bytes() -> int | None:
    """Return the largest resident size this process had so far, or None where /proc does not tell."""
    lines = read_file("/proc/self/status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _cgroup_folders(root: Path, own: Path) -> list[Path]:
    """Return the folders whose limits bind this process: its own groups (versions 1 and 2) and all above them."""
    folders = []
    for line in read_file(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        folder = top / path.lstrip("/")
        # Inside a container the path is the host's while only `top` is mounted: folders that do not exist are skipped.
        folders += [candidate for candidate in (folder, *folder.parents) if candidate.is_relative_to(top)]
    return folders


def _cgroup_left(folder: Path) -> int | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text(encoding="ascii").strip()
            usage = int((folder / usage_name).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        cache = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(cache_name + " ")), 0)
        return max(0, int(limit) - usage + cache)  # the kernel frees unused file cache on demand
    return None
