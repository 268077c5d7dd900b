"""The report in the terminal: one panel, written in one piece so that other ranks' lines do not fall into it."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Final, TextIO

from ncclguard.incident.model import Incident
from ncclguard.incident.render import as_text

#: Columns where the terminal does not tell, as in a launcher's log; and the most that is used of a wide one.
WIDTH: Final = 110
WIDEST: Final = 140


def show(incident: Incident, stream: TextIO | None = None) -> None:
    """Print the incident to `stream`, stderr by default; plain text where rich is
    missing or its frame cannot be encoded.

    Raises OSError when the stream does not take it.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None:  # pythonw, or a daemon that closed it
        return
    try:
        text = _framed(incident, stream)
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (ImportError, UnicodeError, LookupError):
        encoding = getattr(stream, "encoding", None) or "ascii"
        with contextlib.suppress(LookupError):
            text = f"{as_text(incident)}\n".encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
    stream.flush()


def _framed(incident: Incident, stream: TextIO) -> str:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    terminal = stream.isatty()
    made = io.StringIO()
    width = min(Console(file=stream).width, WIDEST) if terminal else WIDTH
    console = Console(file=made, width=width, force_terminal=terminal, legacy_windows=False)
    first, _, rest = as_text(incident).partition("\n")
    identifier, _, summary = first.partition(": ")
    body = Text(summary + "\n", style="bold", overflow="fold")
    for line in rest.splitlines():
        style = "green" if line.startswith("  what to do:") else "dim" if line.startswith("  (") else ""
        body.append(line.removeprefix("  ") + "\n", style=style or "not bold")
    body.rstrip()
    console.print(Panel(body, title=identifier, title_align="left", border_style="red", width=width))
    return made.getvalue()
