"""How the data of a call are handed over, taken from another rank, and put back, without ranks: a communicator that answers itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ncclguard.engine.chunking import plan
from ncclguard.engine.execution import AllGather, AllReduce, Broadcast, Execution, ReduceScatter, encode
from ncclguard.transport.base import Save
from ncclguard.transport.memory import copied

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

RANKS = (3, 4, 5)
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def sample(dtype: torch.dtype, numel: int = 24) -> torch.Tensor:
    values = torch.arange(float(numel)) % 7
    return torch.complex(values, values.flip(0)).to(dtype) if dtype.is_complex else values.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(real(one.contiguous()), real(other))


class Alike:
    """Every rank of `ranks` has sent what this one sends."""

    def __init__(self, ranks: Sequence[int] = RANKS) -> None:
        self.ranks = tuple(ranks)
        self.sent = torch.empty(0)

    def all_reduce(self, tensor: torch.Tensor, op: object, save: Save | None = None) -> Alike:
        assert op == ReduceOp.SUM
        if save is not None:
            save(0, tensor.numel() * tensor.element_size())
        real(tensor).mul_(len(self.ranks))
        return self

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object) -> Alike:
        assert op == ReduceOp.SUM
        output.copy_(inputs[0])
        return self.all_reduce(output, op)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Alike:
        for output in outputs:
            output.copy_(tensor)
        return self

    def broadcast(self, tensor: torch.Tensor, source: int, save: Save | None = None) -> Alike:
        if save is not None:
            save(0, tensor.numel() * tensor.element_size())
        return self

    def payload(self, index: int) -> bytes:
        return copied(self.sent)

    def reduced(self, dtype: torch.dtype, op: str) -> bytes:
        assert op == "SUM"
        return copied(self.sent.view(-1) * len(self.ranks))


def move(work: Execution, payload: bool, ranks: Sequence[int] = RANKS) -> None:
    """What the guard does up to the verdict."""
    communicator: Any = Alike(ranks)
    work.reserve(True, 2)
    sent = work.payload(1 << 20) if payload else None
    if sent is not None:
        communicator.sent = sent.clone()
        work.collect(communicator, communicator.ranks)
        return
    for piece in range(work.pieces):
        work.submit(communicator, piece)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], 1)[:, 0]


@pytest.mark.parametrize("layout", [torch.clone, strided])
@pytest.mark.parametrize("payload", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_average_is_divided_on_every_way(
    dtype: torch.dtype, payload: bool, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = layout(sample(dtype))
    work = AllReduce(tensor, "AVG", plan(24, None if payload else 7), False, staged=False)
    move(work, payload)
    work.finish(RANKS)
    work.release()
    assert same(tensor, sample(dtype))
    output = layout(torch.zeros(24, dtype=dtype))
    scatter = ReduceScatter(output, [sample(dtype)] * 3, "AVG", plan(24, 7))
    move(scatter, False)
    scatter.finish(RANKS)
    scatter.release()
    assert same(output, sample(dtype))


@pytest.mark.parametrize("closing", [True, False])
@pytest.mark.parametrize("layout", [torch.clone, strided])
@pytest.mark.parametrize("payload", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.bool])
def test_what_has_failed_leaves_the_input(
    dtype: torch.dtype, payload: bool, layout: Callable[[torch.Tensor], torch.Tensor], closing: bool
) -> None:
    """Whatever has been written on the way: overwritten pieces are brought back, what was collected is forgotten."""
    tensor = layout(sample(dtype))
    pieces = plan(24, None if payload else 7)
    for work in (
        Broadcast(tensor, 3, 4, pieces, closing, staged=False),
        AllReduce(tensor, "SUM", pieces, closing, staged=False),
    ):
        if dtype is torch.bool and isinstance(work, AllReduce):
            continue  # the communicator of this test only sums
        move(work, payload)
        work.abandon()
        work.release()
        assert same(tensor, sample(dtype))
        assert not work.torn


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("layout", [torch.clone, strided, inference])
@pytest.mark.parametrize("payload", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex32])
def test_a_result_is_taken_from_another_rank_by_one_that_has_reserved_nothing(
    dtype: torch.dtype, payload: bool, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A late call: it has no communicator and no staging memory, and its tensors may be of any kind."""

    def donated(donor: Execution, ranks: Sequence[int] = RANKS) -> str:
        move(donor, payload, ranks)
        text = encode(donor.keep())
        donor.release()
        return text

    def take(work: Execution, text: str, ranks: Sequence[int] = RANKS) -> None:
        work.accept(text)
        work.finish(ranks)
        work.release()

    pieces, wanted = plan(24), sample(dtype)
    reduced = layout(torch.ones(24, dtype=dtype))
    text = donated(AllReduce(wanted.clone(), "AVG", pieces, False, staged=False))
    take(AllReduce(reduced, "AVG", pieces, False, staged=False), text)
    assert same(reduced, wanted)

    copied = layout(torch.ones(24, dtype=dtype))
    text = donated(Broadcast(wanted.clone(), 3, 3, pieces, False, staged=False))
    take(Broadcast(copied, 3, 4, pieces, False, staged=False), text)
    assert same(copied, wanted)

    slots = [layout(torch.ones(24, dtype=dtype)) for _ in RANKS]
    left = (3, 5)
    targets = [torch.ones(24, dtype=dtype) for _ in RANKS]
    text = donated(AllGather(targets, wanted, RANKS, pieces, False), left)
    take(AllGather(slots, wanted, RANKS, pieces, False), text, left)
    assert same(slots[0], wanted) and same(slots[2], wanted)
    assert same(slots[1], torch.ones(24, dtype=dtype))


@pytest.mark.parametrize("submitted", range(1, 11))
def test_without_atomic_twice_what_is_in_flight_can_be_restored(submitted: int) -> None:
    """Another rank may be `in_flight` pieces behind what is complete here, and as many more have been submitted since."""
    tensor, in_flight = sample(torch.float32, 30), 2
    work = AllReduce(tensor, "SUM", plan(30, 3), True, staged=False)
    work.reserve(False, in_flight)
    communicator: Any = Alike()
    for piece in range(submitted):
        work.submit(communicator, piece)
    assert work.restorable_from == max(0, submitted - 2 * in_flight)
    before, start = sample(torch.float32, 30), 3 * work.restorable_from
    work.restore(work.restorable_from)
    work.release()
    assert torch.equal(tensor, torch.cat([3 * before[:start], before[start:]]))


def test_an_all_gather_without_some_ranks_leaves_their_slots() -> None:
    for payload in (True, False):
        slots = [torch.zeros(4) for _ in range(5)]
        work = AllGather(slots, torch.ones(4), (2, 4, 6, 8, 10), plan(4), False)
        move(work, payload, (2, 6, 10))
        work.finish((2, 6, 10))
        work.release()
        assert [int(slot.sum()) for slot in slots] == [4, 0, 4, 0, 4]
