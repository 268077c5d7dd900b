"""Collectives that end: on every rank, in bounded time, with one verdict, the input intact and the culprit named.

The public names are resolved when they are used (PEP 562), so that `ncclguard explain` reads a log on a machine
without torch; a program that imports torch has them all, and the guard's hooks, from then on.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from ncclguard._loading import AfterImport as _AfterImport

if TYPE_CHECKING:
    from ncclguard._public import *

__version__ = "0.1.0"

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
    "__version__",
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


def _load() -> None:
    """Import everything public and hook the guard into torch.distributed; a name wins over a package of that name."""
    _after_torch.stop()
    public = _import_module("ncclguard._public")
    globals().update({name: getattr(public, name) for name in __all__ if name != "__version__"})
    public.install()


def __getattr__(name: str) -> Any:
    if name in ("faults", "weights"):  # packages whose names are documented
        return _import_module(f"ncclguard.{name}")
    if name not in __all__:
        raise _no_name(name)
    _load()
    return globals()[name]


def _no_name(name: str) -> AttributeError:
    text = f"module 'ncclguard' has no attribute {name!r}"
    if not name.startswith("_"):
        spelling = _import_module("ncclguard.spelling")
        if hint := spelling.meant(name, __all__, "ncclguard.{}"):
            text = f"{text}: {spelling.say(hint)}"
    return AttributeError(text, name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_after_torch = _AfterImport("torch", _load)
_after_torch.start()
