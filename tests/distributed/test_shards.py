"""A sharded training goes on when ranks are killed in it: a neighbour has the lost shard, or with HSDP a replica.

With ZeRO-1's optimizer only its state is sharded.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard import faults
from ncclguard.training import shards
from ncclguard.training.continuation import Continuation
from ncclguard.training.zero import ZeroStates

SIZE, STEPS, BATCH, SAMPLES, WIDTH = 4, 7, 3, 50, 17
#: Rank, step, moment.
Kill = tuple[int, int, str]
#: All but the last: the step is done again. "optimizer" is before, and "behind" after the killed rank's own optimizer;
#: "copies" while they are sent, or where none are, while all tell each other that they have made the step.
MOMENTS = ("forward", "backward", "reduction", "optimizer", "behind", "copies", "complete")


@pytest.fixture(autouse=True)
def moves_shards(request: pytest.FixtureRequest) -> None:
    """Skip what is of FSDP2 where `resilient_step` refuses it; ZeRO-1's optimizer goes on with every torch."""
    if not hasattr(FSDPModule, "reset_iter_state") and "with_zero" not in request.function.__name__:
        pytest.skip("resilient_step moves shards of FSDP2 from torch 2.13 on")


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Each sample says which it is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index


def make_model() -> nn.Sequential:
    """Rows that no number of ranks divides, and a bias of which one rank alone has a row."""
    torch.manual_seed(5)
    frozen = nn.Linear(WIDTH, 10).requires_grad_(False)
    return nn.Sequential(
        nn.Linear(WIDTH, 13), nn.Dropout(0.2), nn.Linear(13, WIDTH, bias=False), frozen, nn.ReLU(), nn.Linear(10, 1)
    )


def sharded(model: nn.Sequential, parts: int = 0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """By FSDP2 over all ranks, or by HSDP with replicas of so many parts."""
    size = dist.get_world_size()
    if parts:
        parts = shards.parts_of(size, parts)
        mesh = init_device_mesh("cpu", (size // parts, parts), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def with_zero(model: nn.Sequential, in_buckets: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = ZeroRedundancyOptimizer(trained, torch.optim.Adam, parameters_as_bucket_view=in_buckets, lr=1e-2)
    return DistributedDataParallel(model, bucket_cap_mb=0.0005), optimizer


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, strike: Any = None) -> float:
    """One step, with gradients clipped by the norm over all shards."""
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    if strike:
        strike.at("forward")
        strike.inside = True
    loss.backward()
    if strike:
        strike.inside = False
        strike.seen.clear()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    optimizer.step()
    if strike:
        strike.at("behind")
    return mean.item()


def digest(model: Any) -> str:
    """The same for the same parameters, to the last bit."""
    if isinstance(model, FSDPModule):
        model.reshard()  # an evaluation leaves the root's gathered
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    whole = b"".join(p.detach().cpu().numpy().tobytes() for p in parameters)
    return hashlib.sha256(whole).hexdigest()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Strike:
    """Kills its rank at one moment of one step."""

    def __init__(self, kills: list[Kill]) -> None:
        self.mine = [tuple(kill[1:]) for kill in kills if kill[0] == dist.get_rank()]
        self.step, self.inside = 0, False
        self.seen: dict[str, int] = {}  # calls of a collective, by the moment that one of them is

    def at(self, moment: str) -> None:
        if (self.step, moment) in self.mine:
            die()

    def everywhere(self, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        """In what has no hook: the second reduction, the second piece of the copies, and among survivors."""
        model[2].register_full_backward_hook(lambda *_: self.at("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        kind = type(dist.group.WORLD)
        for name in ("_reduce_scatter_base", "reduce_scatter_single", "allreduce"):  # by the version of torch; DDP
            self._count(kind, name, "reduction", 2, lambda: self.inside)
        self.keeping = self.dealing = False
        self.sharing = False  # what ZeRO-1's step broadcasts
        for owner in (shards.Shards, ZeroStates):
            self._within(owner, "keep", "keeping")
            self._within(owner, "_deal_out", "dealing")
        self._within(type(optimizer), "_sync_params", "sharing", optional=True)
        self._count(kind, "exchange", "copies", 2, lambda: self.keeping)
        self._count(kind, "all_gather_single", "copies", 2, lambda: self.keeping)
        for name in ("alltoall", "broadcast"):
            self._count(kind, name, "dealing", 2, lambda: self.dealing)
        self._count(kind, "broadcast", "sharing", 3, lambda: self.sharing)
        meet = Continuation._meet

        def meet_or_die(going: Any, what: str) -> tuple[int, ...]:
            if what.startswith("again"):
                self.at("agreement")
            return meet(going, what)

        Continuation._meet = meet_or_die  # type: ignore[method-assign]

    def _count(self, owner: Any, name: str, moment: str, number: int, counts: Any) -> None:
        method = getattr(owner, name)

        def counted(*args: Any, **named: Any) -> Any:
            if counts():
                self.seen[moment] = self.seen.get(moment, 0) + 1
                if self.seen[moment] == number:
                    self.at(moment)
            return method(*args, **named)

        setattr(owner, name, counted)

    def _within(self, owner: Any, name: str, flag: str, optional: bool = False) -> None:
        method = getattr(owner, name, None)
        if method is None and optional:
            return

        def within(*args: Any, **named: Any) -> Any:
            setattr(self, flag, True)
            self.seen.clear()
            try:
                return method(*args, **named)
            finally:
                setattr(self, flag, False)

        setattr(owner, name, within)


class Damage:
    """Flips bits: of a copy that this rank keeps, by whose it is, before a step, or of what it receives, so often."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.rng = random.Random(asked.get("seed", 0))
        self.copies = [
            (step, whose, which) for rank, step, whose, which in asked.get("copies", ()) if rank == dist.get_rank()
        ]
        for name, times in asked.get("received", {}).get(str(dist.get_rank()), {}).items():
            self._receive_wrong(name, times)

    def before(self, step: int, one: Any) -> None:
        for when, whose, which in self.copies:
            if when == step:
                kept = getattr(one._shards, which)
                if isinstance(kept, dict):
                    self.flip(kept[whose])
                else:
                    self.flip(kept.own if whose == dist.get_rank() else kept.others[whose])

    def flip(self, data: torch.Tensor) -> None:
        data[self.rng.randrange(data.numel())] ^= 1 << self.rng.randrange(8)

    def _receive_wrong(self, name: str, times: int) -> None:
        """In what comes from another rank, once it is there."""
        kind: Any = type(dist.group.WORLD)
        issue, left = getattr(kind, name), [times]

        def issued(group: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
            work = issue(group, outputs, inputs, *rest)
            work.wait()
            filled = [output for output in outputs if output.numel()]
            if left[0] and filled:
                left[0] -= 1
                self.flip(filled[-1])
            return work

        setattr(kind, name, issued)


def run(kills: list[Kill], options: dict[str, Any] | None = None, folder: str = "") -> faults.JobResult:
    """Four ranks; the store is hosted here, as a launcher's agent hosts it, so that rank 0 may be killed too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return faults.run_ranks(train, SIZE, args=[kills, options or {"copies": 1}, folder, store.port], timeout=100)


def begin(port: int) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    return dist.get_rank()


def train(kills: list[Kill], options: dict[str, Any], folder: str, port: int) -> None:
    """FSDP2 with dropout, clipping and a frozen layer; reports what each completed step was."""
    rank = begin(port)
    shards.PIECE = 512  # so that copies have several
    plain = make_model()
    zero = options.pop("zero", None)
    model, optimizer = sharded(plain, options.pop("parts", 0)) if zero is None else with_zero(plain, zero == "buckets")
    loader = ng.ElasticLoader(Rows(), BATCH, seed=7)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    strike = Strike(kills)
    strike.everywhere(plain, optimizer)
    torch.manual_seed(100 + rank)
    loaded = list[int]()

    def group() -> Any:
        return one.group if one.group is not None else dist.group.WORLD

    def state() -> dict[str, Any]:
        model_state, optimizer_state = checkpoint_state.get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def load() -> None:
        import torch.distributed.checkpoint as dcp

        read = state()
        dcp.load(read, checkpoint_id=folder, process_group=group())
        checkpoint_state.set_state_dict(
            model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
        )
        loader.load_state_dict({"position": loaded_position})
        loaded.append(strike.step)

    if options.pop("load", False):
        options["load"] = load
    damage = Damage(options.pop("damage", {}))

    @ng.resilient_step(model, optimizer, loader=loader, keep=[scheduler], **options)
    def one(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, list[int]]:
        loss = learn(model, optimizer, batch[0], strike)
        scheduler.step()
        return loss, batch[1].tolist()

    @ng.resilient_step
    def evaluate() -> float:
        with torch.no_grad():
            model.eval()
            loss = model(torch.ones(2, WIDTH)).mean()
            model.train()
        strike.at("evaluation")  # all are in it now where shards were gathered, so none makes the step before it again
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        return float(loss)

    loaded_position, ranks = 0, []
    for strike.step in range(STEPS):
        if folder and strike.step == 2:
            import torch.distributed.checkpoint as dcp

            dcp.save(state(), checkpoint_id=folder, process_group=group())
            loaded_position = loader.position
        damage.before(strike.step, one)
        loss, samples = one()
        strike.at("complete")
        ranks.append(list(one.made_by))
        faults.report(**{f"step {strike.step}": [loss, samples, ranks[-1]]})
        evaluate()
    faults.report(end=[ranks, [seconds for _, seconds in one.losses + evaluate.losses], loaded])
    faults.report(parameters=digest(model))
    dist.destroy_process_group()


# ---------------------------------------------------------------------- references


def one_process(ranks: list[list[int]]) -> list[float]:
    """The losses of these ranks, step by step, with plain torch in one process."""
    model = make_model()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader, position, losses = ng.ElasticLoader(Rows(), BATCH, seed=7), 0, []
    generators = {}
    for rank in range(SIZE):
        torch.manual_seed(100 + rank)
        generators[rank] = torch.get_rng_state()
    for members in ranks:
        optimizer.zero_grad()
        total = 0.0
        for place, rank in enumerate(members):
            rows = loader.indices(position + place * BATCH, BATCH)
            torch.set_rng_state(generators[rank])
            loss = model(torch.stack([Rows()[row][0] for row in rows])).square().mean()
            generators[rank] = torch.get_rng_state()
            (loss / len(members)).backward()
            total += loss.item() / len(members)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        position += BATCH * len(members)
        optimizer.step()
        scheduler.step()
        losses.append(total)
    return losses


def phase(members: list[int], first: int, last: int, position: int, folder: str, parts: int, port: int) -> None:
    """Steps of a job of its own that was never disturbed: torch's FSDP2 made for as many ranks, from the state before."""
    place = begin(port)
    rank = members[place]
    model, optimizer = sharded(make_model(), parts)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    options = checkpoint_state.StateDictOptions(full_state_dict=True)
    torch.manual_seed(100 + rank)
    if first:
        before = torch.load(Path(folder, "state"), weights_only=False)
        checkpoint_state.set_state_dict(
            model, optimizer, model_state_dict=before[0], optim_state_dict=before[1], options=options
        )
        scheduler.load_state_dict(before[2])
        torch.set_rng_state(torch.load(Path(folder, f"random {rank}")))
    loader = ng.ElasticLoader(Rows(), BATCH, seed=7)
    for step in range(first, last):
        rows = loader.indices(position + place * BATCH, BATCH)
        loss = learn(model, optimizer, torch.stack([Rows()[row][0] for row in rows]))
        scheduler.step()
        position += BATCH * len(members)
        faults.report(**{f"step {step}": loss})
    after = checkpoint_state.get_state_dict(model, optimizer, options=options)
    if place == 0:
        torch.save([*after, scheduler.state_dict()], Path(folder, "state"))
    torch.save(torch.get_rng_state(), Path(folder, f"random {rank}"))
    faults.report(parameters=digest(model))
    dist.destroy_process_group()


def separate_jobs(ranks: list[list[int]], folder: Path, parts: int = 0) -> tuple[list[float], Any]:
    """The losses and the parameters at the end, a job for each membership, which begins with the state of the last."""
    losses, position, first = list[float](), 0, 0
    while first < len(ranks):
        members = ranks[first]
        last = next((step for step in range(first, len(ranks)) if ranks[step] != members), len(ranks))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        arguments = [members, first, last, position, str(folder), parts, store.port]
        job = faults.run_ranks(phase, len(members), args=arguments, timeout=100).check()
        losses += [job[0].reports[f"step {step}"] for step in range(first, last)]
        position += BATCH * len(members) * (last - first)
        parameters = job[0].reports["parameters"]
        first = last
    return losses, parameters


# ---------------------------------------------------------------------- tests


def without(kills: list[Kill]) -> list[list[int]]:
    """Who makes each step: a rank that is killed in it does not, unless it was complete."""
    last = {rank: step + (moment in ("complete", "evaluation")) for rank, step, moment in kills}
    return [[rank for rank in range(SIZE) if step < last.get(rank, STEPS)] for step in range(STEPS)]


def check(
    kills: list[Kill], reference: tuple[list[float], Any] | None = None, options: dict[str, Any] | None = None
) -> None:
    """All steps are done by the ranks that are left, on the samples that come next, with the reference's losses."""
    expected = without(kills)
    job = run(kills, options)
    ends = job.values("end")
    assert sorted(ends) == expected[-1], job
    assert all(end[0] == expected for end in ends.values()), (ends, expected)
    assert all(seconds < 20 for end in ends.values() for seconds in end[1]), ends
    (parameters,) = set(job.values("parameters").values())
    losses = reference[0] if reference else one_process(expected)
    loader, position = ng.ElasticLoader(Rows(), BATCH, seed=7), 0
    for step, members in enumerate(expected):
        told = job.values(f"step {step}")
        assert set(expected[-1]) <= set(told)
        for rank, (loss, samples, took_part) in told.items():
            assert loss == (losses[step] if reference else pytest.approx(losses[step], rel=1e-4)), (step, rank)
            assert samples == loader.indices(position + members.index(rank) * BATCH, BATCH)
            assert took_part == members
        position += BATCH * len(members)
    if reference:
        assert parameters == reference[1]


def test_nobody_is_killed() -> None:
    """The reference itself: plain torch's losses, and no step is done again."""
    check([])


def test_it_is_the_training_of_separate_jobs_to_the_last_bit(tmp_path: Path) -> None:
    """Killed ranks leave what jobs with fewer ranks, each begun with the full state of the one before, compute too."""
    kills = [(0, 2, "reduction"), (2, 4, "copies")]
    check(kills, separate_jobs(without(kills), tmp_path))


@pytest.mark.parametrize(
    "kills",
    [
        [(0, 0, "forward"), (1, 2, "copies"), (2, 4, "optimizer")],
        [(1, 1, "copies"), (2, 3, "behind"), (3, 5, "backward")],
        pytest.param([(2, 1, "reduction"), (3, 3, "complete"), (0, 4, "behind")], marks=pytest.mark.thorough),
        [(3, 0, "optimizer"), (0, 2, "copies"), (1, 6, "forward")],
    ],
)
def test_ranks_are_killed_until_one_is_left(kills: list[Kill]) -> None:
    """Each rank, 0 too, at each moment of a step, the first one included, which makes the optimizer's state."""
    check(kills)


def test_a_rank_is_killed_in_the_evaluation() -> None:
    """The evaluation needs all shards too, and is done again with those of the survivors."""
    check([(1, 2, "evaluation")])


def test_two_ranks_are_killed_at_once_whose_shards_others_have() -> None:
    check([(0, 3, "backward"), (2, 3, "backward")])


def test_a_rank_is_killed_while_the_survivors_agree_on_another() -> None:
    check([(3, 2, "forward"), (1, 2, "agreement")])


def test_a_rank_is_killed_while_the_shards_of_another_are_dealt_out() -> None:
    check([(3, 2, "optimizer"), (1, 2, "dealing")])


def test_a_rank_is_killed_with_its_neighbour() -> None:
    """Nobody has the shard: the others end, and say what is missing."""
    job = run([(1, 3, "backward"), (2, 3, "backward")])
    assert job.values("end") == {}
    for rank in (0, 3):
        assert "the shards of rank 1 are lost, with all copies of them (copies=1)" in job[rank].output, job


def test_a_rank_is_killed_before_the_first_copies_are_complete() -> None:
    """There is nothing to go on from, and that is said."""
    job = run([(1, 0, "copies")])
    assert job.values("end") == {}
    assert all("the shards of rank 1 are lost, with all copies" in job[rank].output for rank in (0, 2, 3)), job


def test_with_two_copies_neighbours_may_be_lost() -> None:
    kills: list[Kill] = [(1, 3, "backward"), (2, 3, "backward")]
    job = run(kills, {"copies": 2})
    assert sorted(job.values("end")) == [0, 3], job
    losses = one_process(without(kills))
    assert [told[0] for told in job[0].reports.values() if isinstance(told, list) and len(told) == 3][:STEPS] == (
        pytest.approx(losses, rel=1e-4)
    )


# ---------------------------------------------------------------------- replicas (HSDP): two of two parts


def test_with_replicas_it_is_the_training_of_separate_jobs_to_the_last_bit(tmp_path: Path) -> None:
    """The jobs are torch's own HSDP on a mesh of 2 x 2, then 1 x 3, 1 x 2, with groups of their own for each dimension.

    A neighbour keeps what is missing to one copy while there is one replica only.
    """
    kills = [(0, 2, "reduction"), (2, 4, "copies")]
    check(kills, separate_jobs(without(kills), tmp_path, 2), {"parts": 2, "copies": 1, "check_every": 1})


@pytest.mark.parametrize("seed", range(3))
def test_with_replicas_ranks_are_killed_at_random_moments(seed: int) -> None:
    """Without copies a rank, or two that have not the same shard, of the first step or a later one."""
    rng = random.Random(seed)
    first = rng.randrange(SIZE)
    step = rng.randrange(1, STEPS)
    kills = [(first, step, rng.choice(MOMENTS[:-1]))]
    if seed:
        kills.append((first ^ rng.choice((1, 3)), step, kills[0][2]))
    check(kills, options={"parts": 2})


def test_of_a_shard_all_replicas_are_killed() -> None:
    """Nobody has it: the others end, and say which is missing."""
    job = run([(1, 3, "backward"), (3, 3, "backward")], {"parts": 2})
    assert job.values("end") == {}
    for rank in (0, 2):
        assert "the shards of ranks 1, 3 are lost, with all copies of them (copies=0)" in job[rank].output, job


def test_a_flipped_bit_in_a_replica_is_named_and_the_other_replica_is_used() -> None:
    kills: list[Kill] = [(1, 3, "backward")]
    job = run(kills, {"parts": 2, "damage": {"copies": [(0, 3, 0, "_moving")]}})
    assert sorted(job.values("end")) == [0, 2, 3], job
    losses = one_process(without(kills))
    assert [job[0].reports[f"step {step}"][0] for step in range(STEPS)] == pytest.approx(losses, rel=1e-4)
    assert "rank 0's copy of the shard of rank 0 is not as it was" in "".join(rank.output for rank in job)


# ---------------------------------------------------------------------- the optimizer's state only (ZeRO-1)


@pytest.mark.parametrize(
    ("zero", "kills"),
    [
        ("", [(0, 0, "backward"), (1, 2, "sharing"), (2, 4, "copies")]),
        ("buckets", [(3, 1, "sharing"), (2, 3, "behind"), (0, 5, "optimizer")]),
        ("", [(0, 1, "reduction"), (2, 1, "dealing"), (1, 4, "complete")]),
    ],
)
def test_with_zero_ranks_are_killed_until_one_is_left(zero: str, kills: list[Kill]) -> None:
    """Also between two broadcasts of the parameters, where some ranks have new ones that others have not."""
    check(kills, options={"zero": zero, "copies": 1, "check_every": 1})


def test_with_zero_a_rank_is_killed_with_its_neighbour() -> None:
    job = run([(1, 3, "sharing"), (2, 3, "sharing")], {"zero": "", "copies": 1})
    assert job.values("end") == {}
    for rank in (0, 3):
        assert "the optimizer's state of rank 1 is lost, with all copies of it (copies=1)" in job[rank].output, job


def reload(port: int) -> None:
    """After a loss rank 0 collects the optimizer's state, and all load it; rank 0 loads the tensors that it has."""
    rank = begin(port)
    plain, alike = make_model().eval(), make_model().eval()
    model, optimizer = with_zero(plain, False)
    reference = torch.optim.Adam([p for p in alike.parameters() if p.requires_grad], lr=1e-2)
    step = 0

    @ng.resilient_step(model, optimizer, copies=1)
    def one(rows: torch.Tensor) -> float:
        if (rank, step) == (3, 2):
            die()
        return learn(model, optimizer, rows)

    for step in range(STEPS):
        loss = one(torch.ones(2, WIDTH))
        reference.zero_grad()
        expected = alike(torch.ones(2, WIDTH)).square().mean()
        expected.backward()
        nn.utils.clip_grad_norm_(alike.parameters(), 0.5)
        reference.step()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        if step == 4:
            optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
            state: list[Any] = [optimizer.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(state, 0)
            optimizer.load_state_dict(state[0])
    faults.report(end=list(one.ranks))
    dist.destroy_process_group()


def test_with_zero_a_state_that_is_collected_after_a_loss_is_loaded_by_all() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(reload, SIZE, args=[store.port], timeout=100)
    assert job.values("end") == {rank: [0, 1, 2] for rank in range(3)}, job


def test_with_zero_a_flipped_bit_in_a_copy_is_named_and_not_restored() -> None:
    damage = {"seed": 2, "copies": [(2, 3, 1, "_rows"), (0, 3, 3, "_rows")]}
    job = run([(1, 3, "backward")], {"zero": "", "copies": 2, "damage": damage})
    assert sorted(job.values("end")) == [0, 2, 3], job
    losses = one_process(without([(1, 3, "backward")]))
    assert [job[0].reports[f"step {step}"][0] for step in range(STEPS)] == pytest.approx(losses, rel=1e-4)
    text = "".join(rank.output for rank in job)
    assert text.count("rank 2's copy of the optimizer's state of rank 1 is not as it was") == 1, job
    assert text.count("rank 0's copy of the optimizer's state of rank 3 is not as it was") == 1


# ---------------------------------------------------------------------- copies that are not what they were


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2)), 3])
def test_a_flipped_bit_in_a_kept_copy_is_named_and_another_copy_is_used(seed: int) -> None:
    """Of what an optimizer moves and of what is frozen; the losses are those of a run that nothing happened to."""
    kills: list[Kill] = [(1, 3, "backward")]
    which = "_fixed" if seed == 3 else "_moving"
    job = run(kills, {"copies": 2, "damage": {"seed": seed, "copies": [(2, 3, 1, which), (0, 3, 3, which)]}})
    assert sorted(job.values("end")) == [0, 2, 3], job
    losses = one_process(without(kills))
    assert [job[0].reports[f"step {step}"][0] for step in range(STEPS)] == pytest.approx(losses, rel=1e-4)
    assert len(set(job.values("parameters").values())) == 1
    text = "".join(rank.output for rank in job)
    assert text.count("rank 2's copy of the shard of rank 1 is not as it was") == 1, job
    assert text.count("rank 0's copy of the shard of rank 3 is not as it was") == 1
    assert "are lost with all copies" not in text


def test_a_survivor_takes_its_own_shard_from_its_neighbour_where_its_own_copy_is_damaged() -> None:
    kills: list[Kill] = [(1, 3, "backward")]
    job = run(kills, {"copies": 1, "damage": {"copies": [(3, 3, 3, "_moving")]}})
    assert sorted(job.values("end")) == [0, 2, 3], job
    losses = one_process(without(kills))
    assert [job[3].reports[f"step {step}"][0] for step in range(STEPS)] == pytest.approx(losses, rel=1e-4)
    assert "rank 3's copy of the shard of rank 3 is not as it was" in "".join(rank.output for rank in job)


def test_without_a_good_copy_nothing_is_restored_and_it_is_said_who_kept_the_bad_one() -> None:
    job = run([(1, 3, "backward")], {"copies": 1, "damage": {"copies": [(2, 3, 1, "_moving")]}})
    assert job.values("end") == {}
    for rank in (0, 2, 3):
        assert "(copies=1; rank 2 kept that of rank 1, damaged)" in job[rank].output, job


def test_without_a_good_copy_the_checkpoint_is_loaded(tmp_path: Path) -> None:
    damage = {"copies": [(2, 4, 1, "_moving")]}
    job = run([(1, 4, "backward")], {"copies": 1, "load": True, "damage": damage}, str(tmp_path))
    ends = job.values("end")
    assert sorted(ends) == [0, 2, 3] and all(end[2] == [4] for end in ends.values()), job


@pytest.mark.parametrize("name", ["exchange", "alltoall"])
def test_what_arrives_with_a_flipped_bit_is_sent_again(name: str) -> None:
    """A copy, and shards that are dealt out."""
    kills: list[Kill] = [(1, 3, "backward")]
    job = run(kills, {"copies": 1, "damage": {"received": {"2": {name: 2}}}})
    assert sorted(job.values("end")) == [0, 2, 3], job
    losses = one_process(without(kills))
    assert [job[0].reports[f"step {step}"][0] for step in range(STEPS)] == pytest.approx(losses, rel=1e-4)
    text = "".join(rank.output for rank in job)
    assert (
        "a copy of the shard of rank 1 did not arrive at rank 2" if name == "exchange" else "did not arrive at rank 2"
    ) in text
    assert "it is sent again" in text


def test_what_never_arrives_as_it_was_sent_ends_the_job_with_the_receivers_name() -> None:
    job = run([], {"copies": 1, "damage": {"received": {"2": {"exchange": 99}}}})
    assert job.values("end") == {}
    assert all("copies of shards did not arrive at rank 2 as they were sent, 3 times" in rank.output for rank in job), (
        job
    )


def join(members: list[int], again: bool, parts: int, folder: str, port: int) -> None:
    """Rank 2 is left out, and comes back as a new process would, with nothing of its own."""
    rank = begin(port)
    group: Any = dist.group.WORLD
    model, optimizer = sharded(make_model().eval(), parts)
    kept = shards.Shards(group, [model], [optimizer], 1, None)

    def learn_twice() -> None:
        for _ in range(2):
            learn(model, optimizer, torch.ones(2, WIDTH))
            kept.keep()

    kept.settle((0, 1, 2, 3), group)
    learn_twice()
    told = Path(folder, "told")
    if rank != 2:
        kept.settle((0, 1, 3), group.go_on((0, 1, 3), 1))
        learn_twice()
        if rank == 0:
            torch.save(kept.state_for_newcomer(), told.with_suffix(".draft"))
            told.with_suffix(".draft").rename(told)
    else:
        model, optimizer = sharded(make_model().eval(), parts)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        kept = shards.Shards(group, [model], [optimizer], 1, None)
        while not told.exists():
            time.sleep(0.01)
        kept.take_state(torch.load(told, weights_only=False))
    if rank not in members:
        die()
    kept.settle(tuple(members), group.go_on(tuple(members), 2))
    learn_twice()
    if again:  # the same ranks are left as once before
        if rank == 2:
            die()
        kept.settle((0, 1, 3), group.go_on((0, 1, 3), 3))
        learn_twice()
    faults.report(parameters=digest(model), values=[float(p.full_tensor().detach().sum()) for p in model.parameters()])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("members", "again", "parts"),
    [([0, 1, 2, 3], False, 0), ([0, 2, 3], False, 0), ([0, 1, 2, 3], True, 0), ([0, 1, 2, 3], True, 2)],
)
def test_a_new_rank_gets_its_shard_from_the_others(tmp_path: Path, members: list[int], again: bool, parts: int) -> None:
    """Also when another rank is lost at the same time, whose neighbour has its shard; and the new rank is lost too."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(join, SIZE, args=[members, again, parts, str(tmp_path), store.port], timeout=100)
    assert sorted(job.values("parameters")) == [rank for rank in members if not again or rank != 2], job
    assert len(set(job.values("parameters").values())) == 1
    model = make_model().eval()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(8 if again else 6):
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    values = [float(p.detach().sum()) for p in model.parameters()]
    assert job[3].reports["values"] == pytest.approx(values, rel=1e-3, abs=1e-5)


def refused(port: int) -> None:
    """What of a model or its options cannot be, each on all ranks alike."""
    begin(port)
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    narrow = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("replicate", "shard"))
    gloo: Any = {"replicate": "gloo", "shard": "gloo"}
    on_gloo = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override=gloo)
    whole = init_device_mesh("cpu", (SIZE,))

    def shard(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = nn.Linear(8, 8)
        fully_shard(model, **options)
        return model, torch.optim.Adam(model.parameters())

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Shard

    plain = nn.Linear(2, 2)

    def zero(**options: Any) -> Any:
        return ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1, **options)

    cases: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "no copies": (shard(mesh=whole), {}),
        "no optimizer": (shard(mesh=whole)[:1], {"copies": 1}),
        "some ranks": (shard(mesh=wide["shard"]), {"copies": 1}),
        "replicas on gloo": (shard(mesh=on_gloo), {}),
        "one replica": (shard(mesh=narrow), {}),
        "columns": (shard(mesh=whole, shard_placement_fn=lambda p: Shard(p.dim() - 1)), {"copies": 1}),
        "not sharded": ((DistributedDataParallel(plain),), {"copies": 1}),
        "FSDP1": ((FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu")),), {"copies": 1}),
        "ZeRO without copies": (with_zero(make_model(), False), {}),
        "ZeRO of another group": ((plain, zero(process_group=dist.new_group(list(range(SIZE))))), {"copies": 1}),
        "ZeRO in a hook": ((plain, zero(overlap_with_ddp=True)), {"copies": 1}),
        "ZeRO beside another": ((plain, [zero(), torch.optim.SGD(plain.parameters(), lr=0.1)]), {"copies": 1}),
        "ZeRO with load": ((plain, zero()), {"copies": 1, "load": print}),
        "another model's optimizer": (
            (shard(mesh=whole)[0], torch.optim.SGD(plain.parameters(), lr=0.1)),
            {"copies": 1},
        ),
    }
    for name, (models, options) in cases.items():
        try:
            ng.resilient_step(*models, **options)(lambda: None)()
            faults.report(**{name: "taken"})
        except ng.GuardConfigError as error:
            faults.report(**{name: str(error)})
    dist.barrier()
    dist.destroy_process_group()


def test_what_cannot_be_dealt_out_anew_is_refused() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = faults.run_ranks(refused, SIZE, args=[store.port], timeout=100).check()
    expected = {
        "no copies": "FSDPLinear is sharded: a rank that is lost takes its shard with it. Give copies=1",
        "no optimizer": "goes on with its optimizer",
        "some ranks": "is not of the process group of the steps",
        "replicas on gloo": 'on the backend "ncclguard" only',
        "one replica": "FSDPLinear is sharded: a rank that is lost takes its shard with it. Give copies=1",
        "columns": "sharded on dimension 1: use dimension 0",
        "not sharded": "copies and load are for sharded models",
        "FSDP1": "FSDP1",
        "ZeRO without copies": "a rank that is lost takes it with it: give copies=1",
        "ZeRO of another group": "it is not on the process group of the steps",
        "ZeRO in a hook": "leave overlap_with_ddp out",
        "ZeRO beside another": "it goes on as the only optimizer of a step",
        "ZeRO with load": "without load",
        "another model's optimizer": "a parameter that is in none of the models",
    }
    for name, told in expected.items():
        assert all(told in job[rank].reports[name] for rank in range(SIZE)), (name, job.values(name))


@pytest.mark.parametrize("copies", [0, 1])
def test_a_checkpoint_is_loaded_where_a_shard_is_lost(tmp_path: Path, copies: int) -> None:
    """On all survivors alike, and the training is that of the checkpoint's step on fewer ranks."""
    kills: list[Kill] = [(1, 4, "backward"), (2, 4, "backward")] if copies else [(1, 4, "backward")]
    job = run(kills, {"copies": copies, "load": True}, str(tmp_path))
    ends = job.values("end")
    survivors = [0, 3] if copies else [0, 2, 3]
    assert sorted(ends) == survivors, job
    assert all(end[2] == [4] for end in ends.values()), ends
    assert len(set(job.values("parameters").values())) == 1
    # Two steps of all were forgotten. Random numbers are not in the checkpoint, so dropout is not that of the reference.
    assert job[0].reports["step 4"][1] == ng.ElasticLoader(Rows(), BATCH, seed=7).indices(2 * SIZE * BATCH, BATCH)
