"""The network interfaces of this host: what they are, whether they run, which addresses they carry."""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

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
    kind = re.search(r"^DEVTYPE=(\w+)$", _read(folder / "uevent"), re.MULTILINE)
    if kind is not None:
        return kind.group(1)
    hardware = _read(folder / "type").strip()  # linux/if_arp.h
    if hardware == "772":
        return "loopback"
    if hardware == "32":
        return "infiniband"
    return kind_by_name(name)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent on this kernel, or not ours to read: then nothing is known from it
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
        operational = _read(sysfs / name / "operstate").strip()
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
