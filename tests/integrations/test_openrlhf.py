"""OpenRLHF's group for weights, between its trainer and its vLLM workers, with a guarded one in its place."""

from __future__ import annotations

import importlib.util

import pytest

from ncclguard import faults
from tests.integrations import openrlhf_cases as cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="openrlhf is not installed"),
]


@pytest.mark.parametrize(("fault", "how"), [("stop", "stuck"), ("kill", "lost")])
def test_a_worker_that_is_struck_ends_the_broadcast_on_all_with_its_name(
    fault: str, how: str, free_ports: list[int]
) -> None:
    """Three versions arrive, and the fourth ends, where OpenRLHF's own group waits for ever."""
    result = faults.run_ranks(cases.job, 3, args=[fault, free_ports[0]], timeout=100)
    for rank in (0, 1):
        said = result[rank].reports
        assert said["right"] == 3 and said["culprits"] == [2] and how in said["error"], result
    assert result[2].reports == {"right": 3}, result
