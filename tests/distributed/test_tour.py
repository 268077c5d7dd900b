"""The tour's commands run as they stand on the page, and print what the page says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(660)  # half a minute on two idle cores; the limit is for busy ones
def test_the_tour_runs_and_prints_what_it_shows(tmp_path: Path) -> None:
    """In one shell, from the root of what looks like a clone and takes files of its own."""
    spec = importlib.util.spec_from_file_location("ncclguard_scripts_smoke", ROOT / "scripts" / "smoke.py")
    assert spec is not None and spec.loader is not None
    smoke = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smoke)
    for path in ROOT.iterdir():
        if path.name != "tour":
            (tmp_path / path.name).symlink_to(path)
    smoke.run_tour((ROOT / "docs" / "tour.md").read_text(), tmp_path)
