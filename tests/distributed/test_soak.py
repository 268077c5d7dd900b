"""A short run of the soak, see tests/soak: random operations and faults, judged from outside."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import needs, run

pytestmark = [pytest.mark.usefixtures("whole_end"), pytest.mark.slow]

SEED, ROUNDS, RANKS = 5, 10, 4


@pytest.mark.skipif(bool(needs()), reason=needs())
@pytest.mark.parametrize("memory", ["0", "1"])
def test_random_operations_with_random_faults(memory: str) -> None:
    """Large parts by TCP, or from the memory of the other ranks."""
    lines: list[str] = []
    failures = run(SEED, ROUNDS, RANKS, env={"NCCLGUARD_CROSS_MEMORY": memory}, say=lines.append)
    assert not failures, "\n".join(failures)
    assert len(lines) == ROUNDS
