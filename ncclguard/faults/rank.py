"""What a rank that was started by ``run_ranks`` can say to the process that started it, and hear from it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

REPORT_VARIABLE = "_NCCLGUARD_REPORT_DIR"
PATH_VARIABLE = "_NCCLGUARD_PARENT_PATH"  # the import path of the process that called run_ranks


def report(**values: Any) -> None:
    """Hand JSON-able values to the process that called ``run_ranks``; they survive a SIGKILL right after the call.

    Raises TypeError for a value that JSON cannot carry. Outside ``run_ranks`` the values are printed, so that a program
    also runs by hand.

    >>> report(loss=0.5)
    report of rank 0: {"loss": 0.5}
    """
    line = json.dumps(values)
    rank = os.environ.get("RANK", "0")
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        print(f"report of rank {rank}: {line}", flush=True)
        return
    descriptor = os.open(report_file(Path(directory), int(rank)), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode() + b"\n")  # one write, so no reader meets half a line
    finally:
        os.close(descriptor)


def wait_until_told(word: str, seconds: float = 60.0) -> None:
    """Block until the parent called ``job.tell(word)``; TimeoutError after ``seconds``, RuntimeError outside a job."""
    directory = os.environ.get(REPORT_VARIABLE)
    if directory is None:
        raise RuntimeError(f"nobody can tell {word!r}: this process was not started by faults.start_ranks; start it so")
    started = time.monotonic()
    file = word_file(Path(directory), word)
    while not file.exists():
        waited = time.monotonic() - started
        if waited > seconds:
            raise TimeoutError(
                f"the parent did not call tell({word!r}) within {seconds:g} s; check that the test reaches it"
            )
        time.sleep(min(0.05, 0.005 + waited / 50))  # dozens of ranks may wait for long


def report_file(directory: Path, rank: int) -> Path:
    """Where a rank's reports go, one JSON object a line."""
    return directory / f"rank{rank}.reports"


def word_file(directory: Path, word: str) -> Path:
    """The file whose existence says that the parent has told ``word``."""
    return directory / f"told.{word}"


def read_reports(directory: Path, rank: int) -> dict[str, Any]:
    """All values that a rank has reported so far; a later value of a key replaces an earlier one."""
    values: dict[str, Any] = {}
    file = report_file(directory, rank)
    if file.exists():
        for line in file.read_text().splitlines():
            values.update(json.loads(line))
    return values
