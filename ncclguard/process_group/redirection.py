"""Run all collectives of other process groups on guarded groups with the same ranks, for a while.

A group that had to be stopped cannot be used again. Where the collectives of a part of the program may fail, such as
those of an evaluation, they are therefore kept away from the groups that training needs: in the scope every call on one
of these arrives at a guarded group instead, whoever makes it. Python callers are met at the methods of `ProcessGroup`,
C++ callers at the operators that these dispatch to (see `kernels`). Outside of all scopes both are torch's own again.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ncclguard import lifecycle, torch_compat
from ncclguard.config import seconds
from ncclguard.groups import group_of
from ncclguard.incident.stacks import describe_exception
from ncclguard.outcome import Outcome
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.process_group.operators import Kernels
from ncclguard.torch_compat.groups import tells_reduce_op
from ncclguard_explain.language import told

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ncclguard")

METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather", "all_gather_single",
    "_allgather_base", "allgather_coalesced", "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "gather",
    "scatter", "alltoall", "all_to_all_single", "alltoall_base", "send", "recv", "recv_anysource", "barrier",
    "monitored_barrier", "_start_coalescing", "_end_coalescing",
)  # fmt: skip
"""The methods of `ProcessGroup` that communicate; those that this version of torch lacks are left out."""

_lock = threading.RLock()
_routes: dict[dist.ProcessGroup, GuardedProcessGroup] = {}  # in force now
_stand_ins: dict[dist.ProcessGroup, GuardedProcessGroup] = {}  # kept, with their connections, while the group lives
_originals: dict[str, Any] = {}
_scopes = 0  # entered and not left


def is_redirecting() -> bool:
    """Return whether this process is in a `redirected` scope, such as a resilient evaluation's, whose limit holds."""
    return _scopes > 0


class redirected:
    """Run every collective on `groups`, inside, on guarded groups with the same ranks.

    Afterwards they run on the groups themselves again.

    `groups`: all that this process is a member of by default. `timeout`: seconds or timedelta of one collective; by
    default the limit of the enclosing `phase`, else 30 minutes. All ranks of a group enter and leave at the same place
    in their sequence of collectives; entering and leaving do not communicate. Scopes nest, and hold for all threads of
    the process.

    Leaving waits for what was issued and not waited for. An exception drops what has not started and fails what runs,
    for all ranks: nothing is in flight afterwards, but ranks that wait for a collective which this one never reached
    learn of it only at their deadline, or from an enclosing section.

    `failures`: the failed outcomes of the collectives in the scope, in their order. Raises ValueError for a group that
    was destroyed or a `timeout` that cannot be, TypeError for what is no group.

    >>> from ncclguard.process_group import redirected
    >>> with redirected(timeout=600) as scope:
    ...     pass  # evaluate
    >>> scope.failures
    ()
    """

    def __init__(self, *groups: dist.ProcessGroup, timeout: float | timedelta | None = None) -> None:
        self._limit = seconds(timeout, "timeout")
        self._groups = tuple(filter(None, map(group_of, groups)))
        self._failures: list[Outcome] = []
        self._entered: list[list[_Detour]] = []

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """Failed outcomes so far, those of asynchronous collectives that nobody waited for included."""
        return tuple(self._failures)

    def __enter__(self) -> Self:
        global _scopes
        detours: list[_Detour] = []
        with _lock:
            try:
                for group in self._groups or torch_compat.known_groups():
                    target = _target_of(group)
                    if target is not None:
                        target.enter_scope(self._limit, self._failures.append)
                        detours.append(_Detour(group, target, _routes.get(group), target.one_by_one))
                        # Where a rank raises, what others have enqueued for it would meet what comes behind the scope.
                        target.one_by_one = True
                        if target is not group:
                            _routes[group] = target
                _update()
            except BaseException:
                _leave(detours)
                raise
            _scopes += 1
        self._entered.append(detours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _scopes
        detours = self._entered.pop()
        try:
            for detour in detours:
                detour.target.finish("" if error is None else describe_exception(error))
        finally:
            with _lock:
                _scopes -= 1
                _leave(detours)


class _Detour(NamedTuple):
    """A group's detour in one scope: where its collectives go, and went before, if not to the group itself."""

    group: dist.ProcessGroup
    target: GuardedProcessGroup
    before: GuardedProcessGroup | None
    one_by_one: bool  # whether the target's collectives had a verdict each


def _leave(detours: Sequence[_Detour]) -> None:
    """Have collectives go where they went before these."""
    for group, target, before, one_by_one in reversed(detours):
        target.leave_scope()
        target.one_by_one = one_by_one
        if before is not None:
            _routes[group] = before
        elif target is not group:
            _routes.pop(group, None)
    _update()


def _target_of(group: dist.ProcessGroup) -> GuardedProcessGroup | None:
    """The guarded group for it: itself, or one that is kept for the next scope; None for what cannot be redirected."""
    if isinstance(group, GuardedProcessGroup):
        return group
    for gone in [known for known in _stand_ins if not torch_compat.is_member(known)]:
        _stand_ins.pop(gone).shutdown()
    if type(group) is not dist.ProcessGroup:
        log.warning(
            "ncclguard: %s",
            told(
                "collectives on process group {group} are not redirected: it is a {kind}, whose methods are its own",
                "log",
                group=torch_compat.group_name(group),
                kind=type(group).__name__,
            ),
        )
        return None
    if group not in _stand_ins:
        _stand_ins[group] = GuardedProcessGroup(group.rank(), group.size(), stands_for=group)
    return _stand_ins[group]


# ---------------------------------------------------------------------- torch's side


def _update() -> None:
    """Meet the callers while any group is redirected, and only then."""
    if _routes and not _originals:
        for name in METHODS:
            if name in vars(dist.ProcessGroup):
                _originals[name] = vars(dist.ProcessGroup)[name]  # getattr gives a function that does not bind any more
                setattr(dist.ProcessGroup, name, _detour(name, getattr(dist.ProcessGroup, name)))
        _kernels.install()
        if not tells_reduce_op():
            log.warning(
                "ncclguard: %s",
                told(
                    "the operators of torch {version} do not tell their reduce op, so reductions that C++ code begins, as "
                    "DistributedDataParallel does, are not redirected; those of Python code are. Use torch 2.13 or newer for both",
                    "log",
                    version=torch.__version__,
                ),
            )
    elif _originals and not _routes:
        _kernels.remove()
        while _originals:
            setattr(dist.ProcessGroup, *_originals.popitem())


def _detour(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        target = _routes.get(self)
        return original(self, *args, **kwargs) if target is None else getattr(target, name)(*args, **kwargs)

    return method


_kernels = Kernels(_routes.get)


def _forget() -> None:
    """The job is left: its groups are gone."""
    with _lock:
        _stand_ins.clear()
        _routes.clear()
        _update()


def _before_destroy(group: dist.ProcessGroup) -> None:
    """Shut down what torch 2.6 does not, a group that is written in Python, and the stand-in of any other."""
    with _lock:
        stand_in = _stand_ins.pop(group, None)
    for gone in (group, stand_in):
        if isinstance(gone, GuardedProcessGroup):
            gone.shutdown()


lifecycle.at_end(lifecycle.End.QUEUES, _forget)
torch_compat.on_destroy_group(_before_destroy)
