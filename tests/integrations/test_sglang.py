"""A group for weights as SGLang makes it, with the backend "ncclguard" and with another one."""

from __future__ import annotations

import importlib.util

import pytest

from ncclguard import faults
from tests.integrations import sglang_cases as cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed"),
]


@pytest.mark.parametrize("backend", ["ncclguard", "gloo"])
def test_an_engine_that_is_stopped_is_named_and_holds_the_others_only_where_they_are_unguarded(
    backend: str, free_ports: list[int]
) -> None:
    limits = {"NCCLGUARD_TIMEOUT": "4"}
    result = faults.run_ranks(cases.job, 3, args=[backend, free_ports[0]], env=limits, timeout=60)
    for rank in (0, 1):
        first, second, third = result[rank].reports["said"]
        assert first == second == [0.0, 1.0, 2.0], result
        if backend == "ncclguard":
            assert third.startswith("CollectiveTimeout") and "rank 2 stuck" in third, result
        elif rank == 0:
            assert third == "hangs", result
    assert result[2].reports["said"] == [[0.0, 1.0, 2.0]] * 2, result
