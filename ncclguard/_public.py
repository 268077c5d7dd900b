"""Every public name of the package, and the hooks that go in with them; imported as soon as torch is there."""

from __future__ import annotations

from ncclguard.checksum import verified as verified, with_checksums as with_checksums
from ncclguard.collectives import (
    safe_all_gather as safe_all_gather,
    safe_all_gather_object as safe_all_gather_object,
    safe_all_reduce as safe_all_reduce,
    safe_barrier as safe_barrier,
    safe_broadcast as safe_broadcast,
    safe_broadcast_object_list as safe_broadcast_object_list,
    safe_reduce_scatter as safe_reduce_scatter,
)
from ncclguard.config import GuardConfig as GuardConfig, configure as configure, current_config as current_config
from ncclguard.deadlines import (
    get_adaptive_timeout as get_adaptive_timeout,
    nccl_timeout_handler as nccl_timeout_handler,
)
from ncclguard.engine import runtime
from ncclguard.environment.setup import setup_env as setup_env, setup_nccl_timeout_env as setup_nccl_timeout_env
from ncclguard.errors import (
    CollectiveFailed as CollectiveFailed,
    CollectiveMismatch as CollectiveMismatch,
    CollectiveTimeout as CollectiveTimeout,
    CorruptState as CorruptState,
    GuardConfigError as GuardConfigError,
    GuardError as GuardError,
    PeerFailed as PeerFailed,
    PeerLost as PeerLost,
    ReplicasDiffer as ReplicasDiffer,
)
from ncclguard.evaluation import resilient_evaluate as resilient_evaluate
from ncclguard.incident.model import Incident as Incident
from ncclguard.metrics.monitoring import setup_nccl_monitoring as setup_nccl_monitoring
from ncclguard.metrics.records import SlowRanks as SlowRanks
from ncclguard.numerics import watch_numerics as watch_numerics
from ncclguard.outcome import Outcome as Outcome
from ncclguard.phases import phase as phase
from ncclguard.process_group import enqueued
from ncclguard.process_group.enqueued import check as check
from ncclguard.process_group.group import register
from ncclguard.process_group.joined import join as join
from ncclguard.replicas import ReplicaReport as ReplicaReport, check_replicas as check_replicas
from ncclguard.torch_compat import compiler
from ncclguard.training import ElasticLoader as ElasticLoader, resilient_step as resilient_step
from ncclguard.watch import monitored_barriers, point_to_point
from ncclguard.watch.watcher import watch as watch
from ncclguard_explain.cause import Cause as Cause


def install() -> None:
    """Hook the guard into torch.distributed and torch.compile; make the backend "ncclguard" known to torch."""
    compiler.keep_out()
    register()
    enqueued.register()
    runtime.install()
    point_to_point.start()
    monitored_barriers.start()
