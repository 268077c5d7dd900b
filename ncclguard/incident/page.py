"""The page of an incident, from the templates beside this module and those of `ncclguard_explain.page`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from ncclguard.incident.model import Incident, RankReport, alike, meaning_of, optimizer_steps, view_of_one
from ncclguard.incident.stacks import frame_text
from ncclguard.incident.timeline import Bar, Document, Key, Lane, Timeline
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.language import Message, joined, read, say, told, tr
from ncclguard_explain.page import render
from ncclguard_explain.ranks import FEW_RANKS, Hosts, called, duration, ranks_text

TEMPLATES: Final = Path(__file__).parent / "templates"


#: Culprits that get a card of their own, and ranks up to which the table is open.
CARDS: Final = 16
OPEN_TABLE: Final = 16
#: Above so many ranks those that are not to blame share lanes; above the second number also the culprits do.
EACH: Final = 80
CULPRITS: Final = 48
#: Of a job of many ranks: lanes of ranks that are together, rows of a table, and operations of one lane.
PLACES: Final = 64
ROWS: Final = 200
#: Where the divergence stands when there is something before it, and where the report ends, in parts of the width.
DIVERGED: Final = 0.62
DIVERGED_AT_ONCE: Final = 0.06
GIVEN_UP: Final = 0.97
#: A stretch longer than so many median stretches is drawn shorter and marked.
_LONG: Final = 6.0
#: Part of the width beyond which a bar does not push a lane's text to the right.
_TOO_FAR: Final = 0.8

#: What a rank did in the operation, for people.
STATES: Final = {
    "none": tr("not in it"),
    "running": tr("waiting"),
    "ready": tr("data complete"),
    "done": tr("completed it"),
    "silent": tr("no answer"),
    "departed": tr("gone"),
}


def render_html(document: Document) -> str:
    """The page of a report; everything that came from a program is escaped, and nothing is loaded from elsewhere.

    Raises `PageError` where Jinja2 is not installed.
    """
    incident, timeline = document.incident, document.timeline
    blamed, placed = frozenset(incident.culprits), incident.placed()
    culprits = [report for report in incident.ranks if report.rank in blamed]
    groups = alike(culprits) if placed.told else [[report] for report in culprits]
    if len(groups) > CARDS:
        groups.sort(key=lambda group: not (group[0].stack or group[0].exception))
    columns, rows = _table(incident, placed)
    return render(
        "incident.html.j2",
        TEMPLATES,
        document=document,
        incident=incident,
        named=tr(
            "{ranks}: {cause}",
            ranks=placed.text(blamed) if blamed else tr("nobody is named"),
            cause=WORD[incident.cause],
        ),
        tags=_tags(document),
        culprits=[(_heading(group, placed), group[0]) for group in groups[:CARDS]],
        further=[report.rank for group in groups[CARDS:] for report in group],
        unreported=sorted(blamed - {report.rank for report in culprits}),
        chart=None if timeline is None else lay_out(incident, timeline),
        operations=() if timeline is None else _operations(incident, timeline, len(incident.ranks) > FEW_RANKS),
        columns=columns,
        rows=rows,
        open_table=OPEN_TABLE,
        meaning_of=meaning_of,
        called=called,
        frame_text=frame_text,
        frame_texts=lambda lines: [*map(frame_text, lines)],
        word=WORD,
        unknown=Cause.UNKNOWN,
        ranks_text=placed.text,
        duration=duration,
    )


def _heading(group: Sequence[RankReport], placed: Hosts) -> Message:
    """Return who a card is about, and where they are; of several the first is shown."""
    if len(group) > 1:
        who = placed.text(report.rank for report in group)
        return tr("{ranks}; the first, rank {rank}", ranks=who, rank=group[0].rank)
    return ranks_text([group[0].rank]) if group[0].host else placed.text([group[0].rank])


def _tags(document: Document) -> list[Message]:
    incident = document.incident
    gone = {report.rank for report in incident.ranks} - set(incident.participants)
    count = tr("{count} ranks of {size}", count=len(incident.participants), size=document.world_size)
    tags = [tr("{ranks} still running at the verdict", ranks=count) if gone else count]
    if incident.timeout is not None:
        passed = tr("passed") if incident.deadline_expired else tr("not passed")
        tags.append(tr("limit {time}, {passed}", time=duration(incident.timeout), passed=passed))
    tags.append(tr("tries: {count}", count=incident.attempts))
    if incident.decided_after is not None:
        tags.append(tr("decided in {time}", time=duration(incident.decided_after)))
    steps = optimizer_steps(incident)
    if steps is not None:
        tags.append(steps)
    if not incident.agreed:
        tags.append(view_of_one(incident))
    if incident.torn:
        tags.append(tr("the tensor is torn: it holds neither its input nor the result"))
    return tags


#: Of the table of ranks, and whether each is text; in a job of many ranks those in one place share a row.
_EACH: Final = (
    (tr("rank"), False), (tr("cause"), True), (tr("state"), True), (tr("operation"), True),
    (tr("for", "seconds"), False), (tr("called at"), True), (tr("host"), True), (tr("pid"), False), (tr("more"), True),
)  # fmt: skip
_TOGETHER: Final = (
    (tr("ranks"), False), (tr("who"), True), (tr("cause"), True), (tr("state"), True), (tr("operation"), True),
    (tr("for", "seconds"), False), (tr("called at"), True), (tr("more, of the first"), True),
)  # fmt: skip
_Cells = tuple[bool, tuple[Any, ...]]


def _table(incident: Incident, placed: Hosts) -> tuple[tuple[tuple[str, bool], ...], list[_Cells]]:
    """Columns and rows of the table of ranks: a row each, or above 64 ranks one for all that are in the same place."""
    blamed = frozenset(incident.culprits)
    if len(incident.ranks) <= FEW_RANKS:
        return _EACH, [(report.rank in blamed, _cells(report)) for report in incident.ranks]
    places: dict[tuple[Any, ...], list[RankReport]] = {}
    for report in incident.ranks:
        bad = report.rank in blamed
        places.setdefault((bad, report.cause, report.state, report.operation, report.call_site), []).append(report)
    ordered = sorted(places.items(), key=lambda entry: (not entry[0][0], -len(entry[1]), entry[1][0].rank))
    rows: list[_Cells] = [(key[0], _together(group, placed)) for key, group in ordered[:ROWS]]
    rest = [report.rank for _, group in ordered[ROWS:] for report in group]
    if rest:
        rows.append(
            (False, (f"{len(rest):,}", placed.text(rest), "", tr("in further places: see the JSON"), "", "", "", ""))
        )
    return _TOGETHER, rows


def _together(group: Sequence[RankReport], placed: Hosts) -> tuple[Any, ...]:
    """A row of ranks that are in the same place."""
    first, ages = group[0], [report.age for report in group if report.age is not None]
    least, most = min(ages, default=0.0), max(ages, default=0.0)
    more = next((report for report in group if report.exception or report.note), first)
    return (
        f"{len(group):,}",
        placed.text(report.rank for report in group),
        "" if first.cause is None else WORD[first.cause],
        STATES[first.state],
        first.operation or "",
        ""
        if not ages
        else f"{most:.3g} s"
        if f"{least:.3g}" == f"{most:.3g}"
        else tr("{least:.3g} to {most:.3g} s", least=least, most=most),
        first.call_site or "",
        more.exception or read(more.note or ""),
    )


def _cells(report: RankReport) -> tuple[Any, ...]:
    return (
        report.rank,
        "" if report.cause is None else WORD[report.cause],
        STATES[report.state],
        report.operation or "",
        "" if report.age is None else f"{report.age:.3g} s",
        report.call_site or "",
        report.host,
        report.pid or "",
        report.exception or read(report.note or ""),
    )


def _operations(incident: Incident, timeline: Timeline, many: bool) -> list[_Cells]:
    """Rows of the table of operations, in order: when each began, how long it took, and which rank came last to it.

    Of the one that failed it is who did not come, if known. Of `many` ranks, with maybe many groups, the latest.
    """
    rows: list[_Cells] = []
    spans = sorted(_spans(timeline.lanes).items(), key=lambda entry: entry[1].first.start)
    for (group, sequence), span in spans[-ROWS:] if many else spans:
        took = tr("not complete") if span.end is None else f"{span.end - span.first.start:.3g} s"
        behind = tr(
            "rank {last}, {seconds:.3g} s after rank {first}",
            last=span.last_rank,
            seconds=span.last.start - span.first.start,
            first=span.first_rank,
        )
        missing = set(incident.culprits) - span.ranks if f"{group}/{sequence}" == incident.op_id else set()
        if missing:
            behind = tr("{ranks} did not come", ranks=ranks_text(sorted(missing)))
        rows.append(
            (
                False,
                (
                    f"{span.first.start:.3f} s",
                    span.first.text,
                    f"{group}/{sequence}",
                    took,
                    behind if missing or len(span.ranks) > 1 else "",
                ),
            )
        )
    return rows


class _Span:
    """One operation over several ranks: who began first and last, and when the last ended."""

    __slots__ = ("end", "first", "first_rank", "last", "last_rank", "ok", "ranks", "text")

    def __init__(self, rank: int, bar: Bar) -> None:
        self.ranks = {rank}
        self.first = self.last = bar
        self.first_rank = self.last_rank = rank
        self.end, self.ok, self.text = bar.end, bar.ok, bar.text

    def add(self, rank: int, bar: Bar) -> None:
        self.ranks.add(rank)
        if bar.start < self.first.start:
            self.first, self.first_rank = bar, rank
        if bar.start > self.last.start:
            self.last, self.last_rank = bar, rank
        self.end = None if bar.end is None or self.end is None else max(self.end, bar.end)
        self.ok = self.ok and bar.ok

    def whole(self) -> Bar:
        """From the first that began to the last that ended."""
        first = self.first
        return Bar(
            group=first.group, sequence=first.sequence, text=self.text, start=first.start, end=self.end, ok=self.ok
        )


def _spans(lanes: Iterable[Lane]) -> dict[Key, _Span]:
    """The operations of these ranks, in the order in which they are met; in one pass, because there may be many."""
    found: dict[Key, _Span] = {}
    for lane in lanes:
        for bar in lane.bars:
            key = bar.group, bar.sequence
            span = found.get(key)
            if span is None:
                found[key] = _Span(lane.rank, bar)
            else:
                span.add(lane.rank, bar)
    return found


# ------------------------------------------------------------------------------------------------------------ the axis


class Scale:
    """From moments to places on the axis: what went before the divergence on the left, the wait after it on the right.

    Piecewise linear and increasing. `cuts`: (begin, end, seconds) of what is drawn shorter than it was, in parts of the
    width.
    """

    end = GIVEN_UP

    def __init__(self, timeline: Timeline) -> None:
        knots = _knots(timeline)
        spans = [b - a for a, b in itertools.pairwise(knots)]
        limit = _LONG * median(spans) if spans else 0.0
        drawn = [min(span, limit) if limit > 0 else span for span in spans]
        self.diverged = DIVERGED if spans else DIVERGED_AT_ONCE
        total = sum(drawn) or 1.0
        places = [0.01 if spans else self.diverged]
        for width in drawn:
            places.append(places[-1] + width / total * (self.diverged - 0.01))
        self.begin = knots[0]
        self.given_up = max(timeline.given_up, 1e-6)
        self.cuts = [
            (places[i], places[i + 1], span) for i, span in enumerate(spans) if limit > 0 and span > 1.5 * limit
        ]
        self._moments = [*knots, self.given_up]
        self._places = [*places, GIVEN_UP]

    def place(self, moment: float) -> float:
        """The place, 0 to 1, of a moment in seconds from the divergence; what lies outside is put on the edge."""
        return float(np.interp(moment, self._moments, self._places))


def _knots(timeline: Timeline) -> list[float]:
    """Begin and end of each operation over all ranks, a microsecond apart, up to the divergence, the last knot."""
    envelopes: dict[Key, list[float]] = {}
    for lane in timeline.lanes:
        for bar in lane.bars:
            if bar.end is not None:
                span = envelopes.get((bar.group, bar.sequence))
                if span is None:
                    envelopes[bar.group, bar.sequence] = [bar.start, bar.end]
                    continue
                span[:] = min(span[0], bar.start), max(span[1], bar.end)
    kept: list[float] = []
    for moment in sorted({moment for span in envelopes.values() for moment in span if moment < 0.0}):
        if not kept or moment - kept[-1] > 1e-6:
            kept.append(moment)
    return [*kept, 0.0]


# ----------------------------------------------------------------------------------------------------------- the lanes


@dataclass(frozen=True, slots=True)
class Drawn:
    """A bar as drawn, in parts of the width: `kind` is ok, open, failed or guess; `colour` tells groups apart."""

    kind: str
    left: float
    width: float
    title: str
    colour: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The lane of one rank or, where `members` names them, of several; `said` is written from `said_at` on."""

    name: str
    about: str
    bad: bool
    bars: Sequence[Drawn]
    said: str = ""
    said_at: float = 0.0
    members: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """All rows, culprits first, their axis, what its zero is, how clocks were aligned, and what became of the job."""

    rows: Sequence[Row]
    scale: Scale
    divergence: Message
    clocks: Message
    then: Message

    @property
    def kinds(self) -> set[str]:
        """The kinds of bars that are drawn, for the legend."""
        return {bar.kind for row in self.rows for bar in row.bars if not bar.colour}

    @property
    def colours(self) -> list[str]:
        """The colours of other groups' operations that are drawn, for the legend."""
        return sorted({bar.colour.strip() for row in self.rows for bar in row.bars if bar.colour})


def lay_out(incident: Incident, timeline: Timeline) -> Chart:
    """The lanes, culprits first; above 80 ranks those that are not to blame share lanes by what they were in."""
    reports = {report.rank: report for report in incident.ranks}
    everyone = sorted({*incident.participants, *reports, *(lane.rank for lane in timeline.lanes)})
    blamed, placed = frozenset(incident.culprits), incident.placed()
    culprits = [rank for rank in everyone if rank in blamed]
    others = [rank for rank in everyone if rank not in blamed]
    layout = _Layout(incident, timeline, reports, placed)
    rows = [layout.one(rank) for rank in culprits[:CULPRITS]]
    if len(culprits) > CULPRITS:
        rows.append(layout.together(culprits[CULPRITS:]))
    if len(everyone) <= EACH:
        rows += [layout.one(rank) for rank in others]
    else:
        places = _by_place(others, reports)
        rows += [layout.together(ranks) for ranks in places[:PLACES]]
        rest = [rank for ranks in places[PLACES:] for rank in ranks]
        rows += [layout.together(rest)] if rest else []
    parted = incident.cause not in (Cause.NETWORK, Cause.UNKNOWN)
    what = tr("here the ranks part") if parted else tr("the operation that failed")
    then = joined("; ", (change.text for change in incident.afterwards))
    return Chart(rows, layout.scale, what, _clocks(timeline), then)


class _Layout:
    """Lays out the lanes of one timeline."""

    def __init__(
        self, incident: Incident, timeline: Timeline, reports: Mapping[int, RankReport], placed: Hosts
    ) -> None:
        self.scale = Scale(timeline)
        self._blamed = frozenset(incident.culprits)
        self._placed = placed
        self._timeline = timeline
        self._reports = reports
        self._lanes = {lane.rank: lane for lane in timeline.lanes}
        groups = sorted({bar.group for lane in timeline.lanes for bar in lane.bars} - {timeline.group})
        self._groups = {group: f" g{1 + number % 2}" for number, group in enumerate(groups)}

    def one(self, rank: int) -> Row:
        """The lane of one rank."""
        report = self._reports.get(rank)
        bad = rank in self._blamed
        lane = self._lanes.get(rank)
        bars = [self._bar(bar) for bar in lane.bars] if lane is not None else self._inferred()
        said, place = self._said(report, lane) if bad or lane is None else ("", 0.0)
        about = ""
        if report is not None:
            about = say(WORD[report.cause] if bad and report.cause is not None else STATES[report.state])
            about += f" · {report.host}" if report.host else ""
        return Row(str(rank), about, bad, bars, said, place)

    def together(self, ranks: Sequence[int]) -> Row:
        """One lane for ranks that were in the same place: from the first that began to the last that ended."""
        spans = _spans(self._lanes[rank] for rank in ranks if rank in self._lanes)
        latest = sorted(spans.values(), key=lambda span: span.first.start)[-ROWS:]
        report = self._reports.get(ranks[0])
        return Row(
            name=told("{count} ranks", count=len(ranks)),
            about=say(STATES[report.state] if report is not None else tr("unknown", "state")),
            bad=not self._blamed.isdisjoint(ranks),
            bars=[self._bar(span.whole()) for span in latest],
            said="" if spans else told("no answer: {ranks}", ranks=self._placed.text(ranks)),
            said_at=self.scale.diverged,
            members=say(self._placed.text(ranks)),
        )

    def _bar(self, bar: Bar) -> Drawn:
        kind = "open" if bar.end is None else "failed" if not bar.ok else "ok"
        took = tr("still in it")
        if bar.end is not None:
            time = duration(bar.end - bar.start)
            took = tr("ok, {time}", time=time) if bar.ok else tr("failed, {time}", time=time)
        since = told("from {seconds:+.6g} s: {took}", seconds=bar.start, took=took)
        title = f"{bar.text}\n{bar.group}/{bar.sequence}\n{since}"
        return self._drawn(kind, bar, title, self._groups.get(bar.group, "") if kind == "ok" else "")

    def _drawn(self, kind: str, bar: Bar, title: str, colour: str = "") -> Drawn:
        end = self._timeline.given_up if bar.end is None else bar.end
        left, right = self.scale.place(bar.start), self.scale.place(max(end, bar.start))
        return Drawn(kind, left, right - left, title, colour)

    def _inferred(self) -> list[Drawn]:
        """A rank that says nothing entered what the other ranks completed with it: when, is not known."""
        drawn = []
        for whole in self._common:
            why = told("the others completed it, so this rank was in it")
            title = f"{whole.text}\n{whole.group}/{whole.sequence}\n{why}"
            drawn.append(self._drawn("guess", whole, title))
        return drawn

    @functools.cached_property
    def _common(self) -> list[Bar]:
        """The operations of the group that ranks completed, in order."""
        done = (
            lane.model_copy(update={"bars": [bar for bar in lane.bars if bar.ok and bar.group == self._timeline.group]})
            for lane in self._timeline.lanes
        )
        return [span.whole() for _, span in sorted(_spans(done).items())]

    def _said(self, report: RankReport | None, lane: Lane | None) -> tuple[str, float]:
        """Return what kept this rank, and the place where its bars end; nothing where it is in the operation itself."""
        if report is None:
            return told("nothing is known"), self.scale.diverged
        bars = lane.bars if lane is not None else ()
        if any(bar.end is None for bar in bars):
            return "", 0.0
        cause = str(report.cause or report.state)
        text = report.exception or report.note or (report.stack[-1] if report.stack else report.state)
        text = text.removesuffix(f": {cause}")
        text = read(text) if report.note and not report.exception else text
        word = WORD[report.cause] if report.cause is not None else STATES[report.state]
        ends = [self.scale.place(bar.end) for bar in bars if bar.end is not None]
        place = max([self.scale.diverged, *(end for end in ends if end < _TOO_FAR)])
        return told("{cause}: {text}", cause=word, text=text), place


def _by_place(ranks: Iterable[int], reports: Mapping[int, RankReport]) -> list[list[int]]:
    """Ranks by what they were in, the largest group first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        report = reports.get(rank)
        key = ("", "", "") if report is None else (report.state, report.operation or "", report.call_site or "")
        found.setdefault(key, []).append(rank)
    return sorted(found.values(), key=lambda group: (-len(group), group))


def _clocks(timeline: Timeline) -> Message:
    """Return how the lanes were laid over each other, and how exact that is."""
    loose = [lane.rank for lane in timeline.lanes if lane.clock == "answer"]
    spreads = [lane.spread for lane in timeline.lanes if lane.spread is not None]
    how = tr(
        "Seconds from the moment the first rank entered the operation that failed; the scale changes there. Each rank's "
        "moments are by its own monotonic clock, laid over each other by the operations that they completed together"
    )
    if spreads:
        text = tr("{how} (these fit within {ms:.3g} ms).", how=how, ms=1e3 * max(spreads))
    else:
        text = tr("{how}.", how=how)
    if loose and len(timeline.lanes) > 1:
        ranks = ranks_text(loose).capitalised()
        text = tr("{clocks} {ranks} had none in common and may be off by half a second.", clocks=text, ranks=ranks)
    return text
