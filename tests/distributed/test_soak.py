"""A short run of the soak, see tests/soak: random operations and faults, judged from outside."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import needs, run

pytestmark = [pytest.mark.usefixtures("own_processes"), pytest.mark.slow]

ROUNDS, RANKS = 8, 4


@pytest.mark.skipif(bool(needs()), reason=needs())
@pytest.mark.parametrize(("memory", "seed"), [("0", 12), ("1", 2)])
def test_random_operations_with_random_faults(memory: str, seed: int) -> None:
    """Large parts by TCP, or from the memory of the other ranks; all faults but a late rank are among the rounds."""
    lines: list[str] = []
    failures = run(seed, ROUNDS, RANKS, env={"NCCLGUARD_CROSS_MEMORY": memory}, say=lines.append)
    assert not failures, "\n".join(failures)
    assert len(lines) == ROUNDS
