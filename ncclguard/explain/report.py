"""The report as data: what `--json` writes. Fields are only added within a schema version."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from ncclguard.outcome import Cause

SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


class Collective(_Model):
    """The collective that was stuck; element counts, milliseconds; what the logs do not tell is null."""

    op: str | None = None
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    group: str | None = None
    timeout_ms: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class RankRow(_Model):
    """One rank in one group. `state` is waiting, missing, behind, ahead, different, failed or unknown."""

    rank: int
    state: str
    group: str | None = None
    seq: int | None = None
    op: str | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    timeout_ms: int | None = None
    ran_ms: int | None = None


class Mention(_Model):
    """A line of the inputs, where it stands, and how often it was printed."""

    file: str
    line: int
    text: str
    kind: str
    rank: int | None = None
    count: int = 1


class Event(_Model):
    """One parsed statement, with every figure it held."""

    kind: str
    file: str
    line: int
    rank: int | None = None
    group_rank: int | None = None
    group: str | None = None
    op: str | None = None
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    timeout_ms: int | None = None
    ran_ms: int | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    number: int | None = None
    seconds: float | None = None
    peers: tuple[int, ...] = ()
    name: str = ""
    detail: str = ""
    frames: tuple[str, ...] = ()
    count: int = 1
    hidden: int = 0


class Side(_Model):
    """Ranks that agree with each other, and what they were in."""

    what: str
    ranks: tuple[int, ...]


class Report(_Model):
    """Who, why, where, what to do. `culprits` is empty when it cannot be proved.

    `decision` is restart, restart-without, fix-code, fix-environment, raise-limit or unknown; `without` says what a
    restart should leave out; `next_step` is the one thing to do. `evidence` carries the answer, and `overturned_by`
    says
    what would prove it wrong.
    """

    schema_version: int = SCHEMA_VERSION
    incident: bool
    summary: str
    culprits: tuple[int, ...]
    suspects: tuple[int, ...]
    cause: Cause
    cause_class: str
    confidence: str
    culprit_confidence: str
    reason: str
    class_reason: str
    decision: str
    decision_reason: str
    without: str
    next_step: str
    overturned_by: tuple[str, ...]
    collective: Collective | None
    ranks: tuple[RankRow, ...]
    sides: tuple[Side, ...]
    evidence: tuple[Mention, ...]
    consequences: tuple[Mention, ...]
    advice: tuple[str, ...]
    arithmetic: tuple[str, ...]
    stacks: tuple[Event, ...]
    effective_timeout_ms: int | None
    world_size: int | None
    world_size_basis: str
    logs_cover: tuple[int, ...]
    inputs: tuple[str, ...]
    bytes_read: int
    notes: tuple[str, ...]
    events: tuple[Event, ...]
