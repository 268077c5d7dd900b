"""How far training is, as all ranks count it: so that a rank that skipped an
evaluation is not taken for one that is late.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_lock = threading.Lock()
_updates = 0
_counting = False


def start_counting() -> None:
    """Count the steps of all optimizers of this process from now on; once."""
    global _counting
    with _lock:
        if not _counting:
            _counting = True
            register_optimizer_step_post_hook(_count)


def _count(*_: Any) -> None:
    global _updates
    _updates += 1


def step_of(evaluate: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The argument `step` or `global_step` of a call, else what the owner or its `state` has under `global_step`."""
    try:
        given = inspect.signature(evaluate).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong with it
        return None
    state = getattr(owner, "state", None)
    candidates = (
        given.get("step"),
        given.get("global_step"),
        *(getattr(o, "global_step", None) for o in (owner, state)),
    )
    return next((step for step in candidates if isinstance(step, int) and not isinstance(step, bool)), None)


class Labels:
    """Names for evaluations that are the same on all ranks, also after one of them skipped some."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: tuple[int | None, int] = (None, -1)
        self._repeated = 0

    def next(self, step: int | None) -> str:
        """The name of the evaluation that begins now."""
        place = (step, _updates if step is None else 0)
        self._repeated = self._repeated + 1 if place == self._last else 0
        self._last = place
        at = f"at step {step}" if step is not None else f"after {_updates} optimizer steps"
        again = f", number {self._repeated + 1} there" if self._repeated else ""
        return f"{self._name} {at}{again}"
