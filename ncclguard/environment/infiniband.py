"""InfiniBand and RoCE ports, as the kernel shows them under ``/sys/class/infiniband``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # an unused entry of a GID table cannot be read
        return ""


def _gids(folder: Path) -> tuple[Gid, ...]:
    found = []
    entries = (folder / "gids").glob("*") if (folder / "gids").is_dir() else ()
    for entry in sorted(entries, key=lambda path: int(path.name)):
        value = _read(entry)
        if value and value.strip("0:"):
            found.append(Gid(int(entry.name), _read(folder / "gid_attrs" / "types" / entry.name), value))
    return tuple(found)


def _port(device: str, folder: Path) -> Port:
    rate = re.match(r"[\d.]+", _read(folder / "rate"))
    return Port(
        device=device,
        number=int(folder.name),
        state=_read(folder / "state").partition(":")[2].strip(),
        physical_state=_read(folder / "phys_state").partition(":")[2].strip(),
        layer=_read(folder / "link_layer"),
        rate=float(rate.group()) if rate else None,
        netdev=_read(folder / "gid_attrs" / "ndevs" / "0") or None,
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
