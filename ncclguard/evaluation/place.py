"""The place of each rank in the sequence of its evaluations, by which ranks know that they are in the same one.

A rank may leave one out: it skipped the call, or its program raised before. The ranks tell each other their places when
an evaluation begins. Those that are behind give theirs up, those ahead wait for them there: one that was left out costs
the others no more than that one. The lines of the calls decide nothing, since one evaluation may be called in two
branches; where they differ, the ranks are told of it.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ncclguard import optimizer_steps
from ncclguard.incident.stacks import call_sites_of
from ncclguard_explain.language import Message, say, tr

#: Lines of the program, from the call of the evaluation outwards, by which two calls are told apart.
LINES = 8
#: Pairs of calls that are remembered as told of at most: a program may make its code anew.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in its evaluations, as it tells it at the beginning of one."""

    function: str  # with its module
    name: str
    step: int | None  # of the training, where the call, its object or its trainer says it
    updates: int  # optimizer steps so far where it does not, else 0
    repeated: int  # evaluations of this function at this step before this one
    known: int  # functions that the ranks had met in before they first met in this one
    lines: tuple[str, ...]  # of the program that led to the call, innermost first

    @property
    def at(self) -> tuple[int | None, int]:
        """The step of the training, or else the optimizer steps."""
        return self.step, self.updates

    @property
    def evaluation(self) -> tuple[str, int | None, int, int]:
        """The evaluation, equal for ranks in the same one."""
        return self.function, self.step, self.updates, self.repeated

    @property
    def label(self) -> Message:
        """The name of the evaluation, the same on all ranks in it, and of no other."""
        label = tr("evaluation {name}() at step {step}", name=self.name, step=self.step)
        if self.step is None:
            label = tr("evaluation {name}() after {count} optimizer steps", name=self.name, count=self.updates)
        return (
            tr("{evaluation}, number {count} there", evaluation=label, count=self.repeated + 1)
            if self.repeated
            else label
        )

    def told(self, others: Sequence[Place] = ()) -> Message:
        """Say it in one line, with the innermost line of the call at which the places of `others` differ from it."""
        line = next(
            (line for n, line in enumerate(self.lines) if any(o.lines[n : n + 1] != (line,) for o in others)),
            self.lines[0] if self.lines else "?",
        )
        return tr("{name}, called at {line}", name=self.label, line=line)


def behind(places: Sequence[Place]) -> frozenset[int]:
    """Return the indices of the places from which a rank must go on by itself; empty where all are in one evaluation.

    They are all but those furthest ahead; and all where nobody can tell who is ahead, as by optimizer steps, of which a
    rank may make more than others.
    """
    first = places[0]
    if len({place.step is None for place in places}) == 2 or (
        first.step is None and len({place.updates for place in places}) > 1
    ):
        return frozenset(range(len(places)))

    def order(place: Place) -> tuple[int, int, int, str]:
        return place.step or 0, place.repeated, place.known, place.function

    furthest = max(map(order, places))
    return frozenset(n for n, place in enumerate(places) if order(place) != furthest)


def elsewhere(places: Sequence[Place]) -> frozenset[int]:
    """Return the indices of the places that are not those of the majority; empty without one."""
    most, count = Counter(place.evaluation for place in places).most_common(1)[0]
    if 2 * count <= len(places):
        return frozenset()
    return frozenset(n for n, place in enumerate(places) if place.evaluation != most)


def described(places: Sequence[Place], ranks: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """Return, by rank, the place of the first rank at each."""
    first = {(place.evaluation, place.lines): n for n, place in reversed(list(enumerate(places)))}
    return tuple((ranks[n], say(places[n].told(places))) for n in sorted(first.values()))


_lock = threading.Lock()
_before: int | None = None  # optimizer steps of this process that are not counted here; None until any are


def start_counting() -> None:
    """Count optimizer steps from now on, where all ranks begin alike; a second call does nothing."""
    global _before
    optimizer_steps.start_counting()
    if _before is None:
        _before = optimizer_steps.made()


def _updates() -> int:
    return optimizer_steps.made() - (_before or 0)


def step_of(evaluate: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the argument `step` or `global_step` of a call, else the `global_step` of the owner or of its `state`."""
    try:
        given = inspect.signature(evaluate).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong with it
        return None
    state = getattr(owner, "state", None)
    candidates: tuple[Any, ...] = (
        given.get("step"),
        given.get("global_step"),
        *(getattr(o, "global_step", None) for o in (owner, state)),
    )
    for step in candidates:
        if not isinstance(step, bool):
            with suppress(TypeError, ValueError, RuntimeError):  # no whole number, of Python, numpy or torch
                return operator.index(step)
    return None


@dataclass
class _Counter:
    """The evaluations of one function at the step that it was called at last."""

    at: tuple[int | None, int] = (None, -1)
    repeated: int = 0


#: By the ranks of a group and function, however often that is decorated.
_counters: dict[tuple[tuple[int, ...], str], _Counter] = {}
#: By the ranks of a group: the functions in which all have met, in the order in which they first did.
_met: dict[tuple[int, ...], list[str]] = {}


def position() -> dict[str, Any]:
    """Return where this process is in its evaluations, for one that takes a lost rank's place."""
    counters = {key: (counter.at, counter.repeated) for key, counter in _counters.items()}
    return {"updates": _updates(), "counters": counters, "met": {key: [*met] for key, met in _met.items()}}


def take_position(said: dict[str, Any]) -> None:
    """Go on where another process is."""
    global _before
    _before = optimizer_steps.made() - said["updates"]
    for key, (at, repeated) in said["counters"].items():
        _counters[key] = _Counter(at, repeated)
    _met.update(said["met"])


class Places:
    """The places of one function's evaluations on this rank, one after the other."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = getattr(function, "__name__", "evaluate")
        self._function = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', self._name)}"
        self._split: list[frozenset[tuple[str, ...]]] = []  # the calls by different lines at this step
        self._told: set[frozenset[tuple[str, ...]]] = set()
        self._doubtful: set[frozenset[tuple[str, ...]]] = set()

    def next(self, step: int | None, members: tuple[int, ...]) -> Place:
        """Return the place of the evaluation that begins now, which `members` call."""
        updates = _updates() if step is None else 0
        counter = self._counter(members)
        if counter.at != (step, updates):
            counter.at, counter.repeated = (step, updates), 0
            self._split.clear()
        lines = call_sites_of(LINES) if len(members) > 1 else ()
        met = _met.get(members, [])
        known = met.index(self._function) if self._function in met else len(met)
        place = Place(self._function, self._name, step, updates, counter.repeated, known, lines)
        counter.repeated += 1
        return place

    def meet(self, places: Sequence[Place], members: tuple[int, ...]) -> bool:
        """Note that all `members` are in one evaluation; return whether to tell of the lines by which they called it.

        These are told of once, and each time after a rank has left out an evaluation at a step at which they differed.
        """
        met = _met.setdefault(members, [])
        if self._function not in met:
            met.append(self._function)
        calls = frozenset(place.lines for place in places)
        tell = False
        if len(calls) > 1:
            self._split.append(calls)
            tell = calls in self._doubtful or (calls not in self._told and len(self._told) < REMEMBERED)
            self._told.add(calls)
        return tell

    def miss(self, places: Sequence[Place], members: tuple[int, ...]) -> None:
        """Note that a rank has left out an evaluation at this step, perhaps one that another was taken for.

        Of one function at one step all ranks count on from the furthest, so that they meet in the next.
        """
        self._doubtful.update(self._split)
        counter = self._counter(members)
        alike = [p.repeated for p in places if p.function == self._function and p.at == counter.at]
        counter.repeated = max([counter.repeated, *(repeated + 1 for repeated in alike)])

    def _counter(self, members: tuple[int, ...]) -> _Counter:
        with _lock:
            return _counters.setdefault((members, self._function), _Counter())
