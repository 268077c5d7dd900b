"""A short run of the soak, see tests/soak: random operations and faults, judged from outside."""

from __future__ import annotations

import pytest

from ncclguard import faults
from tests.soak.__main__ import needs, run

pytestmark = [pytest.mark.usefixtures("own_processes"), pytest.mark.slow]

ROUNDS, RANKS = 8, 4
SEED_OF_CUTS = 3426


@pytest.mark.skipif(bool(needs()), reason=needs())
@pytest.mark.parametrize(("memory", "seed"), [("0", 12), ("1", 2)])
def test_random_operations_with_random_faults(memory: str, seed: int) -> None:
    """Large parts by TCP, or from the memory of the other ranks; all faults but a late rank are among the rounds."""
    lines: list[str] = []
    failures = run(seed, ROUNDS, RANKS, env={"NCCLGUARD_CROSS_MEMORY": memory}, say=lines.append)
    assert not failures, "\n".join(failures)
    assert len(lines) == ROUNDS


@pytest.mark.namespaces
@pytest.mark.skipif(
    bool(needs() or faults.namespaces_available()), reason=str(needs() or faults.namespaces_available())
)
def test_hosts_that_are_cut_off_that_of_the_store_too_and_come_back() -> None:
    """Of 3 hosts of 2 ranks: that of the store for 2.5 s, which all survive, and another beyond the limit of its call."""
    lines: list[str] = []
    failures = run(SEED_OF_CUTS, 2, 6, say=lines.append, hosts=3)
    assert not failures, "\n".join(failures)
    assert [line.split(": ")[1].split(" at ")[0] for line in lines] == ["cut host 0", "cut host 1"], lines
