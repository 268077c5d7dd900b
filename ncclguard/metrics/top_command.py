"""`ncclguard top`: a live view of the ranks of a job on this host."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ncclguard.command_line import described
from ncclguard.metrics import records
from ncclguard.metrics.control import ControlError, ask, choose
from ncclguard.metrics.settings import shown

EXIT_CODES = {0: "shown, until Ctrl-C", 2: "there is no such job of this user on this host, or no rank answers"}
EXAMPLES = {
    "ncclguard top": "live, where one job runs on this host",
    "ncclguard top --job 4711 --interval 5": "one of several, by the id of its scheduler or launcher",
    "ncclguard top --once > top.txt": "one picture, as in any pipe",
}
#: Rows of a table; of larger jobs the most telling ones are shown.
MAX_ROWS = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Show until Ctrl-C; 0, or 2 when there is no such job. `--once` and a stdout that is no terminal: one picture."""
    options = build_parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        job, ranks = choose(options.job)
        if options.once or not console.is_terminal:
            console.print(view(job, statuses(ranks)))
            return 0
        with Live(view(job, statuses(ranks)), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(options.interval)
                job, ranks = choose(job)
                live.update(view(job, statuses(ranks)), refresh=True)
    except KeyboardInterrupt:
        return 0
    except ControlError as error:
        print(f"ncclguard top: {error}", file=sys.stderr)
        return 2


def statuses(ranks: dict[int, Path]) -> dict[int, dict[str, Any] | str]:
    """Rank -> what it says, or why it says nothing."""
    found: dict[int, dict[str, Any] | str] = {}
    for rank, path in sorted(ranks.items()):
        try:
            found[rank] = ask(path, {"command": "status"})
        except ControlError as error:
            found[rank] = str(error)
    return found


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="ncclguard top",
        description="Show the ranks of a job on this host: what they are in, how long they wait, and who comes last. The job "
        "needs setup_nccl_monitoring(). Ranks of other hosts are in the table of arrivals only.",
    )
    parser.add_argument("--job", help="name of the job; not needed when there is one on this host")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two pictures (default 1)")
    return described(parser, EXAMPLES, EXIT_CODES)


# ---------------------------------------------------------------------- the picture


def view(job: str, statuses: Mapping[int, dict[str, Any] | str]) -> Group:
    """Ranks, stragglers, operations and changed settings; `statuses` by rank, a text where a rank did not answer."""
    answers = {rank: status for rank, status in statuses.items() if not isinstance(status, str)}
    parts: list[RenderableType] = [_title(job, statuses, answers), _ranks(statuses)]
    if answers:
        first = answers[min(answers)]
        parts += _stragglers(first)
        parts.append(_operations(first))
        parts += _settings(first)
    return Group(*parts)


def _title(job: str, statuses: Mapping[int, object], answers: Mapping[int, dict[str, Any]]) -> Text:
    size = max((status["snapshot"]["world_size"] for status in answers.values()), default=0)
    hosts = sorted({status["snapshot"]["host"] for status in answers.values()})
    hanging = [rank for rank, status in answers.items() if status["snapshot"]["hang"]]
    text = Text(
        f"job {job}: {len(statuses)} of {size or '?'} ranks are on this host ({', '.join(hosts) or 'no answer'})"
    )
    if size > len(statuses):
        text.append("; of the others only arrivals are known here", style="dim")
    if hanging:
        text.append(f"  WAITING FOR LONG: ranks {', '.join(map(str, hanging))}", style="bold red")
    return text


def _ranks(statuses: Mapping[int, dict[str, Any] | str]) -> Table:
    table = Table(title="ranks", title_justify="left")
    for name in ("rank", "pid", "now in", "since s", "limit s", "operations", "failed", "waited s"):
        table.add_column(name, justify="left" if name == "now in" else "right", overflow="fold")
    ordered = sorted(statuses.items(), key=_urgency)[:MAX_ROWS]
    for rank, status in sorted(ordered):
        if isinstance(status, str):
            table.add_row(str(rank), "-", Text(status, style="red"), "", "", "", "", "")
            continue
        snapshot = status["snapshot"]
        series, calls = snapshot["series"], snapshot["open"]
        oldest = max(calls, key=lambda call: call["age"], default=None)
        failed = sum(sum(one["failures"].values()) for one in series)
        table.add_row(
            str(rank),
            str(snapshot["pid"]),
            Text(oldest["text"], style="red" if oldest["late"] else "yellow") if oldest else Text("-", style="dim"),
            f"{oldest['age']:.1f}" if oldest else "",
            f"{oldest['limit']:g}" if oldest else "",
            str(sum(one["count"] for one in series)),
            Text(str(failed), style="red" if failed else ""),
            f"{sum(one['waited'] for one in series):.2f}",
        )
    return table


def _urgency(item: tuple[int, dict[str, Any] | str]) -> tuple[float, int]:
    """Ranks that do not answer, then those that wait longest."""
    rank, status = item
    if isinstance(status, str):
        return float("-inf"), rank
    return -max((call["age"] for call in status["snapshot"]["open"]), default=0.0), rank


def _stragglers(status: dict[str, Any]) -> list[RenderableType]:
    if not status["statistics_every"]:
        return [
            Text(
                "no table of stragglers: start the job without NCCLGUARD_STATISTICS_EVERY=0 and NCCLGUARD_ROUNDS=false",
                style="dim",
            )
        ]
    tables: list[RenderableType] = []
    for one in status["snapshot"]["stragglers"]:
        table = Table(
            title=f"arrivals in group {one['group']}, {one['operations']} operations through {one['through']}, {one['age']:.0f} s ago",
            title_justify="left",
        )
        for name in ("rank", "host", "pid", "came last", "behind first ms", "longest ms", "held all up s", "waited ms"):
            table.add_column(name, justify="left" if name == "host" else "right")
        for row in one["rows"][:MAX_ROWS]:
            table.add_row(
                str(row["rank"]),
                row["host"],
                str(row["pid"]),
                str(row["last"]),
                f"{row['behind'] * 1e3:.2f}",
                f"{row['behind_longest'] * 1e3:.2f}",
                f"{row['held_up']:.3f}",
                f"{row['waited'] * 1e3:.2f}",
            )
        tables.append(table)
    return tables or [Text(f"arrivals are known after operation {status['statistics_every']} of a group", style="dim")]


def _operations(status: dict[str, Any]) -> Table:
    snapshot = status["snapshot"]
    table = Table(title=f"operations of rank {snapshot['rank']}", title_justify="left")
    for name in ("group", "operation", "phase", "count", "failed", "median ms", "99 % ms", "longest ms", "GB"):
        table.add_column(name, justify="left" if name in ("group", "operation", "phase") else "right")
    for one in sorted(snapshot["series"], key=lambda one: -float(one["seconds"]))[:MAX_ROWS]:
        failures = one["failures"]
        table.add_row(
            one["group"],
            one["op"],
            one["phase"],
            str(one["count"]),
            ", ".join(f"{count} {cause}" for cause, count in failures.items()) or "0",
            f"{records.quantile(one['durations'], records.TIME_BOUNDS, 0.5) * 1e3:.3g}",
            f"{records.quantile(one['durations'], records.TIME_BOUNDS, 0.99) * 1e3:.3g}",
            f"{one['longest'] * 1e3:.3g}",
            f"{one['nbytes'] / 1e9:.3g}",
        )
    return table


def _settings(status: dict[str, Any]) -> list[RenderableType]:
    lines = []
    for group, values in status["snapshot"]["settings"].items():
        if values:
            text = ", ".join(f"{name}={shown(value)}" for name, value in values.items())
            lines.append(Text(f"changed in group {group}: {text}"))
    late = [group for group, (number, _) in status["adopted"].items() if number < status["proposal"]]
    if late:
        proposed = ", ".join(f"{name}={shown(value)}" for name, value in status["proposed"].items())
        lines.append(Text(f"proposed, not yet in force in group {', '.join(late)}: {proposed}", style="yellow"))
    return list(lines)
