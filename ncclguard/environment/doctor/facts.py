"""What each rank tells the others about itself, and what they make of it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.doctor.context import Context
from ncclguard.environment.doctor.result import Check, error, ok, warning
from ncclguard.environment.links import family_of


class Facts(BaseModel):
    """One rank. ``port`` and ``echo_port`` are where its servers listen on ``address``."""

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


def read_versions(context: Context) -> dict[str, str]:
    """What has to be equal on all ranks."""
    driver = Path("/proc/driver/nvidia/version")
    found = {
        "torch": context.report.versions.torch,
        "NCCL": context.report.versions.nccl or "none",
        "Python": platform.python_version(),
    }
    if driver.exists():
        words = driver.read_text().split("Kernel Module", 1)[-1].split()
        found["driver"] = next((word for word in words if word[:1].isdigit()), "unknown")
    return found


def own_facts(context: Context, port: int | None, echo_port: int | None) -> Facts:
    """This rank's."""
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
        versions=read_versions(context),
    )


def leaders(facts: Mapping[int, Facts]) -> dict[str, int]:
    """The lowest rank of each host, by host."""
    found: dict[str, int] = {}
    for rank, entry in sorted(facts.items()):
        found.setdefault(entry.host, rank)
    return found


def check_ranks(facts: Mapping[int, Facts], world_size: int, seconds: float) -> Check:
    """Whether every rank has come."""
    missing = [rank for rank in range(world_size) if rank not in facts]
    if not missing:
        return ok("ranks", f"all {world_size} ranks on {len(leaders(facts))} hosts answered")
    here = "; ".join(
        f"{host}: {', '.join(str(rank) for rank, entry in facts.items() if entry.host == host)}"
        for host in leaders(facts)
    )
    return error(
        "ranks",
        f"ranks {', '.join(map(str, missing))} did not reach the store within {seconds:g} s (there: {here})",
        "their own output says why; look at the master's port in the firewall, and whether they were started",
    )


def check_agreement(facts: Mapping[int, Facts]) -> Check:
    """Whether the hosts' choices of interface fit together: one address family, no address twice, one MTU."""
    chosen = {entry.host: entry for entry in facts.values() if entry.address is not None}
    shown = ", ".join(f"{host}: {entry.interface} {entry.address}" for host, entry in chosen.items())
    families = {family_of(entry.address) for entry in chosen.values() if entry.address is not None}
    if len(families) > 1:
        return error(
            "interfaces agree", f"IPv4 here and IPv6 there ({shown})", "give all hosts the same kind of MASTER_ADDR"
        )
    addresses = [entry.address for entry in chosen.values()]
    if len(set(addresses)) < len(addresses):
        return error(
            "interfaces agree",
            f"several hosts would use the same address ({shown})",
            "it belongs to a bridge or a cloned host: set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
        )
    sizes = {entry.mtu for entry in chosen.values()}
    if len(sizes) > 1:
        listed = ", ".join(f"{host}: {entry.mtu}" for host, entry in chosen.items())
        return warning(
            "interfaces agree", f"MTUs differ ({listed})", "set the same MTU everywhere: large packets may vanish"
        )
    return ok("interfaces agree", shown)


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


def paste_block(facts: Sequence[Facts], lines: Sequence[str]) -> str:
    """A block to paste into an issue."""
    entries = [
        f"platform: {platform.platform()}, {sys.implementation.name} {platform.python_version()}",
        *(f"rank {entry.rank}: {entry.host}, {entry.interface}, MTU {entry.mtu}, {entry.versions}" for entry in facts),
        *lines,
    ]
    return "\n".join(["```text", *entries, "```"])
