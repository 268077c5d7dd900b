"""The guard and the caller's CUDA stream: what is queued before an operation, and the copies after it. The streams are faked, the ranks not."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import group
from ncclguard.transport import memory


class Stream:
    """The current stream of a rank whose tensors are said to be on a GPU; its events are reached while `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.events = 0
        group.drained = functools.partial(_drained, torch.device("cuda", 0))  # type: ignore[attr-defined]
        group.queues = lambda device: True  # type: ignore[attr-defined]
        torch.cuda.current_stream = lambda device=None: self  # type: ignore[assignment, return-value]

    def record_event(self) -> Stream:
        self.events += 1
        return self

    def query(self) -> bool:
        return self.open.is_set()


def _drained(on: torch.device, device: torch.device, *args: Any) -> bool:
    return memory.drained(on, *args)


def summed(timeout: float) -> list[Any]:
    tensor = torch.ones(3)
    outcome = ng.safe_all_reduce(tensor, timeout=timeout)
    return [outcome.ok, outcome.agreed, str(outcome.cause), list(outcome.culprits), float(tensor[0])]


def stuck(own_timeout: float) -> None:
    """Something that does not end is queued on rank 1's stream before it calls; then it ends."""
    dist.init_process_group("gloo")
    stream = Stream()
    first = summed(30)
    if dist.get_rank() == 1:
        stream.open.clear()
        second = summed(own_timeout)
        stream.open.set()
    else:
        second = summed(6)
    faults.report(found=[first, second, summed(30)])
    dist.destroy_process_group()


def test_a_rank_whose_stream_is_stuck_is_late_and_has_the_verdict_of_the_others() -> None:
    """Although it has called: it has not voted, so that no kernel of the others runs, and leaves when they have decided."""
    found = faults.run_ranks(stuck, 3, args=[60], timeout=50).check().values("found")
    for rank in range(3):
        assert found[rank][0] == [True, True, "None", [], 3.0], found
        assert found[rank][1] == [False, True, "late", [1], 1.0], found
        assert found[rank][2] == [True, True, "None", [], 3.0], found


def test_a_rank_whose_stream_is_stuck_until_its_own_deadline_is_late_too() -> None:
    found = faults.run_ranks(stuck, 3, args=[3], timeout=50).check().values("found")
    for rank in range(3):
        assert found[rank][1] == [False, True, "late", [1], 1.0], found
        assert found[rank][2] == [True, True, "None", [], 3.0], found


def copied_late() -> None:
    """On rank 0 the copy of the result into the caller's memory takes half a second of the GPU's time."""
    dist.init_process_group("gloo")
    stream = Stream()
    summed(30)
    before = stream.events
    opened = threading.Timer(0.5, stream.open.set)

    def record_event() -> Stream:
        stream.events += 1
        if stream.events == before + 2 and dist.get_rank() == 0:  # the first is that before the operation
            stream.open.clear()
            opened.start()
        return stream

    stream.record_event = record_event  # type: ignore[method-assign]
    result = summed(30)
    faults.report(found=result, events=stream.events - before, reached=stream.open.is_set())
    dist.destroy_process_group()


def test_an_outcome_is_returned_when_the_result_is_in_the_callers_memory() -> None:
    """For other streams, callbacks and the next user of the staging memory."""
    result = faults.run_ranks(copied_late, 2, timeout=50).check()
    for rank in range(2):
        assert result[rank].reports["found"] == [True, True, "None", [], 2.0]
        assert result[rank].reports["events"] == 2
        assert result[rank].reports["reached"]
