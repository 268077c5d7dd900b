"""The first NaN or infinity of each rank, told to all ranks over the job's log, and which rank's was the first of all.

A rank tells of its first one only, with the number of the forward pass or of the call in which it was there. From the
next one on the others have it too, because a reduction has spread it: the lowest number is what is looked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from ncclguard import lifecycle
from ncclguard_explain.language import Message, joined, say, told, tr
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")

#: Entry of the job's log that tells of one.
KIND: Final = "non-finite"
#: Seconds after which the first one is spoken of: until then an earlier one of another rank may be heard of.
SETTLED: Final = 2.0


#: The scope of what was found in a model, whose forward passes are counted; of a second one it is "model 2".
MODEL: Final = "model"


def text_of(kind: str, name: str) -> Message:
    """A tensor for people: kind "gradient", "parameter", "output" or "input", and of what."""
    if kind == "gradient":
        return tr("the gradient of {name}", name=name)
    if kind == "parameter":
        return tr("the parameter {name}", name=name)
    return tr("the output of {name}", name=name) if kind == "output" else tr("the input of {name}", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """The first NaN or infinity that a rank had of its own, before a collective could bring it those of others.

    `rank`: the global rank. `scope`: "model" or "model 2", or the group of a guarded call. `number`: the forward pass,
    or the call of the group, from 1. `place`: how many tensors of that pass had been looked at before. `kind` and
    `name`: which tensor it is, the "gradient", "parameter" or "input" of what. `before`: kind and name of the first
    tensor of that pass that had a NaN before, if one had. `nan` and `infinite`: how many numbers of the tensor are, and
    `index`: the first of them; on a GPU -1 for some of which nobody has counted, and no index.
    """

    rank: int
    scope: str
    number: int
    place: int
    kind: str
    name: str
    nan: int
    infinite: int
    index: tuple[int, ...] | None = None
    before: tuple[str, str] | None = None

    def __str__(self) -> str:
        """Say which tensor of which rank it was, and when."""
        what = text_of(self.kind, self.name)
        parts = [tr("rank {rank}: {tensor} had a NaN", rank=self.rank, tensor=what)]
        if not self.nan:
            parts = [tr("rank {rank}: {tensor} had an infinity", rank=self.rank, tensor=what)]
        if self.index is not None:
            parts.append(
                tr(
                    "NaN: {nan}, infinite: {infinite}, the first at {index}",
                    nan=self.nan,
                    infinite=self.infinite,
                    index=list(self.index),
                )
            )
        if self.scope.startswith(MODEL):
            parts.append(tr("in forward pass {number}", number=self.number))
        else:
            parts.append(tr("in call {number} of group {group}", number=self.number, group=self.scope))
        if self.before is not None:
            parts.append(tr("{tensor} had a NaN before", tensor=text_of(*self.before)))
        return say(joined(", ", parts))

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> NonFinite:
        """The one that another rank has told of."""
        values = {field.name: entry[field.name] for field in fields(cls)}
        for name in ("index", "before"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)


Found = Callable[[tuple[NonFinite, ...]], object]


class NonFinites:
    """The first ones of all ranks; thread-safe. The monitor calls `hear` and `step`, the program the rest.

    `wake`: the monitor's; without one, which is where there is one process, what is told is spoken of at once.
    """

    def __init__(self, members: tuple[int, ...] = (0,), rank: int = 0, wake: Callable[[], None] | None = None) -> None:
        self._members = members
        self._rank = rank
        self.wake = wake
        self._lock = threading.Lock()
        self._untold: list[NonFinite] = []
        self._all: dict[str, dict[int, NonFinite]] = {}  # scope -> rank -> its first
        self._due: dict[str, float] = {}  # scope -> when its first is spoken of
        self._listeners: list[tuple[str, Found]] = []
        self._models = 0
        lifecycle.before_end(lambda: self._speak(float("inf")))

    # ------------------------------------------------------------------ the program

    def tell(self, finding: NonFinite) -> None:
        """Tell all ranks, unless it follows from what is known; a rank is heard once in a scope."""
        with self._lock:
            known = self._all.setdefault(finding.scope, {})
            if self._rank in known or any(other.number < finding.number for other in known.values()):
                return
            self._enter(finding, 0.0 if self.wake is None else SETTLED)
            self._untold.append(finding)
        if self.wake is None:
            self._speak(time.monotonic())
        else:
            self.wake()

    def model(self) -> str:
        """Return a scope for one more model, alike on all ranks where they have their models in the same order."""
        with self._lock:
            self._models += 1
            return MODEL if self._models == 1 else f"{MODEL} {self._models}"

    def listen(self, scope: str, found: Found) -> Callable[[], None]:
        """Call `found` with the first ones of a scope once they are known; the function that is returned ends that."""
        one = (scope, found)
        with self._lock:
            self._listeners.append(one)
        return lambda: self._listeners.remove(one) if one in self._listeners else None

    def first(self, scope: str) -> tuple[NonFinite, ...]:
        """Return the first of a scope, as far as this rank knows; several where ranks had theirs at the same place."""
        with self._lock:
            known = list(self._all.get(scope, {}).values())
        earliest = min(((one.number, one.place) for one in known), default=None)
        found = [one for one in known if (one.number, one.place) == earliest]
        return tuple(sorted(found, key=lambda one: one.rank))

    # ------------------------------------------------------------------ the monitor's thread

    def step(self, now: float, post: Callable[[dict[str, object]], None]) -> None:
        """Post what is untold, and speak of what is due."""
        if not (self._untold or self._due):
            return
        with self._lock:
            untold, self._untold = self._untold, []
        for finding in untold:
            post({"kind": KIND, "members": self._members, "finding": asdict(finding)})
        self._speak(now)

    def hear(self, entry: Mapping[str, Any]) -> None:
        """Another rank's finding, or this one's own."""
        finding = NonFinite.from_entry(entry["finding"])
        with self._lock:
            if finding.rank not in self._all.setdefault(finding.scope, {}):
                self._enter(finding, SETTLED)

    # ------------------------------------------------------------------

    def _enter(self, finding: NonFinite, settled: float) -> None:
        if not self._all[finding.scope]:
            self._due[finding.scope] = time.monotonic() + settled
        self._all[finding.scope][finding.rank] = finding

    def _speak(self, now: float) -> None:
        with self._lock:
            due = [scope for scope, when in self._due.items() if when <= now]
            for scope in due:
                del self._due[scope]
            listeners = list(self._listeners)
        for scope in due:
            first = self.first(scope)
            if self._rank in (min(self._members), *(one.rank for one in first)):
                log.warning("ncclguard: %s", verdict(first))
            for listener in [found for other, found in listeners if other == scope]:
                try:
                    listener(first)
                except Exception:
                    log.exception("ncclguard: on_found raised")


def verdict(first: tuple[NonFinite, ...]) -> str:
    """Say whose was the first, and what to do."""
    shown = "; ".join(map(str, first[:4]))
    if len(first) > 4:
        rest = ranks_text([one.rank for one in first[4:]])
        shown = told("{first}; likewise on {ranks}", first=shown, ranks=rest)
    return told(
        "the first NaN or infinity of all ranks: {first}. On other ranks it came later, or not at all: look at what was "
        "computed there, and from which input",
        first=shown,
    )
