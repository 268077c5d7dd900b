"""Evaluations that survive, in a training that goes on: a rank that is lost costs neither of them."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from tests.distributed.test_training import Kill, Strike

SIZE, STEPS = 4, 4


def run(kills: list[Kill], **options: Any) -> faults.JobResult:
    """Four ranks; the store is hosted here, as a launcher's agent hosts it, so that rank 0 may be killed too.

    The moments: "train", or of the evaluation behind that step "beginning", "inside" and "end".
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return faults.run_ranks(train, SIZE, args=[kills, store.port, options], timeout=60)


class Dying:
    """A result that cannot be sent: its rank is killed where it is to be."""

    def __init__(self, strike: Strike) -> None:
        self.strike = strike

    def __reduce__(self) -> Any:
        self.strike.at("end")
        return int, (7,)


def train(kills: list[Kill], port: int, options: dict[str, Any]) -> None:
    """An evaluation after each step, of how many ranks are there; some ranks run out of memory in it where that is asked."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    device, backend = options.get("device", "cpu"), options.get("backend", "ncclguard")
    dist.init_process_group(backend)
    rank, strike = dist.get_rank(), Strike(kills)
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    changes: list[list[int]] = []
    saved: list[int] = []
    tries: list[int] = []

    @ng.resilient_step(
        wrapped, optimizer, min_ranks=options.get("min_ranks", 1), on_change=lambda *counts: changes.append([*counts])
    )
    def one() -> None:
        optimizer.zero_grad()
        wrapped(torch.ones(2, 3, device=device)).sum().backward()
        strike.at("train")
        optimizer.step()

    def count(batch_size: int = 8) -> tuple[int, Any]:
        strike.at("inside")
        tries.append(batch_size)
        if (strike.step, rank) == (options.get("exits_at"), options.get("exits")):
            raise SystemExit(options["code"])
        if options.get("slow") == rank and len(tries) > strike.step + 1:  # the try that is made again
            time.sleep(2)
        if batch_size > options.get("fits", 8) and rank == options["small"]:
            raise torch.OutOfMemoryError("out of memory")
        ones = torch.ones(1, device=device)
        dist.all_reduce(ones)
        if len(one.ranks) > 1 and not options.get("single"):
            there = [None] * len(one.ranks)
            dist.all_gather_object(there, rank, group=one.group)
            assert tuple(there) == one.ranks
        return int(ones), Dying(strike)

    save = {"on_lost": "checkpoint", "save": lambda: saved.append(strike.step)} if options.get("saves") else {}
    evaluate = ng.resilient_evaluate(timeout=30, barrier_timeout=30, same_result=True, fallback=None, **save)(count)
    if options.get("inside"):
        evaluate = ng.resilient_step(evaluate)
    elif options.get("single"):
        evaluate.single_rank = options["single"]
    results: list[Any] = []
    try:
        for strike.step in range(STEPS):
            one()
            strike.at("beginning")
            found = evaluate()
            results.append(found and found[0])
            faults.report(results=results, changes=changes, tries=tries, saved=saved, completed=one.completed)
    except ng.CollectiveFailed as error:
        faults.report(raised=[type(error).__name__, list(error.outcome.culprits)], saved=saved)
        raise
    dist.destroy_process_group()


@pytest.mark.parametrize("inside", [False, True], ids=["by itself", "in a step"])
@pytest.mark.parametrize(
    ("kills", "counts"),
    [
        ([(1, 1, "train")], [4, 3, 3, 3]),
        ([(0, 1, "beginning")], [4, 3, 3, 3]),
        ([(2, 1, "inside"), (0, 2, "inside"), (3, 3, "inside")], [4, 3, 2, 1]),
        ([(0, 1, "end"), (3, 1, "inside")], [4, 2, 2, 2]),
    ],
    ids=["in a step", "before", "one after the other", "two"],
)
def test_all_others_evaluate_again_and_go_on(kills: list[Kill], counts: list[int], inside: bool) -> None:
    """Each step is made once, each evaluation has the result of all that are left, and all steps learn of each loss."""
    job = run(kills, inside=inside)
    left = [rank for rank in range(SIZE) if rank not in [kill[0] for kill in kills]]
    for rank in left:
        said = job[rank].reports
        assert said["results"] == counts, job
        assert said["completed"] == STEPS, job
        assert said["changes"][0][0] == SIZE, job
        assert said["changes"][-1][1] == counts[-1], job
        assert [change[1] for change in said["changes"][:-1]] == [change[0] for change in said["changes"][1:]], job
        assert "the job cannot go on" not in job[rank].output, job[rank].output
    assert sorted(rank for rank in range(SIZE) if job[rank].exit_code == 0) == left, job


def test_without_a_lost_rank_memory_that_is_short_still_makes_batches_smaller() -> None:
    job = run([(1, 0, "inside")], fits=4, small=2)
    for rank in (0, 2, 3):
        assert job[rank].reports["results"] == [3, 3, 3, 3], job
        assert job[rank].reports["tries"][-2:] == [8, 4], job


def test_a_slow_rank_in_the_evaluation_that_is_made_again_fails_nothing() -> None:
    """The others do not take what it said of the try before, which it gave up too, for this one."""
    job = run([(1, 1, "inside")], slow=2)
    for rank in (0, 2, 3):
        assert job[rank].reports["results"] == [4, 3, 3, 3], job
        assert job[rank].reports["tries"] == [8] * 5, job
        assert job[rank].output.count("─ ncclguard incident") == (rank == 0), job[rank].output


@pytest.mark.parametrize("code", [0, 3])
def test_all_others_go_on_without_a_rank_that_calls_sys_exit_in_an_evaluation(code: int) -> None:
    job = run([], exits=2, exits_at=1, code=code)
    assert job[2].exit_code == code, job
    for rank in (0, 1, 3):
        assert job[rank].reports["results"] == [4, 3, 3, 3], job
        assert job[rank].exit_code == 0, job


def test_the_rank_that_was_to_evaluate_alone_is_lost() -> None:
    """All that are left evaluate then."""
    job = run([(2, 1, "inside")], single=2)
    for rank in (0, 1, 3):
        assert job[rank].reports["results"] == [1, 3, 3, 3], job


def test_where_too_few_are_left_the_checkpoint_is_saved_once_and_the_job_ends_with_the_lost_rank() -> None:
    job = run([(1, 1, "inside"), (2, 2, "inside")], min_ranks=3, saves=True)
    for rank in (0, 3):
        assert job[rank].reports["results"] == [4, 3], job
        assert job[rank].reports["saved"] == [2], job
        assert job[rank].reports["raised"] == ["PeerLost", [2]], job
        assert "the job cannot go on" in job[rank].output, job
