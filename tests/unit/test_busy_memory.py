"""A communicator that could not be stopped goes on writing into what it was given, while the next try is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ncclguard.engine.chunking import plan
from ncclguard.engine.execution import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Execution,
    Gather,
    InUse,
    Reduce,
    ReduceScatter,
)
from ncclguard.transport.memory import Arena

RANKS = (0, 1)


class Communicator:
    """Of two ranks that send the same. `write` is what a communicator does that is not quiet: into all it was ever given."""

    ranks = RANKS

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, op: object, save: object = None) -> None:
        self.given.append(tensor.mul_(2))

    def broadcast(self, tensor: torch.Tensor, source: int, save: object = None) -> None:
        self.given.append(tensor.fill_(7))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        self.given += [output.copy_(tensor) for output in outputs]

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object) -> None:
        self.given.append(output.copy_(inputs[0]).mul_(2))

    def reduce(self, tensor: torch.Tensor, root: int, op: object) -> None:
        self.given.append(tensor)

    def gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor], root: int) -> None:
        self.given += outputs

    def all_to_all(self, output: torch.Tensor, sizes: Sequence[int], inputs: Sequence[torch.Tensor]) -> None:
        self.given.append(output)

    def write(self) -> None:
        for tensor in self.given:
            tensor.fill_(99)


def strided(numel: int) -> torch.Tensor:
    return torch.arange(2.0 * numel)[::2]


def gathered() -> tuple[Execution, Callable[[], torch.Tensor], torch.Tensor]:
    outputs = [torch.zeros(10), torch.zeros(10)]
    work = AllGather(outputs, torch.arange(10.0), RANKS, plan(10, 3), closing=True)
    return work, lambda: torch.stack(outputs), torch.arange(10.0).repeat(2, 1)


def scattered() -> tuple[Execution, Callable[[], torch.Tensor], torch.Tensor]:
    output = torch.zeros(10)
    work = ReduceScatter(output, [torch.arange(10.0)] * 2, "SUM", plan(10, 3))
    return work, lambda: output, 2 * torch.arange(10.0)


def reduced() -> tuple[Execution, Callable[[], torch.Tensor], torch.Tensor]:
    tensor = strided(10)
    work = AllReduce(tensor, "SUM", plan(10, 3), closing=True, staged=True)
    return work, lambda: tensor, 2 * strided(10)


def received() -> tuple[Execution, Callable[[], torch.Tensor], torch.Tensor]:
    tensor = strided(10)
    work = Broadcast(tensor, 1, 0, plan(10, 3), closing=True, staged=True)
    return work, lambda: tensor, torch.full((10,), 7.0)


@pytest.mark.parametrize("case", [gathered, scattered, reduced, received])
@pytest.mark.parametrize("complete", [0, 2, 4])
def test_the_next_try_has_other_memory_with_what_is_complete(
    case: Callable[[], tuple[Execution, Callable[[], torch.Tensor], torch.Tensor]], complete: int
) -> None:
    """Two pieces were in flight when the first try ended, and are written again and again until the operation has ended."""
    work, result, wanted = case()
    first, second = Communicator(), Communicator()
    work.reserve(True, 2)
    for piece in range(work.pieces):
        work.submit(first, piece)  # type: ignore[arg-type]
    work.busy = True
    work.restore(complete)
    if complete < work.pieces:
        first.given = [part for part in first.given if part.data_ptr() >= first.given[complete].data_ptr()][:2]
    else:
        first.given = []
    work.renew(complete)
    for piece in range(complete, work.pieces):
        first.write()
        work.submit(second, piece)  # type: ignore[arg-type]
    first.write()
    work.finish(RANKS)
    assert torch.equal(result(), wanted)
    assert not work.busy
    work.release()


def test_memory_of_the_caller_that_is_still_written_into_fails_the_call_and_counts_as_torn() -> None:
    tensor = torch.arange(10.0)
    for work in (
        AllReduce(tensor, "SUM", plan(10, 3), closing=True, staged=False),
        AllGather([torch.zeros(10)] * 2, tensor, RANKS, plan(10, 3), closing=True),
    ):
        work.reserve(False, 2)
        work.submit(Communicator(), 0)  # type: ignore[arg-type]
        work.busy = True
        with pytest.raises(InUse, match="could not be stopped"):
            work.renew(0)
        work.abandon()
        assert work.may_be_torn


def test_what_was_only_staged_is_not_torn_although_the_communicator_goes_on() -> None:
    for work, result, _ in (gathered(), scattered(), reduced(), received()):
        before = result().clone()
        communicator = Communicator()
        work.reserve(True, 2)
        work.submit(communicator, 0)  # type: ignore[arg-type]
        work.busy = True
        work.abandon()
        communicator.write()
        assert torch.equal(result(), before)
        assert not work.may_be_torn


def test_the_source_of_a_broadcast_goes_on_with_its_own_memory_which_is_only_read() -> None:
    work = Broadcast(torch.arange(10.0), 0, 0, plan(10, 3), closing=True, staged=False)
    work.reserve(True, 2)
    work.busy = True
    work.renew(1)
    assert not work.may_be_torn


@pytest.mark.parametrize(
    "work",
    [
        Gather(torch.ones(3), [torch.zeros(3), torch.zeros(3)], 0),
        AllToAll([torch.zeros(3), torch.zeros(3)], [torch.ones(3), torch.ones(3)], nothing=False),
        Reduce(torch.ones(3), "SUM", 0, 0),
    ],
)
def test_collectives_of_the_backend_get_other_memory_too(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    release = Arena.release

    def recorded(arena: Arena, reusable: bool = True) -> None:
        kept.append(reusable)
        release(arena, reusable)

    monkeypatch.setattr(Arena, "release", recorded)
    communicator: Any = Communicator()
    work.reserve(True, 2)
    work.submit(communicator, 0)
    before = [part.data_ptr() for part in work.parts]
    work.busy = True
    work.restore(0)
    work.renew(0)
    assert [part.data_ptr() for part in work.parts] != before
    assert kept == [False]
    assert not work.may_be_torn
