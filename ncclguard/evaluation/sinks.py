"""Logging metrics to whatever the program has: `log_metrics(metrics, step)`, a W&B
run, a TensorBoard writer, a callable.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ncclguard.evaluation.results import Action, EvaluationReport

log = logging.getLogger("ncclguard")


def metrics_of(report: EvaluationReport, prefix: str) -> dict[str, float]:
    """What is logged of an evaluation that failed: numbers only, since not every sink takes text.

    >>> from ncclguard.evaluation.results import Failure
    >>> from ncclguard.outcome import Cause
    >>> report = EvaluationReport("evaluation", Action.GIVE_UP, (Failure(1, Cause.LATE, (2,)),), 1)
    >>> for name, value in metrics_of(report, "eval/").items():
    ...     print(name, value)
    eval/evaluation_failed 1.0
    eval/evaluation_attempts 1.0
    eval/evaluation_cause_late 1.0
    eval/evaluation_culprit 2.0
    """
    metrics = {f"{prefix}evaluation_failed": 1.0, f"{prefix}evaluation_attempts": float(report.attempts)}
    if report.cause is not None:
        metrics[f"{prefix}evaluation_cause_{report.cause.value}"] = 1.0
    if report.culprits:
        metrics[f"{prefix}evaluation_culprit"] = float(report.culprits[0])
    if report.action is Action.PARTIAL:
        metrics[f"{prefix}evaluation_partial_done"] = float(report.done)
        if report.total:
            metrics[f"{prefix}evaluation_partial_total"] = float(report.total)
    return metrics


def log_to(sink: Any, metrics: Mapping[str, float], step: int | None) -> bool:
    """Hand metrics to a sink; False when it took none. An exception of the sink is logged and goes no further.

    Taken in this order: `log_metrics(metrics, step)`; `add_scalar(name, value, step)` (TensorBoard's SummaryWriter);
    `log(metrics, step=step)` (a W&B run, an Accelerator); a callable `(metrics, step)`.
    """
    if sink is None:
        return False
    try:
        if hasattr(sink, "log_metrics"):
            sink.log_metrics(dict(metrics), step)
        elif hasattr(sink, "add_scalar"):
            for name, value in metrics.items():
                sink.add_scalar(name, value, step)
        elif hasattr(sink, "log"):
            current = getattr(sink, "step", None)  # W&B drops what is logged for a step that is over
            over = step is None or (isinstance(current, int) and step < current)
            sink.log(dict(metrics), **({} if over else {"step": step}))
        elif callable(sink):
            sink(dict(metrics), step)
        else:
            log.warning(
                "ncclguard: %s has none of log_metrics, add_scalar and log: metrics go nowhere", type(sink).__name__
            )
            return False
    except Exception:
        log.exception("ncclguard: the metrics of a failed evaluation could not be logged; training goes on")
        return False
    return True
