"""The report as one self-contained page: who, why, what to do, the timeline, the stacks, and every rank."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from ncclguard import _page
from ncclguard.incident.model import Incident, RankReport
from ncclguard.incident.render import MEANING, duration, ranks_text
from ncclguard.incident.report import lanes
from ncclguard.incident.report.document import Document
from ncclguard.outcome import Cause

#: Culprits that get a card of their own, and ranks up to which the table is open.
CARDS: Final = 16
OPEN_TABLE: Final = 16

_STYLE: Final = """
.card{border:1px solid var(--line);border-left:4px solid var(--bad);border-radius:.4rem;padding:.6rem .9rem;margin:.6rem 0}
.card h3{font-size:1rem;margin:0 0 .2rem}.card p{margin:.15rem 0}
td:last-child{white-space:normal;min-width:16rem}
.todo{border-left:4px solid var(--ok);background:var(--soft);padding:.6rem .9rem;border-radius:.4rem;max-width:none}
"""


def render_html(document: Document) -> str:
    """Return the page of a report; everything that came from a program is escaped, and
    nothing is loaded from elsewhere.
    """
    incident = document.incident
    body = "".join(
        (
            f'<p class="where">ncclguard incident {escape(incident.id)}</p><h1>{escape(incident.summary)}</h1>',
            _facts(document),
            _page.section("What to do next", f'<p class="todo">{_page.prose(incident.advice)}</p>'),
            _page.section("Who held the others up", _culprits(incident)),
            _page.section("Sides", _sides(incident)),
            _page.section("Timeline", _timeline(document)),
            _page.section("Ranks", _ranks(incident)),
            _page.section("About this report", _about(document)),
        )
    )
    return _page.page(f"{incident.cause}: {incident.op} {incident.op_id}", body, lanes.STYLE + _STYLE)


def _facts(document: Document) -> str:
    incident = document.incident
    named = ranks_text(incident.culprits) if incident.culprits else "nobody is named"
    gone = {report.rank for report in incident.ranks} - set(incident.participants)
    count = f"{len(incident.participants)} ranks of {document.world_size}"
    tags = [f"goes on with {count}" if gone else count]
    if incident.timeout is not None:
        passed = "passed" if incident.deadline_expired else "not passed"
        tags.append(f"limit {duration(incident.timeout)}, {passed}")
    tags.append(f"tries: {incident.attempts}")
    if not incident.agreed:
        tags.append("the view of one rank: it could not agree with the others")
    if incident.torn:
        tags.append("the tensor is torn: it holds neither its input nor the result")
    return _page.facts(tags, bad=[f"{named}: {incident.cause}"])


def _culprits(incident: Incident) -> str:
    reports = [report for report in incident.ranks if report.rank in incident.culprits]
    cards = [_card(report) for report in reports[:CARDS]]
    if len(reports) > CARDS:
        rest = ranks_text(report.rank for report in reports[CARDS:])
        cards.append(f"<p>and {escape(rest)}: see the table of ranks</p>")
    unreported = sorted(set(incident.culprits) - {report.rank for report in reports})
    if unreported:
        cards.append(f"<p>{escape(ranks_text(unreported))}: nothing more is known.</p>")
    if not incident.culprits:
        cards.append(f"<p>Nobody is named. {escape(incident.cause.value)}: {escape(MEANING[incident.cause])}.</p>")
    return "".join(cards)


def _card(report: RankReport) -> str:
    cause = report.cause or Cause.UNKNOWN
    lines = [f"<h3>Rank {report.rank}: {cause.value}</h3><p>{escape(MEANING[cause].capitalize())}.</p>"]
    if report.place:
        lines.append(f'<p class="dim">{escape(report.place)}</p>')
    if report.exception:
        lines.append(f"<p>Raised <code>{escape(report.exception)}</code></p>")
    if report.note:
        lines.append(f"<p>{escape(report.note)}</p>")
    if report.operation:
        text = f"{'Is in' if report.inside else 'Last was in'} <code>{escape(report.operation)}</code>"
        text += f", called at <code>{escape(report.call_site)}</code>" if report.call_site else ""
        text += f", for {duration(report.age)}" if report.inside and report.age is not None else ""
        lines.append(f"<p>{text}</p>")
    if report.stack:
        lines.append(_page.folded(f"stack, innermost: {report.stack[-1]}", _page.frames(report.stack)))
    for name, stack in report.threads:
        where = f": {stack[-1]}" if stack else ""
        lines.append(_page.folded(f"thread {name}{where}", _page.frames(stack)))
    return f'<div class="card">{"".join(lines)}</div>'


def _sides(incident: Incident) -> str:
    rows = "".join(
        f"<li><code>{escape(text)}</code> by {escape(ranks_text(ranks))}</li>" for text, ranks in incident.sides
    )
    return f"<ol>{rows}</ol>" if rows else ""


def _timeline(document: Document) -> str:
    if document.timeline is None:
        return "<p>No rank could say what it did before.</p>"
    return lanes.lanes(document.incident, document.timeline)


def _ranks(incident: Incident) -> str:
    if not incident.ranks:
        return ""
    head = ("rank", "cause", "state", "operation", "for", "called at", "host", "pid", "more")
    left = set(head[1:4]) | set(head[5:7]) | {"more"}
    cells = "".join(f"<th{' class=t' if name in left else ''}>{name}</th>" for name in head)
    rows = "".join(_row(report, incident) for report in incident.ranks)
    table = f'<div class="wrap"><table><thead><tr>{cells}</tr></thead><tbody>{rows}</tbody></table></div>'
    if len(incident.ranks) <= OPEN_TABLE:
        return table
    return _page.folded(f"all {len(incident.ranks)} ranks", table)


def _row(report: RankReport, incident: Incident) -> str:
    values: Iterable[tuple[str, bool]] = (
        (str(report.rank), False),
        (str(report.cause or ""), True),
        (lanes.STATES[report.state], True),
        (report.operation or "", True),
        ("" if report.age is None else f"{report.age:.3g} s", False),
        (report.call_site or "", True),
        (report.host, True),
        (str(report.pid or ""), False),
        (report.exception or report.note or "", True),
    )
    cells = "".join(f"<td{' class=t' if text else ''}>{escape(value)}</td>" for value, text in values)
    return f"<tr{' class=bad' if report.rank in incident.culprits else ''}>{cells}</tr>"


def _about(document: Document) -> str:
    incident = document.incident
    lines = [
        f"Operation {incident.op_id}, group {incident.group}, generation {incident.generation}; job {document.job}.",
        f"Written by rank {document.written_by} on {document.host} at {document.written_at} by its own clock.",
        f"ncclguard {document.ncclguard}, torch {document.torch}.",
    ]
    return "".join(f'<p class="where">{escape(line)}</p>' for line in lines)
