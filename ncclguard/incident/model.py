"""The incident: one record of a failed operation, the same on every rank that could agree; as data and as text.

It stays small in a job of thousands, because every rank reads it. In a job of a few hundred ranks nothing is left out,
but other threads when they are many. In larger ones, what tells the most comes first: one stack for all culprits that
have the same, then the culprits' other threads, then where the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

from ncclguard.cause import MEANING, Cause

#: Bytes that all readers of an incident read together, and the least and the most that one incident says of single
#: ranks, as JSON.
ALL_READERS: Final = 128 << 20
ONE_INCIDENT: Final = (64 << 10, 384 << 10)
#: Bytes of the ranks' last operations together, which one rank reads for the report.
HISTORIES: Final = 2 << 20
#: Sides of a mismatch, and different places in which ranks wait, that an incident keeps apart.
PLACES: Final = 64
TEXT: Final = 200

Sides = tuple[tuple[str, tuple[int, ...]], ...]


def bounded(reports: Iterable[RankReport], culprits: Collection[int]) -> tuple[RankReport, ...]:
    """Return the reports, in order of rank, each with as much as there is room for; every rank has one."""
    ranks = sorted(reports, key=lambda report: report.rank)
    least, most = ONE_INCIDENT
    left = min(max(ALL_READERS // max(len(ranks), 1), least), most)
    found: dict[int, RankReport] = {}
    blamed = [report for report in ranks if report.rank in culprits]
    if len(blamed) > SHOWN_GROUPS:
        blamed = _once_each(blamed)
    for report in sorted(blamed, key=lambda report: not report.stack):
        alone = report.model_copy(update={"threads": ()})
        size = _size(alone)
        found[report.rank] = alone if size <= left else _short(report)
        left -= size if size <= left else 0
    for report in blamed:
        size = _size(report) - _size(found[report.rank])
        if report.threads and found[report.rank].stack == report.stack and size <= left:
            found[report.rank] = report
            left -= size
    places: set[tuple[str | None, str | None]] = set()
    for report in ranks:
        if report.rank not in culprits:
            size = _size(report)
            found[report.rank] = report if size <= left else _place_only(report, places)
            left -= size if size <= left else 0
    return tuple(found[report.rank] for report in ranks)


def sides(found: Sequence[tuple[str, tuple[int, ...]]]) -> Sides:
    """The largest sides of a mismatch; they come in order of size."""
    return tuple((text[:TEXT], ranks) for text, ranks in found[:PLACES])


def _once_each(blamed: Sequence[RankReport]) -> list[RankReport]:
    """Of culprits at the same place of the program only the first keeps its stack; the others name that rank."""
    seen: dict[tuple[str, ...], int] = {}
    found = []
    for report in blamed:
        first = seen.setdefault(report.stack, report.rank) if report.stack else report.rank
        if first != report.rank:
            note = "; ".join(filter(None, (report.note, f"{SAME_STACK}{first}")))
            report = report.model_copy(update={"stack": (), "threads": (), "note": note})
        found.append(report)
    return found


def _short(report: RankReport) -> RankReport:
    """A culprit for which there is no room: what it is to blame for."""
    return RankReport(rank=report.rank, cause=report.cause, state=report.state, sequence=report.sequence)


def _place_only(report: RankReport, places: set[tuple[str | None, str | None]]) -> RankReport:
    """A rank that is not to blame, for which there is no room: how far it got, and where it waits.

    The place is left out where ranks wait in too many different ones.
    """
    place = report.operation and report.operation[:TEXT], report.call_site and report.call_site[:TEXT]
    if len(places) < PLACES:
        places.add(place)
    operation, call_site = place if place in places else (None, None)
    age = None if report.age is None else round(report.age, 1)
    return RankReport(
        rank=report.rank,
        cause=report.cause,
        state=report.state,
        sequence=report.sequence,
        operation=operation,
        age=age,
        call_site=call_site,
    )


def _size(report: RankReport) -> int:
    return len(report.model_dump_json(exclude_defaults=True))


#: Culprits, sides and groups of waiting ranks that are shown one by one.
SHOWN_GROUPS: Final = 8


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks for people, runs shortened.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5]), ranks_text([])
    ('rank 3', 'ranks 0-2, 5', 'no rank')
    """
    numbers = sorted(set(ranks))
    if not numbers:
        return "no rank"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(parts) > 2 * SHOWN_GROUPS:
        parts = [*parts[: 2 * SHOWN_GROUPS], f"... ({len(numbers)} in all)"]
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(parts)}"


def duration(seconds: float) -> str:
    """Seconds, with minutes beside them where that helps."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s ({seconds / 60:.3g} min)"


#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION = 1
#: Frames of a culprit's stack that are shown, the innermost; all are in the JSON.
SHOWN_FRAMES = 8
#: How the note of a culprit begins that is at the same place as another one, whose number follows.
SAME_STACK = "its stack is that of rank "

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (0x09, 0x0A)}

State = Literal["none", "running", "ready", "done", "silent", "departed"]


def _encodable(value: object) -> object:
    """File names and messages may hold bytes that are no text; JSON cannot."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_encodable)]


class RankReport(BaseModel):
    """One rank at the moment the operation was given up.

    `operation`: what the rank is in, or last was in; `age`: seconds in it; `call_site`: where the program called it;
    `peer`: the rank at the other end of the connection that broke on this one; `stack`: the main thread's frames,
    outermost first; `threads`: name and frames of other threads, for culprits. None and "" stand for what is not known.
    `state` is how far the rank got in the operation: none (not entered), running, ready (own data complete), done; or
    silent (no answer), departed (gone, or left).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    host: Text = ""
    pid: int = 0
    cause: Cause | None = None
    state: State
    sequence: int = 0
    operation: Text | None = None
    age: float | None = None
    call_site: Text | None = None
    exception: Text | None = None
    peer: int | None = None
    stack: tuple[Text, ...] = ()
    threads: tuple[tuple[Text, tuple[Text, ...]], ...] = ()
    note: Text | None = None

    @property
    def place(self) -> str:
        """Host and pid, as far as they are known."""
        return ", ".join(([f"host {self.host}"] if self.host else []) + ([f"pid {self.pid}"] if self.pid else []))

    @property
    def inside(self) -> bool:
        """Whether it waits in the operation; one that does not has left its last, which is the one it reports."""
        return self.state in ("running", "ready")


class Incident(BaseModel):
    """Who, why, where and what to do; `timeout` in seconds, `ranks` in order of rank, `culprits` sorted global ranks.

    `sides` is filled when ranks diverged: what was called, and by which ranks, the largest side first. `device` is the
    GPU's name where it is an emulated one, else None. `decided_after`: seconds from the revoke to the verdict, on the
    rank that decided; None where nothing was agreed. `str()` is for people, `to_json()` for programs. Raises
    pydantic.ValidationError, a ValueError, for fields that cannot be.

    >>> incident = Incident(
    ...     id="0-17.0", op="barrier", op_id="0/17", group="0", generation=0, cause=Cause.LATE, culprits=(2,),
    ...     deadline_expired=True, agreed=True, attempts=1, participants=(0, 1, 2),
    ...     summary="barrier() failed after 300 s: rank 2 late.", advice="See what rank 2 did instead.",
    ... )
    >>> Incident.from_json(incident.to_json()) == incident
    True
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    id: str
    op: Text
    op_id: str
    group: Text
    generation: int
    cause: Cause
    culprits: tuple[int, ...]
    deadline_expired: bool
    timeout: float | None = None
    agreed: bool
    attempts: int
    participants: tuple[int, ...]
    ranks: tuple[RankReport, ...] = ()
    summary: Text
    advice: Text
    sides: tuple[tuple[Text, tuple[int, ...]], ...] = ()
    torn: bool = False
    device: Text | None = None
    decided_after: float | None = None

    @field_validator("schema_version")
    @classmethod
    def _readable(cls, version: int) -> int:
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the incident has schema version {version}, this ncclguard reads {SCHEMA_VERSION}: read it with the "
                "version of ncclguard that wrote it"
            )
        return version

    @field_validator("culprits")
    @classmethod
    def _sorted(cls, culprits: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(culprits)))

    @field_validator("ranks")
    @classmethod
    def _in_order(cls, ranks: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
        return tuple(sorted(ranks, key=lambda report: report.rank))

    def to_json(self) -> str:
        """Serialise; `from_json` gives an equal incident back."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Incident:
        """Read what `to_json` wrote. Raises pydantic.ValidationError, a ValueError, for anything else."""
        return cls.model_validate_json(text)

    def __str__(self) -> str:
        return as_text(self)


def as_text(incident: Incident, evidence: Sequence[str] = ()) -> str:
    """Return the incident as several lines; control characters that came from other programs' messages are escaped.

    `evidence` is what other witnesses say, for the report.
    """
    culprits = [report for report in incident.ranks if report.rank in incident.culprits]
    lines = [f"ncclguard incident {incident.id}: {incident.summary}"]
    lines.append(f"  cause: {incident.cause}, {MEANING[incident.cause]}")
    if len(culprits) > SHOWN_GROUPS:
        culprits.sort(key=lambda report: not (report.stack or report.exception))
    for report in culprits[:SHOWN_GROUPS]:
        lines += _culprit(report)
    rest = culprits[SHOWN_GROUPS:]
    alike = [report.rank for report in rest if SAME_STACK in (report.note or "")]
    if alike:
        lines.append(f"  and {ranks_text(alike)}, each at the same place as a rank above: see to_json()")
    if len(rest) > len(alike):
        lines.append(f"  and {ranks_text({report.rank for report in rest} - {*alike})}: see to_json()")
    unreported = sorted(set(incident.culprits) - {report.rank for report in culprits})
    if unreported:
        lines.append(f"  {ranks_text(unreported)}: nothing more is known")
    lines += _sides(incident.sides)
    lines += _waiting([report for report in incident.ranks if report.rank not in incident.culprits])
    limit = "" if incident.timeout is None else f"limit {duration(incident.timeout)}, "
    passed = "passed" if incident.deadline_expired else "not passed"
    decided = "" if incident.decided_after is None else f"; decided {duration(incident.decided_after)} after the revoke"
    lines.append(f"  time: {limit}deadline {passed}; tries: {incident.attempts}{decided}")
    if incident.torn:
        lines.append("  the tensor is torn: it holds neither its input nor the result")
    if not incident.agreed:
        lines.append("  this is the view of one rank: it could not agree with the others")
    if incident.device is not None:
        lines.append(f"  device: {incident.device}")
    lines += [f"  {_indented(line)}" for line in evidence]
    lines.append(f"  what to do: {incident.advice}")
    lines.append(f"  (operation {incident.op_id}, group {incident.group}, generation {incident.generation})")
    return "\n".join(lines).translate(_CONTROL)


def _culprit(report: RankReport) -> list[str]:
    cause = report.cause or Cause.UNKNOWN
    lines = [f"  rank {report.rank}{f' ({report.place})' if report.place else ''}: {cause}"]
    if report.exception:
        lines.append(f"    raised {_indented(report.exception)}")
    if report.note:
        lines.append(f"    {_indented(report.note)}")
    if report.operation:
        line = f"    {'in' if report.inside else 'last was in'} {report.operation}"
        line += f", called at {report.call_site}" if report.call_site else ""
        lines.append(line + (f", for {duration(report.age)}" if report.inside and report.age is not None else ""))
    if report.stack:
        left_out = len(report.stack) - SHOWN_FRAMES
        lines.append(
            "    main thread, innermost last" + (f" ({left_out} outer frames left out):" if left_out > 0 else ":")
        )
        lines += [f"      {_indented(frame)}" for frame in report.stack[-SHOWN_FRAMES:]]
        if report.threads:
            lines.append(f"    and {len(report.threads)} other thread{'s' * (len(report.threads) > 1)}: see to_json()")
    elif cause in (Cause.LATE, Cause.DIVERGED) and SAME_STACK not in (report.note or ""):
        lines.append("    stack: unknown, the rank sent none")
    return lines


def _sides(sides: Sequence[tuple[str, tuple[int, ...]]]) -> list[str]:
    lines = [f"  {ranks_text(ranks)} called {text}" for text, ranks in sides[:SHOWN_GROUPS]]
    if len(sides) > SHOWN_GROUPS:
        lines.append(f"  and {len(sides) - SHOWN_GROUPS} further calls: see to_json()")
    return lines


def _waiting(reports: Sequence[RankReport]) -> list[str]:
    """What the ranks that are not to blame were in, and for how long; ranks in the same place share a line."""
    places: dict[tuple[str, str], list[RankReport]] = {}
    for report in reports:
        if report.inside:
            place = (report.operation or "the operation", report.call_site or "")
            places.setdefault(place, []).append(report)
    lines = []
    for (operation, call_site), group in sorted(places.items(), key=lambda item: -len(item[1]))[:SHOWN_GROUPS]:
        ages = [report.age for report in group if report.age is not None]
        since = f" for {'up to ' if len(group) > 1 else ''}{duration(max(ages))}" if ages else ""
        where = f", called at {call_site}" if call_site else ""
        lines.append(f"  waiting{since}: {ranks_text(report.rank for report in group)} in {operation}{where}")
    if len(places) > SHOWN_GROUPS:
        lines.append(f"  and ranks waiting in {len(places) - SHOWN_GROUPS} further places: see to_json()")
    silent = [report.rank for report in reports if report.state == "silent"]
    if silent:
        lines.append(f"  no answer from {ranks_text(silent)}")
    return lines


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n      ")
