"""What the figures were measured on: versions, hosts, cores, devices, settings."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

import ncclguard
from ncclguard.bench.world import World

_PREFIXES = ("NCCL_", "NCCLGUARD_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "GLOO_", "OMP_NUM_")


class Environment(BaseModel):
    """One run's machine and software. `hosts` are the names of all ranks' hosts, in the order of their first rank."""

    model_config = ConfigDict(frozen=True)

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
        """The head of the table."""
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
    """This rank's view; `hosts` are the host names of all ranks."""
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
    """The name this host calls itself."""
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
