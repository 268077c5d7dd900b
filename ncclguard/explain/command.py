"""`ncclguard explain PATH...`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ncclguard.explain.arithmetic import read_deepspeed
from ncclguard.explain.diagnose import diagnose, read_evidence
from ncclguard.explain.model_table import find_model
from ncclguard.explain.sources import Source, UnusableInput, find_sources
from ncclguard.explain.render_html import render_html
from ncclguard.explain.render_text import print_report
from ncclguard.explain.report import Report

UNUSABLE = 2
PROGRESS_FROM = 32 << 20


def parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    made = argparse.ArgumentParser(
        prog="ncclguard explain",
        description="Read what a hung or timed-out job left (logs, torchrun log folders, flight-recorder dumps) "
        "and say which rank held it up.",
        epilog="Exit code 0 whether or not an incident was found; 2 when an input cannot be used.",
    )
    made.add_argument(
        "paths", nargs="+", metavar="PATH", help="log file, folder, flight-recorder dump, gzip of any, or - for stdin"
    )
    made.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for stdout, which then holds nothing else"
    )
    made.add_argument("--html", metavar="FILE", help="write the report as a self-contained page")
    made.add_argument("--world-size", type=int, metavar="N", help="number of ranks, where the logs do not tell")
    made.add_argument("--model", metavar="CONFIG", help="config.json of the model, or a name such as qwen2.5-vl-7b")
    made.add_argument("--deepspeed", metavar="CONFIG", help="DeepSpeed config, for the bucket size")
    return made


def explain(
    paths: Sequence[str],
    *,
    world_size: int | None = None,
    model: str | None = None,
    deepspeed: str | None = None,
    progress: Callable[[Source, int], None] | None = None,
) -> Report:
    """Read logs and dumps and return the report.

    Raises:
        UnusableInput: a path cannot be read.
        ValueError: the model or DeepSpeed config cannot be used, or world_size is not positive.

    Example:
        >>> explain(["no-such.log"])
        Traceback (most recent call last):
        ...
        ncclguard.explain.sources.UnusableInput: no-such.log: no such file or folder
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"world size {world_size}: must be 1 or more")
    sizes = find_model(model) if model is not None else None
    zero = read_deepspeed(deepspeed) if deepspeed is not None else None
    return diagnose(read_evidence(find_sources(paths), progress), world_size, sizes, zero)


def _with_bar(arguments: argparse.Namespace, errors: Console) -> Report:
    options = {"world_size": arguments.world_size, "model": arguments.model, "deepspeed": arguments.deepspeed}
    total = sum(source.size for source in find_sources(arguments.paths))
    if total < PROGRESS_FROM or not errors.is_terminal:
        return explain(arguments.paths, **options)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task("reading", total=total)
        return explain(arguments.paths, **options, progress=lambda source, count: bar.advance(task, count))


def _write(name: str, text: str) -> None:
    if name == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(name).write_text(text, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 for unusable input."""
    arguments = parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, markup=False)
    try:
        report = _with_bar(arguments, errors)
        if arguments.json is not None:
            _write(arguments.json, report.model_dump_json(indent=2) + "\n")
        if arguments.html is not None:
            _write(arguments.html, render_html(report))
    except (UnusableInput, ValueError) as error:
        errors.print(f"ncclguard explain: {error}", soft_wrap=True)
        return UNUSABLE
    except BrokenPipeError:
        return 0
    except OSError as error:
        errors.print(f"ncclguard explain: cannot write the report: {error}", soft_wrap=True)
        return UNUSABLE
    if "-" not in (arguments.json, arguments.html):
        print_report(report, Console(highlight=False, markup=False, soft_wrap=False))
    return 0
