"""The inside of one try: limits of an evaluation, collectives redirected, and the
others told when this rank gives up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from ncclguard import _torch, runtime
from ncclguard.agreement.sections import Sections
from ncclguard.incident.stacks import describe_exception
from ncclguard.outcome import Outcome
from ncclguard.phases import inside_section


def members_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks that evaluate together; (0,) without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    return _torch.group_ranks(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]


@dataclass
class Try:
    """The inside of one try."""

    failures: tuple[Outcome, ...] = ()  # of collectives inside, in order


@contextmanager
def one_try(name: str, members: tuple[int, ...], timeout: float) -> Iterator[Try]:
    """Inside, every collective has `timeout` seconds and runs on guarded groups; an exception is known to all at once.

    `name` is the same on all ranks and unlike that of any other try. Afterwards call `settle()`, once all ranks have
    met.
    """
    inside = Try()
    if len(members) == 1:
        with inside_section(name, timeout):
            yield inside
        return
    sections = _sections()
    sections.enter(name, members)
    try:
        with inside_section(name, timeout), redirected(timeout, inside):
            yield inside
    except BaseException as error:
        sections.leave(describe_exception(error))
        raise
    sections.leave()


def settle(members: tuple[int, ...]) -> None:
    """All ranks have met, or have agreed that they did not: nobody waits for this one inside the try any more."""
    if len(members) > 1:
        _sections().settle()


@contextmanager
def redirected(timeout: float, inside: Try | None = None) -> Iterator[None]:
    """Run what is called on any of the program's groups on guarded groups with the same ranks."""
    from ncclguard import process_group  # here: it loads what only redirected programs need

    scope = None
    try:
        with process_group.redirected(timeout=timeout) as scope:
            yield
    finally:
        if inside is not None and scope is not None:
            inside.failures = tuple(scope.failures)


def _sections() -> Sections:
    return runtime.current().monitor.sections
