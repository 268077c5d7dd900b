"""``ncclguard env``: print the variables that ``setup_env()`` would set."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from ncclguard.environment.catalogue import CATALOGUE
from ncclguard.environment.formats import FORMATS, SHARED_FORMATS, UNCOMMENTED_FORMATS, explain, host_dependent, render
from ncclguard.environment.profiles import PROFILE_NAMES
from ncclguard.environment.report import EnvironmentReport
from ncclguard.environment.setup import plan_environment
from ncclguard.errors import GuardConfigError


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="ncclguard env",
        description="Print the environment variables for interface, network, error handling and recorder that fit this "
        'host. For a shell: eval "$(ncclguard env)". Values that are already set are kept.',
    )
    parser.add_argument("--format", choices=FORMATS, default="shell", help="default: shell")
    parser.add_argument("--profile", choices=PROFILE_NAMES, default="auto", help="network profile, default: auto")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="one sentence and the source for each variable (json, deepspeed: on stderr)",
    )
    parser.add_argument("--master-addr", metavar="HOST", help="the host of rank 0, default: MASTER_ADDR")
    parser.add_argument(
        "--debug", choices=("warn", "info", "all"), default="warn", help="what NCCL logs, default: warn"
    )
    return parser


def _values(report: EnvironmentReport) -> dict[str, str]:
    """What ncclguard set, and what it would have set had the user not done so."""
    values = {setting.name: setting.value for setting in report.set}
    values.update({entry.name: entry.value for entry in report.kept if entry.proposed is not None})
    return {name: values[name] for name in sorted(values, key=list(CATALOGUE).index)}


def _comments(report: EnvironmentReport, values: dict[str, str]) -> dict[str, str]:
    reasons = {setting.name: setting.why for setting in report.set}
    reasons.update({entry.name: f"kept, from {entry.origin}" for entry in report.kept})
    return {name: explain(name, reasons.get(name)) for name in values}


def _say_what_is_wrong(report: EnvironmentReport, values: dict[str, str], format_name: str) -> None:
    for finding in report.wrong:
        print(f"ncclguard env: {finding}", file=sys.stderr)
    dependent = host_dependent(list(values))
    if format_name in SHARED_FORMATS and dependent:
        print(
            f"ncclguard env: {', '.join(dependent)} fit this host; where names differ from host to host, leave them "
            "out and call ncclguard.setup_env() in the program, which chooses on each host",
            file=sys.stderr,
        )


def _say_if_emulated() -> None:
    if importlib.util.find_spec("emulated_gpu") is None:
        return
    import torch  # only here: it takes seconds

    if torch.cuda.is_available() and "emulated" in torch.cuda.get_device_name():
        print(
            f"ncclguard env: the GPU is an emulated one ({torch.cuda.get_device_name()}): what is measured here says nothing of a "
            "real one",
            file=sys.stderr,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 when the configuration is wrong. What is found wrong goes to stderr."""
    arguments = build_parser().parse_args(argv)
    environ = dict(os.environ)
    if arguments.master_addr:
        environ["MASTER_ADDR"] = arguments.master_addr
    try:
        report = plan_environment(
            environ,
            profile=arguments.profile,
            nccl_debug=arguments.debug,
            deepspeed=True if arguments.format == "deepspeed" else None,
        )
    except GuardConfigError as error:
        print(f"ncclguard env: {error}", file=sys.stderr)
        return 2
    _say_if_emulated()
    values = _values(report)
    comments = _comments(report, values) if arguments.explain else None
    print(render(values, arguments.format, comments))
    if comments and arguments.format in UNCOMMENTED_FORMATS:
        for name, text in comments.items():
            print(f"{name}: {text}", file=sys.stderr)
    _say_what_is_wrong(report, values, arguments.format)
    return 0
