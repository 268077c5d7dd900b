"""Evaluation that survives: what fails on one rank is known to all, who decide alike, and training goes on."""

from ncclguard.evaluation.decision import Action, EvaluationReport, Failure
from ncclguard.evaluation.runner import GuardedEvaluation, record_partial, resilient_evaluate

__all__ = ["Action", "EvaluationReport", "Failure", "GuardedEvaluation", "record_partial", "resilient_evaluate"]
