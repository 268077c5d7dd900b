"""A communicator that does not become quiet after it was stopped: on NCCL an abort that hangs, here played by the CPU transport."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults
from ncclguard.transport.base import TransportError
from ncclguard.transport.streams import StreamCommunicator


def never_quiet() -> None:
    """Rank 0's first communicator breaks at the third piece, is never quiet, and writes once more while the next one works."""
    all_reduce, quiet = StreamCommunicator.all_reduce, StreamCommunicator.quiet
    given: list[torch.Tensor] = []
    broken: list[int] = []

    def reduce(self: StreamCommunicator, tensor: torch.Tensor, op: ReduceOp.RedOpType, save: Any = None) -> Any:
        if tensor.numel() != 1000:
            return all_reduce(self, tensor, op, save)
        if not broken and len(given) == 2:
            broken.append(self.generation)
            raise TransportError("made up")
        if broken and self.generation != broken[0]:
            for part in given:
                part.fill_(99.0)
            given.clear()
        elif not broken:
            given.append(tensor)
        return all_reduce(self, tensor, op, save)

    StreamCommunicator.all_reduce = reduce  # type: ignore[method-assign]
    StreamCommunicator.quiet = (  # type: ignore[method-assign]
        lambda self, seconds: self.generation not in broken and quiet(self, seconds)
    )


def retried(strided: bool) -> None:
    dist.init_process_group("gloo")
    ng.safe_barrier(timeout=30).raise_if_failed()
    if dist.get_rank() == 0:
        never_quiet()
    whole = torch.arange(20_000.0)
    tensor = whole[::2] if strided else whole[:10_000].clone()
    outcome = ng.safe_all_reduce(tensor, timeout=30, chunk_numel=1000)
    right = tensor.equal(2 * (torch.arange(20_000.0)[::2] if strided else torch.arange(10_000.0)))
    faults.report(
        verdict=[outcome.ok, str(outcome.cause), list(outcome.culprits), outcome.torn],
        right=right,
        summary=outcome.incident.summary if outcome.incident else "",
        after=ng.safe_all_reduce(torch.ones(3), timeout=30).ok,
    )
    dist.destroy_process_group()


def test_a_retry_of_what_is_staged_uses_other_memory() -> None:
    result = faults.run_ranks(retried, 2, args=[True], timeout=60).check()
    for rank in range(2):
        assert result[rank].reports["verdict"] == [True, "None", [], False], result
        assert result[rank].reports["right"], result
        assert result[rank].reports["after"], result


def test_what_lies_in_the_callers_memory_is_not_tried_again_but_failed_and_torn_where_it_is() -> None:
    result = faults.run_ranks(retried, 2, args=[False], timeout=60).check()
    assert result[0].reports["verdict"] == [False, "failed", [0], True], result
    assert result[1].reports["verdict"] == [False, "failed", [0], False], result
    assert "may still write into the tensor" in result[1].reports["summary"], result
    assert all(result[rank].reports["after"] for rank in range(2)), result
