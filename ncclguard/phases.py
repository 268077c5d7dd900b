"""Phases and sections of a program, and the time limits that its calls have there."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from ncclguard.config import GuardConfig, current_config, seconds
from ncclguard.deadlines.deadline import get_adaptive_timeout
from ncclguard.errors import GuardConfigError
from ncclguard.spelling import meant
from ncclguard_explain.language import joined, say, told, tr

if TYPE_CHECKING:
    from typing_extensions import Self

PHASES = ("train", "eval", "small")

P = ParamSpec("P")
R = TypeVar("R")

_phases: ContextVar[tuple[str, ...]] = ContextVar("ncclguard_phases", default=())

#: How many changes of a thread's phases are kept.
KEPT = 64
#: The last changes of each thread: time.time_ns(), and the phases from then on. Other threads cannot see its context.
_changes: dict[int, deque[tuple[int, tuple[str, ...]]]] = {}


def _enter(phases: tuple[str, ...]) -> None:
    _phases.set(phases)
    changes = _changes.get(threading.get_ident())
    if changes is None:
        for ended in _changes.keys() - {thread.ident for thread in threading.enumerate()}:
            _changes.pop(ended, None)
        changes = _changes[threading.get_ident()] = deque(maxlen=KEPT)
    changes.append((time.time_ns(), phases))


def phases_of(thread: int, at: int) -> tuple[str, ...]:
    """Return the phases that `thread`, an ident, was in at a time of `time.time_ns()`; may be called in any thread.

    Threads that are not Python's, such as those of a backward pass, are in those of the main thread. Phases of asyncio
    tasks are taken for their thread's.
    """
    python = {known.ident for known in threading.enumerate()}
    changes = tuple(_changes.get(thread if thread in python else threading.main_thread().ident or 0, ()))
    before = [phases for since, phases in changes if since <= at]
    return before[-1] if before else changes[0][1] if len(changes) == KEPT else ()


def _of_name_only(function: Callable[P, R]) -> Callable[P, R]:
    """Have a phase that is given a limit as well raise a TypeError that says where limits are set."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        beside = [repr(value) for value in args[2:]]
        beside += [f"{argument}={value!r}" for argument, value in kwargs.items() if argument != "name"]
        if not beside:
            return function(*args, **kwargs)
        refused = tr("phase takes a name and no more, not {value}", value=", ".join(beside))
        name = args[1] if len(args) > 1 else kwargs.get("name")
        if name not in PHASES:
            raise TypeError(say(refused))
        hint = tr(
            "the limit inside is a setting, configure({setting}=...) or {variable}; a call has one of its own by timeout=",
            setting=f"timeout_{name}",
            variable=f"NCCLGUARD_TIMEOUT_{str(name).upper()}",
        )
        raise TypeError(say(joined(": ", (refused, hint))))

    return call


class phase:
    """The limits of a part of the program, as a context manager or a decorator of a function or coroutine function.

    `name` is "train" (10 min), "eval" (30 min) or "small" (5 min). Phases nest, the innermost counts, and they are
    local to the thread or task: a thread that is started inside one has none. All ranks must be in the same one when
    they call a collective. Raises GuardConfigError for another name, TypeError for anything beside the name, and when
    a generator function is decorated.

    >>> from ncclguard import phase
    >>> with phase("eval"):
    ...     pass  # guarded calls in here have 30 minutes
    """

    @_of_name_only
    def __init__(self, name: str) -> None:
        if name not in PHASES:
            hint = meant(str(name), PHASES, "{!r}") or tr("there are {some}", some=", ".join(map(repr, PHASES)))
            raise GuardConfigError(told("there is no phase {name}: {hint}", name=repr(name), hint=hint))
        self._name = name

    def __enter__(self) -> Self:
        _enter((*_phases.get(), self._name))
        return self

    def __exit__(self, *exc: object) -> None:
        # The stack is kept in the context and not on this object, which several threads and tasks may enter at once.
        _enter(_phases.get()[:-1])

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            text = told(
                "{name} is a generator and runs in its caller's phase: use `with phase(...)`",
                name=function.__qualname__,
            )
            raise TypeError(text)
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
    """Give calls inside `limit` seconds, and keep them apart from calls of other sections, as another `name` would."""
    section = Section(name)
    section.limit = limit
    before = _phases.get()
    _enter((*before, section))
    try:
        yield
    finally:
        _enter(before)


def current_phase() -> str | None:
    """Return the innermost phase of this thread or task, "eval" in a section; None outside of any."""
    phases = _phases.get()
    if not phases:
        return None
    return "eval" if isinstance(phases[-1], Section) else phases[-1]


def current_place() -> str | None:
    """Return the innermost phase with the sections around it, which must be equal on all ranks that meet in a call."""
    phases = _phases.get()
    if not phases:
        return None
    return ", ".join([*(phase for phase in phases[:-1] if isinstance(phase, Section)), phases[-1]])


def resolve_timeout(
    argument: float | timedelta | None,
    numel: int,
    config: GuardConfig | None = None,
    phases: tuple[str, ...] | None = None,
) -> float:
    """Return a call's budget in seconds: argument > phase > variable > size of the operation. Raises as `seconds` does.

    `phases`: those of the call, by default those of this thread.
    """
    given = seconds(argument, "timeout")
    if given is not None:
        return given
    config = config or current_config()
    phases = _phases.get() if phases is None else phases
    if phases:
        name = phases[-1]
        limit: float = name.limit if isinstance(name, Section) else getattr(config, f"timeout_{name}")
        return limit
    if config.timeout is not None:
        return config.timeout
    return get_adaptive_timeout(numel)
