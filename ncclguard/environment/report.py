"""What ``setup_env()`` returns: what it set, what it kept, what it found wrong."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.interface import InterfaceChoice
from ncclguard.environment.limits import Ladder
from ncclguard.environment.profiles import Profile
from ncclguard.environment.versions import Versions

Severity = Literal["error", "warning"]


class Setting(BaseModel):
    """A variable with the value it was given, and why."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: str
    why: str


class Kept(BaseModel):
    """A variable that was there already. ``origin`` is "environment" or the file it came from; ``proposed`` is the
    value it would have been given otherwise, where there is one."""

    model_config = ConfigDict(frozen=True)

    name: str
    value: str
    origin: str = "environment"
    proposed: str | None = None


class Finding(BaseModel):
    """Something wrong: what it is, and what to do next. ``name`` is the variable it is about."""

    model_config = ConfigDict(frozen=True)

    name: str
    severity: Severity
    detail: str
    advice: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.detail}; {self.advice}"


class EnvironmentReport(BaseModel):
    """The outcome of :func:`ncclguard.setup_env`.

    ``set`` holds what ncclguard set, ``kept`` what was there before, ``translated`` the settings that carry the value
    of a deprecated name over to the new one (they are in ``set`` as well), ``wrong`` the findings and ``too_late`` what
    would have been set before ``init_process_group``.
    """

    model_config = ConfigDict(frozen=True)

    versions: Versions
    profile: Profile
    interface: InterfaceChoice
    limits: Ladder
    set: tuple[Setting, ...] = ()
    kept: tuple[Kept, ...] = ()
    translated: tuple[tuple[str, str], ...] = ()
    wrong: tuple[Finding, ...] = ()
    too_late: tuple[Setting, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is an error and nothing came too late."""
        return not self.too_late and not any(finding.severity == "error" for finding in self.wrong)

    @property
    def one_line(self) -> str:
        """The line that rank 0 logs."""
        parts = [
            f"interface {self.interface.name or 'unknown'} ({self.interface.evidence})",
            f"profile {self.profile.name}",
            f"{len(self.set)} variables set, {len(self.kept)} kept",
            self.limits.one_line,
        ]
        if self.too_late:
            names = ", ".join(setting.name for setting in self.too_late)
            parts.append(f"too late, init_process_group has been called, for {names}")
        if self.wrong:
            parts.append("wrong: " + " | ".join(str(finding) for finding in self.wrong))
        return "; ".join(parts)

    def __str__(self) -> str:
        nccl = self.versions.nccl or f"none ({self.versions.nccl_source})"
        lines = [
            f"torch {self.versions.torch}, NCCL {nccl}",
            f"interface  {self.interface.name or 'unknown'}: {self.interface.evidence}",
            *(f"           {note}" for note in self.interface.notes),
            f"profile    {self.profile.name}: {self.profile.reason}",
        ]
        lines += [f"set        {entry.name}={entry.value}: {entry.why}" for entry in self.set]
        lines += [_kept_line(entry) for entry in self.kept]
        lines += [f"too late   {entry.name}={entry.value}: {entry.why}" for entry in self.too_late]
        lines += [f"{finding.severity:<10} {finding.detail}; {finding.advice}" for finding in self.wrong]
        return "\n".join([*lines, "limits", *(f"  {rung}" for rung in self.limits.rungs)])


def _kept_line(entry: Kept) -> str:
    proposed = f", instead of {entry.proposed}" if entry.proposed not in (None, entry.value) else ""
    return f"kept       {entry.name}={entry.value} (from {entry.origin}{proposed})"
