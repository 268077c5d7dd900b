"""The first NaN of a job on CUDA tensors: the hooks do not wait for the device, and all ranks are told whose it was."""

from __future__ import annotations

import pytest

from benchmarks.numerics import KINDS, RANKS, campaign
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_whose_number_was_the_first_to_be_none_is_named_on_all_ranks(kind: str) -> None:
    job = faults.run_ranks(campaign, RANKS, args=[kind, 100, 3, "cuda", "nccl"], env=SHARED_GPU, timeout=150).check()
    assert [rank.reports["wrong"] for rank in job] == [[]] * RANKS
