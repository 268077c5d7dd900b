"""A training goes on when ranks are killed in it: no step, no sample and no average is lost with them."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.training.continuation import Continuation

SIZE, STEPS, BATCH, SAMPLES, WIDTH = 4, 8, 3, 50, 96
#: Rank, step, moment.
Kill = tuple[int, int, str]
BEFORE = ("forward", "backward", "reduction")  # the optimizer's step has not begun: the step is done again
MOMENTS = (*BEFORE, "optimizer", "behind")
BEHIND = ("optimizer", "behind", "evaluation")


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Each sample says which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Strike:
    """Kills its rank at one moment of one step.

    Behind a step's last reduction it waits until all that are alive have it as well: else they would do the step again.
    """

    def __init__(self, kills: list[Kill], port: int | None = None) -> None:
        self.kills, self.rank, self.step = [tuple(kill) for kill in kills], dist.get_rank(), 0
        self._store = None if port is None else dist.TCPStore("127.0.0.1", port, is_master=False)

    def at(self, moment: str) -> None:
        if self._store is not None and moment == "optimizer":
            self._store.set(f"has the reduction of step {self.step}: rank {self.rank}", "")
        if (self.rank, self.step, moment) not in self.kills:
            return
        if self._store is not None and moment in BEHIND:
            gone = {self.rank, *(rank for rank, step, _ in self.kills if step < self.step)}
            self._store.wait(
                [f"has the reduction of step {self.step}: rank {one}" for one in range(SIZE) if one not in gone]
            )
        die()

    def in_reduction(self) -> None:
        """With the second of several buckets to reduce, while the first is on its way; DDP begins with a single one."""
        kind: Any = type(dist.group.WORLD)
        issue, count = kind.allreduce, 0

        def allreduce(*args: Any, **named: Any) -> Any:
            nonlocal count
            count = count + 1 if self.inside else 0
            if count == min(2, 1 + self.step):
                self.at("reduction")
            return issue(*args, **named)

        self.inside = False
        kind.allreduce = allreduce


def run(kills: list[Kill], floor: int = 1) -> faults.JobResult:
    """Four ranks; the store is hosted here, as a launcher's agent hosts it, so that rank 0 may be killed too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return faults.run_ranks(train, SIZE, args=[kills, floor, store.port], timeout=90)


def train(kills: list[Kill], floor: int, port: int) -> None:
    """DDP with dropout, running means and several buckets; reports what each completed step was."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # type: ignore[attr-defined] # the first bucket's own limit
    wrapped = DistributedDataParallel(make_model(), bucket_cap_mb=0.03)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = ng.ElasticLoader(Rows(), BATCH, seed=7)
    strike = Strike(kills, port)
    strike.in_reduction()
    next(wrapped.module[3].parameters()).register_hook(lambda _: strike.at("backward"))
    optimizer.register_step_pre_hook(lambda *_: strike.at("optimizer"))
    torch.manual_seed(100 + rank)
    changes, counts = [], list[int]()
    with pytest.raises(ng.GuardConfigError, match="min_ranks is 5, and there are 4 ranks"):
        ng.resilient_step(wrapped, optimizer, min_ranks=SIZE + 1)(lambda: pytest.fail("the step was run"))()

    @ng.resilient_step(
        wrapped, optimizer, loader=loader, keep=[scheduler], min_ranks=floor,
        on_change=lambda before, now: changes.append([before, now]),
    )  # fmt: skip
    def one(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, list[int]]:
        optimizer.zero_grad()
        loss = wrapped(batch[0]).square().mean()
        strike.at("forward")
        strike.inside = True
        loss.backward()
        strike.inside = False
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        optimizer.step()
        scheduler.step()
        strike.at("behind")
        count = torch.ones(1)  # goes on without a rank that is lost from here on, and the step stands
        dist.all_reduce(count)
        counts.append(int(count))
        return mean.item(), batch[1].tolist()

    @ng.resilient_step
    def evaluate() -> float:
        strike.at("evaluation")
        count = torch.ones(1)
        dist.all_reduce(count)
        return float(count)

    # Met before the first step, so that a rank can be killed in this meeting.
    meet = Continuation._meet

    def meet_or_die(self: Any, what: str) -> tuple[int, ...]:
        if what.startswith("again"):
            strike.at("agreement")
        return meet(self, what)

    Continuation._meet = meet_or_die  # type: ignore[method-assign]
    ranks = []
    for strike.step in range(STEPS):
        loss, samples = one()
        ranks.append(list(one.made_by))
        # Told step by step: a rank that is killed later has told of the steps before.
        faults.report(**{f"step {strike.step}": [loss, samples, ranks[-1]]})
    count = evaluate()
    faults.report(
        end=[ranks, count, changes, [seconds for _, seconds in one.losses + evaluate.losses]],
        counts=counts,
        parameters=float(sum(p.double().abs().sum() for p in wrapped.parameters())),
        rate=scheduler.get_last_lr(),
    )
    dist.destroy_process_group()


def undisturbed(ranks: list[list[int]]) -> list[float]:
    """The losses of these ranks, step by step, with plain torch in one process."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader, position, losses = ng.ElasticLoader(Rows(), BATCH, seed=7), 0, []
    generators = {}
    for rank in range(SIZE):
        torch.manual_seed(100 + rank)
        generators[rank] = torch.get_rng_state()
    for members in ranks:
        optimizer.zero_grad()
        total, before, first = 0.0, [b.clone() for b in model.buffers()], []
        for place, rank in enumerate(members):
            for buffer, kept in zip(model.buffers(), before, strict=True):
                buffer.copy_(kept)  # DDP hands out the first rank's with each forward
            rows = loader.indices(position + place * BATCH, BATCH)
            torch.set_rng_state(generators[rank])
            loss = model(torch.stack([Rows()[row][0] for row in rows])).square().mean()
            generators[rank] = torch.get_rng_state()
            (loss / len(members)).backward()
            total += loss.item() / len(members)
            first = first or [b.clone() for b in model.buffers()]
        for buffer, kept in zip(model.buffers(), first, strict=True):
            buffer.copy_(kept)
        position += BATCH * len(members)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses


def check(kills: list[Kill], expected: list[list[int]]) -> None:
    """All steps are done by the ranks that are left, on the samples that come next, with plain torch's losses."""
    job = run(kills)
    ends = job.values("end")
    survivors = expected[-1]
    assert sorted(ends) == survivors, job
    assert all(end[0] == expected for end in ends.values()), ends
    assert all(end[1] == len(survivors) for end in ends.values()), ends
    changed = [list(map(len, pair)) for pair in zip([[*range(SIZE)], *expected], expected, strict=False)]
    assert all(end[2] == [pair for pair in changed if pair[0] != pair[1]] for end in ends.values()), (ends, changed)
    assert all(seconds < 20 for end in ends.values() for seconds in end[3]), ends
    assert len(set(job.values("parameters").values())) == 1  # to the last bit
    known = [len(members) for members in [*expected[1:], survivors]]
    for counts in job.values("counts").values():
        assert all(count in {len(made), now} for count, made, now in zip(counts, expected, known, strict=True)), counts
    told = [job.values(f"step {step}") for step in range(STEPS)]
    reference = undisturbed(expected)
    loader, position = ng.ElasticLoader(Rows(), BATCH, seed=7), 0
    for step, members in enumerate(expected):
        for place, rank in enumerate(members):
            if rank in told[step]:  # else it was killed in the optimizer's step, behind the reduction
                loss, samples, took_part = told[step][rank]
                assert loss == pytest.approx(reference[step], rel=1e-4), (step, rank)
                assert samples == loader.indices(position + place * BATCH, BATCH)
                assert took_part == members
        position += BATCH * len(members)


def without(lost: dict[int, int]) -> list[list[int]]:
    """Who takes part in each step; `lost`: the first step without a rank."""
    return [[rank for rank in range(SIZE) if step < lost.get(rank, STEPS)] for step in range(STEPS)]


def test_nobody_is_killed() -> None:
    """The reference itself: plain torch's losses, and no step is done again."""
    check([], without({}))


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_is_killed_at_two_moments(rank: int) -> None:
    """Each rank, 0 too; then another one. Each is a step later, at any moment of it."""
    rng = random.Random(rank)
    first, second = rng.randrange(3), rng.randrange(4, 6)
    moments = [MOMENTS[rank], rng.choice(MOMENTS)]  # each of the first four once
    other = (rank + 1 + rng.randrange(SIZE - 1)) % SIZE
    kills = [(rank, first, moments[0]), (other, second, moments[1])]
    check(kills, without({who: step + (moment not in BEFORE) for who, step, moment in kills}))


def test_a_rank_is_killed_behind_the_optimizers_step() -> None:
    """What follows in the step goes on without it, the step stands, and the next one is made by the others."""
    check([(0, 2, "behind"), (3, 5, "behind")], without({0: 3, 3: 6}))


def test_two_ranks_are_killed_at_once() -> None:
    check([(0, 3, "backward"), (2, 3, "backward")], without({0: 3, 2: 3}))


def test_a_rank_is_killed_while_the_survivors_agree_on_another() -> None:
    check([(3, 2, "forward"), (0, 2, "agreement")], without({3: 2, 0: 2}))


def test_a_rank_is_killed_in_the_evaluation() -> None:
    job = run([(1, STEPS - 1, "evaluation")])
    ends = job.values("end")
    assert sorted(ends) == [0, 2, 3], job
    assert all(end[0] == without({}) and end[1] == 3 for end in ends.values()), ends


def test_with_fewer_than_min_ranks_the_job_ends_as_without() -> None:
    job = run([(1, 2, "backward")], SIZE)
    assert job.values("end") == {}
    assert sorted(job.values("step 1")) == [*range(SIZE)]
    assert job.values("step 2") == {}
    assert all("PeerLost" in job[rank].output for rank in (0, 2, 3)), job
