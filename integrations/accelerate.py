"""Evaluation that survives for programs around an `Accelerator`, whose gathers and barriers then end as well.

This module works on Accelerate's objects without importing the package. Run with Accelerate 1.15 on CPU (gloo).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from torch import nn

from ncclguard.collectives import safe_barrier
from ncclguard.config import seconds
from ncclguard.environment.network import launched_ranks
from ncclguard.evaluation import GuardedEvaluation, resilient_evaluate as _resilient_evaluate
from ncclguard.evaluation.runner import register_keepers
from ncclguard.evaluation.state import Keeper, Restore
from ncclguard.process_group import redirected
from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")

_PATCHED = ("gather_for_metrics", "wait_for_everyone")


def patch_accelerator(
    accelerator: Any, *, timeout: float | timedelta = 1800, barrier_timeout: float | timedelta = 300
) -> None:
    """Make `gather_for_metrics` and `wait_for_everyone` of an accelerator end within limits, wherever they are called.

    `timeout` is for each collective of a gather, `barrier_timeout` until all ranks have arrived; seconds or timedelta.
    When the two fail they raise CollectiveTimeout, PeerFailed or another CollectiveFailed on all ranks, which names the
    rank at fault; the process groups of training are untouched, so the program may go on. Patching again replaces the
    limits. Raises TypeError or ValueError for limits that cannot be.

    >>> class Alone:  # as an Accelerator in a single process
    ...     def gather_for_metrics(self, data, use_gather_object=False):
    ...         return data
    ...     def wait_for_everyone(self):
    ...         pass
    >>> accelerator = Alone()
    >>> patch_accelerator(accelerator, timeout=600)
    >>> accelerator.wait_for_everyone()
    >>> accelerator.gather_for_metrics([1, 2])
    [1, 2]
    """
    _check_ranks(accelerator)
    gathering = seconds(timeout, "timeout")
    waiting = seconds(barrier_timeout, "barrier_timeout")
    unpatch_accelerator(accelerator)
    accelerator.gather_for_metrics = _gathering(accelerator.gather_for_metrics, gathering)
    accelerator.wait_for_everyone = _waiting(accelerator.wait_for_everyone, waiting)


def unpatch_accelerator(accelerator: Any) -> None:
    """Give an accelerator its own methods back; one that was not patched stays as it is."""
    for name in _PATCHED:
        if hasattr(vars(accelerator).get(name), "__ncclguard__"):
            delattr(accelerator, name)


def resilient_evaluate(accelerator: Any, **options: Any) -> Callable[[Callable[..., Any]], GuardedEvaluation]:
    """The decorator `ncclguard.resilient_evaluate` with `accelerator.log` as the place for metrics; the same options.

    Every collective inside is guarded: `gather_for_metrics`, `wait_for_everyone`, `reduce`, those of the dataloaders.
    When an evaluation ends in the middle, Accelerate is made to forget that its dataloader was being iterated.

    >>> class Alone:
    ...     def log(self, values, step=None):
    ...         print(values["eval/evaluation_failed"], step)
    >>> @resilient_evaluate(Alone(), max_attempts=1, fallback=None)
    ... def evaluate(model, step=None):
    ...     raise ValueError("a metric went wrong")
    >>> evaluate(None, step=7)
    1.0 7
    """
    _check_ranks(accelerator)
    return _resilient_evaluate(**{"monitor": accelerator, **options})


def _check_ranks(accelerator: Any) -> None:
    """Warn where a launcher started several ranks and Accelerate takes each of them for a program of its own."""
    started = launched_ranks(os.environ)
    if getattr(accelerator, "num_processes", None) == 1 and started is not None and started[1] > 1:
        text = told(
            "ncclguard: a launcher started {count} ranks, and this Accelerator knows of one, so that each rank "
            "evaluates and trains by itself: set ACCELERATE_USE_CPU=true on a host without GPUs, or see "
            "`accelerate env`",
            count=started[1],
        )
        log.warning("%s", text)


def _gathering(original: Callable[..., Any], timeout: float | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_for_metrics(*args: Any, **kwargs: Any) -> Any:
        with redirected(timeout=timeout):
            return original(*args, **kwargs)

    gather_for_metrics.__ncclguard__ = True  # type: ignore[attr-defined]
    return gather_for_metrics


def _waiting(original: Callable[..., Any], timeout: float | None) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait_for_everyone() -> None:
        safe_barrier(timeout=timeout, name="wait_for_everyone").raise_if_failed()

    wait_for_everyone.__ncclguard__ = True  # type: ignore[attr-defined]
    return wait_for_everyone


# ---------------------------------------------------------------------- what Accelerate remembers


def keepers_of(models: Iterable[nn.Module]) -> Iterator[Keeper]:
    """Yield the keeper of Accelerate's gradient state, which is one for the process, whatever the models."""
    yield _gradient_state


def _gradient_state() -> Restore:
    """Remember Accelerate's `GradientState`, which has the active dataloaders and whether gradients are synchronised.

    An iteration that an exception ended stays the active one, and training would synchronise gradients by its end.
    """
    kind = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    shared = getattr(kind, "_shared_state", None)
    if not shared:
        return lambda: None
    before = {name: list(value) if isinstance(value, list) else value for name, value in dict(shared).items()}

    def restore() -> None:
        for name, value in before.items():
            shared[name] = list(value) if isinstance(value, list) else value

    return restore


register_keepers(keepers_of)
