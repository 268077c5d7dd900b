"""Writing into inference tensors, which torch allows in inference mode only."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

_ANYWHERE = contextlib.nullcontext()


def writable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Where a detached view of `tensor` may be written in place: inference tensors only in inference mode."""
    return torch.inference_mode() if tensor.is_inference() else _ANYWHERE
