"""Rehearse faults on real rank processes: start ranks, inject a fault, see who ended how."""

from __future__ import annotations

from ncclguard.faults.connections import reset_connections
from ncclguard.faults.effects import InjectedFault, reset_own_connections
from ncclguard.faults.fault import Alteration, Fault
from ncclguard.faults.hosts import Hosts, namespaces_available
from ncclguard.faults.injection import armed, at, before_operation, disarm, from_environment
from ncclguard.faults.job import Job
from ncclguard.faults.launcher import run_ranks, start_ranks
from ncclguard.faults.rank import report, wait_until_told
from ncclguard.faults.result import JobResult, RankResult, RanksFailed

__all__ = [
    "Alteration",
    "Fault",
    "Hosts",
    "InjectedFault",
    "Job",
    "JobResult",
    "RankResult",
    "RanksFailed",
    "armed",
    "at",
    "before_operation",
    "disarm",
    "from_environment",
    "namespaces_available",
    "report",
    "reset_connections",
    "reset_own_connections",
    "run_ranks",
    "start_ranks",
    "wait_until_told",
]
