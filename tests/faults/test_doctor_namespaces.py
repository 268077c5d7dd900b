"""``ncclguard doctor`` on hosts with a broken network: it ends in time and names the pair and the reason."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ncclguard import faults
from ncclguard.environment.doctor.command import main
from ncclguard.faults.hosts import run_tool

_REASON = faults.namespaces_available()
pytestmark = [
    pytest.mark.usefixtures("preforked_programs"),
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
]


def examine(json_file: str, wait: float) -> None:
    """One rank of the doctor; rank 0 writes the checks."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    arguments = ["--wait", str(wait)]
    if os.environ["RANK"] == "0":
        arguments += ["--json", json_file]
    sys.exit(main(arguments))


def run(hosts: faults.Hosts, folder: Path, ranks: int, wait: float = 30.0) -> tuple[faults.JobResult, dict[str, Any]]:
    """The job, which ends by itself, and rank 0's checks by name."""
    file = folder / "doctor.json"
    hosts.until_settled()
    result = faults.run_ranks(examine, ranks, args=[str(file), wait], hosts=hosts, timeout=180.0)
    assert not result.timed_out, str(result)
    checks = json.loads(file.read_text())["checks"]
    assert all(set(check) == {"name", "status", "detail", "advice"} for check in checks)
    return result, {check["name"]: check for check in checks}


def codes(result: faults.JobResult) -> list[int | None]:
    """Exit codes by rank."""
    return [rank.exit_code for rank in result]


def block(hosts: faults.Hosts, host: str, *rule: str) -> None:
    """A rule in a host's own firewall."""
    command = ["ip", "netns", "exec", hosts.namespace(host), "iptables", "-A", "INPUT", *rule]
    run_tool(command)


def test_a_healthy_network_has_no_errors(tmp_path: Path) -> None:
    """Two hosts, three ranks: every pair connects, a real all-reduce works, all ranks end with code 0.

    The all-reduce is started as for users, with the real interpreter.
    """
    with faults.Hosts(2) as hosts:
        result, checks = run(hosts, tmp_path, 3)
    assert codes(result) == [0, 0, 0], str(result) + json.dumps(checks, indent=1)
    for name in (
        "ranks",
        "interface",
        "store",
        "interfaces agree",
        "versions",
        "connections",
        "path MTU",
        "all-reduce",
    ):
        assert checks[name]["status"] == "ok", checks[name]
    assert "6 directed pairs" in checks["connections"]["detail"]
    assert "host1" in checks["clocks"]["detail"]
    assert checks["bandwidth"]["status"] in ("ok", "warning")


def test_an_asymmetric_firewall_is_named_with_its_direction(tmp_path: Path) -> None:
    """host1 drops connections that host2 opens; the other way they pass. All ranks end with code 2."""
    with faults.Hosts(3) as hosts:
        block(hosts, "host1", "-p", "tcp", "--syn", "-s", hosts.address("host2"), "-j", "DROP")
        result, checks = run(hosts, tmp_path, 3)
    assert codes(result) == [2, 2, 2], str(result)
    found = checks["connections"]
    assert found["status"] == "error"
    assert found["detail"].startswith("host2 (rank 2) -> host1 (rank 1, 10.77.1.2:")
    assert "no answer" in found["detail"] and "the other direction works" in found["detail"]
    assert found["detail"].count("\n") == 0 and found["advice"]


def test_a_blocked_port_range_is_named(tmp_path: Path) -> None:
    """host1 rejects the ports that the system picks; the store's port is open, so only the doctor's pairs show it."""
    with faults.Hosts(2) as hosts:
        rule = ("-p", "tcp", "--syn", "--dport", "30000:65535", "-j", "REJECT", "--reject-with", "tcp-reset")
        block(hosts, "host1", *rule)
        result, checks = run(hosts, tmp_path, 2)
    assert codes(result) == [2, 2], str(result)
    assert "host0 (rank 0) -> host1 (rank 1" in checks["connections"]["detail"]
    assert "refused" in checks["connections"]["detail"]


def test_a_blocked_master_port_is_said_on_both_sides(tmp_path: Path) -> None:
    """host1 cannot reach the store: it says so itself, and rank 0 says that rank 1 did not come."""
    with faults.Hosts(2) as hosts:
        block(hosts, "host0", "-p", "tcp", "--dport", "29500:29599", "-s", hosts.address("host1"), "-j", "DROP")
        result, checks = run(hosts, tmp_path, 2, wait=10.0)
    assert codes(result) == [2, 2], str(result)
    assert checks["ranks"]["status"] == "error" and "ranks 1 did not reach the store" in checks["ranks"]["detail"]
    assert "cannot use the store at 10.77.0.2:29500" in " ".join(result[1].output.split())


def test_a_hop_with_a_smaller_mtu_is_measured(tmp_path: Path) -> None:
    """The hop to host1 takes 1400 bytes: towards it the router says so, from it packets vanish without a word."""
    with faults.Hosts(2) as hosts:
        router = hosts.namespace("host0").rsplit("-", 1)[0] + "-router"
        run_tool(["ip", "-n", router, "link", "set", "port1", "mtu", "1400"])
        result, checks = run(hosts, tmp_path, 2)
    assert codes(result) == [2, 2], str(result)
    found = checks["path MTU"]
    assert found["status"] == "error"
    assert "host1 (rank 1) -> host0" in found["detail"] and "(interface MTU 1500)" in found["detail"]
    assert "ICMP" in found["advice"]


def test_a_rank_that_was_never_started_is_named(tmp_path: Path) -> None:
    """World size 3, two ranks come: the others go on without it, and it is named."""
    with faults.Hosts(2) as hosts:
        file = tmp_path / "doctor.json"
        arguments = [str(file), 8.0]
        result = faults.run_ranks(examine_as_one_of_three, 2, args=arguments, hosts=hosts, timeout=180.0)
    assert not result.timed_out, str(result)
    assert codes(result) == [2, 2], str(result)
    checks = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
    assert "ranks 2 did not reach the store within 8 s" in checks["ranks"]["detail"]
    assert checks["connections"]["status"] == "ok"


def examine_as_one_of_three(json_file: str, wait: float) -> None:
    """The launcher promised a third rank."""
    os.environ["WORLD_SIZE"] = "3"
    examine(json_file, wait)


def test_under_torchrun_the_launchers_store_is_used(tmp_path: Path) -> None:
    """Two ranks on one host: no two hosts to compare, and the master's port is rightly taken."""
    file = tmp_path / "doctor.json"
    result = faults.run_ranks(examine, 2, args=[str(file), 30.0], launcher="torchrun", timeout=180.0)
    assert not result.timed_out, str(result)
    checks = {check["name"]: check for check in json.loads(file.read_text())["checks"]}
    assert checks["interface"]["detail"].startswith("lo (127.0.0.1)")
    assert "held by the launcher" in checks["master port"]["detail"]
    assert checks["connections"]["status"] == "ok"
