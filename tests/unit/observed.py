"""Calls of guarded groups as the engine tells of them to those who listen, for the tests of the monitoring."""

from __future__ import annotations

import time

from ncclguard import events
from ncclguard.coordination.group_state import OpenCall
from ncclguard.metrics.registry import RecordingListener
from ncclguard.outcome import Outcome
from ncclguard_explain.cause import Cause

KEY = "0:cpu:aedf9bb1"


def listener() -> RecordingListener:
    """The one that `setup_nccl_monitoring` has made."""
    (found,) = listening()
    return found


def listening() -> list[RecordingListener]:
    """Those that count calls now."""
    return [one for one in events.listeners if isinstance(one, RecordingListener)]


def succeed(hearer: RecordingListener, nbytes: int = 4096, seconds: float = 0.01, waited: float = 0.005) -> None:
    """An all-reduce that ends well."""
    now = time.monotonic()
    call = OpenCall("all_reduce()", now, now + 300, 0, sequence=6, opened=now + waited)
    hearer.call_started(KEY, call)
    hearer.call_ended(KEY, call, outcome("all_reduce", 6, nbytes, seconds))


def fail(hearer: RecordingListener, seconds: float) -> None:
    """A barrier that fails because rank 2 is late."""
    now = time.monotonic()
    call = OpenCall("barrier()", now, now + 300, 0, sequence=7)
    hearer.call_started(KEY, call)
    hearer.call_ended(KEY, call, outcome("barrier", 7, 0, seconds, Cause.LATE, (2,)))


def outcome(
    op: str, sequence: int, nbytes: int, seconds: float, cause: Cause | None = None, culprits: tuple[int, ...] = ()
) -> Outcome:
    """The agreed outcome of such a call."""
    return Outcome(
        agreed=True, op=op, op_id=f"{KEY}/{sequence}", cause=cause, culprits=culprits, attempts=1, chunks=1,
        numel=nbytes // 4, nbytes=nbytes, seconds=seconds, algbw=0.0, busbw=0.0, participants=(0, 1), torn=False,
        incident=None,
    )  # fmt: skip
