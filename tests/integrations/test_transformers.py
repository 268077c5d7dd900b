"""A real `transformers.Trainer` on 4 ranks: evaluations fail on rank 2, and all ranks train, select and stop alike."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ncclguard import faults

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed")

from ncclguard.integrations import deepspeed
from ncclguard.integrations.transformers import (
    ResilientEvaluation,
    ResilientTraining,
    SurvivingEvaluation,
    patch_trainer,
)

from tests.integrations.evaluation_parts import CASES, CULPRIT, check, check_without_guard, without_guard

PROGRAM = Path(__file__).with_name("transformers_cases.py")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, pytest.param(3, marks=pytest.mark.thorough)])
def test_training_goes_on_bit_for_bit(zero: int | None) -> None:
    """Under DDP, and under DeepSpeed's ZeRO-3."""
    if zero is not None:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    names = [*CASES, "none again"]
    job = faults.run_ranks(f"{PROGRAM}:guarded", 4, args=[names, zero], timeout=200)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    good = {
        name: value for name, value in job[0].reports["none"]["metrics"].items() if name in ("eval_loss", "eval_mae")
    }
    assert len(good) == 2
    for name in CASES:
        found = job.values(name)
        check(found, name)
        for values in found.values():
            if CASES[name][0] == "accept":
                assert "eval_evaluation_failed" not in values["metrics"]
                assert values["metrics"]["eval_mae"] > 0
            else:
                assert values["metrics"]["eval_evaluation_failed"] == 1.0
                assert values["metrics"]["eval_evaluation_culprit"] == CULPRIT
        if name != "skip":
            assert len({str(values["metrics"]) for values in found.values()}) == 1, name
    for rank in job:
        given_up = [name for name in CASES if CASES[name][0] != "accept" and (rank.rank, name) != (CULPRIT, "skip")]
        assert rank.reports["failed"] == len(given_up)
        assert rank.reports["losses"] == rank.reports["control"] == job[0].reports["losses"]


def test_best_model_and_early_stopping_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    """With a learning rate of 0 nothing improves: two evaluations that count, a failed one between them does not."""
    job = faults.run_ranks(f"{PROGRAM}:stopping", 4, args=[str(tmp_path)], timeout=120)
    assert all(rank.exit_code == 0 for rank in job), str(job)
    first = job[0].reports
    assert first["found"] == [[0.0, True], [1.0, False], [0.0, True], [0.0, True]]
    assert first["steps"] == 8
    assert first["saved"] == "checkpoint-2"
    assert [entry["eval_evaluation_failed"] for entry in first["history"]] == [1.0]
    for rank in job:
        assert [rank.reports[key] for key in ("steps", "best", "found", "saved")] == [
            first[key] for key in ("steps", "best", "found", "saved")
        ]
        assert rank.reports["predicted"] == [16]
    if importlib.util.find_spec("wandb") is not None:
        assert len(first["wandb"]) == 1


def test_of_several_data_sets_those_that_are_in_are_returned() -> None:
    job = faults.run_ranks(f"{PROGRAM}:partial", 1, timeout=60)
    assert job[0].exit_code == 0, str(job)
    assert job[0].reports["metrics"] == {
        "eval_first_mae": 1.0,
        "eval_evaluation_failed": 1.0,
        "eval_evaluation_attempts": 1.0,
        "eval_evaluation_cause_failed": 1.0,
        "eval_evaluation_culprit": 0.0,
        "eval_evaluation_partial_done": 1.0,
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_the_guard_the_job_ends() -> None:
    ended = without_guard(PROGRAM)
    check_without_guard(ended)
    assert ended["batches"].values("caught")[CULPRIT] == ""  # rank 2 has all it wanted, and goes on to train


class Trainer:
    """Stands for transformers.Trainer, which is not needed to see the order of classes."""

    def evaluate(self) -> dict[str, float]:
        return {}

    def train(self) -> None: ...


@pytest.mark.parametrize("mixin", [ResilientEvaluation, ResilientTraining])
def test_a_mixin_behind_the_trainer_is_refused(mixin: type) -> None:
    """It would do nothing, without a word."""
    with pytest.raises(
        TypeError, match=rf"whose methods are never called then: write class My\({mixin.__name__}, Trainer"
    ):
        type("My", (Trainer, mixin), {})

    class Logs:
        def evaluate(self) -> Any:
            return super().evaluate()  # type: ignore[misc]

        train = evaluate

    between = type("Between", (mixin,), {})
    type("My", (Logs, between, Trainer), {})


@pytest.mark.parametrize(
    ("mixin", "options"),
    [
        (ResilientEvaluation, {"time_out": 3}),
        (ResilientEvaluation, {"timeout": "3 min"}),
        (ResilientTraining, {"min_rank": 1}),
        (ResilientEvaluation, [5]),
        (ResilientTraining, 3),
    ],
)
def test_options_of_a_mixin_are_refused_before_an_epoch_is_trained(mixin: type, options: Any) -> None:
    name = "evaluation_options" if mixin is ResilientEvaluation else "training_options"
    with pytest.raises((TypeError, ValueError), match="did you mean|must be (?:seconds|a dict)"):
        type("My", (mixin, Trainer), {name: options})
    type("My", (mixin, Trainer), {name: property(lambda _: options)})  # each instance has its own
    with pytest.raises(TypeError, match=f"My.{name[:-1]} is nothing that its base classes know: did you mean {name}"):
        type("My", (mixin, Trainer), {name[:-1]: {}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timout": 5}, "did you mean timeout="),
        ({"timeout": "5"}, "must be seconds"),
        ({"models": torch.nn.Linear(1, 1)}, r"models must be a list, not Linear"),
        ({"combine": 1}, "combine must be a function"),
        ({"batch_size": 16}, "batch_size must say where it is"),
    ],
)
@pytest.mark.parametrize("patch", [patch_trainer, SurvivingEvaluation, deepspeed.patch_trainer])
def test_options_of_a_patch_are_refused_before_the_first_evaluation(
    patch: Any, options: dict[str, Any], said: str
) -> None:
    trainer = Trainer()
    with pytest.raises((TypeError, ValueError), match=said):
        patch(trainer, **options)
    assert "evaluate" not in vars(trainer)


def test_the_loader_of_a_trainer_is_not_for_the_caller() -> None:
    with pytest.raises(TypeError, match="'loader'"):
        type("My", (ResilientTraining, Trainer), {"training_options": {"loader": 1}})


@pytest.mark.parametrize("given", [Trainer, None, 3])
def test_what_is_no_trainer_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="give the trainer that the program has made"):
        patch_trainer(given)
