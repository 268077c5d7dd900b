"""What `explain` says of ncclguard's own incidents is what their panel said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ncclguard.incident.model import Incident
from ncclguard.incident.report import show
from ncclguard_explain import Report, explain
from ncclguard_explain.language import choose

WATCHED = Path(__file__).parents[3] / "docs" / "gallery" / "watch-late"
WRITTEN = json.loads((WATCHED / "incident.json").read_text())
INCIDENT = Incident.model_validate(WRITTEN["incident"] | {"further": "`watch()` only observes. A guarded call ends."})


def panel(folder: Path, language: str) -> Path:
    """A log with the panel of the incident."""
    choose(language)
    try:
        with (folder / "job.log").open("w") as file:
            show(INCIDENT, file)
    finally:
        choose(None)
    return folder / "job.log"


def written(folder: Path) -> Path:
    (folder / "incident.json").write_text(json.dumps(WRITTEN | {"incident": INCIDENT.model_dump(mode="json")}))
    return folder


@pytest.mark.parametrize("of", ["json", "en", "zh"])
def test_a_late_rank_of_watch_has_the_panels_stack_and_advice_and_no_other(of: str, tmp_path: Path) -> None:
    report = explain([os.fspath(written(tmp_path) if of == "json" else panel(tmp_path, of))])
    assert (report.culprits, report.cause.value, report.decision) == ((2,), "late", "fix-code")
    (stack,) = report.stacks
    assert (stack.rank, stack.frames[0]) == (
        2,
        'train.py:50 in <module>: watched() if os.environ.get("WATCHED") else main()',
    )
    assert any(frame.endswith("_be_late: late(fault.seconds or 0.0)") for frame in stack.frames), stack.frames
    advice = (INCIDENT.advice, INCIDENT.further)
    if of == "zh":
        assert report.next_step.startswith("先看") or "timeout" in report.next_step, report.next_step
        assert not any("py-spy" in text or "TORCH_FR" in text for text in report.advice)
    else:
        assert (report.next_step, report.advice) == (advice[0], advice)
    assert not report.reason.endswith((".", "。"))
    if of == "json":
        assert (report.world_size, report.world_size_basis) == (3, "stated")


def later(folder: Path, name: str, at: str, rank: int) -> Report:
    """The report on a folder to which an incident of this rank and time is added."""
    incident = WRITTEN["incident"] | {"culprits": [rank], "summary": f"barrier() failed after 3 s: rank {rank} late."}
    (folder / name).write_text(json.dumps(WRITTEN | {"written_at": at, "incident": incident}))
    return explain([os.fspath(folder)])


def test_of_several_incidents_the_latest_is_told_and_the_others_are_named(tmp_path: Path) -> None:
    assert later(tmp_path, "b.json", "2026-11-20T10:00:00+00:00", rank=1).notes == ()
    report = later(tmp_path, "a.json", "2026-11-20T11:00:00+00:00", rank=2)
    assert report.culprits == (2,)
    assert report.notes[0].startswith(
        "2 incidents of ncclguard are in these inputs, and the answer is about the latest"
    )
    assert "b.json: barrier() failed after 3 s: rank 1 late" in report.notes[0]
