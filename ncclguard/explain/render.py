"""The report for people, on a terminal and as a page: who, why, where, what to do, in that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ncclguard.explain.report import Mention, RankRow, Report
from ncclguard.incident import page
from ncclguard.incident.model import FEW_RANKS, ranks_text

#: Rows of the table of ranks in a terminal, and on a page.
SHOWN_ROWS = 64
ROWS = 200
SHOWN_LINES = 12
#: The columns of the table of ranks, and whether each holds text.
COLUMNS = (
    ("rank", False),
    ("state", True),
    ("group", True),
    ("seq", False),
    ("op", True),
    ("NumelIn", False),
    ("NumelOut", False),
    ("enqueued", False),
    ("completed", False),
)
#: States that are marked.
BAD = frozenset({"missing", "behind", "ahead", "different", "failed"})


def render_html(report: Report) -> str:
    """The report as one self-contained page; everything that comes from a log is escaped.

    Raises `PageError` where Jinja2 is not installed.
    """
    tags = [
        f"cause: {report.cause.value}",
        f"class: {report.cause_class} ({report.confidence})",
        f"world size: {report.world_size if report.world_size is not None else 'unknown'} ({report.world_size_basis})",
    ]
    if report.effective_timeout_ms is not None:
        tags.append(f"effective timeout: {report.effective_timeout_ms / 1000:g} s")
    named = f"culprits: {_numbers(report.culprits) if report.culprits else 'not provable'}"
    states: dict[int, str] = {}
    for row in report.ranks:
        if states.get(row.rank) not in BAD:
            states[row.rank] = row.state
    return page.render(
        "explain.html.j2",
        title="ncclguard explain",
        report=report,
        named=[named] if report.culprits else [],
        tags=tags if report.culprits else [named, *tags],
        overturned=[f"would be overturned by {sentence}" for sentence in report.overturned_by],
        states=[(who, state, state in BAD) for who, state in _lanes(states)],
        columns=COLUMNS,
        rows=[(row.state in BAD, cells) for row, cells in _rows(report.ranks, ROWS)],
        sides=[f"{side.what}: ranks {_numbers(side.ranks)}" for side in report.sides],
    )


def _numbers(ranks: Sequence[int]) -> str:
    """Ranks one by one in a job of few ranks, else as runs."""
    return ", ".join(map(str, ranks)) if len(ranks) <= FEW_RANKS else ranks_text(ranks).split(" ", 1)[1]


def _lanes(states: Mapping[int, str]) -> list[tuple[str, str]]:
    """The state of each rank; in a job of many ranks that of runs of them, or of all that share it."""
    if len(states) <= FEW_RANKS:
        return [(str(rank), state) for rank, state in sorted(states.items())]
    runs: list[tuple[int, int, str]] = []
    for rank, state in sorted(states.items()):
        if runs and runs[-1][1] + 1 == rank and runs[-1][2] == state:
            runs[-1] = runs[-1][0], rank, state
        else:
            runs.append((rank, rank, state))
    if len(runs) <= FEW_RANKS:
        return [(str(first) if first == last else f"{first}-{last}", state) for first, last, state in runs]
    together: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        together.setdefault(state, []).append(rank)
    return [(ranks_text(ranks), state) for state, ranks in together.items()]


def _rows(ranks: Sequence[RankRow], most: int) -> list[tuple[RankRow, tuple[str, ...]]]:
    """Rows of the table of ranks, at most so many; in a job of many ranks those that say the same share one."""
    if len(ranks) <= FEW_RANKS:
        return [(row, _cells(row)) for row in ranks][:most]
    places: dict[tuple[str, ...], list[RankRow]] = {}
    for row in ranks:
        places.setdefault(_cells(row)[1:], []).append(row)
    ordered = sorted(places.items(), key=lambda place: (place[1][0].state not in BAD, -len(place[1]), place[1][0].rank))
    found = [(rows[0], (_numbers([row.rank for row in rows]), *cells)) for cells, rows in ordered[:most]]
    rest = [row for _, rows in ordered[most:] for row in rows]
    if rest:
        blank = ("see --json",) + ("",) * (len(COLUMNS) - 2)
        found.append((RankRow(rank=rest[0].rank, state=""), (f"{len(rest):,} more", *blank)))
    return found


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
        console.print(Text(f"  {side.what}: ranks {_numbers(side.ranks)}"), soft_wrap=True)
    if report.ranks:
        console.print(_table(report.ranks))
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


def _cells(row: RankRow) -> tuple[str, ...]:
    return (
        str(row.rank),
        row.state,
        row.group or "-",
        "-" if row.seq is None else str(row.seq),
        row.op or "-",
        *("-" if n is None else f"{n:,}" for n in (row.numel_in, row.numel_out, row.enqueued, row.completed)),
    )


def _table(rows: Sequence[RankRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, is_text in COLUMNS:
        table.add_column(name, justify="left" if is_text else "right")
    for row, cells in _rows(rows, SHOWN_ROWS):
        table.add_row(*map(Text, cells), style="red" if row.state in BAD else None)
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
