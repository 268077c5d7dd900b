"""The incident: one record of a failed operation, the same on every rank that could agree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator

from ncclguard.incident.render import as_text
from ncclguard.outcome import Cause

#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION = 1

State = Literal["none", "running", "ready", "done", "silent", "departed"]


def _encodable(value: object) -> object:
    """File names and messages may hold bytes that are no text; JSON cannot."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_encodable)]


class RankReport(BaseModel):
    """One rank at the moment the operation was given up.

    `operation`: what it is in, or last was in; `age`: seconds in it; `call_site`: where the program called it;
    `peer`: the rank at the other end of the connection that broke here; `stack`: the main thread's frames, outermost
    first; `threads`: name and frames of the others, for culprits. None and "" where it is not known. `state` is how far
    the rank got in the operation: none (not entered), running, ready (own data complete), done; or silent (no answer),
    departed (gone, or left).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    host: Text = ""
    pid: int = 0
    cause: Cause | None = None
    state: State
    sequence: int = 0
    operation: Text | None = None
    age: float | None = None
    call_site: Text | None = None
    exception: Text | None = None
    peer: int | None = None
    stack: tuple[Text, ...] = ()
    threads: tuple[tuple[Text, tuple[Text, ...]], ...] = ()
    note: Text | None = None

    @property
    def place(self) -> str:
        """Host and pid, as far as they are known."""
        return ", ".join(([f"host {self.host}"] if self.host else []) + ([f"pid {self.pid}"] if self.pid else []))

    @property
    def inside(self) -> bool:
        """Whether it waits in the operation; one that does not has left its last, which is the one it reports."""
        return self.state in ("running", "ready")


class Incident(BaseModel):
    """Who, why, where and what to do; `timeout` in seconds, `ranks` in order of rank, `culprits` sorted global ranks.

    `sides` is filled when ranks diverged: what was called, and by which ranks, the largest side first. `device` is the
    GPU's name where it is an emulated one, else None. `str()` is for
    people, `to_json()` for programs. Raises pydantic.ValidationError, a ValueError, for fields that cannot be.

    >>> incident = Incident(
    ...     id="0-17.0", op="barrier", op_id="0/17", group="0", generation=0, cause=Cause.LATE, culprits=(2,),
    ...     deadline_expired=True, agreed=True, attempts=1, participants=(0, 1, 2),
    ...     summary="barrier() failed after 300 s: rank 2 late.", advice="See what rank 2 did instead.",
    ... )
    >>> Incident.from_json(incident.to_json()) == incident
    True
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    id: str
    op: Text
    op_id: str
    group: Text
    generation: int
    cause: Cause
    culprits: tuple[int, ...]
    deadline_expired: bool
    timeout: float | None = None
    agreed: bool
    attempts: int
    participants: tuple[int, ...]
    ranks: tuple[RankReport, ...] = ()
    summary: Text
    advice: Text
    sides: tuple[tuple[Text, tuple[int, ...]], ...] = ()
    torn: bool = False
    device: Text | None = None

    @field_validator("schema_version")
    @classmethod
    def _readable(cls, version: int) -> int:
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the incident has schema version {version}, this ncclguard reads {SCHEMA_VERSION}: read it with the "
                "version of ncclguard that wrote it"
            )
        return version

    @field_validator("culprits")
    @classmethod
    def _sorted(cls, culprits: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(culprits)))

    @field_validator("ranks")
    @classmethod
    def _in_order(cls, ranks: tuple[RankReport, ...]) -> tuple[RankReport, ...]:
        return tuple(sorted(ranks, key=lambda report: report.rank))

    def to_json(self) -> str:
        """Serialise; `from_json` gives an equal incident back."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str) -> Incident:
        """Read what `to_json` wrote. Raises pydantic.ValidationError, a ValueError, for anything else."""
        return cls.model_validate_json(text)

    def __str__(self) -> str:
        return as_text(self)
