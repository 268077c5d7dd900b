"""The part of autograd that torch keeps to itself: whether this thread computes gradients now."""

from __future__ import annotations

from typing import Any

import torch

_task: Any = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, where checkpointing computes forward anew."""
    return int(_task()) != -1
