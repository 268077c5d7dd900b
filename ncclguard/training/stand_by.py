"""`ncclguard run --stand-by`: a host without ranks, whose processes take the places of ranks that are lost elsewhere.

Each process looks for a place itself (see `spare`), because a call of the store may block. This launcher hears of it
through a pipe, and from then on vouches for the process with a `set`, which does not wait for an answer. It ends what
the store has not answered for long, and who has not joined when the job has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType
from typing import Final, NoReturn

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ncclguard.coordination.store import AgreementStore, StoreUnavailable
from ncclguard.training import declaration, places

#: Seconds for the store of the job to be there, as under torchrun.
BEGINS_WITHIN: Final = 600.0
#: Seconds for the store to answer a process that waits; a TCPStore whose host has lost power never does.
SILENT_FOR: Final = 120.0
#: Seconds in which a rank that is told to end has to, as under torchrun.
ENDS_WITHIN: Final = 30.0
#: Seconds between two looks at the processes.
LOOK_EVERY: Final = 0.1
#: Seconds between two signs that a process is there.
VOUCH_EVERY: Final = 1.0
#: What ends processes in the places of which others stand by; see `declaration.ended_by`.
_NO_FAILURE: Final = ("superseded", "taken")

Address = tuple[str, int]
Say = Callable[[str], None]


class _Process:
    """One that waits for a place, or has got one; a session of its own, which ends with it."""

    def __init__(self, address: Address, local_rank: int, command: Sequence[str]) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._reader: int | None = reader  # None once it has got a place or has ended
        spare = [sys.executable, "-u", "-m", "ncclguard.training.spare", "--stand-by", *map(str, address)]
        env = {**os.environ, "NCCLGUARD_PLACE": " " * 512}  # see `spare`
        try:
            self.popen = subprocess.Popen(
                [*spare, str(local_rank), str(writer), *command], env=env, pass_fds=(writer,), start_new_session=True
            )
        finally:
            os.close(writer)
        self.rank: int | None = None
        self.number, self.generation = 0, "0"  # of the place
        self.joined = False
        self.code: int | None = None
        self.told = False  # that it has ended
        self.repeats = False  # for a reason that has ended one before, or would end the next one
        self.unanswered = False  # it waits, and the store has not answered it for long
        self._heard: float | None = None  # when the store has answered it last, or it had imported what it needs
        self._text = b""

    def look(self, folder: str, now: float) -> None:
        """Read what it has said, and whether it has joined or ended."""
        self.code = self.popen.poll()
        if self.rank is not None:
            self.joined = self.joined or declaration.has_joined(folder, self.rank, self.number)
        if self._reader is not None:
            self._read(self._reader, now)
            if self.rank is not None or self.code is not None:
                os.close(self._reader)
                self._reader = None
        self.unanswered = self.rank is None and self._heard is not None and now - self._heard > SILENT_FOR

    def _read(self, reader: int, now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.rank is None and (text := os.read(reader, 65536)):
                self._heard = now
                *lines, self._text = (self._text + text).split(b"\n")
                for said in map(json.loads, lines):
                    self.rank, self.number = said.get("rank"), said.get("number", 0)
                    self.generation = said.get("generation", "0")

    @property
    def is_stopped(self) -> bool:
        """By a signal: then it is there, and does nothing."""
        try:
            return psutil.Process(self.popen.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

    def end(self, number: signal.Signals) -> None:
        """End it with all that it has started, unless it has ended: then its number may be another's."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)


class _Voucher:
    """Shows the first rank that goes on, and the launchers at the end, which of these processes are there."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._places: AgreementStore | None = None
        self._count = 0
        self._next = 0.0

    def look(self, processes: Sequence[_Process], now: float) -> bool:
        """Show it once in a second; False when nobody listens at the store's address any more."""
        ended = [process for process in processes if process.rank is not None and process.code is not None]
        if now < self._next and all(process.told for process in ended):
            return True
        self._next = now + VOUCH_EVERY
        self._count += 1
        try:
            if self._places is None:
                socket.create_connection(self._address, timeout=VOUCH_EVERY).close()
                host, port = self._address
                store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
                self._places = AgreementStore(store, places.PREFIX)
            for process in processes:
                if process.rank is not None and process.code is None and not process.is_stopped:
                    places.vouch(self._places, process.number, self._count)
            for process in ended:
                if process.rank is not None and process.repeats:
                    places.refuse(self._places, process.rank, process.generation)
                places.vouch(self._places, process.number, None)
                process.told = True
            self._places.put("standing", str(self._count))  # which finds out whether the store is there, at the latest
        except ConnectionRefusedError:
            return False
        except (StoreUnavailable, OSError, RuntimeError):
            self._places = None  # a connection may break, and the job be there
        return True


def run(address: Address, command: Sequence[str], count: int, folder: str, say: Say) -> int:
    """Stand by until the job ends; 1 where ranks failed here and none ended well, or nobody answers."""
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(name, _stop)
    standing = "1 process stands" if count == 1 else f"{count} processes stand"
    say(f"{standing} by for the job at {address[0]}:{address[1]}")
    if not _is_there(address, time.monotonic() + BEGINS_WITHIN):
        say(
            f"nobody listens at {address[0]}:{address[1]} after {BEGINS_WITHIN:.0f} s; is that the first host's address?"
        )
        return 1
    processes: list[_Process] = []
    try:
        for local_rank in range(count):
            processes.append(_Process(address, local_rank, command))
        _watch(address, processes, command, folder, say)
    finally:
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        _end(processes)
    codes = [process.code for process in processes if process.joined or process.unanswered]
    failed = any(process.rank is not None and process.code not in (0, -signal.SIGKILL) for process in processes)
    if failed and not codes and _is_there(address, time.monotonic() + 1.0):  # else the job has ended meanwhile
        say("no process stands by any more: each that got a place has failed before it had joined")
        return 1
    return 0 if not codes or 0 in codes else 1


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _is_there(address: Address, end: float) -> bool:
    while time.monotonic() < end:
        try:
            socket.create_connection(address, timeout=5.0).close()
        except OSError:
            time.sleep(1.0)
        else:
            return True
    return False


def _watch(address: Address, processes: list[_Process], command: Sequence[str], folder: str, say: Say) -> None:
    """Until all have ended, or those that have joined have done so well: then the job has ended."""
    voucher: _Voucher | None = None
    reasons: set[str] = set()  # for which ranks have ended by themselves
    while any(process.code is None for process in processes):
        time.sleep(LOOK_EVERY)
        now, waiting = time.monotonic(), [process for process in processes if process.rank is None]
        ran = {process for process in processes if process.code is None and not process.unanswered}
        for process in processes:
            process.look(folder, now)
        for process in waiting:
            if process.rank is not None:
                voucher = voucher or _Voucher(address)
                _succeed(process, processes, folder, say)
                say(f"a process that stood by takes the place of rank {process.rank} (process {process.popen.pid})")
            elif process in ran and process.code is None and process.unanswered:
                say(f"the job's store has not answered process {process.popen.pid} for {SILENT_FOR:.0f} s; it is ended")
                process.end(signal.SIGKILL)
        for process in [process for process in ran if process.code is not None]:
            if not _is_done_with(process, folder, reasons, say):
                local_rank = processes.index(process)
                processes[local_rank] = _Process(address, local_rank, command)
        _end_given_up(processes, folder, say)
        if voucher is not None and not voucher.look(processes, now):
            for process in processes:
                if process.rank is not None and (not process.joined or process.is_stopped):
                    process.end(signal.SIGKILL)  # there is nobody left whom it could join, or who waits for it
        ends = [process.code for process in processes if process.joined]
        if 0 in ends and None not in ends:
            return


def _is_done_with(process: _Process, folder: str, reasons: set[str], say: Say) -> bool:
    """Say how a process has ended; False where it was only not needed any more, and another is to stand by."""
    who, kind, same = "a process that stood by", "", ""
    if process.rank is not None:
        who = f"rank {process.rank}"
        kind, _, same = declaration.ended_by(folder, process.rank)
    if kind in _NO_FAILURE:
        say(f"{who} (process {process.popen.pid}) is not needed; another process stands by")
        return False
    if process.code:
        if process.rank is not None and process.code > 0:
            process.repeats = kind == "mismatch" or (same or str(process.code)) in reasons
            reasons.add(same or str(process.code))
        say(f"{who} (process {process.popen.pid}) has ended with exit code {process.code}")
    return True


def _succeed(process: _Process, processes: Sequence[_Process], folder: str, say: Say) -> None:
    """The place is this process's: one that had it and does not run is ended.

    One that does run had it while this launcher did not: whichever of the two comes to the others too late is told so.
    """
    assert process.rank is not None
    before = [one for one in processes if one is not process and one.rank == process.rank and one.code is None]
    for one in [one for one in before if one.is_stopped]:
        before.remove(one)
        say(f"rank {one.rank} (process {one.popen.pid}) does not run, and its place is taken; it is ended")
        one.end(signal.SIGKILL)
    if not before:
        declaration.withdraw(folder, process.rank)


def _end_given_up(processes: Sequence[_Process], folder: str, say: Say) -> None:
    ranks = {process.rank: process for process in processes if process.joined and process.code is None}
    for rank in declaration.given_up(folder, [rank for rank in ranks if rank is not None]):
        say(f"rank {rank} does not run, and the others go on without it: its process is ended")
        ranks[rank].end(signal.SIGKILL)


def _end(processes: Sequence[_Process]) -> None:
    """End these processes: who has a rank may write what it was doing."""
    for process in processes:
        process.end(signal.SIGTERM if process.joined else signal.SIGKILL)
    end = time.monotonic() + ENDS_WITHIN
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, end - time.monotonic()))
        process.end(signal.SIGKILL)
        process.code = process.popen.wait()
