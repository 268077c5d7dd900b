"""What the doctor makes of measured pairs; faults/test_doctor_namespaces.py measures real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ncclguard.environment.doctor import checks, survey
from ncclguard.environment.doctor.checks import (
    Context,
    Facts,
    Measured,
    check_agreement,
    check_ranks,
    check_versions,
    read_context,
)
from ncclguard.environment.doctor.command import plot
from ncclguard.environment.doctor.survey import Exchange, Unreachable
from ncclguard.environment.network import read_job
from tests.ports import free_port


def facts(*ranks: int, **changes: Any) -> dict[int, Facts]:
    """Ranks, each on a host of its own; ``changes`` apply to the last one."""
    found = {
        rank: Facts(
            rank=rank,
            host=f"node{rank}",
            interface="eth0",
            address=f"10.0.0.{rank + 1}",
            mtu=1500,
            port=40000,
            echo_port=40001,
            candidates=("eth0",),
            versions={"torch": "2.13.0", "NCCL": "2.29.7"},
        )
        for rank in ranks
    }
    found[ranks[-1]] = found[ranks[-1]].model_copy(update=changes)
    return found


def pairs(count: int, **odd: Any) -> list[Measured]:
    """All directed pairs of ``count`` ranks, alike but for 1 -> 0."""
    usual = {"round_trip": 1e-4, "bandwidth": 1e9, "mtu": 1500, "largest": 1500, "clock_skew": 0.001}
    return [
        Measured(source=a, target=b, **{**usual, **(odd if (a, b) == (1, 0) else {})})
        for a in range(count)
        for b in range(count)
        if a != b
    ]


@pytest.mark.parametrize(
    ("check", "odd", "status", "text"),
    [
        (checks.check_pairs, {}, "ok", "all 12 directed pairs"),
        (checks.check_pairs, {"fault": "refused"}, "error", "node1 (rank 1) -> node0 (rank 0, 10.0.0.1:40000)"),
        (checks.check_round_trips, {}, "ok", "median 0.10 ms"),
        (checks.check_round_trips, {"round_trip": 0.03}, "warning", "30.00 ms"),
        (checks.check_round_trips, {"round_trip": 0.0009}, "ok", "median"),
        (checks.check_bandwidth, {}, "ok", "1000 MB/s"),
        (checks.check_bandwidth, {"bandwidth": 1e8}, "warning", "node1 (rank 1) -> node0"),
        (checks.check_path_mtu, {}, "ok", "1500"),
        (checks.check_path_mtu, {"largest": 1400, "reported": 1400}, "warning", "1400 bytes"),
        (checks.check_path_mtu, {"largest": 1400}, "error", "packets over 1400 bytes vanish"),
        (checks.check_path_mtu, {"largest": None}, "skipped", "no UDP packet arrives"),
        (checks.check_clocks, {}, "ok", "node1 +1.0 ms"),
    ],
)
def test_pairs_are_judged(check: Any, odd: dict[str, Any], status: str, text: str) -> None:
    """One pair of four ranks differs."""
    found = check(facts(0, 1, 2, 3), pairs(4, **odd))
    assert found.status == status, found
    assert text in found.detail


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({}, "ok", "node1: eth0 10.0.0.2"),
        ({"address": "fd00::2"}, "error", "IPv4 here and IPv6 there"),
        ({"address": "10.0.0.1"}, "error", "the same address"),
        ({"mtu": 9000}, "warning", "node1: 9000"),
    ],
)
def test_choices_of_interface_have_to_fit_together(changes: dict[str, Any], status: str, text: str) -> None:
    """Families, addresses, MTUs."""
    found = check_agreement(facts(0, 1, **changes))
    assert (found.status, text in found.detail) == (status, True), found


def test_versions_have_to_be_equal() -> None:
    """A host that was not upgraded is named."""
    assert check_versions(facts(0, 1)).status == "ok"
    found = check_versions(facts(0, 1, versions={"torch": "2.12.0", "NCCL": "2.29.7"}))
    assert found.status == "error" and "torch (2.13.0: node0; 2.12.0: node1)" in found.detail


def test_missing_ranks_are_named() -> None:
    """Two of four came."""
    found = check_ranks(facts(0, 2), 4, 20.0)
    assert found.status == "error" and "ranks 1, 3" in found.detail and "node0: 0" in found.detail


def test_a_peer_is_reached_and_measured() -> None:
    """Over the loopback: round trip, clock, bandwidth, and a port on which nobody listens."""
    with survey.PeerServer("127.0.0.1") as server:
        found = survey.reach("127.0.0.1", server.port, "127.0.0.1")
        assert found.fault is None and found.round_trip is not None and found.clock_skew is not None
        assert abs(found.clock_skew) < 10.0
        speed = survey.bandwidth("127.0.0.1", server.port, "127.0.0.1")
        assert speed is not None and speed > 0
    assert "refused" in str(survey.reach("127.0.0.1", server.port, "127.0.0.1").fault)
    assert survey.bandwidth("127.0.0.1", server.port, "127.0.0.1") is None


def test_the_path_mtu_of_the_loopback() -> None:
    """A packet of 9000 bytes passes."""
    with survey.EchoServer("127.0.0.1") as server:
        assert survey.probe_mtu("127.0.0.1", server.port, "127.0.0.1", 9000) == survey.PathMtu(9000, None)


def context_of(port: int) -> Context:
    """Rank 1 of two, whose store is at a port of this host."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "1", "WORLD_SIZE": "2"}
    here = read_context()
    return Context(read_job(environ), here.host, environ, here.report, here.links, here.ports)


@pytest.mark.processes
def test_a_store_that_nobody_hosts_is_said_in_time() -> None:
    """Refused connections; ends by the time limit that was given."""
    with pytest.raises(Unreachable):
        Exchange(context_of(free_port()), connect_seconds=2.0)


@pytest.mark.processes
def test_a_stopped_store_host_is_said_in_time() -> None:
    """SIGSTOP: it accepts and never answers; the call is abandoned."""
    program = (
        "import sys, time\nfrom datetime import timedelta\nimport torch.distributed as dist\n"
        "store = dist.TCPStore('127.0.0.1', 0, 2, True, timedelta(seconds=60), wait_for_workers=False)\n"
        "print(store.port, flush=True)\ntime.sleep(120)\n"
    )
    host = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        exchange = Exchange(context_of(int(host.stdout.readline())), connect_seconds=20.0)
        assert exchange.answer_seconds() < 5.0
        os.kill(host.pid, signal.SIGSTOP)
        while (
            psutil.Process(host.pid).status() != psutil.STATUS_STOPPED
        ):  # on a busy machine its threads go on for a moment
            time.sleep(0.01)
        begun = time.monotonic()
        with pytest.raises(Unreachable, match="no answer within 5 s"):
            exchange.answer_seconds()
        assert exchange.abandoned
        assert time.monotonic() - begun < 60.0
    finally:
        host.kill()
        host.wait(20)
        if host.stdout is not None:
            host.stdout.close()


@pytest.mark.processes  # matplotlib, where it has no cache yet, asks fc-list for fonts
def test_a_heat_map_is_drawn(tmp_path: Path) -> None:
    """With a broken pair in it."""
    plot(facts(0, 1, 2), pairs(3, fault="refused", round_trip=None, bandwidth=None), str(tmp_path / "map.png"))
    assert (tmp_path / "map.png").stat().st_size > 1000
