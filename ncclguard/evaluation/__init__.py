"""Evaluation that survives: all ranks learn of one rank's failure and decide alike, and training goes on."""

from ncclguard.evaluation.decision import Action, EvaluationReport, Failure
from ncclguard.evaluation.fallback import NOT_EVALUATED, NotEvaluated
from ncclguard.evaluation.runner import GuardedEvaluation, record_partial, resilient_evaluate

__all__ = [
    "NOT_EVALUATED",
    "Action",
    "EvaluationReport",
    "Failure",
    "GuardedEvaluation",
    "NotEvaluated",
    "record_partial",
    "resilient_evaluate",
]
