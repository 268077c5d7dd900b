"""FSDP2 with neighbour copies on CUDA tensors over NCCL: ranks are killed, and training goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ncclguard as ng
from ncclguard import faults
from ncclguard.training import shards
from tests.distributed.test_shards import BATCH, SIZE, STEPS, Kill, Rows, Strike, digest, learn, make_model, without
from tests.gpu.parts import MOVES_SHARDS, NEEDS_GPU, SHARED_GPU, share_gpu

pytestmark = NEEDS_GPU

ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}


def train(backend: str, kills: list[Kill], port: int) -> None:
    """Without dropout, whose numbers are the device's own; reports what each completed step was."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    shards.PIECE = 512  # so that copies have several
    model: Any = make_model().eval().cuda()
    mesh = init_device_mesh("cuda", (SIZE,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = ng.ElasticLoader(Rows(), BATCH, seed=7)
    strike = Strike(kills)
    strike.everywhere(model, optimizer)

    @ng.resilient_step(model, optimizer, loader=loader, copies=1)
    def one(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, list[int]]:
        return learn(model, optimizer, batch[0].cuda(), strike), batch[1].tolist()

    @ng.resilient_step
    def evaluate() -> float:
        with torch.no_grad():
            loss = model(torch.ones(2, Rows()[0][0].numel(), device="cuda")).mean()
        torch.cuda.synchronize()  # all are in the evaluation, so none makes the step before it again
        strike.at("evaluation")
        dist.all_reduce(loss)
        return float(loss)

    for strike.step in range(STEPS):
        loss, samples = one()
        strike.at("complete")
        faults.report(**{f"step {strike.step}": [loss, samples, list(one.made_by)]})
        evaluate()
    faults.report(parameters=digest(model), seconds=[seconds for _, seconds in one.losses + evaluate.losses])
    dist.destroy_process_group()
    os._exit(0)


def undisturbed(ranks: list[list[int]]) -> list[float]:
    """The losses of these ranks with plain torch on the CPU, in one process."""
    model = make_model().eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader, position, losses = ng.ElasticLoader(Rows(), BATCH, seed=7), 0, []
    for members in ranks:
        optimizer.zero_grad()
        rows = loader.indices(position, BATCH * len(members))
        loss = model(torch.stack([Rows()[row][0] for row in rows])).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        position += BATCH * len(members)
        losses.append(loss.item())
    return losses


@MOVES_SHARDS
@pytest.mark.parametrize("backend", ["ncclguard", "ncclguard-nccl"])
@pytest.mark.parametrize(
    "kills",
    [
        [(0, 1, "backward"), (2, 3, "copies"), (3, 4, "evaluation")],
        [(3, 1, "reduction"), (1, 3, "optimizer"), (0, 5, "forward")],
    ],
)
def test_sharded_training_goes_on_when_one_rank_after_the_other_is_killed(backend: str, kills: list[Kill]) -> None:
    """Down to a single rank. Each step is made by those that are left, with the losses of plain torch."""
    expected = without(kills)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(train, SIZE, args=[backend, kills, store.port], env=ENV, timeout=120)
    assert sorted(job.values("parameters")) == expected[-1], str(job)
    losses = undisturbed(expected)
    loader, position = ng.ElasticLoader(Rows(), BATCH, seed=7), 0
    for step, members in enumerate(expected):
        told = job.values(f"step {step}")
        assert told, step
        for rank, (loss, samples, took_part) in told.items():
            assert loss == pytest.approx(losses[step], rel=1e-3), (step, rank)
            assert samples == loader.indices(position + members.index(rank) * BATCH, BATCH)
            assert took_part == members
        position += BATCH * len(members)
