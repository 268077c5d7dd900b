"""`explain` on what plain NCCL jobs have left: it names the struck rank, or nobody where nothing proves it, and never a
healthy one. The recordings, and how they were made: tests/unguarded_logs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclguard_explain import explain

RECORDINGS = Path(__file__).parents[2] / "unguarded_logs"
BOTH = "both"


def cases() -> list[tuple[Path, str]]:
    """Each recording with each kind of evidence that its truth.json speaks of."""
    found = []
    for truth in sorted(RECORDINGS.glob("*/truth.json")):
        found += [(truth.parent, kind) for kind in json.loads(truth.read_text())["expected"]]
    return found


@pytest.mark.parametrize(("folder", "kind"), cases(), ids=lambda value: value if isinstance(value, str) else value.name)
def test_the_struck_rank_or_nobody_is_named(folder: Path, kind: str) -> None:
    truth = json.loads((folder / "truth.json").read_text())
    inputs = [folder / "logs", folder / "dumps"] if kind == BOTH else [folder / kind]
    report = explain([str(path) for path in inputs])
    assert list(report.culprits) in truth["expected"][kind]
