"""The first NaN of a job is told on all ranks: whose it was, in which pass, before a reduction had spread it to all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from benchmarks.numerics import KINDS, RANKS, campaign
from ncclguard import faults

NAN = float("nan")


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_whose_number_was_the_first_to_be_none_is_named_on_all_ranks(kind: str) -> None:
    """Divided by zero, poisoned behind a layer, in a batch, in a weight, or in what `safe_*` is given."""
    job = faults.run_ranks(campaign, RANKS, args=[kind, 100, 4], timeout=120).check()
    assert [rank.reports["wrong"] for rank in job] == [[]] * RANKS
    assert job[0].output.count("the first NaN or infinity of all ranks") >= 4


class SyncNorm(nn.Module):
    """Hands all ranks the mean of all ranks, in the forward pass."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mean = rows.detach().mean(0)
        dist.all_reduce(mean)
        return rows - mean / RANKS


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))


def sharded(model: nn.Module, *, whole: bool = False, **options: Any) -> nn.Module:
    for layer in () if whole else (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def learn(
    model: nn.Module, struck: list[int], turn: int, turns: int, times: float = NAN, before: Callable[[int], Any] = id
) -> list[Any]:
    """Train; the loss of some ranks is multiplied in one of the turns. Returns what is known in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    known = threading.Event()
    with ng.watch_numerics(model, on_found=lambda first: known.set()) as numerics:
        for number in range(1, turns + 1):
            before(number)
            loss = model(torch.randn(5, 6)).float().square().mean()
            (loss * times if dist.get_rank() in struck and number == turn else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert known.wait(60)
        dist.barrier()  # behind it all have spoken, so that each has heard the others
    return [[one.rank, one.number, *one.tensor] for one in numerics.first]


def models() -> None:
    """All models one after the other in one job."""
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}

    model: nn.Module = DistributedDataParallel(plain())

    def evaluates(turn: int) -> None:
        with torch.no_grad():
            for _ in range(3 if rank == 2 and turn == 2 else 0):
                model(torch.randn(5, 6))

    said["evaluates more"] = learn(model, [2], 5, 8, before=evaluates)
    said["both at once"] = learn(DistributedDataParallel(plain()), [0, 2], 3, 5)

    whole = sharded(plain(), whole=True)

    def flips(turn: int) -> None:
        if turn == 4 and rank == 1:
            with torch.no_grad():
                whole[0].weight.to_local().view(-1)[0] = NAN  # type: ignore[index,union-attr,operator]

    said["a shard of the root"] = learn(whole, [], 0, 6, before=flips)
    compiled = plain()
    for layer in (compiled[0], compiled[2]):
        layer.compile(backend="eager")
    said["compiled blocks"] = learn(sharded(compiled), [2], 4, 6)
    half = sharded(plain(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    said["half"] = learn(half, [0], 2, 4, times=1e9)
    normed = DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), SyncNorm(), nn.Linear(6, 2)))
    said["spread forward"] = learn(
        normed, [], 0, 5, before=lambda turn: _spoil(normed.module[0], rank == 2 and turn == 3)
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    said["tensor parallel"] = learn(
        parallelize_module(plain(), init_device_mesh("cpu", (RANKS,)), plan), [0, 1, 2], 2, 4
    )
    faults.report(said=said)
    dist.destroy_process_group()


def _spoil(layer: nn.Module, here: bool) -> None:
    with torch.no_grad():
        layer.bias.add_(NAN if here else 0.0)  # type: ignore[operator,union-attr]


def test_models_of_all_kinds() -> None:
    job = faults.run_ranks(models, RANKS, timeout=170).check()
    last = ["gradient", "2.bias"]
    assert [rank.reports["said"] for rank in job] == [
        {
            "evaluates more": [[2, 5, "gradient", "module.2.bias"]],
            "both at once": [[0, 3, "gradient", "module.2.bias"], [2, 3, "gradient", "module.2.bias"]],
            "a shard of the root": [[1, 4, "parameter", "0.weight"]],
            "compiled blocks": [[2, 4, *last]],
            "half": [[0, 2, *last]],
            "spread forward": [[2, 3, "gradient", "module.2.bias"]],
            "tensor parallel": [[rank, 2, *last] for rank in range(RANKS)],
        }
    ] * RANKS


def ends(how: str) -> None:
    """Train until the weights are none, and end at once."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ng.watch_numerics(model)
    for turn in range(1, 30):
        loss = model(torch.randn(5, 6)).square().mean()
        (loss * NAN if dist.get_rank() == 2 and turn == 20 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if turn > 20 and not torch.isfinite(next(model.parameters())).all():
            break
    if how == "raises":
        raise ValueError("the weights are none")
    if how == "destroys":
        dist.destroy_process_group()
    sys.exit(1)


@pytest.mark.parametrize("how", ["exits", "destroys", "raises"])
def test_a_job_that_ends_at_once_has_the_same_verdict(how: str) -> None:
    job = faults.run_ranks(ends, RANKS, args=[how], timeout=100)
    said = [line for rank in job for line in rank.output.splitlines() if "the first NaN" in line]
    assert len(said) >= 2
    assert all(
        "rank 2: the gradient of module.bias had a NaN" in line and "in backward pass 20" in line for line in said
    )
