"""Self-contained pages for people, from the Jinja2 templates beside this module; and the page of an incident.

Light and dark, everything escaped. Jinja2 comes with torch; on a machine without torch only pages need it
(`pip install "ncclguard[html]"` or jinja2).
"""

from __future__ import annotations

import functools
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ncclguard.cause import MEANING, Cause
from ncclguard.incident.model import Incident, RankReport, duration, ranks_text
from ncclguard.incident.timeline import Bar, Document, Key, Lane, Timeline

if TYPE_CHECKING:
    from jinja2 import Environment


TEMPLATES: Final = Path(__file__).parent / "templates"


class PageError(RuntimeError):
    """A page cannot be made on this machine; the text says what to install."""


def render(template: str, **values: Any) -> str:
    """The whole page that a template makes of the values, whose texts are escaped.

    Raises PageError where Jinja2 is not installed.

    >>> render("base.html.j2", title="a < b", style="", body="x").startswith("<!doctype html>")
    True
    """
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    try:
        import jinja2
    except ImportError as error:
        raise PageError(
            "an HTML page needs Jinja2, which is not installed here: pip install jinja2; text and JSON need nothing more"
        ) from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters["prose"] = lambda text: _markup(prose(text))
    environment.filters["percent"] = lambda part: f"{100 * part:.2f}%"
    return environment


def _markup(html: str) -> str:
    """HTML that a template puts in as it is."""
    from markupsafe import Markup  # a part of Jinja2

    return Markup(html)


def prose(text: str) -> str:
    """Text in which `words` stand for what is typed.

    >>> prose("run `a < b`")
    'run <code>a &lt; b</code>'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


#: Culprits that get a card of their own, and ranks up to which the table is open.
CARDS: Final = 16
OPEN_TABLE: Final = 16
#: Above so many ranks those that are not to blame share lanes; above the second number also the culprits do.
EACH: Final = 80
CULPRITS: Final = 48
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
    "none": "not in it",
    "running": "waiting",
    "ready": "data complete",
    "done": "completed it",
    "silent": "no answer",
    "departed": "gone",
}


def render_html(document: Document) -> str:
    """The page of a report; everything that came from a program is escaped, and nothing is loaded from elsewhere.

    Raises `PageError` where Jinja2 is not installed.
    """
    incident, timeline = document.incident, document.timeline
    culprits = [report for report in incident.ranks if report.rank in incident.culprits]
    return render(
        "incident.html.j2",
        document=document,
        incident=incident,
        named=f"{ranks_text(incident.culprits) if incident.culprits else 'nobody is named'}: {incident.cause}",
        tags=_tags(document),
        culprits=culprits,
        unreported=sorted(set(incident.culprits) - {report.rank for report in culprits}),
        chart=None if timeline is None else lay_out(incident, timeline),
        operations=() if timeline is None else _operations(timeline),
        ranks=[(report.rank in incident.culprits, _cells(report)) for report in incident.ranks],
        cards=CARDS,
        open_table=OPEN_TABLE,
        meaning=MEANING,
        unknown=Cause.UNKNOWN,
        ranks_text=ranks_text,
        duration=duration,
    )


def _tags(document: Document) -> list[str]:
    incident = document.incident
    gone = {report.rank for report in incident.ranks} - set(incident.participants)
    count = f"{len(incident.participants)} ranks of {document.world_size}"
    tags = [f"goes on with {count}" if gone else count]
    if incident.timeout is not None:
        passed = "passed" if incident.deadline_expired else "not passed"
        tags.append(f"limit {duration(incident.timeout)}, {passed}")
    tags.append(f"tries: {incident.attempts}")
    if incident.decided_after is not None:
        tags.append(f"decided {duration(incident.decided_after)} after the revoke")
    if not incident.agreed:
        tags.append("the view of one rank: it could not agree with the others")
    if incident.torn:
        tags.append("the tensor is torn: it holds neither its input nor the result")
    return tags


def _cells(report: RankReport) -> tuple[Any, ...]:
    """A row of the table of ranks."""
    return (
        report.rank,
        report.cause or "",
        STATES[report.state],
        report.operation or "",
        "" if report.age is None else f"{report.age:.3g} s",
        report.call_site or "",
        report.host,
        report.pid or "",
        report.exception or report.note or "",
    )


def _operations(timeline: Timeline) -> list[tuple[bool, tuple[str, ...]]]:
    """Rows of the table of operations, in order: when each began, how long it took, and which rank came last to it."""
    found: dict[Key, list[tuple[int, Bar]]] = {}
    for lane in timeline.lanes:
        for bar in lane.bars:
            found.setdefault((bar.group, bar.sequence), []).append((lane.rank, bar))
    rows: list[tuple[bool, tuple[str, ...]]] = []
    for (group, sequence), bars in sorted(found.items(), key=lambda item: min(bar.start for _, bar in item[1])):
        first_rank, first = min(bars, key=lambda entry: entry[1].start)
        last_rank, last = max(bars, key=lambda entry: entry[1].start)
        end = _envelope([bar for _, bar in bars]).end
        took = "not complete" if end is None else f"{end - first.start:.3g} s"
        behind = f"rank {last_rank}, {last.start - first.start:.3g} s after rank {first_rank}" if len(bars) > 1 else ""
        rows.append((False, (f"{first.start:.3f} s", first.text, f"{group}/{sequence}", took, behind)))
    return rows


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
        moments, places = self._moments, self._places
        if moment <= moments[0]:
            return places[0]
        if moment >= moments[-1]:
            return places[-1]
        right = bisect_right(moments, moment)
        left = right - 1
        share = (moment - moments[left]) / (moments[right] - moments[left])
        return places[left] + share * (places[right] - places[left])


def _knots(timeline: Timeline) -> list[float]:
    """Begin and end of each operation over all ranks, up to the divergence, which is the last knot.

    Without moments that lie within a microsecond of the one before.
    """
    envelopes: dict[Key, list[float]] = {}
    for lane in timeline.lanes:
        for bar in lane.bars:
            if bar.end is not None:
                span = envelopes.setdefault((bar.group, bar.sequence), [bar.start, bar.end])
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
    """All rows, culprits first, with their axis, what happened at its zero, and how the ranks' clocks were aligned."""

    rows: Sequence[Row]
    scale: Scale
    divergence: str
    clocks: str

    @property
    def kinds(self) -> set[str]:
        """The kinds of bars that are drawn, for the legend."""
        return {bar.kind for row in self.rows for bar in row.bars}


def lay_out(incident: Incident, timeline: Timeline) -> Chart:
    """The lanes, culprits first; above 80 ranks those that are not to blame share lanes by what they were in."""
    reports = {report.rank: report for report in incident.ranks}
    everyone = sorted({*incident.participants, *reports, *(lane.rank for lane in timeline.lanes)})
    culprits = [rank for rank in everyone if rank in incident.culprits]
    others = [rank for rank in everyone if rank not in incident.culprits]
    layout = _Layout(incident, timeline, reports)
    rows = [layout.one(rank) for rank in culprits[:CULPRITS]]
    if len(culprits) > CULPRITS:
        rows.append(layout.together(culprits[CULPRITS:]))
    if len(everyone) <= EACH:
        rows += [layout.one(rank) for rank in others]
    else:
        rows += [layout.together(ranks) for ranks in _alike(others, reports)]
    parted = incident.cause not in (Cause.NETWORK, Cause.UNKNOWN)
    what = "here the ranks part" if parted else "the operation that failed"
    return Chart(rows, layout.scale, what, _clocks(timeline))


class _Layout:
    """Lays out the lanes of one timeline."""

    def __init__(self, incident: Incident, timeline: Timeline, reports: Mapping[int, RankReport]) -> None:
        self.scale = Scale(timeline)
        self._incident = incident
        self._timeline = timeline
        self._reports = reports
        self._lanes = {lane.rank: lane for lane in timeline.lanes}
        groups = sorted({bar.group for lane in timeline.lanes for bar in lane.bars} - {timeline.group})
        self._groups = {group: f" g{1 + number % 2}" for number, group in enumerate(groups)}

    def one(self, rank: int) -> Row:
        """The lane of one rank."""
        report = self._reports.get(rank)
        bad = rank in self._incident.culprits
        lane = self._lanes.get(rank)
        bars = [self._bar(bar) for bar in lane.bars] if lane is not None else self._inferred()
        said, place = self._said(report, lane) if bad or lane is None else ("", 0.0)
        about = ""
        if report is not None:
            about = str(report.cause) if bad and report.cause is not None else STATES[report.state]
            about += f" · {report.host}" if report.host else ""
        return Row(str(rank), about, bad, bars, said, place)

    def together(self, ranks: Sequence[int]) -> Row:
        """One lane for ranks that were in the same place: from the first that began to the last that ended."""
        spans: dict[Key, list[Bar]] = {}
        for rank in ranks:
            lane = self._lanes.get(rank)
            for bar in lane.bars if lane is not None else ():
                spans.setdefault((bar.group, bar.sequence), []).append(bar)
        report = self._reports.get(ranks[0])
        return Row(
            name=f"{len(ranks)} ranks",
            about=STATES[report.state] if report is not None else "unknown",
            bad=any(rank in self._incident.culprits for rank in ranks),
            bars=[self._bar(_envelope(bars)) for bars in spans.values()],
            said="" if spans else f"no answer: {ranks_text(ranks)}",
            said_at=self.scale.diverged,
            members=ranks_text(ranks),
        )

    def _bar(self, bar: Bar) -> Drawn:
        kind = "open" if bar.end is None else "failed" if not bar.ok else "ok"
        took = "still in it" if bar.end is None else f"{'ok' if bar.ok else 'failed'}, {duration(bar.end - bar.start)}"
        title = f"{bar.text}\n{bar.group}/{bar.sequence}\nfrom {bar.start:+.6g} s: {took}"
        return self._drawn(kind, bar, title, self._groups.get(bar.group, "") if kind == "ok" else "")

    def _drawn(self, kind: str, bar: Bar, title: str, colour: str = "") -> Drawn:
        end = self._timeline.given_up if bar.end is None else bar.end
        left, right = self.scale.place(bar.start), self.scale.place(max(end, bar.start))
        return Drawn(kind, left, right - left, title, colour)

    def _inferred(self) -> list[Drawn]:
        """A rank that says nothing entered what the other ranks completed with it: when, is not known."""
        spans: dict[int, list[Bar]] = {}
        for lane in self._timeline.lanes:
            for bar in lane.bars:
                if bar.group == self._timeline.group and bar.ok:
                    spans.setdefault(bar.sequence, []).append(bar)
        drawn = []
        for _, bars in sorted(spans.items()):
            whole = _envelope(bars)
            title = f"{whole.text}\n{whole.group}/{whole.sequence}\nthe others completed it, so this rank was in it"
            drawn.append(self._drawn("guess", whole, title))
        return drawn

    def _said(self, report: RankReport | None, lane: Lane | None) -> tuple[str, float]:
        """What kept this rank, and the place where its bars end; nothing where it is in the operation itself."""
        if report is None:
            return "nothing is known", self.scale.diverged
        bars = lane.bars if lane is not None else ()
        if any(bar.end is None for bar in bars):
            return "", 0.0
        cause = str(report.cause or report.state)
        text = report.exception or report.note or (report.stack[-1] if report.stack else report.state)
        ends = [self.scale.place(bar.end) for bar in bars if bar.end is not None]
        place = max([self.scale.diverged, *(end for end in ends if end < _TOO_FAR)])
        return f"{cause}: {text.removesuffix(f': {cause}')}", place


def _envelope(bars: Sequence[Bar]) -> Bar:
    """One operation over several ranks: from the first that began to the last that ended."""
    ends = [bar.end for bar in bars if bar.end is not None]
    return Bar(
        group=bars[0].group,
        sequence=bars[0].sequence,
        text=bars[0].text,
        start=min(bar.start for bar in bars),
        end=max(ends) if len(ends) == len(bars) else None,
        ok=all(bar.ok for bar in bars),
    )


def _alike(ranks: Iterable[int], reports: Mapping[int, RankReport]) -> list[list[int]]:
    """Ranks by what they were in, the largest group first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        report = reports.get(rank)
        key = ("", "", "") if report is None else (report.state, report.operation or "", report.call_site or "")
        found.setdefault(key, []).append(rank)
    return sorted(found.values(), key=lambda group: (-len(group), group))


def _clocks(timeline: Timeline) -> str:
    """How the lanes were laid over each other, and how exact that is."""
    loose = [lane.rank for lane in timeline.lanes if lane.clock == "answer"]
    spreads = [lane.spread for lane in timeline.lanes if lane.spread is not None]
    text = (
        "Seconds from the moment the first rank entered the operation that failed; the scale changes there. Each rank's "
        "moments are by its own monotonic clock, laid over each other by the operations that they completed together"
    )
    text += f" (these fit within {1e3 * max(spreads):.3g} ms)." if spreads else "."
    if loose and len(timeline.lanes) > 1:
        text += f" {ranks_text(loose).capitalize()} had none in common and may be off by half a second."
    return text
