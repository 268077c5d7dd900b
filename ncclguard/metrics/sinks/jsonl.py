"""Records as JSON, one a line, in files that are rotated by size."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TextIO

from ncclguard.metrics.records import Record


class JsonlSink:
    """Appends to `path`, in which `{rank}` stands for the rank; `path.1` is the newest of `backups` older files.

    A file is rotated before it would exceed `max_bytes`. Raises ValueError for limits that cannot be kept, OSError when
    the folder cannot be made.
    """

    name = "jsonl"

    def __init__(
        self, path: str | os.PathLike[str], *, rank: int = 0, max_bytes: int = 16_000_000, backups: int = 3
    ) -> None:
        if max_bytes < 1 or backups < 0:
            raise ValueError(f"max_bytes is {max_bytes}, backups {backups}: give at least 1 byte and 0 backups")
        self.path = Path(os.fspath(path).replace("{rank}", str(rank)))
        self._max_bytes = max_bytes
        self._backups = backups
        self._file: TextIO | None = None
        self._size = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        line = json.dumps(record.to_dict()) + "\n"  # ASCII, so characters are bytes
        file = self._file or self._open()
        if self._size and self._size + len(line) > self._max_bytes:
            file = self._rotate(file)
        file.write(line)
        file.flush()  # whoever follows the file sees whole lines, and a killed process loses none
        self._size += len(line)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> TextIO:
        file = self._file = self.path.open("a", encoding="ascii")
        self._size = file.tell()
        return file

    def _rotate(self, file: TextIO) -> TextIO:
        file.close()
        self._file = None
        for number in range(self._backups - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._backup(number), self._backup(number + 1))
        if self._backups:
            os.replace(self.path, self._backup(1))
        else:
            self.path.unlink()
        return self._open()

    def _backup(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
