"""Checks of one host: memory, limits, load, network card, files."""

from __future__ import annotations

import os
import resource
import shutil

import psutil

from ncclguard.environment.doctor.checks import Check, Context, error, ok, skipped, warning

_GIB = 1 << 30
#: NCCL puts a few MiB for each pair of ranks there, a DataLoader its batches; docker's default of 64 MiB is too little.
SHM_WANTED = 1 * _GIB
FILES_WANTED = 4096


def _size(nbytes: float) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / (1 << 20):.0f} MiB"


def check_shared_memory(context: Context) -> Check:
    """Size and free space of /dev/shm."""
    path = context.root / "dev/shm"
    if not path.is_dir():
        return error("shared memory", "/dev/shm does not exist", "mount a tmpfs there; NCCL and DataLoader need it")
    usage = shutil.disk_usage(path)
    detail = f"/dev/shm has {_size(usage.total)}, {_size(usage.free)} free"
    if usage.free < SHM_WANTED:
        return warning(
            "shared memory", detail, "docker: --shm-size=8g or --ipc=host; kubernetes: an emptyDir with medium Memory"
        )
    return ok("shared memory", detail)


def check_locked_memory(context: Context) -> Check:
    """``ulimit -l``: RDMA pins its buffers."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "unlimited" if limit == resource.RLIM_INFINITY else _size(limit)
    if limit != resource.RLIM_INFINITY and any(port.active for port in context.ports):
        return error(
            "locked memory",
            f"ulimit -l is {shown}, and RDMA has to pin its buffers",
            "set memlock to unlimited (limits.conf, LimitMEMLOCK= of slurmd, docker --ulimit memlock=-1)",
        )
    return ok("locked memory", f"ulimit -l is {shown}" + ("" if context.ports else "; no RDMA hardware needs it"))


def check_open_files(context: Context) -> Check:
    """``ulimit -n``: every connection and DataLoader worker takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(FILES_WANTED, 32 * context.world_size)
    detail = f"ulimit -n is {soft} (hard limit {hard})"
    if soft != resource.RLIM_INFINITY and soft < wanted:
        return warning(
            "open files", f"{detail}; {wanted} are wanted for {context.world_size} ranks", f"ulimit -n {wanted}"
        )
    return ok("open files", detail)


def check_memory(context: Context) -> Check:
    """Free memory; a host that swaps makes its ranks late."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    detail = f"{_size(memory.available)} of {_size(memory.total)} available, {_size(swap.used)} of swap used"
    if memory.available < 0.05 * memory.total:
        return warning("memory", detail, "end what takes it: ps aux --sort=-rss | head")
    return ok("memory", detail)


def check_load(context: Context) -> Check:
    """Load average per processor; a busy host makes its ranks late."""
    processors = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    detail = f"load {load:.1f} on {processors} processors"
    if load > 2.0 * processors:
        return warning("load", detail, "see what runs: top; a rank on this host will come late to collectives")
    return ok("load", detail)


def check_cgroup(context: Context) -> Check:
    """Memory and processor limits of the container or the batch job (cgroup v2, then v1)."""
    group = _own_group(context)
    memory = context.read(f"/sys/fs/cgroup{group}/memory.max") or context.read(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    processors = context.read(f"/sys/fs/cgroup{group}/cpu.max")
    if memory is None and processors is None:
        return skipped("cgroup", "no cgroup limits can be read")
    parts = []
    limit = int(memory) if memory and memory.isdigit() and int(memory) < (1 << 60) else None
    parts.append("memory unlimited" if limit is None else f"memory limit {_size(limit)}")
    quota, _, period = (processors or "max 100000").partition(" ")
    share = int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    parts.append("processors unlimited" if share is None else f"{share:g} processors")
    detail = ", ".join(parts)
    current = context.read(f"/sys/fs/cgroup{group}/memory.current")
    if limit is not None and current is not None and int(current) > 0.9 * limit:
        return warning(
            "cgroup", f"{detail}, {_size(int(current))} in use", "raise the limit, or the job is killed (OOM)"
        )
    ranks = max(1, (context.job.world_size or 1) // (context.job.hosts or 1))
    if share is not None and share < ranks:
        return warning(
            "cgroup", f"{detail} for {ranks} ranks", "give each rank one processor at least, else they take turns"
        )
    return ok("cgroup", detail)


def _own_group(context: Context) -> str:
    for line in (context.read("/proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            path = line[3:]
            return "" if path == "/" else path
    return ""


def check_link(context: Context) -> Check:
    """Speed, duplex and MTU of the chosen interface."""
    link = context.link
    if link is None:
        return skipped("link", "no interface was chosen")
    if link.loopback:
        return skipped("link", "the loopback has no speed")
    speed = context.read(f"/sys/class/net/{link.name}/speed")
    duplex = context.read(f"/sys/class/net/{link.name}/duplex")
    megabits = int(speed) if speed and speed.lstrip("-").isdigit() else -1
    figure = f"{megabits} Mbit/s" if megabits > 0 else "speed unknown"
    detail = f"{link.name} ({link.kind}): {figure}, {duplex or 'unknown'} duplex, MTU {link.mtu or 'unknown'}"
    if duplex == "half":
        return error(
            "link", detail, f"half duplex is a failed negotiation: ethtool {link.name}; look at the switch port"
        )
    # A veth claims 10000 Mbit/s whatever carries it.
    if 0 < megabits < 10_000:
        return warning("link", detail, "gradients are large: use a faster interface if the host has one")
    return ok("link", detail)


def check_infiniband(context: Context) -> Check:
    """State of the RDMA ports and the addresses that RoCE has."""
    if not context.ports:
        return skipped("infiniband", "no RDMA hardware")
    lines = [
        f"{port.name} {port.state} ({port.physical_state}), {port.layer}, {port.rate or 0:g} Gbit/s"
        for port in context.ports
    ]
    detail = ", ".join(lines)
    stuck = [port.name for port in context.ports if port.physical_state == "LinkUp" and not port.active]
    if stuck:
        return warning(
            "infiniband", detail, f"{', '.join(stuck)}: the link is up but not active; is a subnet manager running?"
        )
    if not any(port.active for port in context.ports):
        return warning("infiniband", detail, "no port is active: NCCL will use sockets; check cables and drivers")
    for port in context.ports:
        routable = [gid.index for gid in port.gids if gid.kind == "RoCE v2" and gid.carries_ipv4]
        if port.active and port.roce and not routable:
            return warning(
                "infiniband", detail, f"{port.name} has no RoCE v2 address with an IPv4: give {port.netdev} one"
            )
    return ok("infiniband", detail)


def check_pci(context: Context) -> Check:
    """ACS and IOMMU redirect traffic between GPUs and adapters through the processor."""
    groups = context.root / "sys/kernel/iommu_groups"
    active = groups.is_dir() and any(groups.iterdir())
    line = context.read("/proc/cmdline") or ""
    passing = "iommu=pt" in line
    if not active:
        return ok("pci", "no IOMMU is active")
    if passing:
        return ok("pci", "the IOMMU passes through (iommu=pt)")
    return warning(
        "pci",
        "the IOMMU translates; direct traffic between GPUs and adapters may go through the processor, or fail",
        "boot with iommu=pt, and switch ACS off on the PCI bridges of bare-metal hosts (lspci -vvv | grep ACSCtl)",
    )


HOST_CHECKS = (
    check_shared_memory,
    check_locked_memory,
    check_open_files,
    check_memory,
    check_load,
    check_cgroup,
    check_link,
    check_infiniband,
    check_pci,
)
