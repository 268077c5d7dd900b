"""Tests of the emulator: `scripts/emulated-gpu python -m pytest emulated_gpu/tests`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def in_the_environment() -> None:
    """Say how to run these tests to somebody who runs them with another Python."""
    if not (Path(sys.prefix) / "emulated-gpu-objects").exists():
        pytest.exit(
            "these tests run in the emulator's environment: scripts/emulated-gpu python -m pytest emulated_gpu/tests", 2
        )
