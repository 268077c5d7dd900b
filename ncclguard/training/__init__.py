"""Training that goes on when a rank dies: the step is done again without it, on the others."""

from ncclguard.training.loader import ElasticLoader
from ncclguard.training.step import ResilientStep, resilient_step

__all__ = ["ElasticLoader", "ResilientStep", "resilient_step"]
