"""`ncclguard top`: a live view of the ranks of a job on this host, or with `--all` of all its hosts.

A rank knows of the others what the last exchange of statistics brought, and, while a call waits, what the last inquiry
came to. So any rank can answer for all ranks of its groups, and nothing has to reach another host.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ncclguard.arguments import positive_seconds
from ncclguard.metrics import records
from ncclguard.metrics.control import ControlError, ask, choose
from ncclguard.metrics.records import ChannelStatus, SlowRanks, channel_text
from ncclguard.metrics.settings import shown
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import Message, say, speaking_to, told, tr
from ncclguard_explain.ranks import Hosts, ranks_text

EXIT_CODES = {0: "shown, until Ctrl-C", 2: "there is no such job of this user on this host, or no rank answers"}
EXAMPLES = {
    "ncclguard top": "live, where one job runs on this host",
    "ncclguard top --job 4711 --interval 5": "one of several, by the id of its scheduler or launcher",
    "ncclguard top --once > top.txt": "one picture, as in any pipe",
}
#: The number of rows of a table at most; of larger jobs the most important ones are shown.
MAX_ROWS = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Show until Ctrl-C; 0, or 2 when there is no such job. `--once` and a stdout that is no terminal: one picture."""
    options = build_parser().parse_args(argv)
    try:
        with speaking_to(sys.stdout):
            return _show(options)
    except KeyboardInterrupt:
        return 0
    except ControlError as error:
        with speaking_to(sys.stderr):
            print(f"ncclguard top: {say(error.text)}", file=sys.stderr)
        return 2


def _show(options: argparse.Namespace) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    job, ranks = choose(options.job)
    picture = whole_job if options.all else this_host
    if options.once or not console.is_terminal:
        console.print(picture(job, ranks))
        return 0
    with Live(picture(job, ranks), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval)
            job, ranks = choose(job)
            live.update(picture(job, ranks), refresh=True)


def this_host(job: str, ranks: dict[int, Path]) -> Group:
    """Return the picture of the ranks on this host."""
    return view(job, statuses(ranks))


def whole_job(job: str, ranks: dict[int, Path]) -> Group:
    """Return the picture of all ranks of the groups that ranks on this host are in."""
    return job_view(job, job_answers(ranks))


def statuses(ranks: dict[int, Path]) -> dict[int, dict[str, Any] | str]:
    """Return each rank's status, or the reason why it gives none."""
    found: dict[int, dict[str, Any] | str] = {}
    for rank, path in sorted(ranks.items()):
        try:
            found[rank] = ask(path, {"command": "status"})
        except ControlError as error:
            found[rank] = error.text
    return found


def job_answers(ranks: dict[int, Path]) -> dict[int, dict[str, Any] | str]:
    """Return each rank's answer about the whole job, or why it gives none; each group's table from one rank only."""
    found: dict[int, dict[str, Any] | str] = {}
    known: set[str] = set()
    for rank, path in sorted(ranks.items()):
        try:
            answer = found[rank] = ask(path, {"command": "job", "known": sorted(known)})
            known |= answer["tables"].keys()
        except ControlError as error:
            found[rank] = error.text
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = Parser(
        prog="ncclguard top",
        description="Show the ranks of a job on this host: what they are in, how long they wait, and who comes last. The job "
        "needs setup_nccl_monitoring() or watch(). Ranks of other hosts are in the table of arrivals only; see --all.",
    )
    parser.add_argument("--job", help="name of the job; not needed when there is one on this host")
    parser.add_argument(
        "--all",
        action="store_true",
        help="show the hosts of the whole job, by what the ranks here know of the others: how they arrived as of the last "
        "exchange of statistics, and who is awaited as of the last inquiry",
    )
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    parser.add_argument(
        "--interval", type=positive_seconds, default=1.0, help="seconds between two pictures (default 1)"
    )
    return described(parser, EXAMPLES, EXIT_CODES)


# ---------------------------------------------------------------------- the picture


def view(job: str, statuses: Mapping[int, dict[str, Any] | str]) -> Group:
    """Build the picture of this host's ranks; a text in `statuses` stands for a rank that did not answer."""
    answers = {rank: status for rank, status in statuses.items() if not isinstance(status, str)}
    verdicts = _verdicts(answers)
    parts: list[RenderableType] = [_title(job, statuses, answers), *verdicts, _ranks(statuses)]
    if not verdicts and any(call["late"] for each in answers.values() for call in each["snapshot"]["open"]):
        parts.append(Text(told("who has not come: `ncclguard top --all`"), style="yellow"))
    if answers:
        first = answers[min(answers)]
        parts += _slow(first)
        parts += _channels(answers)
        if first["snapshot"]["series"]:
            parts += [*_stragglers(first), _operations(first)]
        parts += _settings(first)
    return Group(*parts)


def _title(job: str, statuses: Mapping[int, object], answers: Mapping[int, dict[str, Any]]) -> Text:
    size = max((status["snapshot"]["world_size"] for status in answers.values()), default=0)
    hosts = sorted({status["snapshot"]["host"] for status in answers.values()})
    hanging = [rank for rank, status in answers.items() if status["snapshot"]["hang"]]
    text = Text(
        told(
            "job {job}: {count} of {size} ranks are on this host ({host})",
            job=job,
            count=len(statuses),
            size=size or "?",
            host=", ".join(hosts) or tr("no answer"),
        )
    )
    if size > len(statuses):
        text.append(told("; of the others only arrivals are known here"), style="dim")
    if hanging:
        waiting = told("WAITING FOR LONG: ranks {numbers}", numbers=", ".join(map(str, hanging)))
        text.append(f"  {waiting}", style="bold red")
    return text


def _table(title: str, columns: Iterable[str], left: Container[int]) -> Table:
    """Build an empty table; `left`: the positions of columns that hold words, the others hold numbers."""
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position in left else "right", overflow="fold")
    return table


def _verdicts(answers: Mapping[int, dict[str, Any]]) -> list[RenderableType]:
    """Return the verdicts of `watch` on what stands still; one that several ranks know is one line."""
    return [
        Text(say(text), style="bold red")
        for text in dict.fromkeys(each["snapshot"]["verdict"] for each in answers.values())
        if text
    ]


def _ranks(statuses: Mapping[int, dict[str, Any] | str]) -> Table:
    watched = any(not isinstance(status, str) and status["snapshot"].get("watched") for status in statuses.values())
    columns = [told("rank"), "pid", told("now in"), told("since s"), told("limit s")]
    columns += [told("watched")] if watched else []
    table = _table(told("ranks on this host"), [*columns, told("guarded"), told("failed"), told("waited s")], left=[2])
    ordered = sorted(statuses.items(), key=_urgency)[:MAX_ROWS]
    for rank, status in sorted(ordered):
        if isinstance(status, str):
            table.add_row(str(rank), "-", Text(say(status), style="red"))
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
            _figure(oldest["limit"]) if oldest else "",
            *([str(sum(snapshot.get("watched", {}).values()))] if watched else []),
            str(sum(one["count"] for one in series)),
            Text(str(failed), style="red" if failed else ""),
            f"{sum(one['waited'] for one in series):.2f}",
        )
    return table


def _figure(seconds: float) -> str:
    """Write a limit, which is known to the time between its setting and the call's begin, in at most three figures."""
    return f"{seconds:.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _urgency(item: tuple[int, dict[str, Any] | str]) -> tuple[float, int]:
    """Return a sort key: ranks that do not answer first, then those that wait longest."""
    rank, status = item
    if isinstance(status, str):
        return float("-inf"), rank
    return -max((call["age"] for call in status["snapshot"]["open"]), default=0.0), rank


def _slow(status: dict[str, Any]) -> list[RenderableType]:
    """Return who is slow without hanging, as `watch` has told all ranks."""
    found = status["snapshot"]["slow"]
    return [] if found is None else [Text(say(SlowRanks(**found).text), style="yellow")]


def _channels(answers: Mapping[int, dict[str, Any]]) -> list[RenderableType]:
    """Return a line for each end of a weight channel in a process here."""
    found = [ChannelStatus(**each) for _, status in sorted(answers.items()) for each in status["snapshot"]["channels"]]
    return [Text(say(channel_text(each)), style="yellow" if each.stale else "") for each in found[:MAX_ROWS]]


def _stragglers(status: dict[str, Any]) -> list[RenderableType]:
    if not status["statistics_every"]:
        return _no_exchange()
    tables: list[RenderableType] = []
    for group in status["snapshot"]["stragglers"]:
        table = _table(_arrivals_title(group), [told("rank"), told("host"), "pid", *_arrival_columns()], left=[1])
        for row in group["rows"][:MAX_ROWS]:
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
    return tables or [_no_arrivals(status["statistics_every"])]


def _arrivals_title(table: Mapping[str, Any]) -> str:
    return told(
        "arrivals in group {group}, {count} operations through {op_id}; exchanged {age:.0f} s ago",
        group=table["group"],
        count=table["operations"],
        op_id=table["through"],
        age=table["age"],
    )


def _arrival_columns() -> list[str]:
    return [
        told("came last", "times"),
        told("behind first ms"),
        told("longest ms"),
        told("held all up s"),
        told("waited ms"),
    ]


def _no_arrivals(every: int) -> Text:
    return Text(told("arrivals are known after operation {number} of a group", number=every), style="dim")


def _no_exchange() -> list[RenderableType]:
    advice = told(
        "no table of stragglers: start the job without NCCLGUARD_STATISTICS_EVERY=0 and NCCLGUARD_ROUNDS=false"
    )
    return [Text(advice, style="dim")]


def _operations(status: dict[str, Any]) -> Table:
    snapshot = status["snapshot"]
    columns = [told("group"), told("operation"), told("phase"), told("count"), told("failed")]
    columns += [told("median ms"), "99 % ms", told("longest ms"), "GB"]
    table = _table(told("guarded operations of rank {rank}", rank=snapshot["rank"]), columns, left=range(3))
    for series in sorted(snapshot["series"], key=lambda series: -float(series["seconds"]))[:MAX_ROWS]:
        failures = series["failures"]
        table.add_row(
            series["group"],
            series["op"],
            told("none", "phase") if series["phase"] == "none" else series["phase"],
            str(series["count"]),
            ", ".join(f"{count} {say(cause)}" for cause, count in failures.items()) or "0",
            f"{_quantile(series, 0.5) * 1e3:.3g}",
            f"{_quantile(series, 0.99) * 1e3:.3g}",
            f"{series['longest'] * 1e3:.3g}",
            f"{series['nbytes'] / 1e9:.3g}",
        )
    return table


def _quantile(series: Mapping[str, Any], part: float) -> float:
    """Return a quantile of a series' durations; it is known to within a bucket, which may reach beyond the longest."""
    return min(records.quantile(series["durations"], records.TIME_BOUNDS, part), float(series["longest"]))


def _settings(status: dict[str, Any]) -> list[RenderableType]:
    lines = []
    for group, values in status["snapshot"]["settings"].items():
        if values:
            lines.append(Text(told("changed in group {group}: {settings}", group=group, settings=_assignments(values))))
    late = [group for group, (number, _) in status["adopted"].items() if number < status["proposal"]]
    if late:
        text = told(
            "proposed, not yet in force in group {group}: {settings}",
            group=", ".join(late),
            settings=_assignments(status["proposed"]),
        )
        lines.append(Text(text, style="yellow"))
    return list(lines)


def _assignments(values: Mapping[str, float | None]) -> str:
    """Return settings as `ncclguard set` takes them; what is not set, in words."""
    return ", ".join(f"{name}={told('not set') if value is None else shown(value)}" for name, value in values.items())


# ---------------------------------------------------------------------- the picture of the whole job

#: The number of ranks of a large job that are shown singly because they come last, and their least distance in time.
SINGLED_OUT = 8
FAR_BEHIND = 2.0
#: Seconds in which all ranks have answered who is awaited.
ANSWERED_WITHIN = 5.0
#: Hosts that arrive within so many seconds of the first rank share a row.
TOGETHER = 1e-4


def job_view(job: str, answers: Mapping[int, dict[str, Any] | str]) -> Group:
    """Build the picture of the job from `answers` here: who waits for whom, and arrivals by the last exchanges."""
    answered = {rank: answer for rank, answer in answers.items() if not isinstance(answer, str)}
    tables: dict[str, dict[str, Any]] = {}
    for answer in answered.values():
        tables = {**answer["tables"], **tables}
    hosts = {row[0]: row[1] for table in tables.values() for row in table["rows"]}
    size = max((answer["world_size"] for answer in answered.values()), default=0)
    if hosts:
        known = tr("{count:,} on {hosts:,} hosts are known here", count=len(hosts), hosts=len(set(hosts.values())))
    else:
        known = tr("{count} on this host answer", count=len(answered))
    title = Text(told("job {job}: {size} ranks; {known}", job=job, size=size or "?", known=known))
    if 0 < len(hosts) < size:
        title.append(
            told(" (the others share no group with a rank on this host, or no exchange has taken place)"), style="dim"
        )
    placed = Hosts(hosts, range(size) if size else hosts)
    parts: list[RenderableType] = [title]
    parts += [
        Text(f"rank {rank}: {say(answer)}", style="red") for rank, answer in answers.items() if isinstance(answer, str)
    ]
    if not answered:
        return Group(*parts)
    parts += _who_waits(answered)
    first = answered[min(answered)]
    if not first["statistics_every"]:
        return Group(*parts, *_no_exchange())
    for table in sorted(tables.values(), key=lambda one: -len(one["rows"])):
        parts.append(_arrivals(table, placed))
    if not tables and any(answer["guarded"] for answer in answered.values()):
        parts.append(_no_arrivals(first["statistics_every"]))
    return Group(*parts)


def _who_waits(answered: Mapping[int, dict[str, Any]]) -> list[RenderableType]:
    """List the open operations of ranks here and of ranks that others wait for, with whom they wait for."""
    waiting: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for rank, answer in answered.items():
        for call in answer["open"]:
            waiting.setdefault(call["op_id"], []).append((rank, call))
    known = {
        f"{entry['group']}/{entry['sequence']}": entry
        for answer in answered.values()
        for entry in answer["awaited"] or ()
    }
    unanswered = [rank for rank, answer in answered.items() if answer["awaited"] is None]
    lines: list[RenderableType] = []
    for op_id in sorted({*waiting, *known}):
        calls = sorted(waiting.get(op_id, []), key=lambda one: -float(one[1]["age"]))
        entry = known.get(op_id)
        text = calls[0][1]["text"] if calls else entry["text"] if entry is not None else ""
        late = entry is not None or any(call["late"] for _, call in calls)
        where = _waiting_here(calls) if calls else tr("not entered by a rank on this host")
        line = told("waiting: {operation} ({op_id}), {where}", operation=text, op_id=op_id, where=where)
        lines.append(Text(line, style="red" if late else "yellow"))
        if entry is not None:
            lines += [Text(f"  {say(line)}") for line in entry["lines"]]
            asked = told("asked by rank {rank}, when it had waited for {age:g} s", rank=entry["by"], age=entry["age"])
            lines.append(Text(f"  {asked}", style="dim"))
        else:
            if missing := _not_come(op_id, calls, answered):
                yet = told("not come yet, of the ranks on this host: {ranks}", ranks=ranks_text(missing))
                lines.append(Text(f"  {yet}"))
            patience = min(answer["warn_after"] for answer in answered.values())
            if calls and calls[0][1]["age"] > patience + ANSWERED_WITHIN:
                said = told(
                    "who is awaited is in the log of the rank that has asked the others, and in `ncclguard hang`"
                )
            else:
                said = told(
                    "the ranks are asked who is awaited {seconds:g} s after the first began",
                    seconds=patience,
                )
            lines.append(Text(f"  {said}", style="dim"))
    if unanswered and len(unanswered) == len(answered):
        unread = told("who is awaited could not be looked up: the job's store did not answer in time")
        lines.append(Text(unread, style="yellow"))
    nothing = told(
        "no operation waits on this host, and none for a rank on it; collectives of torch itself, such as DDP's, are seen "
        "where ncclguard.watch() is on"
    )
    return lines or [Text(nothing, style="dim")]


def _waiting_here(calls: Sequence[tuple[int, dict[str, Any]]]) -> Message:
    """Return on which rank a call has waited longest, and on how many others it waits; the longest wait is first."""
    rank, call = calls[0]
    here = {"age": call["age"], "limit": _figure(call["limit"]), "rank": rank}
    if len(calls) == 1:
        return tr("for {age:.1f} s of {limit} s on rank {rank}", **here)
    return tr("for {age:.1f} s of {limit} s on rank {rank}, and on {count} more here", count=len(calls) - 1, **here)


def _not_come(
    op_id: str, calls: Sequence[tuple[int, dict[str, Any]]], answered: Mapping[int, dict[str, Any]]
) -> list[int]:
    """Return the ranks here whose own count of the group's collectives says that they have not issued this one.

    Only those that were asked after it had begun on another rank, and where the counts of all ranks that wait in it
    have it: then the count and the number in the operation's id mean the same.
    """
    channel, _, number = op_id.rpartition("/")
    if not calls or any(answered[rank].get("watched", {}).get(channel, 0) < int(number) for rank, _ in calls):
        return []
    began = min(answered[rank]["time"] - call["age"] for rank, call in calls)
    return [
        rank
        for rank, answer in sorted(answered.items())
        if answer.get("watched", {}).get(channel, math.inf) < int(number) and answer["time"] >= began
    ]


def _arrivals(table: Mapping[str, Any], placed: Hosts) -> Table:
    """Build the table of a group's arrivals: a row for each rank; in a large group, for the last ones and by host."""
    made = _table(_arrivals_title(table), [told("who"), told("ranks"), *_arrival_columns()], left=[0])
    for ranks in _rows_of(table["rows"]):
        if len(ranks) == 1:
            who = tr("{part} on host {host}", part=ranks_text([ranks[0][0]]), host=ranks[0][1])
        else:
            who = placed.text(row[0] for row in ranks)
        made.add_row(
            Text(say(who)),
            f"{len(ranks):,}",
            str(sum(row[3] for row in ranks)),
            f"{_mean(row[4] for row in ranks) * 1e3:.2f}",
            f"{max(row[5] for row in ranks) * 1e3:.2f}",
            f"{sum(row[6] for row in ranks):.3f}",
            f"{_mean(row[7] for row in ranks) * 1e3:.2f}",
        )
    return made


def _rows_of(rows: Sequence[Sequence[Any]]) -> list[list[Sequence[Any]]]:
    """Group ranks into rows: hosts that arrive alike, by doubling times behind the first rank."""
    if len(rows) <= MAX_ROWS:
        return [[row] for row in rows]
    ordered = sorted(rows, key=lambda row: (-row[4], row[0]))
    usual = ordered[len(ordered) // 2][4]
    alone = [row for row in ordered[:SINGLED_OUT] if row[3] and row[4] > FAR_BEHIND * max(usual, TOGETHER)]
    hosts: dict[str, list[Sequence[Any]]] = {}
    for row in ordered[len(alone) :]:
        hosts.setdefault(row[1], []).append(row)
    alike: dict[int, list[Sequence[Any]]] = {}
    for here in hosts.values():
        behind = max(_mean(row[4] for row in here), TOGETHER)
        alike.setdefault(math.frexp(behind / TOGETHER)[1], []).extend(here)
    return [*([row] for row in alone), *(ranks for _, ranks in sorted(alike.items(), reverse=True))]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
