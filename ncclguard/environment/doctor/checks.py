"""What a check of the doctor looks at (this host and its place in the job) and what comes out (a line of its table)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ncclguard.environment.interface import InterfaceChoice, Job, read_job
from ncclguard.environment.network import Link, read_links
from ncclguard.environment.profiles import Port, read_ports
from ncclguard.environment.setup import EnvironmentReport, plan_environment

Status = Literal["ok", "warning", "error", "skipped"]
_WORST_LAST: tuple[Status, ...] = ("skipped", "ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Context:
    """This host and its place in the job. ``root`` is "/" except in tests."""

    job: Job
    host: str
    environ: Mapping[str, str]
    report: EnvironmentReport
    links: tuple[Link, ...]
    ports: tuple[Port, ...]
    root: Path = Path("/")

    @property
    def choice(self) -> InterfaceChoice:
        """The interface that setup_env() takes, or would take."""
        return self.report.interface

    @property
    def link(self) -> Link | None:
        """The chosen interface as the kernel describes it."""
        return next((link for link in self.links if link.name == self.choice.name), None)

    @property
    def rank(self) -> int:
        """This process's rank, 0 without a launcher."""
        return self.job.rank or 0

    @property
    def world_size(self) -> int:
        """The number of ranks, 1 without a launcher."""
        return self.job.world_size or 1

    @property
    def launcher_hosts_store(self) -> bool:
        """Whether the launcher listens on the master's port, as torchrun does."""
        return self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is not there or may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:  # the kernel lacks it, or it is root's: the check says "unknown"
            return None


def read_context() -> Context:
    """The context of this process; changes nothing."""
    environ = dict(os.environ)
    report = plan_environment(dict(environ))
    return Context(read_job(environ), socket.gethostname(), environ, report, read_links(), read_ports())


class Check(BaseModel):
    """A check: its name, how it came out, the figures, and what to do next (empty when there is nothing to do)."""

    model_config = ConfigDict(frozen=True)

    name: str
    status: Status
    detail: str
    advice: str = ""


def ok(name: str, detail: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name=name, status="ok", detail=detail)


def warning(name: str, detail: str, advice: str) -> Check:
    """Something that can make a job slow or fragile."""
    return Check(name=name, status="warning", detail=detail, advice=advice)


def error(name: str, detail: str, advice: str) -> Check:
    """Something that makes a job fail or hang."""
    return Check(name=name, status="error", detail=detail, advice=advice)


def skipped(name: str, detail: str) -> Check:
    """A check that had nothing to look at; the detail says why."""
    return Check(name=name, status="skipped", detail=detail)


def worst(statuses: Iterable[Status]) -> Status:
    """The gravest of the statuses; "skipped" when there is none."""
    return max(statuses, key=_WORST_LAST.index, default="skipped")


def exit_code(checks: Iterable[Check], *, fail_on_warnings: bool) -> int:
    """2 when something is an error, 1 when something is a warning and that was asked for, else 0."""
    status = worst(check.status for check in checks)
    return 2 if status == "error" else int(status == "warning" and fail_on_warnings)


def merge(by_host: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """One check for each name, from (host, its checks); hosts that differ are named, equal ones are not repeated."""
    found: dict[str, list[tuple[str, Check]]] = {}
    for host, checks in by_host:
        for check in checks:
            found.setdefault(check.name, []).append((host, check))
    return [_merge_one(checks, {host for host, _ in by_host}) for checks in found.values()]


def _merge_one(found: Sequence[tuple[str, Check]], all_hosts: set[str]) -> Check:
    status = worst(check.status for _, check in found)
    # Where something is wrong, only that is shown; hosts of which the same is said share a line.
    shown = [(host, check) for host, check in found if check.status == status]
    hosts_by_detail: dict[str, list[str]] = {}
    for host, check in shown:
        hosts_by_detail.setdefault(check.detail, []).append(host)
    everywhere = len(hosts_by_detail) == 1 and {host for host, _ in shown} == all_hosts
    lines = [
        detail if everywhere else f"{', '.join(dict.fromkeys(hosts))}: {detail}"
        for detail, hosts in hosts_by_detail.items()
    ]
    advice = "; ".join(dict.fromkeys(check.advice for _, check in shown if check.advice))
    return Check(name=found[0][1].name, status=status, detail="\n".join(lines), advice=advice)
