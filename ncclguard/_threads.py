"""Whether native threads, which Python knows nothing of, are asleep."""

from __future__ import annotations

import os
import time

_INTERVAL = 0.01  # seconds a thread must have slept through


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
