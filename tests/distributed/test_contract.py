"""The contract on a 4-rank job in which rank 2 is at fault: it ends, with one verdict, the input intact, rank 2 named, and goes on.

Each fault is also shown without the guard: there the others wait until the process group's own timeout, or get an error that
names no rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.protocol import timing

pytestmark = pytest.mark.usefixtures("own_processes")

CULPRIT = 2
TIMEOUT = 3.0
#: Seconds that the verdict on a silent rank may be later on a machine that has no time for all: see `Timing.is_over`.
BUSY = timing.RESERVE / 2
#: The limit where a fault is known at once, and a time long before it within which all must know, also on a busy machine.
LONG, SOON = 40.0, 15.0
#: fault -> (cause, whether rank 2 is gone afterwards, seconds within which all must know; design figures plus room for two cores)
FAULTS = {
    "late": ("late", False, TIMEOUT + 2.0),
    "stop": ("stuck", False, TIMEOUT + 2.0 + BUSY),
    "gil": ("stuck", False, TIMEOUT + 2.0 + BUSY),
    "kill": ("lost", True, SOON),
    "raise": ("failed", True, SOON),
    "exit": ("exited", True, SOON),
    "shape": ("diverged", False, SOON),
    "dtype": ("diverged", False, SOON),
    "reduce_op": ("diverged", False, SOON),
    "other_op": ("diverged", False, SOON),
}


def misbehave(fault: str) -> None:
    """What rank 2 does just before the collective that the others are in."""
    if fault == "late":
        time.sleep(TIMEOUT + 4)
    elif fault == "stop":
        silent_until_the_verdict(
            lambda: os.kill(os.getppid(), signal.SIGCONT), lambda: os.kill(os.getpid(), signal.SIGSTOP)
        )
    elif fault == "gil":
        reader, writer = os.pipe()
        one = ctypes.create_string_buffer(1)  # PyDLL keeps the GIL during the call
        silent_until_the_verdict(lambda: os.write(writer, b"1"), lambda: ctypes.PyDLL(None).read(reader, one, 1))
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ValueError("boom in rank 2")
    elif fault == "exit":
        sys.exit(0)


def silent_until_the_verdict(resume: Callable[[], object], be_silent: Callable[[], object]) -> None:
    """Be silent until the first of the others has its verdict, however long that takes on a busy machine; 30 s at most.

    `resume` is called in a child process, as the silent one could not.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(verdict_address())
        ear.settimeout(30)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(TimeoutError):
                ear.recv(1)
            resume()
            os._exit(0)
    be_silent()
    os.waitpid(child, 0)


def verdict_address() -> str:
    return f"\0verdict-{os.environ['MASTER_PORT']}"  # of the abstract namespace: it ends with who listens


def call(fault: str, rank: int, tensor: torch.Tensor, **options: Any) -> Any:
    """The collective that all make; rank 2 another one where the fault says so."""
    if rank != CULPRIT:
        outcome = ng.safe_all_reduce(tensor, **options)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth, contextlib.suppress(ConnectionRefusedError):
            mouth.sendto(b"1", verdict_address())
        return outcome
    if fault == "shape":
        return ng.safe_all_reduce(tensor[:10], **options)
    if fault == "dtype":
        return ng.safe_all_reduce(tensor.view(torch.int32), **options)
    if fault == "reduce_op":
        return ng.safe_all_reduce(tensor, dist.ReduceOp.MAX, **options)
    if fault == "other_op":
        return ng.safe_barrier(**options)
    return ng.safe_all_reduce(tensor, **options)


def guarded(names: list[str], numel: int, chunk_numel: int | None) -> None:
    """One fault after the other in one job; after each, an operation that has to work."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for fault in names:
        tensor = torch.arange(float(numel)) * (rank + 1)
        before = tensor.clone()
        ng.safe_barrier(timeout=30).raise_if_failed()
        if rank == CULPRIT:
            misbehave(fault)
        started = time.monotonic()
        options = {} if rank == CULPRIT and fault == "other_op" else {"chunk_numel": chunk_numel}
        limit = LONG if FAULTS[fault][2] == SOON else TIMEOUT
        outcome = call(fault, rank, tensor, timeout=limit, **options)
        found = {
            "seconds": time.monotonic() - started,
            "verdict": [outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits), outcome.op_id],
            "intact": torch.equal(tensor, before) and not outcome.torn,
            "incident": outcome.incident.to_json(),
        }
        again = torch.full((5,), float(rank))
        after = ng.safe_all_reduce(again, timeout=30, on_lost="shrink")
        found |= {"after": after.ok, "participants": list(after.participants), "total": again[0].item()}
        faults.report(**{fault: found})
    dist.destroy_process_group()


def unguarded(fault: str) -> None:
    """The same with plain torch: what the guard is there for."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    dist.barrier()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend._set_default_timeout(timedelta(seconds=4))  # not before: it would hold for connecting too
    started = time.monotonic()
    if rank == CULPRIT:
        misbehave(fault)
    try:
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        faults.report(error="", seconds=time.monotonic() - started)
    except RuntimeError as error:
        faults.report(error=str(error), seconds=time.monotonic() - started)


def check(result: faults.JobResult, fault: str) -> dict[int, dict[str, Any]]:
    """Equal verdicts on all live ranks within the bound, bit-equal input, then a correct sum among the right ranks."""
    cause, gone, bound = FAULTS[fault]
    found = result.values(fault)
    live = [rank for rank in range(4) if not (gone and rank == CULPRIT)]
    rest = [0, 1, 3] if gone else [0, 1, 2, 3]
    assert sorted(found) == live, str(result)
    for rank in live:
        ok, agreed, told, culprits, op_id = found[rank]["verdict"]
        assert (ok, agreed, told, culprits) == (False, True, cause, [CULPRIT]), (fault, rank, found[rank])
        assert op_id == found[0]["verdict"][4]
        assert found[rank]["intact"], (fault, rank)
        assert ng.Incident.from_json(found[rank]["incident"]).culprits == (CULPRIT,)
        if rank != CULPRIT:
            assert found[rank]["seconds"] < bound, (fault, found[rank])
        after = (found[rank]["after"], found[rank]["participants"], found[rank]["total"])
        assert after == (True, rest, float(sum(rest))), (fault, rank, after)
    return found


def test_faults_that_leave_all_ranks_alive() -> None:
    """Late, stopped, GIL held, and four ways to diverge: each ends in time with rank 2 named, and all four go on."""
    names = [fault for fault, (_, gone, _) in FAULTS.items() if not gone]
    result = faults.run_ranks(guarded, 4, args=[names, 1000, None], timeout=150)
    for fault in names:
        check(result, fault)
    late = ng.Incident.from_json(result[3].reports["late"]["incident"])
    culprit = next(report for report in late.ranks if report.rank == CULPRIT)
    assert culprit.pid > 0
    assert any("misbehave" in frame for frame in culprit.stack), culprit
    assert "misbehave" in str(late)


@pytest.mark.parametrize("fault", ["kill", "raise", "exit"])
def test_faults_that_end_rank_2(fault: str) -> None:
    """Known within a second or so, whatever the timeout; the three that are left go on without it."""
    result = faults.run_ranks(guarded, 4, args=[[fault], 1000, None], timeout=60)
    found = check(result, fault)
    if fault == "raise":
        text = str(ng.Incident.from_json(found[0]["incident"]))
        assert "ValueError" in text
        assert "boom in rank 2" in text
        assert "misbehave" in text


@pytest.mark.parametrize("names", [["late", "shape"], ["kill"]])
def test_a_large_operation_in_pieces_is_restored_bit_for_bit(names: list[str]) -> None:
    """With a closing round and pieces in flight: the same verdict, and every element as it was."""
    result = faults.run_ranks(guarded, 4, args=[names, 1_000_000, 100_000], timeout=90)
    for fault in names:
        check(result, fault)


@pytest.mark.parametrize("fault", ["late", "kill"])
def test_without_the_guard_nobody_is_named(fault: str) -> None:
    """Plain gloo: the others get an error that names no rank, or wait for the process group's timeout."""
    result = faults.run_ranks(unguarded, 4, args=[fault], timeout=60)
    errors = {rank: result[rank].reports["error"] for rank in (0, 1, 3)}
    assert all(errors.values()), result
    assert not any("rank 2" in error.lower() for error in errors.values()), errors
    if fault == "late":
        assert min(result[rank].reports["seconds"] for rank in (0, 1, 3)) > 3.0, result
