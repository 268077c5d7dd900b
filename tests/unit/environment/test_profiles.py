"""Network profiles, on trees like those the kernel shows under /sys/class/infiniband."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclguard.environment.setup import Port, check_harm, choose_profile, read_ports
from ncclguard.environment.versions import Versions

_NEW = Versions(torch="2.13.0", nccl="2.29.7", nccl_source="test")
_OLD = Versions(torch="2.2.0", nccl="2.19.3", nccl_source="test")
_V2_IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0002"


def make_port(
    root: Path, device: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand", rate: str = "400 Gb/sec (4X NDR)"
) -> Path:
    """A port as the kernel shows it."""
    folder = root / device / "ports" / "1"
    (folder / "gid_attrs" / "types").mkdir(parents=True)
    (folder / "gid_attrs" / "ndevs").mkdir()
    (folder / "gids").mkdir()
    values = {"state": state, "phys_state": "5: LinkUp", "link_layer": layer, "rate": rate}
    for name, value in values.items():
        (folder / name).write_text(value + "\n")
    return folder


def add_gid(folder: Path, index: int, kind: str, value: str) -> None:
    """An entry of the port's table of addresses."""
    (folder / "gids" / str(index)).write_text(value + "\n")
    (folder / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


def settings(ports: tuple[Port, ...], name: str = "auto", versions: Versions = _NEW) -> tuple[str, dict[str, str]]:
    """The profile's name and what it sets."""
    profile = choose_profile(name, ports, versions)
    return profile.name, {variable: value for variable, value, _ in profile.settings}


def test_without_rdma_hardware_it_is_ethernet(tmp_path: Path) -> None:
    """No such folder, and an empty one."""
    assert settings(read_ports(tmp_path / "absent"))[0] == "ethernet"
    name, values = settings(read_ports(tmp_path))
    assert name == "ethernet" and values == {"NCCL_IB_DISABLE": "0", "NCCL_BUFFSIZE": "8388608"}


def test_active_infiniband_ports_are_named_exactly(tmp_path: Path) -> None:
    """Two compute ports, one that is down, a slower one for storage and a RoCE one for management."""
    make_port(tmp_path, "mlx5_0")
    make_port(tmp_path, "mlx5_1")
    make_port(tmp_path, "mlx5_2", state="1: DOWN")
    make_port(tmp_path, "mlx5_3", rate="100 Gb/sec (4X EDR)")
    make_port(tmp_path, "mlx5_4", layer="Ethernet", rate="25 Gb/sec")
    name, values = settings(read_ports(tmp_path))
    assert name == "infiniband"
    assert values == {
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_RETRY_CNT": "7",
    }


def test_ports_that_are_down_do_not_make_a_profile(tmp_path: Path) -> None:
    """The reason names them."""
    make_port(tmp_path, "mlx5_0", state="2: INIT")
    profile = choose_profile("auto", read_ports(tmp_path), _NEW)
    assert profile.name == "ethernet" and "mlx5_0:1 INIT" in profile.reason


def test_an_adapter_that_nccl_cannot_use_does_not_make_a_profile(tmp_path: Path) -> None:
    """AWS EFA has the link layer "Unspecified"; a plug-in of its own drives it."""
    make_port(tmp_path, "efa_0", layer="Unspecified")
    assert settings(read_ports(tmp_path))[0] == "ethernet"


@pytest.mark.parametrize(("versions", "expected"), [(_NEW, None), (_OLD, "3")])
def test_roce_gets_an_address_index_where_nccl_does_not_find_it(
    tmp_path: Path, versions: Versions, expected: str | None
) -> None:
    """Since NCCL 2.21 it looks for the RoCE v2 address by itself; before it took index 0."""
    for device in ("mlx5_0", "mlx5_1"):
        folder = make_port(tmp_path, device, layer="Ethernet", rate="200 Gb/sec")
        add_gid(folder, 0, "IB/RoCE v1", "fe80:0000:0000:0000:0000:0000:0000:0001")
        add_gid(folder, 1, "RoCE v2", "fe80:0000:0000:0000:0000:0000:0000:0001")
        add_gid(folder, 2, "IB/RoCE v1", _V2_IPV4)
        add_gid(folder, 3, "RoCE v2", _V2_IPV4)
        add_gid(folder, 4, "RoCE v2", "0000:0000:0000:0000:0000:0000:0000:0000")
    name, values = settings(read_ports(tmp_path), versions=versions)
    assert name == "roce"
    assert values["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert values.get("NCCL_IB_GID_INDEX") == expected


def test_ports_without_a_common_address_index_are_said(tmp_path: Path) -> None:
    """One index for all is what NCCL takes."""
    add_gid(make_port(tmp_path, "mlx5_0", layer="Ethernet"), 3, "RoCE v2", _V2_IPV4)
    add_gid(make_port(tmp_path, "mlx5_1", layer="Ethernet"), 5, "RoCE v2", _V2_IPV4)
    profile = choose_profile("auto", read_ports(tmp_path), _OLD)
    assert profile.trouble is not None and "same index" in profile.trouble


def test_ethernet_by_name_leaves_rdma_hardware_aside(tmp_path: Path) -> None:
    """Without that NCCL would use it all the same."""
    make_port(tmp_path, "mlx5_0")
    assert settings(read_ports(tmp_path), "ethernet")[1]["NCCL_IB_DISABLE"] == "1"


def test_a_profile_by_name_without_its_hardware_is_said() -> None:
    """A login node may lack what the compute nodes have."""
    profile = choose_profile("infiniband", (), _NEW)
    assert profile.trouble is not None
    assert "NCCL_IB_HCA" not in {name for name, _, _ in profile.settings}


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({"NCCL_IB_DISABLE": "1"}, 1),
        ({"NCCL_IB_HCA": "mlx4"}, 1),
        ({"NCCL_IB_HCA": "=mlx5_0"}, 0),
        ({"NCCL_IB_HCA": "=mlx5_0:2"}, 1),
        ({"NCCL_IB_HCA": "mlx5"}, 0),
        ({"NCCL_IB_HCA": "^mlx5"}, 1),
        ({}, 0),
    ],
)
def test_what_the_user_set_is_compared_with_the_hardware(tmp_path: Path, environ: dict[str, str], count: int) -> None:
    """Adapters that are not there, and ones that are left unused."""
    make_port(tmp_path, "mlx5_0")
    assert len(check_harm(environ, read_ports(tmp_path))) == count
