"""The report as data, what `--json` writes, and as text. Fields are only added within a schema version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BaseModel, WrapValidator

from ncclguard.environment.ras import Communicator
from ncclguard.hang.launches import of_job
from ncclguard.hang.names import Pid, names_of
from ncclguard.hang.stacks import Kind, Motion, Place
from ncclguard.hang.tree import groups_of, lines_of, merge
from ncclguard.hang.verdict import WORDS, Evidence, Seen, judge
from ncclguard_explain.cause import Cause
from ncclguard_explain.language import Message, say, tr

SCHEMA_VERSION = 1
#: The words for how sure an answer is, for people.
CONFIDENCE = {
    "high": tr("high", "confidence"),
    "medium": tr("medium", "confidence"),
    "low": tr("low", "confidence"),
}
#: Prose; it keeps the template it was made of, so that it can be said in another language. In the JSON it is English.
Prose = Annotated[str, WrapValidator(lambda value, check: value if isinstance(value, Message) else check(value))]


class NothingToReport(Exception):
    """No job is here, or what was collected cannot be used; the text says what to do."""


class Group(BaseModel, frozen=True):
    """Ranks that have the same stack, outermost call first; torch's function, where they stand in one, is the last."""

    ranks: tuple[int, ...]
    stack: tuple[str, ...]


class RankRow(BaseModel, frozen=True):
    """One rank with a process: `state` is the letter of /proc/PID/stat, `trouble` why its stack could not be read.

    `kind`, `op`, `world`, `peer`, `holds_gil`, `stack`, `serves` and `group` say where it stands, null without a stack;
    `members` are the ranks of that group, empty where they are not known. `gloo` says whether it communicates by gloo
    alone, `watched` whether its program has called `watch()`, `guarded` whether it is in a guarded call.
    """

    rank: int
    host: str
    pid: int
    state: str
    motion: Motion
    kind: Kind | None = None
    op: str = ""
    world: bool = False
    peer: int | None = None
    holds_gil: bool = False
    stack: tuple[str, ...] = ()
    serves: bool = False
    group: tuple[int, int] | None = None
    members: tuple[int, ...] = ()
    gloo: bool = False
    watched: bool = False
    guarded: bool = False
    trouble: Prose = ""

    @property
    def of_ddp(self) -> bool:
        """Tell whether it stands in a collective of DDP, of which no stack tells the group."""
        return any(frame.startswith("torch/nn/parallel/distributed.py") for frame in self.stack)


class EndedRow(BaseModel, frozen=True):
    """A rank without a process; `exit_code` is negative for a signal, null where it is not known."""

    rank: int
    host: str
    exit_code: int | None = None


class JobReport(BaseModel, frozen=True):
    """The report on one job: who holds it up, why, and what to do.

    `culprits` is empty where nobody can be named; `awaited` are ranks that the others wait for and that are at work, or
    of which nothing is known. `stands` says whether ranks wait that do not move. `communicators` are those of NCCL
    whose ranks have launched unequal numbers, with NCCL's numbers of ranks. Where it is `counted` no rank is known, and
    each stands for the process of that number.
    """

    name: str
    world_size: int
    culprits: tuple[int, ...] = ()
    cause: Cause = Cause.UNKNOWN
    confidence: str = "low"
    stands: bool = False
    awaited: tuple[int, ...] = ()
    summary: Prose = ""
    reason: Prose = ""
    next_step: Prose = ""
    groups: tuple[Group, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    ended: tuple[EndedRow, ...] = ()
    unseen: tuple[int, ...] = ()
    seconds: float = 0.0
    notes: tuple[Prose, ...] = ()
    communicators: tuple[Communicator, ...] = ()
    counted: bool = False


class HostTrouble(BaseModel, frozen=True):
    """A host or pod that was asked and has not reported a rank, and why."""

    host: str
    trouble: Prose


class HangReport(BaseModel, frozen=True):
    """The report on all jobs that were found, on the hosts that were looked at; `silent` are those without a report."""

    schema_version: int = SCHEMA_VERSION
    hosts: tuple[str, ...]
    jobs: tuple[JobReport, ...]
    silent: tuple[HostTrouble, ...] = ()


def judged(name: str, world_size: int, ranks: Sequence[RankRow], ended: Sequence[EndedRow], seconds: float,
           notes: Sequence[str], communicators: Sequence[Communicator] = (), counted: bool = False) -> JobReport:  # fmt: skip
    """Return the report on one job, of what was seen on all its hosts."""
    present = {row.rank for row in ranks}
    number = Pid if counted else int
    gone = {number(row.rank): row.exit_code for row in ended if row.rank not in present}
    uneven = of_job(communicators, {row.rank: row.pid for row in ranks}, world_size)
    evidence = Evidence(world_size, [_seen(row, counted) for row in ranks], gone, seconds, uneven, counted)
    verdict = judge(evidence)
    groups = groups_of({row.rank: row.stack for row in ranks if row.stack})
    return JobReport(
        name=name,
        world_size=world_size,
        culprits=verdict.culprits,
        cause=verdict.cause,
        confidence="medium" if counted and verdict.confidence == "high" else verdict.confidence,
        stands=verdict.stands,
        awaited=verdict.awaited,
        summary=verdict.summary,
        reason=verdict.reason,
        next_step=verdict.next_step,
        groups=tuple(Group(ranks=tuple(same), stack=stack) for same, stack in groups),
        ranks=tuple(sorted(ranks, key=lambda row: row.rank)),
        ended=tuple(row for row in ended if row.rank in gone),
        unseen=evidence.unseen,
        seconds=seconds,
        notes=tuple(notes),
        communicators=tuple(communicators),
        counted=counted,
    )


def _seen(row: RankRow, counted: bool) -> Seen:
    place = None
    if row.kind is not None:
        peer = None if counted else row.peer
        place = Place(row.kind, row.op, row.world, peer, row.holds_gil, row.stack, row.serves, row.group, row.guarded)
    rank = Pid(row.rank) if counted else row.rank
    return Seen(rank, row.state, row.motion, place, row.host, row.pid, row.trouble, frozenset(row.members), row.gloo)


#: Rows of ranks without a stack, and notes, that the text has.
_SHOWN = 8
_STATES = {
    "T": tr("stopped"),
    "t": tr("stopped for a debugger"),
    "D": tr("in a system call that does not end"),
    "X": tr("ended"),
}


def text_of(report: HangReport) -> Iterator[str]:
    """Return the report as lines for people, in the language of this process."""
    for number, job in enumerate(report.jobs):
        if number:
            yield ""
        yield from _job_text(job)
    same: dict[str, list[str]] = {}
    for one in report.silent:
        same.setdefault(say(one.trouble), []).append(one.host)
    for trouble, hosts in same.items():
        shown = ", ".join(hosts[:_SHOWN]) + (", ..." if len(hosts) > _SHOWN else "")
        yield say(tr("No ranks from {hosts}: {trouble}", hosts=shown, trouble=trouble))
    if any(job.stands and _would_be_watched(job) for job in report.jobs):
        yield say(
            tr("Next time: `ncclguard.watch()` in the program says this by itself, seconds after a limit of yours.")
        )


def _job_text(job: JobReport) -> Iterator[str]:
    hosts = sorted({row.host for row in job.ranks} | {gone.host for gone in job.ended})
    yield say(tr("Job {name}: {size} ranks, {count} of them seen, on {hosts}", name=job.name, size=job.world_size,
                 count=len(job.ranks), hosts=", ".join(hosts[:3]) + (", ..." if len(hosts) > 3 else "")))  # fmt: skip
    number = Pid if job.counted else int
    notes = {row.rank: say(_note(row)) for row in job.ranks}
    stacks = [([number(rank) for rank in group.ranks], group.stack) for group in job.groups]
    yield from (f"  {line}" for line in lines_of(merge(stacks), notes))
    bare: dict[str, list[int]] = {}
    for row in job.ranks:
        if not row.stack:
            what = "; ".join(part for part in (notes[row.rank], say(row.trouble)) if part)
            bare.setdefault(what, []).append(number(row.rank))
    for what, ranks in list(bare.items())[:_SHOWN]:
        yield f"  {say(names_of(ranks))}: {what}"
    codes: dict[int | None, list[int]] = {}
    for gone in job.ended:
        codes.setdefault(gone.exit_code, []).append(number(gone.rank))
    for code, ranks in list(codes.items())[:_SHOWN]:
        yield f"  {say(names_of(ranks))}: {say(_ending(code))}"
    if job.unseen:
        yield f"  {say(names_of(job.unseen))}: {say(tr('not seen on these hosts'))}"
    yield from (f"  {say(note)}" for note in job.notes[:_SHOWN])
    yield say(job.summary)
    if job.reason:
        confidence = CONFIDENCE[job.confidence]
        yield say(tr("Why ({confidence} confidence): {reason}.", confidence=confidence, reason=job.reason))
    if job.next_step:
        yield say(tr("Next: {text}", text=job.next_step))


def _would_be_watched(job: JobReport) -> bool:
    """Return whether `watch()` would tell of it: ranks stand in what it observes, and their program has no guard."""
    observed = any(row.kind in (Kind.COLLECTIVE, Kind.P2P, Kind.BACKWARD, Kind.DEVICE) for row in job.ranks)
    return observed and not any(row.watched or row.guarded for row in job.ranks)


def _note(row: RankRow) -> Message | str:
    """Return what a rank stands in, and whether it moves."""
    what = _STATES.get(row.state) or (WORDS[row.kind] if row.kind is not None else tr("no stack"))
    if row.state in _STATES and row.state != "D":
        return what
    if row.motion in (Motion.MOVING, Motion.SPINNING):
        return tr("{what}, moves", what=what)
    return tr("{what}, does not move", what=what) if row.motion is Motion.STILL else what


def _ending(code: int | None) -> Message:
    if code is None:
        return tr("no process: ended, or never started")
    return tr("ended by signal {signal}", signal=-code) if code < 0 else tr("ended with exit code {code}", code=code)
