"""The place of each rank in the sequence of its evaluations, by which ranks know that they are in the same one.

A rank may leave one out: it skipped the call, or its program raised before. The ranks tell each other their places when
an evaluation begins. Those that are behind give theirs up, those ahead wait for them there, so that a value never comes
from two different evaluations and one that was left out costs the others no more than that one.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ncclguard.incident.stacks import call_sites_of
from ncclguard_explain.language import Message, say, tr

#: Lines of the program, from the call of the evaluation outwards, that tell two of them apart.
LINES = 8
#: Evaluations of one group that are known apart at most: a program may name each anew.
KNOWN = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place in its evaluations, as it tells it at the beginning of one."""

    function: str
    step: int | None  # of the training, where the call, its object or its trainer says it
    updates: int  # optimizer steps so far, which say it elsewhere
    repeated: int  # evaluations of this function at this step before this one
    lines: tuple[str, ...]  # of the program that led to the call, innermost first
    words: tuple[str, ...]  # the strings among the arguments, such as the name of a split
    number: int  # calls by these lines, with these words, at this step before this one
    known: int | None = None  # how many others the ranks have met at before they first met here; None: they have not

    @property
    def at(self) -> int:
        """The step of the training, or the count of optimizer steps."""
        return self.updates if self.step is None else self.step

    @property
    def call(self) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        return self.function, self.lines, self.words

    def label(self, repeated: int | None = None) -> str:
        """Return the name of the evaluation; `repeated` is the number before it on which all ranks agreed."""
        before = self.repeated if repeated is None else repeated
        at = f"at step {self.step}" if self.step is not None else f"after {self.updates} optimizer steps"
        again = f", number {before + 1} there" if before else ""
        return f"evaluation {self.function}() {at}{again}"

    def told(self, others: Sequence[Place] = ()) -> Message:
        """Say it in one line, with the innermost line of the call at which the places of `others` differ from it."""
        line = next(
            (line for n, line in enumerate(self.lines) if any(o.lines[n : n + 1] != (line,) for o in others)),
            self.lines[0] if self.lines else "?",
        )
        words = f" {list(self.words)}" if any(other.words != self.words for other in others) else ""
        return tr("{name}{words}, called at {line}", name=self.label(), words=words, line=line)


def _same_place(places: Sequence[Place]) -> bool:
    """Return whether the ranks are in one evaluation, as far as can be known.

    One that is called in two branches of the program, as of ``if rank == 0``, is called by different lines. They are of
    different evaluations only where all ranks have met at more than one of them before.
    """
    first = places[0]
    if any(
        (p.function, p.step, p.at, p.number) != (first.function, first.step, first.at, first.number) for p in places
    ):
        return False
    return len({p.call for p in places if p.known is not None}) <= 1 or len({p.call for p in places}) == 1


def behind(places: Sequence[Place]) -> frozenset[int]:
    """Return the indices of the places from which a rank must go on by itself; empty where all are in one evaluation.

    They are all but those furthest ahead, and all where nobody can tell who is ahead.
    """
    if _same_place(places):
        return frozenset()
    if len({place.step is None for place in places}) == 2:
        return frozenset(range(len(places)))

    def order(place: Place) -> tuple[Any, ...]:
        return place.at, place.number, KNOWN if place.known is None else place.known, place.call

    furthest = max(map(order, places))
    return frozenset(n for n, place in enumerate(places) if order(place) != furthest)


def elsewhere(places: Sequence[Place]) -> frozenset[int]:
    """Return the indices of the places that are not those of the majority; empty without one."""
    calls = [(place.at, place.number, place.call) for place in places]
    most, count = Counter(calls).most_common(1)[0]
    return frozenset(n for n, call in enumerate(calls) if call != most) if 2 * count > len(calls) else frozenset()


def described(places: Sequence[Place], ranks: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """Return the place of the first rank at each, by rank."""
    first = {place.call + (place.at, place.number): n for n, place in reversed(list(enumerate(places)))}
    return tuple((ranks[n], say(places[n].told(places))) for n in sorted(first.values()))


_lock = threading.Lock()
_updates = 0
_counting = False
_met: dict[tuple[int, ...], dict[tuple[Any, ...], int]] = {}  # by group: the calls at which all its ranks have met


def start_counting() -> None:
    """Count the steps of all optimizers of this process from now on; a second call does nothing."""
    global _counting
    with _lock:
        if not _counting:
            _counting = True
            register_optimizer_step_post_hook(_count)


def _count(*_: Any) -> None:
    global _updates
    _updates += 1


def step_of(evaluate: Callable[..., Any], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the argument `step` or `global_step` of a call, else the `global_step` of the owner or of its `state`."""
    try:
        given = inspect.signature(evaluate).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself will say what is wrong with it
        return None
    state = getattr(owner, "state", None)
    candidates = (
        given.get("step"),
        given.get("global_step"),
        *(getattr(o, "global_step", None) for o in (owner, state)),
    )
    return next((step for step in candidates if isinstance(step, int) and not isinstance(step, bool)), None)


class Places:
    """The places of one function's evaluations on this rank, one after the other."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._at: tuple[int | None, int] = (None, -1)
        self._repeated = 0
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._branches: set[frozenset[tuple[Any, ...]]] = set()

    def next(self, step: int | None, words: tuple[str, ...], members: tuple[int, ...]) -> Place:
        """Return the place of the evaluation that begins now, which `members` call."""
        at = (step, _updates if step is None else 0)
        if at != self._at:
            self._at, self._repeated, self._calls = at, 0, Counter()
        lines = call_sites_of(LINES) if len(members) > 1 else ()
        call = (self._function, lines, words)
        place = Place(
            self._function, step, _updates, self._repeated, lines, words, self._calls[call],
            _met.get(members, {}).get(call),
        )  # fmt: skip
        self._repeated += 1
        self._calls[call] += 1
        return place

    def meet(self, places: Sequence[Place], members: tuple[int, ...]) -> str:
        """Note that all `members` are in one evaluation; return its name, unlike that of any other on every rank."""
        repeated = max(place.repeated for place in places)
        self._repeated = repeated + 1
        known = _met.setdefault(members, {})
        if len({place.call for place in places}) == 1 and len(known) < KNOWN:
            known.setdefault(places[0].call, len(known))
        return places[0].label(repeated)

    def first_in_branches(self, places: Sequence[Place]) -> bool:
        """Return whether ranks in one evaluation came by different lines or words, for the first time."""
        calls = frozenset(place.call for place in places)
        if len(calls) == 1 or calls in self._branches or len(self._branches) == KNOWN:
            return False
        self._branches.add(calls)
        return True
