"""The description of a rank in reports and when it leaves: where its threads are and what it called last.

The reports of all ranks go through the store of one process, so what one may say shrinks with the number of ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ncclguard import events, lifecycle, optimizer_steps, torch_compat
from ncclguard.coordination.group_state import KINDS, GroupState, OpenCall
from ncclguard.coordination.incidents import ISSUERS
from ncclguard.coordination.monitor import Monitor
from ncclguard.incident.stacks import call_site_of, main_thread_stack, other_threads, programs_thread, thread_stack
from ncclguard.incident.timeline import KEPT, PastTuple, snapshot
from ncclguard.outcome import Outcome
from ncclguard.protocol.decision import INTERRUPT_COUNTS, INTERRUPTED, Phase, Report

#: Bytes of the details of all reports of a group together, and the most and least that one may have.
ALL_REPORTS: Final = 16 << 20
ONE_REPORT: Final = (2 << 10, 96 << 10)
#: Characters of a single text, such as an exception.
TEXT: Final = 1000


#: In a report's details: the thread that issued the last collective which is only watched.
CALLER: Final = "caller"


class History(events.Listener):
    """Keeps the last calls of each group for later reports; on every call's path."""

    def __init__(self) -> None:
        self._past: dict[str, deque[PastTuple]] = {}
        self._callers: dict[str, int] = {}
        self.entered = 0  # calls of this process, in all groups

    def call_started(self, group: str, call: OpenCall) -> None:
        self.entered += 1
        self._callers[group] = call.thread

    def call_refused(self, group: str, outcome: Outcome) -> None:
        self.entered += 1

    def call_ended(self, group: str, call: OpenCall, outcome: Outcome | None) -> None:
        if not call.participants:  # it never began
            return
        past = self._past.get(group)
        if past is None:
            past = self._past.setdefault(group, deque(maxlen=KEPT))
        succeeded = outcome is not None and outcome.cause is None
        past.append((call.sequence, call.text, call.entered, time.monotonic(), succeeded))

    def last(self, group: str) -> str:
        """The last call of a group, in words; empty for none."""
        past = self._past.get(group)
        return past[-1][1] if past else ""

    def caller(self, group: str) -> int:
        """The thread of the last call of a group, by ``threading.get_ident()``; 0 for none."""
        return self._callers.get(group, 0)

    def past(self) -> dict[str, list[PastTuple]]:
        """A copy, by group."""
        return {group: list(past) for group, past in list(self._past.items())}


class Description:
    """The description of this process, for the monitor's thread."""

    def __init__(self, monitor: Monitor, host: str, history: History, job: tuple[int, ...] = ()) -> None:
        self._monitor = monitor
        self._job = job  # its ranks, unless the group is outside the job
        self._host = host
        self._history = history

    def describe(self, state: GroupState, report: Report) -> Report:
        """Add to a report what only this process knows."""
        call = state.call
        caller = int(str(report.details.get(CALLER) or self._history.caller(state.key)))
        raised_in, raised_at = self._monitor.sections.raised_at(report.trouble)
        thread = programs_thread(raised_in if raised_at else caller)
        details: dict[str, object] = {
            **self.identity(),
            "stack": list(raised_at or (thread_stack(caller) if thread else main_thread_stack())),
            "thread": thread,
            "call_site": "" if call is None else call_site_of(call.thread),
            "last": self._history.last(state.key),
            "entered": self._history.entered,
            "call": "" if call is None else call.text,
            "dead_threads": lifecycle.dead_threads(),
            "steps": optimizer_steps.made(),
        }
        # Not in it: this may be the rank that is looked for, and so may another of its threads where those issue too.
        if report.phase is Phase.NONE or report.details.get(ISSUERS):
            others = [one for one in other_threads() if one[0] != thread]
            details["threads"] = [["MainThread", list(main_thread_stack())], *others] if thread else others
        if lifecycle.since_interrupt() < INTERRUPT_COUNTS:
            details[INTERRUPTED] = True
        details |= report.details
        trouble = report.trouble
        elsewhere, awaited, free_for = self._monitor.waiting_elsewhere(state.key)
        if not elsewhere or free_for:
            making = torch_compat.group_in_the_making()
            elsewhere, awaited, free_for = (making, (), 0.0) if making else (elsewhere, awaited, free_for)
        watched = report.watched
        if state.guarded:
            watches = [self._monitor.state(key, self._job) for key in KINDS] if self._job else []
            watched = next((watch.torchs_own() for watch in watches), None)
        return replace(
            report,
            trouble=None if trouble is None else replace(trouble, text=trouble.text[:TEXT]),
            elsewhere=elsewhere[:TEXT],
            awaited=awaited,
            free_for=free_for,
            watched=watched,
            details=shortened(details, len(state.member.members)),
        )

    def identity(self) -> dict[str, object]:
        """Return which process this is, with its history."""
        return {**self.process(), "history": self.history()}

    def process(self) -> dict[str, object]:
        """Return which process this is."""
        return {"host": self._host, "pid": os.getpid()}

    def history(self) -> dict[str, object]:
        """The last operations of this rank, in all groups."""
        open_calls = [call for state in self._monitor.states() for call in state.open_calls()]
        return snapshot(self._history.past(), open_calls, time.monotonic())


def report_bytes(members: int) -> int:
    """Return how many bytes the details of one report in a group of so many members may have, as JSON.

    >>> report_bytes(8), report_bytes(1000), report_bytes(4000)
    (98304, 16777, 4194)
    """
    least, most = ONE_REPORT
    return min(max(ALL_REPORTS // members, least), most)


def shortened(details: Mapping[str, object], members: int) -> dict[str, object]:
    """Return the details within `report_bytes`, as far as that is possible.

    Outer frames, history and other threads give way.

    Half of the bytes are the first stack's, innermost frames first. What a verdict under `watch` rests on is never cut.
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
