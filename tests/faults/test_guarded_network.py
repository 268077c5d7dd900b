"""Guarded operations while the network between real hosts (network namespaces) fails: bounds, verdicts, tensors, and after."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults, torch_compat
from ncclguard.engine import runtime

REASON = faults.namespaces_available()
pytestmark = [
    pytest.mark.usefixtures("preforked_programs"),
    pytest.mark.skipif(REASON is not None, reason=f"network namespaces are not available: {REASON}"),
]

LARGE = 100_000_000


def reset_in_the_middle(numel: int, chunk_numel: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier().raise_if_failed()
    tensor = torch.full((numel,), float(rank + 1))
    faults.report(started=True)
    outcome = ng.safe_all_reduce(tensor, timeout=60, chunk_numel=chunk_numel)
    wanted = float(sum(range(1, dist.get_world_size() + 1)))
    faults.report(
        ok=outcome.ok, attempts=outcome.attempts, wrong=int((tensor != wanted).sum()), text=str(outcome.incident)
    )
    dist.destroy_process_group()


def test_connections_reset_in_mid_transfer_are_survived_with_the_exact_sum() -> None:
    """1e8 elements, every data connection of one host reset 0.2 s after the start: ok, more than one attempt, no wrong element."""
    with (
        faults.Hosts(2) as hosts,
        faults.start_ranks(reset_in_the_middle, 2, args=[LARGE, LARGE // 10], hosts=hosts, timeout=120) as job,
    ):
        job.wait_for("started", seconds=60)
        time.sleep(0.2)
        assert hosts.reset_connections("host1", keep_ports=[29500]) > 0
        result = job.wait()
    assert result.values("ok") == {0: True, 1: True}, result
    assert result.values("wrong") == {0: 0, 1: 0}
    attempts = result.values("attempts")
    assert attempts[0] == attempts[1] > 1, result


def loses_a_connection() -> None:
    """One try each, again and again: the reset is met in mid-transfer or by the next operation, by all at the same one."""
    dist.init_process_group("gloo")
    ng.safe_barrier().raise_if_failed()
    faults.report(started=True)
    tensor = torch.ones(1_000_000)
    end = time.monotonic() + 60
    while outcome := ng.safe_all_reduce(tensor, ReduceOp.MAX, timeout=30, max_attempts=1, chunk_numel=100_000):
        assert time.monotonic() < end
    faults.report(
        verdict=[outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits)],
        incident=outcome.incident.to_json() if outcome.incident else "",
        after=ng.safe_barrier(timeout=20).ok,
    )
    dist.destroy_process_group()


def test_an_incident_of_the_network_names_the_two_hosts_that_lost_their_connection() -> None:
    """Of 3 ranks on as many hosts two lose theirs: nobody is to blame, and all, the third too, say which two it was."""
    with faults.Hosts(3) as hosts, faults.start_ranks(loses_a_connection, 3, hosts=hosts, timeout=120) as job:
        job.wait_for("started", seconds=60)
        assert hosts.reset_connections("host1", between="host2", keep_ports=[29500]) > 0
        result = job.wait()
    assert result.values("verdict") == {rank: [False, True, "network", []] for rank in range(3)}, result
    texts = set(result.values("incident").values())
    assert len(texts) == 1, result
    incident = ng.Incident.from_json(texts.pop())
    lost = {(report.rank, report.peer) for report in incident.ranks if report.peer is not None}
    assert lost & {(1, 2), (2, 1)}, incident
    ends = {report.rank: f"rank {report.rank} ({report.host})" for report in incident.ranks}
    both = f"{ends[1]} and {ends[2]} lost the connection between them"
    one = [f"{ends[one]} lost its connection with {ends[other]}" for one, other in ((1, 2), (2, 1))]
    assert any(words in incident.summary for words in (both, *one)), incident
    assert result.values("after") == dict.fromkeys(range(3), True), result


def partitioned(timeout: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier().raise_if_failed()
    tensor = torch.arange(1000.0) + rank
    before = tensor.clone()
    faults.report(ready=True)
    faults.wait_until_told("cut")
    started = time.monotonic()
    outcome = ng.safe_all_reduce(tensor, timeout=timeout)
    faults.report(
        seconds=time.monotonic() - started,
        verdict=[outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits)],
        intact=torch.equal(tensor, before),
        text=str(outcome.incident),
    )
    faults.wait_until_told("healed")
    deadline = time.monotonic() + 30
    after = ng.safe_barrier(timeout=15)
    while (
        not after and time.monotonic() < deadline
    ):  # the host that was cut off may first learn what was decided without it
        after = ng.safe_barrier(timeout=15)
    faults.report(after=after.ok, after_text=str(after.incident))
    dist.destroy_process_group()


def test_a_host_that_is_cut_off_ends_in_time_on_both_sides() -> None:
    """Host 2 of 3 is partitioned from rank 0's store and from the rest: all return by deadline + 2 s, the tensor intact; the
    majority names it (unknown: nobody can look), the cut-off side agrees on nothing; healed, the group works again."""
    with faults.Hosts(3) as hosts, faults.start_ranks(partitioned, 3, args=[4.0], hosts=hosts, timeout=120) as job:
        job.wait_for("ready", seconds=60)
        hosts.partition("host2")
        job.tell("cut")
        job.wait_for("verdict", seconds=30)
        hosts.heal()
        job.tell("healed")
        result = job.wait()
    verdicts = result.values("verdict")
    assert verdicts[0] == verdicts[1] == [False, True, "unknown", [2]], result
    assert verdicts[2][:2] == [False, False], result
    assert max(result.values("seconds").values()) < 4.0 + 2.0 + 1.0, result
    assert result.values("intact") == {0: True, 1: True, 2: True}
    assert result.values("after") == {0: True, 1: True, 2: True}, result


def killed_across_hosts() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for _ in range(2):
        ng.safe_barrier().raise_if_failed()
    probes = runtime.current().monitor.neighbours._liveness._probes
    while sum(probe.reached for probe in list(probes.values())) < 2:  # a port that was never reached is no evidence
        time.sleep(0.05)
    faults.report(ready=True)
    if rank == 1:
        faults.wait_until_told("never", seconds=60)
    started = time.monotonic()
    outcome = ng.safe_all_reduce(torch.ones(10), timeout=30)
    faults.report(
        seconds=time.monotonic() - started,
        verdict=[outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits)],
        text=str(outcome.incident),
    )


def test_a_killed_rank_on_another_host_is_lost_within_seconds() -> None:
    """Rank 1, alone on its host, is killed: a refused port is positive evidence, long before the deadline of 30 s."""
    with faults.Hosts(3) as hosts, faults.start_ranks(killed_across_hosts, 3, hosts=hosts, timeout=90) as job:
        job.wait_for("ready", seconds=60)
        time.sleep(1.0)
        job.send_signal(1, 9)
        result = job.wait()
    verdicts = result.values("verdict")
    assert verdicts == {0: [False, True, "lost", [1]], 2: [False, True, "lost", [1]]}, result
    assert max(result.values("seconds").values()) < 8.0, result


def asks_the_store_in_an_outage() -> None:
    dist.init_process_group("gloo")
    store = torch_compat.clone_store(torch_compat.default_store())
    store.add("asked", 1)
    faults.report(ready=True)
    faults.wait_until_told("cut")
    if dist.get_rank() == 1:
        store.add("asked", 1)
        faults.report(answered=time.monotonic())
    faults.wait_until_told("over")


def test_a_request_to_the_store_that_an_outage_held_up_goes_on_soon_after_it() -> None:
    """By itself the kernel sends it again after 0.2, 0.6, 1.4, 3.0, 6.2 and 12.6 s: 5.6 s after the network is back."""
    with faults.Hosts(2) as hosts, faults.start_ranks(asks_the_store_in_an_outage, 2, hosts=hosts, timeout=90) as job:
        job.wait_for("ready", seconds=60)
        hosts.partition("host1")
        job.tell("cut")
        time.sleep(7)
        hosts.heal("host1")
        healed = time.monotonic()  # one clock for all namespaces
        answered = job.wait_for("answered", [1], seconds=30)[1]
        job.tell("over")
        job.wait()
    assert answered - healed < 4, answered - healed


def exchanges_in_an_outage() -> None:
    dist.init_process_group("gloo")
    tensor = torch.ones(1000)
    ng.safe_all_reduce(tensor, timeout=20).raise_if_failed()  # connects
    faults.report(ready=True)
    faults.wait_until_told("cut")
    outcome = ng.safe_all_reduce(tensor, timeout=20)
    faults.report(ended=time.monotonic(), ok=outcome.ok)
    faults.wait_until_told("over")


def test_an_operation_that_an_outage_held_up_goes_on_soon_after_it() -> None:
    """By itself the kernel sends its bytes again after 0.2, 0.6, 1.4, 3.0, 6.2 and 12.6 s: 5.6 s after the network is back."""
    with faults.Hosts(2) as hosts, faults.start_ranks(exchanges_in_an_outage, 2, hosts=hosts, timeout=90) as job:
        job.wait_for("ready", seconds=60)
        hosts.partition("host1")
        job.tell("cut")
        time.sleep(7)
        hosts.heal("host1")
        healed = time.monotonic()  # one clock for all namespaces
        ended = job.wait_for("ended", seconds=30)
        outcomes = job.wait_for("ok", seconds=30)
        job.tell("over")
        job.wait()
    assert outcomes == {0: True, 1: True}
    assert max(ended.values()) - healed < 4, {rank: at - healed for rank, at in ended.items()}


def stops_behind_an_outage() -> None:
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=30).raise_if_failed()
    faults.report(ready=True)
    faults.wait_until_told("cut")
    ng.safe_barrier(timeout=30).raise_if_failed()  # ends when the host is back
    faults.report(back=True)
    faults.wait_until_told("on")
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    if dist.get_rank() in (1, 2):
        time.sleep(0.5)  # so that a rank of the other host decides
    outcome = ng.safe_all_reduce(torch.ones(1000), timeout=1)
    faults.report(verdict=[str(outcome.cause), list(outcome.culprits), outcome.agreed])
    faults.wait_until_told("over")


def test_a_rank_that_is_stopped_behind_an_outage_is_stuck_by_what_its_host_sees() -> None:
    """From outside its process could not be reached a moment ago; rank 2 beside it sees that it is stopped."""
    with faults.Hosts(2) as hosts, faults.start_ranks(stops_behind_an_outage, 4, hosts=hosts, timeout=90) as job:
        job.wait_for("ready", seconds=60)
        hosts.partition("host1")
        job.tell("cut")
        time.sleep(2.5)
        hosts.heal("host1")
        job.wait_for("back", seconds=30)
        job.tell("on")
        verdicts = job.wait_for("verdict", [0, 1, 2], seconds=30)
        job.send_signal(3, signal.SIGCONT)
        job.tell("over")
        job.wait()
    assert verdicts == {rank: ["stuck", [3], True] for rank in range(3)}
