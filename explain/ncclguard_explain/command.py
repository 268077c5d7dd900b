"""`ncclguard explain PATH...`: the command line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from ncclguard_explain.arithmetic import find_model, read_deepspeed
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.decision import EXIT_CODES as DECISIONS
from ncclguard_explain.evidence import Collector
from ncclguard_explain.language import joined, say, speaking_to, told, tr
from ncclguard_explain.page import PageError
from ncclguard_explain.ras import NoWitness, address_of, ask as ask_ras
from ncclguard_explain.records import Source, Tail, UnusableInput, find_sources
from ncclguard_explain.render import print_report, render_html
from ncclguard_explain.report import Report, diagnose

UNUSABLE = 2
#: Inputs of which it is said why none of them can be read.
SHOWN_UNREAD = 4
EXIT_CODES = {
    0: "a report was made, whether or not there was an incident; with --exit-code: no incident",
    UNUSABLE: "an input cannot be used, or the report cannot be written",
    **{code: tr("with --exit-code: {decision}", "help", decision=decision) for decision, code in DECISIONS.items()},
}
EXAMPLES = {
    "ncclguard explain logs/": "a folder of torchrun (--log-dir), with flight-recorder dumps and dmesg beside it",
    "kubectl logs job/train | ncclguard explain -": "a pipe",
    "ncclguard explain slurm-42.out --world-size 64 --html page.html": "one log of all ranks, as a page",
    "ncclguard explain logs/ --exit-code --json explain.json": "for a script that decides about a restart",
    "ncclguard explain --follow train.log": "while the job runs",
}
PROGRESS_FROM = 32 << 20
#: Seconds between two looks at a log that is followed, between two questions to RAS, and for each of its answers.
FOLLOW_EVERY = 0.5
RAS_PAUSE = 3.0
RAS_WITHIN = 20.0


def build_parser(program: str = "ncclguard explain") -> argparse.ArgumentParser:
    """Return the arguments of the command; `program` is what its user typed."""
    made = Parser(
        prog=program,
        description="Read what a hung or timed-out job left (logs, torchrun log folders, error files, flight-recorder dumps, "
        "dmesg, scheduler events, NCCL's RAS report) and say which rank held it up, why, and what to do.",
    )
    made.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="log file, folder, flight-recorder dump, JSON document, gzip of any, or - for stdin",
    )
    made.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - for stdout, which then holds nothing else"
    )
    made.add_argument("--html", metavar="FILE", help="write the report as a self-contained page")
    made.add_argument("--world-size", type=int, metavar="N", help="number of ranks, where the logs do not tell")
    made.add_argument("--model", metavar="CONFIG", help="config.json of the model, or a name such as qwen2.5-vl-7b")
    made.add_argument("--deepspeed", metavar="CONFIG", help="DeepSpeed config, for the bucket size")
    made.add_argument("--exit-code", action="store_true", help="return the decision as exit code, for scripts")
    made.add_argument(
        "--follow", action="store_true", help="go on reading while the job writes, and report when the answer changes"
    )
    made.add_argument(
        "--ras",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="also ask the RAS service of NCCL (2.24 and newer) of a running job; by default at NCCL_RAS_ADDR, else "
        "localhost:28028",
    )
    return described(made, EXAMPLES, EXIT_CODES)


def explain(
    paths: Sequence[str],
    *,
    world_size: int | None = None,
    model: str | None = None,
    deepspeed: str | None = None,
    ras: str | None = None,
    progress: Callable[[Source, int], None] | None = None,
) -> Report:
    """Read logs, dumps and other documents and return the report.

    `ras` ("host:port", or "" for `NCCL_RAS_ADDR`) also asks NCCL of a running job.

    Raises:
        UnusableInput: a path cannot be read, all inputs are empty or no logs, or nobody answers at the RAS address.
        ValueError: the model or DeepSpeed config cannot be used, or world_size is not positive.

    Example:
        >>> explain(["no-such.log"])
        Traceback (most recent call last):
        ...
        ncclguard_explain.records.UnusableInput: no-such.log: no such file or folder
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"world size {world_size}: must be 1 or more")
    sizes = find_model(model) if model is not None else None
    zero = read_deepspeed(deepspeed) if deepspeed is not None else None
    collector = Collector()
    for source in find_sources(paths):
        collector.read(source, None if progress is None else partial(progress, source))
    if ras is not None:
        _read_ras(collector, ras)
    evidence = collector.finish()
    if evidence.unread and len(evidence.unread) == len(evidence.sources) and not evidence.facts:
        raise UnusableInput(joined("; ", [*evidence.unread.values()][:SHOWN_UNREAD]))
    return diagnose(evidence, world_size, sizes, zero)


def _read_ras(collector: Collector, address: str) -> None:
    """Ask twice, a few seconds apart: counts that do not move tell a hang from a job that is busy."""
    try:
        address = address or address_of()
        source = Source(10**6, f"ras://{address}", "text", 0)
        for again in (False, True):
            if again:
                time.sleep(RAS_PAUSE)
            collector.feed(source, f"\n{ask_ras(address, within=RAS_WITHIN, form='text')}".encode())
    except NoWitness as error:
        raise UnusableInput(tr("no answer from NCCL's RAS: {error}", error=error)) from error
    collector.feed(source, b"", final=True)


def follow(paths: Sequence[str], tell: Callable[[Report], None], *, world_size: int | None = None) -> Report:
    """Read logs while they grow and call `tell` whenever the answer changes.

    It goes on until it is interrupted or all inputs have ended.

    A pipe ends; a file never does. Each call of `tell` has a whole report on what there is so far.
    """
    collector = Collector()
    sources = find_sources(paths)
    tails = []
    for source in sources:
        if source.kind != "text":
            collector.read(source)
            continue
        try:
            tails.append(Tail(source))
        except UnusableInput as error:
            collector.evidence.notes.append(error.args[0])
    try:
        return _follow(collector, tails, tell, world_size)
    finally:
        for tail in tails:
            tail.close()


def _follow(
    collector: Collector, tails: Sequence[Tail], tell: Callable[[Report], None], world_size: int | None
) -> Report:
    told = None
    while True:
        grown = False
        for tail in tails:
            data = tail.read()
            if data:
                grown = True
                collector.feed(tail.source, data)
        if not grown:
            for tail in tails:
                if not tail.settled:
                    tail.settled = True
                    collector.feed(tail.source, b"", settle=not tail.ended, final=tail.ended)
            report = diagnose(collector.finish(), world_size)
            answer = (report.incident, report.culprits, report.cause_class, report.decision)
            if answer != told:
                told = answer
                tell(report)
            if all(tail.ended for tail in tails):
                return report
            time.sleep(FOLLOW_EVERY)


def _with_bar(arguments: argparse.Namespace, errors: Console) -> Report:
    options = {name: getattr(arguments, name) for name in ("world_size", "model", "deepspeed", "ras")}
    total = sum(source.size for source in find_sources(arguments.paths))
    if total < PROGRESS_FROM or not errors.is_terminal:
        return explain(arguments.paths, **options)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

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


def _show(arguments: argparse.Namespace, report: Report) -> None:
    if arguments.json is not None:
        _write(arguments.json, report.to_json() + "\n")
    if arguments.html is not None:
        _write(arguments.html, render_html(report))
    if "-" not in (arguments.json, arguments.html):
        with speaking_to(sys.stdout):
            print_report(report, Console(highlight=False, markup=False, soft_wrap=False))


def main(argv: Sequence[str] | None = None, program: str = "ncclguard explain") -> int:
    """Run the command; returns 0, 2 for unusable input, or with --exit-code the code of the decision."""
    arguments = build_parser(program).parse_args(argv)
    errors = Console(stderr=True, highlight=False, markup=False)
    try:
        if not arguments.paths and arguments.ras is None:
            text = tr("no input: give a log, a folder or a dump, - for a pipe, or --ras for a running job")
            raise UnusableInput(text)
        if arguments.follow:
            try:
                report = follow(arguments.paths, partial(_show, arguments), world_size=arguments.world_size)
            except KeyboardInterrupt:
                return 0
        else:
            report = _with_bar(arguments, errors)
            _show(arguments, report)
    except (UnusableInput, PageError, ValueError) as error:
        errors.print(f"{program}: {say(error.args[0])}", soft_wrap=True)
        return UNUSABLE
    except BrokenPipeError:
        raise  # the end of the reader, which `run_command` serves
    except OSError as error:
        errors.print(f"{program}: {told('cannot write the report: {error}', error=error)}", soft_wrap=True)
        return UNUSABLE
    return DECISIONS[report.decision] if arguments.exit_code and report.incident else 0
