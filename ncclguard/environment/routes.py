"""Where the kernel would send packets: by ``ip route get``, and without it from the tables under ``/proc/net``."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ncclguard.environment.links import Link, family_of, find_ip, run_ip

_RTF_UP, _RTF_REJECT = 0x0001, 0x0200  # linux/route.h


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a destination. ``local`` is True for an address of this host; ``source`` is the address it is sent
    from, where known."""

    device: str
    source: str | None = None
    gateway: str | None = None
    metric: int = 0
    local: bool = False
    prefix_length: int = 0


class Routes(Protocol):
    """What the choice of the interface asks of the kernel."""

    def to(self, address: str) -> Route | None:
        """The route that packets to an address take; None when there is none."""
        ...

    def matching(self, address: str) -> tuple[Route, ...]:
        """All routes to an address, also those that another one takes precedence over; the most specific first."""
        ...

    def defaults(self) -> tuple[Route, ...]:
        """The default routes, IPv4 before IPv6, the lowest metric first."""
        ...


def routes_from_json(entry: dict[str, Any]) -> list[Route]:
    """The routes in one object of ``ip -json route``; several for one with several next hops."""
    destination = str(entry.get("dst", "default"))
    length = 0 if destination == "default" else ipaddress.ip_network(destination, strict=False).prefixlen
    hops = entry.get("nexthops") or [entry]
    return [
        Route(
            device=str(hop["dev"]),
            source=entry.get("prefsrc"),
            gateway=hop.get("gateway"),
            metric=int(entry.get("metric", 0)),
            local=entry.get("type") == "local",
            prefix_length=length,
        )
        for hop in hops
        if "dev" in hop and entry.get("type") not in ("unreachable", "blackhole", "prohibit", "throw")
    ]


class IpRoutes:
    """Routes by the ``ip`` command, policy routing included."""

    def __init__(self, program: str) -> None:
        self._program = program

    def to(self, address: str) -> Route | None:
        """The answer of ``ip -json route get``."""
        return _first(self._ask("route", "get", address))

    def matching(self, address: str) -> tuple[Route, ...]:
        """The answer of ``ip -json route show match``."""
        version = "-6" if family_of(address) == socket.AF_INET6 else "-4"
        return _by_precedence(self._ask(version, "route", "show", "match", address))

    def defaults(self) -> tuple[Route, ...]:
        """The answer of ``ip -json route show default`` for both families."""
        return tuple(
            route
            for version in ("-4", "-6")
            for route in _by_precedence(self._ask(version, "route", "show", "default"))
        )

    def _ask(self, *arguments: str) -> list[Route]:
        entries = run_ip(self._program, *arguments) or []
        return [route for entry in entries for route in routes_from_json(entry)]


class ProcRoutes:
    """Routes from ``/proc/net/route`` and ``/proc/net/ipv6_route``: the main table only, no policy routing."""

    def __init__(self, links: Sequence[Link], folder: Path = Path("/proc/net")) -> None:
        self._links = links
        self._table: list[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, Route]] = []
        for line in _lines(folder / "route")[1:]:
            self._add_ipv4(line.split())
        for line in _lines(folder / "ipv6_route"):
            self._add_ipv6(line.split())

    def to(self, address: str) -> Route | None:
        """The most specific route, of those the one with the lowest metric; ``local`` for an address of this host."""
        for link in self._links:
            if address in link.addresses:
                return Route(device="lo", source=address, local=True)
        if ipaddress.ip_address(address).is_loopback:
            return Route(device="lo", source=address, local=True)
        return _first(self.matching(address))

    def matching(self, address: str) -> tuple[Route, ...]:
        """All routes of the table whose destination contains the address."""
        wanted = ipaddress.ip_address(address)
        return _by_precedence(
            route for network, route in self._table if wanted.version == network.version and wanted in network
        )

    def defaults(self) -> tuple[Route, ...]:
        """The routes of the table to everywhere."""
        found = [(network.version, route) for network, route in self._table if network.prefixlen == 0]
        return tuple(route for _, route in sorted(found, key=lambda entry: (entry[0], entry[1].metric)))

    def _add_ipv4(self, fields: list[str]) -> None:
        device, destination, gateway, flags, _, _, metric, mask = fields[:8]
        if not int(flags, 16) & _RTF_UP or int(flags, 16) & _RTF_REJECT:
            return
        length = int(mask, 16).bit_count()
        network = ipaddress.IPv4Network((_ipv4(destination), length), strict=False)
        via = _ipv4(gateway)
        self._table.append(
            (
                network,
                Route(device, gateway=None if via == "0.0.0.0" else via, metric=int(metric), prefix_length=length),
            )
        )

    def _add_ipv6(self, fields: list[str]) -> None:
        destination, length, _, _, gateway, metric, _, _, flags, device = fields[:10]
        if device == "lo" or int(flags, 16) & _RTF_REJECT or not int(flags, 16) & _RTF_UP:
            return
        prefix = int(length, 16)
        network = ipaddress.IPv6Network((int(destination, 16), prefix), strict=False)
        if network.is_multicast:
            return
        via = int(gateway, 16)
        route = Route(
            device,
            gateway=str(ipaddress.IPv6Address(via)) if via else None,
            metric=int(metric, 16),
            prefix_length=prefix,
        )
        self._table.append((network, route))


def _ipv4(text: str) -> str:
    # /proc/net/route prints the address as the machine's own integer.
    return socket.inet_ntoa(struct.pack("=I", int(text, 16)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no IPv6 in this kernel, or no /proc: then this table has no routes
        return []


def _by_precedence(routes: Iterable[Route]) -> tuple[Route, ...]:
    return tuple(sorted(routes, key=lambda route: (-route.prefix_length, route.metric)))


def _first(routes: Sequence[Route]) -> Route | None:
    return routes[0] if routes else None


def read_routes(links: Sequence[Link]) -> Routes:
    """The routes of this host, by ``ip`` where it can print JSON, else from ``/proc/net``."""
    program = find_ip()
    if program is not None and run_ip(program, "link", "show", "lo") is not None:
        return IpRoutes(program)
    return ProcRoutes(links)
