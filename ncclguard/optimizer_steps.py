"""The number of optimizer steps that this process has made since it began to count: what people call the step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_lock = threading.Lock()
_made = 0
_counting = False


def start_counting() -> None:
    """Count the steps of all optimizers of this process from now on; a second call does nothing."""
    global _counting
    with _lock:
        if not _counting:
            _counting = True
            register_optimizer_step_post_hook(_count)


def made() -> int:
    """Return how many there were."""
    return _made


def _count(*_: Any) -> None:
    global _made
    _made += 1


@contextmanager
def uncounted() -> Iterator[None]:
    """Run a block whose optimizer steps are not those of the training, such as an evaluation that fits a probe."""
    global _made
    before = _made
    try:
        yield
    finally:
        _made = before
