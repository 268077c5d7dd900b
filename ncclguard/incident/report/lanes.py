"""The timeline as HTML: one lane per rank, operations as bars, the moment of divergence as a line through all lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from ncclguard._page import folded
from ncclguard.incident.model import Incident, RankReport
from ncclguard.incident.render import duration, ranks_text
from ncclguard.incident.report.scale import GIVEN_UP, Scale
from ncclguard.incident.report.timeline import Bar, Lane, Timeline
from ncclguard.outcome import Cause

#: Above so many ranks those that are not to blame share lanes; above the second number also the culprits do.
EACH: Final = 80
CULPRITS: Final = 48
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

STYLE: Final = """
.tl{position:relative;--who:13.5rem;margin:.6rem 0 0;font-size:.84rem}
.tl .row{display:flex;align-items:stretch;height:1.75rem}
.tl.many .row{height:1.02rem;font-size:.74rem}
.tl .who{width:var(--who);flex:none;padding:0 .5rem;overflow:hidden;white-space:nowrap;text-overflow:ellipsis;
display:flex;align-items:center;gap:.45rem}
.tl .who b{font-weight:600}.tl .who span{color:var(--dim);overflow:hidden;text-overflow:ellipsis}
.tl .track{position:relative;flex:1;border-bottom:1px solid var(--line);overflow:hidden}
.tl .row.bad{background:var(--badsoft)}.tl .row.bad .who b,.tl .row.bad .who span{color:var(--bad)}
.tl i{position:absolute;top:18%;height:64%;min-width:2px;border-radius:2px;background:var(--okbar)}
.tl i.g1{background:#8c7ab8}.tl i.g2{background:#4c9a86}.tl i.failed{background:none;border:1px solid var(--bad)}
.tl i.open{background:repeating-linear-gradient(135deg,var(--wait) 0 5px,transparent 5px 9px);
border:1px solid var(--wait)}
.tl i.guess{background:none;border:1px dashed var(--dim)}
.tl .say{position:absolute;top:0;background:var(--badsoft);line-height:1.7rem;padding:0 .4rem;white-space:nowrap;color:var(--bad);font-weight:600;
overflow:hidden;text-overflow:ellipsis}.tl.many .say{line-height:1rem}
.tl .head .track{border:0;overflow:visible;color:var(--dim)}.tl .head{height:2.5rem!important;font-size:.78rem!important}
.tl .head span.m{position:absolute;bottom:.1rem;transform:translateX(-50%);white-space:nowrap}
.tl .head span.m.l{transform:none}.tl .head span.m.r{transform:translateX(-100%)}
.tl .head span.m.up{bottom:1.2rem;color:var(--bad);font-weight:600}
.tl .line{position:absolute;top:2.4rem;bottom:0;width:0;border-left:2px solid var(--bad);pointer-events:none}
.tl .line.soft{border-left:1px dashed var(--dim)}
.tl .over{position:absolute;top:0;bottom:0;left:var(--who);right:0;pointer-events:none}
.tl .cut{position:absolute;top:2.4rem;bottom:0;pointer-events:none;opacity:.55;
background:repeating-linear-gradient(90deg,transparent 0 5px,var(--line) 5px 6px)}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;font-size:.82rem;color:var(--dim);margin:.5rem 0}
.legend i{display:inline-block;width:1.5rem;height:.7rem;margin-right:.4rem;vertical-align:baseline;border-radius:2px;
background:var(--okbar)}
.legend i.open{background:repeating-linear-gradient(135deg,var(--wait) 0 5px,transparent 5px 9px);
border:1px solid var(--wait)}
.legend i.failed{background:none;border:1px solid var(--bad)}.legend i.guess{background:none;border:1px dashed var(--dim)}
.legend i.cut{background:repeating-linear-gradient(90deg,transparent 0 5px,var(--line) 5px 6px);border:1px solid var(--line)}
@media(max-width:50rem){.tl{--who:7rem}.tl .who span{display:none}}
"""


def lanes(incident: Incident, timeline: Timeline) -> str:
    """Return the lanes and their legend; culprits come first. Above 80 ranks the others
    share lanes by what they were in.
    """
    scale = Scale(timeline)
    reports = {report.rank: report for report in incident.ranks}
    everyone = sorted({*incident.participants, *reports, *(lane.rank for lane in timeline.lanes)})
    culprits = [rank for rank in everyone if rank in incident.culprits]
    others = [rank for rank in everyone if rank not in incident.culprits]
    draw = _Draw(incident, timeline, scale, reports)
    rows = [draw.one(rank) for rank in culprits[:CULPRITS]]
    if len(culprits) > CULPRITS:
        rows.append(draw.together(culprits[CULPRITS:]))
    if len(everyone) <= EACH:
        rows += [draw.one(rank) for rank in others]
    else:
        rows += [draw.together(ranks) for ranks in _alike(others, reports)]
    many = " many" if len(rows) > 20 else ""
    parted = incident.cause not in (Cause.NETWORK, Cause.UNKNOWN)
    drawn = "".join(rows)
    head = _head(scale, "here the ranks part" if parted else "the operation that failed")
    return f'<div class="tl{many}">{head}{drawn}{_over(scale)}</div>{_legend(timeline, scale, drawn)}{_operations(timeline)}'


class _Draw:
    """Draws the lanes of one timeline."""

    def __init__(self, incident: Incident, timeline: Timeline, scale: Scale, reports: dict[int, RankReport]) -> None:
        self._incident = incident
        self._timeline = timeline
        self._scale = scale
        self._reports = reports
        self._lanes = {lane.rank: lane for lane in timeline.lanes}
        groups = sorted({bar.group for lane in timeline.lanes for bar in lane.bars} - {timeline.group})
        self._groups = {group: f" g{1 + number % 2}" for number, group in enumerate(groups)}

    def one(self, rank: int) -> str:
        """The lane of one rank."""
        report = self._reports.get(rank)
        bad = rank in self._incident.culprits
        lane = self._lanes.get(rank)
        bars = "".join(map(self._bar, lane.bars)) if lane is not None else self._inferred(report)
        said = self._said(report, lane) if bad or lane is None else ""
        about = ""
        if report is not None:
            about = str(report.cause) if bad and report.cause is not None else STATES[report.state]
            about += f" · {report.host}" if report.host else ""
        name = f"<b>{rank}</b><span>{escape(about)}</span>"
        return f'<div class="row{" bad" if bad else ""}"><div class="who">{name}</div><div class="track">{bars}{said}</div></div>'

    def together(self, ranks: Sequence[int]) -> str:
        """One lane for ranks that were in the same place: from the first that began to the last that ended."""
        spans: dict[tuple[str, int], list[Bar]] = {}
        for rank in ranks:
            lane = self._lanes.get(rank)
            for bar in lane.bars if lane is not None else ():
                spans.setdefault((bar.group, bar.sequence), []).append(bar)
        bars = "".join(self._bar(_envelope(members)) for members in spans.values())
        bad = any(rank in self._incident.culprits for rank in ranks)
        report = self._reports.get(ranks[0])
        state = STATES[report.state] if report is not None else "unknown"
        text = f"{len(ranks)} ranks"
        name = f'<b title="{escape(ranks_text(ranks))}">{escape(text)}</b><span>{escape(state)}</span>'
        said = "" if bars else _say(self._scale.diverged, f"no answer: {ranks_text(ranks)}")
        return f'<div class="row{" bad" if bad else ""}"><div class="who">{name}</div><div class="track">{bars}{said}</div></div>'

    def _bar(self, bar: Bar) -> str:
        end = self._timeline.given_up if bar.end is None else bar.end
        left, right = self._scale.place(bar.start), self._scale.place(max(end, bar.start))
        kind = "open" if bar.end is None else "failed" if not bar.ok else "ok"
        place = f"{bar.group}/{bar.sequence}"
        took = "still in it" if bar.end is None else f"{'ok' if bar.ok else 'failed'}, {duration(bar.end - bar.start)}"
        title = escape(f"{bar.text}\n{place}\nfrom {bar.start:+.6g} s: {took}")
        colour = self._groups.get(bar.group, "") if kind == "ok" else ""
        return (
            f'<i class="{kind}{colour}" style="left:{100 * left:.2f}%;width:{100 * max(right - left, 0.0):.2f}%" '
            f'title="{title}"></i>'
        )

    def _inferred(self, report: RankReport | None) -> str:
        """A rank that says nothing entered what the others completed with it: when, is not known."""
        spans: dict[int, list[Bar]] = {}
        for lane in self._timeline.lanes:
            for bar in lane.bars:
                if bar.group == self._timeline.group and bar.ok:
                    spans.setdefault(bar.sequence, []).append(bar)
        parts = []
        for sequence, bars in sorted(spans.items()):
            whole = _envelope(bars)
            left, right = self._scale.place(whole.start), self._scale.place(whole.end or whole.start)
            title = escape(f"{whole.text}\n{whole.group}/{sequence}\nthe others completed it, so this rank was in it")
            parts.append(
                f'<i class="guess" style="left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%" title="{title}"></i>'
            )
        return "".join(parts)

    def _said(self, report: RankReport | None, lane: Lane | None) -> str:
        """What kept this rank, written where its bars end; nothing where it is in the operation itself."""
        if report is None:
            return _say(self._scale.diverged, "nothing is known")
        inside = lane is not None and any(bar.end is None for bar in lane.bars)
        if inside:
            return ""
        cause = str(report.cause or report.state)
        text = report.exception or report.note or (report.stack[-1] if report.stack else report.state)
        ends = [self._scale.place(bar.end) for bar in lane.bars if bar.end is not None] if lane is not None else []
        place = max([self._scale.diverged, *(end for end in ends if end < _TOO_FAR)])
        return _say(place, f"{cause}: {text.removesuffix(f': {cause}')}")


def _say(place: float, text: str) -> str:
    return f'<div class="say" style="left:{100 * place:.2f}%;right:0" title="{escape(text)}">{escape(text[:200])}</div>'


def _envelope(bars: Sequence[Bar]) -> Bar:
    ends = [bar.end for bar in bars if bar.end is not None]
    return Bar(
        group=bars[0].group,
        sequence=bars[0].sequence,
        text=bars[0].text,
        start=min(bar.start for bar in bars),
        end=max(ends) if len(ends) == len(bars) else None,
        ok=all(bar.ok for bar in bars),
    )


def _alike(ranks: Iterable[int], reports: dict[int, RankReport]) -> list[list[int]]:
    """Ranks by what they were in, the largest group first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank in ranks:
        report = reports.get(rank)
        key = ("", "", "") if report is None else (report.state, report.operation or "", report.call_site or "")
        found.setdefault(key, []).append(rank)
    return sorted(found.values(), key=lambda group: (-len(group), group))


def _head(scale: Scale, what: str) -> str:
    marks = [
        f'<span class="m up" style="left:{100 * scale.diverged:.2f}%">{escape(what)}</span>',
        f'<span class="m" style="left:{100 * scale.diverged:.2f}%">0 s</span>',
        f'<span class="m r" style="left:{100 * GIVEN_UP:.2f}%">given up, {duration(scale.given_up)}</span>',
    ]
    if scale.begin < 0:
        marks.append(f'<span class="m l" style="left:1%">{scale.begin:.3g} s</span>')
    return f'<div class="row head"><div class="who"></div><div class="track">{"".join(marks)}</div></div>'


def _over(scale: Scale) -> str:
    cuts = "".join(
        f'<div class="cut" style="left:{100 * left:.2f}%;width:{100 * (right - left):.2f}%" title="{duration(span)}"></div>'
        for left, right, span in scale.cuts
    )
    lines = (
        f'<div class="line" style="left:{100 * scale.diverged:.2f}%"></div>'
        f'<div class="line soft" style="left:{100 * GIVEN_UP:.2f}%"></div>'
    )
    return f'<div class="over">{cuts}{lines}</div>'


def _legend(timeline: Timeline, scale: Scale, drawn: str) -> str:
    meanings = {
        "ok": "completed",
        "open": "still waiting in it",
        "failed": "failed",
        "guess": "known from the others only",
    }
    entries = [
        f'<span><i class="{kind}"></i>{text}</span>' for kind, text in meanings.items() if f'<i class="{kind}' in drawn
    ]
    if scale.cuts:
        entries.append('<span><i class="cut"></i>a long stretch, drawn shorter</span>')
    return f'<div class="legend">{"".join(entries)}</div><p class="where">{escape(_clocks(timeline))}</p>'


def _operations(timeline: Timeline) -> str:
    """The operations in order: from which rank on they were waited for, and which came last."""
    found: dict[tuple[str, int], list[tuple[int, Bar]]] = {}
    for lane in timeline.lanes:
        for bar in lane.bars:
            found.setdefault((bar.group, bar.sequence), []).append((lane.rank, bar))
    rows = []
    for (group, sequence), bars in sorted(found.items(), key=lambda item: min(bar.start for _, bar in item[1])):
        first = min(bars, key=lambda entry: entry[1].start)
        last = max(bars, key=lambda entry: entry[1].start)
        ends = [bar.end for _, bar in bars if bar.end is not None]
        took = f"{max(ends) - first[1].start:.3g} s" if len(ends) == len(bars) else "not complete"
        behind = (
            f"rank {last[0]}, {last[1].start - first[1].start:.3g} s after rank {first[0]}" if len(bars) > 1 else ""
        )
        cells = (f"{first[1].start:.3f} s", first[1].text, f"{group}/{sequence}", took, behind)
        texts = "".join(
            f"<td{' class=t' if i in (1, 2, 4) else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells)
        )
        rows.append(f"<tr>{texts}</tr>")
    head = (
        "<tr><th>at</th><th class=t>operation</th><th class=t>number</th><th>took</th><th class=t>came last</th></tr>"
    )
    table = f'<div class="wrap"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
    return folded(f"the {len(rows)} operations, and who came last to each", table)


def _clocks(timeline: Timeline) -> str:
    """How the lanes were laid over each other, and how exact that is."""
    loose = [lane.rank for lane in timeline.lanes if lane.clock == "answer"]
    spreads = [lane.spread for lane in timeline.lanes if lane.spread is not None]
    text = "Seconds from the moment the first rank entered the operation that failed; the scale changes there. "
    text += "Each rank's moments are by its own monotonic clock, laid over each other by the operations that they completed together"
    text += f" (these fit within {1e3 * max(spreads):.3g} ms)." if spreads else "."
    if loose and len(timeline.lanes) > 1:
        text += f" {ranks_text(loose).capitalize()} had none in common and may be off by half a second."
    return text
