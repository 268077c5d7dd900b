"""One rank of a host asks the store for all: real ranks, of which the one that asks is killed or stopped while all wait."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime

LATE = 4
TIMEOUT = 15.0


class Counting:
    """This rank's connection to the store, with the times of its requests."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.times: list[float] = []

    def __getattr__(self, name: str) -> Any:
        self.times.append(time.monotonic())
        return getattr(self.store, name)


def waits_for_the_last() -> None:
    """All wait for the last rank, which never comes; who has asked the store most often in two seconds is told of."""
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=60).raise_if_failed()
    connection = runtime.current().monitor._connection
    counting = connection.store = Counting(connection.store)
    rank = dist.get_rank()
    if rank == LATE:
        time.sleep(TIMEOUT + 15)
        return
    started = time.monotonic()

    def tell() -> None:
        time.sleep(4.0)
        faults.report(asked=sum(1 < at - started < 4 for at in counting.times), shared=connection.page is not None)

    threading.Thread(target=tell, daemon=True).start()
    outcome = ng.safe_all_reduce(torch.ones(4), timeout=TIMEOUT)
    faults.report(
        verdict=[outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits)],
        seconds=time.monotonic() - started,
        decided_after=outcome.incident.decided_after if outcome.incident else None,
    )
    time.sleep(30)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_others_agree_when_the_rank_that_asks_the_store_is_gone(how: str) -> None:
    """Rank 4 is late. Of those that wait, the busiest at the store is ended: lost at once, or stuck with rank 4 at the deadline."""
    with faults.start_ranks(waits_for_the_last, 5, timeout=100) as job:
        asked = Counter(job.wait_for("asked", range(LATE), 60))
        assert job.wait_for("shared", range(LATE)) == dict.fromkeys(range(LATE), True)
        # Three kinds of looks, each once in 0.05 to 0.1 s, for 3 s: of one rank, and not of each.
        assert asked.total() < 1.5 * 3 * (20 + 20 + 10), asked
        speaker = max(range(1, LATE), key=lambda rank: asked[rank])  # rank 0 hosts the store
        job.send_signal(speaker, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        rest = [rank for rank in range(LATE) if rank != speaker]
        found = job.wait_for("verdict", rest, 60)
        seconds = job.wait_for("seconds", rest)
        expected = ["lost", [speaker]] if how == "kill" else ["stuck", sorted([speaker, LATE])]
        assert found == {rank: [False, True, *expected] for rank in rest}
        assert max(seconds.values()) < TIMEOUT + 2.0, seconds
