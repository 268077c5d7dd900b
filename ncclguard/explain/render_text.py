"""The report on a terminal: who, why, where, what to do, in that order."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ncclguard.explain.report import Mention, RankRow, Report

SHOWN_ROWS = 64
SHOWN_LINES = 12


def print_report(report: Report, console: Console) -> None:
    """Print the report; nothing in the logs' text is taken for markup."""
    console.print(Text(report.summary, style="bold"), soft_wrap=True)
    if not report.incident:
        _notes(report, console)
        return
    target = f" {report.without}" if report.without else ""
    console.print(Text(f"Decision: {report.decision}{target}: {report.decision_reason}.", style="bold"), soft_wrap=True)
    console.print(Text(f"Next: {report.next_step}"), soft_wrap=True)
    if report.reason:
        console.print(Text(f"Why: {report.reason}."), soft_wrap=True)
    for sentence in report.overturned_by:
        console.print(Text(f"Would be overturned by: {sentence}."), soft_wrap=True)
    if report.collective is not None:
        console.print(Text(f"Collective: {_collective(report)}"), soft_wrap=True)
    for sentence in report.arithmetic:
        console.print(Text(f"Size: {sentence}."), soft_wrap=True)
    if report.effective_timeout_ms is not None:
        console.print(Text(f"Effective timeout: {report.effective_timeout_ms / 1000:g} s"))
    for side in report.sides:
        console.print(Text(f"  {side.what}: ranks {', '.join(map(str, side.ranks[:32]))}"), soft_wrap=True)
    if report.ranks:
        console.print(_table(report.ranks))
        if len(report.ranks) > SHOWN_ROWS:
            console.print(Text(f"{len(report.ranks) - SHOWN_ROWS} more rows: see --json"))
    _mentions("Evidence, in time order", report.evidence, console)
    _mentions("Consequences, not causes", report.consequences, console)
    for stack in report.stacks[:4]:
        console.print(Text(f"Stack of rank {stack.rank if stack.rank is not None else '?'}:"))
        for frame in stack.frames[-6:]:
            console.print(Text(f"    {frame}"), soft_wrap=True)
    console.print(Text("What to do next", style="bold"))
    for number, sentence in enumerate(report.advice, 1):
        console.print(Text(f"  {number}. {sentence}"), soft_wrap=True)
    _notes(report, console)


def _collective(report: Report) -> str:
    one = report.collective
    assert one is not None
    parts = [one.op or "unknown operation"]
    for name, value in (("seq", one.seq), ("NumelIn", one.numel_in), ("NumelOut", one.numel_out), ("group", one.group)):
        if value is not None:
            parts.append(f"{name} {value:,}" if isinstance(value, int) and name != "seq" else f"{name} {value}")
    return ", ".join(parts)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _table(rows: Sequence[RankRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "state", "group", "seq", "op", "NumelIn", "NumelOut", "enqueued", "completed"):
        table.add_column(name, justify="left" if name in ("state", "group", "op") else "right")
    for row in rows[:SHOWN_ROWS]:
        style = "red" if row.state in ("missing", "behind", "ahead", "different", "failed") else None
        seq = "-" if row.seq is None else str(row.seq)
        table.add_row(
            str(row.rank),
            row.state,
            Text(row.group or "-"),
            seq,
            row.op or "-",
            _cell(row.numel_in),
            _cell(row.numel_out),
            _cell(row.enqueued),
            _cell(row.completed),
            style=style,
        )
    return table


def _mentions(title: str, mentions: Sequence[Mention], console: Console) -> None:
    if not mentions:
        return
    console.print(Text(title, style="bold"))
    for mention in mentions[:SHOWN_LINES]:
        times = f" (x{mention.count})" if mention.count > 1 else ""
        console.print(Text(f"  {mention.file}:{mention.line}{times}: {mention.text[:240]}"), soft_wrap=True)
    if len(mentions) > SHOWN_LINES:
        console.print(Text(f"  and {len(mentions) - SHOWN_LINES} more: see --json"))


def _notes(report: Report, console: Console) -> None:
    for note in report.notes:
        console.print(Text(f"Note: {note}."), soft_wrap=True)
