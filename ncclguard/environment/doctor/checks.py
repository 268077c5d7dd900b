"""The checks of the doctor: of a host, of what its process would do, and of what all ranks say and have measured."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict

from ncclguard.environment import network, ras
from ncclguard.environment.nccl_names import read_conf
from ncclguard.environment.network import InterfaceChoice, Job, Link, family_of, is_loopback_name, read_job, read_links
from ncclguard.environment.setup import EnvironmentReport, Port, plan_environment, read_ports, watched
from ncclguard.environment.versions import within

Status = Literal["ok", "warning", "error", "skipped"]
_WORST_LAST: tuple[Status, ...] = ("skipped", "ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Context:
    """This host and its place in the job. ``root`` is "/" except in tests."""

    job: Job
    host: str
    environ: Mapping[str, str]
    report: EnvironmentReport
    links: tuple[Link, ...]
    ports: tuple[Port, ...]
    root: Path = Path("/")

    @property
    def choice(self) -> InterfaceChoice:
        """The interface that setup_env() takes, or would take."""
        return self.report.interface

    @property
    def link(self) -> Link | None:
        """The chosen interface as the kernel describes it."""
        return next((link for link in self.links if link.name == self.choice.name), None)

    @property
    def rank(self) -> int:
        """This process's rank, 0 without a launcher."""
        return self.job.rank or 0

    @property
    def world_size(self) -> int:
        """The number of ranks, 1 without a launcher."""
        return self.job.world_size or 1

    @property
    def launcher_hosts_store(self) -> bool:
        """Whether the launcher listens on the master's port, as torchrun does."""
        return self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is not there or may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:  # the kernel lacks it, or it is root's: the check says "unknown"
            return None


def read_context() -> Context:
    """The context of this process; changes nothing."""
    environ = dict(os.environ)
    report = plan_environment(dict(environ))
    return Context(read_job(environ), socket.gethostname(), environ, report, read_links(), read_ports())


class Check(BaseModel):
    """A check: its name, how it came out, the figures, and what to do next (empty when there is nothing to do)."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: Status
    detail: str
    advice: str = ""


#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION = 1


class DoctorReport(BaseModel):
    """What `--json` writes: the checks of all hosts, in the order of the table, and the version of these fields."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA_VERSION
    checks: tuple[Check, ...]


def ok(name: str, detail: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name=name, status="ok", detail=detail)


def warning(name: str, detail: str, advice: str) -> Check:
    """Something that can make a job slow or fragile."""
    return Check(name=name, status="warning", detail=detail, advice=advice)


def error(name: str, detail: str, advice: str) -> Check:
    """Something that makes a job fail or hang."""
    return Check(name=name, status="error", detail=detail, advice=advice)


def skipped(name: str, detail: str) -> Check:
    """A check that had nothing to look at; the detail says why."""
    return Check(name=name, status="skipped", detail=detail)


def worst(statuses: Iterable[Status]) -> Status:
    """The gravest of the statuses; "skipped" when there is none."""
    return max(statuses, key=_WORST_LAST.index, default="skipped")


def exit_code(checks: Iterable[Check], *, fail_on_warnings: bool) -> int:
    """2 when something is an error, 1 when something is a warning and that was asked for, else 0."""
    status = worst(check.status for check in checks)
    return 2 if status == "error" else int(status == "warning" and fail_on_warnings)


def merge(by_host: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """One check for each name, from (host, its checks); hosts that differ are named, equal ones are not repeated."""
    found: dict[str, list[tuple[str, Check]]] = {}
    for host, checks in by_host:
        for check in checks:
            found.setdefault(check.name, []).append((host, check))
    return [_merge_one(checks, {host for host, _ in by_host}) for checks in found.values()]


def _merge_one(found: Sequence[tuple[str, Check]], all_hosts: set[str]) -> Check:
    status = worst(check.status for _, check in found)
    # Where something is wrong, only that is shown; hosts of which the same is said share a line.
    shown = [(host, check) for host, check in found if check.status == status]
    hosts_by_detail: dict[str, list[str]] = {}
    for host, check in shown:
        hosts_by_detail.setdefault(check.detail, []).append(host)
    everywhere = len(hosts_by_detail) == 1 and {host for host, _ in shown} == all_hosts
    lines = [
        detail if everywhere else f"{', '.join(dict.fromkeys(hosts))}: {detail}"
        for detail, hosts in hosts_by_detail.items()
    ]
    advice = "; ".join(dict.fromkeys(check.advice for _, check in shown if check.advice))
    return Check(name=found[0][1].name, status=status, detail="\n".join(lines), advice=advice)


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


_SECONDS = 10.0
#: Looked up so many times, until one takes longer: that many seconds in which the store serves nobody.
NAME_LOOKUPS, SLOW_LOOKUP = 20, 0.2
#: The first NCCL with RAS, the seconds that its answer may take, and the lines of it that are shown.
RAS_FROM, RAS_WITHIN, RAS_SHOWN = "2.24", 10.0, 3


def check_interface(context: Context) -> Check:
    """Which interface setup_env() takes here, and whether the evidence is good."""
    choice = context.choice
    detail = f"{choice.name or 'none'} ({choice.address or 'no address'}): {choice.evidence}"
    if choice.name is None:
        return error("interface", detail, choice.advice or "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME")
    if choice.trouble is not None:
        return error("interface", f"{choice.trouble}; {detail}", choice.advice or "")
    wrong = [finding for finding in context.report.wrong if finding.name.endswith("_SOCKET_IFNAME")]
    if any(finding.severity == "error" for finding in wrong):
        return error(
            "interface", "; ".join(entry.detail for entry in wrong), "; ".join(entry.advice for entry in wrong)
        )
    if wrong or choice.notes:
        text = "; ".join([detail, *choice.notes, *(finding.detail for finding in wrong)])
        return warning("interface", text, "; ".join(finding.advice for finding in wrong) or "see `ip route`")
    return ok("interface", detail)


def check_master(context: Context) -> Check:
    """The name of the master resolves, to an address that the other hosts can use."""
    master = context.job.master_addr
    if master is None:
        if context.world_size > 1:
            return error(
                "master",
                f"MASTER_ADDR is not set, and the job has {context.world_size} ranks",
                "export MASTER_ADDR=<host>",
            )
        return skipped("master", "MASTER_ADDR is not set")
    addresses = network.resolve(master)
    if not addresses:
        return error("master", f"{master} does not resolve", "correct the name server, or /etc/hosts on every host")
    detail = f"{master} is {', '.join(addresses)}"
    if context.job.hosts not in (None, 1):
        if is_loopback_name(master):
            return error(
                "master", f"{detail}, on each of {context.job.hosts} hosts itself", "set the address of rank 0's host"
            )
        if addresses[0].startswith("127."):
            return warning(
                "master", f"{detail}: loopback here", "remove the host's own name from the 127.* lines of /etc/hosts"
            )
    return ok("master", detail)


def check_name_lookup(context: Context) -> Check:
    """The resolver is quick with the names of addresses: TCPStore asks for one at each connection, and waits."""
    address = context.choice.address
    if address is None:
        return skipped("name lookup", "no interface was chosen")
    slowest = 0.0
    for _ in range(NAME_LOOKUPS):
        slowest = max(slowest, network.name_seconds(address))
        if slowest > SLOW_LOOKUP:
            return warning(
                "name lookup",
                f"the resolver took {slowest:.1f} s for the name of {address}; when a rank connects, the store of rank "
                "0's host asks it likewise and serves nobody meanwhile",
                f"correct /etc/resolv.conf there, or export RES_OPTIONS='{network.RES_OPTIONS}'",
            )
    return ok("name lookup", f"the name of {address} is looked up in {1000 * slowest:.1f} ms at most")


def check_variables(context: Context) -> Check:
    """The effective variables with their origin, and what is wrong with them."""
    wrong = [finding for finding in context.report.wrong if finding.name not in ("limits", "MASTER_ADDR")]
    conf = read_conf(context.environ)
    effective = [f"{name}={value} (environment)" for name, value in sorted(context.environ.items()) if watched(name)]
    effective += [
        f"{name}={value} ({origin})" for name, (value, origin) in sorted(conf.items()) if name not in context.environ
    ]
    detail = ", ".join(effective) or "none is set; setup_env() would set " + str(len(context.report.set))
    if not wrong:
        return ok("variables", detail)
    build = error if any(finding.severity == "error" for finding in wrong) else warning
    return build(
        "variables",
        "; ".join(entry.detail for entry in wrong),
        "; ".join(dict.fromkeys(entry.advice for entry in wrong)),
    )


def check_limits(context: Context) -> Check:
    """The ladder of time limits."""
    ladder = context.report.limits
    if ladder.problems:
        advice = (
            f"init_process_group(timeout=timedelta(seconds={ladder.process_group.seconds:g})), "
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={ladder.proposed_heartbeat}"
        )
        return error("limits", "; ".join(ladder.problems), advice)
    return ok("limits", ladder.one_line)


def check_master_port(context: Context) -> Check:
    """Whether a process of an earlier job still holds the master's port."""
    port = context.job.master_port
    if context.rank != 0:
        return skipped("master port", "rank 0 looks at it")  # whose doctor may hold it already
    if context.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ok("master port", f"port {port} is held by the launcher, as it should be")
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return skipped("master port", "listing connections is not permitted")
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return _held(port, connection.pid, error if context.job.master_addr else warning)
    return ok("master port", f"port {port} is free")


def _held(port: int, pid: int | None, build: Callable[[str, str, str], Check]) -> Check:
    other = f"choose another: MASTER_PORT={port + 1}"
    if pid is None:
        return build("master port", f"port {port} is held by another user's process", other)
    try:
        line = " ".join(psutil.Process(pid).cmdline())[:120]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        line = "unknown"
    advice = f"if it is left over from an earlier job: kill {pid}; else {other}"
    return build("master port", f"port {port} is held by process {pid} ({line})", advice)


def check_gpus(context: Context) -> Check:
    """Number, driver, ECC errors and, in the kernel's log, Xid errors; by nvidia-smi, else what torch sees."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return _gpus_of_torch()
    fields = "index,name,driver_version,ecc.errors.uncorrected.volatile.total"
    try:
        done = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return error(
            "gpus", f"nvidia-smi did not answer within {_SECONDS:g} s", "a GPU or the driver hangs: dmesg | grep -i xid"
        )
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip().splitlines()
        return error(
            "gpus", f"nvidia-smi failed: {text[0] if text else done.returncode}", "check the driver: dmesg | grep NVRM"
        )
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    detail = f"{len(rows)} x {rows[0][1]}, driver {rows[0][2]}" if rows else "none"
    broken = [f"GPU {row[0]}: {row[3]} uncorrected ECC errors" for row in rows if row[3].isdigit() and int(row[3]) > 0]
    xids = _xid_lines()
    if broken:
        return error(
            "gpus", f"{detail}; {', '.join(broken)}", "take the GPU out of service, or reset it when nothing runs"
        )
    if xids:
        return warning("gpus", f"{detail}; kernel log: {xids[-1]}", "look the Xid number up in NVIDIA's list")
    return ok("gpus", detail)


def _gpus_of_torch() -> Check:
    """Their names, of which an emulated GPU's says so."""
    import torch

    if not torch.cuda.is_available():
        return skipped("gpus", "nvidia-smi is not installed, and this torch sees no GPU")
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    return ok("gpus", f"{found}, by torch; nvidia-smi is not installed, so errors (ECC) are not known")


def _xid_lines() -> list[str]:
    program = shutil.which("dmesg")
    if program is None:
        return []
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in done.stdout.splitlines() if re.search(r"NVRM: Xid", line)]


def check_gpu_links(context: Context) -> Check:
    """NVLink and direct access between the GPUs of this host."""
    import torch

    if not torch.cuda.is_available():
        return skipped("gpu links", "this torch sees no GPU")
    count = torch.cuda.device_count()
    if count < 2:
        return skipped("gpu links", "one GPU")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    closed = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if closed:
        return warning(
            "gpu links",
            f"no direct access for {', '.join(closed)}",
            "see `nvidia-smi topo -m`; IOMMU or ACS may forbid it",
        )
    return ok("gpu links", f"direct access between all {count} GPUs")


def check_ras(context: Context) -> Check:
    """What NCCL's RAS says of the job that runs on this host now, if one does."""
    version = context.report.versions.nccl
    if version is None:
        return skipped("ras", "this torch has no NCCL")
    if not within(version, RAS_FROM, None):
        return skipped("ras", f"NCCL {version} has none; it came with {RAS_FROM}")
    try:
        address = ras.address_of(context.environ)
    except ras.NoWitness as why:
        return skipped("ras", f"{why}; without that variable a job that hangs can be asked")
    try:
        report = ras.report(address, within=RAS_WITHIN)
    except ras.NobodyListens as why:
        return skipped("ras", f"{why}; then `ncclguard explain --ras {address}` tells what it says")
    except ras.NoWitness as why:
        return warning(
            "ras",
            str(why),
            "look for stopped processes (ps, state T) and, if it is another program's port, set NCCL_RAS_ADDR=localhost:PORT "
            "to a free one on all ranks",
        )
    head = f"NCCL {report.nccl_version} answers at {address}"
    if report.communicators is None:
        head, troubles = f"{head} in text", list(report.lines)
    else:
        head = f"{head} for {len(report.communicators)} communicators"
        troubles = [
            f"{one.hash} of {one.size} ranks: {'; '.join(defects)}"
            for one in report.communicators
            if (defects := one.defects())
        ]
    if troubles:
        more = f" (and {len(troubles) - RAS_SHOWN} more)" if len(troubles) > RAS_SHOWN else ""
        return warning(
            "ras",
            f"{head}; {'; '.join(troubles[:RAS_SHOWN])}{more}",
            f"`ncclguard explain --ras {address}` asks twice and names the rank that holds the others up",
        )
    uneven = sum(bool(one.uneven()) for one in report.communicators or ())
    note = f"; in {uneven} the ranks have not launched the same number of operations, as in any job that runs"
    return ok("ras", f"{head}, every rank answers{note if uneven else ''}")


JOB_CHECKS = (
    check_interface,
    check_master,
    check_name_lookup,
    check_variables,
    check_limits,
    check_master_port,
    check_gpus,
    check_gpu_links,
    check_ras,
)


#: A pair this far from the median is named.
BANDWIDTH_OUTLIER, ROUND_TRIP_OUTLIER = 0.5, 5.0
#: Seconds; differences below them are noise of the processors.
ROUND_TRIP_FLOOR = 0.001


class Facts(BaseModel):
    """What a rank says of itself; its servers listen on ``port`` and ``echo_port`` of ``address``."""

    model_config = ConfigDict(frozen=True)

    rank: int
    host: str
    interface: str | None
    address: str | None
    mtu: int | None
    port: int | None
    echo_port: int | None
    candidates: tuple[str, ...]
    versions: dict[str, str]


class Measured(BaseModel):
    """What one rank found out about the way from it to another; None where it was not measured or did not work.

    Times in seconds, ``bandwidth`` in bytes/s, sizes in bytes.
    """

    model_config = ConfigDict(frozen=True)

    source: int
    target: int
    fault: str | None = None
    round_trip: float | None = None
    clock_skew: float | None = None
    bandwidth: float | None = None
    mtu: int | None = None
    largest: int | None = None
    reported: int | None = None


def own_facts(context: Context, port: int | None = None, echo_port: int | None = None) -> Facts:
    """The facts of this rank."""
    link = context.link
    usable = tuple(entry.name for entry in context.links if entry.usable and not entry.avoided and not entry.loopback)
    return Facts(
        rank=context.rank,
        host=context.host,
        interface=context.choice.name,
        address=context.choice.address,
        mtu=link.mtu if link else None,
        port=port,
        echo_port=echo_port,
        candidates=usable,
        versions=_versions(context),
    )


def _versions(context: Context) -> dict[str, str]:
    """What has to be equal on all ranks."""
    found = {
        "torch": context.report.versions.torch,
        "NCCL": context.report.versions.nccl or "none",
        "Python": platform.python_version(),
    }
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        words = driver.read_text().split("Kernel Module", 1)[-1].split()
        found["driver"] = next((word for word in words if word[:1].isdigit()), "unknown")
    return found


def leaders(facts: Mapping[int, Facts]) -> dict[str, int]:
    """The lowest rank of each host, by host."""
    found: dict[str, int] = {}
    for rank, entry in sorted(facts.items()):
        found.setdefault(entry.host, rank)
    return found


def check_ranks(facts: Mapping[int, Facts], world_size: int, seconds: float) -> Check:
    """Whether every rank has come."""
    missing = [rank for rank in range(world_size) if rank not in facts]
    hosts = leaders(facts)
    if not missing:
        return ok("ranks", f"all {world_size} ranks on {len(hosts)} hosts answered")
    here = "; ".join(
        f"{host}: {', '.join(str(rank) for rank, entry in facts.items() if entry.host == host)}" for host in hosts
    )
    return error(
        "ranks",
        f"ranks {', '.join(map(str, missing))} did not reach the store within {seconds:g} s (there: {here})",
        "their own output says why; look at the master's port in the firewall, and whether they were started",
    )


def check_agreement(facts: Mapping[int, Facts]) -> Check:
    """Whether the hosts' choices of interface fit together: one address family, no address twice, one MTU."""
    name = "interfaces agree"
    chosen = {entry.host: (entry, entry.address) for entry in facts.values() if entry.address is not None}
    shown = ", ".join(f"{host}: {entry.interface} {address}" for host, (entry, address) in chosen.items())
    addresses = {address for _, address in chosen.values()}
    if len({family_of(address) for address in addresses}) > 1:
        return error(name, f"IPv4 here and IPv6 there ({shown})", "give all hosts the same kind of MASTER_ADDR")
    if len(addresses) < len(chosen):
        return error(
            name,
            f"several hosts would use the same address ({shown})",
            "it belongs to a bridge or a cloned host: set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        )
    if len({entry.mtu for entry, _ in chosen.values()}) > 1:
        listed = ", ".join(f"{host}: {entry.mtu}" for host, (entry, _) in chosen.items())
        return warning(name, f"MTUs differ ({listed})", "set the same MTU everywhere: large packets may vanish")
    return ok(name, shown)


def check_versions(facts: Mapping[int, Facts]) -> Check:
    """torch, NCCL, driver and Python are the same everywhere."""
    differing = []
    for what in dict.fromkeys(name for entry in facts.values() for name in entry.versions):
        by_version: dict[str, list[str]] = {}
        for entry in facts.values():
            by_version.setdefault(entry.versions.get(what, "absent"), []).append(entry.host)
        if len(by_version) > 1:
            listed = "; ".join(f"{version}: {', '.join(dict.fromkeys(hosts))}" for version, hosts in by_version.items())
            differing.append(f"{what} ({listed})")
    if differing:
        return error("versions", f"different {', '.join(differing)}", "install the same versions on all hosts")
    first = next(iter(facts.values()))
    return ok("versions", ", ".join(f"{what} {version}" for what, version in first.versions.items()))


def check_measured(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> list[Check]:
    """The checks of the network between the ranks."""
    checks = (check_pairs, check_round_trips, check_bandwidth, check_path_mtu, check_clocks)
    return [check(facts, measured) for check in checks]


def _pair(facts: Mapping[int, Facts], entry: Measured) -> str:
    source, target = facts[entry.source], facts[entry.target]
    return f"{source.host} (rank {source.rank}) -> {target.host} (rank {target.rank}, {target.address}:{target.port})"


def check_pairs(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Every rank reaches every other one, in both directions."""
    if not measured:
        return skipped("connections", "one rank")
    faults = [entry for entry in measured if entry.fault is not None]
    if not faults:
        return ok("connections", f"all {len(measured)} directed pairs connect, each from its chosen interface")
    broken = {(entry.source, entry.target) for entry in faults}
    lines = []
    for entry in faults[:20]:
        way_back = (entry.target, entry.source) in broken
        lines.append(f"{_pair(facts, entry)}: {entry.fault}" + ("" if way_back else " (the other direction works)"))
    if len(faults) > 20:
        lines.append(f"and {len(faults) - 20} more")
    return error(
        "connections",
        "\n".join(lines),
        "allow TCP on all ports between the hosts in both directions (gloo and NCCL use ports that the system picks)",
    )


def check_round_trips(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Round trip of each pair, outliers named."""
    known = [(entry, 1e3 * entry.round_trip) for entry in measured if entry.round_trip is not None]
    if not known:
        return skipped("round trip", "no pair connects")
    median = statistics.median(trip for _, trip in known)
    limit = max(ROUND_TRIP_OUTLIER * median, 1e3 * ROUND_TRIP_FLOOR)
    slow = [f"{_pair(facts, entry)}: {trip:.2f} ms" for entry, trip in known if trip > limit]
    detail = f"median {median:.2f} ms over {len(known)} pairs"
    if slow:
        advice = "see what lies between these hosts: traceroute; is one busy?"
        return warning("round trip", "\n".join([detail, *slow[:10]]), advice)
    return ok("round trip", detail)


def check_bandwidth(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Bandwidth of one connection for each pair of hosts, outliers named."""
    known = [(entry, entry.bandwidth / 1e6) for entry in measured if entry.bandwidth is not None]
    if not known:
        return skipped("bandwidth", "no two hosts connect")
    median = statistics.median(speed for _, speed in known)
    slow = [f"{_pair(facts, entry)}: {speed:.0f} MB/s" for entry, speed in known if speed < BANDWIDTH_OUTLIER * median]
    detail = f"median {median:.0f} MB/s a connection over {len(known)} pairs of hosts"
    if slow:
        return warning(
            "bandwidth", "\n".join([detail, *slow[:10]]), "compare link speed and errors: ethtool, ip -s link"
        )
    return ok("bandwidth", detail)


def check_path_mtu(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """The largest packet that passes between each two hosts, against the interfaces' MTU."""
    silent, small, swallowed, least, passed = [], [], [], [], set()
    for entry in measured:
        if entry.mtu is None:
            continue
        pair = _pair(facts, entry)
        if entry.largest is None:
            silent.append(f"{pair}: no UDP packet arrives")
        elif entry.largest >= entry.mtu:
            passed.add(str(entry.mtu))
        elif entry.reported is not None and entry.reported <= entry.largest:
            small.append(f"{pair}: {entry.largest} bytes (interface MTU {entry.mtu})")
        else:
            swallowed.append(f"{pair}: packets over {entry.largest} bytes vanish unsaid (interface MTU {entry.mtu})")
            least.append(entry.largest)
    if swallowed:
        advice = f"large transfers hang: set the MTU of all hosts to {min(least)}, or let ICMP through"
        return error("path MTU", "\n".join(swallowed), advice)
    if small:
        return warning("path MTU", "\n".join(small), "TCP adapts, at a cost: set the MTU of the hosts to the path's")
    if silent or not passed:
        return skipped("path MTU", "\n".join(silent) or "no two hosts connect")
    return ok("path MTU", f"packets of the interfaces' MTU ({', '.join(sorted(passed))} bytes) pass")


def check_clocks(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """How far the clocks are from that of the first rank; for reading logs only, no other check depends on it."""
    first = min(facts)
    skews = {
        facts[entry.target].host: entry.clock_skew
        for entry in measured
        if entry.source == first and entry.clock_skew is not None and facts[entry.target].host != facts[first].host
    }
    if not skews:
        return skipped("clocks", "one host")
    return ok("clocks", ", ".join(f"{host} {skew * 1e3:+.1f} ms" for host, skew in skews.items()) + " (informational)")
