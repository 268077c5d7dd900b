"""The ladder of time limits: guard deadline < process-group timeout < heartbeat monitor < launcher.

Each limit has to leave the one below it time to act. The guard names the culprit and lets the job go on; the process
group's watchdog ends the process with a flight-recorder dump; the heartbeat monitor ends it when the watchdog itself
hangs; the launcher ends the job. In another order the coarser measure strikes first and the finer one explains nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from datetime import timedelta

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.catalogue import FALSE_WORDS, TRUE_WORDS
from ncclguard.environment.versions import Versions, within

#: What a process group waits beyond the guard's deadline: the verdict (2 s), and ranks that arrive one after the other.
PROCESS_GROUP_MARGIN = 120.0
#: What the heartbeat monitor waits beyond the watchdog's own end, which sleeps during the flight-recorder dump.
HEARTBEAT_MARGIN = 60.0


class Rung(BaseModel):
    """One limit in seconds. None: it does not exist, or nobody knows it; ``origin`` says which, or where it is from."""

    model_config = ConfigDict(frozen=True)

    name: str
    seconds: float | None
    origin: str

    def __str__(self) -> str:
        figure = "none" if self.seconds is None else f"{self.seconds:g} s"
        return f"{self.name:<22} {figure:>9}  {self.origin}"


class Ladder(BaseModel):
    """The four limits in the order in which they have to grow, and what is wrong with them."""

    model_config = ConfigDict(frozen=True)

    guard: Rung
    process_group: Rung
    heartbeat: Rung
    launcher: Rung
    proposed_heartbeat: int

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """The limits, lowest first."""
        return (self.guard, self.process_group, self.heartbeat, self.launcher)

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each pair of limits in the wrong order; empty when the ladder holds."""
        known = [rung for rung in self.rungs if rung.seconds is not None]
        return tuple(
            f"the {upper.name} ({upper.seconds:g} s, {upper.origin}) must exceed the {lower.name} "
            f"({lower.seconds:g} s, {lower.origin})"
            for lower, upper in itertools.pairwise(known)
            if upper.seconds is not None and lower.seconds is not None and upper.seconds <= lower.seconds
        )

    @property
    def process_group_timeout(self) -> timedelta:
        """What to pass to ``init_process_group(timeout=...)``."""
        return timedelta(seconds=self.process_group.seconds or 0.0)

    @property
    def one_line(self) -> str:
        """The limits in one line."""
        figures = " < ".join("none" if rung.seconds is None else f"{rung.seconds:g}" for rung in self.rungs)
        return f"limits in s (guard < process group < heartbeat < launcher): {figures}"

    def __str__(self) -> str:
        return "\n".join([*(str(rung) for rung in self.rungs), *(f"wrong: {problem}" for problem in self.problems)])


def _up_to_minutes(seconds: float) -> int:
    return math.ceil(seconds / 60.0) * 60


def _number(environ: Mapping[str, str], name: str) -> float | None:
    try:
        return float(environ[name])
    except (KeyError, ValueError):  # absent, or no number: the check of the value says so
        return None


def _flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    value = environ.get(name, "").lower()
    return value in TRUE_WORDS if value in TRUE_WORDS | FALSE_WORDS else default


def _process_group(guard: float, given: float | None, environ: Mapping[str, str]) -> Rung:
    if given is not None:
        return Rung(name="process-group timeout", seconds=given, origin="init_process_group(timeout=...)")
    minutes = _number(environ, "DEEPSPEED_TIMEOUT")
    if minutes is not None:
        return Rung(name="process-group timeout", seconds=minutes * 60, origin=f"DEEPSPEED_TIMEOUT={minutes:g} min")
    return Rung(
        name="process-group timeout",
        seconds=_up_to_minutes(guard + PROCESS_GROUP_MARGIN),
        origin="computed: pass it to init_process_group(timeout=...)",
    )


def _heartbeat(proposed: int, environ: Mapping[str, str], versions: Versions) -> Rung:
    name = "heartbeat monitor"
    if _flag(environ, "TORCH_NCCL_BLOCKING_WAIT", False) or _flag(environ, "NCCL_BLOCKING_WAIT", False):
        return Rung(name=name, seconds=None, origin="off: TORCH_NCCL_BLOCKING_WAIT is set")
    if not within(versions.torch, "2.2", None):
        return Rung(name=name, seconds=None, origin="off: torch before 2.2 has none")
    if not _flag(environ, "TORCH_NCCL_ENABLE_MONITORING", True):
        return Rung(name=name, seconds=None, origin="off: TORCH_NCCL_ENABLE_MONITORING=0")
    given = _number(environ, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if given is not None:
        return Rung(name=name, seconds=given, origin="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    return Rung(name=name, seconds=proposed, origin="computed: TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")


def _launcher(given: float | None, environ: Mapping[str, str]) -> Rung:
    if given is not None:
        return Rung(name="launcher", seconds=given, origin="given")
    start, end = _number(environ, "SLURM_JOB_START_TIME"), _number(environ, "SLURM_JOB_END_TIME")
    if start is not None and end is not None and end > start:
        return Rung(name="launcher", seconds=end - start, origin="time limit of the Slurm job")
    return Rung(name="launcher", seconds=None, origin="unknown: its limit has to exceed those above")


def compute_ladder(
    guard_deadline: float,
    versions: Versions,
    environ: Mapping[str, str],
    *,
    process_group_timeout: float | None = None,
    launcher_timeout: float | None = None,
) -> Ladder:
    """The limits that hold, or that ``setup_env()`` proposes, for a longest guard deadline in seconds.

    >>> versions = Versions(torch="2.13.0", nccl="2.29.7", nccl_source="example")
    >>> print(compute_ladder(1800, versions, {}).one_line)
    limits in s (guard < process group < heartbeat < launcher): 1800 < 1920 < 2040 < none
    """
    process_group = _process_group(guard_deadline, process_group_timeout, environ)
    dump = _number(environ, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC")
    # Since torch 2.8 the watchdog sleeps four times the dump's time before it throws (ProcessGroupNCCL.cpp).
    sleeping = 4 * (15.0 if dump is None else dump / 1000.0) if within(versions.torch, "2.8", None) else 60.0
    proposed = _up_to_minutes((process_group.seconds or 0.0) + sleeping + HEARTBEAT_MARGIN)
    return Ladder(
        guard=Rung(name="guard deadline", seconds=guard_deadline, origin="the longest of GuardConfig's timeouts"),
        process_group=process_group,
        heartbeat=_heartbeat(proposed, environ, versions),
        launcher=_launcher(launcher_timeout, environ),
        proposed_heartbeat=proposed,
    )
