"""What the tests with frameworks need before their ranks start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ncclguard.faults import fork


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    """Ranks are forks of a process that has imported the frameworks which are installed; those of other folders are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        fork.preload(("tests.integrations.preloaded",))
        yield
