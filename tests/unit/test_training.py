"""Batches for ranks that become fewer, what a step restores, and when the launcher leaves survivors alone."""

from __future__ import annotations

import importlib
import json
import pickle
import random
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import ncclguard as ng
from ncclguard import lifecycle
from ncclguard.coordination.liveness import Identity
from ncclguard.coordination.store import AgreementStore
from ncclguard.engine import runtime
from ncclguard.evaluation import state
from ncclguard.torch_compat import elastic
from ncclguard.torch_compat.elastic import Host
from ncclguard.training import declaration, joining, launcher, stand_by
from ncclguard.training.continuation import Continuation
from ncclguard.training.launcher import Limits, Survivors
from tests.ports import free_port


def test_torch_has_the_agent_that_ncclguard_run_needs() -> None:
    """`scripts/matrix` runs this with every version that is supported."""
    assert elastic.check() == ""


def test_a_session_that_another_thread_has_ended_meanwhile_is_followed_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_runtime", None)
    with pytest.raises(ng.GuardError):
        runtime.replace(object())  # type: ignore[arg-type]
    assert runtime._runtime is None


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


def test_a_batch_size_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(TypeError, match="batch_size must be a whole number, not str"):
        ng.ElasticLoader(Indices(3), "8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_lost": "shrink"}, "on_lost must be .* got 'shrink'"),
        ({"min_ranks": 0}, "min_ranks is 0: it must be a whole number, at least 1"),
        ({"min_ranks": "2"}, "min_ranks is '2'"),
        ({"copies": -1}, "copies is -1"),
        ({"copies": 1.5}, "copies is 1.5"),
        ({"keep": 3}, "keep has a int"),
        ({"keep": [3]}, "keep has a int"),
        ({"on_change": 3}, "on_change is 3: it must be a function"),
        ({"load": "last.pt"}, "load is 'last.pt'"),
        ({"on_difference": "x"}, "on_difference must be .* got 'x'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], told: str) -> None:
    with pytest.raises(ng.GuardConfigError, match=told):
        ng.resilient_step(nn.Linear(1, 1), **options)(lambda: None)


def test_what_stands_in_another_place_is_told_where_it_belongs() -> None:
    model, data = nn.Linear(1, 1), torch.utils.data.DataLoader(Indices(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ng.GuardConfigError, match=r"model is a SGD.*resilient_step\(model, optimizer\)"):
        ng.resilient_step(optimizer, model)(lambda: None)
    with pytest.raises(ng.GuardConfigError, match="loader is a DataLoader: make it an ncclguard.ElasticLoader"):
        ng.resilient_step(model, optimizer, loader=data)(lambda batch: None)
    with pytest.raises(TypeError, match="shufle"):
        ng.ElasticLoader(Indices(3), 1, shufle=True)
    ng.resilient_step(model, optimizer, keep=torch.optim.lr_scheduler.StepLR(optimizer, 1))(lambda: None)()  # one alone


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


class Judged:
    """A judge with limits, and what it does to its host."""

    def __init__(self, folder: Path, clock: Clock, other_hosts: bool = False, **limits: float) -> None:
        self.survivors = Survivors(
            str(folder),
            Limits(10.0, **limits),  # type: ignore[arg-type]
            clock,
            other_hosts=other_hosts,
        )
        self.waiting = 0
        self.begun: list[tuple[int, bool, dict[str, str]]] = []
        self.killed: list[int] = []
        self.host = Host(lambda: self.waiting, self.start, self.killed.append)

    def start(self, rank: int, env: Mapping[str, str], spare: bool) -> int:
        self.waiting -= spare
        self.begun.append((rank, spare, dict(env)))
        return 1000 + rank

    def judge(self, codes: dict[int, int | None]) -> str | None:
        return self.survivors.judge(codes, self.host)


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path_factory.mktemp("reports"))  # where the launcher's lines go
    monkeypatch.setenv(declaration.FOLDER, str(tmp_path))
    return tmp_path


@pytest.fixture
def survivors(folder: Path, clock: Clock) -> Judged:
    return Judged(folder, clock)


def test_ranks_that_have_not_said_that_they_go_on_are_ended_as_by_torchrun(survivors: Judged) -> None:
    assert survivors.judge({0: None, 1: -9, 2: None}) is None
    declaration.going_on(0, ())
    assert survivors.judge({0: None, 1: -9, 2: None}) is None


def test_survivors_are_left_alone_and_must_go_on_within_the_time(survivors: Judged, clock: Clock) -> None:
    for rank in (0, 1, 2):
        declaration.going_on(rank, ())
    assert survivors.judge({0: None, 1: -9, 2: None}) == "wait"
    clock.now = 11.0
    assert survivors.judge({0: None, 1: -9, 2: None}) is None
    declaration.going_on(2, (1,))
    assert survivors.judge({0: None, 1: -9, 2: None}) == "wait"
    assert survivors.judge({0: 0, 1: -9, 2: None}) == "wait"
    assert survivors.judge({0: 0, 1: -9, 2: 0}) == "succeeded"


def test_the_last_line_of_a_job_that_ended_well_tells_who_was_lost(
    survivors: Judged, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1, 2):
        declaration.going_on(rank, ())
    ends_with(folder, 1, "raised")
    assert survivors.judge({0: None, 1: 1, 2: None}) == "wait"
    declaration.going_on(0, (1,))
    declaration.going_on(2, (1,))
    assert survivors.judge({0: 0, 1: 1, 2: 0}) == "succeeded"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("the script has ended well; lost on the way: rank 1: it ended with what it raised"), last


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
    codes: dict[int, int | None], without: tuple[int, ...], expected: str | None, survivors: Judged
) -> None:
    declaration.going_on(0, without)
    assert survivors.judge(codes) == expected


def test_what_earlier_workers_have_said_does_not_count_for_new_ones(survivors: Judged, tmp_path: Path) -> None:
    declaration.going_on(0, (1,))
    Path(tmp_path, "1.json").write_text(json.dumps("torn"))
    assert declaration.read(str(tmp_path), 0) == (1,)
    assert declaration.read(str(tmp_path), 1) is None
    survivors.survivors.started()
    assert survivors.judge({0: None, 1: -9}) is None


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        ({0: (1,), 1: (), 2: (1,)}, {1}),
        ({0: (1, 2), 1: (), 2: ()}, {1, 2}),  # neither of them runs, and neither can say so
        ({0: (1,), 1: (), 2: ()}, set()),  # rank 2 does not know it yet
        ({0: (1,), 1: (0,)}, set()),
        ({0: (3,), 1: (3,)}, set()),  # of another host
        ({}, set()),
    ],
)
def test_who_does_not_run_is_ended_when_all_others_of_its_host_would_go_on_without_it(
    said: dict[int, tuple[int, ...]], ended: set[int], folder: Path
) -> None:
    for rank, given_up in said.items():
        declaration.going_on(rank, (), given_up)
    assert declaration.given_up(str(folder), said) == ended


def ends_with(folder: Path, rank: int, kind: str, same: str = "here") -> None:
    Path(folder, f"{rank}.end").write_text(json.dumps({"kind": kind, "text": "what it raised", "same": same}))


def test_a_spare_takes_the_lost_place_and_then_a_new_process_does(folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock, restarts=1)
    judged.waiting = 1
    for rank in range(3):
        declaration.going_on(rank, ())
    assert judged.judge({0: None, 1: -9, 2: None}) == "wait"
    assert judged.begun == [(1, True, {lifecycle.JOINS: "1"})]
    assert judged.judge({0: None, 1: None, 2: None}) == "wait"  # the spare has not joined
    for rank in range(3):
        declaration.going_on(rank, (1,))
    assert judged.judge({0: None, 1: -9, 2: None}) == "wait"
    declaration.going_on(0, (1, 1))
    assert judged.begun[1:] == [(1, False, {lifecycle.JOINS: "2"})]
    assert judged.judge({0: None, 1: -9, 2: None}) == "wait"  # before it has joined
    assert judged.judge({0: None, 1: -9, 2: None}) == "wait"
    assert len(judged.begun) == 2  # neither a spare nor a restart is left
    assert judged.judge({0: 0, 1: -9, 2: 0}) == "succeeded"


def test_a_new_rank_that_has_not_joined_does_not_keep_the_job(folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock, restarts=1)
    for rank in range(2):
        declaration.going_on(rank, ())
    assert judged.judge({0: None, 1: -9}) == "wait"
    assert judged.judge({0: 0, 1: None}) == "succeeded"


def test_a_new_rank_alone_is_no_job(folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock, restarts=2)
    for rank in range(2):
        declaration.going_on(rank, ())
    assert judged.judge({0: None, 1: -9}) == "wait"
    assert judged.judge({0: -9, 1: None}) is None
    assert len(judged.begun) == 1


def test_a_new_rank_may_still_find_the_others_on_other_hosts(folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock, other_hosts=True, restarts=2)
    for rank in range(2):
        declaration.going_on(rank, (), ranks=[0, 1, 2, 3])
    assert judged.judge({0: None, 1: -9}) == "wait"
    assert judged.judge({0: -9, 1: None}) == "wait"
    assert len(judged.begun) == 1  # whether the job goes on is only known when the first one has joined
    declaration.going_on(1, (), ranks=[1, 2, 3])
    assert judged.judge({0: -9, 1: None}) == "wait"
    assert [rank for rank, *_ in judged.begun] == [1, 0]


def test_a_loss_from_before_a_new_rank_joined_is_confirmed_by_who_takes_part(folder: Path, clock: Clock) -> None:
    """Rank 1 is lost twice; rank 0 has joined between, and knows of the second time only."""
    judged = Judged(folder, clock, restarts=9)
    for rank in range(2):
        declaration.going_on(rank, (), ranks=[0, 1, 2, 3])
    assert judged.judge({0: None, 1: -9}) == "wait"
    declaration.going_on(0, (1,), ranks=(0, 2, 3))
    assert judged.judge({0: None, 1: None}) == "wait"
    for rank in range(2):  # it is back
        declaration.going_on(rank, (1,) * (rank == 0), ranks=[0, 1, 2, 3])
    assert judged.judge({0: -9, 1: None}) == "wait"
    declaration.going_on(1, (0,), ranks=(1, 2, 3))
    assert judged.judge({0: None, 1: None}) == "wait"
    for rank in range(2):
        declaration.going_on(rank, (0,) * (rank == 1), ranks=[0, 1, 2, 3])
    assert judged.judge({0: None, 1: -9}) == "wait"
    declaration.going_on(0, (1,), ranks=(0, 2, 3))
    assert judged.judge({0: None, 1: None}) == "wait"
    clock.now = 11.0
    assert judged.judge({0: None, 1: None}) == "wait"


def test_who_has_come_too_late_for_its_place_is_not_started_again(
    folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = Judged(folder, clock, restarts=9)
    for rank in range(2):
        declaration.going_on(rank, ())
    assert judged.judge({0: None, 1: -9}) == "wait"
    ends_with(folder, 1, "taken")
    assert judged.judge({0: None, 1: 1}) == "wait"
    assert len(judged.begun) == 1
    assert "rank 1 is not started again: a process of another host has its place" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["mismatch", "device"])
def test_who_would_end_in_the_same_way_is_not_started_again(
    kind: str, folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = Judged(folder, clock, restarts=9)
    for rank in range(3):
        declaration.going_on(rank, ())
    ends_with(folder, 1, kind)
    assert judged.judge({0: None, 1: 1, 2: None}) == "wait"
    assert judged.begun == []
    assert "rank 1 is not started again: it ended with what it raised" in capsys.readouterr().err


def test_where_nothing_was_asked_for_nobody_hears_that_a_rank_is_not_started_again(
    folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = Judged(folder, clock)
    for rank in range(3):
        declaration.going_on(rank, ())
    ends_with(folder, 1, "mismatch")
    assert judged.judge({0: None, 1: 1, 2: None}) == "wait"
    said = capsys.readouterr().err
    assert "rank 1 has ended with exit code 1" in said
    assert "not started again" not in said


def test_who_takes_part_again_in_a_process_of_another_host_is_told_once(
    folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is of this host, rank 2 of one that is lost as a whole; rank 0 hears of them before rank 3 does."""
    judged = Judged(folder, clock)
    codes: dict[int, int | None] = {0: None, 1: None, 3: None}
    for rank in codes:
        declaration.going_on(rank, (), ranks=(0, 1, 2, 3))
    judged.judge(codes)
    codes[1] = -9
    judged.judge(codes)
    for rank in (0, 3):
        declaration.going_on(rank, (1, 2), ranks=(0, 3))
        judged.judge(codes)
    assert "again" not in capsys.readouterr().err
    for rank, said in ((0, ""), (3, "ranks 1-2 take part again, in processes of another host")):
        declaration.going_on(rank, (1, 2), ranks=(0, 1, 2, 3))
        for _ in range(2):
            judged.judge(codes)
        assert said in (told := capsys.readouterr().err)
        assert told.count("again") == bool(said)


def test_a_new_process_that_was_not_in_time_is_told_of(
    folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = Judged(folder, clock, restarts=1)
    for rank in range(2):
        declaration.going_on(rank, ())
    assert judged.judge({0: None, 1: -9}) == "wait"
    declaration.going_on(0, (1,))
    assert judged.judge({0: None, 1: None}) == "wait"
    assert judged.judge({0: 0, 1: None}) == "succeeded"
    assert "ended before the new process of rank 1 had joined it" in capsys.readouterr().err


@pytest.mark.parametrize("told", [True, False])
def test_the_same_exception_twice_is_not_tried_a_third_time(told: bool, folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock, restarts=9)
    for rank in range(3):
        declaration.going_on(rank, ())
    for rank in (1, 2):
        if told:
            ends_with(folder, rank, "exception")
        codes: dict[int, int | None] = {0: None, 1: None, 2: None, rank: 1}
        assert judged.judge(codes) == "wait"
    assert [rank for rank, *_ in judged.begun] == [1]
    judged = Judged(folder, clock, restarts=9)
    for rank in range(3):
        declaration.going_on(rank, ())
    for _ in range(3):  # killed from outside: that says nothing of the next one
        assert judged.judge({0: None, 1: -9, 2: None}) == "wait"
    assert len(judged.begun) == 3


def test_a_process_that_does_not_run_is_ended_when_all_others_have_given_it_up(folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock)
    running: dict[int, int | None] = dict.fromkeys(range(4))
    for rank in range(4):
        declaration.going_on(rank, ())
    assert judged.judge(running) is None
    for rank in (0, 1):
        declaration.going_on(rank, (), (3,))
    assert (judged.judge(running), judged.killed) == (None, [])  # rank 2 has not said so, and nobody has ended
    declaration.going_on(2, (), (3,))
    assert (judged.judge(running), judged.killed) == ("wait", [3])
    for rank in range(3):
        declaration.going_on(rank, (3,))
    assert (judged.judge({**running, 3: -9}), judged.killed) == ("wait", [3])


def test_too_many_losses_in_a_time_end_the_job(folder: Path, clock: Clock) -> None:
    judged = Judged(folder, clock, restarts=9, losses=1, period=60.0)
    for rank in range(3):
        declaration.going_on(rank, ())
    assert judged.judge({0: None, 1: -9, 2: None}) == "wait"
    declaration.going_on(1, (1,))
    declaration.going_on(0, (1,))
    clock.now = 61.0
    assert judged.judge({0: None, 1: -9, 2: None}) == "wait"  # the first one is long ago
    declaration.going_on(0, (1, 1))
    clock.now = 62.0
    assert judged.judge({0: None, 1: None, 2: -9}) is None


# ---------------------------------------------------------------------- what a new rank is given


def exchanged(state: object, monkeypatch: pytest.MonkeyPatch, piece: int) -> object:
    """`state` as it arrives, over a broadcast that keeps what was sent; a rank that stands by hears as much."""
    monkeypatch.setattr(joining, "PIECE", piece)
    sent: list[torch.Tensor] = []
    joining.send(lambda: state, lambda tensor: sent.append(tensor.clone()))

    def replayed() -> Iterator[torch.Tensor]:
        yield from sent

    for take in (joining.stand_by, joining.receive):
        pieces = replayed()

        def broadcast(tensor: torch.Tensor, pieces: Iterator[torch.Tensor] = pieces) -> None:
            got = next(pieces)
            assert tensor.shape == got.shape and tensor.dtype == got.dtype
            tensor.copy_(got)

        found = take(broadcast)
        assert next(pieces, None) is None
    return found


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
def test_the_state_arrives_to_the_last_bit(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {
        "whole": torch.randn(5, 3),
        "half": torch.randn(7).to(torch.bfloat16),
        "view": torch.randn(4, 6).t(),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0),
        "parameter": nn.Parameter(torch.randn(2)),
        "other": [1, "two", (3.0, None)],
    }
    found = exchanged(state, monkeypatch, piece)
    assert isinstance(found, dict)
    for name, value in state.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name
        assert not isinstance(value, torch.Tensor) or found[name].dtype == value.dtype


@pytest.mark.parametrize("struck", range(6))
def test_a_bit_that_flips_on_the_way_is_found_before_anything_is_used(
    struck: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the description, which is not unpickled then, in either checksum, and in any piece of the tensors."""
    monkeypatch.setattr(joining, "PIECE", 64)
    sent: list[torch.Tensor] = []
    joining.send(
        lambda: {"weight": torch.randn(40), "step": torch.tensor(3)}, lambda tensor: sent.append(tensor.clone())
    )
    assert len(sent) == 6
    if struck == 0:
        sent[0][3] ^= 1 << 40  # of the description's checksum: its lengths are checked by the collectives themselves
    else:
        sent[struck].view(torch.uint8)[7] ^= 16
    unpickled = list[object]()
    monkeypatch.setattr(
        joining._Unpickler, "load", lambda self: unpickled.append(pickle.Unpickler.load(self)) or unpickled[-1]
    )
    pieces = iter(sent)
    with pytest.raises(joining.Damaged, match="did not arrive as it was sent"):
        joining.receive(lambda tensor: tensor.copy_(next(pieces)))
    assert next(pieces, None) is None  # it has taken part in all, and may ask for all again
    assert bool(unpickled) == (struck > 1)


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_state_that_does_not_arrive_is_sent_again_and_at_last_the_rank_does_not_join(times: int) -> None:
    """Rank 0 gives it to rank 2, rank 1 takes part: all three have one end."""
    ends: dict[int, str] = {}
    slot: list[torch.Tensor] = []
    left, meet = [times], threading.Barrier(3)

    class Rank(Continuation):
        def __init__(self, rank: int) -> None:
            self.rank, self.lost, self._waiting = rank, [], joining.Waiting()
            self.group = SimpleNamespace(barrier=lambda: SimpleNamespace(wait=lambda: None))

        def _state(self) -> dict[str, Any]:
            return {"steps": {}, "lost": [7], "places": {}, "weight": torch.ones(30)}

        def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
            if self.rank == source:
                slot[:] = [tensor]
            meet.wait()
            if self.rank != source:
                tensor.copy_(slot[0])
                if self.rank == 2 and left[0] and tensor.numel() == 120:
                    left[0] -= 1
                    tensor[5] ^= 1
            meet.wait()

        def run(self) -> None:
            try:
                self._hand_over(2, 0)
                ends[self.rank] = f"has {self.lost}"
            except joining.NotGiven as error:
                ends[self.rank] = str(error)

    threads = [threading.Thread(target=Rank(rank).run) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if times < 3:
        assert ends == {0: "has []", 1: "has []", 2: "has [7]"}
    else:
        assert (
            set(ends.values()) == {"the state of rank 0 did not arrive at rank 2 as it was sent, 3 times"}
            and len(ends) == 3
        )


def test_a_state_without_tensors_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchanged({"position": 3}, monkeypatch, 64) == {"position": 3}


def test_a_new_rank_goes_on_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, buffers, moments, rate, position and count are those of a survivor, and the next step is equal."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, ng.ResilientStep]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loader = ng.ElasticLoader(Indices(10), 2, shuffle=False)

        @ng.resilient_step(model, optimizer, loader=loader, keep=[scheduler])
        def step(batch: torch.Tensor) -> list[int]:
            optimizer.zero_grad()
            inputs = torch.arange(12.0).reshape(4, 3).to(torch.bfloat16)
            model(inputs).square().sum().backward()
            optimizer.step()
            scheduler.step()
            return batch.tolist()  # type: ignore[no-any-return]

        return model, optimizer, step

    old, optimizer, step = made()
    for _ in range(3):
        step()
    for values in optimizer.param_groups:
        for parameter in values["params"]:  # as an optimizer of half precision may keep them
            optimizer.state[parameter]["master"] = torch.randn(parameter.shape, dtype=torch.float32)
    new, other, joined = made()
    joined.take_state(exchanged(step.state_for_newcomer(), monkeypatch, 64))
    assert joined.completed == 3
    for own, given in zip(other.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(own[name], given[name]) and own[name].dtype == given[name].dtype for name in given)
    assert step() == joined() == [6, 7]
    for name, value in old.state_dict().items():
        assert torch.equal(value, new.state_dict()[name]), name


def test_a_new_rank_with_another_model_is_refused() -> None:
    first, second = (ng.resilient_step(nn.Linear(2, size))(lambda: None) for size in (3, 4))
    with pytest.raises(ng.GuardError, match="not that of the others"):
        second.take_state(first.state_for_newcomer())


def test_the_random_numbers_of_a_new_rank_follow_from_its_seed_and_the_step() -> None:
    drawn = []
    for seed, completed in ((1, 5), (1, 5), (1, 6), (2, 5)):
        torch.manual_seed(seed)
        torch.rand(completed)
        joining.seed_newcomer(completed)
        drawn.append((torch.rand(1).item(), random.random()))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_votes_come_seldom_where_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a second, or less often where a vote takes long; all ranks know the next one."""
    first, other = joining.Vote(), joining.Vote()
    now, call = 100.0, 7
    monkeypatch.setattr(joining.time, "monotonic", lambda: now)
    for vote in (first, other):
        vote.soon(call)
    for _ in range(3):
        ballot = first.ballot(call, None)
        assert first.counted(call, ballot, 0.001) is other.counted(call, ballot, 0.3) is None
        assert first.due == other.due
        gap, call = first.due - call, first.due
        now += 0.01 * gap
    assert gap == 50
    note = joining.Note(3, "session", "step", json.dumps({"pid": 1}), 7)
    assert other.counted(call, first.ballot(call, note), 0.001) == joining.Newcomer(3, "session", 7)


def waits(store: AgreementStore, session: str, place: int = 0) -> joining.Asking:
    """A process that waits for rank 3's place, and has shown once that it does."""
    identity = Identity(3, "elsewhere", "another-host", 1, 1, None).to_json()
    asking = joining.Asking(joining.Note(3, session, "step", identity, place))
    asking.look(0.0, store)
    return asking


def test_a_note_that_is_older_than_the_first_rank_counts_when_its_process_shows_that_it_is_there(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new first rank reads all that there are, also of processes that are gone."""
    monkeypatch.setattr(joining.time, "monotonic", lambda: clock.now)
    store, waiting = AgreementStore(HashStore(), "ncclguard"), joining.Waiting()
    waiting.miss([3])
    waits(store, "old")
    there = waits(store, "there")
    waiting.look(1.0, store)
    assert (waiting.first("step"), waiting.is_awaited(3, 1.0)) == (None, False)
    there.look(1.5, store)
    clock.now = 2.0
    waiting.look(2.0, store)
    note = waiting.first("step")
    assert note is not None
    assert (note.session, waiting.is_awaited(3, 2.0)) == ("there", True)
    waits(store, "later")
    waiting.look(3.0, store)
    note = waiting.first("step")
    assert note is not None
    assert note.session == "later"


def test_whoever_is_first_refuses_a_process_whose_place_another_host_has(clock: Clock) -> None:
    """Each rank knows who has joined, also one that has joined itself since."""
    store = AgreementStore(HashStore(), "ncclguard")
    before, first = joining.Waiting(), joining.Waiting()
    before.used(joining.Newcomer(3, "session", 2), True)
    first.places = before.places
    first.miss([])
    late, own = waits(store, "late", 5), waits(store, "of the host that has it", 2)
    first.look(1.0, store)
    for asking in (late, own):
        asking.look(1.0, store)
    assert not own.invited.is_set()
    with pytest.raises(joining.PlaceTaken):
        late.invitation(0.0, lambda: None, lambda: "")
    assert first.joined() == [(3, 2)]  # the one before may not have come to tell it
    assert first.joined() == []


def test_a_state_that_does_not_pickle_is_refused_on_all_members() -> None:
    sent: list[torch.Tensor] = []
    with pytest.raises(joining.NotGiven, match="cannot be given to a new rank"):
        joining.send(lambda: {"opened": lambda: None}, lambda tensor: sent.append(tensor.clone()))
    for take in (joining.stand_by, joining.receive):
        with pytest.raises(joining.NotGiven):
            take(lambda tensor: tensor.copy_(sent[0]))


def test_the_example_writes_each_sample_once_however_often_the_writing_rank_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is lost and comes back; each time rank 1 writes meanwhile, and looks again at what the other has written."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    record = importlib.import_module("train_surviving").Record
    path = str(tmp_path / "samples")
    first, second = record(path), record(path)
    for step in range(12):
        if step in (3, 8):
            first = None  # killed before it wrote the step before
        if step in (5, 10):
            first = record(path)  # a new process
        samples, position = [2 * step, 2 * step + 1], 2 * step + 2
        second.add(samples, position, first is None)
        if first is not None and step + 1 not in (3, 8):
            first.add(samples, position, True)
    assert [int(line) for line in Path(path).read_text().split()] == list(range(24))


# ---------------------------------------------------------------------- a host that stands by


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--standalone"], "leave --standalone"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29500"], "--rdzv-backend and --rdzv-endpoint out"),
        (["--rdzv-endpoint", "[::1]"], "--rdzv-endpoint out"),
        (["--master-port", "99999"], "99999 is no port"),
        (["--master-port", "-5"], "-5 is no port"),
        (["--nproc-per-node", "0"], "give 1 or more"),
        (["--nproc-per-node", "foo"], "foo"),
        (["--run-path"], "--run-path"),
        (["--spares", "2"], "--spares is about a host's own ranks"),
    ],
)
def test_a_host_cannot_stand_by_without_an_address_or_a_process(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        launcher.main(["--stand-by", *options, __file__])
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--nproc-per-node", "foo"], ["--nproc-per-node", "0"], ["--nnodes", "few"]])
def test_a_launcher_refuses_a_number_that_cannot_be(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        launcher.main([*options, __file__])
    assert raised.value.code == 2
    assert options[1] in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--stand-by"]])
def test_a_script_that_is_not_there_is_said_once(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main([*options, "no_such.py"]) == 2
    said = capsys.readouterr().err
    assert "there is no file no_such.py here" in said and "usage:" not in said, said


def test_who_stands_by_where_nobody_listens_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(stand_by, "BEGINS_WITHIN", 0.2)
    monkeypatch.setattr(stand_by.signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    port = free_port()
    assert launcher.main(["--stand-by", "--master-addr", "127.0.0.1", "--master-port", str(port), __file__]) == 1
    assert f"nobody listens at 127.0.0.1:{port}" in capsys.readouterr().err


def test_another_host_meets_at_torchruns_port_where_none_is_given() -> None:
    arguments = launcher.build_parser().parse_args(["--nnodes", "2", "--node-rank", "1", "train.py"])
    assert elastic.store_address(arguments) == ("127.0.0.1", 29500)
    arguments.rdzv_endpoint = "localhost"
    assert not elastic.was_here(arguments)


def test_a_data_set_without_a_length_is_refused() -> None:
    with pytest.raises(TypeError, match="a data set with a length and samples by number, not list_iterator"):
        ng.ElasticLoader(iter([1]), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.Linear(4, 3), r"parameter weight is \(3, 4\) here and \(2, 4\) on them"),
        (nn.Linear(4, 2, bias=False), r"parameter bias is not there here and \(2,\) on them"),
    ],
)
def test_where_a_new_ranks_model_is_another_the_first_parameter_that_differs_is_named(
    other: nn.Module, said: str
) -> None:
    with pytest.raises(ng.GuardError, match=said):
        joining.take_model_state(other, joining.model_state(nn.Linear(4, 2)))
