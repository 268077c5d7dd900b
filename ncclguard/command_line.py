"""What all commands show in the same way: examples and exit codes in their `--help`, and progress on a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO, TypeVar

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
