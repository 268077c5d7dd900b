"""What to set for which network, chosen from the hardware or by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.infiniband import Gid, Port
from ncclguard.environment.versions import Versions, within

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
