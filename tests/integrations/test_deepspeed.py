"""Real DeepSpeed engines on 4 ranks: evaluations fail on rank 2, and training goes on as if they had never been called."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclguard import faults

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.integrations.evaluation_parts import CASES, CULPRIT, check, check_without_guard, without_guard

PROGRAM = Path(__file__).with_name("deepspeed_cases.py")
WHOLE = [12.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_training_goes_on_bit_for_bit(stage: int) -> None:
    job = faults.run_ranks(f"{PROGRAM}:guarded", 4, args=[[stage], [*CASES, "none again"]], timeout=200)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    runs = job.values(f"zero{stage}")
    for name in CASES:
        found = {rank: run[name] for rank, run in runs.items() if name in run}
        check(found, name)
        accepted = CASES[name][0] == "accept"
        assert all(values["result"] == (WHOLE if accepted else "not evaluated") for values in found.values()), name
        assert all(values["modes"] == [True, True] for values in found.values()), name
        failed = [metrics for values in found.values() for _, metrics in values["logged"]]
        assert len(failed) == (0 if accepted else 1)
        assert all(metrics["eval/evaluation_culprit"] == CULPRIT for metrics in failed)
    assert all(run["none again"]["result"] == WHOLE for run in runs.values())
    for run in runs.values():
        assert run["losses"] == run["control"] == runs[0]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.thorough), 3])
def test_without_the_guard_the_job_ends(stage: int) -> None:
    """With ZeRO-3 rank 2's gather for training meets the others' reduction in the evaluation: gloo aborts one of them."""
    ended = without_guard(PROGRAM, stage)
    check_without_guard(ended, aborting=("oom", "batches", "skip") if stage == 3 else ())
    assert ended["batches"].values("caught")[CULPRIT] == ""  # rank 2 has all it wanted, and goes on to train
