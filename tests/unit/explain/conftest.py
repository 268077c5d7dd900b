"""A report out of a few lines, for the tests of `ncclguard explain`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from ncclguard_explain import Report, explain

sys.path.insert(0, str(Path(__file__).parent))  # for explain_logs: the import mode is importlib


@pytest.fixture
def explain_lines(tmp_path: Path) -> Callable[..., Report]:
    """Return a function: lines of one merged log, or file name -> lines, to the report."""

    def run(lines: Sequence[str] | Mapping[str, Sequence[str]], world_size: int | None = None) -> Report:
        files = lines if isinstance(lines, Mapping) else {"train.log": lines}
        for name, rows in files.items():
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        return explain([str(tmp_path / "in")], world_size=world_size)

    return run
