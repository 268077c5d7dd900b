"""The door for frameworks: a process group over the engine, its backend name, and
the redirection of other groups to it.
"""

from __future__ import annotations

from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.process_group.redirection import redirected
from ncclguard.process_group.work import GuardedWork

__all__ = ["GuardedProcessGroup", "GuardedWork", "redirected"]
