"""The process group that a call was given: checked in one place, before anything is sent."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ncclguard import torch_compat
from ncclguard.config import is_time
from ncclguard.environment.network import launched_ranks
from ncclguard.errors import GuardConfigError
from ncclguard_explain.language import Message, joined, say, told, tr


def group_of(given: object) -> ProcessGroup | None:
    """Return the group that a call is made on: the default one for None, and None where this process works alone.

    Raises as `check_group` does, and GuardConfigError where a launcher started several ranks and torch.distributed is
    not initialised: the call would succeed on each by itself.
    """
    if given is not None:
        return check_group(given)
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    launched = launched_ranks(os.environ)
    if launched is not None and launched[1] > 1:
        if torch_compat.was_destroyed():
            text = told(
                "the process group of the job was destroyed in this process, so nothing would be communicated: make this "
                "call before destroy_process_group(), or call init_process_group() again"
            )
            raise GuardConfigError(text)
        variable, ranks = launched
        text = told(
            "a launcher started {count} ranks ({variable}={count}), but torch.distributed is not initialised in this one, "
            "so nothing would be communicated: call torch.distributed.init_process_group() first (and "
            "destroy_process_group() last), or unset {variable} for a process that works alone",
            count=ranks,
            variable=variable,
        )
        raise GuardConfigError(text)
    return None


def check_group(given: object) -> ProcessGroup | None:
    """Return what was given as a group; None is in order.

    Raises TypeError for what is no process group, ValueError for one that this rank is not in or that was destroyed.
    """
    if given is None:
        return None
    if given is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to those it leaves out: a number
        who = f"rank {dist.get_rank()}" if dist.is_initialized() else tr("this rank")
        text = told("{who} is not a member of the group that was given: call this on the group's members only", who=who)
        raise ValueError(text)
    if not isinstance(given, ProcessGroup):
        kind = type(given).__name__
        needed = tr("group must be a torch.distributed.ProcessGroup or None, not {kind}", kind=kind)
        raise TypeError(say(joined(": ", (needed, _meant(given)))))
    if not torch_compat.is_member(given):
        text = told("the process group was destroyed: create it again with new_group() or init_process_group()")
        raise ValueError(text)
    return given


#: By group, what `is_outside` has found.
_outside: weakref.WeakKeyDictionary[ProcessGroup, bool] = weakref.WeakKeyDictionary()


def is_outside(group: ProcessGroup) -> bool:
    """Return whether a group met in a store of its own, with ranks of its own, as a trainer and its engines do."""
    found = _outside.get(group)
    if found is None:
        found = _outside[group] = not dist.is_initialized() or not torch_compat.is_same_store(
            torch_compat.store_of(group), torch_compat.default_store()
        )
    return found


def _meant(given: Any) -> Message:
    """Return what to write where something else was given in the group's place."""
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        return tr("new_group() has returned this number here because this rank is no member: call on its members only")
    if is_time(given):
        return tr("a limit is given by its name, timeout={value}", value=repr(given))
    if callable(getattr(given, "get_group", None)):  # torch's DeviceMesh
        return tr("give the group of one of its dimensions, get_group(...)")
    return tr("give what dist.new_group() has returned, or nothing for all ranks")
