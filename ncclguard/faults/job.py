"""A running job of rank processes: watched until it ends, ended at its limit, with the end of each rank."""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncclguard.faults.cleanup import Cleaner, end_processes, processes_of
from ncclguard.faults.fork import ForkedRank
from ncclguard.faults.rank import read_reports, word_file

if TYPE_CHECKING:
    from typing_extensions import Self


class RanksFailed(RuntimeError):
    """Raised by ``JobResult.check`` and ``Job.wait_for``; ``result`` is the job's end, or None while it still runs."""

    def __init__(self, text: str, result: JobResult | None = None) -> None:
        super().__init__(text)
        self.result = result


@dataclass(frozen=True, slots=True)
class RankResult:
    """The end of one rank.

    ``exit_code`` is None when a signal ended it, or when torchrun ended it before anything could be written down.
    ``ended`` is in seconds since the job started. ``output`` is stdout and stderr as one text. ``running_at_timeout``
    is True for a rank that the launcher had to end; its stacks are at the end of ``output``.
    """

    rank: int
    pid: int | None
    exit_code: int | None
    signal: signal.Signals | None
    output: str
    reports: dict[str, Any]
    ended: float | None
    running_at_timeout: bool

    @property
    def ok(self) -> bool:
        """Return whether the rank ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.running_at_timeout

    @property
    def end(self) -> str:
        """The end in a word: ``"exit 0"``, ``"SIGKILL"``, ``"still running"`` (at the timeout) or ``"unknown"``."""
        if self.running_at_timeout:
            return "still running"
        if self.signal is not None:
            return self.signal.name
        return "unknown" if self.exit_code is None else f"exit {self.exit_code}"


@dataclass(frozen=True, slots=True)
class JobResult:
    """The ends of all ranks; ``str()`` of it is made for an assertion's message.

    ``seconds`` is the whole job's duration. ``left_running`` are the pids of forked children that were still alive
    when the last rank had ended; they have been killed since. ``launcher_output`` is what torchrun itself wrote.
    """

    ranks: tuple[RankResult, ...]
    seconds: float
    timeout: float
    timed_out: bool
    left_running: tuple[int, ...]
    launcher_output: str = ""

    def __getitem__(self, rank: int) -> RankResult:
        return self.ranks[rank]

    def __iter__(self) -> Iterator[RankResult]:
        return iter(self.ranks)

    @property
    def ok(self) -> bool:
        """Return whether every rank ended by itself with exit code 0."""
        return all(rank.ok for rank in self.ranks)

    @property
    def still_running(self) -> tuple[int, ...]:
        """The ranks that the launcher had to end at the timeout."""
        return tuple(rank.rank for rank in self.ranks if rank.running_at_timeout)

    def values(self, key: str) -> dict[int, Any]:
        """Return the ranks' reports under a key, by rank; ranks that did not report it are left out."""
        return {rank.rank: rank.reports[key] for rank in self.ranks if key in rank.reports}

    def check(self) -> JobResult:
        """Return the result itself, or raise RanksFailed with every rank's end and last output lines."""
        if not self.ok:
            raise RanksFailed(str(self), self)
        return self

    def __str__(self) -> str:
        ends = ", ".join(f"rank {rank.rank}: {rank.end}" for rank in self.ranks)
        late = (
            f"; still running at the timeout of {self.timeout:g} s: {list(self.still_running)}"
            if self.timed_out
            else ""
        )
        lines = [f"{len(self.ranks)} ranks in {self.seconds:.1f} s: {ends}{late}"]
        for rank in self.ranks:
            if not rank.ok:
                when = "" if rank.ended is None else f" after {rank.ended:.2f} s"
                lines.append(f"--- rank {rank.rank} ({rank.end}{when}), reports {rank.reports}, last lines of output:")
                lines.extend(rank.output.splitlines()[-40:])
        if self.launcher_output and not self.ok:
            lines.append("--- torchrun, last lines of output:")
            lines.extend(self.launcher_output.splitlines()[-40:])
        return "\n".join(lines)


POLL = 0.01  # seconds between two polls of the processes
STACKS = 5.0  # seconds that a rank gets to write its stacks after SIGABRT


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start: a rank itself (``is_rank``), or a torchrun that starts ranks.

    torchrun ends all when one ends (``ends_all``). A rank that is ``forked`` runs a function, and enters a host itself
    (``entrance``).
    """

    argv: Sequence[str]
    env: dict[str, str]
    output: Path
    ranks: tuple[int, ...]
    is_rank: bool
    ends_all: bool = False
    forked: bool = False
    entrance: Sequence[str] = ()

    def start(self) -> subprocess.Popen[bytes] | ForkedRank:
        """Start the process, leading a session of its own."""
        if self.forked:
            return ForkedRank(self.argv[3:], self.env, self.output, self.entrance)
        with open(self.output, "ab") as output:
            return subprocess.Popen(
                self.argv,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,  # a file, not a pipe: a forked child that lives on would hold a pipe open
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


_open: weakref.WeakSet[Job] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the jobs that nobody has closed, before multiprocessing waits for their forks at the exit."""
    for job in tuple(_open):
        job.close()


class Job:
    """Rank processes that ``start_ranks`` has started; a context manager that leaves no process behind.

    ``pid``, ``reports``, ``wait_for``, ``tell`` and ``send_signal`` are for a test that acts while the ranks run;
    ``wait`` ends it.
    """

    def __init__(self, name: str, directory: Path, world_size: int, timeout: float, port: socket.socket | None) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._name = name
        self._directory = directory
        self._port = port  # bound and not listening: reserves the master port for rank 0's store
        self._cleaner = Cleaner()
        self._cleaner.watch("job", name)
        self._cleaner.watch("directory", str(directory))
        self._processes: list[tuple[Command, subprocess.Popen[bytes] | ForkedRank]] = []
        self._ended: dict[int, tuple[int | None, float | None]] = {}  # rank -> return code, time.monotonic()
        self._started = time.monotonic()
        self._result: JobResult | None = None
        _open.add(self)

    def start(self, commands: Sequence[Command]) -> None:
        """Start the processes."""
        self._started = time.monotonic()
        for command in commands:
            process = command.start()
            self._processes.append((command, process))
            try:  # at the timeout the ranks get SIGABRT for their stacks, not for core files of many GB
                resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            except ProcessLookupError:
                continue

    def pid(self, rank: int) -> int:
        """Return the pid of a rank's main process; RanksFailed when torchrun has not started it within 60 s."""
        for command, process in self._processes:
            if command.is_rank and command.ranks == (rank,):
                return process.pid
        file = self._directory / f"rank{rank}.pid"
        deadline = time.monotonic() + 60
        while not file.exists():
            if time.monotonic() > deadline or self._all_ended():
                raise RanksFailed(f"torchrun did not start rank {rank}; it said:\n{self._launcher_output()}")
            time.sleep(POLL)
        return int(file.read_text())

    def send_signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's main process, for example ``signal.SIGKILL``."""
        os.kill(self.pid(rank), number)

    def reports(self, rank: int) -> dict[str, Any]:
        """Return the reports of a rank so far."""
        return read_reports(self._directory, rank)

    def tell(self, word: str) -> None:
        """Let ``faults.wait_until_told(word)`` return on every rank that is in it, or gets there."""
        word_file(self._directory, word).touch()

    def wait_for(self, key: str, ranks: Iterable[int] | None = None, seconds: float = 60.0) -> dict[int, Any]:
        """Block until all of ``ranks`` (default: every rank) have reported ``key``; returns the values by rank.

        Raises RanksFailed when one of them ended without, or after ``seconds``.
        """
        wanted = tuple(range(self.world_size) if ranks is None else ranks)
        deadline = time.monotonic() + seconds
        while True:
            ended = set(wanted) if self._all_ended() else {rank for rank in wanted if rank in self._ended}
            values = {rank: self.reports(rank) for rank in wanted}  # read after the ends, so that a last report counts
            missing = [rank for rank in wanted if key not in values[rank]]
            if not missing:
                return {rank: values[rank][key] for rank in wanted}
            dead = [rank for rank in missing if rank in ended]
            if dead or time.monotonic() > deadline:
                why = f"ranks {dead} ended" if dead else f"{seconds:g} s passed"
                texts = "\n".join(f"--- rank {rank}:\n{self._output(rank)[-4000:]}" for rank in dead or missing)
                texts += self._launcher_output()[-4000:]
                raise RanksFailed(f"{why} before ranks {missing} had reported {key!r}; their output:\n{texts}")
            time.sleep(POLL)

    def wait(self, timeout: float | None = None) -> JobResult:
        """Wait until every rank has ended, or end them all at the timeout; returns the same result when called again.

        ``timeout`` is in seconds from now; by default the job's own, which counts from its start. At the timeout each
        rank that still runs gets SIGABRT, which makes it write its stacks, a stopped one SIGCONT too; then everything
        that belongs to the job is killed.
        """
        if self._result is not None:
            return self._result
        if timeout is not None:
            self.timeout = time.monotonic() - self._started + timeout
        while not self._all_ended() and time.monotonic() < self._started + self.timeout:
            time.sleep(POLL)
        timed_out = not self._all_ended()
        running = tuple(rank for rank in range(self.world_size) if timed_out and rank not in self._ended)
        if timed_out:
            self._dump_stacks(running)
        seconds = time.monotonic() - self._started
        left = tuple(pid for pid in processes_of(self._name) if not self._is_started_here(pid))
        self._end_everything()
        self._all_ended()
        ranks = tuple(self._rank_result(rank, rank in running) for rank in range(self.world_size))
        self._result = JobResult(ranks, seconds, self.timeout, timed_out, left, self._launcher_output())
        self.close()
        return self._result

    def close(self) -> None:
        """End what still runs and remove the job's files; safe to call twice."""
        self._end_everything()
        if self._port is not None:
            self._port.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._cleaner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _all_ended(self) -> bool:
        """Note which processes have ended since the last call; return whether all have."""
        running = False
        for command, process in self._processes:
            code = process.poll()
            running = running or code is None
            for rank in command.ranks:
                file = self._directory / f"rank{rank}.ended"
                if rank in self._ended:
                    continue
                if file.exists():
                    word, moment = file.read_text().split()
                    self._ended[rank] = int(word), float(moment)
                elif code is not None:
                    self._ended[rank] = (code, time.monotonic()) if command.is_rank else (None, None)
        return not running

    def _dump_stacks(self, ranks: Sequence[int]) -> None:
        for command, process in self._processes:
            if command.ends_all and process.poll() is None:
                process.send_signal(
                    signal.SIGSTOP
                )  # torchrun ends all ranks when one ends, before they have written their stacks
        pids = [process.pid for command, process in self._processes if command.is_rank and command.ranks[0] in ranks]
        files = [self._directory / f"rank{rank}.pid" for rank in ranks]
        pids += [int(file.read_text()) for file in files if file.exists()]
        for pid in pids:
            for number in (signal.SIGABRT, signal.SIGCONT):  # in this order a stopped rank shows where it was stopped
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        deadline = time.monotonic() + STACKS
        while not self._all_ended() and set(ranks) - set(self._ended) and time.monotonic() < deadline:
            time.sleep(POLL)

    def _is_started_here(self, pid: int) -> bool:
        return any(process.pid == pid for _, process in self._processes)

    def _end_everything(self) -> None:
        for _, process in self._processes:
            if process.poll() is None:
                process.kill()
        end_processes(self._name)
        for _, process in self._processes:
            process.wait(timeout=10)

    def _output(self, rank: int) -> str:
        file = self._directory / f"rank{rank}.output"
        return file.read_text(errors="replace") if file.exists() else ""

    def _launcher_output(self) -> str:
        files = [command.output for command, _ in self._processes if not command.is_rank]
        return "".join(file.read_text(errors="replace") for file in files)

    def _rank_result(self, rank: int, running: bool) -> RankResult:
        code, moment = self._ended.get(rank, (None, None))
        pids = [process.pid for command, process in self._processes if command.is_rank and command.ranks == (rank,)]
        file = self._directory / f"rank{rank}.pid"
        pids += [int(file.read_text())] if file.exists() else []
        return RankResult(
            rank=rank,
            pid=pids[0] if pids else None,
            exit_code=code if code is not None and code >= 0 else None,
            signal=signal.Signals(-code) if code is not None and code < 0 else None,
            output=self._output(rank),
            reports=self.reports(rank),
            ended=None if moment is None else moment - self._started,
            running_at_timeout=running,
        )
