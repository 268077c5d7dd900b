"""Who keeps whose shard, where it lies in a row of bytes, and which rows go from whom to whom."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import ncclguard as ng
from ncclguard.training import shards


def test_copies_lie_on_another_host_wherever_there_is_one() -> None:
    hosts = {rank: rank // 4 for rank in range(12)}
    for copies in (1, 2):
        kept = shards.keepers(range(12), hosts, copies, 12)
        for rank, by in kept.items():
            assert len({hosts[rank], *(hosts[each] for each in by)}) == copies + 1
    kept = shards.keepers(range(12), hosts, 1, 12)
    assert sorted(by for kept_by in kept.values() for by in kept_by) == list(range(12))


def test_copies_lie_with_none_that_has_the_same_shard_itself() -> None:
    hosts = {rank: rank // 4 for rank in range(12)}
    for rank, by in shards.keepers(range(12), hosts, 2, 4).items():
        assert len(by) == 2
        assert all((rank - each) % 4 for each in by)


def test_a_rank_has_no_more_of_the_state_than_it_had_at_first_and_all_have_some() -> None:
    for least in (2, 8):
        for ranks in range(1, 100):
            parts = shards.parts_of(ranks, least)
            assert ranks % parts == 0
            assert parts >= min(least, ranks)


def test_more_copies_than_ranks_are_as_many_as_there_are_others() -> None:
    assert shards.keepers((0, 5), {0: 1, 5: 1}, 3, 2) == {0: (5,), 5: (0,)}
    assert shards.keepers((4,), {4: 1}, 1, 1) == {4: ()}


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_cut_as_torch_cuts_them_and_each_is_moved_once(seed: int) -> None:
    """From any number of ranks to any other, also more ranks than rows, with dtypes of several sizes."""
    rng = random.Random(seed)
    before, after = rng.randrange(1, 9), rng.randrange(1, 9)
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.float64)
    tensors = [
        shards.Sharded(number, "", (rng.randrange(1, 12), *rng.choice([(), (3,), (2, 5)])), rng.choice(dtypes))
        for number in range(6)
    ]
    old, new = shards.Layout(tensors, before), shards.Layout(tensors, after)
    for number, tensor in enumerate(tensors):
        whole = torch.randint(0, 2, tensor.shape).to(tensor.dtype)
        for index, part in enumerate(torch.chunk(whole, before)):
            row = torch.zeros(old.nbytes, dtype=torch.uint8)
            old.part(row, number, index).copy_(part)
            assert torch.equal(old.part(row, number, index), part)
        moved = torch.zeros(tensor.shape[0])
        for index in range(before):
            for other in range(after):
                first, last = shards._common(old, number, index, new, other)
                begin, end = shards._common(new, number, other, old, index)
                assert last - first == end - begin
                moved[old.rows(number, index)[0] + first : old.rows(number, index)[0] + last] += 1
        assert torch.equal(moved, torch.ones(tensor.shape[0]))


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Known by its name, because the real one wants a process group to be made."""


def test_what_cannot_go_on_without_a_rank_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), lr=0.1)
    with pytest.raises(ng.GuardConfigError, match="ZeroRedundancyOptimizer has each parameter's state on one rank"):
        ng.resilient_step(model, optimizer)(lambda: None)
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    with pytest.raises(ng.GuardConfigError, match="DeepSpeed's DeepSpeedEngine keeps the number of ranks"):
        ng.resilient_step(engine)(lambda: None)
    ng.resilient_step(engine, on_lost="fail")(lambda: None)()
    for options in ({"copies": -1}, {"copies": 1, "accumulates": True}, {"load": print, "accumulates": True}):
        with pytest.raises(ng.GuardConfigError, match="copies is -1|accumulated gradients cannot be had"):
            ng.resilient_step(model, **options)(lambda: None)
