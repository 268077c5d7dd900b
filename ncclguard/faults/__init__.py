"""Rehearse faults on real rank processes: start ranks, inject a fault, see who ended how.

The names are resolved when they are used: starting ranks needs no torch, injecting faults does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ncclguard.faults.fault import Alteration as Alteration, Fault as Fault
    from ncclguard.faults.hosts import (
        Hosts as Hosts,
        namespaces_available as namespaces_available,
        reset_connections as reset_connections,
    )
    from ncclguard.faults.injection import (
        InjectedFault as InjectedFault,
        armed as armed,
        at as at,
        before_operation as before_operation,
        disarm as disarm,
        from_environment as from_environment,
        reset_own_connections as reset_own_connections,
    )
    from ncclguard.faults.job import (
        Job as Job,
        JobResult as JobResult,
        RankResult as RankResult,
        RanksFailed as RanksFailed,
    )
    from ncclguard.faults.launcher import run_ranks as run_ranks, start_ranks as start_ranks
    from ncclguard.faults.rank import report as report, wait_until_told as wait_until_told

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
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
