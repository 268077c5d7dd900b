"""What a rank says of itself in reports and when it leaves: where its threads are,
what it called last; bounded in size.

The reports of all ranks go through the store of one process, so what one may say shrinks with the number of ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ncclguard.agreement.decision import Phase, Report
from ncclguard.agreement.monitor import Monitor
from ncclguard.agreement.seat import Seat
from ncclguard.incident.history import snapshot
from ncclguard.incident.stacks import call_site_of, main_thread_stack, other_threads
from ncclguard.termination import dead_threads

#: Bytes of the details of all reports of a group together, and the most and least that one may have.
ALL_REPORTS: Final = 16 << 20
ONE_REPORT: Final = (2 << 10, 96 << 10)
#: Characters of a single text, such as an exception.
TEXT: Final = 1000


class Description:
    """Of this process, for the monitor's thread."""

    def __init__(self, monitor: Monitor, host: str) -> None:
        self._monitor = monitor
        self._host = host

    def describe(self, seat: Seat, report: Report) -> Report:
        """Add to a report what only this process knows."""
        call = seat.call
        details: dict[str, object] = {
            **self.identity(),
            "stack": list(main_thread_stack()),
            "call_site": "" if call is None else call_site_of(call.thread),
            "last": seat.last_text,
            "call": "" if call is None else call.text,
            "dead_threads": dead_threads(),
        }
        if report.phase is Phase.NONE:  # not in it: this may be the rank that is looked for
            details["threads"] = other_threads()
        details |= report.details
        trouble = report.trouble
        return replace(
            report,
            trouble=None if trouble is None else replace(trouble, text=trouble.text[:TEXT]),
            elsewhere=self._monitor.waiting_elsewhere(seat.key)[:TEXT],
            details=shortened(details, len(seat.member.members)),
        )

    def identity(self) -> dict[str, object]:
        """Which process this is, with its history."""
        return {"host": self._host, "pid": os.getpid(), "history": self.history()}

    def history(self) -> dict[str, object]:
        """The last operations of this rank, in all groups."""
        past = {}
        open_calls: list[tuple[str, int, str, float]] = []
        for seat in self._monitor.seats():
            with seat.condition:
                past[seat.key] = list(seat.past)
            open_calls += seat.open_calls()
        return snapshot(past, open_calls, time.monotonic())


def report_bytes(members: int) -> int:
    """How many bytes the details of one report in a group of so many members may have, as JSON.

    >>> report_bytes(8), report_bytes(1000), report_bytes(4000)
    (98304, 16777, 4194)
    """
    least, most = ONE_REPORT
    return min(max(ALL_REPORTS // members, least), most)


def shortened(details: Mapping[str, object], members: int) -> dict[str, object]:
    """Return the details within `report_bytes`, as far as that is possible: outer
    frames, history and other threads give way.

    Half of the bytes are the main thread's, innermost frames first. What a verdict under `watch` rests on is never cut.
    """
    small = {
        key: value[:TEXT] if isinstance(value, str) else value
        for key, value in details.items()
        if key not in ("stack", "history", "threads")
    }
    left = report_bytes(members) - _size(small)
    found = dict(small)
    stack = details.get("stack")
    if isinstance(stack, (list, tuple)):
        found["stack"] = _innermost(stack, max(left // 2, report_bytes(members) // 4))
        left -= _size(found["stack"])
    history = details.get("history")
    if history is not None and _size(history) <= left:
        found["history"] = history
        left -= _size(history)
    threads = details.get("threads")
    if isinstance(threads, (list, tuple)):
        kept: list[object] = []
        for thread in threads:
            left -= _size(thread)
            if left < 0:
                break
            kept.append(thread)
        found["threads"] = kept
    return found


def _innermost(stack: list[object] | tuple[object, ...], limit: int) -> list[str]:
    """The last frames that fit, under a line that counts the others."""
    kept: list[str] = []
    for frame in reversed([str(frame) for frame in stack]):
        limit -= _size(frame)
        if limit < 0:
            kept.append(f"... {len(stack) - len(kept)} lines further out ...")
            break
        kept.append(frame)
    return kept[::-1]


def _size(value: object) -> int:
    return len(json.dumps(value, default=str))
