"""The first NaN or infinity of each rank, told to all ranks over the job's log, and which rank's was the first of all.

A rank tells of its first one only, with the number of the pass or of the call in which it was there. From the next one
on the others have it too, because a reduction has spread it: the lowest number is what is looked for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

from ncclguard_explain.language import joined, say, told, tr
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")

#: Entry of the job's log that tells of one.
KIND: Final = "non-finite"
#: Seconds after which the first one is spoken of: until then an earlier one of another rank may be heard of.
SETTLED: Final = 2.0
#: The scope of what was found in a model, whose passes are counted; of a second one it is "model 2".
MODEL: Final = "model"
#: The `place` of a gradient before which there was no sign of it.
NO_SIGN: Final = 1 << 30


class Tensor(NamedTuple):
    """One tensor: the "gradient", the "parameter", the "output" or the "input" of what; "" is the model itself."""

    kind: str
    name: str

    def __str__(self) -> str:
        name = self.name or tr("the model")
        if self.kind == "gradient":
            return tr("the gradient of {name}", name=name)
        if self.kind == "parameter":
            return tr("the parameter {name}", name=name)
        return tr("the output of {name}", name=name) if self.kind == "output" else tr("the input of {name}", name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """The first NaN or infinity that a rank had of its own, before a collective could bring it those of others.

    `rank`: the global rank. `scope`: "model" or "model 2", or the group of a guarded call. `number`: the backward pass,
    or the call of the group, from 1. `tensor`: which it is. `before`: the first input or output of that pass that had a
    NaN before, None where there was none, and `place`: how many tensors had been looked at then; 0 for a parameter and
    for what a call is given. `nan` and `infinite`: how many numbers of the tensor are, and `index`: the first of them;
    on a GPU -1 for some of which nobody has counted, and no index.
    """

    rank: int
    scope: str
    number: int
    place: int
    tensor: Tensor
    nan: int
    infinite: int
    index: tuple[int, ...] | None = None
    before: Tensor | None = None

    def __str__(self) -> str:
        """Say which tensor of which rank it was, and when."""
        template = tr("rank {rank}: {tensor} had a NaN", rank=self.rank, tensor=str(self.tensor))
        if not self.nan:
            template = tr("rank {rank}: {tensor} had an infinity", rank=self.rank, tensor=str(self.tensor))
        parts = [template]
        if self.index is not None:
            text = tr(
                "NaN: {nan}, infinite: {infinite}, the first at {index}",
                nan=self.nan,
                infinite=self.infinite,
                index=list(self.index),
            )
            parts.append(text)
        if ":" not in self.scope:
            parts.append(tr("in backward pass {number}", number=self.number))
        else:
            parts.append(tr("in call {number} of group {group}", number=self.number, group=self.scope))
        if self.before is not None:
            parts.append(tr("{tensor} had a NaN before", tensor=str(self.before)))
        return say(joined(", ", parts))

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> NonFinite:
        """The one that another rank has told of."""
        values = {field.name: entry[field.name] for field in fields(cls)}
        values["index"] = None if values["index"] is None else tuple(values["index"])
        for name in ("tensor", "before"):
            values[name] = None if values[name] is None else Tensor(*values[name])
        return cls(**values)


Found = Callable[[tuple[NonFinite, ...]], object]


class NonFinites:
    """The first ones of all ranks; thread-safe. The monitor calls `hear` and `step`, the program the rest.

    `wake`: the monitor's; without one, where a rank cannot ask others, what is told is spoken of at once.
    """

    def __init__(self, members: tuple[int, ...] = (0,), rank: int = 0, wake: Callable[[], None] | None = None) -> None:
        self.wake = wake
        self._members = members
        self._rank = rank
        self._lock = threading.Lock()
        self._untold: list[NonFinite] = []
        self._all: dict[str, dict[int, NonFinite]] = {}  # scope -> rank -> its first
        self._due: dict[str, float] = {}  # scope -> when its first is spoken of
        self._spoken = threading.Event()  # nothing is due
        self._spoken.set()
        self._listeners: list[tuple[str, Found]] = []
        self._ends: list[Callable[[], None]] = []
        self._models = 0

    # ------------------------------------------------------------------ the program

    def model(self) -> str:
        """Return a scope for one more model, alike on all ranks where they have their models in the same order."""
        with self._lock:
            self._models += 1
            return MODEL if self._models == 1 else f"{MODEL} {self._models}"

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

    def listen(self, scope: str, found: Found) -> Callable[[], None]:
        """Call `found` with the first ones of a scope once they are known; the function that is returned ends that."""
        one = (scope, found)
        with self._lock:
            self._listeners.append(one)
        return lambda: self._listeners.remove(one) if one in self._listeners else None

    def first(self, scope: str) -> tuple[NonFinite, ...]:
        """Return the first of a scope, as far as this rank knows, in the order of the ranks.

        Several where they had theirs in the same pass, and none has a sign of it before the others.
        """
        return tuple(one for one in self._earliest(scope) if one.place == self._earliest(scope)[0].place)

    def before_end(self, end: Callable[[], None]) -> Callable[[], None]:
        """Call `end` before the program ends, which may have more to tell; the function that is returned ends that."""
        with self._lock:
            self._ends.append(end)
        return lambda: self._ends.remove(end) if end in self._ends else None

    def settle(self) -> None:
        """Wait until what was found is spoken of, or for so long as that takes; the program is about to end."""
        for end in tuple(self._ends):
            try:
                end()
            except Exception:
                log.debug("ncclguard: the last numbers could not be read", exc_info=True)
        if not self._spoken.wait(SETTLED + 1.0):
            self._speak(float("inf"))

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
        """Take it in; the first is spoken of later, and again where an earlier one is heard of after that."""
        known = self._all[finding.scope]
        if not known or finding.number < min(other.number for other in known.values()):
            self._due.setdefault(finding.scope, time.monotonic() + settled)
            self._spoken.clear()
        known[finding.rank] = finding

    def _earliest(self, scope: str) -> list[NonFinite]:
        """All of the lowest number, those with the earliest sign first."""
        with self._lock:
            known = list(self._all.get(scope, {}).values())
        lowest = min((one.number for one in known), default=0)
        return sorted((one for one in known if one.number == lowest), key=lambda one: (one.place, one.rank))

    def _speak(self, now: float) -> None:
        with self._lock:
            due = [scope for scope, when in self._due.items() if when <= now]
            for scope in due:
                del self._due[scope]
            listeners = list(self._listeners)
        for scope in due:
            first = self.first(scope)
            rest = [one.rank for one in self._earliest(scope)[len(first) :]]
            if self._rank in (min(self._members), *(one.rank for one in first)):
                log.warning("ncclguard: %s", verdict(first, rest, asked=self.wake is not None))
            for found in [found for other, found in listeners if other == scope]:
                _call(found, first)
        if not self._due:
            self._spoken.set()


def _call(found: Found, first: tuple[NonFinite, ...]) -> None:
    """Call it in a thread of its own: it may take long, or end its thread."""

    def call() -> None:
        try:
            found(first)
        except BaseException:
            log.exception("ncclguard: %s", told("on_found raised", "log"))

    try:
        threading.Thread(target=call, name="ncclguard-on-found").start()
    except RuntimeError:  # the interpreter is shutting down
        call()


def verdict(first: tuple[NonFinite, ...], rest: list[int], asked: bool = True) -> str:
    """Say whose was the first, and what to do; `rest`: who had theirs in the same pass, later."""
    shown = "; ".join(map(str, first[:4]))
    if len(first) > 4:
        others = ranks_text([one.rank for one in first[4:]])
        shown = told("{first}; likewise on {ranks}", first=shown, ranks=others)
    if not asked:
        return told(
            "the first NaN or infinity: {first}; look at what was computed there, and from which input", first=shown
        )
    if rest:
        return told(
            "the first NaN or infinity of all ranks: {first}. In the same pass {ranks} had theirs, later: look at what "
            "was computed on the first, and from which input",
            first=shown,
            ranks=ranks_text(rest),
        )
    return told(
        "the first NaN or infinity of all ranks: {first}. On other ranks it came later, or not at all: look at what was "
        "computed there, and from which input",
        first=shown,
    )
