"""Guarded reductions of every dtype and reduce op, on every way that the data can take, against plain torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard import faults
from ncclguard.transport.memory import CPU

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
#: Way -> elements and keywords: with the opening round, without a closing round, with one, and in pieces.
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "payload": (6, {}),
    "without closing": (600, {}),
    "pieces": (20_000, {"chunk_numel": 3500}),
    "pieces, not atomic": (20_000, {"chunk_numel": 3500, "atomic": False}),
}


def sample(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    """Values with exact sums and products in every dtype, whatever the order; of a mean only the last step is rounded."""
    values = torch.tensor([1, 2, 0, 3, 1, 2]).roll(seed).repeat(-(-numel // 6))[:numel]
    return torch.complex(values.float(), values.float().roll(1)).to(dtype) if dtype.is_complex else values.to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    # torch's SUM of bool over gloo leaves other bytes than 0 and 1.
    return tensor.int() if tensor.dtype == torch.bool else tensor.contiguous().view(-1).view(torch.uint8)


def carried(kind: Any, dtype: torch.dtype, op: object) -> bool:
    try:
        CPU.check(kind, dtype, op)
    except (TypeError, ValueError):
        return False
    return True


def plain(call: Any, result: torch.Tensor, *others: object) -> torch.Tensor | None:
    """What torch makes of it, or None where it refuses."""
    try:
        call(result, *others)
    except (RuntimeError, ValueError, TypeError):
        return None
    return result


def mean(dtype: torch.dtype, numel: int, size: int, seed: int) -> torch.Tensor:
    """Of what `size` ranks sample, each part of the complex numbers rounded once."""
    total = torch.stack([sample(dtype, numel, peer + seed).to(torch.complex128) for peer in range(size)]).sum(0)
    return torch.view_as_complex(torch.view_as_real(total) / size).to(dtype)


def every_reduction() -> None:
    """AVG of complex numbers is compared with what is worked out here: torch divides them otherwise in each collective."""
    ng.configure(closing_nbytes=16_384)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    compared = 0

    def compare(what: str, found: torch.Tensor, wanted: torch.Tensor | None) -> None:
        nonlocal compared
        compared += wanted is not None  # torch 2.6 has neither AVG nor reduce_scatter on gloo
        if wanted is not None and not torch.equal(bits(found), bits(wanted)):
            wrong.append(f"{what}: {found.reshape(-1)[:6]} is not {wanted.reshape(-1)[:6]}")

    for dtype in DTYPES:
        for name in OPS:
            op = getattr(ReduceOp, name)
            if not carried("all_reduce", dtype, op):
                continue
            summed = name in ("SUM", "AVG")
            for way, (numel, options) in WAYS.items():
                if not summed and way not in ("payload", "pieces"):
                    continue
                what = f"{name} of {dtype}, {way}"
                mine = sample(dtype, numel, rank)
                inputs = [sample(dtype, numel, rank + slot) for slot in range(size)]
                if name == "AVG" and dtype.is_complex:
                    reduced, scattered = mean(dtype, numel, size, 0), mean(dtype, numel, size, rank)
                else:
                    reduced = plain(dist.all_reduce, mine.clone(), op)
                    copies = [one.clone() for one in inputs]
                    scattered = plain(dist.reduce_scatter, torch.zeros_like(mine), copies, op)
                tensors = {"": mine.clone()}
                if summed:
                    tensors[", strided"] = torch.stack([mine, mine], 1)[:, 0]
                for layout, tensor in tensors.items():
                    ng.safe_all_reduce(tensor, op, **options).raise_if_failed()
                    compare(f"all_reduce {what}{layout}", tensor, reduced)
                output = torch.zeros_like(mine)
                ng.safe_reduce_scatter(output, inputs, op, **options).raise_if_failed()
                compare(f"reduce_scatter {what}", output, scattered)
    faults.report(wrong=wrong, compared=compared)
    dist.destroy_process_group()


def test_every_dtype_and_reduce_op_is_what_torch_makes_of_it_on_every_way_the_data_take() -> None:
    """3 ranks, so that a mean is not exact; as the payload of the opening round, with and without closing round, in pieces, strided."""
    result = faults.run_ranks(every_reduction, 3, timeout=150).check()
    for rank in range(3):
        assert result[rank].reports["wrong"] == []
        assert result[rank].reports["compared"] >= 350
