"""The report as one self-contained page: no script, no outside resource, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ncclguard._page import facts, folded, frames, numbered, page, prose, section
from ncclguard.explain.report import Mention, Report

_STYLE = """
.lanes{display:grid;grid-template-columns:repeat(auto-fill,minmax(4.6rem,1fr));gap:.3rem;margin:.5rem 0 .8rem}
.lane{border:1px solid var(--line);border-radius:.3rem;text-align:center;padding:.2rem;font-size:.8rem}
.lane.bad{background:var(--bad);color:var(--bg);border-color:var(--bad)}.lane.wait{background:var(--soft)}
"""
_BAD = frozenset({"missing", "behind", "ahead", "different", "failed"})


def _list(mentions: Sequence[Mention]) -> str:
    rows = (
        f"<li><span "
        f'class="where">{escape(one.file)}:{one.line}</span>{f" ({one.count} times)" if one.count > 1 else ""}<br>'
        f"<code>{escape(one.text)}</code></li>"
        for one in mentions
    )
    return f"<ol>{''.join(rows)}</ol>"


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    return escape(f"{value:,}" if name.startswith("Numel") else str(value))


def _table(report: Report) -> str:
    head = ("rank", "state", "group", "seq", "op", "NumelIn", "NumelOut", "enqueued", "completed")
    left = {"state", "group", "op"}
    cells = "".join(f"<th{' class=t' if name in left else ''}>{name}</th>" for name in head)
    rows = []
    for row in report.ranks:
        values = (
            row.rank,
            row.state,
            row.group,
            row.seq,
            row.op,
            row.numel_in,
            row.numel_out,
            row.enqueued,
            row.completed,
        )
        columns = (
            f"<td{' class=t' if name in left else ''}>{_cell(name, value)}</td>"
            for name, value in zip(head, values, strict=True)
        )
        rows.append(f"<tr{' class=bad' if row.state in _BAD else ''}>{''.join(columns)}</tr>")
    return f'<div class="wrap"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _lanes(report: Report) -> str:
    states: dict[int, str] = {}
    for row in report.ranks:
        if states.get(row.rank) not in _BAD:
            states[row.rank] = row.state
    boxes = (
        f'<div class="lane {"bad" if state in _BAD else "wait" if state == "waiting" else ""}" '
        f'title="{escape(state)}">{rank}<br>{escape(state)}</div>'
        for rank, state in sorted(states.items())
    )
    return f'<div class="lanes">{"".join(boxes)}</div>'


def _decision(report: Report) -> str:
    target = f" {report.without}" if report.without else ""
    overturned = numbered(f"would be overturned by {sentence}" for sentence in report.overturned_by)
    return f"<p><b>{escape(report.decision + target)}</b>: {escape(report.decision_reason)}.</p><p>{prose(report.next_step)}</p>{overturned}"


def render_html(report: Report) -> str:
    """Return the page. Everything that comes from a log is escaped."""
    tags = [
        f"culprits: {', '.join(map(str, report.culprits)) or 'not provable'}",
        f"cause: {report.cause.value}",
        f"class: {report.cause_class} ({report.confidence})",
        f"world size: {report.world_size if report.world_size is not None else 'unknown'} ({report.world_size_basis})",
    ]
    if report.effective_timeout_ms is not None:
        tags.append(f"effective timeout: {report.effective_timeout_ms / 1000:g} s")
    stacks = "".join(
        folded(
            f"rank {one.rank if one.rank is not None else '?'}: {one.name or one.kind} {one.detail[:160]}",
            frames(one.frames),
        )
        for one in report.stacks
    )
    sides = numbered(f"{side.what}: ranks {', '.join(map(str, side.ranks))}" for side in report.sides)
    read = f"read: {len(report.inputs)} file{'' if len(report.inputs) == 1 else 's'}"
    inputs = folded(read, frames(report.inputs[:500])) if report.inputs else ""
    count = len(report.consequences)
    consequences = folded(f"{count} line{'' if count == 1 else 's'}", _list(report.consequences)) if count else ""
    body = "".join(
        (
            f"<h1>{escape(report.summary)}</h1>{facts(tags[1:], bad=tags[:1]) if report.culprits else facts(tags)}",
            f"<p>{escape(report.reason)}</p>" if report.reason else "",
            section("Decision", _decision(report)) if report.incident else "",
            section("What to do next", numbered(report.advice)),
            section("Ranks", (_lanes(report) + _table(report)) if report.ranks else ""),
            section("Sides", sides),
            section("What the size says", numbered(report.arithmetic)),
            section("Evidence, in time order", _list(report.evidence) if report.evidence else ""),
            section("Consequences, not causes", consequences),
            section("Stacks", stacks),
            section("Notes", numbered(report.notes) + inputs),
        )
    )
    return page("ncclguard explain", body, _STYLE)
