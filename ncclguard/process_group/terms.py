"""What a caller of a process group's method asks for besides the tensors, out of the several forms that torch has."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp


@dataclass(frozen=True, slots=True)
class Terms:
    """`root` counts within the group; `timeout` in seconds, None for the group's;
    `blocking`: ended when the method returns.
    """

    op: Any = ReduceOp.SUM
    root: int = 0
    timeout: float | None = None
    blocking: bool = False


def terms(options: Any = None, *, op: Any = None, root: int | None = None, timeout: timedelta | None = None) -> Terms:
    """Read an options object, or the arguments of the forms without one: a reduce op, a root, a timeout."""
    if isinstance(options, timedelta):
        options, timeout = None, options
    elif isinstance(options, int) and not isinstance(options, (bool, ReduceOp.RedOpType)):
        options, root = None, options
    elif isinstance(options, (ReduceOp, ReduceOp.RedOpType)):
        options, op = None, options
    limit = timeout if timeout is not None else getattr(options, "timeout", None)
    seconds = limit.total_seconds() if limit is not None else 0.0
    return Terms(
        op=op if op is not None else getattr(options, "reduceOp", ReduceOp.SUM),
        root=root if root is not None else getattr(options, "rootRank", 0),
        timeout=seconds if seconds > 0 else None,  # torch's own word for "not given" is minus one millisecond
        blocking=not getattr(
            options, "asyncOp", True
        ),  # before torch 2.8 there is no such field: the caller waits itself
    )


def only(tensors: Any) -> Any:
    """The one tensor, or list of tensors, of a method that takes a list of one for each device."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(
            f"one tensor for each process is taken, not {len(tensors)}: use the coalesced form for several"
        )
    return tensors[0]
