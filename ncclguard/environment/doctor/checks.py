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
from pydantic import BaseModel

from ncclguard.environment import network, ras
from ncclguard.environment.network import (
    InterfaceChoice,
    Job,
    Link,
    Prose,
    family_of,
    is_loopback_name,
    read_job,
    read_links,
)
from ncclguard.environment.setup import EnvironmentReport, Port, plan_environment, read_ports, watched
from ncclguard.environment.versions import within
from ncclguard_explain.host import read_conf, read_file, resolve
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ras import NobodyListens, NoWitness, address_of

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
        return self.job.rank or 0

    @property
    def world_size(self) -> int:
        return self.job.world_size or 1

    @property
    def launcher_hosts_store(self) -> bool:
        """Return whether the launcher listens on the master's port, as torchrun does."""
        return self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is empty, not there or may not be read."""
        return read_file(self.root / path.lstrip("/")).strip() or None


def read_context() -> Context:
    """The context of this process; changes nothing."""
    environ = dict(os.environ)
    report = plan_environment(dict(environ))
    return Context(read_job(environ), socket.gethostname(), environ, report, read_links(), read_ports())


class Check(BaseModel, frozen=True):
    """A check: its name, how it came out, the figures, and what to do next (empty when there is nothing to do)."""

    name: Prose
    status: Status
    detail: Prose
    advice: Prose = ""


#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION = 1


class DoctorReport(BaseModel, frozen=True):
    """The object that `--json` writes: the checks of all hosts, in the table's order, and the fields' version."""

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
        detail if everywhere else joined(": ", (", ".join(dict.fromkeys(hosts)), detail))
        for detail, hosts in hosts_by_detail.items()
    ]
    advice = joined("; ", dict.fromkeys(check.advice for _, check in shown if check.advice))
    return Check(name=found[0][1].name, status=status, detail=joined("\n", lines), advice=advice)


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
        return error(
            "shared memory", tr("/dev/shm does not exist"), tr("mount a tmpfs there; NCCL and DataLoader need it")
        )
    usage = shutil.disk_usage(path)
    detail = tr("/dev/shm has {size}, {free} free", size=_size(usage.total), free=_size(usage.free))
    if usage.free < SHM_WANTED:
        return warning(
            "shared memory",
            detail,
            tr("docker: --shm-size=8g or --ipc=host; kubernetes: an emptyDir with medium Memory"),
        )
    return ok("shared memory", detail)


def check_locked_memory(context: Context) -> Check:
    """``ulimit -l``: RDMA pins its buffers."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = tr("unlimited") if limit == resource.RLIM_INFINITY else _size(limit)
    if limit != resource.RLIM_INFINITY and any(port.active for port in context.ports):
        return error(
            "locked memory",
            tr("ulimit -l is {size}, and RDMA has to pin its buffers", size=shown),
            tr("set memlock to unlimited (limits.conf, LimitMEMLOCK= of slurmd, docker --ulimit memlock=-1)"),
        )
    detail = tr("ulimit -l is {size}", size=shown)
    return ok("locked memory", detail if context.ports else joined("; ", (detail, tr("no RDMA hardware needs it"))))


def check_open_files(context: Context) -> Check:
    """``ulimit -n``: every connection and DataLoader worker takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(FILES_WANTED, 32 * context.world_size)
    detail = tr("ulimit -n is {soft} (hard limit {hard})", soft=soft, hard=hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = tr("{number} are wanted for {count} ranks", number=wanted, count=context.world_size)
        return warning("open files", joined("; ", (detail, more)), f"ulimit -n {wanted}")
    return ok("open files", detail)


def check_memory(context: Context) -> Check:
    """Free memory; a host that swaps makes its ranks late."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    detail = tr(
        "{free} of {size} available, {used} of swap used",
        free=_size(memory.available),
        size=_size(memory.total),
        used=_size(swap.used),
    )
    if memory.available < 0.05 * memory.total:
        return warning("memory", detail, tr("end what takes it: ps aux --sort=-rss | head"))
    return ok("memory", detail)


def check_load(context: Context) -> Check:
    """Load average per processor; a busy host makes its ranks late."""
    processors = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    detail = tr("load {load:.1f} on {count} processors", load=load, count=processors)
    if load > 2.0 * processors:
        return warning("load", detail, tr("see what runs: top; a rank on this host will come late to collectives"))
    return ok("load", detail)


def check_cgroup(context: Context) -> Check:
    """Memory and processor limits of the container or the batch job (cgroup v2, then v1)."""
    group = _own_group(context)
    memory = context.read(f"/sys/fs/cgroup{group}/memory.max") or context.read(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    processors = context.read(f"/sys/fs/cgroup{group}/cpu.max")
    if memory is None and processors is None:
        return skipped("cgroup", tr("no cgroup limits can be read"))
    parts = []
    limit = int(memory) if memory and memory.isdigit() and int(memory) < (1 << 60) else None
    parts.append(tr("memory unlimited") if limit is None else tr("memory limit {size}", size=_size(limit)))
    quota, _, period = (processors or "max 100000").partition(" ")
    share = int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    parts.append(tr("processors unlimited") if share is None else tr("{share:g} processors", share=share))
    detail = joined(", ", parts)
    current = context.read(f"/sys/fs/cgroup{group}/memory.current")
    if limit is not None and current is not None and int(current) > 0.9 * limit:
        used = tr("{size} in use", size=_size(int(current)))
        return warning("cgroup", joined(", ", (detail, used)), tr("raise the limit, or the job is killed (OOM)"))
    ranks = max(1, (context.job.world_size or 1) // (context.job.hosts or 1))
    if share is not None and share < ranks:
        return warning(
            "cgroup",
            tr("{text} for {count} ranks", text=detail, count=ranks),
            tr("give each rank one processor at least, else they take turns"),
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
        return skipped("link", tr("no interface was chosen"))
    if link.loopback:
        return skipped("link", tr("the loopback has no speed"))
    speed = context.read(f"/sys/class/net/{link.name}/speed")
    duplex = context.read(f"/sys/class/net/{link.name}/duplex")
    megabits = int(speed) if speed and speed.lstrip("-").isdigit() else -1
    unknown = tr("unknown", "doctor")
    detail = tr(
        "{name} ({kind}): {figure}, {duplex} duplex, MTU {mtu}",
        name=link.name,
        kind=link.kind,
        figure=f"{megabits} Mbit/s" if megabits > 0 else tr("speed unknown"),
        duplex=unknown if duplex in (None, "unknown") else duplex,
        mtu=link.mtu or unknown,
    )
    if duplex == "half":
        half = tr("half duplex is a failed negotiation: ethtool {name}; look at the switch port", name=link.name)
        return error("link", detail, half)
    # A veth claims 10000 Mbit/s whatever carries it.
    if 0 < megabits < 10_000:
        return warning("link", detail, tr("gradients are large: use a faster interface if the host has one"))
    return ok("link", detail)


def check_infiniband(context: Context) -> Check:
    """State of the RDMA ports and the addresses that RoCE has."""
    if not context.ports:
        return skipped("infiniband", tr("no RDMA hardware"))
    lines = [
        f"{port.name} {port.state} ({port.physical_state}), {port.layer}, {port.rate or 0:g} Gbit/s"
        for port in context.ports
    ]
    detail = ", ".join(lines)
    stuck = [port.name for port in context.ports if port.physical_state == "LinkUp" and not port.active]
    if stuck:
        advice = tr("{names}: the link is up but not active; is a subnet manager running?", names=", ".join(stuck))
        return warning("infiniband", detail, advice)
    if not any(port.active for port in context.ports):
        return warning("infiniband", detail, tr("no port is active: NCCL will use sockets; check cables and drivers"))
    for port in context.ports:
        routable = [gid.index for gid in port.gids if gid.kind == "RoCE v2" and gid.carries_ipv4]
        if port.active and port.roce and not routable:
            advice = tr(
                "{name} has no RoCE v2 address with an IPv4: give {device} one", name=port.name, device=port.netdev
            )
            return warning("infiniband", detail, advice)
    return ok("infiniband", detail)


def check_pci(context: Context) -> Check:
    """ACS and IOMMU redirect traffic between GPUs and adapters through the processor."""
    groups = context.root / "sys/kernel/iommu_groups"
    active = groups.is_dir() and any(groups.iterdir())
    line = context.read("/proc/cmdline") or ""
    passing = "iommu=pt" in line
    if not active:
        return ok("pci", tr("no IOMMU is active"))
    if passing:
        return ok("pci", tr("the IOMMU passes through (iommu=pt)"))
    return warning(
        "pci",
        tr("the IOMMU translates; direct traffic between GPUs and adapters may go through the processor, or fail"),
        tr("boot with iommu=pt, and switch ACS off on the PCI bridges of bare-metal hosts (lspci -vvv | grep ACSCtl)"),
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
    """Check which interface setup_env() takes here, and whether the evidence is good."""
    choice = context.choice
    detail = tr(
        "{name} ({address}): {evidence}",
        name=choice.name or tr("none", "doctor"),
        address=choice.address or tr("no address"),
        evidence=choice.evidence,
    )
    if choice.name is None:
        return error("interface", detail, choice.advice or tr("set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"))
    if choice.trouble is not None:
        return error("interface", joined("; ", (choice.trouble, detail)), choice.advice or "")
    wrong = [finding for finding in context.report.wrong if finding.name.endswith("_SOCKET_IFNAME")]
    if any(finding.severity == "error" for finding in wrong):
        return error(
            "interface",
            joined("; ", (entry.detail for entry in wrong)),
            joined("; ", (entry.advice for entry in wrong)),
        )
    if wrong or choice.notes:
        text = joined("; ", [detail, *choice.notes, *(finding.detail for finding in wrong)])
        advice = joined("; ", (finding.advice for finding in wrong))
        return warning("interface", text, advice or tr("see `ip route`"))
    return ok("interface", detail)


def check_master(context: Context) -> Check:
    """The name of the master resolves, to an address that the other hosts can use."""
    master = context.job.master_addr
    if master is None:
        if context.world_size > 1:
            return error(
                "master",
                tr("MASTER_ADDR is not set, and the job has {count} ranks", count=context.world_size),
                "export MASTER_ADDR=<host>",
            )
        return skipped("master", tr("MASTER_ADDR is not set"))
    addresses = resolve(master)
    if not addresses:
        return error(
            "master",
            tr("{host} does not resolve", host=master),
            tr("correct the name server, or /etc/hosts on every host"),
        )
    detail = tr("{host} is {some}", host=master, some=", ".join(addresses))
    if context.job.hosts not in (None, 1):
        if is_loopback_name(master):
            each = tr("on each of {count} hosts itself", count=context.job.hosts)
            return error("master", joined(", ", (detail, each)), tr("set the address of rank 0's host"))
        if addresses[0].startswith("127."):
            return warning(
                "master",
                joined(": ", (detail, tr("loopback here"))),
                tr("remove the host's own name from the 127.* lines of /etc/hosts"),
            )
    return ok("master", detail)


def check_name_lookup(context: Context) -> Check:
    """The resolver is quick with the names of addresses: TCPStore asks for one at each connection, and waits."""
    address = context.choice.address
    if address is None:
        return skipped("name lookup", tr("no interface was chosen"))
    slowest = 0.0
    for _ in range(NAME_LOOKUPS):
        slowest = max(slowest, network.name_seconds(address))
        if slowest > SLOW_LOOKUP:
            return warning(
                "name lookup",
                tr(
                    "the resolver took {seconds:.1f} s for the name of {address}; when a rank connects, the store of rank "
                    "0's host asks it likewise and serves nobody meanwhile",
                    seconds=slowest,
                    address=address,
                ),
                tr("correct /etc/resolv.conf there, or export RES_OPTIONS='{options}'", options=network.RES_OPTIONS),
            )
    return ok(
        "name lookup",
        tr("the name of {address} is looked up in {time:.1f} ms at most", address=address, time=1000 * slowest),
    )


def check_variables(context: Context) -> Check:
    """The effective variables with their origin, and what is wrong with them."""
    wrong = [finding for finding in context.report.wrong if finding.name not in ("limits", "MASTER_ADDR")]
    conf = read_conf(context.environ)
    effects: list[tuple[str, str, str]] = [
        (name, value, tr("environment")) for name, value in sorted(context.environ.items()) if watched(name)
    ]
    effects += [(name, *found) for name, found in sorted(conf.items()) if name not in context.environ]
    effective = [
        tr("{setting} ({origin})", setting=f"{name}={value}", origin=origin) for name, value, origin in effects
    ]
    none = tr("none is set; setup_env() would set {count}", count=len(context.report.set))
    detail = joined(", ", effective) if effective else none
    if not wrong:
        return ok("variables", detail)
    build = error if any(finding.severity == "error" for finding in wrong) else warning
    return build(
        "variables",
        joined("; ", (entry.detail for entry in wrong)),
        joined("; ", dict.fromkeys(entry.advice for entry in wrong)),
    )


def check_limits(context: Context) -> Check:
    """The ladder of time limits."""
    ladder = context.report.limits
    if ladder.problems:
        advice = (
            f"init_process_group(timeout=timedelta(seconds={ladder.process_group.seconds:g})), "
            f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={ladder.proposed_heartbeat}"
        )
        return error("limits", joined("; ", ladder.problems), advice)
    return ok("limits", ladder.one_line)


def check_master_port(context: Context) -> Check:
    """Check whether a process of an earlier job still holds the master's port."""
    port = context.job.master_port
    if context.rank != 0:
        return skipped("master port", tr("rank 0 looks at it"))  # whose doctor may hold it already
    if context.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return ok("master port", tr("port {port} is held by the launcher, as it should be", port=port))
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return skipped("master port", tr("listing connections is not permitted"))
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            return _held(port, connection.pid, error if context.job.master_addr else warning)
    return ok("master port", tr("port {port} is free", port=port))


def _held(port: int, pid: int | None, build: Callable[[str, str, str], Check]) -> Check:
    other = tr("choose another: MASTER_PORT={port}", port=port + 1)
    if pid is None:
        return build("master port", tr("port {port} is held by another user's process", port=port), other)
    try:
        line = " ".join(psutil.Process(pid).cmdline())[:120]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        line = tr("unknown", "doctor")
    advice = tr("if it is left over from an earlier job: kill {pid}; else {other}", pid=pid, other=other)
    held = tr("port {port} is held by process {pid} ({program})", port=port, pid=pid, program=line)
    return build("master port", held, advice)


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
            "gpus",
            tr("nvidia-smi did not answer within {seconds:g} s", seconds=_SECONDS),
            tr("a GPU or the driver hangs: dmesg | grep -i xid"),
        )
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip().splitlines()
        failed = tr("nvidia-smi failed: {error}", error=text[0] if text else done.returncode)
        return error("gpus", failed, tr("check the driver: dmesg | grep NVRM"))
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    cards = tr("{cards}, driver {version}", cards=f"{len(rows)} x {rows[0][1]}", version=rows[0][2]) if rows else ""
    detail = cards or tr("none", "doctor")
    broken = [
        tr("GPU {number}: {count} uncorrected ECC errors", number=row[0], count=row[3])
        for row in rows
        if row[3].isdigit() and int(row[3]) > 0
    ]
    xids = _xid_lines()
    if broken:
        return error(
            "gpus",
            joined("; ", (detail, joined(", ", broken))),
            tr("take the GPU out of service, or reset it when nothing runs"),
        )
    if xids:
        logged = tr("kernel log: {said}", said=xids[-1])
        return warning("gpus", joined("; ", (detail, logged)), tr("look the Xid number up in NVIDIA's list"))
    return ok("gpus", detail)


def _gpus_of_torch() -> Check:
    """Their names, of which an emulated GPU's says so."""
    import torch

    if not torch.cuda.is_available():
        return skipped("gpus", tr("nvidia-smi is not installed, and this torch sees no GPU"))
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    found = ", ".join(f"{count} x {name}" for name, count in names.items())
    return ok("gpus", tr("{cards}, by torch; nvidia-smi is not installed, so errors (ECC) are not known", cards=found))


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
        return skipped("gpu links", tr("this torch sees no GPU"))
    count = torch.cuda.device_count()
    if count < 2:
        return skipped("gpu links", tr("one GPU"))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    closed = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if closed:
        return warning(
            "gpu links",
            tr("no direct access for {some}", some=", ".join(closed)),
            tr("see `nvidia-smi topo -m`; IOMMU or ACS may forbid it"),
        )
    return ok("gpu links", tr("direct access between all {count} GPUs", count=count))


def check_ras(context: Context) -> Check:
    """Ask NCCL's RAS about the job that runs on this host now, if one does."""
    version = context.report.versions.nccl
    if version is None:
        return skipped("ras", tr("this torch has no NCCL"))
    if not within(version, RAS_FROM, None):
        return skipped("ras", tr("NCCL {version} has none; it came with {first}", version=version, first=RAS_FROM))
    try:
        address = address_of(context.environ)
    except NoWitness as why:
        return skipped("ras", joined("; ", (why.reason, tr("without that variable a job that hangs can be asked"))))
    try:
        report = ras.report(address, within=RAS_WITHIN)
    except NobodyListens as why:
        then = tr("then `ncclguard explain --ras {address}` tells what it says", address=address)
        return skipped("ras", joined("; ", (why.reason, then)))
    except NoWitness as why:
        return warning(
            "ras",
            why.reason,
            tr(
                "look for stopped processes (ps, state T) and, if it is another program's port, set "
                "NCCL_RAS_ADDR=localhost:PORT to a free one on all ranks"
            ),
        )
    version, troubles = report.nccl_version, list[str](report.lines)
    if report.communicators is None:
        head = tr("NCCL {version} answers at {address} in text", version=version, address=address)
    else:
        count = len(report.communicators)
        head = tr(
            "NCCL {version} answers at {address} for {count} communicators",
            version=version,
            address=address,
            count=count,
        )
        troubles = [
            tr("{hash} of {count} ranks: {details}", hash=one.hash, count=one.size, details=joined("; ", defects))
            for one in report.communicators
            if (defects := one.defects())
        ]
    if troubles:
        shown = joined("; ", [head, *troubles[:RAS_SHOWN]])
        left = len(troubles) - RAS_SHOWN
        return warning(
            "ras",
            tr("{text} (and {number} more)", text=shown, number=left) if left > 0 else shown,
            tr(
                "`ncclguard explain --ras {address}` asks twice and names the rank that holds the others up",
                address=address,
            ),
        )
    head = joined(", ", (head, tr("every rank answers")))
    uneven = sum(bool(one.uneven()) for one in report.communicators or ())
    note = tr(
        "in {number} the ranks have not launched the same number of operations, as in any job that runs", number=uneven
    )
    return ok("ras", joined("; ", (head, note)) if uneven else head)


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


class Facts(BaseModel, frozen=True):
    """The facts that a rank publishes of itself; its servers listen on ``port`` and ``echo_port`` of ``address``."""

    rank: int
    host: str
    interface: str | None
    address: str | None
    mtu: int | None
    port: int | None
    echo_port: int | None
    candidates: tuple[str, ...]
    versions: dict[str, str]


class Measured(BaseModel, frozen=True):
    """The measurements of one rank's way to another; None where it was not measured or did not work.

    Times in seconds, ``bandwidth`` in bytes/s, sizes in bytes.
    """

    source: int
    target: int
    fault: Prose | None = None
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
    """Return what has to be equal on all ranks."""
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
    """Check whether every rank has come."""
    missing = [rank for rank in range(world_size) if rank not in facts]
    hosts = leaders(facts)
    if not missing:
        return ok("ranks", tr("all {count} ranks on {number} hosts answered", count=world_size, number=len(hosts)))
    here = [
        joined(": ", (host, ", ".join(str(rank) for rank, entry in facts.items() if entry.host == host)))
        for host in hosts
    ]
    return error(
        "ranks",
        tr(
            "ranks {numbers} did not reach the store within {seconds:g} s (there: {hosts})",
            numbers=", ".join(map(str, missing)),
            seconds=seconds,
            hosts=joined("; ", here),
        ),
        tr("their own output says why; look at the master's port in the firewall, and whether they were started"),
    )


def check_agreement(facts: Mapping[int, Facts]) -> Check:
    """Check whether the hosts' choices of interface fit together: one address family, no address twice, one MTU."""
    name = "interfaces agree"
    chosen = {entry.host: (entry, entry.address) for entry in facts.values() if entry.address is not None}
    shown = joined(
        ", ", (joined(": ", (host, f"{entry.interface} {address}")) for host, (entry, address) in chosen.items())
    )
    addresses = {address for _, address in chosen.values()}
    if len({family_of(address) for address in addresses}) > 1:
        return error(
            name,
            tr("IPv4 here and IPv6 there ({details})", details=shown),
            tr("give all hosts the same kind of MASTER_ADDR"),
        )
    if len(addresses) < len(chosen):
        return error(
            name,
            tr("several hosts would use the same address ({details})", details=shown),
            tr("it belongs to a bridge or a cloned host: set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"),
        )
    if len({entry.mtu for entry, _ in chosen.values()}) > 1:
        listed = joined(", ", (joined(": ", (host, str(entry.mtu))) for host, (entry, _) in chosen.items()))
        return warning(
            name,
            tr("MTUs differ ({details})", details=listed),
            tr("set the same MTU everywhere: large packets may vanish"),
        )
    return ok(name, shown)


def check_versions(facts: Mapping[int, Facts]) -> Check:
    """torch, NCCL, driver and Python are the same everywhere."""
    differing = []
    for what in dict.fromkeys(name for entry in facts.values() for name in entry.versions):
        by_version: dict[str, list[str]] = {}
        for entry in facts.values():
            by_version.setdefault(entry.versions.get(what, tr("absent")), []).append(entry.host)
        if len(by_version) > 1:
            listed = [joined(": ", (version, ", ".join(dict.fromkeys(hosts)))) for version, hosts in by_version.items()]
            differing.append(tr("{what} ({details})", what=what, details=joined("; ", listed)))
    if differing:
        return error(
            "versions",
            tr("different {details}", details=joined(", ", differing)),
            tr("install the same versions on all hosts"),
        )
    first = next(iter(facts.values()))
    return ok("versions", joined(", ", (f"{what} {version}" for what, version in first.versions.items())))


def check_measured(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> list[Check]:
    """The checks of the network between the ranks."""
    checks = (check_pairs, check_round_trips, check_bandwidth, check_path_mtu, check_clocks)
    return [check(facts, measured) for check in checks]


def _pair(facts: Mapping[int, Facts], entry: Measured, found: str) -> str:
    """Return what was found between two ranks, behind their names."""
    source, target = facts[entry.source], facts[entry.target]
    pair = tr(
        "{host} (rank {rank}) -> {other} (rank {peer}, {address})",
        host=source.host,
        rank=source.rank,
        other=target.host,
        peer=target.rank,
        address=f"{target.address}:{target.port}",
    )
    return joined(": ", (pair, found))


def check_pairs(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Every rank reaches every other one, in both directions."""
    if not measured:
        return skipped("connections", tr("one rank"))
    faults = [entry for entry in measured if entry.fault is not None]
    if not faults:
        return ok(
            "connections", tr("all {count} directed pairs connect, each from its chosen interface", count=len(measured))
        )
    broken = {(entry.source, entry.target) for entry in faults}
    lines = []
    for entry in faults[:20]:
        way_back = (entry.target, entry.source) in broken
        fault = entry.fault or ""
        lines.append(_pair(facts, entry, fault if way_back else tr("{text} (the other direction works)", text=fault)))
    if len(faults) > 20:
        lines.append(tr("and {count} more", count=len(faults) - 20))
    return error(
        "connections",
        joined("\n", lines),
        tr(
            "allow TCP on all ports between the hosts in both directions (gloo and NCCL use ports that the system picks)"
        ),
    )


def check_round_trips(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Round trip of each pair, outliers named."""
    known = [(entry, 1e3 * entry.round_trip) for entry in measured if entry.round_trip is not None]
    if not known:
        return skipped("round trip", tr("no pair connects"))
    median = statistics.median(trip for _, trip in known)
    limit = max(ROUND_TRIP_OUTLIER * median, 1e3 * ROUND_TRIP_FLOOR)
    slow = [_pair(facts, entry, f"{trip:.2f} ms") for entry, trip in known if trip > limit]
    detail = tr("median {median:.2f} ms over {count} pairs", median=median, count=len(known))
    if slow:
        advice = tr("see what lies between these hosts: traceroute; is one busy?")
        return warning("round trip", joined("\n", [detail, *slow[:10]]), advice)
    return ok("round trip", detail)


def _no_pairs(facts: Mapping[int, Facts]) -> Message:
    return tr("one host") if len({one.host for one in facts.values()}) == 1 else tr("no two hosts connect")


def check_bandwidth(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Bandwidth of one connection for each pair of hosts, outliers named."""
    known = [(entry, entry.bandwidth / 1e6) for entry in measured if entry.bandwidth is not None]
    if not known:
        return skipped("bandwidth", _no_pairs(facts))
    median = statistics.median(speed for _, speed in known)
    slow = [_pair(facts, entry, f"{speed:.0f} MB/s") for entry, speed in known if speed < BANDWIDTH_OUTLIER * median]
    detail = tr("median {median:.0f} MB/s a connection over {count} pairs of hosts", median=median, count=len(known))
    if slow:
        return warning(
            "bandwidth", joined("\n", [detail, *slow[:10]]), tr("compare link speed and errors: ethtool, ip -s link")
        )
    return ok("bandwidth", detail)


def check_path_mtu(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """The largest packet that passes between each two hosts, against the interfaces' MTU."""
    silent, small, swallowed, least, passed = [], [], [], [], set()
    for entry in measured:
        if entry.mtu is None:
            continue
        if entry.largest is None:
            silent.append(_pair(facts, entry, tr("no UDP packet arrives")))
        elif entry.largest >= entry.mtu:
            passed.add(str(entry.mtu))
        elif entry.reported is not None and entry.reported <= entry.largest:
            small.append(
                _pair(facts, entry, tr("{number} bytes (interface MTU {mtu})", number=entry.largest, mtu=entry.mtu))
            )
        else:
            vanish = tr(
                "packets over {number} bytes vanish unsaid (interface MTU {mtu})", number=entry.largest, mtu=entry.mtu
            )
            swallowed.append(_pair(facts, entry, vanish))
            least.append(entry.largest)
    if swallowed:
        advice = tr(
            "large transfers hang: set the MTU of all hosts to {number}, or let ICMP through", number=min(least)
        )
        return error("path MTU", joined("\n", swallowed), advice)
    if small:
        advice = tr("TCP adapts, at a cost: set the MTU of the hosts to the path's")
        return warning("path MTU", joined("\n", small), advice)
    if silent or not passed:
        return skipped("path MTU", joined("\n", silent) if silent else _no_pairs(facts))
    return ok(
        "path MTU", tr("packets of the interfaces' MTU ({numbers} bytes) pass", numbers=", ".join(sorted(passed)))
    )


def check_clocks(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Check how far the clocks are from that of the first rank; for reading logs only, no other check depends on it."""
    first = min(facts)
    skews = {
        facts[entry.target].host: entry.clock_skew
        for entry in measured
        if entry.source == first and entry.clock_skew is not None and facts[entry.target].host != facts[first].host
    }
    if not skews:
        return skipped("clocks", tr("one host"))
    listed = joined(", ", (f"{host} {skew * 1e3:+.1f} ms" for host, skew in skews.items()))
    return ok("clocks", tr("{text} (informational)", text=listed))
