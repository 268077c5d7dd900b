"""A `transformers.Trainer` goes on when ranks are killed in it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch.distributed as dist

from ncclguard import faults

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed")

from tests.integrations.trainer_step_cases import (
    BEFORE,
    MICRO,
    MOMENTS,
    PARTS,
    SIZE,
    STEPS,
    Kill,
    refused,
    train,
    undisturbed,
)


def run(folder: Path, kills: list[Kill], resume: bool = False, kind: str = "Striking") -> faults.JobResult:
    """Four ranks; the store is hosted here, as a launcher's agent hosts it, so that rank 0 may be killed too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return faults.run_ranks(train, SIZE, args=[kills, store.port, str(folder), resume, kind], timeout=150)


def check(folder: Path, kills: list[Kill], job: faults.JobResult, begin: int = 0) -> None:
    """All steps are done by the ranks that are left, with plain torch's losses, evaluations and parameters."""
    first = {rank: step + (moment not in BEFORE) for rank, step, moment in kills}  # the first step without a rank
    expected = [[rank for rank in range(SIZE) if step < first.get(rank, STEPS)] for step in range(STEPS)]
    losses, evaluated, parameters = undisturbed(expected)
    left = [rank for rank in range(SIZE) if rank not in first]
    ends = {rank: [len(left), place, *[place == 0] * 3] for place, rank in enumerate(left)}
    assert job.values("end") == ends, job
    position = 0
    for step, members in enumerate(expected):
        position += len(members) * MICRO * PARTS
        if step < begin:
            continue
        told = job.values(f"step {step}")
        assert {*told} >= {*left}
        for rank, (loss, _, at, _) in told.items():
            assert loss == pytest.approx(losses[step], rel=1e-4), (step, rank)
            assert at == position
        for rank, (loss, ranks) in job.values(f"evaluated {step}").items():
            assert loss == pytest.approx(evaluated[step][ranks], rel=1e-4), (step, rank)
        saved = folder / f"checkpoint-{step + 1}"
        assert {path.name for path in saved.iterdir()} >= {"model.safetensors", "optimizer.pt", "trainer_state.json"}
        assert json.loads((saved / "elastic_loader.json").read_text()) == {"position": position}
    for rank in left:
        for mine, theirs in zip(job[rank].reports["parameters"], parameters, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-2, abs=1e-4)
        assert job[rank].reports["parameters"] == job[left[0]].reports["parameters"]  # to the last bit
        shown = job[rank].reports["callbacks"]
        assert ("PrinterCallback" in shown) == (rank == left[0] != 0), shown


def test_nobody_is_killed(tmp_path: Path) -> None:
    """The reference itself: plain torch's losses, and no step is done again."""
    check(tmp_path, [], run(tmp_path, []))


@pytest.mark.parametrize("seed", range(8))
def test_ranks_are_killed_at_random_steps_and_moments(seed: int, tmp_path: Path) -> None:
    """Each rank and each moment first, rank 0 twice; then another rank."""
    rng = random.Random(seed)
    victims = [seed % SIZE, *rng.sample([rank for rank in range(SIZE) if rank != seed % SIZE], rng.randrange(1, 3))]
    moments = [MOMENTS[seed], *rng.choices(MOMENTS, k=2)]
    steps = sorted(rng.sample(range(STEPS - 1), len(victims)))
    kills = [*zip(victims, steps, moments, strict=False)]
    check(tmp_path, kills, run(tmp_path, kills))


def test_a_checkpoint_that_the_main_process_was_killed_in_is_saved_by_the_next_one(tmp_path: Path) -> None:
    check(tmp_path, [(0, 2, "saving")], run(tmp_path, [(0, 2, "saving")]))


@pytest.mark.parametrize("kind", ["Around", "Inside", "patched"])
def test_ranks_are_killed_in_and_before_evaluations_that_survive(kind: str, tmp_path: Path) -> None:
    """The others do them again, with the values of plain torch on as many ranks."""
    kills = [(0, 1, "evaluation"), (2, 3, "backward"), (3, 4, "evaluation")]
    job = run(tmp_path, kills, kind=kind)
    check(tmp_path, kills, job)
    assert "the job cannot go on" not in job[1].output, job[1].output
    assert [rank.output.count("'eval_loss':") for rank in job] == [1, STEPS - 1, 0, 0], (
        job
    )  # that which is done again too


def test_a_checkpoint_knows_which_samples_come_next(tmp_path: Path) -> None:
    """The job is over after four steps, and another one goes on from there as if nothing had been between."""
    run(tmp_path, [(rank, 4, "forward") for rank in range(SIZE)])
    check(tmp_path, [], run(tmp_path, [], resume=True), begin=4)


def test_what_cannot_go_on_is_refused_before_a_rank_waits_for_another(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(refused, 2, args=[store.port, str(tmp_path / "out")], timeout=60)
    for rank in job:
        assert "train_sampling_strategy='group_by_length'" in rank.reports["lengths"], job
        assert "include_num_input_tokens_seen" in rank.reports["tokens"]
        assert rank.reports["joins"].startswith("GuardConfigError: a new rank cannot come to the others' place")
