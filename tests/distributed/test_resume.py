"""A retry goes on where all ranks had come to: connections are reset in the middle of a tensor in pieces, and every element is right."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine.execution import AllReduce, Broadcast, Execution
from ncclguard.transport.base import Pending

PIECES = 100
#: Up to 64 KiB the input is kept as one copy and there is no closing round; above, it is kept by piece.
NUMELS = (10_000, 100_000)


class Resets:
    """Resets the connections of rank 1 when it submits the first of the pieces `at`, then at the second, and so on."""

    def __init__(self) -> None:
        self.strike()
        for kind in (AllReduce, Broadcast):
            kind.submit = self._wrapped(kind.submit)  # type: ignore[method-assign]

    def _wrapped(self, submit: Callable[..., Pending]) -> Callable[..., Pending]:
        def wrapped(work: Execution, communicator: Any, piece: int) -> Pending:
            self.submitted += 1
            if dist.get_rank() == 1 and self.at[:1] == [piece]:
                del self.at[0]
                for link in communicator._links.peers.values():
                    link.socket.shutdown(socket.SHUT_RDWR)
            return submit(work, communicator, piece)

        return wrapped

    def strike(self, *pieces: int) -> None:
        self.at, self.submitted = list(pieces), 0


def average(tensor: torch.Tensor, **options: Any) -> ng.Outcome:
    return ng.safe_all_reduce(tensor, ReduceOp.AVG, **options)


def broadcast(tensor: torch.Tensor, **options: Any) -> ng.Outcome:
    return ng.safe_broadcast(tensor, 0, **options)


def resumed() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    resets = Resets()
    wrong: list[str] = []
    cases = itertools.product(NUMELS, (True, False), ((60,), (30, 70)))
    for numel, atomic, pieces in cases:
        values = torch.arange(float(numel)) % 251
        summed = values * size + 3 * sum(range(size))
        for call, expected in ((ng.safe_all_reduce, summed), (average, values + 3), (broadcast, values)):
            tensor = values + 3 * rank
            resets.strike(*pieces)
            outcome = call(tensor, timeout=40, chunk_numel=numel // PIECES, atomic=atomic)
            found = (outcome.ok, outcome.attempts, int((tensor != expected).sum()))
            # All over again would be right as well, but is not what is tested.
            if found != (True, 1 + len(pieces), 0) or resets.submitted >= PIECES + 10 * len(pieces):
                wrong.append(f"{call.__name__} {numel} {atomic} {pieces}: {found}, {resets.submitted} submitted")
    faults.report(wrong=wrong)
    dist.destroy_process_group()


def test_every_element_is_right_after_a_retry_from_the_middle() -> None:
    """Sum, average and broadcast, atomic and not, small and large, one reset and two: nothing is done twice or left out."""
    result = faults.run_ranks(resumed, 3, timeout=120).check()
    assert result.values("wrong") == {rank: [] for rank in range(3)}, result


def failed_after_a_resume() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    resets = Resets()
    changed = {}
    for numel in NUMELS:
        before = torch.arange(float(numel)) + rank
        tensor = before.clone()
        resets.strike(30, 70)
        outcome = ng.safe_all_reduce(tensor, timeout=40, chunk_numel=numel // PIECES, max_attempts=2)
        changed[numel] = [outcome.ok, outcome.torn, int((tensor != before).sum())]
    faults.report(changed=changed, next=ng.safe_barrier(timeout=40).ok)
    dist.destroy_process_group()


def test_the_input_is_whole_again_when_the_retry_fails_too() -> None:
    """Also the pieces that were complete before the first reset, and were not moved again."""
    result = faults.run_ranks(failed_after_a_resume, 3, timeout=120).check()
    for rank in result:
        assert rank.reports["changed"] == {str(numel): [False, False, 0] for numel in NUMELS}, rank
        assert rank.reports["next"]
