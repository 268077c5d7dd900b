"""How a job of rank processes ended."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class RanksFailed(RuntimeError):
    """Raised by ``JobResult.check`` and ``Job.wait_for``; ``result`` is the job's end, or None while it still runs."""

    def __init__(self, text: str, result: JobResult | None = None) -> None:
        super().__init__(text)
        self.result = result


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended.

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
        """True when the rank ended by itself with exit code 0."""
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
    """How all ranks ended; ``str()`` of it is made for an assertion's message.

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
        """True when every rank ended by itself with exit code 0."""
        return all(rank.ok for rank in self.ranks)

    @property
    def still_running(self) -> tuple[int, ...]:
        """The ranks that the launcher had to end at the timeout."""
        return tuple(rank.rank for rank in self.ranks if rank.running_at_timeout)

    def values(self, key: str) -> dict[int, Any]:
        """What the ranks reported under a key, by rank; ranks that did not report it are left out."""
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
