"""Every combination of collective, dtype and reduce op is either carried or refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from ncclguard import torch_compat
from ncclguard.transport.memory import CPU, NCCL, movable_view, reducible_view, reduction

REFUSED = [
    (CPU, "all_reduce", torch.float32, ReduceOp.BAND, ValueError, "integer or bool"),
    (CPU, "all_reduce", torch.int64, ReduceOp.AVG, ValueError, "not a whole number"),
    (CPU, "all_reduce", torch.complex64, ReduceOp.MAX, ValueError, "complex"),
    (CPU, "reduce_scatter", torch.uint16, ReduceOp.SUM, TypeError, "convert it"),
    (CPU, "all_reduce", torch.float32, ReduceOp.PREMUL_SUM, ValueError, "scale the tensor"),
    (CPU, "all_reduce", torch.float32, "SUM", TypeError, "ReduceOp"),
    (CPU, "broadcast", torch.qint8, None, TypeError, "quantized"),
    (NCCL, "all_reduce", torch.int32, ReduceOp.BOR, ValueError, "move the tensor to the CPU"),
]


@pytest.mark.parametrize(("backend", "kind", "dtype", "op", "error", "words"), REFUSED)
def test_what_cannot_be_carried_is_refused_with_a_sentence(
    backend: Any, kind: Any, dtype: torch.dtype, op: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        backend.check(kind, dtype, op)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp(ReduceOp.SUM)])
def test_both_forms_of_a_reduce_op_are_taken(op: Any) -> None:
    CPU.check("all_reduce", torch.bfloat16, op)
    assert reduction(torch_compat.reduce_op_name(op)).wire == ReduceOp.SUM


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_avg_is_a_sum_that_is_divided_once_at_the_end() -> None:
    how = reduction("AVG")
    assert (how.wire, how.average) == (ReduceOp.SUM, True)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.complex32):
        result = torch.tensor([8, 2]).to(dtype)
        how.finish(result, 4)
        assert result.to(torch.complex64).tolist() == [2 + 0j, 0.5 + 0j]
    unchanged = torch.tensor([8])
    reduction("MAX").finish(unchanged, 4)
    assert unchanged.tolist() == [8]


def test_bools_are_never_counted() -> None:
    assert CPU.wire_op(ReduceOp.SUM, torch.bool) == ReduceOp.MAX
    assert CPU.wire_op(ReduceOp.PRODUCT, torch.bool) == ReduceOp.MIN
    assert CPU.wire_op(ReduceOp.SUM, torch.uint8) == ReduceOp.SUM
    with pytest.raises(ValueError, match="reduction"):
        CPU.wire_op(ReduceOp.AVG, torch.float32)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_views_share_the_memory_of_the_tensor(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.complex64):
        tensor = torch.zeros(shape, dtype=dtype)
        assert reducible_view(tensor, "cpu").data_ptr() == tensor.data_ptr()
    for dtype in (torch.int16, torch.float8_e5m2, torch.complex128):
        tensor = torch.zeros(shape, dtype=dtype)
        moved = movable_view(tensor, "cpu")
        assert moved.data_ptr() == tensor.data_ptr()
        assert moved.numel() == tensor.numel() * tensor.element_size()
