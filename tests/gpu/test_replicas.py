"""Replicas on CUDA tensors over NCCL: a flipped bit is found, named and repaired, also within `resilient_step`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.checksum import checksum
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, join

pytestmark = NEEDS_GPU

ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_a_checksum_is_that_of_the_cpu(dtype: torch.dtype) -> None:
    tensor = torch.randn(700, 90).to(dtype)
    for each in (tensor, tensor.t(), tensor[3], tensor[:0]):
        assert checksum(each.cuda()).tolist() == checksum(each).tolist()


def repairs(backend: str) -> None:
    rank = join(backend)
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 1)).cuda())
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(100 + rank)
    seen: list[Any] = []

    @ng.resilient_step(
        model, optimizer, check_every=2, on_difference="repair", on_lost="fail" if backend == "nccl" else "continue"
    )
    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 30, device="cuda")).sum().backward()
        optimizer.step()

    last = None
    for number in range(9):
        if number == 4 and rank == 1:
            model.module[2].weight.detach().view(torch.int32)[0, 7] ^= 1 << 20
        step()
        if step.replicas is not last:
            last = step.replicas
            seen.append([bool(last), last.ranks, last.repaired, last.first and [last.first.name, last.first.index]])
    again = ng.check_replicas(model, optimizer)
    faults.report(seen=seen, again=[bool(again), sorted(again.left_out)])
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "ncclguard", "ncclguard-nccl"])
def test_a_flipped_bit_is_named_and_repaired(backend: str) -> None:
    job = faults.run_ranks(repairs, 3, args=[backend], env=ENV, timeout=120).check()
    for rank in job:
        repaired = [one for one in rank.reports["seen"] if one[2]]
        assert len(repaired) == 1 and repaired[0][:2] == [True, [1]] and repaired[0][3] == ["2.weight", [0, 7]]
        assert all(one[0] for one in rank.reports["seen"]) and len(rank.reports["seen"]) == 4
        assert rank.reports["again"] == [True, ["1.running_mean", "1.running_var"]]
