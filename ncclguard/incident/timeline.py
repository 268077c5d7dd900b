"""Operations of each rank before an incident, kept by every process, on one axis for the report.

Every process keeps its last few operations: on the path of every call that is one append to a ring, turned into plain
data only when a report is asked for. Its moments are seconds *before the report*, on its own monotonic clock: no clocks
of two hosts are ever compared.

An operation that completed ended on all its ranks at nearly the same moment, because none can leave before the last has
come. So a rank's clock is laid over the reference rank's by the ends of the operations both completed: the median of
the differences. Where two ranks have no operation in common, their answers to the revoke are laid on each other, which
is as exact as the monitors' period.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from pydantic import BaseModel, field_validator

from ncclguard.incident.model import Incident, Text, encodable
from ncclguard_explain.language import Message, read, received, say, tr

#: Operations kept for each group, and those of all groups together that a report carries.
KEPT: Final = 20
TEXT_LENGTH: Final = 120
_DIGITS: Final = 5  # 10 µs


#: A `Past` that costs half as much to make, for the path of every call.
PastTuple = tuple[int, str, float, float, bool]


class Past(NamedTuple):
    """One finished operation: its place in the group, what it was, begin and end by `time.monotonic()`, and success."""

    sequence: int
    text: str
    begin: float
    end: float
    ok: bool


def snapshot(
    past: Mapping[str, Iterable[PastTuple]], open_calls: Iterable[tuple[str, int, str, float]], now: float
) -> dict[str, Any]:
    """Return the latest operations as small plain data: tables of groups and texts, and rows that point into them.

    `past` by group; `open_calls` are (group, sequence, text, begin). A row is [group, sequence, text, seconds ago
    begun, seconds ago ended or None, success].

    >>> snapshot({"0": [Past(1, "barrier()", 10.0, 10.5, True)]}, [("0", 2, "barrier()", 11.0)], now=12.0)
    {'groups': ['0'], 'texts': ['barrier()'], 'rows': [[0, 1, 0, 2.0, 1.5, 1], [0, 2, 0, 1.0, None, 0]]}
    """
    ended = [(one[2], group, Past(*one)) for group, ring in past.items() for one in ring]
    ended = sorted(ended, key=lambda entry: entry[0])[-KEPT:]
    groups: dict[str, int] = {}
    texts: dict[str, int] = {}

    def row(group: str, sequence: int, text: str, begin: float, end: float | None, ok: bool) -> list[Any]:
        return [
            groups.setdefault(group, len(groups)),
            sequence,
            texts.setdefault(text[:TEXT_LENGTH], len(texts)),
            round(now - begin, _DIGITS),
            None if end is None else round(now - end, _DIGITS),
            int(ok),
        ]

    rows = [row(group, one.sequence, one.text, one.begin, one.end, one.ok) for _, group, one in ended]
    rows += [row(group, sequence, text, begin, None, False) for group, sequence, text, begin in open_calls]
    return {"groups": list(groups), "texts": list(texts), "rows": rows}


# ------------------------------------------------------------------------------------------------------- on one axis

#: Common operations from which the alignment is taken: the latest ones.
ALIGN_BY: Final = 16

Key = tuple[str, int]


class Bar(BaseModel, frozen=True, extra="forbid"):
    """One operation of one rank; seconds from the moment of divergence. `end` is None while it was still in it."""

    group: Text
    sequence: int
    text: Text
    start: float
    end: float | None
    ok: bool


class Lane(BaseModel, frozen=True, extra="forbid"):
    """The operations of one rank. `clock` says how it was laid over the others'; `spread` how well, in seconds.

    `asked`: when it answered the revoke or announced that it leaves; its open operation is known up to there.
    """

    rank: int
    clock: Literal["reference", "operations", "answer"]
    common: int = 0
    spread: float | None = None
    asked: float
    bars: tuple[Bar, ...]


class Timeline(BaseModel, frozen=True, extra="forbid"):
    """The lanes in order of rank. Zero is the moment of divergence: when the first rank entered the failed operation.

    `given_up`: when the first rank answered the revoke, in seconds. Ranks that said nothing have no lane.
    """

    group: Text
    sequence: int
    given_up: float
    lanes: tuple[Lane, ...]

    def lane(self, rank: int) -> Lane | None:
        """The lane of a rank, if it has one."""
        return next((lane for lane in self.lanes if lane.rank == rank), None)


def build(incident: Incident, histories: Mapping[int, Any]) -> Timeline | None:
    """Lay the ranks' histories (see `snapshot`), but data of another form, over each other; None for nothing."""
    group, _, number = incident.op_id.rpartition("/")
    sequence = int(number) if number.isdigit() else 0
    own = {rank: rows for rank, data in sorted(histories.items()) if (rows := _own_clock(data)) is not None}
    if not own:
        return None
    ends = {rank: _ends(rows) for rank, rows in own.items()}
    reference = max(own, key=lambda rank: (len(ends[rank]), -rank))
    fits = {rank: _fit(ends[rank], ends[reference]) if rank != reference else _Fit("reference") for rank in own}
    entries = [row[3] + fits[rank].offset for rank, rows in own.items() for row in rows if row[:2] == (group, sequence)]
    zero = min(entries, default=min(fit.offset for fit in fits.values()))
    lanes = [_lane(rank, rows, fits[rank], zero) for rank, rows in own.items()]
    given_up = min(lane["asked"] for lane in lanes)
    return Timeline.model_validate({"group": group, "sequence": sequence, "given_up": given_up, "lanes": lanes})


#: A `Bar` on its rank's own clock: group, sequence, text, start, end, success. Plain, because there are many.
_Row = tuple[str, int, str, float, "float | None", bool]


class _Fit(NamedTuple):
    """The place of a rank's clock over the reference rank's; `offset` in seconds."""

    clock: Literal["reference", "operations", "answer"]
    offset: float = 0.0
    common: int = 0
    spread: float | None = None


def _own_clock(data: Any) -> list[_Row] | None:
    """A rank's history on its own clock, zero at its answer, in order of time."""
    try:
        groups, texts = [_text(one) for one in data["groups"]], [_text(one) for one in data["texts"]]
        rows: list[_Row] = [
            (
                groups[group],
                int(sequence),
                texts[text],
                -float(begun),
                None if ended is None else -float(ended),
                bool(ok),
            )
            for group, sequence, text, begun, ended, ok in data["rows"]
        ]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return sorted(rows, key=lambda row: row[3])


def _text(value: object) -> str:
    """A text that JSON can carry. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return encodable(value)


def _ends(rows: Iterable[_Row]) -> dict[Key, float]:
    """Return when its completed operations ended: the moments that all ranks share."""
    return {(group, sequence): end for group, sequence, _, _, end, ok in rows if ok and end is not None}


def _fit(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> _Fit:
    common = sorted(ours.keys() & theirs.keys(), key=lambda key: ours[key])[-ALIGN_BY:]
    if not common:
        return _Fit("answer")
    differences = [theirs[key] - ours[key] for key in common]
    offset = median(differences)
    spread = median(abs(one - offset) for one in differences)
    return _Fit("operations", offset, len(common), round(spread, 6))


def _lane(rank: int, rows: Iterable[_Row], fit: _Fit, zero: float) -> dict[str, Any]:
    """The values of a `Lane`."""
    by = fit.offset - zero
    bars = [
        {
            "group": group,
            "sequence": sequence,
            "text": text,
            "start": round(start + by, 6),
            "end": None if end is None else round(end + by, 6),
            "ok": ok,
        }
        for group, sequence, text, start, end, ok in rows
    ]
    asked = round(by, 6)
    return {"rank": rank, "clock": fit.clock, "common": fit.common, "spread": fit.spread, "asked": asked, "bars": bars}


# ---------------------------------------------------------------------------------------------------------- the report

#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION: Final = 1


class Quoted(BaseModel, frozen=True, extra="forbid"):
    """A communicator that is not in order; `groups` are torch's process groups of the same ranks, as far as known."""

    hash: Text
    size: int
    groups: tuple[Text, ...] = ()
    members: Text
    troubles: tuple[Text, ...]


class RasQuote(BaseModel, frozen=True, extra="forbid"):
    """The answer of RAS as far as a report quotes it; `reason` says why there is none, and is None where there is one.

    `count`: the communicators that RAS reports, None for NCCL before 2.28.7, which has no JSON: its own lines about
    what is not in order are the `lines` then. `more`: how many of what is not in order are not quoted.
    """

    address: Text = ""
    nccl: Text = ""
    count: int | None = None
    communicators: tuple[Quoted, ...] = ()
    lines: tuple[Text, ...] = ()
    more: int = 0
    reason: Text | None = None

    @property
    def evidence(self) -> tuple[str, ...]:
        """The answer as lines of text; nothing where there is no answer."""
        if self.reason is not None:
            return ()
        return (say(self.heading), *(f"  {read(line)}" for line in self.statements))

    @property
    def heading(self) -> Message:
        """Return who was asked, and what it came to."""
        if self.reason is not None:
            return tr("NCCL's RAS is no witness here: {reason}", reason=received(self.reason))
        who = tr("NCCL's RAS ({address}, NCCL {version})", address=self.address, version=self.nccl)
        found = len(self.communicators) + len(self.lines) + self.more
        if self.count is None:
            lists = tr("its errors and warnings") if found else tr("no errors and no warnings")
            return tr(
                "{who}: {lists}, of this job or of another on this host, which it does not tell", who=who, lists=lists
            )
        return tr("{who}: {found} of {count} communicators not in order", who=who, found=found, count=self.count)

    @property
    def statements(self) -> tuple[str, ...]:
        """One line for each communicator that is not in order."""
        told = [f"{one.hash}, {one.members}: {'; '.join(one.troubles)}" for one in self.communicators]
        rest = [tr("and {count} more: ncclguard explain --ras, or ncclras", count=self.more)] if self.more else []
        return (*told, *self.lines, *rest)


class Document(BaseModel, frozen=True, extra="forbid"):
    """An incident with its timeline.

    `written_at` is the writer's wall clock, for finding the incident in other logs; `ras` is what NCCL's RAS said when
    the incident began, None where it was not asked.

    Raises pydantic.ValidationError, a ValueError, for anything else.
    """

    schema_version: int = SCHEMA_VERSION
    written_at: str
    written_by: int
    host: Text
    job: str
    world_size: int
    ncclguard: str
    torch: str
    incident: Incident
    timeline: Timeline | None = None
    ras: RasQuote | None = None

    @field_validator("schema_version")
    @classmethod
    def _readable(cls, version: int) -> int:
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the report has schema version {version}, this ncclguard reads {SCHEMA_VERSION}: read it with the "
                "version of ncclguard that wrote it"
            )
        return version
