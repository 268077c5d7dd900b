"""Whether native threads, which Python knows nothing of, are asleep."""

from __future__ import annotations

import os
import threading
import time

_INTERVAL = 0.01  # seconds a thread must have slept through


def native_threads() -> frozenset[int]:
    """Ids of this process's threads that Python did not start; empty where there is no ``/proc`` (not Linux)."""
    try:
        tasks = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return frozenset()
    return frozenset(tasks - {thread.native_id for thread in threading.enumerate()})


def name(thread: int) -> str:
    """The name a native thread was given, "" for one that has ended."""
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def asleep(threads: frozenset[int], seconds: float = _INTERVAL) -> bool:
    """Whether all ``threads`` slept, without running once, through the next 10 ms, or ``seconds`` (or have ended).

    False where it cannot be seen: no threads given, or a kernel without scheduler statistics.
    """
    if not threads:
        return False
    before = [_sleeping(thread) for thread in threads]
    if None in before:
        return False
    time.sleep(seconds)
    return before == [_sleeping(thread) for thread in threads]


def _sleeping(thread: int) -> str | None:
    """How long a sleeping thread has run in all (nanoseconds, and how often), "" for
    one that has ended; None if it runs.
    """
    try:
        with open(f"/proc/self/task/{thread}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        with open(f"/proc/self/task/{thread}/schedstat") as file:
            return file.read() if state == "S" else None
    except FileNotFoundError:
        return "" if not os.path.exists(f"/proc/self/task/{thread}") else None
    except OSError:  # ended between opening and reading
        return None
