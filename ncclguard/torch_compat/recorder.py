"""torch's private names for its flight recorders, and for what its own watchdogs have found.

Ran on torch 2.6.0, 2.13.0 and 2.15.0 (CPU, gloo; NCCL on an emulated GPU); the versions between are declared, not run.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c
from torch.distributed import distributed_c10d as c10d

# Which dump has the collectives of which kind of backend; gloo since torch 2.8, ProcessGroupNCCL since 2.6. Any other
# (nccl2, which torch 2.15 calls "nccl", and nccl-lazy) has a recorder of its own name.
_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}


def recorder_name(group: dist.ProcessGroup, backend: str) -> str:
    """Which recorder has the collectives of one of the group's backends: "gloo", "nccl", "nccl2", ...

    ``backend`` is the name that it was asked for by, which on torch 2.15 stands for another implementation than before.
    """
    found = _backend_object(group, backend)
    return backend if found is None else str(found.name())


def _backend_object(group: dist.ProcessGroup, backend: str) -> Any:
    """The object behind a backend's name in a group; None where there is none, as in a group written in Python."""
    for pair in dist.get_backend_config(group).split(","):
        device, _, name = pair.rpartition(":")
        if name != backend:
            continue
        try:
            found: Any = group._get_backend(torch.device(device or "cpu"))
        except RuntimeError:
            continue
        while isinstance(found, _c._ProcessGroupWrapper):
            found = found.wrapped_pg
        return found
    return None


def records_itself(backend: str) -> None:
    """Tell torch that groups of this backend, which registers no `Backend` object, need no flight-recorder hook.

    torch 2.15 attaches one to every group whose backend is not in this set, and raises for a group without a backend.
    """
    known = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if isinstance(known, set):
        known.add(backend)


def recorder_dump(recorder: str, entries: bool) -> dict[str, Any] | None:
    """What torch's flight recorder holds under a name of `recorder_name`; None where it holds nothing.

    That is where it is off, where this torch has none, and before the first collective of a lazily connected backend.
    Without ``entries`` the counters of each group, in 30 µs; with them 2,000 collectives in 50 ms (torch 2.13, gloo).
    """
    try:
        if recorder in _RECORDERS:
            text = getattr(_c, _RECORDERS[recorder])(entries, False)
        else:
            text = getattr(_c, "_dump_fr_trace_json")(entries, False, recorder)  # noqa: B009 - a CPU build has none
        trace: dict[str, Any] = json.loads(text)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # by version
        return None
    return trace if trace.get("pg_config") else None


def recorded_end(entry: dict[str, Any]) -> bool:
    """Whether a collective in such a dump has ended."""
    # gloo's entries stay "scheduled" for good, also after they ended; then they are marked as retired.
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def sequence_number(group: dist.ProcessGroup, backend: str | None = None) -> int | None:
    """How many collectives this process has issued on the group, or on one of its backends, also in C++.

    None where it is not counted.
    """
    handle: Any = group if backend is None else _backend_object(group, backend) or group
    try:
        return int(handle._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def backend_error(group: dist.ProcessGroup, backend: str) -> str | None:
    """What torch's own watchdog has found on one of the group's backends: "TIMEOUT", "COMM_ERROR" or "REMOTE_ERROR".

    None where it has found nothing, and where this torch cannot tell (before 2.7, gloo). ProcessGroupNCCL ends the
    process a minute later by default, nccl2 after 15 s.
    """
    found = _backend_object(group, backend)
    try:
        name = str(found.get_error().name)
    except (AttributeError, RuntimeError):
        return None
    return None if name == "SUCCESS" else name
