"""Which of its addresses a host gives to the peers of the job."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ncclguard.environment import network
from ncclguard.environment.network import address_towards, job_address


@contextmanager
def interfaces(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> Iterator[None]:
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    made: Any = {
        name: [SimpleNamespace(family=family[":" in host], address=host) for host in hosts]
        for name, hosts in names.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: made)
    network._address_by_name.cache_clear()
    yield
    network._address_by_name.cache_clear()


def test_the_address_of_the_job_is_that_of_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"eth0": ["10.1.2.3"], "ib0": ["fe80::1%ib0", "fd00::7"], "down": []}
    with interfaces(monkeypatch, names):
        for value, expected in {"eth0": "10.1.2.3", "down, eth0": "10.1.2.3", "ib0": "fd00::7"}.items():
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
            assert job_address() == expected
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere")
        with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME=nothere names no interface"):
            job_address()


def test_without_a_name_it_is_what_the_hosts_name_stands_for_or_the_way_to_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    found = {"here": ["127.0.1.1"], "master": ["127.0.0.1"]}
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(network, "lookup", lambda name: [(socket.AF_INET, (host, 0)) for host in found.get(name, [])])
    with interfaces(monkeypatch, {}):
        assert job_address("master") == "127.0.1.1"  # both on this host
    found["here"] = []
    with interfaces(monkeypatch, {}):
        assert job_address("") == "127.0.0.1"


@pytest.mark.parametrize(("size", "address"), [("2", "127.0.1.1"), ("4", "192.0.2.9")], ids=["one host", "two hosts"])
def test_a_master_that_is_loopback_here_is_left_by_the_way_out_where_the_job_has_other_hosts(
    size: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {"master": "127.0.1.1", network._UNROUTED: "192.0.2.9"}
    monkeypatch.setattr(network, "_sources_towards", lambda name: iter([sources[name]]))
    monkeypatch.setenv("MASTER_ADDR", "master")
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert address_towards() == address
