"""Writes the reports: in a thread of its own, so that neither a call nor the
agreement ever waits for a disk or a terminal.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ncclguard.incident.model import Incident
from ncclguard.incident.report import timeline
from ncclguard.incident.report.document import Document

log = logging.getLogger("ncclguard")

#: Reports of one process; a loop that fails for hours fills no disk.
AT_MOST: Final = 50
#: Ranks up to which the JSON is indented for people.
_INDENTED: Final = 64


class Writer:
    """Makes the panel and the files of incidents. `submit` returns at once and raises nothing; `wait` is for the exit.

    `folder`: where the files go, None for none; `panel`: whether the terminal shows them.
    """

    def __init__(self, folder: str | None, panel: bool, rank: int, world_size: int) -> None:
        self._folder = folder
        self._panel = panel
        # Now, because torch puts a buffer in its place while it prints an uncaught exception.
        self._stream = sys.stderr
        self._rank = rank
        self._world_size = world_size
        self._waiting: deque[tuple[Incident, str, Mapping[int, Any]]] = deque()
        self._condition = threading.Condition()
        self._busy = False
        self._submitted = 0
        self._seen: set[str] = set()

    def submit(self, incident: Incident, job: str, histories: Mapping[int, Any]) -> None:
        """Report an incident, once; `histories` by rank (see `incident.history.snapshot`), `job` the session's name."""
        with self._condition:
            if incident.id in self._seen or (self._folder is None and not self._panel):
                return
            self._seen.add(incident.id)
            self._submitted += 1
            if self._submitted > AT_MOST:
                if self._submitted == AT_MOST + 1:
                    log.warning("ncclguard: this is incident %d of this process; no more are reported", AT_MOST + 1)
                return
            self._waiting.append((incident, job, histories))
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
                self._report(incident, job, histories)
            except Exception:
                log.exception("ncclguard: the report of incident %s could not be made; the job goes on", incident.id)

    def _report(self, incident: Incident, job: str, histories: Mapping[int, Any]) -> None:
        if self._panel:
            from ncclguard.incident.report.panel import show

            try:
                show(incident, self._stream)
            except (OSError, ValueError) as error:  # closed, full, or a pipe without a reader
                log.warning("ncclguard: the panel of incident %s could not be shown: %s", incident.id, error)
        if self._folder is not None:
            self._write_files(self._document(incident, job, histories))

    def _document(self, incident: Incident, job: str, histories: Mapping[int, Any]) -> Document:
        import torch

        from ncclguard import __version__

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
        )

    def _write_files(self, document: Document) -> None:
        from ncclguard.incident.report.html import render_html

        name = f"incident-{document.incident.id}"
        indent = 2 if document.world_size <= _INDENTED else None
        texts = {f"{name}.json": document.model_dump_json(indent=indent) + "\n", f"{name}.html": render_html(document)}
        for folder in self._folders():
            try:
                write_all(folder, texts)
            except OSError as error:
                log.warning("ncclguard: the report of incident %s cannot be written: %s", document.incident.id, error)
                continue
            log.warning("ncclguard: the report of incident %s is %s", document.incident.id, folder / f"{name}.html")
            return
        log.warning("ncclguard: set NCCLGUARD_REPORT_DIR to a folder that can be written, or to none for no files")

    def _folders(self) -> list[Path]:
        """The folder that was chosen, and the machine's for temporary files in case that does not take them."""
        chosen = Path(os.path.abspath(os.path.expanduser(self._folder or ".")))
        with contextlib.suppress(OSError):  # no usable folder for temporary files at all
            return [chosen, Path(tempfile.gettempdir(), f"ncclguard-incidents-{os.getuid()}")]
        return [chosen]


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
