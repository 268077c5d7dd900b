"""``ncclguard env``: print the variables of ``setup_env()``, for a shell, a file, a batch system or a launcher."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Literal, get_args

from ncclguard.config import current_config
from ncclguard.environment.catalogue import CATALOGUE
from ncclguard.environment.limits import as_table, limits_in_force
from ncclguard.environment.setup import PROFILE_NAMES, EnvironmentReport, plan_environment
from ncclguard.errors import GuardConfigError
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import beside, say, speaking_to, told, tr

EXIT_CODES = {0: "the variables were printed; what is wrong is on stderr", 2: "a setting cannot be used"}
EXAMPLES = {
    'eval "$(ncclguard env)"': "set them in this shell",
    "ncclguard env --limits": "which limit of time governs what, its value here and where that is from",
    "ncclguard env --explain": "each with a sentence and its source",
    "ncclguard env --format slurm >> train.sbatch": "for a batch script; also k8s, deepspeed, dotenv, json",
    "ncclguard env --master-addr node-0 --debug info": "the interface that leads to node-0, and what NCCL says",
}

Format = Literal["shell", "dotenv", "json", "slurm", "k8s", "deepspeed"]
FORMATS: tuple[str, ...] = get_args(Format)

#: Formats that one file or script gives to all hosts, whatever their interfaces are called.
SHARED_FORMATS = frozenset({"slurm", "k8s", "deepspeed"})
#: Formats in which a comment cannot stand: DeepSpeed splits every line at its "=" (deepspeed/launcher/runner.py).
UNCOMMENTED_FORMATS = frozenset({"json", "deepspeed"})


def _commented(values: Mapping[str, str], comments: Mapping[str, str], line: Callable[[str, str], str]) -> str:
    lines = []
    for name, value in values.items():
        if name in comments:
            lines.append(f"# {comments[name]}")
        lines.append(line(name, value))
    return "\n".join(lines)


def _shell(values: Mapping[str, str], comments: Mapping[str, str]) -> str:
    return _commented(values, comments, lambda name, value: f"export {name}={_quoted(value)}")


def _quoted(value: str) -> str:
    # zsh would take an unquoted =eth0 for the path of a program.
    return f"'{value}'" if value.startswith("=") and "'" not in value else shlex.quote(value)


def _dotenv(values: Mapping[str, str], comments: Mapping[str, str]) -> str:
    return _commented(values, comments, lambda name, value: f"{name}={_dotenv_value(value)}")


def _dotenv_value(value: str) -> str:
    if re.fullmatch(r"[\w./:,=@%+-]*", value):
        return value
    # Single quotes: nothing in them is a variable. python-dotenv takes backslashes before quotes and backslashes.
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _json(values: Mapping[str, str], comments: Mapping[str, str]) -> str:
    return json.dumps(dict(values), indent=2)


def _slurm(values: Mapping[str, str], comments: Mapping[str, str]) -> str:
    # Exports and not `--export=A=b`: that option splits its value at commas, which NCCL_IB_HCA has.
    head = told("in the batch script, before srun, which hands the environment on")
    return f"# {head}\n#SBATCH --export=ALL\n{_shell(values, comments)}"


def _k8s(values: Mapping[str, str], comments: Mapping[str, str]) -> str:
    # A JSON string is a YAML one as well.
    return "env:\n" + _commented(values, comments, lambda name, value: f"- name: {name}\n  value: {json.dumps(value)}")


def _deepspeed(values: Mapping[str, str], comments: Mapping[str, str]) -> str:
    # The launcher writes `export NAME=value;` into a remote command line without quoting.
    return "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


_WRITERS: dict[str, Callable[[Mapping[str, str], Mapping[str, str]], str]] = {
    "shell": _shell,
    "dotenv": _dotenv,
    "json": _json,
    "slurm": _slurm,
    "k8s": _k8s,
    "deepspeed": _deepspeed,
}


def render(values: Mapping[str, str], format_name: str, comments: Mapping[str, str] | None = None) -> str:
    r"""Format the variables; ``comments`` are put above their variables where the format has comments.

    >>> render({"NCCL_SOCKET_IFNAME": "=eth0"}, "shell")
    "export NCCL_SOCKET_IFNAME='=eth0'"
    """
    shown = {} if comments is None or format_name in UNCOMMENTED_FORMATS else comments
    return _WRITERS[format_name](values, shown)


def explain(name: str, why: str | None = None) -> str:
    """Describe a variable and its source in one sentence; ``why`` is the reason for its value."""
    variable = CATALOGUE[name]
    reason = told("Here: {why}.", why=why) if why else ""
    return f"{beside(f'{say(variable.sentence)} ', reason).rstrip()} [{variable.source}]"


def host_dependent(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names whose right value can differ from host to host."""
    return tuple(name for name in names if CATALOGUE[name].differs_per_host)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = Parser(
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
    parser.add_argument(
        "--limits",
        action="store_true",
        help="instead: every limit of time, what it governs, its value here and where that is from (also --format json)",
    )
    return described(parser, EXAMPLES, EXIT_CODES)


def _values(report: EnvironmentReport) -> dict[str, str]:
    """Return the variables that ncclguard set, and those it would have set, with the values that the user gave."""
    values = {setting.name: setting.value for setting in report.set}
    values.update({entry.name: entry.value for entry in report.kept if entry.proposed is not None})
    return {name: values[name] for name in sorted(values, key=list(CATALOGUE).index)}


def _comments(report: EnvironmentReport, values: dict[str, str]) -> dict[str, str]:
    reasons = {setting.name: setting.why for setting in report.set}
    reasons.update({entry.name: tr("kept, from {origin}", origin=entry.origin) for entry in report.kept})
    return {name: explain(name, reasons.get(name)) for name in values}


def _say_what_is_wrong(report: EnvironmentReport, values: dict[str, str], format_name: str) -> None:
    for finding in report.wrong:
        print(f"ncclguard env: {finding}", file=sys.stderr)
    dependent = host_dependent(list(values))
    if format_name in SHARED_FORMATS and dependent:
        text = told(
            "{some} fit this host; where names differ from host to host, leave them out and call "
            "ncclguard.setup_env() in the program, which chooses on each host",
            some=", ".join(dependent),
        )
        print(f"ncclguard env: {text}", file=sys.stderr)


def _say_if_emulated() -> None:
    try:
        metadata.distribution("emulated_gpu")
    except metadata.PackageNotFoundError:
        return
    import torch  # only here: it takes seconds

    if torch.cuda.is_available() and "emulated" in (name := torch.cuda.get_device_name()):
        warning = told(
            "the GPU is an emulated one ({name}): what is measured here says nothing of a real one", name=name
        )
        print(f"ncclguard env: {warning}", file=sys.stderr)


def _say_limits(report: EnvironmentReport, format_name: str) -> int:
    found = limits_in_force(current_config(), report.limits, report.versions, os.environ)
    with speaking_to(sys.stdout):
        print(json.dumps([asdict(limit) for limit in found], indent=2) if format_name == "json" else as_table(found))
    with speaking_to(sys.stderr):
        for problem in report.limits.problems:
            print(f"ncclguard env: {say(problem)}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 when the configuration is wrong. Problems go to stderr."""
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
    if arguments.limits:
        return _say_limits(report, arguments.format)
    values = _values(report)
    with speaking_to(sys.stdout):
        comments = _comments(report, values) if arguments.explain else None
        print(render(values, arguments.format, comments))
    with speaking_to(sys.stderr):
        _say_if_emulated()
        if comments and arguments.format in UNCOMMENTED_FORMATS:
            for name, text in comments.items():
                print(f"{name}: {text}", file=sys.stderr)
        _say_what_is_wrong(report, values, arguments.format)
    return 0
