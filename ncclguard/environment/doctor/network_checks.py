"""What the measured pairs say: who reaches whom, how fast, with which packets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.doctor.facts import Facts
from ncclguard.environment.doctor.result import Check, error, ok, skipped, warning

#: A pair this far from the median is named.
BANDWIDTH_OUTLIER, ROUND_TRIP_OUTLIER = 0.5, 5.0
#: Differences below this are noise of the processors.
ROUND_TRIP_FLOOR = 0.001


class Measured(BaseModel):
    """What one rank found out about the way from it to another. Times in seconds, ``bandwidth`` in bytes/s, sizes in
    bytes; None where it was not measured or did not work."""

    model_config = ConfigDict(frozen=True)

    source: int
    target: int
    fault: str | None = None
    round_trip: float | None = None
    clock_skew: float | None = None
    bandwidth: float | None = None
    mtu: int | None = None
    largest: int | None = None
    told: int | None = None


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
    known = [entry for entry in measured if entry.round_trip is not None]
    if not known:
        return skipped("round trip", "no pair connects")
    median = statistics.median(entry.round_trip or 0.0 for entry in known)
    slow = [entry for entry in known if (entry.round_trip or 0.0) > max(ROUND_TRIP_OUTLIER * median, ROUND_TRIP_FLOOR)]
    detail = f"median {median * 1e3:.2f} ms over {len(known)} pairs"
    if slow:
        named = "\n".join(f"{_pair(facts, entry)}: {(entry.round_trip or 0.0) * 1e3:.2f} ms" for entry in slow[:10])
        return warning(
            "round trip", f"{detail}\n{named}", "see what lies between these hosts: traceroute; is one busy?"
        )
    return ok("round trip", detail)


def check_bandwidth(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """Bandwidth of one connection for each pair of hosts, outliers named."""
    known = [entry for entry in measured if entry.bandwidth is not None]
    if not known:
        return skipped("bandwidth", "no two hosts connect")
    median = statistics.median(entry.bandwidth or 0.0 for entry in known)
    slow = [entry for entry in known if (entry.bandwidth or 0.0) < BANDWIDTH_OUTLIER * median]
    detail = f"median {median / 1e6:.0f} MB/s a connection over {len(known)} pairs of hosts"
    if slow:
        named = "\n".join(f"{_pair(facts, entry)}: {(entry.bandwidth or 0.0) / 1e6:.0f} MB/s" for entry in slow[:10])
        return warning("bandwidth", f"{detail}\n{named}", "compare link speed and errors: ethtool, ip -s link")
    return ok("bandwidth", detail)


def check_path_mtu(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """The largest packet that passes between each two hosts, against the interfaces' MTU."""
    known = [entry for entry in measured if entry.mtu is not None]
    if not known:
        return skipped("path MTU", "no two hosts connect")
    silent = [entry for entry in known if entry.largest is None]
    small = [entry for entry in known if entry.largest is not None and entry.mtu and entry.largest < entry.mtu]
    swallowed = [entry for entry in small if entry.told is None or entry.told > (entry.largest or 0)]
    if swallowed:
        lines = [
            f"{_pair(facts, entry)}: packets over {entry.largest} bytes vanish unsaid (interface MTU {entry.mtu})"
            for entry in swallowed
        ]
        least = min(entry.largest or 0 for entry in swallowed)
        return error(
            "path MTU",
            "\n".join(lines),
            f"large transfers hang: set the MTU of all hosts to {least}, or let ICMP through",
        )
    if small:
        lines = [f"{_pair(facts, entry)}: {entry.largest} bytes (interface MTU {entry.mtu})" for entry in small]
        return warning("path MTU", "\n".join(lines), "TCP adapts, at a cost: set the MTU of the hosts to the path's")
    if silent:
        lines = [f"{_pair(facts, entry)}: no UDP packet arrives" for entry in silent]
        return skipped("path MTU", "\n".join(lines))
    return ok(
        "path MTU", f"packets of the interfaces' MTU ({', '.join(sorted({str(e.mtu) for e in known}))} bytes) pass"
    )


def check_clocks(facts: Mapping[int, Facts], measured: Sequence[Measured]) -> Check:
    """How far the clocks are from that of the first rank; for reading logs only, nothing here depends on it."""
    skews = {
        facts[entry.target].host: entry.clock_skew
        for entry in measured
        if entry.source == min(facts)
        and entry.clock_skew is not None
        and facts[entry.target].host != facts[min(facts)].host
    }
    if not skews:
        return skipped("clocks", "one host")
    return ok("clocks", ", ".join(f"{host} {skew * 1e3:+.1f} ms" for host, skew in skews.items()) + " (informational)")
