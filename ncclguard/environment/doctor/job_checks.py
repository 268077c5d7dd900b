"""Checks of what this process would do: interface, master, names, variables, limits, port, GPUs, and NCCL's RAS."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable

import psutil

from ncclguard.environment import network, ras
from ncclguard.environment.checks import watched
from ncclguard.environment.doctor.checks import Check, Context, error, ok, skipped, warning
from ncclguard.environment.interface import is_loopback_name
from ncclguard.environment.nccl_names import read_conf
from ncclguard.environment.versions import within

_SECONDS = 10.0
#: Looked up so many times, until one takes longer: that many seconds in which the store serves nobody.
NAME_LOOKUPS, SLOW_LOOKUP = 20, 0.2
#: The first NCCL with RAS, the seconds that its answer may take, and the lines of it that are shown.
RAS_FROM, RAS_WITHIN, RAS_SHOWN = "2.24", 5.0, 3


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
