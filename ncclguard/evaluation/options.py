"""The settings of a guarded evaluation, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from ncclguard.config import seconds
from ncclguard.errors import GuardConfigError
from ncclguard.evaluation.batches import BatchSize
from ncclguard.evaluation.state import Keeper


@dataclass(frozen=True, kw_only=True)
class Options:
    """See `resilient_evaluate` for what each means."""

    timeout: float | timedelta = 1800.0
    barrier_timeout: float | timedelta = 300.0
    max_attempts: int = 3
    fallback: Any = (0.0, 0.0)
    batch_size: BatchSize = None
    metric_prefix: str = "eval/"
    monitor: Any = None
    accept_partial: bool = True
    same_result: bool = False
    combine: Callable[[list[Any]], Any] | None = None
    on_lost: Literal["fail", "checkpoint"] = "fail"
    save: Callable[[], object] | None = None
    group: dist.ProcessGroup | None = None
    models: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    keepers: Sequence[Keeper] = ()

    def __post_init__(self) -> None:
        for name in ("timeout", "barrier_timeout"):
            value = seconds(getattr(self, name), name)
            if value is None:
                raise TypeError(f"{name} must be seconds or a timedelta, not None: give for example 300")
            object.__setattr__(self, name, value)
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int):
            raise TypeError(f"max_attempts must be a whole number, not {type(self.max_attempts).__name__}")
        if self.max_attempts < 1:
            raise GuardConfigError(f"max_attempts must be at least 1, got {self.max_attempts}")
        if self.on_lost not in ("fail", "checkpoint"):
            raise GuardConfigError(f'on_lost must be "fail" or "checkpoint", got {self.on_lost!r}')
        if (self.on_lost == "checkpoint") != (self.save is not None):
            raise GuardConfigError('on_lost="checkpoint" and save=, a function without arguments, need each other')
