"""Every public name of the package, and the hooks that go in with them; imported as soon as torch is there."""

from __future__ import annotations

from ncclguard.checksum import verified, with_checksums
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
from ncclguard.engine import runtime
from ncclguard.environment.setup import setup_env, setup_nccl_timeout_env
from ncclguard.errors import (
    CollectiveFailed,
    CollectiveMismatch,
    CollectiveTimeout,
    CorruptState,
    GuardConfigError,
    GuardError,
    PeerFailed,
    PeerLost,
    ReplicasDiffer,
)
from ncclguard.evaluation import resilient_evaluate
from ncclguard.incident.model import Incident
from ncclguard.metrics.monitoring import setup_nccl_monitoring
from ncclguard.metrics.records import SlowRanks
from ncclguard.numerics import watch_numerics
from ncclguard.outcome import Outcome
from ncclguard.phases import phase
from ncclguard.process_group import enqueued
from ncclguard.process_group.enqueued import check
from ncclguard.process_group.group import register
from ncclguard.process_group.joined import join
from ncclguard.replicas import ReplicaReport, check_replicas
from ncclguard.torch_compat import compiler
from ncclguard.training import ElasticLoader, resilient_step
from ncclguard.watch import point_to_point
from ncclguard.watch.watcher import watch
from ncclguard_explain.cause import Cause

__all__ = [
    "Cause",
    "CollectiveFailed",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "CorruptState",
    "ElasticLoader",
    "GuardConfig",
    "GuardConfigError",
    "GuardError",
    "Incident",
    "Outcome",
    "PeerFailed",
    "PeerLost",
    "ReplicaReport",
    "ReplicasDiffer",
    "SlowRanks",
    "check",
    "check_replicas",
    "configure",
    "current_config",
    "get_adaptive_timeout",
    "join",
    "nccl_timeout_handler",
    "phase",
    "resilient_evaluate",
    "resilient_step",
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
    "verified",
    "watch",
    "watch_numerics",
    "with_checksums",
]


def install() -> None:
    """Hook the guard into torch.distributed and torch.compile; make the backend "ncclguard" known to torch."""
    compiler.keep_out()
    register()
    enqueued.register()
    runtime.install()
    point_to_point.start()
