"""``ncclguard doctor``: run all checks, on one host or on all of them under torchrun or srun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ncclguard.environment.doctor.context import Context, read_context
from ncclguard.environment.doctor.exchange import Exchange, Unreachable
from ncclguard.environment.doctor.facts import own_facts, paste_block
from ncclguard.environment.doctor.host_checks import HOST_CHECKS
from ncclguard.environment.doctor.job_checks import JOB_CHECKS
from ncclguard.environment.doctor.render import plot, print_table, write_json
from ncclguard.environment.doctor.result import Check, error, exit_code, skipped
from ncclguard.environment.doctor.survey import MEASURE_SECONDS, Survey, take_survey
from ncclguard.errors import GuardConfigError


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="ncclguard doctor",
        description="Check host, network and settings of a distributed job. On one host as it is; for all hosts: "
        "torchrun --nnodes ... --no-python ncclguard doctor, or srun ncclguard doctor with MASTER_ADDR set. Exit code "
        "0; 2 for an error; 1 for a warning with --fail-on-warnings.",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the checks as JSON, - for stdout (the table goes to stderr)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a rank x rank heat map (needs matplotlib)")
    parser.add_argument("--fail-on-warnings", action="store_true", help="exit with code 1 on a warning")
    parser.add_argument("--wait", type=float, default=20.0, metavar="SECONDS", help="wait for other ranks, default: 20")
    return parser


def run_local_checks(context: Context) -> list[Check]:
    """All checks that need nobody else. One that fails by itself is an error of its own, not the end of the others."""
    results = []
    for check in (*JOB_CHECKS, *HOST_CHECKS):
        try:
            results.append(check(context))
        except (OSError, ValueError, RuntimeError) as problem:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            results.append(error(name, f"the check itself failed: {problem!r}", "report this with the block below"))
    return results


def _alone(context: Context, local: list[Check]) -> Survey:
    own = own_facts(context, None, None)
    note = skipped("connections", "one process: start it on all hosts with torchrun or srun")
    return Survey([*local, note], {own.rank: own}, [])


def _unreachable(context: Context, problem: Unreachable) -> Check:
    job = context.job
    return error(
        "store",
        f"rank {context.rank} on {context.host} cannot use the store at {job.master_addr}:{job.master_port}: {problem}",
        f"on {job.master_addr}, allow TCP port {job.master_port} from this host; is rank 0 running? is the port taken?",
    )


def _write(context: Context, survey: Survey, arguments: argparse.Namespace) -> None:
    print_table(survey.checks, to_stderr=arguments.json == "-")
    if arguments.json:
        write_json(survey.checks, arguments.json)
    if arguments.plot:
        plot(survey.facts, survey.measured, arguments.plot)
    lines = [f"{check.status}: {check.name}: {check.detail}" for check in survey.checks if check.status != "ok"]
    block = paste_block(list(survey.facts.values()), [*lines, str(context.report.limits)])
    print(f"\nTo paste into an issue:\n\n{block}", file=sys.stderr if arguments.json == "-" else sys.stdout)


def _examine(arguments: argparse.Namespace) -> tuple[int, bool]:
    """The exit code, and whether a call that may never return is still running."""
    context = read_context()
    local = run_local_checks(context)
    if context.world_size == 1:
        survey = _alone(context, local)
        _write(context, survey, arguments)
        return exit_code(survey.checks, fail_on_warnings=arguments.fail_on_warnings), False
    exchange = None
    try:
        if context.job.master_addr is None:
            raise Unreachable("MASTER_ADDR is not set")
        exchange = Exchange(context, arguments.wait)
        found = take_survey(context, local, exchange, arguments.wait)
        if found is not None:
            code = exit_code(found.checks, fail_on_warnings=arguments.fail_on_warnings)
            _write(context, found, arguments)
            # The others leave with the same code, and this store's host stays until they have it.
            exchange.put("verdict", code)
            exchange.collect("goodbye", [rank for rank in found.facts if rank != 0], 5.0)
        else:
            code = int(exchange.collect("verdict", [0], MEASURE_SECONDS)[0])
            exchange.put("goodbye", True)
    except (Unreachable, KeyError) as problem:
        reason = problem if isinstance(problem, Unreachable) else Unreachable("rank 0 gave no verdict in time")
        survey = Survey([*local, _unreachable(context, reason)], {}, [])
        print_table(survey.checks, to_stderr=True)
        if context.rank == 0 and arguments.json:
            write_json(survey.checks, arguments.json)
        code = 2
    return code, exchange is None or exchange.bounded.abandoned


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 0, 1 (warnings, as asked) or 2 (errors)."""
    arguments = build_parser().parse_args(argv)
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
