"""How much memory a run needs and how much there is, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ncclguard.bench.operations import Shape

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
    """What one rank needs at its peak for `shape`; the variants take turns on the same buffers.

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
    """A sentence when `ranks` processes that share `free` bytes of `what` do not fit, else None."""
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
    """The largest resident size this process had so far, or None where /proc does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_folders(root: Path, own: Path) -> list[Path]:
    """The folders whose limits bind this process: its own groups (versions 1 and 2) and all above them."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        folder = top / path.lstrip("/")
        # Inside a container the path names the host's tree while only `top` is mounted: absent folders are passed over.
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
        return max(0, int(limit) - usage + cache)  # file cache that nobody uses is given back on demand
    return None
