"""The first NaN of a job is told on all ranks: whose it was, in which step, before a reduction had spread it to all."""

from __future__ import annotations

import pytest

from benchmarks.numerics import KINDS, RANKS, campaign
from ncclguard import faults


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_whose_number_was_the_first_to_be_none_is_named_on_all_ranks(kind: str) -> None:
    """Divided by zero, poisoned behind a layer, in a batch, in a weight, or in what `safe_*` is given."""
    job = faults.run_ranks(campaign, RANKS, args=[kind, 100, 4], timeout=120).check()
    assert [rank.reports["wrong"] for rank in job] == [[]] * RANKS
    assert job[0].output.count("the first NaN or infinity of all ranks") >= 4
