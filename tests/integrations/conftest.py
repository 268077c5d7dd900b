"""What the tests with frameworks need before their ranks start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import stand_ins


@pytest.fixture(scope="module", autouse=True)
def frameworks() -> Iterator[None]:
    """Ranks are forked from a process that has imported the frameworks which are installed; those of other folders are not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stand_ins.FRAMEWORKS.variables().items():
            patch.setenv(name, value)
        yield
