"""Which ranks gloo has ended."""

from __future__ import annotations

from ncclguard.faults import RankResult

#: The second where Python's fault handler, which reads the frames of threads that run on, fails at it.
ENDS = ("SIGABRT", "SIGSEGV")


def aborted(rank: RankResult) -> bool:
    """Whether C++ ended this process because of an exception that nothing caught."""
    return rank.end in ENDS and "terminate called" in rank.output
