"""Evaluation that survives: what fails on one rank is known to all, who decide alike, and training goes on."""

from ncclguard.evaluation.decision import Action, Failure
from ncclguard.evaluation.guarded import GuardedEvaluation, resilient_evaluate
from ncclguard.evaluation.inside import record_partial
from ncclguard.evaluation.report import EvaluationReport

__all__ = ["Action", "EvaluationReport", "Failure", "GuardedEvaluation", "record_partial", "resilient_evaluate"]
