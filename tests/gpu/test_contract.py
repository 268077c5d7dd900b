"""The contract for CUDA tensors on three ranks, rank 2 at fault: each call ends in time, with one verdict and the right name,
the tensor intact, and the next operation works.

The same faults as on CPU tensors (tests/distributed/test_contract.py), and those that only a GPU has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.transport import nccl
from tests.distributed.test_contract import CULPRIT, FAULTS, TIMEOUT, call, misbehave
from tests.gpu.parts import NCCL_BACKENDS, NEEDS_GPU, SHARED_GPU, join, leave, run_together

pytestmark = [*NEEDS_GPU, pytest.mark.usefixtures("own_processes")]

RANKS = 3
ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
STAYING = [fault for fault, (_, gone, _) in FAULTS.items() if not gone]
# Of the emulated GPU: a peer's death that NCCL does not notice, as over NVLink; a real one may do the same.
UNNOTICED = {"EMULATED_NCCL_DEATH_UNNOTICED": "1"}


def one_call(name: str, work: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> None:
    """Make a guarded call that fails, report everything about it as ``name``, and then make one that has to work."""
    before = tensor.clone()
    started = time.monotonic()
    outcome = work(tensor)
    found = {
        "seconds": time.monotonic() - started,
        "verdict": [outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits), outcome.op_id],
        "intact": bool(torch.equal(tensor, before)) and not outcome.torn,
    }
    again = torch.full((5,), float(dist.get_rank()), device="cuda")
    after = ng.safe_all_reduce(again, timeout=30, on_lost="shrink")
    found |= {"after": after.ok, "participants": list(after.participants), "total": again[0].item()}
    faults.report(**{name: found})


def guarded(names: list[str], backend: str, numel: int, chunk_numel: int | None) -> None:
    """One fault after the other in one job; after each, an operation that has to work."""
    rank = join(backend)
    for fault in names:
        tensor = torch.arange(float(numel), device="cuda") * (rank + 1)
        ng.safe_all_reduce(torch.ones(1, device="cuda"), timeout=60).raise_if_failed()
        if rank == CULPRIT:
            misbehave(fault)

        def work(mine: torch.Tensor, fault: str = fault) -> Any:
            if rank == CULPRIT and fault == "other_op":  # of the same device: barriers are the host's
                return ng.safe_broadcast(mine, 0, timeout=TIMEOUT)
            return call(fault, rank, mine, timeout=TIMEOUT, chunk_numel=chunk_numel)

        one_call(fault, work, tensor)
    leave()


def check(result: faults.JobResult, fault: str, cause: str, gone: bool, bound: float) -> None:
    """Equal verdicts on all live ranks within the bound, bit-equal input, then a correct sum among the right ranks."""
    found = result.values(fault)
    rest = [rank for rank in range(RANKS) if not (gone and rank == CULPRIT)]
    assert sorted(found) == rest, str(result)
    for rank in rest:
        ok, agreed, told, culprits, op_id = found[rank]["verdict"]
        assert (ok, agreed, told, culprits) == (False, True, cause, [CULPRIT]), (fault, rank, found[rank], str(result))
        assert op_id == found[0]["verdict"][4]
        assert found[rank]["intact"], (fault, rank)
        if rank != CULPRIT:
            assert found[rank]["seconds"] < bound, (fault, found[rank])
        after = (found[rank]["after"], found[rank]["participants"], found[rank]["total"])
        assert after == (True, rest, float(sum(rest))), (fault, rank, after)


@pytest.mark.parametrize("backend", ["gloo", *NCCL_BACKENDS])
def test_faults_that_leave_all_ranks_alive(backend: str) -> None:
    result = run_together(guarded, RANKS, args=[STAYING, backend, 1000, None], env=ENV, timeout=150)
    for fault in STAYING:
        cause, gone, bound = FAULTS[fault]
        check(result, fault, cause, gone, bound)


@pytest.mark.parametrize("backend", NCCL_BACKENDS)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in STAYING])
def test_faults_that_end_a_rank(fault: str, backend: str) -> None:
    result = run_together(guarded, RANKS, args=[[fault], backend, 1000, None], env=ENV, timeout=60)
    cause, gone, bound = FAULTS[fault]
    check(result, fault, cause, gone, bound)


def killed_in_flight() -> None:
    """Rank 2 is killed when its third piece is launched, while those before it are on their way."""
    rank = join("nccl")
    tensor = torch.arange(4_000_000.0, device="cuda") * (rank + 1)
    ng.safe_all_reduce(torch.ones(1, device="cuda"), timeout=60).raise_if_failed()
    if rank == CULPRIT:
        all_reduce, pieces = nccl.NcclCommunicator.all_reduce, []

        def counted(self: nccl.NcclCommunicator, piece: torch.Tensor, *arguments: Any) -> Any:
            pieces.append(piece)
            if len(pieces) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return all_reduce(self, piece, *arguments)

        nccl.NcclCommunicator.all_reduce = counted  # type: ignore[method-assign]
    one_call("kill", lambda mine: ng.safe_all_reduce(mine, timeout=20, chunk_numel=500_000), tensor)
    leave()


@pytest.mark.parametrize("unnoticed", [False, True])
def test_a_rank_killed_with_kernels_in_flight(unnoticed: bool) -> None:
    env = {**ENV, **UNNOTICED} if unnoticed else ENV
    result = run_together(killed_in_flight, RANKS, env=env, timeout=60)
    check(result, "kill", "lost", True, 3.0)


def abort_hangs() -> None:
    """As `killed_in_flight`, and on rank 0 the abort of the communicator does not come back for 15 s."""
    abort = nccl.abort_group

    def slow(group: Any, device: torch.device) -> None:
        time.sleep(15)
        abort(group, device)

    if os.environ["RANK"] == "0":
        nccl.abort_group = slow
    killed_in_flight()


def test_a_rank_killed_with_kernels_in_flight_where_an_abort_hangs() -> None:
    result = run_together(abort_hangs, RANKS, env={**ENV, **UNNOTICED}, timeout=90)
    check(result, "kill", "lost", True, 6.0)


def all_collectives() -> None:
    """Rank 2 is late at each collective in turn; the next one of the same kind has the right result."""
    rank = join("nccl")
    size, wrong = dist.get_world_size(), []
    ones = torch.ones(30, device="cuda")
    ng.safe_all_reduce(ones.clone(), timeout=60).raise_if_failed()

    def gathered(timeout: float) -> tuple[Any, list[float]]:
        parts = [torch.zeros(30, device="cuda") for _ in range(size)]
        outcome = ng.safe_all_gather(parts, ones * rank, timeout=timeout)
        return outcome, [float(part[0]) for part in parts]

    def scattered(timeout: float) -> tuple[Any, list[float]]:
        output = torch.zeros(30, device="cuda")
        outcome = ng.safe_reduce_scatter(output, [ones * peer for peer in range(size)], timeout=timeout)
        return outcome, [float(output[0])]

    def sent(timeout: float) -> tuple[Any, list[float]]:
        tensor = ones * rank
        outcome = ng.safe_broadcast(tensor, 1, timeout=timeout)
        return outcome, [float(tensor[0])]

    def reduced(timeout: float) -> tuple[Any, list[float]]:
        tensor = ones * rank
        outcome = ng.safe_all_reduce(tensor, timeout=timeout)
        return outcome, [float(tensor[0])]

    kinds = {
        "all_gather": (gathered, [0.0] * size, [float(peer) for peer in range(size)]),
        "reduce_scatter": (scattered, [0.0], [float(rank * size)]),
        "broadcast": (sent, [float(rank)], [1.0]),
        "all_reduce": (reduced, [float(rank)], [float(sum(range(size)))]),
    }
    for name, (work, before, result) in kinds.items():
        if rank == CULPRIT:
            time.sleep(2.5)
        outcome, kept = work(1.0)
        if (outcome.ok, str(outcome.cause), list(outcome.culprits), kept) != (False, "late", [CULPRIT], before):
            wrong.append(f"{name}: {outcome} {kept}")
        outcome, found = work(60.0)
        if (outcome.ok, found) != (True, result):
            wrong.append(f"{name} afterwards: {outcome} {found}")
    faults.report(wrong=wrong)
    leave()


def test_a_late_rank_at_each_collective_leaves_the_outputs_as_they_were() -> None:
    result = run_together(all_collectives, RANKS, env=ENV, timeout=90)
    assert result.values("wrong") == {rank: [] for rank in range(RANKS)}, str(result)


def break_cuda() -> None:
    """Make the errors of this process's CUDA context last: whatever is called of CUDA from now on fails."""
    if "emulated" in torch.cuda.get_device_name():
        import emulated_gpu

        emulated_gpu.set("EMULATED_CUDA_ERROR_AT", 1)
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    else:
        torch._assert_async(torch.zeros(1, device="cuda"))


def sticky() -> None:
    """Rank 2's CUDA context is broken by something else than the guard; the error of its call ends it."""
    rank = join("nccl")
    ng.safe_all_reduce(torch.ones(1, device="cuda"), timeout=60).raise_if_failed()
    tensor = torch.arange(1000.0, device="cuda") * (rank + 1)
    torch.cuda.synchronize()
    if rank == CULPRIT:
        break_cuda()
        try:
            ng.safe_all_reduce(tensor, timeout=10).raise_if_failed()
        except Exception as error:
            faults.report(raised=type(error).__name__)
            raise
    one_call("sticky", lambda mine: ng.safe_all_reduce(mine, timeout=10), tensor)
    leave()


def test_a_rank_whose_cuda_is_broken_is_named() -> None:
    result = run_together(sticky, RANKS, env=ENV, timeout=60)
    check(result, "sticky", "failed", True, 3.0)
    assert result[CULPRIT].reports.get("raised"), str(result)
