"""`watch` names a slow rank of plain DDP on gloo on every rank, by what the ranks measure themselves."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.metrics import monitoring
from tests.distributed.test_watch import recorded

SLOW = 1
#: Seconds in which a rank twice as slow must be known: a dozen windows of 2.5 s, and room for a busy machine.
WITHIN = 150.0


def extra_work() -> None:
    """What only the slow rank does, so that its line is named."""
    time.sleep(0.1)


def trains(slow: int | None, seconds: float) -> None:
    """Each step takes 0.1 s, on the slow rank 0.2 s, until all ranks know of it or `seconds` have passed."""
    dist.init_process_group("gloo")
    told: list[ng.SlowRanks | None] = []
    watch = ng.watch(timeout=120, on_slow=told.append)
    model = DistributedDataParallel(torch.nn.Linear(20, 2))
    end, going = time.monotonic() + seconds, torch.ones(1)
    while going.item():
        time.sleep(0.1)
        if dist.get_rank() == slow:
            extra_work()
        model(torch.ones(4, 20)).sum().backward()
        going.fill_(float(time.monotonic() < end and not told))
        dist.all_reduce(going, op=dist.ReduceOp.MAX)
    shown = None if monitoring._current is None else monitoring._current.snapshot().slow
    faults.report(
        told=[None if one is None else [list(one.ranks), one.kind, one.place, one.lost] for one in told],
        known=None if watch.slow is None else list(watch.slow.ranks),
        text="" if watch.slow is None else str(watch.slow),
        shown=list(shown.ranks) if shown is not None else None,
    )
    dist.barrier()
    dist.destroy_process_group()


@recorded
@pytest.mark.slow
def test_a_slow_rank_is_named_on_all_ranks_alike() -> None:
    result = faults.run_ranks(trains, 4, args=[SLOW, WITHIN], timeout=WITHIN + 60).check()
    for rank in range(4):
        reports = result[rank].reports
        assert len(reports["told"]) == 1, str(result)
        ranks, kind, place, lost = reports["told"][0]
        assert (ranks, kind) == ([SLOW], "computing"), str(result)
        assert place.startswith("test_slow.py:") and place.endswith(" in extra_work"), str(result)
        assert 0.05 < lost < 0.6, str(result)
        assert reports["known"] == reports["shown"] == [SLOW], str(result)
        assert reports["told"] == result[0].reports["told"]


@recorded
@pytest.mark.slow
@pytest.mark.thorough
def test_nobody_is_named_among_equals() -> None:
    result = faults.run_ranks(trains, 4, args=[None, 60.0], timeout=150).check()
    assert [result[rank].reports["told"] for rank in range(4)] == [[]] * 4, str(result)
