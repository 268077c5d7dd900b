"""The block of variables in the syntax of shells, files, batch systems and launchers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from ncclguard.environment.catalogue import CATALOGUE

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
    head = "# in the batch script, before srun, which hands the environment on\n#SBATCH --export=ALL\n"
    return head + _shell(values, comments)


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
    r"""The variables in a format; ``comments`` are put above their variables where the format has comments.

    >>> render({"NCCL_SOCKET_IFNAME": "=eth0"}, "shell")
    "export NCCL_SOCKET_IFNAME='=eth0'"
    """
    shown = {} if comments is None or format_name in UNCOMMENTED_FORMATS else comments
    return _WRITERS[format_name](values, shown)


def explain(name: str, why: str | None = None) -> str:
    """One sentence on a variable and where that is from; ``why`` is the reason for the value it was given."""
    variable = CATALOGUE[name]
    reason = f" Here: {why}." if why else ""
    return f"{variable.sentence}{reason} [{variable.source}]"


def host_dependent(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the names whose right value can differ from host to host."""
    return tuple(name for name in names if CATALOGUE[name].differs_per_host)
