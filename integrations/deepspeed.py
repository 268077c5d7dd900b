"""Evaluation that survives, for trainers around a DeepSpeed engine: ZeRO 1, 2 and 3.

This module works on DeepSpeed's objects without importing the package. Run with DeepSpeed 0.19 on CPU (gloo), ZeRO 1, 2
and 3.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from enum import Enum
from typing import Any

from torch import nn

from ncclguard.evaluation import NOT_EVALUATED, GuardedEvaluation, resilient_evaluate
from ncclguard.evaluation.runner import register_keepers
from ncclguard.evaluation.state import Keeper, Restore
from ncclguard.spelling import refuse_other


def patch_trainer(
    trainer: Any,
    *,
    timeout: float | timedelta = 1800,
    barrier_timeout: float | timedelta = 300,
    max_attempts: int = 3,
    fallback: Any = NOT_EVALUATED,
    batch_size: Any = None,
    metric_prefix: str = "eval/",
    **more: Any,
) -> GuardedEvaluation:
    """Make `trainer.evaluate(step)` survive; returns it, with the switches `enabled`, `divisor` and `single_rank`.

    `trainer` has the usual shape: `trainer.model` is the engine, `trainer.monitor.log_metrics(metrics, step)` takes
    metrics; both may be absent. Options as for `ncclguard.resilient_evaluate`, times in seconds or as timedelta.
    Patching again replaces the options. Raises TypeError for what has no `evaluate`, else as `resilient_evaluate`
    does.

    >>> class Trainer:
    ...     def evaluate(self, step=None):
    ...         raise ValueError("a metric went wrong")
    >>> trainer = Trainer()
    >>> guarded = patch_trainer(trainer, max_attempts=1)
    >>> loss, accuracy = trainer.evaluate(7)
    >>> loss, accuracy, guarded.report.failed
    (nan, nan, True)
    """
    refuse_other(trainer, "trainer", "which has a method `evaluate`", "evaluate")
    unpatch_trainer(trainer)
    guarded = resilient_evaluate(
        trainer.evaluate,
        timeout=timeout,
        barrier_timeout=barrier_timeout,
        max_attempts=max_attempts,
        fallback=fallback,
        batch_size=batch_size,
        metric_prefix=metric_prefix,
        **more,
    )
    trainer.evaluate = guarded
    return guarded


def unpatch_trainer(trainer: Any) -> None:
    """Give a trainer its own `evaluate` back; one that was not patched stays as it is."""
    if isinstance(vars(trainer).get("evaluate"), GuardedEvaluation):
        del trainer.evaluate


# ---------------------------------------------------------------------- what an engine has besides modes and gradients


def keepers_of(models: Iterable[nn.Module]) -> Iterator[Keeper]:
    """The keepers of every DeepSpeed engine among `models`."""
    for model in models:
        if hasattr(model, "zero_optimization_stage") and hasattr(model, "module"):
            yield _timers(model)
            if any(hasattr(parameter, "ds_status") for parameter in model.parameters()):
                yield _partitions(model)


def _timers(engine: Any) -> Keeper:
    """Return a keeper that stops timers which an exception left running: they could not be started again."""

    def keeper() -> Restore:
        timers = getattr(getattr(engine, "timers", None), "timers", {})
        running = {name for name, timer in timers.items() if getattr(timer, "started_", False)}

        def restore() -> None:
            for name, timer in timers.items():
                if getattr(timer, "started_", False) and name not in running:
                    timer.reset()

        return restore

    return keeper


def _partitions(engine: Any) -> Keeper:
    """Return a keeper of ZeRO-3's state: the gathered parameters, and the coordinator's trace of the modules.

    A forward pass that ends in the middle leaves parameters gathered or in flight and the trace of modules half-way;
    ranks that differ in it wait for each other in the next step. Gathers are ended before `restore` is called.
    """

    def keeper() -> Restore:
        parameters = [p for p in engine.parameters() if hasattr(p, "ds_status")]
        before = [(p, p.ds_status, set(p.ds_active_sub_modules)) for p in parameters]
        holders = [*_coordinators(engine), *engine.modules()]
        attributes = [(holder, _plain_attributes(holder)) for holder in holders]
        stack = _forward_stack()
        modules = list(stack)

        def restore() -> None:
            registry = getattr(engine.module, "ds_inflight_param_registry", None)
            for each in registry.values() if isinstance(registry, dict) and _is_nested(registry) else (registry,):
                if each is not None:
                    each.clear()
            for parameter, status, active in before:
                _put_back(parameter, status, active)
            for holder, values in attributes:
                for name, value in values.items():
                    holder.__dict__[name] = _copy_of(value)
            stack[:] = modules

        return restore

    return keeper


def _put_back(parameter: Any, status: Enum, active: set[int]) -> None:
    """Partition a parameter that was partitioned before; its own part was never given away, so nothing moves."""
    statuses = type(status)
    parameter.ds_active_sub_modules.clear()
    if parameter.ds_status != status and status == statuses["NOT_AVAILABLE"]:
        parameter.ds_status = statuses["AVAILABLE"]  # DeepSpeed refuses INFLIGHT, and the gather has ended
        parameter.partition()
    parameter.ds_active_sub_modules.update(active)


def _coordinators(engine: Any) -> list[Any]:
    offload = getattr(engine.optimizer, "parameter_offload", None) or engine.optimizer
    found = getattr(offload, "param_coordinators", None)  # one for each mode, until 0.16
    return list(found.values()) if isinstance(found, dict) else [offload.get_param_coordinator()]


#: Bookkeeping that a pass of the model changes: counters, traces and queues of the coordinator, counters of modules.
_MODULE_COUNTERS = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")


def _plain_attributes(holder: Any) -> dict[str, Any]:
    """Return a module's counters, or all plain data of a coordinator, named differently in each DeepSpeed."""
    if isinstance(holder, nn.Module):
        return {name: holder.__dict__[name] for name in _MODULE_COUNTERS if name in holder.__dict__}
    kinds = (int, float, str, tuple, list, dict, set, deque, Enum, type(None))
    return {name: _copy_of(value) for name, value in vars(holder).items() if isinstance(value, kinds)}


def _copy_of(value: Any) -> Any:
    """Copy a container with the containers inside it, but not other objects such as modules and parameters."""
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, inner in value.items():
            copied[key] = _copy_of(inner)
        return copied
    return copy.copy(value) if isinstance(value, (list, set, deque)) else value


def _is_nested(registry: dict[Any, Any]) -> bool:
    """Return whether there is one registry for each mode, as until 0.16."""
    return all(hasattr(value, "clear") for value in registry.values()) and bool(registry)


def _forward_stack() -> list[Any]:
    """Return the modules that DeepSpeed believes to be in their forward pass."""
    module = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    stack = getattr(module, "FWD_MODULE_STACK", None)
    return stack if isinstance(stack, list) else []


register_keepers(keepers_of)
