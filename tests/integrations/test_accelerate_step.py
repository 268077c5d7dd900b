"""An Accelerate loop goes on when ranks are killed in it, and counts those that are left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ncclguard import ElasticLoader, faults

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from tests.integrations.accelerate_step_cases import (
    BEFORE,
    MICRO,
    MOMENTS,
    PARTS,
    SIZE,
    STEPS,
    Kill,
    Rows,
    refused,
    train,
    undisturbed,
)

ROOT = Path(__file__).resolve().parents[2]
SPARED = """
import json, os, signal, time, torch, torch.distributed as dist
from accelerate import Accelerator
from ncclguard.integrations.accelerate import resilient_step
from tests.integrations.accelerate_step_cases import MICRO, PARTS, make
dist.init_process_group("ncclguard")
rank, new = dist.get_rank(), "NCCLGUARD_JOINS" in os.environ
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
model, optimizer, scheduler, loader = make(dropout=0)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
@resilient_step(accelerator, model, optimizer, loader=loader, keep=[scheduler])
def train(batch):
    mean = torch.zeros(())
    for rows in batch[0].split(MICRO):
        with accelerator.accumulate(model):
            loss = model(rows).square().mean()
            accelerator.backward(loss)
            mean += accelerator.reduce(loss.detach(), "mean") / PARTS
            if (train.completed, rank) == (5, 0) and not new:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return mean.item()
lines, whole = [], 0
while whole < 5:
    loss = train()
    ranks = accelerator.gather(torch.tensor([rank])).tolist()
    lines.append([train.completed, loss, train.made_by, ranks, accelerator.is_main_process])
    whole = whole + 1 if train.completed > 6 and len(train.made_by) == 4 else 0
    time.sleep(0.05)
os.write(1, f"end {rank} {json.dumps([lines, scheduler.get_last_lr()])}\\n".encode())
dist.destroy_process_group()
"""


def run(folder: Path, kills: list[Kill], **options: Any) -> faults.JobResult:
    """Four ranks; the store is hosted here, as a launcher's agent hosts it, so that rank 0 may be killed too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return faults.run_ranks(train, SIZE, args=[kills, store.port, str(folder), options], timeout=120)


def check(folder: Path, kills: list[Kill], **options: Any) -> None:
    """All steps are done by the ranks that are left, on the samples that come next, with plain torch's losses."""
    job = run(folder, kills, **options)
    first = {rank: step + (moment not in BEFORE) for rank, step, moment in kills}  # the first step without a rank
    expected = [[rank for rank in range(SIZE) if step < first.get(rank, STEPS)] for step in range(STEPS)]
    losses, parameters, rate = undisturbed(expected)
    left = [rank for rank in range(SIZE) if rank not in first]
    assert job.values("end") == {rank: [left, len(left), place] for place, rank in enumerate(left)}, job
    loader, position = ElasticLoader(Rows(), MICRO * PARTS, seed=7), 0
    for step, members in enumerate(expected):
        told = job.values(f"step {step}")
        for place, rank in enumerate(members):
            if rank in told:  # else it was killed in this step, when gradients were reduced
                loss, samples, made_by, main, ranks = told[rank]
                assert loss == pytest.approx(losses[step], rel=1e-4), (step, rank)
                assert samples == loader.indices(position + place * MICRO * PARTS, MICRO * PARTS)
                assert made_by == members
                assert main == (rank == ranks[0])
        position += len(members) * MICRO * PARTS
        evaluated = job.values(f"evaluated {step}")
        assert all(seen == [*range(22)] for seen in evaluated.values()), (step, evaluated)
        assert {path.name for path in (folder / str(step + 1)).iterdir()} >= {"model.safetensors", "scheduler.bin"}
    for rank in left:
        flat = [value for values in job[rank].reports["parameters"] for value in _flat(values)]
        assert flat == pytest.approx([value for values in parameters for value in _flat(values)], rel=1e-3, abs=1e-6)
        assert job[rank].reports["parameters"] == job[left[0]].reports["parameters"]  # to the last bit
        assert job[rank].reports["rate"] == pytest.approx(rate)
    lines = job.values("lines")
    assert [step for step, _ in lines[left[0]]][-1] == STEPS - 1
    assert all(lines[rank] is None for rank in left[1:])
    objects = job.values("objects").values()
    refusal = "ValueError: there are 4 outputs for a group of 3 ranks: give one for each"
    assert all(found == (left if len(left) == SIZE else refusal.replace("3", str(len(left)))) for found in objects)


def _flat(values: Any) -> list[float]:
    return [one for each in values for one in _flat(each)] if isinstance(values, list) else [values]


def test_nobody_is_killed(tmp_path: Path) -> None:
    """The reference itself: plain torch's losses, and no step is done again."""
    check(tmp_path, [])


@pytest.mark.parametrize("seed", range(8))
def test_ranks_are_killed_at_random_steps_and_moments(seed: int, tmp_path: Path) -> None:
    """Each rank and each moment first, rank 0 twice; then another rank."""
    rng = random.Random(seed)
    victims = [seed % SIZE, *rng.sample([rank for rank in range(SIZE) if rank != seed % SIZE], rng.randrange(1, 3))]
    moments = [MOMENTS[seed], *rng.choices(MOMENTS, k=2)]
    steps = sorted(rng.sample(range(STEPS - 1), len(victims)))
    check(tmp_path, [*zip(victims, steps, moments, strict=False)])


def test_a_compiled_model_divides_by_the_ranks_that_are_left(tmp_path: Path) -> None:
    check(tmp_path, [(0, 2, "backward")], dynamo_backend="eager")


@pytest.mark.slow
def test_a_spare_takes_the_place_of_the_main_process(tmp_path: Path) -> None:
    """Losses are plain torch's for the ranks that made each step; who is there is counted, and is main, at each step."""
    script = tmp_path / "train.py"
    script.write_text(SPARED)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    job = subprocess.run(
        [sys.executable, "-m", "ncclguard", "run", "--nproc-per-node", str(SIZE), "--spares", "1", str(script)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-6000:]
    ends = {
        int(line.split()[1]): json.loads(line.split(None, 2)[2])
        for line in job.stdout.splitlines()
        if line[:4] == "end "
    }
    assert sorted(ends) == [*range(SIZE)], job.stdout
    made_by = [made for _, _, made, _, _ in ends[1][0]]
    assert made_by[0] == made_by[-1] == [*range(SIZE)] and made_by[5] == [1, 2, 3]
    losses, _, rate = undisturbed(made_by, dropout=0)
    for rank, (lines, last) in ends.items():
        for step, loss, made, ranks, main in lines:
            assert loss == pytest.approx(losses[step - 1], rel=1e-4), (rank, step)
            assert (ranks, main) == (made, rank == made[0])
        assert lines[-1][0] == len(losses) and last == pytest.approx(rate)


def test_what_cannot_go_on_is_refused_before_a_rank_waits_for_another() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(refused, 2, args=[store.port], timeout=60)
    for rank in job:
        found = rank.reports
        assert not found["met"], job
        assert found["failing"] == [2 * PARTS, True]  # with on_lost="fail" there is nothing to refuse
        assert found["plain"].startswith("GuardConfigError: AcceleratedOptimizer: Accelerate counts the ranks itself")
        assert "inside an iteration over a prepared dataloader" in found["iterating"]
        assert "FSDP" in found["sharded"]
        for name in ("accumulates", "between"):
            assert found[name].startswith("GuardConfigError: a step ended between two micro-batches"), found
