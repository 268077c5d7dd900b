"""The setting `numerics="watch"`: each guarded reduction looks at what this rank brings to it, before it is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ncclguard.coordination.nonfinite import NonFinite, NonFinites, Tensor
from ncclguard.engine.group import GuardedGroup


class Counted(NamedTuple):
    """Numbers of a tensor that are NaN, and infinite, and the index of the `first` of either."""

    nan: int
    infinite: int
    first: tuple[int, ...]


def non_finite(tensor: torch.Tensor) -> Counted | None:
    """Count the numbers that are none; None where all are finite. Waits for the tensor's device.

    A sum in floating point is finite only if all its terms are, so one pass over the tensor is enough as a rule.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() < 2 or not tensor.numel():
        return None  # integers; numbers of 8 bits have no sum
    with torch.no_grad():
        small = tensor.dtype in (torch.float16, torch.bfloat16)
        total = complex(tensor.sum(dtype=torch.float32 if small else None))
        if math.isfinite(total.real) and math.isfinite(total.imag):
            return None
        odd = ~torch.isfinite(tensor)
        count = int(odd.sum())
        if not count:
            return None  # the sum alone was too large
        nan = int(torch.isnan(tensor).sum())
        flat = int(odd.flatten().to(torch.uint8).argmax())
        return Counted(
            nan, count - nan, tuple(int(place) for place in torch.unravel_index(torch.tensor(flat), odd.shape))
        )


def look_at(tensors: Sequence[torch.Tensor], op: str, text: str, group: GuardedGroup, told: NonFinites) -> None:
    """Tell all ranks of the first of these with a number that is none: this rank brings them to a reduction by `op`.

    An infinity is a fair input of a MIN or MAX.
    """
    for tensor in tensors:
        found = non_finite(tensor.detach())
        if found is not None and (found.nan or op not in ("MIN", "MAX")):
            finding = NonFinite(
                rank=group.rank, scope=group.name, number=group.calls + 1, place=0,
                tensor=Tensor("input", text), nan=found.nan, infinite=found.infinite, index=found.first,
            )  # fmt: skip
            told.tell(finding)
            return
