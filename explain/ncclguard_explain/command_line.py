"""Parts that all commands share: examples and exit codes in `--help`, progress on a terminal, their end."""

from __future__ import annotations

import argparse
import codecs
import difflib
import errno
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TextIO, TypeVar

from ncclguard_explain.language import ENGLISH, Message, current, folded, say, speaking_to, told, tr

#: The exit code of a command whose output nobody reads any more, as other programs have it.
READER_GONE = 128 + signal.SIGPIPE
#: That of one whose output cannot be written.
UNWRITTEN = 2

#: What argparse itself says in help and in errors: it stands here for the catalogue, where `in_help` and `say` find it.
_OF_ARGPARSE: Final = (
    tr("options", "help"),
    tr("optional arguments", "help"),  # Python 3.9
    tr("positional arguments", "help"),
    tr("show this help message and exit", "help"),
    tr("argument {name}: {text}"),
    tr("unrecognized arguments: {given}"),
    tr("the following arguments are required: {choices}"),
    tr("one of the arguments {choices} is required"),
    tr("not allowed with argument {name}"),
    tr("expected one argument"),
    tr("expected at most one argument"),
    tr("expected at least one argument"),
    tr("ignored explicit argument {given}"),
    tr("invalid {kind} value: {given}"),
    tr("invalid choice: {given} (choose from {choices})"),
    tr("ambiguous option: {given} could match {choices}"),
)


def in_help(text: str) -> str:
    """A text of a command's help in the reader's language; scripts/messages.py finds those that `tr` has not made."""
    return (text if isinstance(text, Message) else Message(text, context="help")).said(current())


class HelpFormatter(argparse.HelpFormatter):
    """Says texts in the reader's language; wraps paragraphs, and leaves a text that has lines of its own."""

    def add_text(self, text: str | None) -> None:
        super().add_text(text and in_help(text))

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and in_help(heading))

    def format_help(self) -> str:
        # argparse puts a colon of its own behind a heading.
        return re.sub(r"(?m)(?<=[\u4e00-\u9fff]):$", "：", super().format_help())

    def _format_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None) -> str:
        if current() == ENGLISH or prefix is not None:
            return super()._format_usage(usage, actions, groups, prefix)
        # argparse indents the lines below by the number of its characters, each of which has two columns.
        said = told("usage: ", "help")
        stand_in = ":" * 2 * len(said)
        return super()._format_usage(usage and in_help(usage), actions, groups, stand_in).replace(stand_in, said, 1)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.help or current() == ENGLISH:
            return super()._get_help_string(action)
        return in_help(action.help if isinstance(action.help, Message) else action.help.removesuffix(_DEFAULT))

    def _split_lines(self, text: str, width: int) -> list[str]:
        lines = [] if current() == ENGLISH else folded(" ".join(text.split()), width).splitlines()
        return lines if len(lines) > 1 else super()._split_lines(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines() if "\n" in text else self._split_lines(text, width - len(indent))
        return "\n".join(indent + line for line in lines)


#: What `argparse.BooleanOptionalAction` appends to a help text before Python 3.13.
_DEFAULT: Final = " (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """The arguments of a command, whose help and errors are in the reader's language."""

    #: Of a call its purpose, and of an exit code its meaning.
    examples: Mapping[str, str] = {}
    exit_codes: Mapping[int, str] = {}

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **given)

    def format_help(self) -> str:
        if not self.exit_codes:
            return super().format_help()
        lines = [told("examples:", "help")]
        for command, purpose in self.examples.items():
            lines += [f"  {command}", f"      {in_help(purpose)}"]
        lines += ["", told("exit codes:", "help")]
        lines += [f"  {code:>3}  {in_help(meaning)}" for code, meaning in self.exit_codes.items()]
        self.epilog = "\n".join(lines)
        return super().format_help()

    def print_help(self, file: Any = None) -> None:
        with speaking_to(file or sys.stdout):
            super().print_help(file)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = [str(choice) for choice in action.choices or ()]
        close = difflib.get_close_matches(str(value), known, n=1, cutoff=0.7)
        if close and close[0] != str(value):
            text = tr("invalid choice: {given}: did you mean {name}?", given=repr(value), name=close[0])
            raise argparse.ArgumentError(action, text)
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        with speaking_to(sys.stderr):
            self.print_usage(sys.stderr)
            self.exit(2, told("{name}: error: {text}\n", "help", name=self.prog, text=say(message)))


ParserT = TypeVar("ParserT", bound=Parser)


def described(parser: ParserT, examples: Mapping[str, str], exit_codes: Mapping[int, str]) -> ParserT:
    """Return the parser with examples (command to purpose) and exit codes at the end of its help.

    >>> made = described(Parser(prog="ncclguard top", add_help=False), {"ncclguard top": "live"}, {0: "shown"})
    >>> print(made.format_help())
    usage: ncclguard top
    <BLANKLINE>
    examples:
      ncclguard top
          live
    <BLANKLINE>
    exit codes:
        0  shown
    <BLANKLINE>
    """
    parser.examples, parser.exit_codes = examples, exit_codes
    return parser


def run_command(run: Callable[[], int]) -> int:
    """Run a command of this process and return its exit code.

    Where the reader of its output has gone, as `head` does, it ends in silence, with the code of other programs; where
    its output cannot be written, as on a full disk, with a line and `UNWRITTEN`. A character that the output's encoding
    lacks is written as its number.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    outputs = {stream.fileno(): os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr) if _is_file(stream)}
    try:
        try:
            return run()
        finally:
            print(end="", flush=True)  # the interpreter would report at its end that it cannot
    except (BrokenPipeError, SystemExit):  # argparse and rich make the second of the first, and rich closes the output
        gone = [output for output, pipe in outputs.items() if _has_no_reader(pipe)]
        if not gone:  # another pipe broke, or a socket; or the command's own end
            raise
        _drop(gone)
        return READER_GONE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        print(f"ncclguard: {told('what was printed cannot be written: {error}', error=error)}", file=sys.stderr)
        _drop([sys.stdout.fileno()])
        return UNWRITTEN
    finally:
        for pipe in outputs.values():
            os.close(pipe)


def _drop(outputs: Iterable[int]) -> None:
    """Have what is still to be written there go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nowhere, output)


def _is_file(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0
    except (OSError, ValueError):
        return False


def _has_no_reader(output: int) -> bool:
    """Return whether this is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(output, 0)  # errors are reported in any case
    return any(events & select.POLLERR for _, events in poll.poll(0))


@contextmanager
def progress(what: str | Callable[[], str], *, shown: bool = True, stream: TextIO | None = None) -> Iterator[Tell]:
    """Show what is being done, and for how long, until the block ends; only where `stream` (stderr) is a terminal.

    `what` is a text, or gives the present one. The function that is yielded changes the text.
    """
    stream = sys.stderr if stream is None else stream
    now = [what if callable(what) else lambda: what]

    def tell(text: str) -> None:
        now[0] = lambda: text

    if not shown or not stream.isatty():
        yield tell
        return
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
    from rich.text import Text

    class Now(ProgressColumn):
        max_refresh = 0.2

        def render(self, task: Task) -> Text:
            return Text(now[0]())

    columns = (SpinnerColumn(), Now(), TimeElapsedColumn())
    # What is printed meanwhile stays on stdout, which may be a pipe.
    with Progress(*columns, console=Console(file=stream), transient=True, redirect_stdout=False) as bar:
        bar.add_task("", total=None)
        yield tell


#: Changes the text that `progress` shows.
Tell = Callable[[str], None]
