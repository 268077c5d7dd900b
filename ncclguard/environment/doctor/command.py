"""``ncclguard doctor``: run all checks, on one host or on all of them under torchrun or srun, and show the findings."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ncclguard.arguments import seconds_or_zero
from ncclguard.environment.doctor.checks import (
    HOST_CHECKS,
    JOB_CHECKS,
    Check,
    Context,
    DoctorReport,
    Facts,
    Measured,
    error,
    exit_code,
    own_facts,
    read_context,
    skipped,
)
from ncclguard.environment.doctor.survey import MEASURE_SECONDS, Exchange, Survey, Unreachable, take_survey
from ncclguard.errors import GuardConfigError
from ncclguard_explain.command_line import Parser, described, progress
from ncclguard_explain.host import resolve
from ncclguard_explain.language import ENGLISH, Message, joined, say, speaking_to, told, tr

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}
_STATUSES: dict[str, Message] = {
    "ok": tr("ok", "doctor"),
    "warning": tr("warning", "doctor"),
    "error": tr("error", "doctor"),
    "skipped": tr("skipped", "doctor"),
}
#: Checks by the names that `--json` has for them.
_NAMES: dict[str, Message] = {
    str(name): name
    for name in (
        tr("shared memory", "doctor"),
        tr("locked memory", "doctor"),
        tr("open files", "doctor"),
        tr("memory", "doctor"),
        tr("load", "doctor"),
        tr("link", "doctor"),
        tr("pci", "doctor"),
        tr("interface", "doctor"),
        tr("master", "doctor"),
        tr("name lookup", "doctor"),
        tr("variables", "doctor"),
        tr("limits", "doctor"),
        tr("master port", "doctor"),
        tr("gpus", "doctor"),
        tr("gpu links", "doctor"),
        tr("ranks", "doctor"),
        tr("interfaces agree", "doctor"),
        tr("versions", "doctor"),
        tr("connections", "doctor"),
        tr("round trip", "doctor"),
        tr("bandwidth", "doctor"),
        tr("path MTU", "doctor"),
        tr("clocks", "doctor"),
        tr("store", "doctor"),
    )
}
EXIT_CODES = {
    0: "no error was found",
    1: "with --fail-on-warnings: a warning, and no error",
    2: "an error, on any host; or a setting that cannot be used",
}
EXAMPLES = {
    "ncclguard doctor": "this host",
    "srun --ntasks-per-node 1 ncclguard doctor --json doctor.json": "all hosts of a Slurm job, with MASTER_ADDR set",
    "torchrun --nnodes 2 --nproc-per-node 1 ... --no-python ncclguard doctor": "all hosts, each pair of them",
    "ncclguard doctor --fail-on-warnings --json -": "in a script: JSON on stdout, the table on stderr",
}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = Parser(
        prog="ncclguard doctor",
        description="Check host, network and settings of a distributed job. On one host as it is; for all hosts: "
        "torchrun --nnodes ... --no-python ncclguard doctor, or srun ncclguard doctor with MASTER_ADDR set.",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the checks as JSON, - for stdout (the table goes to stderr)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a rank x rank heat map (needs matplotlib)")
    parser.add_argument("--fail-on-warnings", action="store_true", help="exit with code 1 on a warning")
    parser.add_argument(
        "--wait", type=seconds_or_zero, default=60.0, metavar="SECONDS", help="wait for other ranks, default: 60"
    )
    return described(parser, EXAMPLES, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 (warnings, as asked) or 2 (errors)."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    _check_outputs(parser, arguments)
    try:
        code, abandoned = _examine(arguments)
    except GuardConfigError as problem:
        print(f"ncclguard doctor: {problem}", file=sys.stderr)
        return 2
    if abandoned:
        # A thread still waits inside the store's client; the interpreter's normal end would abort the process there.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _check_outputs(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse files that cannot be written before any check, since those may take half a minute."""
    for option, name in (("--json", arguments.json), ("--plot", arguments.plot)):
        path = Path(name or "-")
        if path == Path("-"):
            continue
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            parser.error(
                tr(
                    "{option}: {path} cannot be written; name a file in a folder that exists and is yours",
                    option=option,
                    path=path,
                )
            )
    if arguments.plot and Path(arguments.plot).suffix.lower() not in (".png", ".pdf", ".svg"):
        parser.error(tr("--plot: {path} is no .png, .pdf or .svg; name one of these", path=arguments.plot))


def _examine(arguments: argparse.Namespace) -> tuple[int, bool]:
    """The exit code, and whether a call that may never return is still running."""
    # Not above, since `--help` needs no torch; before the versions are read, because where NCCL is no package itself
    # only a loaded torch tells which one it has.
    import torch  # noqa: F401

    context = read_context()
    shown = context.rank == 0  # of the ranks of a host that share a terminal one
    with progress(told("checking this host"), shown=shown):
        local = run_local_checks(context)
    if context.world_size == 1:
        alone = skipped("connections", tr("one process: start it on all hosts with torchrun or srun"))
        survey = Survey([*local, alone], {context.rank: own_facts(context)}, [])
        return _conclude(context, survey, arguments), False
    if context.job.master_addr is not None and not resolve(context.job.master_addr):  # torch would try for a minute
        unknown = Unreachable(tr("{host} does not resolve", host=context.job.master_addr))
        return _conclude_unreachable(context, local, unknown, arguments, known=False), False
    exchange = None
    try:
        if context.job.master_addr is None:
            raise Unreachable(tr("MASTER_ADDR is not set"))
        exchange = Exchange(context, arguments.wait)
        with progress(told("waiting for the other ranks"), shown=shown) as tell:
            found = take_survey(context, local, exchange, arguments.wait, tell)
        if found is not None:
            code = _conclude(context, found, arguments)
            # The others leave with the same code, and this store's host stays until they have it.
            exchange.put("verdict", code)
            exchange.collect("goodbye", [rank for rank in found.facts if rank != 0], 5.0)
        else:
            verdict = exchange.collect("verdict", [0], MEASURE_SECONDS)
            if 0 not in verdict:
                raise Unreachable(tr("rank 0 gave no verdict in time"))
            code = int(verdict[0])
            exchange.put("goodbye", True)
    except Unreachable as problem:
        code = _conclude_unreachable(context, local, problem, arguments, context.job.master_addr is not None)
    return code, exchange is None or exchange.abandoned


def _conclude_unreachable(
    context: Context, local: Sequence[Check], problem: Unreachable, arguments: argparse.Namespace, known: bool
) -> int:
    """Show what this host alone has found; returns the exit code. `known`: the master has an address."""
    checks = [*local, _unreachable(context, problem, known)]
    print_table(checks, sys.stderr)
    if context.rank == 0 and arguments.json:
        write_json(checks, arguments.json)
    return 2


def run_local_checks(context: Context) -> list[Check]:
    """All checks that need no other rank; one that fails by itself is an error of its own, and the rest go on."""
    results = []
    for check in (*JOB_CHECKS, *HOST_CHECKS):
        try:
            results.append(check(context))
        except (OSError, ValueError, RuntimeError) as problem:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            failed = tr("the check itself failed: {error}", error=repr(problem))
            results.append(error(name, failed, tr("report this with the block below")))
    return results


def _unreachable(context: Context, problem: Unreachable, known: bool) -> Check:
    job = context.job
    advice = tr(
        "on {host}, allow TCP port {port} from this host; is rank 0 running? is the port taken?",
        host=job.master_addr,
        port=job.master_port,
    )
    if not known:
        advice = tr("see the row of the master above")
    return error(
        "store",
        tr(
            "rank {rank} on {host} cannot use the store at {address}: {because}",
            rank=context.rank,
            host=context.host,
            address=f"{job.master_addr}:{job.master_port}",
            because=problem.reason,
        ),
        advice,
    )


def _conclude(context: Context, survey: Survey, arguments: argparse.Namespace) -> int:
    """Show what was found, in all the forms that were asked for; returns the exit code."""
    output = sys.stderr if arguments.json == "-" else sys.stdout
    print_table(survey.checks, output)
    if arguments.json:
        write_json(survey.checks, arguments.json)
    if arguments.plot:
        plot(survey.facts, survey.measured, arguments.plot)
    block = [
        f"platform: {platform.platform()}, {sys.implementation.name} {platform.python_version()}",
        *(
            f"rank {one.rank}: {one.host}, {one.interface}, MTU {one.mtu}, {one.versions}"
            for one in survey.facts.values()
        ),
        *(f"{check.status}: {check.name}: {check.detail}" for check in survey.checks if check.status != "ok"),
        context.report.limits.said(ENGLISH),
    ]
    with speaking_to(output):
        head = told("To paste into an issue:")
    print(f"\n{head}\n", "```text", *block, "```", sep="\n", file=output)
    return exit_code(survey.checks, fail_on_warnings=arguments.fail_on_warnings)


def print_table(checks: Iterable[Check], output: TextIO) -> None:
    """One line a check: what it is, how it came out, what to do."""
    table = Table(show_lines=False, pad_edge=False)
    with speaking_to(output):
        table.add_column(told("check", "doctor"), no_wrap=True)
        table.add_column(told("result", "doctor"), overflow="fold", ratio=3)
        table.add_column(told("what to do", "doctor"), overflow="fold", ratio=2)
        for check in checks:
            status = f"[{_STYLES[check.status]}]{say(_STATUSES[check.status])}[/]"
            found = say(joined(": ", (status, escape(say(check.detail)))))
            table.add_row(say(_NAMES.get(check.name, check.name)), found, escape(say(check.advice)))
    console = Console(file=output)
    if not console.is_terminal:  # a log file has no width of its own
        console = Console(file=output, width=160)
    console.print(table)


def write_json(checks: Iterable[Check], target: str) -> None:
    """The checks, to a file or with "-" to stdout."""
    text = DoctorReport(checks=tuple(checks)).model_dump_json(indent=2)
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
