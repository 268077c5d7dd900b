"""Budgets, size-based limits, and the time limit for raw ``torch.distributed`` calls.

``deadline.py`` has the points in time; ``limit.py`` the function that users call and the rules of one block;
``timers.py`` its two clocks; ``stopping.py`` ends operations of a process group.
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
