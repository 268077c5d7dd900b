"""The gallery has every fault of the drill, as data that this version reads, without a path of the machine that made it;
and what the peers' texts say of ranks is read right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gallery.__main__ import FAULTS, STRUCK
from benchmarks.peers.findings import findings_of, names
from ncclguard.faults.drill import EXPECTED
from ncclguard.faults.fault import PARAMETERS
from ncclguard.incident.timeline import Document

pytestmark = pytest.mark.fast

GALLERY = Path(__file__).resolve().parents[2] / "docs" / "gallery"


def test_there_is_a_picture_of_every_fault() -> None:
    assert {words[words.index("--fault") + 1] for words, _ in FAULTS.values()} == set(PARAMETERS)
    table = (GALLERY / "README.md").read_text()
    assert all(f"| `{name}` |" in table and (GALLERY / name / "terminal.txt").exists() for name in FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_picture_is_of_the_struck_rank_and_of_no_machine(name: str) -> None:
    folder = GALLERY / name
    for file in folder.iterdir():
        text = file.read_text()
        assert len(text) < 100_000
        assert not re.search(r"/(root|home|work|usr|opt)/", text), file
    assert "drill:     passed" in (folder / "terminal.txt").read_text()
    if (folder / "incident.json").exists():
        incident = Document.model_validate_json((folder / "incident.json").read_text()).incident
        assert incident.culprits in ((STRUCK,), ())
        fault = FAULTS[name][0]
        assert str(incident.cause) in EXPECTED[fault[fault.index("--fault") + 1]]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 4000 ms", [2, 3]),
        ("Rank 1 successfully reached monitoredBarrier, but received errors. Please check rank 0 logs.", []),
        (
            "mismatch between collectives on ranks. Rank 0 is running collective: A, but Rank 2 is running collective: B",
            [2],
        ),
        ("'Interruption.EXCEPTION on ranks={1, 3}, Interruption.TERMINATED on ranks={2}'", [2]),
        ("'Interruption.EXCEPTION on ranks={0}, Interruption.SOFT_TIMEOUT on ranks={1, 3}'", [0, 1, 3]),
        ("Connection closed by peer [127.0.0.1]:24279", []),
    ],
)
def test_whom_a_text_names(text: str, found: list[int]) -> None:
    assert names([text], None) == found


def test_a_rank_that_met_nothing_after_the_strike_has_not_ended() -> None:
    def event(kind: str, at: float, **values: Any) -> dict[str, Any]:
        return {"event": kind, "at": at, **values}

    events = {
        0: [
            event("failed", 14.0, step=4, text="timed out", named=None, tensor="torn"),
            event("ok", 15.0, step=5, masks=[3]),
        ],
        1: [event("ok", 9.0, step=3, masks=[7])],
        2: [event("struck", 10.0)],
    }
    found = findings_of("plain", "late", events, {0: "exit 0", 1: "still running", 2: "exit 0"})
    assert found.met == {0: "failed", 1: "nothing, then still running"}
    assert found.seconds == {0: 4.0}
    assert found.tensors == {0: "torn"}
    assert found.went_on == {0: 5.0}
    assert found.participants == [0, 1]
