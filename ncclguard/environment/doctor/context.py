"""What the checks of one host look at, read once."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ncclguard.environment.infiniband import Port, read_ports
from ncclguard.environment.interface import InterfaceChoice
from ncclguard.environment.job import Job, read_job
from ncclguard.environment.links import Link, read_links
from ncclguard.environment.report import EnvironmentReport
from ncclguard.environment.setup import plan_environment


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
        """The interface itself."""
        return next((link for link in self.links if link.name == self.choice.name), None)

    @property
    def rank(self) -> int:
        """This process's rank, 0 without a launcher."""
        return self.job.rank or 0

    @property
    def world_size(self) -> int:
        """The number of ranks, 1 without a launcher."""
        return self.job.world_size or 1

    def read(self, path: str) -> str | None:
        """The text of a file, stripped; None when it is not there or may not be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:  # the kernel lacks it, or it is root's: the check says "unknown"
            return None


def read_context() -> Context:
    """The context of this process; changes nothing."""
    environ = dict(os.environ)
    return Context(
        job=read_job(environ),
        host=socket.gethostname(),
        environ=environ,
        report=plan_environment(dict(environ)),
        links=read_links(),
        ports=read_ports(),
    )
