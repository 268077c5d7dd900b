"""The doctor's table, its JSON and the heat map of the pairs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ncclguard.environment.doctor.facts import Facts
from ncclguard.environment.doctor.network_checks import Measured
from ncclguard.environment.doctor.result import Check

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def print_table(checks: Sequence[Check], *, to_stderr: bool = False) -> None:
    """One line a check: what it is, how it came out, what to do."""
    table = Table(show_lines=False, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("result", overflow="fold", ratio=3)
    table.add_column("what to do", overflow="fold", ratio=2)
    for check in checks:
        style = _STYLES[check.status]
        table.add_row(check.name, f"[{style}]{check.status}[/]: {_plain(check.detail)}", _plain(check.advice))
    console = Console(file=sys.stderr if to_stderr else sys.stdout)
    if not console.is_terminal:  # a log file has no width of its own
        console = Console(file=console.file, width=160)
    console.print(table)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def write_json(checks: Sequence[Check], target: str) -> None:
    """The list of checks, to a file or with "-" to stdout."""
    text = json.dumps([check.model_dump() for check in checks], indent=2)
    if target == "-":
        print(text)
    else:
        Path(target).write_text(text + "\n")


def plot(facts: Mapping[int, Facts], measured: Sequence[Measured], target: str) -> None:
    """A rank x rank heat map of round trips (grey: not measured, red: broken), and of bandwidth beside it.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    ranks = sorted(facts)
    position = {rank: index for index, rank in enumerate(ranks)}
    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, title, scale, field in (
        (figure.add_subplot(1, 2, 1), "round trip (ms)", 1e3, "round_trip"),
        (figure.add_subplot(1, 2, 2), "bandwidth of one connection (MB/s)", 1e-6, "bandwidth"),
    ):
        grid = [[float("nan")] * len(ranks) for _ in ranks]
        for entry in measured:
            value = getattr(entry, field)
            if value is not None:
                grid[position[entry.source]][position[entry.target]] = value * scale
        image = axes.imshow(grid, cmap="viridis")
        axes.set_facecolor("lightgrey")  # shows where nothing was measured
        for entry in measured:
            if entry.fault is not None:
                axes.text(position[entry.target], position[entry.source], "x", color="red", ha="center", va="center")
        axes.set_title(title)
        axes.set_xlabel("to rank")
        axes.set_ylabel("from rank")
        axes.set_xticks(range(len(ranks)), [str(rank) for rank in ranks])
        axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
        figure.colorbar(image, ax=axes)
    figure.savefig(target)
