"""Rehearse faults on real rank processes: start ranks, inject a fault, see who ended how.

The names are resolved when they are used: starting ranks needs no torch, injecting faults does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclguard.faults.fault import Alteration, Fault
    from ncclguard.faults.hosts import Hosts, namespaces_available, reset_connections
    from ncclguard.faults.injection import (
        InjectedFault,
        armed,
        at,
        before_operation,
        disarm,
        from_environment,
        reset_own_connections,
    )
    from ncclguard.faults.job import Job, JobResult, RankResult, RanksFailed
    from ncclguard.faults.launcher import run_ranks, start_ranks
    from ncclguard.faults.rank import report, wait_until_told

_HOMES = {
    "fault": ("Alteration", "Fault"),
    "hosts": ("Hosts", "namespaces_available", "reset_connections"),
    "injection": (
        "InjectedFault",
        "reset_own_connections",
        "armed",
        "at",
        "before_operation",
        "disarm",
        "from_environment",
    ),
    "job": ("Job", "JobResult", "RankResult", "RanksFailed"),
    "launcher": ("run_ranks", "start_ranks"),
    "rank": ("report", "wait_until_told"),
}

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


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
