"""The process group over the engine: torch's results, typed errors that name the rank, and usable again on the same object."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import events, faults, torch_compat
from ncclguard.engine import runtime
from ncclguard.process_group import GuardedProcessGroup, redirected

sys.path.insert(0, str(Path(__file__).parent))
import process_group_cases as cases

CULPRIT = 2
LIMIT = 3.0
#: Seconds for which rank 2 stays away; on a busy machine the others may begin to wait later than it does.
LATE = LIMIT + 4


# ---------------------------------------------------------------------- the same results


def compare() -> None:
    """Each collective on plain gloo, on a guarded group, and on a plain group that is redirected."""
    dist.init_process_group("gloo")
    plain, guarded, other = dist.group.WORLD, dist.new_group(backend="ncclguard"), dist.new_group()
    assert isinstance(guarded, GuardedProcessGroup)
    method = vars(dist.ProcessGroup)["allreduce"]
    missing = []
    for case in cases.CASES:
        try:
            expected = cases.outcome_of(case, plain)
        except RuntimeError as error:
            if "does not support" not in str(error):
                raise
            missing.append(case.__name__)
            continue
        found = cases.outcome_of(case, guarded)
        with redirected(other) as scope:
            detoured = cases.outcome_of(case, other)
        faults.report(**{case.__name__: [found == expected, detoured == expected, len(scope.failures)]})
    calls = _calls(other)
    again = cases.outcome_of(cases.all_reduce, other) == cases.outcome_of(cases.all_reduce, plain)
    assert vars(dist.ProcessGroup)["allreduce"] is method
    faults.report(restored=again and _calls(other) == calls > len(cases.CASES) - len(missing), missing=missing)
    dist.destroy_process_group()


def _calls(group: Any) -> int:
    return runtime.current().group(group, torch.device("cpu"), "backend").calls


def test_every_collective_gives_what_gloo_gives() -> None:
    """Blocking, asynchronous, coalesced, messages, objects, and those that C++ calls."""
    result = faults.run_ranks(compare, 3, timeout=110)
    for rank in range(3):
        reports = dict(result[rank].reports)
        assert reports.pop("restored"), result
        missing = reports.pop("missing")  # of gloo: reduce_scatter in torch 2.6, all_to_all of lists in 2.9
        assert not missing or torch_compat.VERSION < (2, 13), missing
        names = [case.__name__ for case in cases.CASES if case.__name__ not in missing]
        assert reports == {name: [True, True, 0] for name in names}, result


def held_by_cpp_alone() -> None:
    """DDP hands out its buffers like this: C++ waits for works of which Python has kept nothing."""
    dist.init_process_group("ncclguard")
    for _ in range(50):
        dist._broadcast_coalesced(dist.group.WORLD, [torch.ones(50_000) for _ in range(8)], 200_000, 0)
    faults.report(done=True)
    dist.destroy_process_group()


def test_cpp_waits_for_a_work_that_python_has_let_go() -> None:
    result = faults.run_ranks(held_by_cpp_alone, 3, timeout=60).check()
    assert all(result[rank].reports["done"] for rank in range(3))


# ---------------------------------------------------------------------- faults


def failing(call: Callable[[], Any]) -> dict[str, Any]:
    """Who is to blame by the error of a call that must fail, and when it came."""
    started = time.monotonic()
    try:
        call()
    except ng.CollectiveFailed as error:
        found = {"error": type(error).__name__, "culprits": list(error.outcome.culprits), "text": str(error)}
    except (RuntimeError, ValueError) as error:
        found = {"error": type(error).__name__, "culprits": [], "text": str(error)}
    else:
        found = {"error": "", "culprits": [], "text": ""}
    return found | {"seconds": time.monotonic() - started}


def works_again(group: Any) -> bool:
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    return bool(total.tolist() == [3.0] * 3)


def late(group: Any, rank: int) -> dict[str, Any]:
    tensor = torch.full((4,), float(rank))
    if rank == CULPRIT:
        time.sleep(LATE)
    found = failing(lambda: dist.all_reduce(tensor, group=group))
    return found | {"intact": tensor.tolist() == [float(rank)] * 4}


def late_asynchronous(group: Any, rank: int) -> dict[str, Any]:
    """Both of two in flight fail, at their wait; the future carries the text."""
    if rank == CULPRIT:
        time.sleep(LATE)
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(2)]
    found = failing(works[0].wait)
    future = failing(lambda: works[0].get_future().wait())
    return found | {"future": [future["error"], "rank 2" in future["text"]], "second": failing(works[1].wait)["error"]}


def late_gather(group: Any, rank: int) -> dict[str, Any]:
    """One that the engine has no call of its own for."""
    slots = [torch.zeros(2) for _ in range(3)] if rank == 0 else None
    if rank == CULPRIT:
        time.sleep(LATE)
    return failing(lambda: dist.gather(torch.ones(2), slots, dst=0, group=group))


def other_root(group: Any, rank: int) -> dict[str, Any]:
    tensor = torch.ones(2)
    return failing(lambda: dist.reduce(tensor, dst=1 if rank == CULPRIT else 0, group=group))


def splits_that_disagree(group: Any, rank: int) -> dict[str, Any]:
    """Plain gloo ends the process here."""
    splits = [1, 1, 2] if rank == CULPRIT else [1, 1, 1]
    output = torch.zeros(3)
    return failing(lambda: dist.all_to_all_single(output, torch.ones(sum(splits)), None, splits, group=group))


def message_that_does_not_come(group: Any, rank: int) -> dict[str, Any]:
    if rank == CULPRIT:
        time.sleep(LATE)
        return failing(lambda: dist.send(torch.ones(2), 0, group))
    return failing(lambda: dist.recv(torch.ones(2), CULPRIT, group)) if rank == 0 else {}


def backward(group: Any, rank: int) -> dict[str, Any]:
    """DDP's reducer, in C++, waits for the future of its buckets."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2), process_group=group)
    loss = model(torch.ones(1, 4)).sum()
    if rank == CULPRIT:
        time.sleep(LATE)
    return failing(loss.backward)


FAULTS = (late, late_asynchronous, late_gather, other_root, splits_that_disagree, message_that_does_not_come, backward)


def one_after_the_other() -> None:
    """Every fault on the same object, which has to work again after each."""
    dist.init_process_group("ncclguard", timeout=timedelta(seconds=LIMIT))
    group, rank = dist.group.WORLD, dist.get_rank()
    for fault in FAULTS:
        ng.safe_barrier(timeout=30).raise_if_failed()
        found = fault(group, rank)
        ng.safe_barrier(timeout=30).raise_if_failed()
        faults.report(**{fault.__name__: found, f"{fault.__name__}_again": works_again(group)})
    dist.destroy_process_group()


def test_a_failure_names_the_rank_and_leaves_the_group_usable() -> None:
    """On all ranks, within the limit; then the same object carries collectives again."""
    result = faults.run_ranks(one_after_the_other, 3, timeout=240)
    expected = {
        "late": "CollectiveTimeout",
        "late_asynchronous": "CollectiveTimeout",
        "late_gather": "CollectiveTimeout",
        "other_root": "CollectiveMismatch",
        "splits_that_disagree": "ValueError",
        "message_that_does_not_come": "CollectiveTimeout",
        "backward": "RuntimeError",
    }
    for rank in range(3):
        reports = result[rank].reports
        for name, error in expected.items():
            found = reports[name]
            assert reports[f"{name}_again"], (rank, name)
            if found == {}:
                continue
            assert found["error"] == error, (rank, name, found)
            assert found["seconds"] < LIMIT + 2, (rank, name, found)
            if error.startswith("Collective"):
                assert found["culprits"] == [CULPRIT], (rank, name, found)
        assert reports["late"]["intact"]
        assert reports["late_asynchronous"]["future"] == ["RuntimeError", True]
        assert reports["late_asynchronous"]["second"] == "CollectiveTimeout"
        assert "rank 2" in reports["backward"]["text"]
        assert "rank 2 sends 2 elements to rank 2, which expects 1" in reports["splits_that_disagree"]["text"]


class Traffic(events.Listener):
    """What outcomes say of the bytes that all-to-alls move."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []

    def call_ended(self, group: str, call: Any, outcome: ng.Outcome | None) -> None:
        if outcome is not None and outcome.op == "all_to_all":
            self.seen.append((outcome.numel, outcome.nbytes, outcome.busbw > 0))


def exchange_counted() -> None:
    """Even and uneven splits, whose sizes differ by rank."""
    dist.init_process_group("ncclguard")
    rank, size, traffic = dist.get_rank(), dist.get_world_size(), Traffic()
    events.listen(traffic)
    dist.all_to_all_single(torch.zeros(5 * size), torch.ones(5 * size))
    outgoing = [target + 1 for target in range(size)]
    incoming = torch.zeros(size * (rank + 1), dtype=torch.float64)
    dist.all_to_all_single(incoming, torch.ones(sum(outgoing), dtype=torch.float64), [rank + 1] * size, outgoing)
    dist.all_to_all([torch.zeros(0)] * size, [torch.zeros(0)] * size)
    faults.report(seen=traffic.seen)
    dist.destroy_process_group()


def test_an_all_to_all_counts_what_it_moves() -> None:
    """As nccl-tests do: all that a rank sends; it was 0 of 0 bytes."""
    seen = faults.run_ranks(exchange_counted, 3, timeout=60).values("seen")
    for rank in range(3):
        assert seen[rank][1::2] == [[15, 60, True], [6, 48, True], [0, 0, False]], seen  # before each: the sizes


def killed() -> None:
    """Rank 2 is killed; rank 1 ends while a collective that nobody waits for is under way."""
    dist.init_process_group("ncclguard")
    works_again(dist.group.WORLD)
    if dist.get_rank() == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    faults.report(found=failing(work.wait))
    dist.all_reduce(torch.ones(2), async_op=True)


def test_a_killed_rank_is_named_at_the_wait() -> None:
    """Long before the group's 30 minutes; and the interpreter ends although the thread of the group has work left."""
    result = faults.run_ranks(killed, 3, timeout=60)
    for rank in (0, 1):
        found = result[rank].reports["found"]
        assert (found["error"], found["culprits"]) == ("PeerLost", [CULPRIT]), result
        assert found["seconds"] < 15.0, found
        assert result[rank].exit_code == 0, result


def leave_at_once() -> None:
    """Collectives under way, of which one can never be complete, when the program ends."""
    dist.init_process_group("ncclguard")
    works_again(dist.group.WORLD)
    dist.all_reduce(torch.ones(2), async_op=True)
    if dist.get_rank() != CULPRIT:
        dist.all_reduce(torch.ones(2), async_op=True)
        dist.broadcast(torch.ones(2), src=0, async_op=True)


def test_the_program_ends_with_collectives_under_way() -> None:
    """Exit code 0 on all ranks, although nobody waited and one rank never came."""
    result = faults.run_ranks(leave_at_once, 3, timeout=60)
    assert [rank.exit_code for rank in result.ranks] == [0, 0, 0], result


# ---------------------------------------------------------------------- redirected


class Model(torch.nn.Module):
    """With buffers, which DDP broadcasts from C++ in every forward pass, evaluation included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]


def evaluation(model: torch.nn.Module, group: Any) -> None:
    """DDP's own collectives, an asynchronous one, and the one that rank 2 is late for."""
    model.eval()
    model(torch.ones(2, 4))
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    if dist.get_rank() == CULPRIT:
        time.sleep(LATE)
    dist.all_reduce(torch.ones(2), group=group)
    work.wait()


def unlucky(model: torch.nn.Module, group: Any) -> None:
    """Rank 2 raises with a collective under way that the others come to only when it has left the scope."""
    if dist.get_rank() != CULPRIT:
        dist.distributed_c10d._get_default_store().wait(["left/unlucky"])
    before = _calls(group)
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
    if dist.get_rank() == CULPRIT:
        while _calls(group) == before:  # what has not started would only be dropped
            time.sleep(0.01)
        raise MemoryError("out of memory in evaluation")
    work.wait()


def train(evaluate: bool) -> None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(4):
        loss = model.train()(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if evaluate and step in (1, 2):
            found = evaluated(model, group, evaluation if step == 1 else unlucky)
            faults.report(**{f"step{step}": found})
    faults.report(losses=losses)
    dist.destroy_process_group()


def evaluated(model: torch.nn.Module, group: Any, function: Callable[..., None]) -> dict[str, Any]:
    calls = _calls(group)
    scope = redirected(timeout=LIMIT)
    found: dict[str, Any] = {}
    try:
        with scope:
            function(model, group)
    except (ng.CollectiveFailed, MemoryError) as error:
        found["error"] = type(error).__name__
    if dist.get_rank() == CULPRIT:
        dist.distributed_c10d._get_default_store().set(f"left/{function.__name__}", "1")
    found["culprits"] = [list(outcome.culprits) for outcome in scope.failures]
    found["calls"] = _calls(group) - calls
    ng.safe_barrier(timeout=30).raise_if_failed()
    with redirected(group, timeout=30):
        found["again"] = works_again(group)
    return found


def test_training_goes_on_after_failures_in_a_redirected_evaluation() -> None:
    """With losses that are bit for bit those of a run without evaluation; what C++ calls is redirected as well."""
    result = faults.run_ranks(train, 3, args=[True], timeout=180)
    plain = faults.run_ranks(train, 3, args=[False], timeout=90)
    for rank in range(3):
        reports = result[rank].reports
        assert reports["losses"] == plain[rank].reports["losses"], result
        first, second = reports["step1"], reports["step2"]
        assert first["again"] and second["again"], result
        assert first["error"] == "CollectiveTimeout", result
        assert first["culprits"] == [[CULPRIT]], result
        assert first["calls"] >= 3, first  # buffers from C++, and two of evaluation()
        assert second["error"] == ("MemoryError" if rank == CULPRIT else "PeerFailed"), result
        assert second["culprits"] == [[CULPRIT]], result


def stopped() -> None:
    """What redirecting is for: the same late rank on the group itself."""
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.barrier(group)
    # Not before: it would hold for connecting too.
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=2))
    if dist.get_rank() == CULPRIT:
        time.sleep(8)
    failing(lambda: dist.all_reduce(torch.ones(2), group=group))
    ng.safe_barrier(timeout=30).raise_if_failed()
    faults.report(again=failing(lambda: works_again(group))["error"])


def test_without_it_the_group_is_lost() -> None:
    """Plain gloo: after one late collective the group never works again."""
    result = faults.run_ranks(stopped, 3, timeout=60)
    assert all(result[rank].reports["again"] == "RuntimeError" for rank in range(3)), result
