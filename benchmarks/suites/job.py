"""Runs one command of a suite, for a bounded time, and leaves no process behind.

A launcher starts its ranks in sessions of their own, so that a signal to its process group misses them. This process is
therefore the one to which orphans go (PR_SET_CHILD_SUBREAPER of prctl(2)): what is still there afterwards is its child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

_SUBREAPER: Final = 36  # linux/prctl.h


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, None where its time was over, and what it has written."""

    code: int | None
    seconds: float
    text: str


def adopt_orphans() -> None:
    """Have processes whose parents have ended become children of this one, which ends them also when it is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run(command: Sequence[str], env: Mapping[str, str], cwd: Path, limit: float, log: Path) -> Ended:
    """Run a command, end it and all that it has started after `limit` seconds, and return how it ended."""
    began, before = time.monotonic(), frozenset(psutil.Process().children(recursive=True))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(before)
            process.wait()
    return Ended(code, time.monotonic() - began, log.read_text(errors="replace"))


def end_all(but: Collection[psutil.Process] = ()) -> None:
    """Kill every descendant of this process that is none of these, also those that come up meanwhile."""
    while found := [process for process in psutil.Process().children(recursive=True) if process not in but]:
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(found, timeout=5)
