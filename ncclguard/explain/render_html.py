"""The report as one self-contained page: no script, no outside resource, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ncclguard.explain.report import Mention, Report

_STYLE = """
:root{color-scheme:light dark;--fg:#1a1d21;--bg:#fff;--soft:#f2f4f7;--line:#d5dae1;--bad:#b3261e;--ok:#4a6b8a}
@media(prefers-color-scheme:dark){:root{--fg:#e4e7eb;--bg:#15181c;--soft:#20252b;--line:#3a424c;--bad:#ff8a80;--ok:#8fb4d6}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--fg);background:var(--bg);
max-width:75rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.35rem}h2{font-size:1.05rem;margin-top:1.8rem}table{border-collapse:collapse;width:100%;font-size:.88rem}
td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td.t,th.t{text-align:left}tr.bad td{color:var(--bad);font-weight:600}.wrap{overflow-x:auto}
code,pre{font:13px/1.45 ui-monospace,monospace}li code{word-break:break-word}.where{color:var(--ok)}
.facts{display:flex;flex-wrap:wrap;gap:.6rem;padding:0;list-style:none}
.facts li{background:var(--soft);padding:.4rem .8rem;border-radius:.4rem}
.lanes{display:grid;grid-template-columns:repeat(auto-fill,minmax(3.2rem,1fr));gap:.3rem}
.lane{border:1px solid var(--line);border-radius:.3rem;text-align:center;padding:.2rem;font-size:.8rem}
.lane.bad{background:var(--bad);color:var(--bg);border-color:var(--bad)}.lane.wait{background:var(--soft)}
details{margin:.4rem 0}
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


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _items(texts: Iterable[str]) -> str:
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ol>{rows}</ol>" if rows else ""


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
    facts = "".join(f"<li>{escape(tag)}</li>" for tag in tags)
    stacks = "".join(
        f"<details><summary>rank {one.rank if one.rank is not None else '?'}: {escape(one.name or one.kind)} "
        f"{escape(one.detail[:160])}</summary>"
        f"<pre>{escape(chr(10).join(one.frames))}</pre></details>"
        for one in report.stacks
    )
    sides = _items(f"{side.what}: ranks {', '.join(map(str, side.ranks))}" for side in report.sides)
    consequences = (
        f"<details><summary>{len(report.consequences)} lines</summary>{_list(report.consequences)}</details>"
        if report.consequences
        else ""
    )
    body = "".join(
        (
            f"<h1>{escape(report.summary)}</h1><ul class=facts>{facts}</ul>",
            f"<p>{escape(report.reason)}</p>" if report.reason else "",
            _section("What to do next", _items(report.advice)),
            _section("Ranks", (_lanes(report) + _table(report)) if report.ranks else ""),
            _section("Sides", sides),
            _section("What the size says", _items(report.arithmetic)),
            _section("Evidence, in time order", _list(report.evidence) if report.evidence else ""),
            _section("Consequences, not causes", consequences),
            _section("Stacks", stacks),
            _section("Notes", _items([*report.notes, *(f"read: {name}" for name in report.inputs[:50])])),
        )
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width">'
        f"<title>ncclguard explain</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )
