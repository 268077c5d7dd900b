"""A real Accelerate loop on 4 ranks: evaluations fail on rank 2, and training goes on as if they had never been called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ncclguard import faults

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from ncclguard.integrations.accelerate import patch_accelerator, resilient_evaluate, resilient_step

from tests.integrations.evaluation_parts import CASES, CULPRIT, check, check_without_guard, without_guard

PROGRAM = Path(__file__).with_name("accelerate_cases.py")
WHOLE = [42, 1.0]


@pytest.mark.slow
def test_training_goes_on_bit_for_bit() -> None:
    """And gathers and barriers outside of evaluations end, and name who held them up."""
    job = faults.run_ranks(f"{PROGRAM}:guarded", 4, args=[[*CASES, "none again"]], timeout=200)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    for name in CASES:
        found = job.values(name)
        check(found, name)
        accepted = CASES[name][0] == "accept"
        assert all(values["result"] == (WHOLE if accepted else "not evaluated") for values in found.values()), name
        failed = [metrics for values in found.values() for _, metrics in values["logged"]]
        assert len(failed) == (0 if accepted else 1)
        assert all(metrics["eval/evaluation_culprit"] == CULPRIT for metrics in failed)
    assert all(values["result"] == WHOLE for values in job.values("none again").values())
    for rank in job:
        assert rank.reports["losses"] == rank.reports["control"] == job[0].reports["losses"]
        assert rank.reports["patched"] == [
            [0, 1, 2, 3],
            ["CollectiveTimeout", [CULPRIT]],
            ["CollectiveMismatch", [CULPRIT]],
            [0, 1, 2, 3],
        ]


def test_a_gather_in_an_evaluation_has_the_evaluations_limit() -> None:
    job = faults.run_ranks(f"{PROGRAM}:late_beside_a_patch", 2, timeout=100)
    for rank in job:
        assert (rank.reports["result"], rank.reports["after"]) == ("not evaluated", 2.0), str(job)
    assert any("rank 1 late" in rank.output for rank in job), str(job)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_the_guard_the_job_ends() -> None:
    """A rank with a batch less is in `wait_for_everyone` while the others are in a gather."""
    ended = without_guard(PROGRAM)
    check_without_guard(ended)
    assert ended["batches"].values("caught")[CULPRIT].startswith("RuntimeError: ")


@pytest.mark.parametrize(("started", "known"), [("2", 1), ("2", 2), ("1", 1), ("", 1)])
def test_an_accelerator_that_knows_of_no_other_rank_is_warned_of(
    started: str, known: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", started)
    resilient_evaluate(SimpleNamespace(num_processes=known, log=print))
    assert ("this Accelerator knows of one" in caplog.text) == ((started, known) == ("2", 1))


@pytest.mark.parametrize("given", [lambda: None, None, SimpleNamespace])
@pytest.mark.parametrize("taken", [resilient_evaluate, patch_accelerator, resilient_step])
def test_what_is_no_accelerator_is_refused(taken: Callable[[Any], object], given: object) -> None:
    """The function under `@resilient_evaluate` without its argument was taken, and an evaluation never ran."""
    with pytest.raises(TypeError, match=r"give the Accelerator that the program has made, @?\w+\(accelerator"):
        taken(given)
