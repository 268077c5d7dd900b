"""The report for people, on a terminal and as a page: who, why, where, what to do, in that order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ncclguard_explain import page
from ncclguard_explain.cause import WORD
from ncclguard_explain.language import Message, joined, say, told, tr
from ncclguard_explain.ranks import FEW_RANKS, ranks_text
from ncclguard_explain.report import CONFIDENCE, Mention, RankRow, Report, Side

#: Rows of the table of ranks in a terminal, and on a page.
SHOWN_ROWS = 64
ROWS = 200
SHOWN_LINES = 12
#: The columns of the table of ranks, and whether each holds text.
COLUMNS = (
    (tr("rank"), False),
    (tr("state"), True),
    (tr("group"), True),
    ("seq", False),
    (tr("operation"), True),
    ("NumelIn", False),
    ("NumelOut", False),
    (tr("enqueued"), False),
    (tr("completed"), False),
)
#: States that are marked.
BAD = frozenset({"missing", "behind", "ahead", "different", "failed"})
#: The words for the states of ranks, for decisions, and for how the number of ranks is known.
STATES = {
    "waiting": tr("waiting", "state"),
    "missing": tr("missing", "state"),
    "behind": tr("behind", "state"),
    "ahead": tr("ahead", "state"),
    "different": tr("different", "state"),
    "failed": tr("failed", "state"),
    "unknown": tr("unknown", "state"),
}
DECISIONS = {
    "restart": tr("restart", "decision"),
    "restart-without": tr("restart-without", "decision"),
    "fix-code": tr("fix-code", "decision"),
    "fix-environment": tr("fix-environment", "decision"),
    "raise-limit": tr("raise-limit", "decision"),
    "unknown": tr("unknown", "decision"),
}
BASES = {
    "unknown": tr("unknown", "basis"),
    "given": tr("given", "basis"),
    "stated": tr("stated", "basis"),
    "flight recorder": tr("flight recorder", "basis"),
    "element counts": tr("element counts", "basis"),
    "launcher": tr("launcher", "basis"),
    "highest rank seen": tr("highest rank seen", "basis"),
}


def render_html(report: Report) -> str:
    """The report as one self-contained page, all of a log escaped. Raises `PageError` without Jinja2."""
    tags = [
        tr("cause: {cause}", cause=WORD[report.cause]),
        tr("class: {name} ({confidence})", name=report.cause_class, confidence=CONFIDENCE[report.confidence]),
        tr(
            "world size: {size} ({basis})",
            size=tr("unknown", "basis") if report.world_size is None else report.world_size,
            basis=BASES[report.world_size_basis],
        ),
    ]
    if report.effective_timeout_ms is not None:
        tags.append(tr("effective timeout: {seconds:g} s", seconds=report.effective_timeout_ms / 1000))
    rows = _rows(report.ranks, ROWS)
    filled = _filled(rows)
    who = _numbers(report.culprits) if report.culprits else ", ".join(map(say, report.places)) or tr("not provable")
    named = tr("culprits: {ranks}", ranks=who)
    states: dict[int, str] = {}
    for row in report.ranks:
        if states.get(row.rank) not in BAD:
            states[row.rank] = row.state
    return page.render(
        "explain.html.j2",
        title="ncclguard explain",
        report=report,
        named=[named] if report.culprits or report.places else [],
        tags=tags if report.culprits or report.places else [named, *tags],
        decision=_decision(report),
        states_text=STATES,
        overturned=[tr("would be overturned by {sentence}", sentence=sentence) for sentence in report.overturned_by],
        states=[(who, state, state in BAD) for who, state in _lanes(states)],
        columns=[COLUMNS[index] for index in filled],
        rows=[(row.state in BAD, [cells[index] for index in filled]) for row, cells in rows],
        sides=[_side(side) for side in report.sides],
    )


def _decision(report: Report) -> Message:
    decision = DECISIONS[report.decision]
    if report.without:
        return tr("{decision} {without}", decision=decision, without=report.without)
    return decision


def _side(side: Side) -> Message:
    if len(side.ranks) == 1:
        return tr("{what}: rank {rank}", what=side.what, rank=side.ranks[0])
    return tr("{what}: ranks {numbers}", what=side.what, numbers=_numbers(side.ranks))


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
    return [(say(ranks_text(ranks)), state) for state, ranks in together.items()]


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
        blank = (told("see --json"),) + ("",) * (len(COLUMNS) - 2)
        found.append((RankRow(rank=rest[0].rank, state=""), (told("{count:,} more", count=len(rest)), *blank)))
    return found


def print_report(report: Report, console: Console) -> None:
    """Print the report; nothing in the logs' text is taken for markup."""

    def line(message: Message, style: str = "") -> None:
        console.print(Text(say(message), style=style), soft_wrap=True)

    console.print(Text(say(report.summary), style="bold"), soft_wrap=True)
    if not report.incident:
        _notes(report, console)
        return
    decided = tr("Decision: {decision}: {reason}.", decision=_decision(report), reason=report.decision_reason)
    line(decided, "bold")
    line(tr("Next: {step}", step=report.next_step))
    if report.reason:
        sure = CONFIDENCE[report.culprit_confidence]
        if report.culprits or report.places:
            line(tr("Why ({confidence} confidence): {reason}.", confidence=sure, reason=report.reason))
        else:
            line(tr("Why: {reason}.", reason=report.reason))
    if report.confidence == "low" and report.cause_class != "unknown":
        text = tr(
            "A common reading of so little evidence: {name}: {reason}.",
            name=report.cause_class,
            reason=report.class_reason,
        )
        line(text)
    for sentence in report.overturned_by:
        line(tr("Would be overturned by: {sentence}.", sentence=sentence))
    if report.collective is not None:
        line(tr("Collective: {collective}", collective=_collective(report)))
    for sentence in report.arithmetic:
        line(tr("Size: {sentence}.", sentence=sentence))
    if report.effective_timeout_ms is not None:
        line(tr("Effective timeout: {seconds:g} s", seconds=report.effective_timeout_ms / 1000))
    for side in report.sides:
        console.print(Text(f"  {say(_side(side))}"), soft_wrap=True)
    if report.ranks:
        console.print(_table(report.ranks))
    _mentions(tr("Evidence, in time order"), report.evidence, console)
    _mentions(tr("Consequences, not causes"), report.consequences, console)
    for stack in report.stacks[:4]:
        untold = tr("Stack of a process whose rank nothing tells:")
        line(untold if stack.rank is None else tr("Stack of rank {rank}:", rank=stack.rank))
        for frame in stack.frames[-6:]:
            console.print(Text(f"    {frame}"), soft_wrap=True)
    if report.further:
        line(tr("What else to do"), "bold")
    for number, sentence in enumerate(report.further, 1):
        console.print(Text(f"  {number}. {say(sentence)}"), soft_wrap=True)
    _notes(report, console)


def _collective(report: Report) -> Message:
    one = report.collective
    assert one is not None
    parts = [one.op or tr("unknown operation")]
    for name, value in (("seq", one.seq), ("NumelIn", one.numel_in), ("NumelOut", one.numel_out)):
        if value is not None:
            parts.append(f"{name} {value:,}" if name != "seq" else f"{name} {value}")
    if one.group is not None:
        parts.append(tr("group {group}", group=one.group))
    return joined(", ", parts)


def _cells(row: RankRow) -> tuple[str, ...]:
    return (
        str(row.rank),
        say(STATES[row.state]) if row.state else "",
        row.group or "-",
        "-" if row.seq is None else str(row.seq),
        row.op or "-",
        *("-" if n is None else f"{n:,}" for n in (row.numel_in, row.numel_out, row.enqueued, row.completed)),
    )


def _filled(rows: Sequence[tuple[RankRow, tuple[str, ...]]]) -> list[int]:
    """Return which columns hold a value in any row."""
    return [
        index for index in range(len(COLUMNS)) if index < 2 or any(cells[index] not in ("-", "") for _, cells in rows)
    ]


def _table(rows: Sequence[RankRow]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = _rows(rows, SHOWN_ROWS)
    filled = _filled(shown)
    for index in filled:
        name, is_text = COLUMNS[index]
        table.add_column(say(name) if isinstance(name, Message) else name, justify="left" if is_text else "right")
    for row, cells in shown:
        table.add_row(*(Text(cells[index]) for index in filled), style="red" if row.state in BAD else None)
    return table


def _mentions(title: Message, mentions: Sequence[Mention], console: Console) -> None:
    if not mentions:
        return
    console.print(Text(say(title), style="bold"))
    for mention in mentions[:SHOWN_LINES]:
        times = f" (x{mention.count})" if mention.count > 1 else ""
        console.print(Text(f"  {mention.file}:{mention.line}{times}: {mention.text[:240]}"), soft_wrap=True)
    if len(mentions) > SHOWN_LINES:
        more = told("and {count} more: see --json", count=len(mentions) - SHOWN_LINES)
        console.print(Text(f"  {more}"))


def _notes(report: Report, console: Console) -> None:
    for note in report.notes:
        console.print(Text(told("Note: {note}.", note=note)), soft_wrap=True)
