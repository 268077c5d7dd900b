"""Budgets, size-based limits, and the time limit for raw ``torch.distributed`` calls.

``deadline`` has the points in time; ``handler`` what users call; ``limit`` the rules of one block; ``alarm`` and
``watchdog`` its two clocks; ``stopping`` how operations of a process group are made to end.
"""

from __future__ import annotations

from ncclguard.deadlines.deadline import Deadline, get_adaptive_timeout
from ncclguard.deadlines.limit import (
    TimeLimit,
    engine_section,
    enter_engine,
    leave_engine,
    nccl_timeout_handler,
    remaining_limit,
)

__all__ = [
    "Deadline",
    "TimeLimit",
    "engine_section",
    "enter_engine",
    "get_adaptive_timeout",
    "leave_engine",
    "nccl_timeout_handler",
    "remaining_limit",
]
