"""The network of this host as the kernel shows it: interfaces, routes, names, and the address that peers are given.

Nothing is sent to another host but by `answers` and, for names, by the system's resolver.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

# ---------------------------------------------------------------------------------------------------- interfaces

#: Kinds that are taken only when nothing else reaches the master: they usually lead to containers, virtual machines
#: or a VPN, not to the other hosts of the job.
AVOIDED_KINDS = frozenset(
    {"bridge", "openvswitch", "veth", "tun", "dummy", "ifb", "wireguard", "vxlan", "geneve", "gre", "gretap", "ipip"}
    | {"sit", "ip6tnl", "ip6gre", "ppp", "nlmon", "vcan", "netdevsim"}
)
# Kinds by name, for hosts where neither `ip` nor sysfs tells.
_KIND_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"lo", "loopback"),
    (
        r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|lxcbr\d+|lxdbr\d+|cni\d+|cbr\d+|xenbr\d+|podman\d+",
        "bridge",
    ),
    (r"veth.*|cali[0-9a-f]+|lxc[0-9a-f]+|vnet\d+", "veth"),
    (r"tun\d+|tap\d+|tailscale\d+|utun\d+|zt\w+", "tun"),
    (r"wg\d+", "wireguard"),
    (r"flannel\.\d+|vxlan.*|cilium_vxlan", "vxlan"),
    (r"ppp\d+", "ppp"),
    (r"dummy\d+|kube-ipvs0", "dummy"),
    (r"bond\d+", "bond"),
    (r"ib\d+.*|ibp.*", "infiniband"),
    (r".+\.\d+|vlan\d+", "vlan"),
)
_IP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Link:
    """One interface. ``addresses`` are in the order in which NCCL and gloo see them: IPv4 before IPv6."""

    name: str
    kind: str
    up: bool
    running: bool
    addresses: tuple[str, ...] = ()
    master: str | None = None
    mtu: int | None = None

    @property
    def loopback(self) -> bool:
        """Whether it is the loopback interface."""
        return self.kind == "loopback"

    @property
    def usable(self) -> bool:
        """Whether it is up with a carrier and has an address that other hosts can be given."""
        return self.up and self.running and bool(self.global_addresses)

    @property
    def avoided(self) -> bool:
        """Whether its kind is one that is taken only when there is no other way."""
        return self.kind in AVOIDED_KINDS

    @property
    def global_addresses(self) -> tuple[str, ...]:
        """Its addresses without loopback and link-local ones."""
        parsed = ((text, ipaddress.ip_address(text)) for text in self.addresses)
        return tuple(text for text, address in parsed if not address.is_loopback and not address.is_link_local)

    def address_of(self, family: int) -> str | None:
        """Its first address of ``socket.AF_INET`` or ``AF_INET6`` that other hosts can be given, else None."""
        for text in self.global_addresses:
            if family_of(text) == family:
                return text
        return None

    def describe(self) -> str:
        """Kind and state in a few words."""
        state = "up" if self.up and self.running else "up, no carrier" if self.up else "down"
        return f"{self.kind}, {state}"


def family_of(address: str) -> int:
    """``socket.AF_INET`` or ``socket.AF_INET6`` for the text of an address."""
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def find_ip() -> str | None:
    """The path of the ``ip`` command; also where a user's PATH does not have the administration folders."""
    return shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")


def run_ip(program: str, *arguments: str) -> list[dict[str, Any]] | None:
    """The objects that ``ip -json`` prints; None when it failed, as for an address without a route."""
    try:
        done = subprocess.run(
            [program, "-json", *arguments], capture_output=True, text=True, timeout=_IP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    try:
        parsed = json.loads(done.stdout or "[]")
    except json.JSONDecodeError:  # the ip of busybox knows no -json
        return None
    return [entry for entry in parsed if isinstance(entry, dict) and entry]


def kind_by_name(name: str) -> str:
    """The kind that a name suggests; "ethernet" when it suggests none."""
    for pattern, kind in _KIND_BY_NAME:
        if re.fullmatch(pattern, name):
            return kind
    return "ethernet"


def link_from_json(entry: dict[str, Any]) -> Link:
    """A link from one object of ``ip -json -details address show``."""
    flags = set(entry.get("flags", ()))
    name = str(entry["ifname"])
    told = (entry.get("linkinfo") or {}).get("info_kind")
    kind = str(told) if told else {"loopback": "loopback", "infiniband": "infiniband"}.get(entry.get("link_type", ""))
    if kind is None:
        kind = "tun" if entry.get("link_type") == "none" else "ethernet"
    found = [str(info["local"]) for info in entry.get("addr_info", ()) if "local" in info]
    return Link(
        name=name,
        kind=kind,
        up="UP" in flags,
        running="LOWER_UP" in flags and entry.get("operstate") not in ("DOWN", "LOWERLAYERDOWN"),
        addresses=_in_order(found),
        master=entry.get("master"),
        mtu=entry.get("mtu"),
    )


def _in_order(addresses: list[str]) -> tuple[str, ...]:
    # getifaddrs() gives IPv4, then global IPv6, then link-local IPv6 (NCCL source, findInterfaces, says the same).
    def order(text: str) -> tuple[int, bool]:
        address = ipaddress.ip_address(text)
        return address.version, address.is_link_local

    return tuple(sorted(addresses, key=order))


def _kind_from_sysfs(name: str, folder: Path) -> str:
    if (folder / "bridge").is_dir():
        return "bridge"
    if (folder / "bonding").is_dir():
        return "bond"
    if (folder / "tun_flags").exists():
        return "tun"
    kind = re.search(r"^DEVTYPE=(\w+)$", read_file(folder / "uevent"), re.MULTILINE)
    if kind is not None:
        return kind.group(1)
    hardware = read_file(folder / "type").strip()  # linux/if_arp.h
    if hardware == "772":
        return "loopback"
    if hardware == "32":
        return "infiniband"
    return kind_by_name(name)


def read_file(path: Path) -> str:
    """The text of a file of the kernel's; empty when the kernel lacks the file or does not let this process read it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def links_from_psutil(sysfs: Path = Path("/sys/class/net")) -> tuple[Link, ...]:
    """The interfaces without the ``ip`` command, from psutil and sysfs."""
    addresses = psutil.net_if_addrs()
    links = []
    for name, state in psutil.net_if_stats().items():
        found = [
            entry.address.partition("%")[0]
            for entry in addresses.get(name, ())
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        flags = set(state.flags.split(","))
        operational = read_file(sysfs / name / "operstate").strip()
        master = sysfs / name / "master"
        links.append(
            Link(
                name=name,
                kind=_kind_from_sysfs(name, sysfs / name),
                up="up" in flags or state.isup,
                running=state.isup and operational not in ("down", "lowerlayerdown"),
                addresses=_in_order(found),
                master=master.resolve().name if master.exists() else None,
                mtu=state.mtu,
            )
        )
    return tuple(links)


def read_links() -> tuple[Link, ...]:
    """The interfaces of this host (of this network namespace), by ``ip`` where it is there, else by psutil."""
    program = find_ip()
    entries = run_ip(program, "-details", "address", "show") if program else None
    if entries is None:
        return links_from_psutil()
    return tuple(link_from_json(entry) for entry in entries if "ifname" in entry)


# -------------------------------------------------------------------------------------------------------- routes

_RTF_UP, _RTF_REJECT = 0x0001, 0x0200  # linux/route.h


@dataclass(frozen=True, slots=True)
class Route:
    """One way to a destination.

    ``local`` is True for an address of this host; ``source`` is the address that packets are sent from, where known.
    """

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
        return next(iter(self._ask("route", "get", address)), None)

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
        for line in read_file(folder / "route").splitlines()[1:]:
            self._add_ipv4(line.split())
        for line in read_file(folder / "ipv6_route").splitlines():
            self._add_ipv6(line.split())

    def to(self, address: str) -> Route | None:
        """The most specific route, of those the one with the lowest metric; ``local`` for an address of this host."""
        for link in self._links:
            if address in link.addresses:
                return Route(device="lo", source=address, local=True)
        if ipaddress.ip_address(address).is_loopback:
            return Route(device="lo", source=address, local=True)
        return next(iter(self.matching(address)), None)

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


def _by_precedence(routes: Iterable[Route]) -> tuple[Route, ...]:
    return tuple(sorted(routes, key=lambda route: (-route.prefix_length, route.metric)))


def read_routes(links: Sequence[Link]) -> Routes:
    """The routes of this host, by ``ip`` where it can print JSON, else from ``/proc/net``."""
    program = find_ip()
    if program is not None and run_ip(program, "link", "show", "lo") is not None:
        return IpRoutes(program)
    return ProcRoutes(links)


# --------------------------------------------------------------------------------------------- names and answers

#: For the variable of this name, which the C library's resolver reads: a lost answer costs 1 s, not 5 and more.
RES_OPTIONS = "timeout:1 attempts:1"
# What a host that can be reached says of a port on which nobody listens.
_ANSWERED = frozenset({0, errno.ECONNREFUSED})


def resolve(name: str, seconds: float = 5.0) -> tuple[str, ...]:
    """The addresses of a host name, in the resolver's order; none when it has none or does not answer in time.

    >>> resolve("127.0.0.1")
    ('127.0.0.1',)
    """
    found: list[str] = []

    def ask() -> None:
        found.extend(str(address[0]).partition("%")[0] for _, address in _lookup(name.strip("[]")))

    _wait_for(ask, seconds)
    return tuple(dict.fromkeys(found))


def name_seconds(address: str, seconds: float = 5.0) -> float:
    """How long the system's resolver takes for the name of an address, which may have none; ``seconds`` at most.

    Asked for as torch's TCPStore does it when somebody connects: an IPv4 address as one of IPv6 (``::ffff:10.0.0.1``).

    >>> 0.0 < name_seconds("127.0.0.1") <= 5.0
    True
    """
    mapped = address if ":" in address else f"::ffff:{address}"

    def ask() -> None:
        with contextlib.suppress(OSError):  # the resolver says that it does not know: an answer too
            socket.getnameinfo((mapped.partition("%")[0], 1, 0, 0), socket.NI_NUMERICSERV)

    started = time.monotonic()
    _wait_for(ask, seconds)
    return min(time.monotonic() - started, seconds)


def _lookup(name: str) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    """Family and socket address, port 0, of all addresses of a name; none when the resolver knows none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((entry[0], entry[4]) for entry in found))


def _wait_for(ask: Callable[[], None], seconds: float) -> None:
    """The system's resolver takes no time limit, so it runs in a thread that is left behind when it is too slow."""
    thread = threading.Thread(target=ask, name="ncclguard-resolve", daemon=True)
    thread.start()
    thread.join(seconds)


def answers(address: str, port: int, device: str, seconds: float = 1.0) -> bool:
    """Whether a host answers a TCP connection that is made through one interface; a refusal is an answer too.

    Linux only (``SO_BINDTODEVICE``). False when nothing came back within ``seconds``.
    """
    with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        except OSError:  # no such interface, or not permitted before Linux 5.7
            return False
        error = sock.connect_ex((address, port))
        if error == errno.EINPROGRESS:
            waiting = select.poll()  # select() takes no descriptor above 1023
            waiting.register(sock, select.POLLOUT)
            if not waiting.poll(1000 * seconds):
                return False
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return error in _ANSWERED


# ------------------------------------------------------------------------------------------------ this host's address

_UNROUTED = "192.0.2.1"  # TEST-NET-1, RFC 5737: only asks the kernel for the way out of this host


def job_address(master: str = "") -> str:
    """The address of this host that peers are given for the job's data.

    The first usable interface of ``GLOO_SOCKET_IFNAME`` (as `ncclguard.setup_env` sets it); else what the host's own
    name stands for, as with gloo; where that is a loopback address only, the source of the route to the job's
    ``master``, by default ``MASTER_ADDR``; else 127.0.0.1. No name is looked up twice. Raises ValueError where the
    variable names no interface that has an address.
    """
    names = [name.strip() for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    if not names:
        return _address_by_name(socket.gethostname(), master or os.environ.get("MASTER_ADDR", ""))
    known = psutil.net_if_addrs()
    for name in names:
        for family in (socket.AF_INET, socket.AF_INET6):
            hosts = [entry.address for entry in known.get(name, ()) if entry.family == family]
            if hosts:
                return min(hosts, key=lambda host: host.startswith("fe80:"))
    raise ValueError(
        f"GLOO_SOCKET_IFNAME={','.join(names)} names no interface of this host that is up and has an address: "
        "set it to one that `ip address` shows, or unset it"
    )


def address_towards_master() -> str:
    """The address of this host from which ``MASTER_ADDR``, or else the default route, is reached.

    Unlike `job_address` this looks up no name but the master's: a resolver that does not know the host's own name may
    take many seconds to say so.
    """
    master = next(_sources_towards(os.environ.get("MASTER_ADDR", "")), None)
    several_hosts = os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if master is None or (several_hosts and ipaddress.ip_address(master).is_loopback):
        # On the master's own host its name often stands for a loopback address, which other hosts cannot use.
        return next(_sources_towards(_UNROUTED), master or "127.0.0.1")
    return master


@functools.lru_cache(maxsize=8)
def _address_by_name(name: str, master: str) -> str:
    own = [str(address[0]) for family, address in _lookup(name) if _can_listen(family, address)]
    for host in (*own, *_sources_towards(master)):
        if not ipaddress.ip_address(host).is_loopback:
            return host
    return own[0] if own else "127.0.0.1" if _can_listen(socket.AF_INET, ("127.0.0.1", 0)) else "::1"


def _sources_towards(name: str) -> Iterator[str]:
    """The addresses that packets to a host would be sent from; the kernel is asked for the routes, nothing is sent."""
    for family, address in _lookup(name):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], 9, *address[2:]))  # any port but 0
            yield str(probe.getsockname()[0])


def _can_listen(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
