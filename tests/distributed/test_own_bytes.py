"""Nothing is written into memory of the caller after a call has returned, and no broken connection ends a process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.transport import ring
from tests.soak.ranks import ends

pytestmark = [pytest.mark.usefixtures("own_processes", "preforked_programs"), pytest.mark.slow]

RANKS = 4
MB = 1 << 20
CALLS = 50
#: Seconds, by turns: from what no large transfer keeps to what many do.
LIMITS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.25)
#: Calls whose memory stays filled with a pattern before it is looked at.
KEPT = 4
MARK = 0x5A

HITS = 40
REASON = faults.namespaces_available()


def told(outcome: ng.Outcome) -> list[Any]:
    return [outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits), outcome.op_id]


class Transfer:
    """One call: its tensors, and whether they hold the result."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.kind, self.rank, self.size = kind, dist.get_rank(), dist.get_world_size()
        numel = nbytes // 4 // (self.size if kind in ("gather", "scatter") else 1)
        self.sum = sum(range(1, self.size + 1))
        self.sent = [torch.full((numel,), float(self.rank + 1))]
        self.into: list[torch.Tensor] = []
        self.objects: list[Any] = [None] * self.size
        if kind == "gather":
            self.into = [torch.zeros(numel) for _ in range(self.size)]
        elif kind == "scatter":
            self.sent = [torch.full((numel,), float(self.rank + 1)) for _ in range(self.size)]
            self.into = [torch.zeros(numel)]

    def run(self, timeout: float) -> ng.Outcome:
        if self.kind == "gather":
            return ng.safe_all_gather(self.into, self.sent[0], timeout=timeout)
        if self.kind == "objects":
            share = self.sent[0][: len(self.sent[0]) // self.size]
            return ng.safe_all_gather_object(self.objects, share.numpy().tobytes(), timeout=timeout)
        if self.kind == "scatter":
            return ng.safe_reduce_scatter(self.into[0], self.sent, timeout=timeout)
        if self.kind == "broadcast":
            return ng.safe_broadcast(self.sent[0], self.size - 1, timeout=timeout)
        return ng.safe_all_reduce(self.sent[0], timeout=timeout)

    def right(self) -> bool:
        """Whether the result is there."""
        if self.kind == "gather":
            return all(bool((part == float(rank + 1)).all()) for rank, part in enumerate(self.into))
        if self.kind == "objects":
            parts = [torch.frombuffer(bytearray(data), dtype=torch.float32) for data in self.objects]
            return all(bool((part == float(rank + 1)).all()) for rank, part in enumerate(parts))
        if self.kind == "scatter":
            return bool((self.into[0] == self.sum).all())
        return bool((self.sent[0] == (self.size if self.kind == "broadcast" else self.sum)).all())

    def refill(self) -> list[torch.Tensor]:
        """Free all tensors; memory of the same sizes, each byte of it `MARK`."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in (*self.sent, *self.into)]
        self.sent, self.into, self.objects = [], [], []
        return [torch.full((nbytes,), MARK, dtype=torch.uint8) for nbytes in sizes]


def with_little_time(calls: int) -> None:
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    patterns: deque[list[torch.Tensor]] = deque()
    found: list[list[Any]] = []
    wrong = changed = 0

    def look() -> int:
        return sum(int(one.min()) != MARK or int(one.max()) != MARK for one in patterns.popleft())

    for number in range(calls):
        transfer = Transfer(("gather", "objects", "scatter", "reduce")[number % 4], (8 + number * 13 % 41) * MB)
        outcome = transfer.run(LIMITS[number % len(LIMITS)])
        wrong += bool(outcome) and not transfer.right()
        patterns.append(transfer.refill())
        found.append(told(outcome))
        if len(patterns) > KEPT:
            changed += look()
    time.sleep(0.5)
    while patterns:
        changed += look()
    after = torch.ones(3)
    ok = ng.safe_all_reduce(after, timeout=60).ok
    faults.report(found=found, wrong=wrong, changed=changed, after=[ok, after[0].item()])
    dist.destroy_process_group()


@pytest.mark.parametrize("memory", ["0", pytest.param("1", marks=pytest.mark.thorough)])
def test_memory_that_is_freed_at_once_after_limits_of_10_to_250_ms_is_never_written_into(memory: str) -> None:
    """50 gathers, gathers of objects, reduce-scatters and all-reduces of 8 to 48 MB: every rank lives, no pattern changes."""
    env = {"NCCLGUARD_CROSS_MEMORY": memory}
    result = faults.run_ranks(with_little_time, RANKS, args=[CALLS], env=env, timeout=110).check()
    assert result.values("changed") == dict.fromkeys(range(RANKS), 0), result
    assert result.values("wrong") == dict.fromkeys(range(RANKS), 0), result
    assert all(after == [True, float(RANKS)] for after in result.values("after").values()), result
    verdicts = result.values("found")
    for call in zip(*verdicts.values(), strict=True):
        assert len({str(one) for one in call if one[1]}) <= 1, call
        assert all(agreed or not ok for ok, agreed, *_ in call), call
    # At 10 and at 20 ms next to none can be in time: the test has shown something.
    assert [one[0] for one in verdicts[0]].count(False) >= 10, verdicts[0]


def under_load() -> None:
    """One call after the other, until rank 0 has been told to end it and has told the others."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=60).raise_if_failed()
    found: list[list[Any]] = []
    wrong, over = 0, False
    while not over:
        faults.report(own=ends()["own"])
        kind = ("reduce", "gather", "scatter", "broadcast", "objects")[len(found) % 5]
        transfer = Transfer(kind, 8 * MB)
        outcome = transfer.run(30.0)
        found.append([*told(outcome), outcome.attempts])
        wrong += bool(outcome) and not transfer.right()
        over = outcome.cause not in (None, ng.Cause.NETWORK)  # the others wait for a rank that is gone
        if kind == "objects":
            flag = torch.tensor([float(rank == 0 and told_to_end())])
            outcome = ng.safe_all_reduce(flag, timeout=30)
            found.append([*told(outcome), outcome.attempts])
            over = over or (bool(outcome) and flag.item() > 0)
    faults.report(found=found, wrong=wrong)
    dist.destroy_process_group()


def told_to_end() -> bool:
    try:
        faults.wait_until_told("end", seconds=0.0)
    except TimeoutError:
        return False
    return True


def end_at_one_side(hosts: faults.Hosts, end: list[Any]) -> bool:
    """``ss -K`` for this end alone: ECONNABORTED here, a reset for the other; whether there was such a connection."""
    host, port, other, remote = end
    words = ["ss", "-K", "-H", "-n", "-t", "state", "established"]
    return bool(hosts.run("host0", [*words, "src", f"{host}:{port}", "dst", f"{other}:{remote}"]).strip())


def refuse(hosts: faults.Hosts, end: list[Any]) -> bool:
    """Answer what comes to this end with a reset, for 50 ms; whether something came."""
    host, port, other, remote = end
    match = ["INPUT", "-p", "tcp", "-s", other, "--sport", str(remote), "-d", host, "--dport", str(port)]
    rule = [*match, "-j", "REJECT", "--reject-with", "tcp-reset"]
    hosts.run("host0", ["iptables", "-w", "-I", *rule])
    time.sleep(0.05)
    counters = hosts.run("host0", ["iptables", "-w", "-n", "-v", "-x", "-L", "INPUT"]).splitlines()[2].split()
    hosts.run("host0", ["iptables", "-w", "-D", *rule])
    return int(counters[0]) > 0


@pytest.mark.thorough
@pytest.mark.skipif(REASON is not None, reason=f"network namespaces are not available: {REASON}")
def test_connections_that_break_at_one_end_80_times_under_load_end_no_process() -> None:
    """40 times ``ss -K``, 40 times a firewall's reset: no process dies, every call resumes or fails with one verdict."""
    rng = random.Random(7)
    hits = {end_at_one_side: 0, refuse: 0}
    env = {"NCCLGUARD_CROSS_MEMORY": "0"}
    with (
        faults.Hosts(1) as hosts,
        faults.start_ranks(under_load, RANKS, hosts=hosts, env=env, timeout=110) as job,
    ):
        job.wait_for("own", seconds=60)
        end = time.monotonic() + 75
        while min(hits.values()) < HITS and time.monotonic() < end:
            own = job.reports(rng.randrange(RANKS))["own"]
            strike = min(hits, key=hits.__getitem__)
            hits[strike] += bool(own) and strike(hosts, rng.choice(own))
        job.tell("end")
        result = job.wait(30).check()
    assert hits == {end_at_one_side: HITS, refuse: HITS}, result
    verdicts = result.values("found")
    assert result.values("wrong") == dict.fromkeys(range(RANKS), 0), result
    tries = [0] * len(verdicts[0])
    for number, calls in enumerate(zip(*verdicts.values(), strict=True)):
        tries[number] = max(call.pop() for call in calls)  # a rank that came late has missed the first
        assert all(call == calls[0] for call in calls), calls
        assert calls[0][:4] in ([True, True, "None", []], [False, True, "network", []]), calls
    # One call may meet several of the resets, but not all of them at once.
    assert sum(count > 1 for count in tries) >= HITS // 2, tries


def stopped_before_it_reads(numel: int, broadcast: bool) -> None:
    """Rank 1 is stopped when it is about to read rank 0's memory, which is used again when it goes on."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ng.safe_barrier(timeout=60).raise_if_failed()
    if rank == 1:
        real, sent = ring.read_process, ring._Incoming._take

        def stop_first(*arguments: Any) -> None:
            ring.read_process, ring._Incoming._take = real, sent  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGSTOP)

        def reads(pid: int, address: int, view: memoryview) -> None:
            stop_first()
            real(pid, address, view)

        def takes(incoming: Any, link: Any) -> None:
            if not incoming._mark and incoming._target is None:  # the bytes have come by the socket
                stop_first()
            sent(incoming, link)

        ring.read_process, ring._Incoming._take = reads, takes  # type: ignore[method-assign]
    tensor = torch.full((numel,), float(rank + 1))
    outcome = ng.safe_broadcast(tensor, 0, timeout=1) if broadcast else ng.safe_all_reduce(tensor, timeout=1)
    ok = outcome.ok
    if rank == 0:
        tensor.fill_(-7.0)
    faults.report(ok=ok, first=tensor[0].item(), text=str(outcome.incident))
    time.sleep(1)
    dist.destroy_process_group()


@pytest.mark.parametrize("rounds", ["1", "0"])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("numel", [16_384, 100_000])
def test_a_rank_that_was_stopped_before_it_read_never_returns_what_is_in_that_memory_later(
    numel: int, broadcast: bool, rounds: str
) -> None:
    """Its peer's call has failed meanwhile, and the memory is the caller's again."""
    env = {"NCCLGUARD_CROSS_MEMORY": "1", "NCCLGUARD_ROUNDS": rounds}
    with faults.start_ranks(stopped_before_it_reads, 2, args=[numel, broadcast], env=env, timeout=60) as job:
        job.wait_for("ok", [0])
        time.sleep(0.1)
        job.send_signal(1, signal.SIGCONT)
        result = job.wait()
    right = 1.0 if broadcast else 3.0
    assert result[1].reports["first"] == (right if result[1].reports["ok"] else 2.0), result
