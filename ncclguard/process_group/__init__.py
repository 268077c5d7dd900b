"""Process groups for frameworks: the backend "ncclguard", and the redirection of other groups to guarded ones."""

from __future__ import annotations

from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.process_group.redirection import redirected
from ncclguard.process_group.work_queue import GuardedWork

__all__ = ["GuardedProcessGroup", "GuardedWork", "redirected"]
