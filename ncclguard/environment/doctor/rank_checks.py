"""What the ranks say of themselves and have measured of each other, and the checks of it all together."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.doctor.checks import Check, Context, error, ok, skipped, warning
from ncclguard.environment.network import family_of

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
