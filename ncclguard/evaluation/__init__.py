"""Evaluation that survives: all ranks learn of one rank's failure and decide alike, and training goes on."""

from ncclguard.evaluation.decision import Action as Action, EvaluationReport as EvaluationReport, Failure as Failure
from ncclguard.evaluation.fallback import NOT_EVALUATED as NOT_EVALUATED, NotEvaluated as NotEvaluated
from ncclguard.evaluation.runner import (
    GuardedEvaluation as GuardedEvaluation,
    record_partial as record_partial,
    resilient_evaluate as resilient_evaluate,
)
