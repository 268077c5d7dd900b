"""Parts that all commands share: examples and exit codes in `--help`, progress on a terminal, their end."""

from __future__ import annotations

import argparse
import codecs
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO, TypeVar

from ncclguard_explain.language import told

#: The exit code of a command whose output nobody reads any more, as other programs have it.
READER_GONE = 128 + signal.SIGPIPE
#: That of one whose output cannot be written.
UNWRITTEN = 2
ParserT = TypeVar("ParserT", bound=argparse.ArgumentParser)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs, and leaves a text that has lines of its own: argparse does either with all texts."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "\n".join(indent + line for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def described(parser: ParserT, examples: Mapping[str, str], exit_codes: Mapping[int, str]) -> ParserT:
    """Return the parser with examples (command to purpose) and exit codes at the end of its help.

    >>> made = described(argparse.ArgumentParser(prog="ncclguard top"), {"ncclguard top": "live"}, {0: "shown"})
    >>> print(made.epilog)
    examples:
      ncclguard top
          live
    <BLANKLINE>
    exit codes:
        0  shown
    """
    lines = ["examples:"]
    for command, purpose in examples.items():
        lines += [f"  {command}", f"      {purpose}"]
    lines += ["", "exit codes:", *(f"  {code:>3}  {meaning}" for code, meaning in exit_codes.items())]
    parser.formatter_class = HelpFormatter
    parser.epilog = "\n".join(lines)
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
