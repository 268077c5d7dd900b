"""`ncclguard top`: a live view of the ranks of a job on this host."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from ncclguard.metrics.control import ControlError, ask
from ncclguard.metrics.set_command import choose
from ncclguard.metrics.top_view import view


def main(argv: Sequence[str] | None = None) -> int:
    """Show until Ctrl-C; 0, or 2 when there is no such job. `--once` and a stdout that is no terminal: one picture."""
    options = _parser().parse_args(argv)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ncclguard top",
        description="Show the ranks of a job on this host: what they are in, how long they wait, and who comes last. The job "
        "needs setup_nccl_monitoring(). Ranks of other hosts are in the table of arrivals only.",
    )
    parser.add_argument("--job", help="name of the job; not needed when there is one on this host")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two pictures (default 1)")
    return parser
