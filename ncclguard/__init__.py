"""Collectives that end: on every rank, in bounded time, with one verdict, the input intact and the culprit named."""

from ncclguard import runtime as _runtime
from ncclguard.collectives import (
    safe_all_gather,
    safe_all_gather_object,
    safe_all_reduce,
    safe_barrier,
    safe_broadcast,
    safe_broadcast_object_list,
    safe_reduce_scatter,
)
from ncclguard.config import GuardConfig, configure, current_config
from ncclguard.deadlines import get_adaptive_timeout, nccl_timeout_handler
from ncclguard.environment.setup import setup_env, setup_nccl_timeout_env
from ncclguard.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    GuardConfigError,
    GuardError,
    PeerFailed,
    PeerLost,
)
from ncclguard.evaluation import resilient_evaluate
from ncclguard.incident.model import Incident
from ncclguard.metrics.monitoring import setup_nccl_monitoring
from ncclguard.outcome import Cause, Outcome
from ncclguard.phases import phase
from ncclguard.watch.entry import watch

__version__ = "0.1.0"

__all__ = [
    "Cause",
    "CollectiveFailed",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "GuardConfig",
    "GuardConfigError",
    "GuardError",
    "Incident",
    "Outcome",
    "PeerFailed",
    "PeerLost",
    "__version__",
    "configure",
    "current_config",
    "get_adaptive_timeout",
    "nccl_timeout_handler",
    "phase",
    "resilient_evaluate",
    "safe_all_gather",
    "safe_all_gather_object",
    "safe_all_reduce",
    "safe_barrier",
    "safe_broadcast",
    "safe_broadcast_object_list",
    "safe_reduce_scatter",
    "setup_env",
    "setup_nccl_monitoring",
    "setup_nccl_timeout_env",
    "watch",
]

_runtime.install()
