"""`resilient_step` with DDP and a `GradScaler` on CUDA tensors over NCCL: ranks are killed, and training goes on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults, torch_compat
from ncclguard.evaluation import state
from tests.distributed.test_training import BATCH, SIZE, Kill, Rows, Strike, make_model, without
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, share_gpu

pytestmark = NEEDS_GPU

STEPS = 6
ENV = {**SHARED_GPU, "NCCLGUARD_REPORT_DIR": "none"}


def generator_of() -> torch.Generator:
    """What dropout draws from: an emulated GPU computes with the CPU's kernels, and so with the CPU's numbers."""
    return torch.default_generator if torch_compat.emulated_device() else torch.cuda.default_generators[0]


def scaler_of() -> torch.amp.GradScaler:
    """Its scale grows with every second step, so that a step which counts twice shows."""
    return torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)


def train(backend: str, kills: list[Kill], port: int) -> None:
    """A scaler, dropout, running means and several buckets on the GPU; reports what each completed step was."""
    rank = int(os.environ["RANK"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # type: ignore[attr-defined] # the first bucket's own limit
    wrapped = DistributedDataParallel(make_model().cuda(), device_ids=[0], bucket_cap_mb=0.03)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    scaler = scaler_of()
    loader = ng.ElasticLoader(Rows(), BATCH, seed=7)
    strike = Strike(kills, port)
    strike.in_reduction()
    next(wrapped.module[3].parameters()).register_hook(lambda _: strike.at("backward"))
    torch.manual_seed(100 + rank)

    @ng.resilient_step(wrapped, optimizer, loader=loader, keep=[scheduler, scaler])
    def one(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, list[int]]:
        optimizer.zero_grad()
        loss = wrapped(batch[0].cuda()).square().mean()
        strike.at("forward")
        strike.inside = True
        scaler.scale(loss).backward()
        strike.inside = False
        scaler.unscale_(optimizer)
        strike.at("unscaled")
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        return mean.item(), batch[1].tolist()

    optimizer.register_step_pre_hook(lambda *_: strike.at("optimizer"))  # behind the commit, which is such a hook too

    @ng.resilient_step
    def evaluate() -> float:
        strike.at("evaluation")
        count = torch.ones(1, device="cuda")
        dist.all_reduce(count)
        return float(count)

    for strike.step in range(STEPS):
        loss, samples = one()
        faults.report(**{f"step {strike.step}": [loss, samples, list(one.made_by), scaler.get_scale()]})
    faults.report(
        count=evaluate(),
        seconds=[seconds for _, seconds in one.losses + evaluate.losses],
        parameters=float(sum(p.detach().double().abs().sum() for p in wrapped.parameters())),
    )
    dist.destroy_process_group()
    os._exit(0)


def undisturbed(ranks: list[list[int]]) -> list[list[Any]]:
    """The loss and the scale of each step of these ranks, with plain torch on one GPU in one process."""
    model = make_model().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    scaler = scaler_of()
    loader, position, found, generators = ng.ElasticLoader(Rows(), BATCH, seed=7), 0, [], {}
    for rank in range(SIZE):
        generators[rank] = generator_of().manual_seed(100 + rank).get_state()
    for members in ranks:
        optimizer.zero_grad()
        total, before, first = 0.0, [b.clone() for b in model.buffers()], []
        for place, rank in enumerate(members):
            for buffer, kept in zip(model.buffers(), before, strict=True):
                buffer.copy_(kept)  # DDP hands out the first rank's with each forward
            rows = loader.indices(position + place * BATCH, BATCH)
            generator_of().set_state(generators[rank])
            loss = model(torch.stack([Rows()[row][0] for row in rows]).cuda()).square().mean()
            total += loss.item() / len(members)  # an emulated GPU draws when the kernel runs, which is over now
            generators[rank] = generator_of().get_state()
            scaler.scale(loss / len(members)).backward()
            first = first or [b.clone() for b in model.buffers()]
        for buffer, kept in zip(model.buffers(), first, strict=True):
            buffer.copy_(kept)
        position += BATCH * len(members)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        found.append([total, scaler.get_scale()])
    return found


@pytest.mark.parametrize("backend", ["ncclguard", "ncclguard-nccl"])
@pytest.mark.parametrize(
    ("kills", "lost"),
    [
        ([(0, 1, "backward"), (2, 3, "optimizer"), (3, STEPS - 1, "evaluation")], {0: 1, 2: 4}),
        ([(3, 1, "reduction"), (1, 3, "unscaled"), (0, 4, "forward")], {3: 1, 1: 3, 0: 4}),
    ],
)
def test_training_goes_on_when_one_rank_after_the_other_is_killed(
    backend: str, kills: list[Kill], lost: dict[int, int]
) -> None:
    """Down to a single rank. Each step is made by those that are left, on the samples that come next."""
    expected = without(lost)[:STEPS]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(train, SIZE, args=[backend, kills, store.port], env=ENV, timeout=120)
    assert sorted(job.values("count")) == [rank for rank in range(SIZE) if rank not in {kill[0] for kill in kills}], job
    assert set(job.values("count").values()) == {float(SIZE - len(kills))}
    assert len(set(job.values("parameters").values())) == 1
    loader, position = ng.ElasticLoader(Rows(), BATCH, seed=7), 0
    for step, (members, (loss, scale)) in enumerate(zip(expected, undisturbed(expected), strict=True)):
        told = job.values(f"step {step}")
        assert told, step
        for rank, (found, samples, took_part, its_scale) in told.items():
            assert found == pytest.approx(loss, rel=1e-4), (step, rank)
            assert samples == loader.indices(position + members.index(rank) * BATCH, BATCH)
            assert (took_part, its_scale) == (members, scale), (step, rank)
        position += BATCH * len(members)


@pytest.mark.parametrize("used", [False, True])
def test_the_scaler_and_the_devices_random_numbers_are_as_they_were(used: bool) -> None:
    """Also a scaler that had no scale on the device yet, and one whose gradients had been unscaled."""
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler, generator = scaler_of(), torch.cuda.default_generators[0]
    generator.manual_seed(3)

    def one_step() -> None:
        generator.set_offset(generator.get_offset() + 4)
        optimizer.zero_grad()
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)

    if used:
        one_step()
        scaler.step(optimizer)
        scaler.update()
    before, offset = scaler.state_dict(), generator.get_offset()
    restore = state.keep([state.random_numbers, state.states_of([scaler])])
    for _ in range(2):  # the second would raise that gradients are unscaled already
        one_step()
        scaler.step(optimizer)
        scaler.update(2.0)
        one_step()
        restore()
        assert scaler.state_dict() == before
        assert generator.get_offset() == offset
