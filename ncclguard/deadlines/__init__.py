"""Budgets, size-based limits, and the time limit for raw ``torch.distributed`` calls.

``deadline.py`` has the points in time; ``limit.py`` the function that users call and the rules of one block;
``timers.py`` its two clocks; ``stopping.py`` ends operations of a process group.
"""

from __future__ import annotations

from ncclguard.deadlines.deadline import Deadline as Deadline, get_adaptive_timeout as get_adaptive_timeout
from ncclguard.deadlines.limit import (
    TimeLimit as TimeLimit,
    engine_section as engine_section,
    enter_engine as enter_engine,
    leave_engine as leave_engine,
    nccl_timeout_handler as nccl_timeout_handler,
    remaining_limit as remaining_limit,
)
