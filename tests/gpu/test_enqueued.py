"""The backend "ncclguard-nccl": torch's own NCCL beneath a guarded group, one verdict, and a new communicator after it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import ncclguard as ng
from ncclguard import faults
from ncclguard.process_group.enqueued import EnqueuedProcessGroup
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join, leave, nccl2, run_together

pytestmark = NEEDS_GPU

RANKS, CULPRIT, LIMIT = 3, 2, 3.0
ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}
NAME = "ncclguard-nccl"
#: nccl2 (torch 2.15) cannot be captured into a graph on an emulated GPU.
PLAIN = "cpu:gloo,cuda:nccl-legacy" if nccl2() else "cpu:gloo,cuda:nccl"


def group() -> EnqueuedProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, EnqueuedProcessGroup)
    return world


# ------------------------------------------------------------------ what it carries


def ring(rank: int, x: torch.Tensor) -> list[float]:
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, (rank + 1) % RANKS),
        dist.P2POp(dist.irecv, received, (rank - 1) % RANKS),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received.tolist()


def coalesced(x: torch.Tensor) -> list[float]:
    tensors = [x.clone(), x.clone() * 2]
    with dist._coalescing_manager(group=dist.group.WORLD, device=x.device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    return [float(tensor[0]) for tensor in tensors]


def into(call: Callable[..., Any], output: torch.Tensor, given: torch.Tensor) -> list[float]:
    call(output, given)
    return output.tolist()


def captured(x: torch.Tensor) -> list[float]:
    graph, y = torch.cuda.CUDAGraph(), x.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        dist.all_reduce(y)
    y.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    return y.tolist()


def trained() -> float:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).cuda())
    model(torch.full((2, 4), dist.get_rank() + 1.0, device="cuda")).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    return float(gradient[0, 0])


def sharded() -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (RANKS,))
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        loss = model(torch.ones(2, 6, device="cuda")).sum()
        loss.backward()
    return round(float(loss), 3)


def every_call(backend: str) -> None:
    rank = join(backend, 60.0)
    x = torch.full((2,), rank + 1.0, device="cuda")
    wide = torch.arange(2.0 * RANKS, device="cuda") + rank
    found = {
        "all_reduce": into(lambda o, i: dist.all_reduce(o.copy_(i)), x.clone(), x),
        "all_gather_into": into(dist.all_gather_into_tensor, torch.empty(2 * RANKS, device="cuda"), x),
        "reduce_scatter": into(dist.reduce_scatter_tensor, torch.empty(2, device="cuda"), wide),
        "all_to_all": into(dist.all_to_all_single, torch.empty_like(wide), wide),
        "broadcast": into(lambda o, i: dist.broadcast(o.copy_(i), 1), x.clone(), x),
        "ring": ring(rank, x),
        "coalesced": coalesced(x),
        "functional": functional.all_reduce(x, "sum", dist.group.WORLD).tolist(),
        "functional gather": functional.all_gather_tensor(x, 0, dist.group.WORLD).tolist(),
        "ddp": trained(),
        "fsdp": sharded(),
    }
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, {"rank": rank})
    found["objects"] = gathered
    host = torch.ones(3)
    dist.all_reduce(host) if backend == NAME else host.mul_(RANKS)
    found["cpu"] = host.tolist()
    found["captured"] = captured(x)  # last: as long as the graph lives, an abort of the communicator hangs
    dist.barrier()
    faults.report(found=found)
    leave()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_call_gives_what_torchs_own_backend_gives() -> None:
    guarded = run_together(every_call, RANKS, args=[NAME], env=ENV, timeout=200).check()
    plain = run_together(every_call, RANKS, args=[PLAIN], env=ENV, timeout=200).check()
    assert guarded.values("found") == plain.values("found")


# ------------------------------------------------------------------ one verdict

FAULTS = {
    "late": ("late", (0, 1, 2)),
    "stop": ("stuck", (0, 1)),
    "kill": ("lost", (0, 1)),
    "raise": ("failed", (0, 1)),
    "exit": ("exited", (0, 1)),
    "size": ("diverged", (0, 1, 2)),
    "kind": ("diverged", (0, 1, 2)),
    "skip": ("late", (0, 1, 2)),
}


def strike(fault: str, x: torch.Tensor) -> None:
    if fault == "late":
        time.sleep(LIMIT + 1.5)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ValueError("boom")
    elif fault == "exit":
        sys.exit(0)
    elif fault == "size":
        dist.all_reduce(torch.ones(999, device="cuda"))
    elif fault == "kind":
        dist.broadcast(x, 0)


def struck(fault: str, wait: str) -> None:
    rank = join(NAME, LIMIT)
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    dist.barrier()
    began = time.monotonic()
    try:
        if rank == CULPRIT:
            strike(fault, x)
        else:
            dist.all_reduce(x)
        issued = time.monotonic() - began
        if rank == CULPRIT and fault != "size":
            wait = "check"
        if wait == "synchronize":
            torch.cuda.synchronize()
        elif wait == "item":
            float(x[0])
        elif wait == "barrier":
            dist.barrier()
        elif wait == "next":
            time.sleep(LIMIT + 1.0)
            dist.all_reduce(x)
        elif wait == "check":
            while time.monotonic() - began < 20.0:
                group().check()
                time.sleep(0.01)
        for _ in range(100):  # an exception for this thread comes between two of these
            time.sleep(0.01)
        faults.report(error="none")
    except ng.CollectiveFailed as error:
        outcome = error.outcome
        said = [type(error).__name__, str(outcome.cause), list(outcome.culprits), outcome.agreed, outcome.torn]
        faults.report(error=said, issued=issued if rank != CULPRIT else 0.0, after=time.monotonic() - began)
    group().check()  # its error is raised once
    if fault in ("late", "size", "kind", "skip"):
        dist.barrier()  # the ranks meet again, on the host
        again = torch.ones(10, device="cuda")
        dist.all_reduce(again)
        faults.report(again=float(again[0]), same=group() is dist.group.WORLD)
    else:
        try:
            dist.all_reduce(x)
        except ng.CollectiveFailed as error:
            faults.report(later=type(error).__name__)
    leave()


ERRORS = {
    "late": "CollectiveTimeout",
    "stuck": "CollectiveTimeout",
    "lost": "PeerLost",
    "failed": "PeerFailed",
    "exited": "PeerFailed",
    "diverged": "CollectiveMismatch",
}


def run(fault: str, wait: str) -> None:
    cause, ranks = FAULTS[fault]
    with faults.start_ranks(struck, RANKS, args=[fault, wait], env=ENV, timeout=120) as job:
        reports = job.wait_for("done", ranks=ranks, seconds=60)
        assert set(reports) == set(ranks)
        if fault == "stop":
            job.send_signal(CULPRIT, signal.SIGKILL)
        job.tell("end")
        result = job.wait()
    for rank in ranks:
        found = result[rank].reports
        assert found["error"] == [ERRORS[cause], cause, [CULPRIT], True, True], (rank, found, str(result))
        assert found["issued"] < 1.0  # the host was not held
        assert found["after"] < LIMIT + 8.0
        if CULPRIT in ranks:
            assert found["again"] == float(RANKS)
            assert found["same"]
        else:
            assert found["later"] in ("PeerLost", "PeerFailed", "CollectiveTimeout"), found


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "size"])
def test_the_struck_rank_is_named_on_all_and_the_same_group_works_again(fault: str) -> None:
    run(fault, "check")


def test_another_size_is_a_mismatch_also_where_nccl_ends_it() -> None:
    """On a real GPU NCCL ends all-reduces of 1,000 and 999 elements, with rubbish; an emulated one waits for ever."""
    run("size", "barrier")


@pytest.mark.parametrize("wait", ["synchronize", "item", "barrier", "next"])
def test_the_error_comes_out_where_the_host_waits_or_with_the_next_collective(wait: str) -> None:
    run("late", wait)


def ahead() -> None:
    """The host issues on, steps ahead of a hang that it knows nothing of, and never meets the device."""
    rank = join(NAME, LIMIT)
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    dist.barrier()
    issued = 0
    try:
        while rank != CULPRIT or issued < 10:
            dist.all_reduce(x)
            issued += 1
            time.sleep(0.1)
        time.sleep(LIMIT + 3.0)
        group().check()
    except ng.CollectiveTimeout as error:
        faults.report(said=[str(error.outcome.cause), list(error.outcome.culprits)], ahead=issued)
    leave()


def test_a_host_that_is_steps_ahead_has_the_error_with_a_later_collective() -> None:
    result = run_together(ahead, RANKS, env=ENV, timeout=120).check()
    for rank in range(RANKS):
        assert result[rank].reports["said"] == ["late", [CULPRIT]]
        assert result[rank].reports["ahead"] >= 10


def two_groups() -> None:
    """Ranks 0 and 1 wait in a group of theirs, 1 and 2 in another; rank 0 stays away from the first."""
    rank = join(NAME, LIMIT)
    first, second = (dist.new_group([0, 1], backend=NAME, timeout=timedelta(seconds=LIMIT)) for _ in range(2))
    everyone = dist.group.WORLD
    x = torch.ones(10, device="cuda")
    dist.all_reduce(x, group=everyone)
    if rank < 2:
        dist.all_reduce(x, group=first)
        dist.all_reduce(x, group=second)
    dist.barrier()
    try:
        if rank == 1:
            dist.all_reduce(x, group=first)
        if rank != 0:
            dist.all_reduce(x, group=everyone)
        torch.cuda.synchronize()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            group().check()
            time.sleep(0.01)
    except ng.CollectiveFailed as error:
        faults.report(said=[str(error.outcome.cause), list(error.outcome.culprits)])
    dist.barrier()
    again = torch.ones(1, device="cuda")
    dist.all_reduce(again, group=everyone)
    if rank < 2:
        dist.all_reduce(again, group=second)
    faults.report(again=float(again))
    leave()


def test_a_verdict_on_one_group_ends_all_and_each_works_again() -> None:
    result = run_together(two_groups, RANKS, env=ENV, timeout=120).check()
    assert result.values("said") == {rank: ["late", [0]] for rank in range(RANKS)}
    assert result.values("again") == {0: 6.0, 1: 6.0, 2: 3.0}


def in_backward() -> None:
    """DDP's reducer, in C++, meets the verdict; rank 2 stays away from its second step."""
    rank = join(NAME, LIMIT)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1).cuda())
    x = torch.ones(2, 4, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    dist.barrier()
    try:
        if rank == CULPRIT:
            time.sleep(LIMIT + 3.0)
        for _ in range(10):
            model(x).sum().backward()
            time.sleep(1.0)
    except (ng.CollectiveFailed, RuntimeError) as error:
        faults.report(said=str(error), kind=type(error).__name__)
    leave()


def test_the_reducer_of_ddp_raises_it_in_backward() -> None:
    result = run_together(in_backward, RANKS, env=ENV, timeout=120).check()
    for rank in range(RANKS):
        assert "rank 2 late" in result[rank].reports["said"], result[rank].reports


# ------------------------------------------------------------------ facts about torch that it is built on


def facts() -> None:
    from torch._C import _distributed_c10d as c

    rank = join("cpu:gloo,cuda:nccl", 60.0)
    store = c.PrefixStore("facts", dist.distributed_c10d._get_default_store())

    def backend(name: str, blocking: bool) -> Any:
        options = c.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=60)
        options.config.blocking = blocking
        return c.ProcessGroupNCCL(c.PrefixStore(name, store), rank, RANKS, options)

    kind = dist.ProcessGroup.BackendType.NCCL
    first, second = backend("first", True), backend("second", True)
    plain: Any = dist.ProcessGroup(store, rank, RANKS)
    plain._register_backend(torch.device("cuda"), kind, first)
    plain._register_backend(torch.device("cuda"), kind, second)
    x = torch.ones(RANKS, device="cuda")
    plain.allreduce([x]).wait()
    torch.cuda.synchronize()
    counted = [one._get_sequence_number_for_group() for one in (first, second)]
    work = None
    if rank != CULPRIT:
        work = first.allreduce([x])
    time.sleep(0.5)
    first.abort()
    torch.cuda.synchronize()
    faults.report(counted=counted, after_abort=None if work is None else [work.is_completed(), bool(work.wait())])
    leave()


def test_a_group_keeps_its_first_backend_and_an_aborted_operation_looks_like_a_success() -> None:
    result = run_together(facts, RANKS, env=ENV, timeout=120).check()
    for rank in range(RANKS):
        assert result[rank].reports["counted"][1] == 0
        assert result[rank].reports["counted"][0] > 0
        assert result[rank].reports["after_abort"] == (None if rank == CULPRIT else [True, True])


def beside() -> None:
    join("cpu:gloo,cuda:nccl", 60.0)
    dist.new_group(backend="ncclguard")
    output = torch.empty(RANKS, device="cuda")
    dist.all_gather_into_tensor(output, torch.ones(1, device="cuda"))
    faults.report(gathered=output.tolist())
    leave()


def test_blocking_gathers_of_a_plain_nccl_group_work_beside_a_guarded_one() -> None:
    result = run_together(beside, RANKS, env=ENV, timeout=120).check()
    assert result.values("gathered") == {rank: [1.0] * RANKS for rank in range(RANKS)}
