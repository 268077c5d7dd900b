"""The report of an incident: a panel in the terminal, a page and its data as files, and `ncclguard report`.

In a job a thread of its own writes the reports, so that neither a call nor the agreement ever waits for a disk or a
terminal. `ncclguard report FILE.json ...` makes the page of a report again, and shows its panel.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import logging
import os
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

from pydantic import ValidationError

from ncclguard import __version__
from ncclguard.incident import timeline
from ncclguard.incident.model import Incident, MembershipChange, as_text, what_to_do
from ncclguard.incident.page import render_html
from ncclguard.incident.timeline import Document, RasQuote
from ncclguard_explain.cause import Cause
from ncclguard_explain.command_line import Parser, described
from ncclguard_explain.language import folded, speaking_to, told, tr
from ncclguard_explain.page import PageError

log = logging.getLogger("ncclguard")

#: Reports of one process; a loop that fails for hours fills no disk.
AT_MOST: Final = 50
#: Ranks up to which the JSON is indented for people.
_INDENTED: Final = 64


class Witness(Protocol):
    """A source that is asked beside the ranks at an incident; `ncclguard.environment.ras.Witness` asks NCCL's RAS."""

    @property
    def patience(self) -> float:
        """Seconds within which an answer comes, or none."""

    def begin(self) -> bool:
        """Ask, unless that was done a moment ago, and return at once; False where there is nothing to ask about."""

    def quote(self, incident: Incident, seconds: float) -> RasQuote | None:
        """The answer, or why there is none; None if that takes longer than `seconds`."""


class Writer:
    """Makes the panel and the files of incidents in a thread of its own; `wait` is for the exit of the process.

    `folder`: where the files go, None for none; `panel`: whether the terminal shows incidents; `witness`: NCCL's RAS.
    """

    def __init__(
        self, folder: str | None, panel: bool, rank: int, world_size: int, witness: Witness | None = None
    ) -> None:
        self._folder = folder
        self._panel = panel
        # Now, because torch puts a buffer in its place while it prints an uncaught exception.
        self._stream = sys.stderr
        self._rank = rank
        self._world_size = world_size
        self._witness = witness
        self._waiting: deque[tuple[Incident, str, Mapping[int, Any] | None]] = deque()
        self._condition = threading.Condition()
        self._busy = False
        self._submitted = 0
        self._seen: set[str] = set()
        self._written: dict[str, Document] = {}

    def expect(self) -> None:
        """An incident begins that this rank may have to report: ask RAS before anything is ended because of it."""
        if self._witness is not None and (self._folder is not None or self._panel):
            self._witness.begin()

    def submit(self, incident: Incident, job: str, histories: Mapping[int, Any]) -> None:
        """Report an incident, once, and return at once.

        `histories` are `timeline.snapshot` by rank, `job` is the name of the job's store. Raises nothing.
        """
        with self._condition:
            if incident.id in self._seen or (self._folder is None and not self._panel):
                return
            self._seen.add(incident.id)
            self._submitted += 1
            if self._submitted > AT_MOST:
                if self._submitted == AT_MOST + 1:
                    log.warning(
                        "ncclguard: %s",
                        told(
                            "this is incident {number} of this process; no more are reported", "log", number=AT_MOST + 1
                        ),
                    )
                return
            self._waiting.append((incident, job, histories))
        self._begin()

    def complete(self, incident: Incident, job: str) -> None:
        """Write a report once more, with the `afterwards` that this incident has now, and return at once.

        The report of another rank, which is gone, is read from the folder; where that does not have it, it is made
        without a timeline. Raises nothing.
        """
        with self._condition:
            if self._folder is None or self._submitted > AT_MOST:
                return
            self._waiting.append((incident, job, None))
        self._begin()

    def _begin(self) -> None:
        with self._condition:
            if self._busy:
                return
            self._busy = True
        try:
            threading.Thread(target=self._work, name="ncclguard-report", daemon=True).start()
        except RuntimeError:  # the program has ended: Python 3.12 starts no threads any more
            self._work()

    def wait(self, seconds: float) -> bool:
        """Give the thread this long to finish; False when it did not."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._busy, timeout=seconds)

    def _work(self) -> None:
        while True:
            with self._condition:
                if not self._waiting:
                    self._busy = False
                    self._condition.notify_all()
                    return
                incident, job, histories = self._waiting.popleft()
            try:
                if histories is None:
                    self._complete(incident, job)
                else:
                    self._report(incident, job, histories)
            except Exception:
                log.exception(
                    "ncclguard: %s",
                    told("the report of incident {name} could not be made; the job goes on", "log", name=incident.id),
                )

    def _report(self, incident: Incident, job: str, histories: Mapping[int, Any]) -> None:
        witness = self._witness if self._witness is not None and self._witness.begin() else None
        said = witness.quote(incident, 0.0) if witness is not None else None
        if self._panel:
            try:
                show(incident, self._stream, said.evidence if said is not None else ())
            except (OSError, ValueError) as error:  # closed, full, or a pipe without a reader
                log.warning(
                    "ncclguard: %s",
                    told(
                        "the panel of incident {name} could not be shown: {error}", "log", name=incident.id, error=error
                    ),
                )
        document = self._document(incident, job, histories, said) if self._folder is not None else None
        if document is not None:
            self._write_files(document)
        if witness is None or said is not None:
            return
        # RAS waits for processes that do not answer it, and torch may end this one meanwhile: so the report is there
        # already, and is made again.
        said = witness.quote(incident, witness.patience)
        if said is None:
            return
        if said.evidence:
            log.warning(
                "ncclguard: %s",
                told("to incident {name}: {text}", "log", name=incident.id, text="\n".join(said.evidence)),
            )
        if document is not None:
            self._write_files(document.model_copy(update={"ras": said}), again=True)

    def _complete(self, incident: Incident, job: str) -> None:
        document = self._written.get(incident.id) or self._found(incident) or self._document(incident, job, {}, None)
        told = document.incident.followed_by(incident.afterwards)
        self._write_files(document.model_copy(update={"incident": told}), again=True)

    def _found(self, incident: Incident) -> Document | None:
        """Return what another rank has written of this incident, if this one can read it."""
        for folder in self._folders():
            with contextlib.suppress(OSError, ValueError):  # not there, not of this version, or not a report
                found = Document.model_validate_json((folder / f"incident-{incident.id}.json").read_text("utf-8"))
                if found.incident.id == incident.id:
                    return found
        return None

    def _document(self, incident: Incident, job: str, histories: Mapping[int, Any], said: RasQuote | None) -> Document:
        import torch  # not above: `ncclguard report` starts without it

        return Document(
            written_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            written_by=self._rank,
            host=socket.gethostname(),
            job=job,
            world_size=self._world_size,
            ncclguard=__version__,
            torch=str(torch.__version__),
            incident=incident,
            timeline=timeline.build(incident, histories),
            ras=said,
        )

    def _write_files(self, document: Document, again: bool = False) -> None:
        name = f"incident-{document.incident.id}"
        indent = 2 if document.world_size <= _INDENTED else None
        texts = {f"{name}.json": document.model_dump_json(indent=indent) + "\n"}
        try:
            texts[f"{name}.html"] = render_html(document)
        except PageError as error:
            log.warning(
                "ncclguard: %s",
                told(
                    "the report of incident {name} has no page: {error}", "log", name=document.incident.id, error=error
                ),
            )
        for folder in self._folders():
            try:
                write_all(folder, texts)
            except OSError as error:
                text = told(
                    "the report of incident {name} cannot be written: {error}", name=document.incident.id, error=error
                )
                log.warning("ncclguard: %s", text)
                continue
            self._written[document.incident.id] = document
            if not again:
                where = folder / list(texts)[-1]
                text = told("the report of incident {name} is {path}", name=document.incident.id, path=where)
                log.warning("ncclguard: %s", text)
            return
        text = told("set NCCLGUARD_REPORT_DIR to a folder that can be written, or to none for no files")
        log.warning("ncclguard: %s", text)

    def _folders(self) -> list[Path]:
        """The folder that was chosen, and the machine's for temporary files in case that does not take them."""
        chosen = Path(os.path.abspath(os.path.expanduser(self._folder or ".")))
        with contextlib.suppress(OSError):  # no usable folder for temporary files at all
            return [chosen, Path(tempfile.gettempdir(), f"ncclguard-incidents-{os.getuid()}")]
        return [chosen]


class Sequels:
    """The changes of the job after each incident of lost ranks, and which rank has the incident's report say so.

    Every rank keeps the same record of what all have agreed on. A report is completed by the rank that wrote it, or,
    where that is gone, by the lowest rank that has been there since; it writes all that is known, also what the other
    one may not have come to. So at most one living rank writes a report. A rank that came back knows nothing of earlier
    losses, and completes none.
    """

    def __init__(self, rank: int, complete: Callable[[Incident, str], None]) -> None:
        self._rank = rank
        self._complete = complete
        self._lock = threading.Lock()
        self._cases: deque[_Case] = deque(maxlen=AT_MOST)
        self._changes: deque[tuple[MembershipChange, dict[int, int], frozenset[int]]] = deque(maxlen=AT_MOST)
        self._returns: dict[int, int] = {}  # how often a rank has come back, so that its second loss is another
        self._given_up: dict[int, int] = {}

    def known(self, incident: Incident) -> bool:
        """Return whether this incident only says that ranks are gone, of whose loss there is one already."""
        with self._lock:
            lives = self._lives(_lost(incident))
            told = [case.lives.items() for case in self._cases]
            return set(lives) == set(incident.culprits) and all(
                any(one in each for each in told) for one in lives.items()
            )

    def found(self, incident: Incident, writer: int, session: str) -> None:
        """An agreed incident of this session, which `writer` reports; by the monitor, maybe late."""
        with self._lock:
            given_up = self._given_up.keys() & {*incident.culprits}
            case = _Case(incident, writer, session, self._lives({*_lost(incident), *given_up}))
            self._cases.append(case)
            for change, lives, participants in self._changes:
                if case.concerned(change, lives):
                    self._tell(case, change, participants)

    def given_up(self, ranks: Collection[int]) -> None:
        """These ranks do not run, and their launcher ends them: no other loss than what the incident has named."""
        with self._lock:
            lives = self._lives(ranks)
            self._given_up |= lives
            for case in self._cases:
                case.lives |= {rank: life for rank, life in lives.items() if rank in case.incident.culprits}

    def changed(self, change: MembershipChange, participants: Collection[int]) -> None:
        """All ranks that take part now, global ranks, have agreed on this."""
        with self._lock:
            lives = self._lives(change.ranks)
            self._changes.append((change, lives, frozenset(participants)))
            for case in self._cases:
                if case.concerned(change, lives):
                    self._tell(case, change, frozenset(participants))
                elif case.changes:
                    self._hand_over(case, change, frozenset(participants))
            if change.kind == "rejoined":
                self._returns |= {rank: life + 1 for rank, life in lives.items()}
                self._given_up = {rank: life for rank, life in self._given_up.items() if rank not in lives}

    def _lives(self, ranks: Collection[int]) -> dict[int, int]:
        return {rank: self._returns.get(rank, 0) for rank in ranks}

    def _tell(self, case: _Case, change: MembershipChange, participants: frozenset[int]) -> None:
        case.changes.append(change)
        case.narrow(change, participants)
        if case.completed_by == self._rank:
            self._complete(case.incident.followed_by(case.changes), case.session)

    def _hand_over(self, case: _Case, change: MembershipChange, participants: frozenset[int]) -> None:
        """The rank that should have told of an earlier change may be gone, and may not have come to it."""
        before = case.completed_by
        case.narrow(change, participants)
        if case.completed_by == self._rank != before:
            self._complete(case.incident.followed_by(case.changes), case.session)


def _lost(incident: Incident) -> list[int]:
    """The culprits without whom the job goes on, if it does."""
    gone = {report.rank for report in incident.ranks if report.state == "departed"}
    return [
        rank
        for rank in incident.culprits
        if incident.cause in (Cause.LOST, Cause.EXITED) or rank in gone or rank not in incident.participants
    ]


class _Case:
    """One incident; `lives`: its ranks that are gone, and how often each had come back before."""

    def __init__(self, incident: Incident, writer: int, session: str, lives: Mapping[int, int]) -> None:
        self.incident = incident
        self.session = session
        self.changes: list[MembershipChange] = []
        self._writer = writer
        self.lives = dict(lives)
        self._since: frozenset[int] | None = None  # ranks that have been there ever since

    @property
    def completed_by(self) -> int:
        """The rank that has the report say what came next."""
        since = self._since or frozenset()
        return self._writer if self._writer in since else min(since, default=-1)

    def concerned(self, change: MembershipChange, lives: Mapping[int, int]) -> bool:
        """Return whether the change is about a rank of this incident, and about the same life of it."""
        return any(self.lives.get(rank) == life for rank, life in lives.items())

    def narrow(self, change: MembershipChange, participants: frozenset[int]) -> None:
        """Ranks that are not there any more, or are back, have not been there ever since."""
        since = participants if self._since is None else self._since & participants
        self._since = since - set(change.ranks)


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all files or none; each appears under its name only when it is complete. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[Path, Path] = {}
    try:
        for name, text in texts.items():
            unfinished = folder / f".{name}.{os.getpid()}"
            made[unfinished] = folder / name
            with open(unfinished, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        for unfinished, finished in made.items():
            os.replace(unfinished, finished)
    except BaseException:
        for unfinished in made:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
        raise


# ----------------------------------------------------------------------------------------------------- in the terminal

#: Columns where the terminal does not tell, as in a launcher's log; and the most that is used of a wide one.
WIDTH: Final = 110
WIDEST: Final = 140


def show(incident: Incident, stream: TextIO | None = None, evidence: Sequence[str] = ()) -> None:
    """Print the incident as one panel to `stream`, stderr by default; as plain text where rich or the encoding fails.

    `evidence` is what other witnesses say. The text is written in one piece, so that other ranks' lines do not fall
    into it. Raises OSError when the stream refuses it.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None:  # pythonw, or a daemon that closed it
        return
    with speaking_to(stream):
        try:
            text = _framed(incident, stream, evidence)
            text.encode(getattr(stream, "encoding", None) or "utf-8")
        except (ImportError, UnicodeError, LookupError):
            encoding = getattr(stream, "encoding", None) or "ascii"
            with contextlib.suppress(LookupError):
                text = f"{as_text(incident, evidence)}\n".encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)
    stream.flush()


def _framed(incident: Incident, stream: TextIO, evidence: Sequence[str]) -> str:
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    terminal = stream.isatty()
    made = io.StringIO()
    width = min(Console(file=stream).width, WIDEST) if terminal else WIDTH
    console = Console(file=made, width=width, force_terminal=terminal, legacy_windows=False)
    first, _, rest = as_text(incident, evidence).partition("\n")
    identifier, _, summary = first.partition(": ")
    inside = width - 4  # beside the frame and a space on each side
    body = Text(f"{folded(summary, inside)}\n", style="bold", overflow="fold")
    for line in rest.splitlines():
        style = "green" if line.startswith(f"  {what_to_do()}") else "dim" if line.startswith("  (") else ""
        body.append(f"{folded(line.removeprefix('  '), inside)}\n", style=style or "not bold")
    body.rstrip()
    console.print(Panel(body, title=identifier, title_align="left", border_style="red", width=width))
    return made.getvalue()


# --------------------------------------------------------------------------------------------------------- the command

UNUSABLE = 2
EXIT_CODES = {0: "the pages were written", UNUSABLE: "a file cannot be read or written; the files before it are done"}
EXAMPLES = {
    "ncclguard report ncclguard-incidents/*.json": "all panels of a job, and a page beside each file",
    "ncclguard report incident-0-17.0.json --html /tmp/page.html": "one page, elsewhere",
}


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    parser = Parser(
        prog="ncclguard report",
        description="Make the page of an incident's report again, from its JSON, and show its panel.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.json", type=Path)
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="where the page goes, for one file; default: beside it"
    )
    return described(parser, EXAMPLES, EXIT_CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page beside each file, or to `--html`; returns 0, or 2 when a file cannot be read or written."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.html is not None and len(arguments.files) > 1:
        parser.error(tr("--html takes one page: give one FILE.json with it"))
    for file in arguments.files:
        page = arguments.html or file.with_suffix(".html")
        try:
            document = Document.model_validate_json(file.read_text(encoding="utf-8"))
            show(document.incident, sys.stdout, document.ras.evidence if document.ras is not None else ())
            page.write_text(render_html(document), encoding="utf-8", errors="backslashreplace")
        except BrokenPipeError:  # nobody reads on: no fault of this file's
            raise
        except (OSError, ValueError, PageError) as error:  # pydantic's ValidationError is a ValueError
            name = error.filename if isinstance(error, OSError) and error.filename else file
            print(f"ncclguard report: {name}: {_refused(error, file)}", file=sys.stderr)
            return UNUSABLE
        print(page)
    return 0


def _refused(error: Exception, file: Path) -> str:
    """Say why a file is no report, without pydantic's list of what it lacks."""
    if isinstance(error, FileNotFoundError):
        return told("no such file or folder")
    if isinstance(error, IsADirectoryError):
        reports = sorted(file.glob("incident-*.json"), key=lambda one: one.stat().st_mtime)
        if reports:
            return told("this is a folder: give a file, such as its newest report, {file}", file=reports[-1])
        return told("this is a folder: give a file")
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    if first["type"] == "value_error":  # of another version
        return first["msg"].removeprefix("Value error, ")
    return told("this is no report of an incident: give the JSON that lies beside its page")
