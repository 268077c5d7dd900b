"""Which interface is taken, on hosts that network namespaces cannot imitate; faults/ has the real ones."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclguard.environment.network import (
    IpRoutes,
    Job,
    Link,
    ProcRoutes,
    Route,
    answers,
    choose_interface,
    kind_by_name,
    link_from_json,
    links_from_psutil,
    read_job,
    read_links,
    read_routes,
    routes_from_json,
)

LO = Link("lo", "loopback", True, True, ("127.0.0.1", "::1"))


def link(
    name: str, kind: str, *addresses: str, up: bool = True, running: bool = True, master: str | None = None
) -> Link:
    """A link that is up."""
    return Link(name, kind, up, running, addresses, master)


class Table:
    """Routes given by hand: (prefix of the address's text, route)."""

    def __init__(self, *routes: tuple[str, Route]) -> None:
        self.routes = routes

    def to(self, address: str) -> Route | None:
        found = self.matching(address)
        return found[0] if found else None

    def matching(self, address: str) -> tuple[Route, ...]:
        return tuple(route for prefix, route in self.routes if address.startswith(prefix))

    def defaults(self) -> tuple[Route, ...]:
        return tuple(route for prefix, route in self.routes if not prefix)


def resolved(*addresses: str) -> Callable[[str], tuple[str, ...]]:
    """A resolver with one answer."""
    return lambda name: addresses


def never(address: str, port: int, device: str) -> bool:
    """A network in which nobody answers."""
    return False


def test_a_bond_is_taken_and_its_ports_are_not() -> None:
    """eth0 and eth1 are ports of bond0, which has the address."""
    links = (
        LO,
        link("eth0", "ethernet", master="bond0"),
        link("eth1", "ethernet", master="bond0"),
        link("bond0", "bond", "10.0.0.2"),
    )
    assert choose_interface(Job(), links, Table(("", Route("bond0")))).name == "bond0"
    assert choose_interface(Job(), links, Table()).name == "bond0"


def test_a_vlan_is_taken_by_its_own_name() -> None:
    """The master is on VLAN 100 of eth0."""
    links = (LO, link("eth0", "ethernet", "192.168.0.2"), link("eth0.100", "vlan", "10.0.0.2"))
    routes = Table(("10.0.0.", Route("eth0.100", "10.0.0.2")), ("", Route("eth0")))
    choice = choose_interface(Job(master_addr="10.0.0.1"), links, routes, resolve=resolved("10.0.0.1"))
    assert (choice.name, choice.address) == ("eth0.100", "10.0.0.2")


def test_a_bridge_with_a_card_in_it_counts_as_that_card() -> None:
    """A host of virtual machines whose address is on br0, beside a storage network without a default route."""
    links = (
        LO,
        link("eno1", "ethernet", master="br0"),
        link("br0", "bridge", "10.0.0.2"),
        link("eno2", "ethernet", "192.168.9.2"),
    )
    assert choose_interface(Job(), links, Table(("", Route("br0")))).name == "br0"


def test_a_full_tunnel_vpn_does_not_hide_the_card() -> None:
    """All routes go over tun0; the card has none, but it is the only one."""
    links = (LO, link("eth0", "ethernet", "10.0.0.2"), link("tun0", "tun", "10.8.0.2"))
    assert choose_interface(Job(), links, Table(("", Route("tun0")))).name == "eth0"


def test_a_tunnel_that_is_the_only_way_to_the_master_is_taken_and_said() -> None:
    """The card has a route too, but the master does not answer through it."""
    links = (LO, link("eth0", "ethernet", "192.168.0.2"), link("tun0", "tun", "10.8.0.2"))
    routes = Table(("10.8.", Route("tun0", "10.8.0.2")), ("", Route("eth0")))
    choice = choose_interface(Job(master_addr="10.8.0.1"), links, routes, resolve=resolved("10.8.0.1"), answers=never)
    assert choice.name == "tun0"
    assert any("did not lead to the master" in note for note in choice.notes)


def test_in_a_container_the_veth_to_the_outside_is_taken_and_an_inner_bridge_is_not() -> None:
    """Docker in a pod: eth0 is a veth, docker0 a bridge, and both are the only ones."""
    links = (LO, link("docker0", "bridge", "172.17.0.1"), link("eth0", "veth", "10.1.2.3"))
    assert choose_interface(Job(), links, Table(("", Route("docker0")), ("", Route("eth0")))).name == "eth0"
    assert choose_interface(Job(), links, Table()).name == "eth0"


def test_two_interfaces_that_nothing_tells_apart_are_left_to_the_user() -> None:
    """No master, no route: no guess."""
    links = (LO, link("eth0", "ethernet", "10.0.0.2"), link("eth1", "ethernet", "10.1.0.2"))
    choice = choose_interface(Job(), links, Table())
    assert choice.name is None
    assert choice.trouble is not None and "eth0" in choice.trouble and "eth1" in choice.trouble
    assert choice.advice is not None


def test_a_host_without_a_network_uses_the_loopback() -> None:
    """Nothing else is up."""
    links = (LO, link("eth0", "ethernet", up=False, running=False))
    assert choose_interface(Job(), links, Table()).name == "lo"


@pytest.mark.parametrize(
    ("job", "resolution", "text"),
    [
        (Job(master_addr="localhost", hosts=2), ("127.0.0.1",), "the job has 2 hosts"),
        (Job(master_addr="nosuchhost", hosts=2), (), "does not resolve"),
        (Job(master_addr="172.16.0.1", hosts=2), ("172.16.0.1",), "no route to MASTER_ADDR"),
    ],
)
def test_a_master_that_cannot_be_reached_is_said(job: Job, resolution: tuple[str, ...], text: str) -> None:
    """And the interface is still chosen from the rest of the evidence."""
    links = (LO, link("eth0", "ethernet", "10.0.0.2"))
    routes = Table(("8.8.", Route("eth0")))
    choice = choose_interface(job, links, routes, resolve=resolved(*resolution))
    assert choice.trouble is not None and text in choice.trouble
    assert choice.name == "eth0"


def test_a_master_name_that_is_loopback_on_its_own_host_is_no_error() -> None:
    """Debian gives 127.0.1.1 to the host's own name; the other hosts resolve it otherwise."""
    links = (LO, link("eth0", "ethernet", "10.0.0.2"))
    local = Table(("127.", Route("lo", local=True)), ("", Route("eth0")))
    choice = choose_interface(Job(master_addr="node1", hosts=2), links, local, resolve=resolved("127.0.1.1"))
    assert choice.name == "eth0" and choice.trouble is None
    assert any("127.0.1.1" in note for note in choice.notes)


def test_the_ipv6_address_is_used_where_the_ipv4_one_of_the_master_has_no_route() -> None:
    """A master with both kinds of address, a host with one."""
    links = (LO, link("eth0", "ethernet", "fd00::2", "fe80::1"))
    routes = Table(("fd00", Route("eth0", "fd00::2")))
    choice = choose_interface(Job(master_addr="n"), links, routes, resolve=resolved("10.0.0.1", "fd00::1"))
    assert choice.name == "eth0" and choice.ipv6


@pytest.mark.parametrize(
    ("environ", "hosts", "single"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}, 1, True),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2, False),
        ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "8"}, 2, False),
        ({"WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_SIZE": "2"}, 2, False),
        ({"SLURM_NNODES": "4", "SLURM_NTASKS": "32", "SLURM_PROCID": "0"}, 4, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1, True),
        ({"MASTER_ADDR": "localhost"}, None, True),
        ({"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "8"}, None, False),
        ({}, None, False),
    ],
)
def test_the_launcher_tells_on_how_many_hosts_the_job_runs(
    environ: dict[str, str], hosts: int | None, single: bool
) -> None:
    """torchrun, DeepSpeed, Slurm, Open MPI, by hand."""
    job = read_job(environ)
    assert (job.hosts, job.single_host) == (hosts, single)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("docker0", "bridge"),
        ("br-0a1b2c3d4e5f", "bridge"),
        ("virbr0", "bridge"),
        ("veth1234abc", "veth"),
        ("cali0a1b2c", "veth"),
        ("tun0", "tun"),
        ("bond0", "bond"),
        ("eth0.100", "vlan"),
        ("enp3s0f1", "ethernet"),
        ("ib0", "infiniband"),
        ("bridge-to-nowhere", "ethernet"),
    ],
)
def test_kinds_by_name(name: str, kind: str) -> None:
    """Where neither ip nor sysfs tells."""
    assert kind_by_name(name) == kind


@pytest.mark.processes
def test_ip_and_psutil_see_the_same_interfaces_on_this_host() -> None:
    """Names, addresses and states of the real host."""
    for first, second in zip(
        read_links(), sorted(links_from_psutil(), key=lambda entry: order(entry.name)), strict=True
    ):
        assert (first.name, first.up, first.running, first.addresses) == (
            second.name,
            second.up,
            second.running,
            second.addresses,
        )


def order(name: str) -> int:
    """The position in which ip prints an interface."""
    return int(Path(f"/sys/class/net/{name}/ifindex").read_text())


@pytest.mark.processes
def test_ip_and_proc_see_the_same_default_routes_on_this_host() -> None:
    """Only the main table counts here."""
    links = read_links()
    by_ip = read_routes(links)
    assert isinstance(by_ip, IpRoutes)
    assert [entry.device for entry in by_ip.defaults()] == [entry.device for entry in ProcRoutes(links).defaults()]


def test_json_of_ip_for_a_bond_its_port_and_a_vlan() -> None:
    """As iproute2 6.1 prints them with -details."""
    entries = json.loads(
        """[{"ifname": "eth0", "flags": ["BROADCAST", "SLAVE", "UP", "LOWER_UP"], "master": "bond0",
             "operstate": "UP", "link_type": "ether", "linkinfo": {"info_slave_kind": "bond"}, "addr_info": []},
            {"ifname": "bond0", "flags": ["BROADCAST", "MASTER", "UP", "LOWER_UP"], "operstate": "UP", "mtu": 9000,
             "link_type": "ether", "linkinfo": {"info_kind": "bond"},
             "addr_info": [{"family": "inet6", "local": "fe80::1", "scope": "link"},
                           {"family": "inet6", "local": "fd00::1", "scope": "global"},
                           {"family": "inet", "local": "10.0.0.1", "scope": "global"}]},
            {"ifname": "bond0.7", "link": "bond0", "flags": ["NO-CARRIER", "UP"], "operstate": "LOWERLAYERDOWN",
             "link_type": "ether", "linkinfo": {"info_kind": "vlan"}, "addr_info": []},
            {"ifname": "ib0", "flags": ["UP", "LOWER_UP"], "operstate": "UP", "link_type": "infiniband"}]"""
    )
    port, bond, vlan, ib = map(link_from_json, entries)
    assert (port.kind, port.master, port.usable) == ("ethernet", "bond0", False)
    assert (bond.kind, bond.mtu, bond.addresses) == ("bond", 9000, ("10.0.0.1", "fd00::1", "fe80::1"))
    assert bond.usable and not bond.avoided
    assert (vlan.kind, vlan.up, vlan.running) == ("vlan", True, False)
    assert ib.kind == "infiniband"


def test_routes_with_several_next_hops_and_refused_ones() -> None:
    """A route over two cards is two routes; an unreachable one is none."""
    two = {"dst": "10.0.0.0/8", "nexthops": [{"gateway": "10.1.0.1", "dev": "eth0"}, {"dev": "eth1"}]}
    assert [entry.device for entry in routes_from_json(two)] == ["eth0", "eth1"]
    assert routes_from_json({"type": "unreachable", "dst": "10.0.0.1", "dev": "lo"}) == []


def test_tables_of_proc(tmp_path: Path) -> None:
    """The most specific route wins, then the lowest metric; rejecting and multicast routes do not count."""
    (tmp_path / "route").write_text(
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "wlan0\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        "eth1\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "lo\t0003000A\t00000000\t0201\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    (tmp_path / "ipv6_route").write_text(
        "fd000000000000000000000000000000 40 00000000000000000000000000000000 00 "
        "00000000000000000000000000000000 00000100 00000001 00000000 00000001     eth0\n"
        "ff000000000000000000000000000000 08 00000000000000000000000000000000 00 "
        "00000000000000000000000000000000 00000100 00000002 00000000 00000001     eth0\n"
        "00000000000000000000000000000000 00 00000000000000000000000000000000 00 "
        "00000000000000000000000000000000 ffffffff 00000001 00000000 00200200       lo\n"
    )
    routes = ProcRoutes((LO, link("eth0", "ethernet", "10.0.0.9")), tmp_path)
    assert routes.to("10.0.2.7") == Route("eth1", prefix_length=24)
    assert routes.to("8.8.8.8") == Route("eth0", gateway="10.0.0.1", metric=100)
    assert [entry.device for entry in routes.defaults()] == ["eth0", "wlan0"]
    own = routes.to("10.0.0.9")
    assert own is not None and own.local
    over_ipv6 = routes.to("fd00::7")
    assert over_ipv6 is not None and over_ipv6.device == "eth0"
    assert routes.to("fe00::7") is None


@pytest.mark.usefixtures("many_open_files")
def test_a_host_is_reached_from_a_process_with_more_than_1024_open_files() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answers("127.0.0.1", server.getsockname()[1], "lo", seconds=10)
