"""The records that sinks get, frozen, in seconds and bytes, and the process and job that they are from.

Histograms have fixed buckets, each twice as wide as the one before: constant memory, and a bit operation to find one.
"""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist

from ncclguard_explain.language import Message, joined, told, tr
from ncclguard_explain.ranks import ranks_text

#: Variables that name a job, the first that is set counts; a launcher's or scheduler's.
JOB_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PBS_JOBID", "LSB_JOBID")


def host() -> str:
    return socket.gethostname()


def rank() -> int:
    """Return the global rank; by RANK before `init_process_group`, 0 where nothing says."""
    if initialised():
        return dist.get_rank()
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def world_size() -> int:
    """Return the number of ranks; by WORLD_SIZE before `init_process_group`, 1 where nothing says."""
    if initialised():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def initialised() -> bool:
    """Return whether there is a process group, so that rank and size are known."""
    return dist.is_available() and dist.is_initialized()


def job_name(given: str | None = None) -> str:
    """Return a job name that all ranks on a host find alone: given, the scheduler's, else by the master's port.

    Only letters, digits, `.`, `_` and `-`, because it is part of a file name. Raises ValueError for a given name with
    others.
    """
    if given is not None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,47}", given):
            text = told(
                "job is {given!r}: give 1 to 48 letters, digits, '.', '_' or '-', not beginning with '.'", given=given
            )
            raise ValueError(text)
        return given
    for variable in JOB_VARIABLES:
        text = re.sub(r"[^A-Za-z0-9_-]", "-", os.environ.get(variable, ""))
        if text and text != "none":  # "none" is torchrun's run id when nobody gave one
            return text[:48]
    port = os.environ.get("MASTER_PORT", "")
    return f"port{port}" if port.isdecimal() else f"pid{os.getpid()}"


#: Exponents of two of the upper bounds: 1 us to 4096 s, and 1 byte to 1 TiB; below and above go to the ends.
FIRST_TIME, LAST_TIME = -20, 12
LAST_SIZE = 40
#: Upper bounds of the buckets; the last bucket of each kind has none.
TIME_BOUNDS = tuple(2.0**exponent for exponent in range(FIRST_TIME, LAST_TIME + 1))
SIZE_BOUNDS = tuple(float(1 << exponent) for exponent in range(LAST_SIZE + 1))
_TIMES = len(TIME_BOUNDS)
_SIZES = len(SIZE_BOUNDS)


def time_bucket(seconds: float) -> int:
    """Return the index of the bucket of a duration: the first whose bound exceeds it.

    >>> TIME_BOUNDS[time_bucket(0.7)]
    1.0
    """
    if seconds <= 0.0:
        return 0
    index = math.frexp(seconds)[1] - FIRST_TIME
    return 0 if index < 0 else min(_TIMES, index)


def size_bucket(nbytes: int) -> int:
    """Return the index of the bucket of a size: the first whose bound is not below it.

    >>> SIZE_BOUNDS[size_bucket(1024)], SIZE_BOUNDS[size_bucket(1025)]
    (1024.0, 2048.0)
    """
    index = (nbytes - 1).bit_length() if nbytes > 1 else 0
    return min(_SIZES, index)


def empty_times() -> list[int]:
    return [0] * (_TIMES + 1)


def empty_sizes() -> list[int]:
    return [0] * (_SIZES + 1)


def quantile(counts: Sequence[int], bounds: Sequence[float], q: float) -> float:
    """Return the value below which a share `q` of the observations lies, to within its bucket; 0.0 for none.

    >>> counts = empty_times()
    >>> for _ in range(100):
    ...     counts[time_bucket(0.003)] += 1
    >>> 0.002 <= quantile(counts, TIME_BOUNDS, 0.5) <= 0.004
    True
    """
    total = sum(counts)
    if total == 0:
        return 0.0
    wanted, below = q * total, 0
    for index, count in enumerate(counts):
        if count and below + count >= wanted:
            upper = bounds[min(index, len(bounds) - 1)]
            if index >= len(bounds):
                return upper
            return upper * 2 ** ((wanted - below) / count - 1)  # evenly spread over the octave, by its logarithm
        below += count
    return bounds[-1]


#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSnapshot:
    """The operations of one group, kind and phase since the start; `seconds` and `waited` are sums.

    `durations`, `waits` (from the call until all ranks had come) and `sizes` are counts by bucket, see
    `ncclguard.metrics.records`. `failures` by cause and `culprits` by rank.
    """

    group: str
    op: str
    phase: str
    count: int
    attempts: int
    nbytes: int
    seconds: float
    waited: float
    longest: float
    durations: tuple[int, ...]
    waits: tuple[int, ...]
    sizes: tuple[int, ...]
    failures: Mapping[str, int]
    culprits: Mapping[str, int]

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def duration(self, q: float) -> float:
        return min(quantile(self.durations, TIME_BOUNDS, q), self.longest)

    def wait(self, q: float) -> float:
        return quantile(self.waits, TIME_BOUNDS, q)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOperation:
    """A call that has not returned yet; `age` and `limit` in seconds. `late`: open for longer than `warn_after`."""

    group: str
    op_id: str
    text: str
    age: float
    limit: float
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRow:
    """The arrivals of one rank at the last operations of its group, from every rank's own waiting time.

    `last`: how often it came last; `behind`, `behind_longest`: mean and longest time after the first rank; `held_up`:
    seconds in all for which only this rank was missing; `waited`: its own mean wait.
    """

    rank: int
    host: str
    pid: int
    last: int
    behind: float
    behind_longest: float
    held_up: float
    waited: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerTable:
    """The ranks of a group over its last `operations`, the slowest to arrive first.

    `through`: id of the operation whose exchange brought it; `age`: seconds since then, on this rank's clock.
    """

    group: str
    through: str
    age: float
    operations: int
    rows: tuple[StragglerRow, ...]

    @property
    def slowest(self) -> StragglerRow | None:
        """The rank that came last by most, on average; None without ranks."""
        return self.rows[0] if self.rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRanks:
    """Ranks that do not hang and that the others wait for again and again, as `watch` has found; see docs/slow.md.

    `hosts`: theirs. `kind`: "computing", "data loading", "saving", "garbage collection", "one phase: NAME", "one host"
    or "periodic". `place`: the line of the program where they spend that time, `awaited_at` the one where the others
    wait; empty where it is not one. `factor`: how many times as long as the others they are busy in each step. `lost`:
    the share of the job's time that this costs, 0 to 1. `sure`: the distance is at least twice what a name takes.
    """

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    kind: str
    place: str
    awaited_at: str
    factor: float
    lost: float
    sure: bool

    def __str__(self) -> str:
        return str(self.text)

    @property
    def text(self) -> Message:
        """One sentence for people, which can be translated where it is shown."""
        said = tr(
            "slow: {ranks} on {hosts}, {factor:.2f} times the others' time in each step, which costs the job {lost:.0%} of its "
            "time",
            ranks=ranks_text(self.ranks),
            hosts=", ".join(self.hosts),
            factor=self.factor,
            lost=self.lost,
        )
        kinds = {
            "computing": tr("in computing"),
            "data loading": tr("in loading data"),
            "saving": tr("in saving"),
            "garbage collection": tr("in garbage collection: call gc.freeze() after the first steps"),
            "one host": tr("all ranks of that host"),
            "periodic": tr("in pauses that come again and again: if it is garbage collection, gc.freeze() helps"),
        }
        kind, _, phase = self.kind.partition(": ")
        parts = [said, tr("only in phase {phase}", phase=phase) if phase else kinds[kind]]
        if self.place:
            parts.append(tr("most of it at {place}", place=self.place))
        if self.awaited_at:
            parts.append(tr("the others wait at {place}", place=self.awaited_at))
        return joined("; ", parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatus:
    """One end of a channel of weights in this process, since it was made.

    `channel`: its name. `end`: "trainer", or the engine's name. `version`: the last one that was published on enough
    engines, or committed here; None before the first. `age`: seconds since then. `seconds`: what it took. `versions`
    and `failed`: how many were, and how many came to no engine, or did not arrive here. At the trainer, `engines`:
    those that have the version; `stale`: those that have asked and have it not; `left_out`: how often, by engine.
    """

    channel: str
    end: str
    version: str | int | None = None
    age: float | None = None
    seconds: float = 0.0
    versions: int = 0
    failed: int = 0
    engines: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


def channel_text(status: ChannelStatus) -> Message:
    """Return one sentence for people, which can be translated where it is shown."""
    if status.version is None or status.age is None:
        said = tr("channel {channel}, {end}: no version yet", channel=status.channel, end=status.end)
    else:
        said = tr(
            "channel {channel}, {end}: version {version} since {age:.0f} s, after {seconds:.3g} s",
            channel=status.channel,
            end=status.end,
            version=status.version,
            age=status.age,
            seconds=status.seconds,
        )
    parts = [said]
    if status.engines:
        parts.append(tr("on {engines}", engines=", ".join(status.engines)))
    if status.stale:
        parts.append(tr("not on {engines}", engines=", ".join(status.stale)))
    if status.failed:
        parts.append(tr("{count} versions failed", count=status.failed))
    if status.left_out:
        counts = ", ".join(f"{engine} ({count})" for engine, count in status.left_out.items())
        parts.append(tr("left out: {engines}", engines=counts))
    return joined("; ", parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The fields of all records: the time (seconds since 1970, this host's clock), and the process and its job."""

    kind: ClassVar[str] = ""

    time: float
    job: str
    rank: int
    host: str
    pid: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can carry."""
        return {"kind": self.kind, "schema_version": SCHEMA_VERSION, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Record):
    """All counts since the start, written every interval.

    `uptime` is in seconds, `settings` are those that were changed, by group.

    `hang`: a call has been open for longer than `warn_after`. `dropped`: records that a sink was too slow for, by its
    name. `losses` and `rejoins`: ranks that this rank has gone on without, and that came back; `lost_seconds`: what
    that cost the job. They are the same on all ranks that have been there all the time: take one, not the sum. `slow`:
    who holds the job up now, as far as `watch` knows. `channels`: the ends of weight channels in this process.
    `verdict`: that of `watch` on a collective which stands still now; empty where there is none. `watched`: how many
    collectives of torch this process has issued in the groups that it has now, by group and backend, as `watch` sees.
    """

    kind: ClassVar[str] = "snapshot"

    world_size: int
    uptime: float
    hang: bool
    open: tuple[OpenOperation, ...]
    series: tuple[SeriesSnapshot, ...]
    stragglers: tuple[StragglerTable, ...] = ()
    settings: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    losses: int = 0
    rejoins: int = 0
    lost_seconds: float = 0.0
    slow: SlowRanks | None = None
    channels: tuple[ChannelStatus, ...] = ()
    verdict: str = ""
    watched: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Record):
    """A guarded operation that failed, written at once; `summary` is the incident's first line."""

    kind: ClassVar[str] = "failure"

    op_id: str
    op: str
    phase: str
    cause: str
    culprits: tuple[int, ...]
    agreed: bool
    attempts: int
    seconds: float
    summary: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership(Record):
    """Ranks were lost or are back, written at once; `text` is the line for people.

    The job went on without `ranks` (`change` is "went on"), or they are back ("rejoined"); see
    `ncclguard.incident.model.MembershipChange`.
    """

    kind: ClassVar[str] = "membership"

    change: str
    ranks: tuple[int, ...]
    participants: int
    seconds: float
    step: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Record):
    """A setting that all ranks of a group changed at the same operation, and why; None means not set."""

    kind: ClassVar[str] = "change"

    group: str
    op_id: str
    name: str
    old: float | None
    new: float | None
    reason: str
