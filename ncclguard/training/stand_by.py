"""`ncclguard run --stand-by`: a host without ranks, whose processes take the places of ranks that are lost elsewhere.

Each process looks for a place itself (see `spare`). This launcher hears of it through a pipe, and never asks the store,
which may not answer: it ends a process that has had no answer for long, and what has to end when others do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NoReturn, Protocol

from ncclguard.incident.model import ranks_text
from ncclguard.torch_compat import elastic
from ncclguard.torch_compat.elastic import Codes, Host

#: Seconds for the store to answer a process that waits; a TCPStore whose host has lost power never does.
SILENT_FOR: Final = 120.0
#: Seconds in which a rank that is told to end has to, as under torchrun.
ENDS_WITHIN: Final = 30.0
#: Seconds between two looks at the processes.
LOOK_EVERY: Final = 0.1

Say = Callable[[str], None]


class Judge(Protocol):
    """As that of torch's agent."""

    def taken(self, rank: int) -> None:
        """A process of this host has taken this rank's place, and has not joined the others yet."""

    def judge(self, codes: Codes, host: Host) -> str | None:
        """What becomes of the ranks of this host."""


class _Process:
    """One that waits for a place, or has got one; a session of its own, which ends with it."""

    def __init__(self, address: tuple[str, int], local_rank: int, command: Sequence[str]) -> None:
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        spare = [sys.executable, "-u", "-m", "ncclguard.training.spare", "--stand-by", *map(str, address)]
        env = {**os.environ, "NCCLGUARD_PLACE": " " * 64}  # see `spare`
        try:
            self.popen = subprocess.Popen(
                [*spare, str(local_rank), str(writer), *command], env=env, pass_fds=(writer,), start_new_session=True
            )
        finally:
            os.close(writer)
        self.rank: int | None = None
        self.number = 0  # of the place
        self.code: int | None = None
        self.judged = False  # its end has had its consequences
        self.heard: float | None = None  # when the store has answered it last
        self._text = b""

    def look(self, now: float) -> None:
        """Read what it has said, and whether it has ended."""
        self.code = self.popen.poll()
        with contextlib.suppress(BlockingIOError):
            while self.rank is None and (text := os.read(self._reader, 65536)):
                self.heard = now
                *lines, self._text = (self._text + text).split(b"\n")
                for said in map(json.loads, lines):
                    self.rank, self.number = said.get("rank"), said.get("number", 0)

    def end(self, number: signal.Signals) -> None:
        """End it with all that it has started, unless it has ended: then its number may be another's."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)


def run(arguments: Any, judge: Judge, say: Say) -> int:
    """Stand by until the job ends; returns the exit code: 1 where ranks failed here and no rank ended well.

    Raises ValueError where the arguments do not say where the job's store is.
    """
    address = elastic.store_address(arguments)
    command, count = elastic.launched(arguments)
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(name, _stop)
    processes: list[_Process] = []
    try:
        processes += [_Process(address, local_rank, command) for local_rank in range(count)]
        say(f"{count} processes stand by for the job at {address[0]}:{address[1]}")
        _watch(processes, judge, say)
    finally:
        _end(processes)
        _tell(address, processes)
    codes = [process.code for process in processes if process.rank is not None]
    return 0 if not codes or 0 in codes else 1


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _watch(processes: Sequence[_Process], judge: Judge, say: Say) -> None:
    """Until all have ended, or those that have ranks have done so well: then the job has no lost ranks any more."""
    while any(process.code is None for process in processes):
        time.sleep(LOOK_EVERY)
        now, without = time.monotonic(), {process for process in processes if process.rank is None}
        for process in processes:
            process.look(now)
        for process in without:
            if process.rank is not None:
                for before in processes:
                    if before.rank == process.rank and before is not process:
                        before.end(signal.SIGKILL)  # it is there, and the others have waited for it in vain
                        before.judged = True
                judge.taken(process.rank)
                say(f"a process that stood by takes the place of rank {process.rank} (process {process.popen.pid})")
            elif process.code is None and process.heard is not None and now - process.heard > SILENT_FOR:
                say(f"the job's store has not answered process {process.popen.pid} for {SILENT_FOR:.0f} s; it is ended")
                process.end(signal.SIGKILL)
            elif process.code and not process.judged:
                process.judged = True
                say(f"a process that stood by ({process.popen.pid}) has ended with exit code {process.code}")
        ranks = [process for process in processes if process.rank is not None and not process.judged]
        _judge(ranks, judge, say)
        if ranks and all(process.code == 0 for process in ranks):
            return


def _judge(ranks: Sequence[_Process], judge: Judge, say: Say) -> None:
    """What becomes of those that have ranks."""
    by_rank = {process.rank: process for process in ranks if process.rank is not None}
    codes = {rank: process.code for rank, process in by_rank.items()}
    host = Host(lambda: 0, _never, lambda rank: by_rank[rank].end(signal.SIGKILL))
    if judge.judge(codes, host) is None and any(codes.values()):
        running = [process for process in by_rank.values() if process.code is None]
        if running:
            failed = [rank for rank, code in codes.items() if code]
            say(f"{ranks_text(failed)} failed, and the other ranks of this host do not go on; they are ended")
        _end(running)
        for process in ranks:
            process.judged = True


def _never(rank: int, *_: object) -> int:
    raise AssertionError(f"rank {rank} cannot be started here")


def _end(processes: Sequence[_Process]) -> None:
    """End these processes: who has a rank may write what it was doing."""
    for process in processes:
        process.end(signal.SIGKILL if process.rank is None else signal.SIGTERM)
    end = time.monotonic() + ENDS_WITHIN
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, end - time.monotonic()))
        process.end(signal.SIGKILL)
        process.code = process.popen.wait()


def _tell(address: tuple[str, int], processes: Sequence[_Process]) -> None:
    """Let the other launchers know that they need not wait for these ranks any more; in a process that may block."""
    ended = [str(number) for process in processes if process.number for number in (process.number, process.code)]
    if ended:
        command = [sys.executable, "-m", "ncclguard.training.spare", "--ended", *map(str, address), *ended]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=ENDS_WITHIN, check=False, stderr=subprocess.DEVNULL)
