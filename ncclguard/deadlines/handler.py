"""The public side of time limits for raw ``torch.distributed`` calls."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from ncclguard import config, torch_compat
from ncclguard.deadlines.limit import TimeLimit, enter_engine, innermost, leave_engine


def nccl_timeout_handler(seconds: float | timedelta = 1800, group: dist.ProcessGroup | None = None) -> TimeLimit:
    """Return a context manager that bounds the raw ``torch.distributed`` calls inside it.

    ``seconds`` is a number of seconds, fractions included, or a ``timedelta``. When they have passed and the block is
    still inside, then

    - Python code of the main thread (a loop, ``time.sleep``) is interrupted with ``CollectiveTimeout``, through
      SIGALRM. The groups are left alone, except one that has a collective in flight, or may have (flight recorder off);
    - a call that waits in C++ is ended by stopping ``group`` on this rank (gloo: its connections are closed; NCCL: its
      communicators are aborted), and the error with which it returns is raised as ``CollectiveTimeout``. Without
      ``group`` those with a collective in flight are stopped, or else the default group, and if the block still does
      not end, every other group. A stopped group is unusable from then on, on all ranks; the error says which that is.

    What has ended when the block is left is not reported, also if it ended late; another exception passes unchanged.
    A rank that stops a group says so in the job's store: one that comes to a block later, after a long absence, raises
    ``CollectiveTimeout`` when it enters, before it has sent anything, and names itself where it had not called what
    was waited for. Blocks nest: the sooner limit holds. Around ``safe_*`` a block shortens their budget and never
    interrupts them; prefer those, they keep the process group. A SIGALRM timer that the program had set still reaches
    its own handler on time. In an asyncio task the block bounds blocking calls of that task; it does not interrupt an
    ``await``.

    Not bounded: a collective that was only queued (on NCCL, synchronise inside the block); building a group, which
    waits in the store; ``recv`` from any source on gloo, which ends with the group's own timeout. A native call of
    another kind that goes on for a second past the limit is taken for a collective.

    Entering raises ``CollectiveTimeout`` for a group of this block that a peer has stopped, until it is destroyed.
    Raises ``TypeError`` or ``ValueError`` for a bad limit, and ``ValueError`` for a group that was destroyed or that
    this rank is not a member of.

    >>> with nccl_timeout_handler(30) as deadline:
    ...     print(deadline.remaining() <= 30)
    True
    """
    limit = config.seconds(seconds, "the limit of nccl_timeout_handler")
    if limit is None:
        raise TypeError("nccl_timeout_handler needs a limit: pass seconds or a timedelta (1800 s is the default)")
    if group is not None and not torch_compat.is_member(group):
        if isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                "the process group was destroyed, or this rank is not a member of it; enter nccl_timeout_handler on its "
                "members, with a group that init_process_group or new_group returned"
            )
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, not {type(group).__name__}")
    return TimeLimit(limit, group)


def remaining_limit() -> float | None:
    """Return the seconds left under the enclosing ``nccl_timeout_handler`` blocks, never below zero; None outside."""
    limit = innermost()
    return None if limit is None else max(0.0, limit.deadline - time.monotonic())


class engine_section:
    """Mark the code inside as a guarded operation, which ends by itself: no limit
    interrupts it or stops a group for it.

    The enclosing limit is not lifted by that, see ``remaining_limit``. Code that goes on in a block whose limit passed
    inside such a section is not interrupted either, because the guarded operation has told of the failure; a raw call
    made there is still ended.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        enter_engine()

    def __exit__(self, *exc_info: object) -> None:
        leave_engine()
