"""The results of the gloo communicator, on real ranks and in a group of one."""

from __future__ import annotations

import atexit
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ncclguard import _torch_stores, faults
from ncclguard.transport.base import Pending, TransportError
from ncclguard.transport.dtypes import reduction
from ncclguard.transport.gloo import GlooCommunicator
from ncclguard.transport.gloo_builder import GlooBuilder

pytestmark = pytest.mark.timeout(180)

ALONE = {"NCCLGUARD_AUTOSTART": "0"}  # the transport alone: no monitor thread beside it


def join() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    atexit.register(time.sleep, 0.2)  # else the exit may be a SIGABRT, see join() in mechanisms_cases.py
    return dist.get_rank()


def build(generation: int, seconds: float = 10.0, backstop: float = 60.0) -> GlooCommunicator:
    store = _torch_stores.clone_store(_torch_stores.default_store())
    ranks = tuple(range(dist.get_world_size()))
    prefix = f"transport/{generation}"
    return GlooBuilder().build(store, prefix, ranks, dist.get_rank(), generation, backstop, seconds)


def finish(pending: Pending, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not pending.wait(0.1):
        if time.monotonic() > end:
            raise AssertionError(f"not complete after {seconds} s")


def results() -> None:
    rank = join()
    first, second = build(1), build(2)
    votes = []
    for communicator, value in ((first, 2**63 - 1), (first, rank), (second, 0), (first, 7)):
        vote = communicator.agree(value)
        finish(vote)
        votes.append(vote.agreed)
    faults.report(votes=votes)

    # Two operations at a time, each on its own memory, and one on the other generation between them.
    a, b, c = torch.full((1000,), float(rank)), torch.full((3,), rank), torch.full((5,), 2.0)
    pending = [
        first.all_reduce(a, ReduceOp.SUM),
        second.all_reduce(c, ReduceOp.PRODUCT),
        first.all_reduce(b, ReduceOp.MAX),
    ]
    for one in pending:
        finish(one)
        finish(one)  # asking again is allowed
    faults.report(sums=[a.unique().tolist(), b.tolist(), c.unique().tolist()])

    # A slice that ends is not an error, however often; a slice below a millisecond is not "no limit".
    tensor = torch.ones(4)
    if rank == 0:
        time.sleep(0.6)
    slow, slices, start = first.all_reduce(tensor, ReduceOp.SUM), 0, time.monotonic()
    for seconds in (0.0, 0.0004, 0.05):
        slices += not slow.wait(seconds)
    faults.report(short=time.monotonic() - start)
    while not slow.wait(0.05):
        slices += 1
    faults.report(slices=slices, after_slices=tensor.tolist())
    for communicator in (first, second):
        communicator.close()
        with pytest.raises(TransportError, match="was stopped"):
            communicator.agree(1)
        communicator.close()


def test_operations_complete_with_the_right_results_on_two_generations_side_by_side() -> None:
    result = faults.run_ranks(results, 3, env=ALONE, timeout=90).check()
    for rank in range(3):
        reports = result[rank].reports
        assert reports["votes"] == [True, False, True, True]
        assert reports["sums"] == [[3.0], [2, 2, 2], [8.0]]
        assert reports["after_slices"] == [3.0] * 4
        assert reports["short"] < 0.5 or rank == 0
    assert result[1].reports["slices"] >= 5


OPS = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)


DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64),
    *(torch.bool, torch.complex32, torch.complex64, torch.complex128, torch.int16, torch.uint16, torch.float8_e5m2),
)


def sample(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Six elements with exact sums, products and means in every dtype."""
    values = torch.tensor([1, 2, 0, 3, 1, 2]).roll(seed)
    return torch.complex(values.float(), values.float().flip(0)).to(dtype) if dtype.is_complex else values.to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    if tensor.dtype == torch.bool:  # torch's SUM over gloo leaves other bytes than 0 and 1 in it
        return list(map(int, tensor.view(-1).tolist()))
    return list(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def supported(kind: Any, dtype: torch.dtype, op: object) -> bool:
    try:
        GlooBuilder().check_supported(kind, dtype, op)
    except (TypeError, ValueError):
        return False
    return True


def like_torch() -> None:
    rank = join()
    size = dist.get_world_size()
    communicator = build(1)
    wrong: list[str] = []
    seen = {"guard": 0, "both": 0}

    def compare(what: str, guarded: list[torch.Tensor] | None, plain: list[torch.Tensor] | None) -> None:
        seen["guard"] += guarded is not None
        seen["both"] += guarded is not None and plain is not None
        if guarded is None and plain is not None:
            wrong.append(f"{what}: torch does it, the guard refuses")
        elif guarded is not None and plain is not None and list(map(bits, guarded)) != list(map(bits, plain)):
            wrong.append(f"{what}: {guarded} is not torch's {plain}")

    for dtype in DTYPES:
        for op in OPS:
            name = f"{op} of {dtype}"
            mine, inputs = sample(dtype, rank), [sample(dtype, rank + slot) for slot in range(size)]
            reduced: list[torch.Tensor] | None = None
            scattered: list[torch.Tensor] | None = None
            if supported("all_reduce", dtype, op):
                how = reduction(op)
                reduced, scattered = [mine.clone()], [torch.zeros_like(mine)]
                finish(communicator.all_reduce(reduced[0], how.wire))
                how.finish(reduced[0], size)
                finish(communicator.reduce_scatter(scattered[0], inputs, how.wire))
                how.finish(scattered[0], size)
            # torch 2.6 has neither AVG nor reduce_scatter on gloo, so there only the others can be compared.
            compare(f"all_reduce {name}", reduced, plain_all_reduce(mine, op))
            output = plain_reduce_scatter(mine, inputs, op)
            if dtype.is_complex and output is not None and scattered is None:
                output = None  # torch reduces the parts of complex numbers here even where that has no meaning
            compare(f"reduce_scatter {name}", scattered, output)
        mine = sample(dtype, rank)
        moved, gathered = mine.clone(), [torch.zeros_like(mine) for _ in range(size)]
        finish(communicator.broadcast(moved, 1))
        finish(communicator.all_gather(gathered, mine))
        wanted = [sample(dtype, peer) for peer in range(size)]
        compare(f"broadcast {dtype}", [moved], [wanted[1]])
        compare(f"all_gather {dtype}", gathered, wanted)
    for shape in ((), (0,), (3, 0), (2, 3)):
        tensor = torch.ones(shape)
        finish(communicator.all_reduce(tensor, ReduceOp.SUM))
        finish(communicator.broadcast(tensor, 0))
        outputs = [torch.empty(shape) for _ in range(size)]
        finish(communicator.all_gather(outputs, tensor))
        finish(communicator.reduce_scatter(tensor, outputs, ReduceOp.MAX))
        compare(f"shape {shape}", [tensor], [torch.full(shape, float(size))])
    faults.report(wrong=wrong, **seen)
    communicator.close()


def plain_all_reduce(tensor: torch.Tensor, op: ReduceOp.RedOpType) -> list[torch.Tensor] | None:
    """What torch makes of it, or None where it refuses."""
    result = tensor.clone()
    try:
        dist.all_reduce(result, op)
    except (RuntimeError, ValueError, TypeError):
        return None
    return [result]


def plain_reduce_scatter(
    like: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp.RedOpType
) -> list[torch.Tensor] | None:
    result = torch.zeros_like(like)
    try:
        dist.reduce_scatter(result, [tensor.clone() for tensor in inputs], op)
    except (RuntimeError, ValueError, TypeError):
        return None
    return [result]


def test_every_dtype_and_reduce_op_is_bit_equal_to_torch_distributed_or_refused() -> None:
    result = faults.run_ranks(like_torch, 2, env=ALONE, timeout=90).check()
    for rank in range(2):
        assert result[rank].reports["wrong"] == []
        assert result[rank].reports["guard"] > 130
        assert result[rank].reports["both"] > 70


def test_a_group_of_one_completes_stops_and_closes() -> None:
    communicator = GlooBuilder().build(dist.HashStore(), "one", (5,), 0, 1, 30.0, 5.0)
    tensor, output = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    vote = communicator.agree(3)
    for pending in (
        vote,
        communicator.all_reduce(tensor, ReduceOp.SUM),
        communicator.broadcast(tensor, 0),
        communicator.all_gather([output], tensor),
        communicator.reduce_scatter(output, [tensor], ReduceOp.SUM),
    ):
        finish(pending)
    assert vote.agreed
    assert output.tolist() == tensor.tolist() == [0, 1, 2, 3]
    communicator.stop()
    assert communicator.quiet(0.0)
    with pytest.raises(TransportError, match="was stopped"):
        communicator.all_reduce(tensor, ReduceOp.SUM)
    communicator.close()


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 4).t()[1:], torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, device="meta")]
)
def test_memory_that_gloo_would_misread_is_refused(tensor: torch.Tensor) -> None:
    communicator = GlooBuilder().build(dist.HashStore(), "one", (0,), 0, 1, 30.0, 5.0)
    with pytest.raises(ValueError, match="contiguous"):
        communicator.all_reduce(tensor, ReduceOp.SUM)
    with pytest.raises(ValueError, match="contiguous"):
        communicator.broadcast(tensor, 0)
    with pytest.raises(ValueError, match="AVG"):
        communicator.all_reduce(torch.ones(1), ReduceOp.AVG)
    communicator.close()
