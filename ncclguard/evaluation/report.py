"""What became of one evaluation: the report for people, and the numbers for dashboards."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ncclguard.cause import ADVICE, Cause
from ncclguard.evaluation.decision import Action, Failure

log = logging.getLogger("ncclguard")

#: Why no other try was made although more were allowed.
_FINAL = "an exception of this type says that the program or its data is wrong, so each try would raise it."


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """What became of one evaluation; the same on all ranks that could agree.

    Attributes: `label` (which evaluation); `action` (the last one taken: ACCEPT, PARTIAL, GIVE_UP, SKIP or STOP);
    `failures` (of each try that failed, and of combining partial results, in order); `attempts` (tries that were
    begun); `done`, `total` (what the partial result covers); `cause`, `culprits` (of the last failure). `str()` is for
    people.
    """

    label: str
    action: Action
    failures: tuple[Failure, ...] = ()
    attempts: int = 0
    done: int = 0
    total: int = 0

    @property
    def failed(self) -> bool:
        """Whether no complete result came out although one was wanted."""
        return self.action in (Action.PARTIAL, Action.GIVE_UP, Action.STOP)

    @property
    def cause(self) -> Cause | None:
        return self.failures[-1].cause if self.failures else None

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.failures[-1].culprits if self.failures else ()

    def __str__(self) -> str:
        lines = [f"ncclguard {self.label}: {self._what()}"]
        lines += [f"  {failure}" for failure in self.failures]
        reports = [failure.report for failure in self.failures if failure.report]
        if reports:
            lines.append(reports[-1])
        if any(failure.final for failure in self.failures):
            lines.append(f"  no other try was made: {_FINAL}")
        if self.failures:
            lines.append(f"  what to do: {self._advice()}")
        return "\n".join(lines)

    def _what(self) -> str:
        tries = f"{self.attempts} {'try' if self.attempts == 1 else 'tries'}"
        of = f"{self.done} of {self.total}" if self.total else str(self.done)
        return {
            Action.ACCEPT: f"complete after {tries}.",
            Action.PARTIAL: f"failed after {tries}; a partial result is returned, from {of}.",
            Action.GIVE_UP: f"failed after {tries}; the fallback is returned and training goes on."
            if self.attempts
            else "skipped, because not all ranks arrived; the fallback is returned and training goes on.",
            Action.SKIP: "skipped, because it is switched off; the fallback is returned.",
        }.get(self.action, f"stopped after {tries}: the job cannot go on.")

    def _advice(self) -> str:
        last = self.failures[-1]
        if self.action is Action.STOP:
            return "Restart the job from its last checkpoint, after a look at the ranks above."
        if last.out_of_memory:
            return (
                "Evaluate with smaller batches, or say with `batch_size` where their size is, so that it can be halved."
            )
        return ADVICE[last.cause]


def metrics_of(report: EvaluationReport, prefix: str) -> dict[str, float]:
    """What is logged of an evaluation that failed: numbers only, since not every sink takes text.

    >>> from ncclguard.evaluation import Action, EvaluationReport, Failure
    >>> from ncclguard import Cause
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
    """Hand metrics to whatever the program logs with; returns whether they were taken.

    An exception of the sink is logged and goes no further. What a sink has is looked for in this order:
    `log_metrics(metrics, step)`; `add_scalar(name, value, step)` (TensorBoard's SummaryWriter); `log(metrics,
    step=step)` (a W&B run, an Accelerator); a callable `(metrics, step)`.
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
