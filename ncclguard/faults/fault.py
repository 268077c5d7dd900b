"""A fault as a value: what it is, when it strikes, and its form in an environment variable."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final

from ncclguard.errors import GuardConfigError
from ncclguard.spelling import meant
from ncclguard_explain.language import say

VARIABLE: Final = "NCCLGUARD_FAULT"
PERMISSION: Final = "NCCLGUARD_ALLOW_DRILL"
#: The folder for the events of drilled ranks; set by `ncclguard drill`.
EVENTS_VARIABLE: Final = "_NCCLGUARD_DRILL_DIR"
SYNTAX: Final = "kill@rank=2,op=3 or, several, late@rank=1,op=0,seconds=5;reset@rank=0,op=4"

_TRIGGER = ("after", "after_bytes")
_WHERE = ("raw", "watched_op", "engine")
# The parameters of each fault besides rank and op; a name that ends with ! must be given.
PARAMETERS: Final[dict[str, tuple[str, ...]]] = {
    "late": ("seconds!",),
    "kill": ("children", *_TRIGGER),
    "stop": ("seconds", *_TRIGGER),
    "gil": ("seconds!", *_TRIGGER),
    "exception": (),
    "exit": ("code",),
    "oom": (),
    "mismatch": ("of",),
    "skip": (),
    "extra": (),
    "reset": ("times", *_TRIGGER),
    "partition": ("seconds!", *_TRIGGER),
    "slow": ("factor", "seconds"),
}
# Faults that the caller of a guarded operation carries out itself.
ALTERS: Final = ("mismatch", "skip", "extra")
#: Faults of an engine of a weight channel.
OF_ENGINES: Final = ("late", "kill", "stop", "gil", "exception", "exit", "oom", "mismatch")


class Alteration(str, Enum):
    """A fault that the caller of ``before_operation`` has to carry out itself, as only it knows the call."""

    OTHER_SHAPE = "other shape"
    OTHER_DTYPE = "other dtype"
    SKIP = "skip"
    EXTRA = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, which strikes once: when ``rank`` enters its operation number ``op``, counted from 0.

    ``seconds``: how long it lasts; for ``stop`` until the process is continued, None for never. ``after`` and
    ``after_bytes``: strike that many seconds later, and then when this process's connections have carried that many
    bytes since, in both directions, so in mid-operation. ``raw``: ``op`` counts the collectives of the default process
    group, whoever issues them, and the fault strikes from outside when so many have been issued. ``children``: forked
    children that outlive the kill with all sockets open. ``times``: how often connections are reset, so that a rebuild
    is hit too. ``factor``: how many times as long a slow rank takes from one collective to the next. ``watched_op``:
    the number of the collective at which it strikes as a raw one in a job that has called ``watch()`` and makes no
    guarded call; None for a fault of guarded calls only. ``engine``: the name of an engine of a weight channel, whose
    worker ``rank`` is struck in the middle of its update ``op``, counted from 0; empty for a rank of a process group.
    Raises GuardConfigError for a combination that cannot be.
    """

    fault: str
    rank: int
    op: int
    seconds: float | None = None
    after: float = 0.0
    after_bytes: int = 0
    children: int = 0
    code: int = 0
    of: str = "shape"
    factor: float = 1.5
    times: int = 1
    raw: bool = False
    watched_op: int | None = None
    engine: str = ""

    def __post_init__(self) -> None:
        if self.fault not in PARAMETERS:
            hint = meant(self.fault, PARAMETERS)
            closest = f" ({say(hint)})" if hint else ""
            raise GuardConfigError(f"there is no fault {self.fault!r}{closest}; faults: {', '.join(PARAMETERS)}")
        takes = [name.rstrip("!") for name in PARAMETERS[self.fault]]
        for field in fields(self)[3:]:
            if getattr(self, field.name) != field.default and field.name not in (*takes, *_WHERE):
                allowed = f"it takes {', '.join(takes)}" if takes else "it takes nothing but rank and op"
                raise GuardConfigError(f"{self.fault} takes no {field.name}; {allowed}")
        if "seconds!" in PARAMETERS[self.fault] and self.seconds is None:
            raise GuardConfigError(f"{self.fault} needs seconds; for example {self.fault}@rank=2,op=3,seconds=5")
        if self.raw and self.watched_op is not None:
            raise GuardConfigError(f"a raw {self.fault} strikes at op; leave watched_op out")
        if self.watched_op is not None:
            _check(self.fault, "watched_op", self.watched_op, int, 0)
        if (self.raw or self.watched_op is not None) and self.fault in ALTERS:
            raise GuardConfigError(f"{self.fault} changes a guarded call, so it cannot be raw; leave raw out")
        if self.engine:
            self._check_engine()
        for name in ("rank", "op", "after_bytes", "children"):
            _check(self.fault, name, getattr(self, name), int, 0)
        _check(self.fault, "times", self.times, int, 1)
        _check(self.fault, "code", self.code, int, 0)
        _check(self.fault, "after", self.after, float, 0)
        _check(self.fault, "factor", self.factor, float, 1)
        if self.seconds is not None:
            _check(self.fault, "seconds", self.seconds, float, 0)
        if self.times > 1 and not self.after_bytes:
            raise GuardConfigError(
                f"{self.fault} {self.times} times needs after_bytes: what has to flow before each of them"
            )
        if self.of not in ("shape", "dtype"):
            raise GuardConfigError(f"{self.fault} of {self.of!r}: give of=shape or of=dtype")

    def _check_engine(self) -> None:
        if self.fault not in OF_ENGINES:
            raise GuardConfigError(f"{self.fault} cannot strike an engine; {', '.join(OF_ENGINES)} can")
        if self.raw or self.watched_op is not None or self.after_bytes or self.of != "shape":
            raise GuardConfigError(
                f"{self.fault} strikes {self.engine!r} in its update op; leave raw, watched_op, after_bytes and of out"
            )
        if self.engine != self.engine.strip() or set(self.engine) & {",", ";"}:
            raise GuardConfigError(f"{VARIABLE} cannot hold the name {self.engine!r}: give one without , and ;")

    def __str__(self) -> str:
        changed = [field for field in fields(self)[3:] if getattr(self, field.name) != field.default]
        values = ((field.name, getattr(self, field.name)) for field in changed)
        rest = "".join(f",{name}={int(value) if name == 'raw' else value}" for name, value in values)
        return f"{self.fault}@rank={self.rank},op={self.op}{rest}"


def parse(text: str) -> tuple[Fault, ...]:
    """Parse the faults in a variable's value, ``fault@rank=R,op=N[,name=value...]`` separated by semicolons.

    Raises GuardConfigError, with the offending part, for anything else.

    >>> [str(fault) for fault in parse("kill@rank=2,op=3; late@rank=1,op=0,seconds=5")]
    ['kill@rank=2,op=3', 'late@rank=1,op=0,seconds=5.0']
    """
    return tuple(_parse_one(part.strip()) for part in text.split(";"))


def _parse_one(part: str) -> Fault:
    kind, at, rest = part.partition("@")
    if not at:
        raise GuardConfigError(f"{VARIABLE}: {part!r} has no @; write it like {SYNTAX}")
    readers: dict[str, Callable[[str], Any]] = {
        "rank": int,
        "op": int,
        "seconds": float,
        "after": float,
        "after_bytes": int,
        "children": int,
        "code": int,
        "of": str,
        "factor": float,
        "times": int,
        "raw": lambda text: bool(int(text)),
        "watched_op": int,
        "engine": str,
    }
    values: dict[str, Any] = {}
    for item in rest.split(","):
        name, equals, value = (word.strip() for word in item.partition("="))
        if name not in readers or not equals:
            raise GuardConfigError(f"{VARIABLE}: {item!r} in {part!r} is no name=value; names: {', '.join(readers)}")
        if name in values:
            raise GuardConfigError(f"{VARIABLE}: {name} is given twice in {part!r}; give it once")
        try:
            values[name] = readers[name](value)
        except ValueError:
            wanted = "a number" if readers[name] is float else "a whole number"
            raise GuardConfigError(f"{VARIABLE}: {name}={value!r} in {part!r} is not {wanted}; change it") from None
    missing = [name for name in ("rank", "op") if name not in values]
    if missing:
        raise GuardConfigError(f"{VARIABLE}: {part!r} does not say its {' and '.join(missing)}; write it like {SYNTAX}")
    return Fault(fault=kind.strip(), **values)


def _check(fault: str, name: str, value: object, kind: type, least: int) -> None:
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise GuardConfigError(
            f"{name} of {fault} is {value!r}; give {'a number' if kind is float else 'a whole number'}"
        )
    if not math.isfinite(value) or value < least:
        raise GuardConfigError(f"{name} of {fault} is {value!r}; give a finite number, {least} or more")
