"""Replicas that differ are found at the next check: which rank, which tensor, which element, how many bits."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.replicas import check
from ncclguard.replicas.tensors import Item, collect
from ncclguard.training.continuation import GroupExchange

WIDTH = 24


def begin(backend: str = "gloo") -> int:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(5)
    return dist.get_rank()


class Net(nn.Module):
    """Dropout, running means that each rank has its own of, a constant buffer, a parameter that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mask", torch.arange(WIDTH).double())
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(rows)) * self.mask.to(rows.dtype)
        return self.last(nn.functional.dropout(self.second(hidden), 0.2))  # type: ignore[no-any-return]


def learn(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on rows of this rank's own, in mixed precision."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(6, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()


def ddp(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(Net(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    torch.manual_seed(100 + dist.get_rank())
    return model, optimizer


def flip(item: Item, place: int, bit: int) -> None:
    raw = item.tensor.view(-1).view(torch.uint8)
    raw[place * item.tensor.element_size() + bit // 8] ^= 1 << bit % 8


def struck(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, victims: list[int]) -> tuple[str, int, int]:
    """Flip a bit of some element of some tensor on these ranks: sign, exponent or mantissa, as it comes."""
    rng = random.Random(seed)
    items = [item for item in collect([model], [optimizer]).items if item.write is None and "running" not in item.name]
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, [item.tensor.numel() for item in items])
    item = rng.choice([item for place, item in enumerate(items) if all(each[place] for each in sizes)])
    place, bit = (
        rng.randrange(min(each[items.index(item)] for each in sizes)),
        rng.randrange(8 * item.tensor.element_size()),
    )
    if dist.get_rank() in victims:
        flip(item, place, bit)
    return item.name, place, bit


def said(report: ng.ReplicaReport) -> list[Any]:
    first = report.first
    return [
        report.ok, report.ranks, report.differing, report.repaired,
        first and [first.name, first.index, first.rank, first.other_rank, first.bits],
    ]  # fmt: skip


def flips(count: int, together: int) -> None:
    """A step, a check, a flip on `together` ranks, a check, the flip undone; so often."""
    rank = begin()
    model, optimizer = ddp()
    clean, found = [bool(ng.check_replicas(model, optimizer))], []
    for seed in range(count):
        learn(model, optimizer)
        clean.append(bool(ng.check_replicas(model, optimizer)))
        victims = random.Random(seed).sample(range(dist.get_world_size()), together)
        name, place, bit = struck(model, optimizer, seed, victims)
        report = ng.check_replicas(model, optimizer)
        item = next(item for item in collect([model], [optimizer]).items if item.name == name)
        value = float(item.tensor.flatten()[place])
        first = report.first
        assert first is not None
        own = first.value if rank == first.rank else first.other_value
        seen = rank not in (first.rank, first.other_rank) or repr(float(own)) == repr(value)
        found.append([name, place, sorted(victims), *said(report)[1:3], list(said(report)[4]), seen])
        if rank in victims:
            flip(item, place, bit)
    faults.report(clean=clean, found=found, text=str(report))
    dist.destroy_process_group()


@pytest.mark.parametrize(("size", "together", "count"), [(3, 1, 30), (4, 2, 10), (2, 1, 10)])
def test_a_flipped_bit_is_found_and_its_rank_named_where_there_is_a_majority(
    size: int, together: int, count: int
) -> None:
    """In weights, momentum, step counters and a constant buffer; no alarm between, with dropout and batch norm."""
    job = faults.run_ranks(flips, size, args=[count, together], timeout=120).check()
    assert len({str(found) for found in job.values("found").values()}) == 1
    assert all(all(clean) for clean in job.values("clean").values())
    assert all(each[-1] for found in job.values("found").values() for each in found)
    kinds = set()
    for name, place, victims, ranks, differing, first, _ in job[0].reports["found"]:
        assert ranks == (victims if 2 * together < size else [])
        assert differing == [name] and first[0] == name and first[4] == 1
        index = first[1]
        assert place == (index[0] * WIDTH + index[1] if len(index) == 2 and "last" not in name else sum(index))
        if ranks:
            assert first[2] == victims[0] and first[3] not in victims
        kinds.add(name.split(".")[0] + name.rsplit(".", 1)[-1])
    assert size != 3 or len(kinds) > 5


def repairs() -> None:
    """Each of several things that differ on rank 1 is written over, and training goes on as on the others."""
    rank = begin()
    model, optimizer = ddp(broadcast_buffers=False)  # torch cannot broadcast a buffer made in inference mode
    model.module.register_buffer("rotated", torch.arange(12.0).view(3, 4).t())
    with torch.inference_mode():
        model.module.register_buffer("fixed", torch.arange(5.0))
    learn(model, optimizer)
    assert ng.check_replicas(model, optimizer)
    parameter = model.module.first.weight
    before = parameter.data_ptr()
    if rank == 1:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"] = 0.5, (0.9, 0.5)
        with torch.no_grad():
            parameter[3] = float("nan")
            model.module.rotated[2] = 7
            optimizer.state[parameter]["step"] += 1
        with torch.inference_mode():
            model.module.fixed[4] = -1
    report = ng.check_replicas(model, optimizer, on_difference="repair")
    assert parameter.data_ptr() == before and parameter.requires_grad
    learn(model, optimizer)
    faults.report(
        said=said(report), rest=said(ng.check_replicas(model, optimizer, on_difference="stop")),
        group=[optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]],
        fixed=model.module.fixed.tolist(), rotated=model.module.rotated.tolist(), text=str(report),
    )  # fmt: skip
    dist.destroy_process_group()


def test_the_minority_is_repaired_in_place_and_goes_on_as_the_others() -> None:
    job = faults.run_ranks(repairs, 3, timeout=90).check()
    for rank in job:
        ok, ranks, differing, repaired, _ = rank.reports["said"]
        assert (ok, ranks, repaired) == (True, [1], True)
        assert differing == [
            "first.weight", "rotated", "fixed", "optimizer.first.weight.step", "optimizer.param_groups.0.betas.1",
            "optimizer.param_groups.0.lr",
        ]  # fmt: skip
        assert rank.reports["rest"][:2] == [True, []]
        assert rank.reports["group"] == [1e-2, [0.9, 0.999]]
        assert rank.reports["fixed"] == [0, 1, 2, 3, 4]
        assert rank.reports["rotated"] == torch.arange(12.0).view(3, 4).t().tolist()
        assert "compared again: all agree" in rank.reports["text"]


def ends() -> None:
    """Other models, an optimizer that has stepped on one rank only, two sides, an error: each the same on all ranks."""
    rank = begin()
    told: dict[str, Any] = {}

    def model(width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)

    told["shape"] = said(ng.check_replicas(model(5 if rank == 2 else 3)))
    told["dtype"] = said(ng.check_replicas(model(dtype=torch.float64 if rank == 2 else torch.float32)))
    longer = model()
    if rank == 2:
        longer.append(nn.Linear(2, 2))
    told["longer"] = str(ng.check_replicas(longer).first)
    torch.manual_seed(1)
    stepped = model()
    optimizer = torch.optim.Adam(stepped.parameters())
    if rank == 2:
        stepped(torch.ones(1, 4)).sum().backward()
        for parameter in stepped.parameters():
            parameter.grad.zero_()
        optimizer.step()
    told["stepped"] = said(ng.check_replicas(stepped, optimizer))
    for action in ("stop", "repair"):
        try:
            ng.check_replicas(stepped, optimizer, on_difference=action)
        except ng.ReplicasDiffer as error:
            told[action] = [error.report.ranks, str(error)]
    torch.manual_seed(2)
    sides = model()
    with torch.no_grad():
        sides[0].weight[1, 2] += rank // 2
        sides[1].bias[0] += rank == 3
    told["sides"] = said(ng.check_replicas(sides))
    try:
        ng.check_replicas(sides, on_difference="repair")
    except ng.ReplicasDiffer as error:
        told["no repair"] = error.report.ranks
    told["ignored"] = said(ng.check_replicas(sides, ignore=["0.weight", "*.bias"]))
    sides[0].weight = nn.Parameter(torch.zeros(3, 4, device="meta"))
    told["meta"] = str(ng.check_replicas(sides, ignore=["1.bias"]))
    outcome = ng.safe_barrier(timeout=30)
    assert outcome.ok
    if rank != 1:
        try:
            ng.check_replicas(sides, timeout=1.5)
        except ng.CollectiveTimeout as error:
            told["late"] = error.outcome.culprits
    else:
        time.sleep(3)
    faults.report(**told)


def test_each_end_is_the_same_on_all_ranks() -> None:
    job = faults.run_ranks(ends, 4, timeout=90).check()
    for key in ("shape", "dtype", "longer", "stepped", "stop", "repair", "sides", "no repair", "ignored", "meta"):
        assert len({str(value) for value in job.values(key).values()}) == 1, key
    told = job[0].reports
    assert told["shape"] == [False, [2], [], False, ["0.weight", None, 2, 0, 0]]
    assert told["dtype"][1] == [2] and told["dtype"][4][0] == "0.weight"
    assert told["longer"] == "2.weight: float32[2, 2] on rank 2, nothing on rank 0"
    assert told["stepped"][1] == [2] and told["stepped"][4][0].startswith("optimizer.")
    for action in ("stop", "repair"):
        assert told[action][0] == [2] and "make model and optimizer alike" in told[action][1]
    assert told["sides"] == [False, [3], ["0.weight", "1.bias"], False, ["0.weight", [1, 2], 2, 0, told["sides"][4][4]]]
    assert told["no repair"] == [3]
    assert told["ignored"][0] is True
    assert "0.weight (it is on meta, without memory)" in told["meta"]
    assert {rank: told for rank, told in job.values("late").items()} == {0: [1], 2: [1], 3: [1]}


def sharded(mesh_shape: list[int], count: int) -> None:
    """FSDP2 over a mesh; each flip is in a shard, a moment or a step counter of one rank."""
    rank = begin()
    names = ("replicate", "shard")[2 - len(mesh_shape) :]
    mesh = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 13), nn.Dropout(0.2), nn.BatchNorm1d(13), nn.Linear(13, 1))
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    clean, found = [], []
    for seed in range(count):
        learn(model, optimizer)
        if seed == 1:
            model.unshard()  # gathered parameters lie in the place of sharded ones
        report = ng.check_replicas(model, optimizer)
        clean.append(bool(report))
        victim = random.Random(seed).randrange(dist.get_world_size())
        name, place, bit = struck(model, optimizer, seed, [victim])
        differs = ng.check_replicas(model, optimizer)
        found.append([name, victim, *said(differs)[1:3], list(said(differs)[4])])
        item = next(item for item in collect([model], [optimizer]).items if item.name == name)
        faults.report(
            **{
                f"index {seed}": [
                    a + b for a, b in zip(item.offset, check._unravelled(place, item.tensor.shape), strict=True)
                ]
            }
        )
        if rank == victim:
            flip(item, place, bit)
    repaired = []
    if len(mesh_shape) == 2:
        if rank == 1:
            model[0].weight._local_tensor.data[0, 0] = 3
        try:
            repaired = said(ng.check_replicas(model, optimizer, on_difference="repair"))
        except ng.ReplicasDiffer as error:
            repaired = [str(error)]
    faults.report(clean=clean, found=found, left_out={str(name): str(why) for name, why in report.left_out.items()},
                  tensors=report.tensors, repaired=repaired)  # fmt: skip
    dist.destroy_process_group()


@pytest.mark.parametrize(("mesh", "size"), [([2, 2], 4), ([3, 1], 3)])
def test_of_hsdp_the_shards_of_one_place_are_compared(mesh: list[int], size: int) -> None:
    """Two replicas name nobody; the element is told all the same. Three name the rank."""
    job = faults.run_ranks(sharded, size, args=[mesh, 12], timeout=120).check()
    assert all(all(clean) for clean in job.values("clean").values())
    assert len({str(found) for found in job.values("found").values()}) == 1
    sharded_ones = 0
    for seed, (name, victim, ranks, differing, first) in enumerate(job[0].reports["found"]):
        assert first[1] == job[victim].reports[f"index {seed}"]
        everywhere = name.endswith("step") or name.startswith("2.") and "weight" not in name and "bias" not in name
        assert differing == [name] and first[0] == name and first[4] == 1
        assert ranks == ([victim] if mesh[0] == 3 or everywhere else [])
        assert victim in (first[2], first[3])
        assert mesh[0] == 3 or everywhere or {first[2], first[3]} in ({0, 2}, {1, 3})
        sharded_ones += not everywhere
    assert sharded_ones > 3
    assert job[0].reports["tensors"] > 15
    for rank in job:
        if mesh[0] == 3:
            assert rank.reports["repaired"][:2] == [True, [1]] and rank.reports["repaired"][3]
        else:
            assert "none has a majority" in rank.reports["repaired"][0]


def test_of_fsdp_without_replicas_that_is_said_and_the_rest_is_compared() -> None:
    job = faults.run_ranks(sharded, 3, args=[[3], 4], timeout=90).check()
    for rank in job:
        assert all(rank.reports["clean"])
        assert rank.reports["left_out"]["0.weight"] == "it is sharded, and no other rank has this part"
        assert "optimizer.0.weight.exp_avg" in rank.reports["left_out"]
        assert all(ranks == [victim] for _, victim, ranks, _, _ in rank.reports["found"])  # step counters, buffers


def buffers() -> None:
    """Running means differ from the first training step on; then a constant buffer and a synchronised one are struck."""
    rank = begin()
    model, optimizer = ddp()
    synchronised = nn.SyncBatchNorm(WIDTH)  # on the CPU a plain tensor that all change alike
    model.module.register_buffer("synced", synchronised.running_mean)
    told = [said(ng.check_replicas(model, optimizer))]
    for step in range(8):
        learn(model, optimizer)
        model.module.synced += step
        if step == 3:
            model.eval()
            model(torch.ones(2, WIDTH))  # broadcasts rank 0's running means: they are alike for once
            model.train()
        told.append(said(ng.check_replicas(model, optimizer)))
        if step == 5 and rank == 2:
            check._memories.clear()  # as in a process that has taken a lost rank's place
    left_out = sorted(ng.check_replicas(model, optimizer).left_out)
    model.module.synced += 1
    if rank == 1:
        model.module.synced[3] = -5
    struck_synced = said(ng.check_replicas(model, optimizer))
    if rank == 1:
        model.module.synced[3] = model.module.synced[2]
        model.module.mask[2] = 9
    faults.report(told=told, left_out=left_out, synced=struck_synced, mask=said(ng.check_replicas(model, optimizer)))
    dist.destroy_process_group()


def test_buffers_of_each_ranks_own_are_found_by_themselves_and_others_are_compared() -> None:
    job = faults.run_ranks(buffers, 3, timeout=90).check()
    for rank in job:
        assert all(told[0] for told in rank.reports["told"]), rank.reports["told"]
        assert rank.reports["left_out"] == ["norm.running_mean", "norm.running_var"]
        assert rank.reports["synced"][1:3] == [[1], ["synced"]]
        assert rank.reports["mask"][1:3] == [[1], ["mask"]]


# ---------------------------------------------------------------------- within resilient_step


def periodic(action: str, kill: str, port: int) -> None:
    """A bit flips before step 8 on rank 1, and rank 0 may die in step 16, or in an exchange; a check takes three steps."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    rank = begin("ncclguard")
    model, optimizer = ddp()
    seen: list[Any] = []
    last = None

    @ng.resilient_step(model, optimizer, check_every=3, on_difference=action)
    def step() -> None:
        if rank == 0 and step.completed == 15 and kill == "step":
            os.kill(os.getpid(), signal.SIGKILL)
        learn(model, optimizer)

    gather = GroupExchange.gather

    def gather_or_die(self: GroupExchange, tensor: torch.Tensor) -> torch.Tensor:
        if rank == 0 and step.completed > 15 and kill == "exchange":
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, tensor)

    GroupExchange.gather = gather_or_die  # type: ignore[method-assign]

    try:
        while step.completed < 25:
            if rank == 1 and step.completed == 7:
                flip(collect([model], [optimizer]).items[0], 5, 20)
            step()
            if step.replicas is not last:
                last = step.replicas
                seen.append([step.completed, said(last), last.participants])
    except ng.ReplicasDiffer as error:
        seen.append([step.completed, said(error.report), error.report.participants])
    faults.report(seen=seen, parameters=float(sum(p.detach().double().abs().sum() for p in model.parameters())))
    if action != "stop":
        dist.destroy_process_group()


@pytest.mark.parametrize(("action", "kill"), [("report", ""), ("repair", "step"), ("repair", "exchange"), ("stop", "")])
def test_resilient_step_compares_every_few_steps(action: str, kill: str) -> None:
    """Also after a rank is lost, among those that go on."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(periodic, 3, args=[action, kill, store.port], timeout=90)
    ends = job.values("seen")
    assert sorted(ends) == ([1, 2] if kill else [0, 1, 2]), job
    for seen in ends.values():
        bad = [one for one in seen if not one[1][0] or one[1][3]]
        assert bad and bad[0][1][1] == [1] and bad[0][1][4][0] == "first.weight" and 7 < bad[0][0] <= 11
        if action == "repair":
            assert len(bad) == 1 and [one[2] for one in seen][-1] == [1, 2] and len(seen) >= 6
        if action == "stop":
            assert seen[-1] == bad[0] and len(bad) == 1
    if action == "repair":
        assert len(set(job.values("parameters").values())) == 1
    if action == "report":
        assert "before step" in job[0].output and "rank 1 of 3" in job[0].output
