"""Ports of this host for what tests start."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

from ncclguard.faults.launcher import reserve_port

_reserved = ExitStack()
atexit.register(_reserved.close)


def free_port() -> int:
    """Return a port at which what a test starts may listen; no other process is given it as long as this one runs.

    Whoever listens has to ask for it with SO_REUSEADDR, as servers do. One that ``bind(0)`` has found, and that is free
    again, may be another process's by the time that a launcher has imported torch and listens.
    """
    return int(_reserved.enter_context(reserve_port()).getsockname()[1])
