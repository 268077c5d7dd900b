"""What the tests with frameworks need before their ranks start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ncclguard.faults.forkserver import PRELOAD_VARIABLE


@pytest.fixture(scope="module", autouse=True)
def frameworks() -> Iterator[None]:
    """Ranks are forked from a process that has imported the frameworks which are installed; those of other folders are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv(PRELOAD_VARIABLE, "tests.integrations.preloaded")
        yield
