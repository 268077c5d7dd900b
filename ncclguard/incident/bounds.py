"""How much an incident says of each rank, so that an incident stays small in a job of thousands: every rank reads it.

In a job of a few hundred ranks nothing is left out, but other threads when they are many. In larger ones, what tells
the most comes first: one stack for all culprits that have the same, then the culprits' other threads, then where the
other ranks wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ncclguard.incident.model import SAME_STACK, RankReport
from ncclguard.incident.text import SHOWN_GROUPS

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
