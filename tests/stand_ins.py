"""The two stand-ins for the interpreter that all processes of a test run share, so that each slow import happens once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ncclguard.faults.forkserver import PRELOAD_VARIABLE, PYTHON_VARIABLE
from tests.forked_python import ForkedPython

FOLDER_VARIABLE = "_NCCLGUARD_STAND_INS"


@dataclass(frozen=True, slots=True)
class StandIn:
    """What it has imported, by its start at the latest, and the variables that it was started with."""

    name: str
    modules: str
    env: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> ForkedPython:
        return ForkedPython(self._folder, self.modules.split(), os.environ | self.env)

    def variables(self) -> dict[str, str]:
        """What tests and the ranks of their jobs have in their environment to be forked from it."""
        return {**self.env, PRELOAD_VARIABLE: self.modules, PYTHON_VARIABLE: str(self._folder / "python")}

    @property
    def _folder(self) -> Path:
        return Path(os.environ[FOLDER_VARIABLE]) / self.name


# Imported by the first step of DistributedDataParallel, by the files of the tests themselves, and by an incident's text.
PLAIN = StandIn("plain", "torch._dynamo pytest rich.panel")
FRAMEWORKS = StandIn(
    "frameworks", "tests.integrations.preloaded", {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}
)


def start() -> Callable[[], None]:
    """Start both; they import nothing before they are used. Returns what ends them."""
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="ncclguard-stand-ins-")
    servers = [each.start() for each in (PLAIN, FRAMEWORKS)]

    def end() -> None:
        for server in servers:
            server.close()
        shutil.rmtree(os.environ.pop(FOLDER_VARIABLE))

    return end
