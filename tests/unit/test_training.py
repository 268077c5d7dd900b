"""Batches for ranks that become fewer, what a step restores, and when the launcher leaves survivors alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import nn

import ncclguard as ng
from ncclguard.evaluation import state
from ncclguard.training import declaration
from ncclguard.training.launcher import Survivors


class Indices(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("seed", range(5))
def test_no_sample_is_lost_or_repeated_in_an_epoch_whoever_takes_part(seed: int) -> None:
    """Ranks are lost at random steps, some in a step that is then done again, and a batch size changes."""
    rng = random.Random(seed)
    length, ranks = rng.randrange(5, 60), tuple(range(6))
    loaders = {rank: ng.ElasticLoader(Indices(length), 3, seed=seed) for rank in ranks}
    used: list[int] = []
    for step in range(40):
        if len(ranks) > 1 and rng.random() < 0.15:
            for rank in ranks:  # a try of which nothing is left
                loaders[rank].take(ranks, rank)
            lost = rng.choice(ranks)
            ranks = tuple(rank for rank in ranks if rank != lost)
        if step == 20:
            for loader in loaders.values():
                loader.batch_size = 4
        for rank in ranks:
            used += loaders[rank].take(ranks, rank).tolist()
            loaders[rank].done()
    assert len({loaders[rank].position for rank in ranks}) == 1
    assert loaders[ranks[0]].position == len(used)
    for start in range(0, len(used) - length + 1, length):
        assert sorted(used[start : start + length]) == list(range(length))
    assert loaders[ranks[0]].epoch == len(used) // length


def test_a_loader_goes_on_where_a_checkpoint_was_and_leaves_random_numbers_alone() -> None:
    first, second = (ng.ElasticLoader(Indices(20), 3, seed=1) for _ in range(2))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first.take((0, 1), 1)
    assert torch.rand(1) == expected
    first.done()
    second.load_state_dict(first.state_dict())
    assert second.take((0, 1), 0).tolist() == first.take((0, 1), 0).tolist() == first.indices(6, 3)


@pytest.mark.parametrize(("length", "batch"), [(0, 1), (3, 0)])
def test_a_loader_without_samples_is_refused(length: int, batch: int) -> None:
    with pytest.raises(ValueError, match="at least 1 of both"):
        ng.ElasticLoader(Indices(length), batch)


@pytest.mark.parametrize(
    ("options", "told"), [({"on_lost": "shrink"}, "on_lost is"), ({"min_ranks": 0}, "min_ranks is")]
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ng.GuardConfigError, match=told):
        ng.resilient_step(nn.Linear(1, 1), **options)(lambda: None)


def test_alone_a_step_runs_once_and_raises_what_it_raises() -> None:
    loader, calls = ng.ElasticLoader(Indices(10), 2, shuffle=False), []

    @ng.resilient_step(loader=loader)
    def step(batch: torch.Tensor, fails: bool) -> list[int]:
        calls.append(batch.tolist())
        if fails:
            raise RuntimeError("of its own")
        return calls[-1]

    assert step(False) == [0, 1]
    with pytest.raises(RuntimeError, match="of its own"):
        step(True)
    assert step(False) == [2, 3]  # the step that raised has used nothing
    assert step.ranks == (0,)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_step_that_is_done_again_finds_everything_as_it_was(accumulates: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model(torch.ones(4, 2)).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    restore = state.keep(
        [
            state.random_numbers,
            state.buffers([model]),
            (state.gradient_values if accumulates else state.no_gradients)([model]),
            state.hyperparameters([optimizer]),
            state.states_of([scheduler]),
        ]
    )
    drawn = torch.rand(1)
    for _ in range(2):  # a second loss in the same step
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        restore()
        assert torch.rand(1) == drawn
        assert all(torch.equal(b, kept) for b, kept in zip(model.buffers(), buffers, strict=True))
        for parameter, kept in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is None if not accumulates else torch.equal(parameter.grad, kept)
        assert (scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]) == ([0.1], 0.1)


# ---------------------------------------------------------------------- the launcher


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def survivors(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Survivors:
    monkeypatch.setenv(declaration.FOLDER, str(tmp_path))
    found = Survivors(str(tmp_path), 10.0, clock)
    found.started()
    return found


def test_ranks_that_have_not_said_that_they_go_on_are_ended_as_by_torchrun(survivors: Survivors) -> None:
    assert survivors.judge({0: None, 1: -9, 2: None}) is None
    declaration.going_on(0, ())
    assert survivors.judge({0: None, 1: -9, 2: None}) is None


def test_survivors_are_left_alone_and_must_go_on_within_the_time(survivors: Survivors, clock: Clock) -> None:
    for rank in (0, 1, 2):
        declaration.going_on(rank, ())
    assert survivors.judge({0: None, 1: -9, 2: None}) == "wait"
    clock.now = 11.0
    assert survivors.judge({0: None, 1: -9, 2: None}) is None
    declaration.going_on(2, (1,))
    assert survivors.judge({0: None, 1: -9, 2: None}) == "wait"
    assert survivors.judge({0: 0, 1: -9, 2: None}) == "wait"
    assert survivors.judge({0: 0, 1: -9, 2: 0}) == "succeeded"


@pytest.mark.parametrize(
    ("codes", "without", "expected"),
    [
        ({0: 0, 1: -9}, (), "succeeded"),  # killed when there was nothing to agree on any more
        ({0: 0, 1: 1}, (), None),  # raised, and nobody had gone on without it
        ({0: 0, 1: 1}, (1,), "succeeded"),
        ({0: 1, 1: -9}, (1,), None),  # no rank is left that ended well
    ],
)
def test_the_end_of_the_job(
    codes: dict[int, int | None], without: tuple[int, ...], expected: str | None, survivors: Survivors
) -> None:
    declaration.going_on(0, without)
    assert survivors.judge(codes) == expected


def test_what_earlier_workers_have_said_does_not_count_for_new_ones(survivors: Survivors, tmp_path: Path) -> None:
    declaration.going_on(0, (1,))
    Path(tmp_path, "1.json").write_text(json.dumps("torn"))
    assert declaration.read(str(tmp_path), 0) == (1,)
    assert declaration.read(str(tmp_path), 1) is None
    survivors.started()
    assert survivors.judge({0: None, 1: -9}) is None
