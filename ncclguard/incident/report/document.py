"""The report of one incident as data: what `incident-<id>.json` holds."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, field_validator

from ncclguard.incident.model import Incident, Text
from ncclguard.incident.report.timeline import Timeline

#: Raised with every change of a field's name or meaning.
SCHEMA_VERSION: Final = 1


class Document(BaseModel):
    """An incident with its timeline. `written_at` is the writer's wall clock, for finding the incident in other logs.

    Raises pydantic.ValidationError, a ValueError, for anything else.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
    written_at: str
    written_by: int
    host: Text
    job: str
    world_size: int
    ncclguard: str
    torch: str
    incident: Incident
    timeline: Timeline | None = None

    @field_validator("schema_version")
    @classmethod
    def _readable(cls, version: int) -> int:
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"the report has schema version {version}, this ncclguard reads {SCHEMA_VERSION}: read it with the "
                "version of ncclguard that wrote it"
            )
        return version
