"""The network of this host as the kernel shows it, and the interface and address that the job's traffic should use.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import BaseModel, WrapValidator

from ncclguard_explain.host import lookup, read_file, resolve, wait_for
from ncclguard_explain.language import Message, joined, told, tr

#: A text of a pydantic model that stays a message, where pydantic would make plain text of it.
Prose = Annotated[str, WrapValidator(lambda value, check: value if isinstance(value, Message) else check(value))]

# ---------------------------------------------------------------------------------------------------- interfaces

#: Kinds that are taken only when nothing else reaches the master: they usually lead to containers, virtual machines
#: or a VPN, not to the other hosts of the job.
AVOIDED_KINDS = frozenset(
    {"bridge", "openvswitch", "veth", "tun", "dummy", "ifb", "wireguard", "vxlan", "geneve", "gre", "gretap", "ipip"}
    | {"sit", "ip6tnl", "ip6gre", "ppp", "nlmon", "vcan", "netdevsim"}
)
# Kinds by name, for hosts where neither `ip` nor sysfs tells the kind.
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
        return self.kind == "loopback"

    @property
    def usable(self) -> bool:
        """Return whether it is up with a carrier and has an address that other hosts can be given."""
        return self.up and self.running and bool(self.global_addresses)

    @property
    def avoided(self) -> bool:
        """Return whether its kind is one that is taken only when there is no other way."""
        return self.kind in AVOIDED_KINDS

    @property
    def global_addresses(self) -> tuple[str, ...]:
        """The addresses of the link without loopback and link-local ones."""
        parsed = ((text, ipaddress.ip_address(text)) for text in self.addresses)
        return tuple(text for text, address in parsed if not address.is_loopback and not address.is_link_local)

    def address_of(self, family: int) -> str | None:
        """Return the first address of ``socket.AF_INET`` or ``AF_INET6`` that other hosts can be given, else None."""
        for text in self.global_addresses:
            if family_of(text) == family:
                return text
        return None

    def describe(self) -> Message:
        """Describe kind and state in a few words."""
        state = (
            tr("up", "link") if self.up and self.running else tr("up, no carrier") if self.up else tr("down", "link")
        )
        return joined(", ", (self.kind, state))


def family_of(address: str) -> int:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def find_ip() -> str | None:
    """Return the path of the ``ip`` command, also where a user's PATH does not have the administration folders."""
    return shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin")


def run_ip(program: str, *arguments: str) -> list[dict[str, Any]] | None:
    """Return the objects that ``ip -json`` prints; None when it failed, as for an address without a route."""
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
    """Return the kind that a name suggests; "ethernet" when it suggests none."""
    for pattern, kind in _KIND_BY_NAME:
        if re.fullmatch(pattern, name):
            return kind
    return "ethernet"


def link_from_json(entry: dict[str, Any]) -> Link:
    """Make a link from one object of ``ip -json -details address show``."""
    flags = set(entry.get("flags", ()))
    name = str(entry["ifname"])
    info = (entry.get("linkinfo") or {}).get("info_kind")
    kind = str(info) if info else {"loopback": "loopback", "infiniband": "infiniband"}.get(entry.get("link_type", ""))
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


def links_from_psutil(sysfs: Path = Path("/sys/class/net")) -> tuple[Link, ...]:
    """Return the interfaces without the ``ip`` command, from psutil and sysfs."""
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
    """Return the interfaces of this host's network namespace, by ``ip`` where it is there, else by psutil."""
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


def routes_from_json(entry: dict[str, Any]) -> list[Route]:
    """Return the routes in one object of ``ip -json route``; several for one with several next hops."""
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
        return next(iter(self._ask("route", "get", address)), None)

    def matching(self, address: str) -> tuple[Route, ...]:
        """Return the answer of ``ip -json route show match``."""
        version = "-6" if family_of(address) == socket.AF_INET6 else "-4"
        return _by_precedence(self._ask(version, "route", "show", "match", address))

    def defaults(self) -> tuple[Route, ...]:
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
        """Return the most specific route, then the one of lowest metric; ``local`` for an address of this host."""
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


Routes = IpRoutes | ProcRoutes


def read_routes(links: Sequence[Link]) -> Routes:
    """Return the routes of this host, by ``ip`` where it can print JSON, else from ``/proc/net``."""
    program = find_ip()
    if program is not None and run_ip(program, "link", "show", "lo") is not None:
        return IpRoutes(program)
    return ProcRoutes(links)


# --------------------------------------------------------------------------------------------- names and answers

#: A value of RES_OPTIONS, which the C library's resolver reads: a lost answer costs 1 s, not 5 and more.
RES_OPTIONS = "timeout:1 attempts:1"
# The errors by which a reachable host answers for a port on which nobody listens.
_ANSWERED = frozenset({0, errno.ECONNREFUSED})


def name_seconds(address: str, seconds: float = 5.0) -> float:
    """Measure how long the system's resolver takes for an address's name, which may not exist; ``seconds`` at most.

    Asked for as torch's TCPStore does it when somebody connects: an IPv4 address as one of IPv6 (``::ffff:10.0.0.1``).

    >>> 0.0 < name_seconds("127.0.0.1") <= 5.0
    True
    """
    mapped = address if ":" in address else f"::ffff:{address}"

    def ask() -> None:
        with contextlib.suppress(OSError):  # the resolver does not know the name, which is an answer too
            socket.getnameinfo((mapped.partition("%")[0], 1, 0, 0), socket.NI_NUMERICSERV)

    started = time.monotonic()
    wait_for(ask, seconds)
    return min(time.monotonic() - started, seconds)


def answers(address: str, port: int, device: str, seconds: float = 1.0) -> bool:
    """Return whether a host answers a TCP connection that is made through one interface; a refusal is an answer too.

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
    """Return the address of this host that peers are given for the job's data.

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
    text = told(
        "GLOO_SOCKET_IFNAME={value} names no interface of this host that is up and has an address: set it to one that "
        "`ip address` shows, or unset it",
        value=",".join(names),
    )
    raise ValueError(text)


def address_towards(host: str = "") -> str:
    """Return the address of this host from which ``host`` or else ``MASTER_ADDR``, or the default route, is reached.

    Unlike `job_address` this looks up no name but the master's: a resolver that does not know the host's own name may
    take many seconds to say so.
    """
    master = next(_sources_towards(host or os.environ.get("MASTER_ADDR", "")), None)
    several_hosts = bool(host) or os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE")
    if master is None or (several_hosts and ipaddress.ip_address(master).is_loopback):
        # On the master's own host its name often stands for a loopback address, which other hosts cannot use.
        return next(_sources_towards(_UNROUTED), master or "127.0.0.1")
    return master


@functools.lru_cache(maxsize=8)
def _address_by_name(name: str, master: str) -> str:
    own = [str(address[0]) for family, address in lookup(name) if _can_listen(family, address)]
    for host in (*own, *_sources_towards(master)):
        if not ipaddress.ip_address(host).is_loopback:
            return host
    return own[0] if own else "127.0.0.1" if _can_listen(socket.AF_INET, ("127.0.0.1", 0)) else "::1"


def _sources_towards(name: str) -> Iterator[str]:
    """The addresses that packets to a host would be sent from; the kernel is asked for the routes, nothing is sent."""
    for family, address in lookup(name):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], 9, *address[2:]))  # any port but 0
            yield str(probe.getsockname()[0])


def is_here(name: str) -> bool:
    return any(_can_listen(family, address) for family, address in lookup(name))


def _can_listen(family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


_DEFAULT_PORT = 29500  # torch/distributed/run.py, DeepSpeed's TORCH_DISTRIBUTED_DEFAULT_PORT


class Job(BaseModel, frozen=True):
    """The job as its launcher describes it; None where it says nothing."""

    launcher: str | None = None
    rank: int | None = None
    world_size: int | None = None
    hosts: int | None = None
    master_addr: str | None = None
    master_port: int = _DEFAULT_PORT

    @property
    def single_host(self) -> bool:
        """Return whether all ranks are known to run on this host."""
        if self.hosts is not None:
            return self.hosts == 1
        return self.master_addr is not None and is_loopback_name(self.master_addr)

    @property
    def is_rank_zero(self) -> bool:
        """Return whether this process speaks for the job (also when no launcher says otherwise)."""
        return self.rank in (None, 0)


def is_loopback_name(address: str) -> bool:
    """Return whether an address means "this host" by itself; 127.0.1.1 does not: Debian gives it to the host's name."""
    return address.lower() in ("localhost", "127.0.0.1", "::1", "[::1]", "localhost.localdomain", "ip6-localhost")


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "").strip()
        if text.isdigit():
            return int(text)
    return None


def _launcher(environ: Mapping[str, str]) -> str | None:
    if "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if "CROSS_SIZE" in environ and "LOCAL_SIZE" in environ:
        return "deepspeed"
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return "mpirun"
    if "SLURM_PROCID" in environ:
        return "srun"
    return None


def _hosts(environ: Mapping[str, str], world_size: int | None) -> int | None:
    if world_size == 1:
        return 1
    nodes = _number(environ, "GROUP_WORLD_SIZE", "CROSS_SIZE")
    if nodes is not None:
        return nodes
    local = _number(environ, "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
    if world_size is not None and local:
        return -(-world_size // local)  # at least: hosts with fewer ranks than this one would be more
    return _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")


def read_job(environ: Mapping[str, str]) -> Job:
    """Return the job that torchrun, DeepSpeed's launcher, mpirun, srun or a hand-written script describes.

    >>> read_job({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}).hosts
    2
    """
    world_size = _number(environ, "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    return Job(
        launcher=_launcher(environ),
        rank=_number(environ, "RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
        world_size=world_size,
        hosts=_hosts(environ, world_size),
        master_addr=environ.get("MASTER_ADDR", "").strip() or None,
        master_port=_number(environ, "MASTER_PORT") or _DEFAULT_PORT,
    )


def launched_ranks(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable by which a launcher says how many ranks it started, and the number; None without a launcher.

    An sbatch script and an salloc shell have SLURM_NTASKS as well, but only a step that srun started has both
    SLURM_PROCID and SLURM_STEP_NUM_TASKS.

    >>> launched_ranks({"WORLD_SIZE": "2"}), launched_ranks({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})
    (('WORLD_SIZE', 2), None)
    """
    names = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", *(["SLURM_STEP_NUM_TASKS"] if "SLURM_PROCID" in environ else [])]
    numbers = [(name, _number(environ, name)) for name in names]
    return next(((name, number) for name, number in numbers if number is not None), None)


# Addresses to which every routed network has a route: Google's public name servers. Nothing is sent to them.
_OUTSIDE = ("8.8.8.8", "2001:4860:4860::8888")


class InterfaceChoice(BaseModel, frozen=True):
    """The interface for the job's traffic, or None with the reason.

    ``address`` is the one that peers are given. ``evidence`` says what decided; ``notes`` hold what a person should
    know about it. ``trouble`` is set when the master cannot be reached the way the environment says, with ``advice``.
    """

    name: str | None
    address: str | None = None
    kind: str | None = None
    evidence: Prose
    notes: tuple[Prose, ...] = ()
    trouble: Prose | None = None
    advice: Prose | None = None

    @property
    def ipv6(self) -> bool:
        return self.address is not None and family_of(self.address) == socket.AF_INET6


# Grades of links, best first.
_PROPER, _VETH, _AVOIDED, _NO_CARRIER, _LAST = range(5)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A link with evidence for it; ``address`` is None for its first one."""

    link: Link
    address: str | None
    evidence: str


class _Chooser:
    """One decision; collects the notes on the way."""

    def __init__(
        self,
        job: Job,
        links: Sequence[Link],
        routes: Routes,
        resolve: Callable[[str], tuple[str, ...]],
        answers: Callable[[str, int, str], bool],
    ) -> None:
        self._job = job
        self._links = {link.name: link for link in links}
        self._routes = routes
        self._resolve = resolve
        self._answers = answers
        self._notes: list[str] = []
        self._trouble: str | None = None
        self._advice: str | None = None
        self._found: list[_Candidate] = []

    def choose(self) -> InterfaceChoice:
        self._check_loopback()
        choice = self._single_host() or self._by_master()
        if choice is not None:
            return choice
        self._look_outside()
        self._look_at_default_routes()
        self._look_for_the_only_one()
        best = min(self._found, key=lambda candidate: self._grade(candidate.link), default=None)
        if best is None:
            return self._nothing()
        self._warn_about(best.link)
        return self._chosen(best.link, best.address, best.evidence)

    def _chosen(self, link: Link, address: str | None, evidence: str) -> InterfaceChoice:
        return InterfaceChoice(
            name=link.name,
            address=address or next(iter(link.global_addresses), None),
            kind=link.kind,
            evidence=evidence,
            notes=tuple(self._notes),
            trouble=self._trouble,
            advice=self._advice,
        )

    def _single_host(self) -> InterfaceChoice | None:
        if not self._job.single_host:
            return None
        for link in self._links.values():
            if link.loopback and link.up and "127.0.0.1" in link.addresses:
                return self._chosen(link, "127.0.0.1", tr("all ranks run on this host"))
        # NCCL skips ::1, so a loopback without 127.0.0.1 is of no use to it.
        self._notes.append(tr("all ranks run on this host, but the loopback interface is down or has no 127.0.0.1"))
        return None

    def _check_loopback(self) -> None:
        """Check the loopback: Linux sends traffic of a host to itself over lo, whichever of its addresses is used."""
        if any(link.loopback and not link.up for link in self._links.values()):
            self._fail(
                tr("the loopback interface is down, so the processes of this host cannot connect to each other"),
                tr("bring it up: ip link set lo up"),
            )

    def _by_master(self) -> InterfaceChoice | None:
        master = self._job.master_addr
        if master is None:
            return None
        if self._job.hosts not in (None, 1) and is_loopback_name(master):
            self._fail(
                tr(
                    "MASTER_ADDR={host} means this host, but the job has {count} hosts",
                    host=master,
                    count=self._job.hosts,
                ),
                tr("set MASTER_ADDR to the name or address of the host of rank 0, as the other hosts see it"),
            )
            return None
        addresses = self._resolve(master)
        if not addresses:
            self._fail(
                tr("MASTER_ADDR={host} does not resolve on this host", host=master),
                tr("use an address, or add the name to the name server or to /etc/hosts on every host"),
            )
            return None
        for address in addresses:
            route = self._routes.to(address)
            if route is None:
                continue
            choice = self._local_master(master, address) if route.local else self._remote_master(master, address, route)
            if choice is not None:
                return choice
        if self._trouble is None and not self._notes:
            self._fail(
                tr("no route to MASTER_ADDR={host} ({some})", host=master, some=", ".join(addresses)),
                tr("check addresses, netmask and default route of this host: ip address; ip route get <master>"),
            )
        return None

    def _local_master(self, master: str, address: str) -> InterfaceChoice | None:
        for link in self._links.values():
            if address not in link.addresses or link.loopback:
                continue
            evidence = tr("MASTER_ADDR={host} is an address of this interface", host=master)
            if self._avoided(link) and address != master.strip("[]"):
                # The name of a host may lead to docker0 on that host; the other hosts resolve it to something else.
                text = tr(
                    "MASTER_ADDR={host} resolves to {address} here, which is on {name}",
                    host=master,
                    address=address,
                    name=link.name,
                )
                self._notes.append(text)
                self._found.append(_Candidate(link, address, evidence))
                return None
            self._warn_about(link)
            return self._chosen(link, address, evidence)
        if not self._job.single_host:
            text = tr(
                "MASTER_ADDR={host} resolves to {address} here, which other hosts cannot reach; where they resolve it "
                "to another address the job works, else give the host's real address",
                host=master,
                address=address,
            )
            self._notes.append(text)
        return None

    def _remote_master(self, master: str, address: str, route: Route) -> InterfaceChoice | None:
        link = self._links.get(route.device)
        if link is None:
            return None
        evidence = tr("the route to MASTER_ADDR={host} ({address}) goes over it", host=master, address=address)
        grade = self._grade(link)
        if grade == _PROPER:
            return self._chosen(link, route.source or link.address_of(family_of(address)), evidence)
        # The link is a bridge, a tunnel or dead: another one replaces it only if the master answers there.
        for other in self._routes.matching(address):
            candidate = self._links.get(other.device)
            if candidate is None or self._grade(candidate) >= grade:
                continue
            if self._answers(address, self._job.master_port, candidate.name):
                text = tr(
                    "the kernel's route to {address} goes over {name} ({state}); the master also answers over {other}",
                    address=address,
                    name=link.name,
                    state=link.describe(),
                    other=candidate.name,
                )
                self._notes.append(text)
                return self._chosen(
                    candidate,
                    candidate.address_of(family_of(address)),
                    tr("MASTER_ADDR={host} answers through it", host=master),
                )
        self._warn_about(link)
        return self._chosen(link, route.source or link.address_of(family_of(address)), evidence)

    def _look_outside(self) -> None:
        for address in _OUTSIDE:
            route = self._routes.to(address)
            link = self._links.get(route.device) if route is not None else None
            if route is not None and link is not None and not route.local:
                self._found.append(
                    _Candidate(link, route.source, tr("the route to {address} goes over it", address=address))
                )

    def _look_at_default_routes(self) -> None:
        for route in self._routes.defaults():
            link = self._links.get(route.device)
            if link is not None:
                evidence = tr("a default route (metric {number}) goes over it", number=route.metric)
                self._found.append(_Candidate(link, route.source, evidence))

    def _look_for_the_only_one(self) -> None:
        usable = [link for link in self._links.values() if not link.loopback and link.usable]
        for grade in (_PROPER, _VETH, _AVOIDED):
            alike = [link for link in usable if self._grade(link) == grade]
            if len(alike) == 1:
                alone = tr("the only interface that is up")
                proper = tr("the only interface that is up and no bridge, tunnel or veth")
                self._found.append(_Candidate(alike[0], None, alone if len(usable) == 1 else proper))
            if alike:
                return
        for link in self._links.values():
            if link.loopback and link.up and "127.0.0.1" in link.addresses:
                self._found.append(_Candidate(link, "127.0.0.1", tr("no other interface is up")))

    def _nothing(self) -> InterfaceChoice:
        usable = [link for link in self._links.values() if not link.loopback and link.usable]
        named = joined(", ", (tr("{name} ({state})", name=link.name, state=link.describe()) for link in usable))
        names = named or tr("none", "doctor")
        return InterfaceChoice(
            name=None,
            evidence=tr("nothing tells which interface reaches the other hosts; candidates: {names}", names=names),
            notes=tuple(self._notes),
            trouble=self._trouble or tr("no interface could be chosen; candidates: {names}", names=names),
            advice=self._advice or tr("set MASTER_ADDR before, or NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME by hand"),
        )

    def _grade(self, link: Link) -> int:
        """Grade a link by kind and state; a lower grade is taken before a higher one, whatever the evidence."""
        if not link.usable:
            return _NO_CARRIER if link.global_addresses else _LAST
        if link.loopback:
            return _LAST
        if not self._avoided(link):
            return _PROPER
        # In a container the interface to the outside is a veth; a bridge or a tunnel beside it leads further inside.
        return _VETH if link.kind == "veth" else _AVOIDED

    def _avoided(self, link: Link) -> bool:
        """Return whether a link is the last choice. A bridge with a wire in it carries the host's own address."""
        if not link.avoided:
            return False
        members = (other for other in self._links.values() if other.master == link.name)
        return not (link.kind in ("bridge", "openvswitch") and any(not member.avoided for member in members))

    def _fail(self, trouble: str, advice: str) -> None:
        if self._trouble is None:
            self._trouble, self._advice = trouble, advice

    def _warn_about(self, link: Link) -> None:
        if not link.running:
            self._notes.append(tr("{name} has no carrier", name=link.name))
        better = [other.name for other in self._links.values() if self._grade(other) < self._grade(link)]
        if self._avoided(link) and better:
            text = tr(
                "{name} is a {kind}; {some} did not lead to the master",
                name=link.name,
                kind=link.kind,
                some=", ".join(better),
            )
            self._notes.append(text)


def choose_interface(
    job: Job,
    links: Sequence[Link] | None = None,
    routes: Routes | None = None,
    *,
    resolve: Callable[[str], tuple[str, ...]] = resolve,
    answers: Callable[[str, int, str], bool] = answers,
) -> InterfaceChoice:
    """Choose the interface over which this host reaches the job's master.

    Sends nothing, except when the kernel's route to the master goes over a bridge, a tunnel or a dead link while
    another route exists: then one connection to the master's port is tried through each, at most a second long.

    >>> choose_interface(Job(hosts=1)).name
    'lo'
    """
    links = read_links() if links is None else links
    routes = read_routes(links) if routes is None else routes
    return _Chooser(job, links, routes, resolve, answers).choose()
