"""Wrong calls alone: refused with the same sentences as in a job, although there would be nobody to send to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

import ncclguard as ng
from ncclguard.engine.call import check_tensor

T = torch.ones(4)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "op as text": (lambda: ng.safe_all_reduce(T, "SUM"), TypeError, "op must be a torch.distributed.ReduceOp"),
    "op as a list": (lambda: ng.safe_all_reduce(T, [1]), TypeError, "op must be a torch.distributed.ReduceOp"),
    "op for the dtype": (lambda: ng.safe_all_reduce(T, ReduceOp.BAND), ValueError, "BAND needs an integer"),
    "PREMUL_SUM": (
        lambda: ng.safe_reduce_scatter(T, [T], ReduceOp.PREMUL_SUM), ValueError, "PREMUL_SUM is not supported",
    ),
    "chunk below 1": (lambda: ng.safe_all_reduce(T, chunk_numel=-1), ValueError, "at least 1, got -1"),
    "chunk as text": (lambda: ng.safe_broadcast(T, 0, chunk_numel="x"), TypeError, "elements, not str"),  # type: ignore[arg-type]
    "chunk as truth": (lambda: ng.safe_all_gather([T], T, chunk_numel=True), TypeError, "elements, not bool"),
    "chunk not whole": (lambda: ng.safe_all_reduce(T, chunk_numel=2.5), ValueError, "whole number .* got 2.5"),
    "chunk not a number": (lambda: ng.safe_all_reduce(T, chunk_numel=float("nan")), ValueError, "got nan"),
    "chunk without end": (lambda: ng.safe_all_reduce(T, chunk_numel=float("inf")), ValueError, "got inf"),
    "atomic": (lambda: ng.safe_all_reduce(T, atomic="maybe"), ValueError, "atomic must be"),  # type: ignore[arg-type]
    "source as text": (lambda: ng.safe_broadcast(T, "zero"), TypeError, "src must be a global rank"),  # type: ignore[arg-type]
    "source": (lambda: ng.safe_broadcast(T, 3), ValueError, "src 3 is not a global rank"),
    "source of objects": (lambda: ng.safe_broadcast_object_list([1], 3), ValueError, "src 3 is not a global rank"),
    "objects in a tuple": (lambda: ng.safe_all_gather_object((None,), 1), TypeError, "must be a list"),  # type: ignore[arg-type]
    "objects in nothing": (lambda: ng.safe_all_gather_object(None, 1), TypeError, "must be a list"),  # type: ignore[arg-type]
    "nested": (
        lambda: ng.safe_all_reduce(torch.nested.nested_tensor([T, T[:2]])), ValueError, "nested tensor",
    ),
    "expanded": (lambda: ng.safe_all_reduce(T[:1].expand(4)), ValueError, "share memory"),
    "expanded source": (lambda: ng.safe_broadcast(T[:1].expand(4), 0), ValueError, "share memory"),
    "expanded slot": (lambda: ng.safe_all_gather([T[:1].expand(4)], T), ValueError, r"tensor_list\[0\] .* share memory"),
    "expanded output": (lambda: ng.safe_reduce_scatter(T[:1].expand(4), [T]), ValueError, "output .* share memory"),
    "sliding window": (lambda: ng.safe_all_reduce(T.unfold(0, 2, 1)), ValueError, "share memory"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused_alone(name: str) -> None:
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call()
    assert T.tolist() == [1.0] * 4


@pytest.mark.parametrize("chunk", [2, 2.0, 5e7])
def test_whole_floats_are_numbers_of_elements(chunk: float) -> None:
    assert ng.safe_all_reduce(T.clone(), chunk_numel=chunk)


def test_inputs_may_share_memory() -> None:
    slots, output = [torch.zeros(4)], torch.zeros(4)
    assert ng.safe_all_gather(slots, T[:1].expand(4))
    assert ng.safe_reduce_scatter(output, [T[:1].expand(4)])
    assert slots[0].tolist() == output.tolist() == [1.0] * 4


def test_results_alone_are_written_into_inference_tensors() -> None:
    with torch.inference_mode():
        slot, output = torch.zeros(4), torch.zeros(4)
    assert ng.safe_all_gather([slot], T)
    assert ng.safe_reduce_scatter(output, [T])
    assert slot.tolist() == output.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [({}, {"atomic": False, "on_lost": "shrink"}), ({"atomic": False}, {"on_lost": "shrink"}),
     ({"on_lost": "shrink"}, {"atomic": False})],
)  # fmt: skip
def test_shrinking_needs_the_copy(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    """What GuardConfig refuses as a pair of settings, also where an argument is half of it."""
    ng.configure(**settings)
    for call in (
        lambda: ng.safe_all_reduce(T, **arguments),
        lambda: ng.safe_broadcast(T, 0, **arguments),
        lambda: ng.safe_all_gather([T], T, **arguments),
        lambda: ng.safe_reduce_scatter(T, [T], **arguments),
    ):
        with pytest.raises(ValueError, match="contradict each other"):
            call()


def test_what_has_no_input_to_keep_shrinks_without_the_copy() -> None:
    ng.configure(atomic=False)
    assert ng.safe_barrier(on_lost="shrink")
    assert ng.safe_all_gather_object([None], 1, on_lost="shrink")


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=2),
    st.booleans(),
)
def test_an_output_is_refused_exactly_when_two_elements_share_memory(
    dimensions: list[tuple[int, int]], with_one: bool
) -> None:
    """Up to two dimensions, and one of a single element between them."""
    dimensions = [dimensions[0], (1, 0), *dimensions[1:]] if with_one else dimensions
    shape, strides = zip(*dimensions, strict=True)
    view = torch.arange(64).as_strided(shape, strides)
    shared = view.unique().numel() < view.numel()
    if not shared:
        check_tensor(view, "output", written=True)
        return
    with pytest.raises(ValueError, match="share memory"):
        check_tensor(view, "output", written=True)
