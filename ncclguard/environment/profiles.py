"""What to set for which network (InfiniBand, RoCE, Ethernet), by the ports that the kernel shows or by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.network import read_file
from ncclguard.environment.versions import Versions, within

SYSFS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Gid:
    """One address in a port's table: its index, type ("RoCE v2", "IB/RoCE v1", ...) and value."""

    index: int
    kind: str
    value: str

    @property
    def carries_ipv4(self) -> bool:
        """Whether it is an IPv4-mapped address, which a routed network needs."""
        return self.value.startswith("0000:0000:0000:0000:0000:ffff:")


@dataclass(frozen=True, slots=True)
class Port:
    """One port. ``rate`` is in Gbit/s; ``layer`` is "InfiniBand" or "Ethernet" (RoCE, iWARP), else unusable by NCCL."""

    device: str
    number: int
    state: str
    physical_state: str
    layer: str
    rate: float | None
    netdev: str | None = None
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        """Whether the subnet manager (or the Ethernet link) has brought it up."""
        return self.state == "ACTIVE"

    @property
    def roce(self) -> bool:
        """Whether it speaks Ethernet."""
        return self.layer == "Ethernet"

    @property
    def name(self) -> str:
        """``device:port``, as ``NCCL_IB_HCA`` takes it."""
        return f"{self.device}:{self.number}"


def _gids(folder: Path) -> tuple[Gid, ...]:
    found = []
    entries = (folder / "gids").glob("*") if (folder / "gids").is_dir() else ()
    for entry in sorted(entries, key=lambda path: int(path.name)):
        value = read_file(entry).strip()  # empty for an unused entry, which cannot be read
        if value and value.strip("0:"):
            found.append(Gid(int(entry.name), read_file(folder / "gid_attrs" / "types" / entry.name).strip(), value))
    return tuple(found)


def _port(device: str, folder: Path) -> Port:
    rate = re.match(r"[\d.]+", read_file(folder / "rate").strip())
    return Port(
        device=device,
        number=int(folder.name),
        state=read_file(folder / "state").strip().partition(":")[2].strip(),
        physical_state=read_file(folder / "phys_state").strip().partition(":")[2].strip(),
        layer=read_file(folder / "link_layer").strip(),
        rate=float(rate.group()) if rate else None,
        netdev=read_file(folder / "gid_attrs" / "ndevs" / "0").strip() or None,
        gids=_gids(folder),
    )


def read_ports(sysfs: Path = SYSFS) -> tuple[Port, ...]:
    """All ports of all adapters of this host, by name; none where there is no RDMA hardware."""
    if not sysfs.is_dir():
        return ()
    return tuple(
        _port(device.name, folder)
        for device in sorted(sysfs.iterdir())
        for folder in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name))
    )


ProfileName = Literal["auto", "infiniband", "roce", "ethernet"]
PROFILE_NAMES: tuple[str, ...] = get_args(ProfileName)


class Profile(BaseModel):
    """A network profile: its name, why it was taken, and the (variable, value, reason) it asks for."""

    model_config = ConfigDict(frozen=True)

    name: str
    reason: str
    ports: tuple[str, ...] = ()
    settings: tuple[tuple[str, str, str], ...] = ()
    trouble: str | None = None


def compute_ports(ports: Sequence[Port], *, roce: bool) -> tuple[Port, ...]:
    """The active ports of one kind that carry the job: the fastest; slower ones are for storage or management."""
    active = [port for port in ports if port.active and port.layer == ("Ethernet" if roce else "InfiniBand")]
    fastest = max((port.rate or 0.0 for port in active), default=0.0)
    return tuple(port for port in active if (port.rate or 0.0) == fastest)


def _gid_for_roce(ports: Sequence[Port]) -> Gid | None:
    """The RoCE v2 address with an IPv4 in it that all ports have at the same index; NCCL takes one index for all."""
    common: set[int] | None = None
    for port in ports:
        indices = {gid.index for gid in port.gids if gid.kind == "RoCE v2" and gid.carries_ipv4}
        common = indices if common is None else common & indices
    if not common:
        return None
    return next(gid for gid in ports[0].gids if gid.index == min(common))


def _hca_settings(ports: Sequence[Port]) -> list[tuple[str, str, str]]:
    settings = [
        ("NCCL_IB_DISABLE", "0", "RDMA hardware is there and is to be used"),
        ("NCCL_IB_TIMEOUT", "22", "about 2 minutes of tries, so that a switch that reroutes does not end the job"),
        ("NCCL_IB_RETRY_CNT", "7", "the most tries the hardware takes"),
    ]
    if ports:
        names = ",".join(port.name for port in ports)
        settings.insert(1, ("NCCL_IB_HCA", f"={names}", "the active ports, by exact name"))
    return settings


def _infiniband(ports: Sequence[Port], reason: str) -> Profile:
    used = compute_ports(ports, roce=False)
    trouble = None if used else "profile infiniband, but no InfiniBand port is active on this host"
    names = tuple(port.name for port in used)
    return Profile(name="infiniband", reason=reason, ports=names, settings=tuple(_hca_settings(used)), trouble=trouble)


def _roce(ports: Sequence[Port], reason: str, versions: Versions) -> Profile:
    used = compute_ports(ports, roce=True)
    settings = _hca_settings(used)
    trouble = None if used else "profile roce, but no RoCE port is active on this host"
    nccl = versions.nccl_for_names
    if used and nccl is not None and not within(nccl, "2.21", None):
        # NCCL before 2.21 takes index 0, a RoCE v1 address that no router forwards; later ones look for a v2 address.
        gid = _gid_for_roce(used)
        if gid is None:
            trouble = "no RoCE v2 address with an IPv4 in it is at the same index of all ports"
        else:
            settings.append(("NCCL_IB_GID_INDEX", str(gid.index), f"the {gid.kind} address; NCCL {nccl} takes index 0"))
    return Profile(
        name="roce",
        reason=reason,
        ports=tuple(port.name for port in used),
        settings=tuple(settings),
        trouble=trouble,
    )


def _ethernet(ports: Sequence[Port], reason: str, *, named: bool) -> Profile:
    unused = [port.name for port in ports if port.active and port.layer in ("InfiniBand", "Ethernet")]
    disable = ("1", f"profile ethernet leaves {', '.join(unused)} aside") if named and unused else None
    value, why = disable or ("0", "the default: RDMA is used where it is there")
    return Profile(
        name="ethernet",
        reason=reason,
        settings=(
            ("NCCL_IB_DISABLE", value, why),
            ("NCCL_BUFFSIZE", "8388608", "8 MiB a channel keep a TCP connection with latency full"),
        ),
    )


def choose_profile(name: str, ports: Sequence[Port], versions: Versions) -> Profile:
    """The profile of a name, or for "auto" the one that the active ports ask for.

    Raises ValueError for a name that is not one of ``PROFILE_NAMES``.
    """
    if name not in PROFILE_NAMES:
        raise ValueError(f"profile {name!r} does not exist; it is one of {', '.join(PROFILE_NAMES)}")
    if name == "infiniband":
        return _infiniband(ports, "asked for")
    if name == "roce":
        return _roce(ports, "asked for", versions)
    if name == "ethernet":
        return _ethernet(ports, "asked for", named=True)
    fast = compute_ports(ports, roce=False)
    if fast:
        return _infiniband(ports, f"{len(fast)} active InfiniBand ports")
    fast = compute_ports(ports, roce=True)
    if fast:
        return _roce(ports, f"{len(fast)} active RoCE ports", versions)
    inactive = ", ".join(f"{port.name} {port.state or 'unknown'} {port.layer}" for port in ports)
    reason = f"no usable RDMA port ({inactive})" if inactive else "no RDMA hardware"
    return _ethernet(ports, reason, named=False)
