"""Where in the program a call is made, and how long it may take there: phases, sections, and a call's budget."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ncclguard.config import GuardConfig, current_config, seconds
from ncclguard.deadlines.deadline import get_adaptive_timeout
from ncclguard.errors import GuardConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

PHASES = ("train", "eval", "small")

P = ParamSpec("P")
R = TypeVar("R")

_phases: ContextVar[tuple[str, ...]] = ContextVar("ncclguard_phases", default=())


class phase:
    """The limits of a part of the program, as a context manager or a decorator of a function or coroutine function.

    `name` is "train" (10 min), "eval" (30 min) or "small" (5 min). Phases nest, the innermost counts, and they are
    local to the thread or task: a thread that is started inside one has none. All ranks must be in the same one when
    they call a collective. Raises GuardConfigError for another name, TypeError when a generator function is
    decorated.

    >>> from ncclguard import phase
    >>> with phase("eval"):
    ...     pass  # guarded calls in here have 30 minutes
    """

    def __init__(self, name: str) -> None:
        if name not in PHASES:
            raise GuardConfigError(f"unknown phase {name!r}: use one of {', '.join(map(repr, PHASES))}")
        self._name = name

    def __enter__(self) -> Self:
        _phases.set((*_phases.get(), self._name))
        return self

    def __exit__(self, *exc: object) -> None:
        # The stack is kept in the context and not on this object, which several threads and tasks may be inside at
        # once.
        _phases.set(_phases.get()[:-1])

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator and runs in its caller's phase: use `with phase(...)`"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def inside_task(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self:
                    return await cast("Callable[P, Awaitable[Any]]", function)(*args, **kwargs)

            return cast("Callable[P, R]", inside_task)

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return inside


class Section(str):
    """A phase with a name and a limit of its own, such as one try of one evaluation; entered with `inside_section`."""

    limit: float  # seconds of a call inside
    __slots__ = ("limit",)


@contextmanager
def inside_section(name: str, limit: float) -> Iterator[None]:
    """Calls in here have `limit` seconds and differ from those of other sections, as if they had another `name`."""
    section = Section(name)
    section.limit = limit
    token = _phases.set((*_phases.get(), section))
    try:
        yield
    finally:
        _phases.reset(token)


def current_phase() -> str | None:
    """The innermost phase of this thread or task, "eval" in a section; None outside of any."""
    phases = _phases.get()
    if not phases:
        return None
    return "eval" if isinstance(phases[-1], Section) else phases[-1]


def current_place() -> str | None:
    """The innermost phase with the sections around it: what must be equal on all ranks that meet in a call."""
    phases = _phases.get()
    if not phases:
        return None
    return ", ".join([*(phase for phase in phases[:-1] if isinstance(phase, Section)), phases[-1]])


def resolve_timeout(argument: float | timedelta | None, numel: int, config: GuardConfig | None = None) -> float:
    """A call's budget in seconds: argument > phase > variable > size of the operation. Raises as `seconds` does."""
    given = seconds(argument, "timeout")
    if given is not None:
        return given
    config = config or current_config()
    phases = _phases.get()
    if phases:
        name = phases[-1]
        limit: float = name.limit if isinstance(name, Section) else getattr(config, f"timeout_{name}")
        return limit
    if config.timeout is not None:
        return config.timeout
    return get_adaptive_timeout(numel)
