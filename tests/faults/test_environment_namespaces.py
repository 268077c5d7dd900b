"""``setup_env()`` on hosts whose network misleads: the interface it takes carries a real gloo job.

Where a guess could take another interface, the job is run with that one too, and fails.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ncclguard import faults
from ncclguard.environment import network
from ncclguard.environment.setup import setup_env
from ncclguard.faults.hosts import run_tool

_REASON = faults.namespaces_available()
pytestmark = [
    pytest.mark.usefixtures("preforked_programs"),
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
]

_WIRE = ("10.88.0.1", "10.88.0.2")
_WIRE6 = ("fd00:88::1", "fd00:88::2")


def join(changes: dict[str, str | None], by_hand: str | None, url: str | None, without_ip: bool) -> None:
    """One rank: choose the interface (or take the one given by hand), form a gloo group, add up the ranks."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if without_ip:
        _hide_the_ip_command()
    if by_hand is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = by_hand
    else:
        report = setup_env()
        faults.report(
            interface=report.interface.name,
            evidence=report.interface.evidence,
            gloo=os.environ.get("GLOO_SOCKET_IFNAME"),
            nccl=os.environ.get("NCCL_SOCKET_IFNAME"),
            family=os.environ.get("NCCL_SOCKET_FAMILY"),
            errors=[str(finding) for finding in report.wrong if finding.severity == "error"],
        )
    limit = timedelta(seconds=60 if by_hand is None else 6)
    dist.init_process_group("gloo", init_method=url or "env://", rank=rank, world_size=world_size, timeout=limit)
    tensor = torch.full((100_000,), float(rank + 1))
    dist.all_reduce(tensor)
    faults.report(total=tensor[-1].item())
    dist.barrier()
    dist.destroy_process_group()


def _hide_the_ip_command() -> None:
    setattr(network, "find_ip", lambda: None)  # noqa: B010


@contextlib.contextmanager
def two_hosts(names: tuple[str, str] = ("wire0", "wire0"), *, ipv6: bool = False) -> Iterator[faults.Hosts]:
    """Two hosts with a wire between them, beside their ``eth0`` to the router."""
    with faults.Hosts(2) as hosts:
        first, second = (hosts.namespace(host) for host in hosts.names)
        ip("link", "add", names[0], "netns", first, "type", "veth", "peer", names[1], "netns", second)
        for namespace, device, address, address6 in zip((first, second), names, _WIRE, _WIRE6, strict=True):
            if ipv6:
                ip("-n", namespace, "address", "add", f"{address6}/64", "dev", device, "nodad")
            else:
                ip("-n", namespace, "address", "add", f"{address}/24", "dev", device)
            ip("-n", namespace, "link", "set", device, "up")
        yield hosts


def ip(*arguments: str) -> str:
    """Run the ``ip`` command."""
    return run_tool(["ip", *arguments])


def on_both(hosts: faults.Hosts, *arguments: str) -> None:
    """Run an ``ip`` command in every host."""
    for host in hosts.names:
        ip("-n", hosts.namespace(host), *arguments)


def add_bridge(hosts: faults.Hosts, name: str, address: str) -> None:
    """A bridge with a container's end in it on every host, all with the same address, as docker makes them."""
    on_both(hosts, "link", "add", name, "type", "bridge")
    on_both(hosts, "link", "add", "veth1a2b3c", "type", "veth", "peer", "name", "inside0")
    on_both(hosts, "link", "set", "veth1a2b3c", "master", name)
    on_both(hosts, "address", "add", address, "dev", name)
    for device in ("veth1a2b3c", "inside0", name):
        on_both(hosts, "link", "set", device, "up")


def run(
    hosts: faults.Hosts,
    changes: dict[str, str | None],
    by_hand: str | None = None,
    url: str | None = None,
    without_ip: bool = False,
) -> faults.JobResult:
    """The job of two ranks, one a host; it ends after 60 s at the latest."""
    hosts.until_settled()
    return faults.run_ranks(join, 2, args=[changes, by_hand, url, without_ip], hosts=hosts, timeout=60.0)


def assert_works_over(result: faults.JobResult, *interfaces: str) -> None:
    """All ranks took the interface expected of them, set both variables and got the sum."""
    result.check()
    names = dict(enumerate(interfaces * (2 // len(interfaces))))
    assert result.values("interface") == names, result.values("evidence")
    assert result.values("gloo") == names
    assert result.values("nccl") == {rank: f"={name}" for rank, name in names.items()}
    assert result.values("total") == {0: 3.0, 1: 3.0}
    assert result.values("errors") == {0: [], 1: []}


def assert_fails(result: faults.JobResult) -> None:
    """The control: nobody got the sum."""
    assert result.values("total") == {}, "the interface taken by a guess works too: this test proves nothing"


@pytest.mark.parametrize("without_ip", [False, True], ids=["by ip", "by proc"])
def test_of_two_interfaces_the_one_that_reaches_the_master_is_taken(without_ip: bool) -> None:
    """eth0 has the default route but its network is partitioned; only the wire reaches the master."""
    with two_hosts() as hosts:
        hosts.partition("host0")
        assert_works_over(run(hosts, {"MASTER_ADDR": _WIRE[0]}, without_ip=without_ip), "wire0")
        if not without_ip:
            assert_fails(run(hosts, {"MASTER_ADDR": _WIRE[0]}, by_hand="eth0"))


@pytest.mark.parametrize("without_ip", [False, True], ids=["by ip", "by proc"])
def test_without_a_default_route_the_only_interface_that_is_up_is_taken(without_ip: bool) -> None:
    """No MASTER_ADDR, no way to 8.8.8.8, no default route, and eth0 is down."""
    with two_hosts() as hosts:
        on_both(hosts, "link", "set", "eth0", "down")
        url = f"tcp://{_WIRE[0]}:29600"
        assert_works_over(run(hosts, {"MASTER_ADDR": None}, url=url, without_ip=without_ip), "wire0")


def test_without_a_default_route_the_route_to_the_master_is_taken() -> None:
    """Both interfaces are up and neither has a default route; MASTER_ADDR is on the network of the wire."""
    with two_hosts() as hosts:
        on_both(hosts, "route", "delete", "default")
        assert_works_over(run(hosts, {"MASTER_ADDR": _WIRE[0]}), "wire0")
        assert_fails(run(hosts, {"MASTER_ADDR": _WIRE[0]}, by_hand="eth0"))


def test_a_decoy_docker0_is_not_taken_when_the_master_is_given_by_address() -> None:
    """docker0 is up on both hosts, with the same address; the master is behind eth0."""
    with faults.Hosts(2) as hosts:
        add_bridge(hosts, "docker0", "172.17.0.1/16")
        assert_works_over(run(hosts, {}), "eth0")
        assert_fails(run(hosts, {}, by_hand="docker0"))


@pytest.mark.parametrize("without_ip", [False, True], ids=["by ip", "by proc"])
def test_a_docker0_with_the_best_default_route_is_not_taken(without_ip: bool) -> None:
    """No MASTER_ADDR; the preferred default route leads into docker0, the other over eth0 to the hosts."""
    with faults.Hosts(2) as hosts:
        add_bridge(hosts, "docker0", "172.17.0.1/16")
        for index, host in enumerate(hosts.names):
            namespace = hosts.namespace(host)
            ip("-n", namespace, "route", "delete", "default")
            ip("-n", namespace, "route", "add", "default", "via", f"10.77.{index}.1", "metric", "100")
            ip("-n", namespace, "route", "add", "default", "via", "172.17.0.9", "metric", "10")
        # Each host reaches the others by its more specific routes, as in a real network.
        ip("-n", hosts.namespace("host0"), "route", "add", "10.77.1.0/24", "via", "10.77.0.1")
        ip("-n", hosts.namespace("host1"), "route", "add", "10.77.0.0/24", "via", "10.77.1.1")
        url = f"tcp://{hosts.address('host0')}:29600"
        assert_works_over(run(hosts, {"MASTER_ADDR": None}, url=url, without_ip=without_ip), "eth0")


def test_a_host_name_that_leads_to_docker0_on_its_own_host_does_not_mislead_it() -> None:
    """MASTER_ADDR is a name; host0 resolves it to its docker0, host1 to the address that works."""
    with faults.Hosts(2) as hosts:
        add_bridge(hosts, "docker0", "172.17.0.1/16")
        url = f"tcp://{hosts.address('host0')}:29600"
        hosts.until_settled()
        result = faults.run_ranks(join_with_odd_name, 2, args=[url], hosts=hosts, timeout=60.0)
        assert_works_over(result, "eth0")


def join_with_odd_name(url: str) -> None:
    """Rank 0's resolver gives docker0's address for the master's name."""
    if os.environ["RANK"] == "0":
        original = socket.getaddrinfo

        def answer(host: Any, *arguments: Any, **keywords: Any) -> Any:
            return original("172.17.0.1" if host == "host0" else host, *arguments, **keywords)

        socket.getaddrinfo = answer
    join({"MASTER_ADDR": "host0"}, None, url, False)


def test_a_tunnel_is_not_taken_while_another_way_to_the_master_exists() -> None:
    """A VPN's tun0 has the more specific route to the master, and nobody at its other end; the wire works."""
    with two_hosts() as hosts:
        on_both(hosts, "tuntap", "add", "dev", "tun0", "mode", "tun")
        on_both(hosts, "address", "add", "10.99.0.1/24", "dev", "tun0")
        on_both(hosts, "link", "set", "tun0", "up")
        ip("-n", hosts.namespace("host1"), "route", "add", f"{_WIRE[0]}/32", "dev", "tun0")
        hosts.until_settled()
        result = faults.run_ranks(choose_only, 2, args=[_WIRE[0]], hosts=hosts, timeout=60.0)
        result.check()
        assert result.values("interface") == {0: "wire0", 1: "wire0"}, result.values("evidence")


def choose_only(master: str) -> None:
    """Rank 0 listens as the master would; rank 1 chooses. (The kernel itself sends rank 1's own packets into tun0.)"""
    os.environ["MASTER_ADDR"] = master
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    report = setup_env()
    faults.report(
        interface=report.interface.name,
        evidence=report.interface.evidence,
        errors=[str(finding) for finding in report.wrong if finding.severity == "error"],
    )


@pytest.mark.parametrize("without_ip", [False, True], ids=["by ip", "by proc"])
def test_hosts_with_ipv6_only(without_ip: bool) -> None:
    """No interface has an IPv4 address except the loopback; the master is an IPv6 address on the wire."""
    with two_hosts(ipv6=True) as hosts:
        on_both(hosts, "address", "flush", "dev", "eth0")
        result = run(hosts, {"MASTER_ADDR": _WIRE6[0]}, without_ip=without_ip)
        assert_works_over(result, "wire0")
        assert result.values("family") == {0: "AF_INET6", 1: "AF_INET6"}


def test_interface_names_that_differ_from_host_to_host() -> None:
    """The wire is ens3 here and enp7s0f1 there: each host takes its own."""
    with two_hosts(("ens3", "enp7s0f1")) as hosts:
        hosts.partition("host0")
        assert_works_over(run(hosts, {"MASTER_ADDR": _WIRE[0]}), "ens3", "enp7s0f1")


def test_an_interface_without_a_carrier_is_not_taken() -> None:
    """No MASTER_ADDR; the better default route goes over eth0, whose cable is out; the wire has the other one."""
    with two_hosts() as hosts:
        for index, host in enumerate(hosts.names):
            hosts.link_down(host)
            ip("-n", hosts.namespace(host), "route", "add", "default", "via", _WIRE[1 - index], "metric", "100")
        assert_works_over(run(hosts, {"MASTER_ADDR": None}, url=f"tcp://{_WIRE[0]}:29600"), "wire0")


def test_a_bridge_is_taken_when_it_is_the_only_way() -> None:
    """A host of virtual machines: its cable is a port of br0, and br0 has the address."""
    with two_hosts() as hosts:
        on_both(hosts, "link", "set", "eth0", "down")
        for host, address in zip(hosts.names, _WIRE, strict=True):
            namespace = hosts.namespace(host)
            ip("-n", namespace, "address", "flush", "dev", "wire0")
            ip("-n", namespace, "link", "add", "br0", "type", "bridge")
            ip("-n", namespace, "link", "set", "wire0", "master", "br0")
            ip("-n", namespace, "address", "add", f"{address}/24", "dev", "br0")
            ip("-n", namespace, "link", "set", "br0", "up")
        assert_works_over(run(hosts, {"MASTER_ADDR": _WIRE[0]}), "br0")


def test_a_prefix_does_not_pick_up_a_longer_name() -> None:
    """eth0 and eth0b are both up; NCCL's plain "eth0" would match both, so the exact form is set."""
    with two_hosts(("eth0b", "eth0b")) as hosts:
        assert_works_over(run(hosts, {}), "eth0")


def test_a_job_on_one_host_uses_the_loopback() -> None:
    """Both ranks on one host, as torchrun starts them."""
    result = faults.run_ranks(join, 2, args=[{}, None, None, False], launcher="torchrun", timeout=90.0)
    assert_works_over(result, "lo")


def test_a_job_on_one_host_whose_loopback_has_no_ipv4_address_uses_another_interface() -> None:
    """NCCL cannot use ::1, so lo is no choice here."""
    with faults.Hosts(1) as hosts:
        ip("-n", hosts.namespace("host0"), "address", "delete", "127.0.0.1/8", "dev", "lo")
        assert_works_over(run(hosts, {}), "eth0")


def test_a_loopback_that_is_down_is_reported_before_the_job_hangs() -> None:
    """A namespace that nobody finished: no process of the host reaches another one."""
    with faults.Hosts(1) as hosts:
        ip("-n", hosts.namespace("host0"), "link", "set", "lo", "down")
        hosts.until_settled()
        result = faults.run_ranks(choose_only, 1, args=[hosts.address("host0")], hosts=hosts, timeout=60.0).check()
        assert "ip link set lo up" in str(result.values("errors"))
