"""How the data of each collective moves, is kept restorable, and becomes the caller's result.

The guard drives an `Execution` piece by piece and knows nothing of tensors. Three rules make failure harmless: an input
is copied before anything may write into it; what is still missing on some rank stays restorable; results that were
gathered elsewhere reach the caller's memory only after the verdict.
"""

from __future__ import annotations

from ncclguard._inference import writable
from ncclguard.execution.base import Barrier, Execution, InUse, Refused, encode
from ncclguard.execution.collected import AllGather, ReduceScatter
from ncclguard.execution.in_place import AllReduce, Broadcast

__all__ = [
    "AllGather",
    "AllReduce",
    "Barrier",
    "Broadcast",
    "Execution",
    "InUse",
    "ReduceScatter",
    "Refused",
    "encode",
    "writable",
]
