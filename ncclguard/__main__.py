"""The `ncclguard` command: `ncclguard COMMAND [ARGUMENT ...]`; also `python -m ncclguard`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ncclguard import __version__
from ncclguard.spelling import meant
from ncclguard_explain.command_line import READER_GONE, in_help, run_command
from ncclguard_explain.language import speaking_to, told, tr

USAGE = 2
EXIT_CODES = {
    0: "help or the version was shown",
    USAGE: "there is no such command",
    READER_GONE: "the reader of the output of any command ended before it, as head does",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: its module, imported only when it is called, and what it is for.

    The module has `main(argv) -> int`, `build_parser()` and `EXIT_CODES`, code to meaning.
    """

    module: str
    help: str

    @property
    def available(self) -> bool:
        """Return whether this installation has the module."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # a package above it is missing
            return False


COMMANDS = {
    "bench": Command(
        "ncclguard.bench.__main__", help="time plain and guarded collectives side by side, and rehearse faults"
    ),
    "doctor": Command("ncclguard.environment.doctor.command", help="check this host or the whole job before training"),
    "env": Command("ncclguard.environment.env_command", help="print the environment variables that fit this host"),
    "explain": Command("ncclguard_explain.command", help="read what a hung job left and name the rank that held it up"),
    "hang": Command("ncclguard.hang.command", help="name the rank that holds up a job that hangs now on this host"),
    "observe": Command(
        "ncclguard.watch.observe", help="run a program that is not changed, and name the rank that holds the others up"
    ),
    "top": Command("ncclguard.metrics.top_command", help="watch the ranks of a running job on this host"),
    "set": Command("ncclguard.metrics.control", help="change settings of a running job, on all ranks at once"),
    "run": Command(
        "ncclguard.training.launcher",
        help="start a training as torchrun does, and leave alone the ranks that go on without a lost one",
    ),
    "store": Command(
        "ncclguard.coordination.store_command", help="have the store where processes meet that are not in one job"
    ),
    "report": Command("ncclguard.incident.report", help="make the page of an incident again, from its JSON"),
    "drill": Command("ncclguard.faults.drill", help="inject a fault into a running job that allows it"),
    "completion": Command(
        "ncclguard.completion", help="print a script with which bash, zsh or fish completes all this"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 for a command that does not exist."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    if not words:
        with speaking_to(sys.stderr):
            print(usage(), file=sys.stderr)
        return USAGE
    name, rest = words[0], words[1:]
    if name == "help" and rest:
        name, rest = rest[0], ["--help"]
    if name in ("-h", "--help", "help"):
        with speaking_to(sys.stdout):
            print(usage())
        return 0
    if name in ("-V", "--version"):
        print(f"ncclguard {__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None or not command.available:
        known = [name for name, command in COMMANDS.items() if command.available]
        hint = meant(name, known) or tr("there are {some}", some=", ".join(known))
        text = told("there is no command {name}: {hint}", name=repr(name), hint=hint)
        print(f"ncclguard: {text}", file=sys.stderr)
        return USAGE
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        package = (error.name or "ncclguard").partition(".")[0]
        if package.startswith("ncclguard"):
            raise
        package = package.replace("_", "-")
        text = told("{name} needs {package}, which is not installed: pip install {package}", name=name, package=package)
        print(f"ncclguard: {text}", file=sys.stderr)
        return USAGE
    return int(module.main(rest))


def usage() -> str:
    """Return the list of commands that this installation has, one a line."""
    lines = [f"{told('usage: ', 'help')}ncclguard [--version] COMMAND [ARGUMENT ...]", "", told("commands:", "help")]
    lines += [f"  {name:<11}{in_help(command.help)}" for name, command in COMMANDS.items() if command.available]
    last = told("`ncclguard COMMAND --help` shows the arguments, examples and exit codes of one.", "help")
    return "\n".join([*lines, "", last])


if __name__ == "__main__":
    sys.exit(main())
