"""Kill ranks of a training at chosen moments, and check all that is promised of going on:

    python -m benchmarks.going_on --seeds 20 [--fsdp | --hsdp | --zero] [--moment forward ...]
        [--backend ncclguard-nccl] [--spares N | --no-rejoin] [--write FILE]

Each run is `ncclguard run` with 4 ranks and this file as the script, which trains DDP with dropout, running means and
several buckets, or FSDP2 with copies of each shard on two neighbours, or HSDP with two replicas of two shards (and
`copies=1`, which matters only while a rank is missing), or DDP with ZeRO-1's optimizer and two copies, on GPUs where
there are any (not with ZeRO-1). It has several
strikes, one after the other: a rank kills itself with SIGKILL at a moment of a step.
The next strike comes when all four ranks are together again, or, without spares, when the survivors have made some
steps. Then the membership of each step, as the ranks have written it, is replayed by a second run in which nobody
dies and nothing is resilient: the group is given these members (for FSDP2 a new one is made, or torch's own mesh of
one for each dimension, and the model anew), and
a rank that comes gets its state over gloo. That of ZeRO-1 has torch's plain optimizer on each rank.
Checked are: exit code 0, all steps, each sample of the sequence once, equal parameters on all ranks and equal to the
replay's, to the last bit. Told are the seconds from each kill until a survivor goes on, and until a spare, or a
process that was started then, has joined.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng
from ncclguard.training.shards import parts_of

ROOT = Path(__file__).resolve().parents[1]
SIZE, BATCH, SAMPLES, WIDTH = 4, 3, 500, 96
#: Of HSDP: into how many parts each replica is cut, and the names of the dimensions.
PARTS, DIMENSIONS = 2, ("replicate", "shard")
#: Steps with all ranks before the next strike, at least and at most.
QUIET = (4, 12)
#: In a step, or beside it: one rank.
IN_STEP = ("forward", "backward", "reduction", "optimizer", "behind", "evaluation", "checkpoint")
#: A second rank while the survivors agree on the first.
IN_MEETING = ("agreement",)
#: A survivor, or the newcomer, while the newcomer joins.
IN_JOINING = (
    "known",
    "welcome",
    "transfer",
    "newcomer-starts",
    "newcomer-welcome",
    "newcomer-transfer",
    "newcomer-step",
)
MOMENTS = (*IN_STEP, "two", *IN_MEETING, *IN_JOINING)
#: Of sharded state only: while copies are sent; and a second rank while the survivors deal it out among themselves.
SHARDED = ("copies", "dealing")
#: Of ZeRO-1 only: between two broadcasts of parameters that a rank has stepped.
OF_ZERO = ("sharing",)


# ---------------------------------------------------------------------- the training, in each rank


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


def take_device() -> torch.device:
    """This rank's GPU, on which FSDP2 and the collectives put what is theirs too, or the processor."""
    count = torch.cuda.device_count()
    if not count:
        return torch.device("cpu")
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % count)
    torch.cuda.set_device(place)
    return place


def mesh_of(ranks: list[int], kind: str) -> DeviceMesh | None:
    """Return torch's own mesh of two dimensions for some ranks, made by all; None on a rank that is not in it."""
    if len(ranks) == SIZE:
        return init_device_mesh(kind, (SIZE // PARTS, PARTS), mesh_dim_names=DIMENSIONS)
    grid = torch.tensor(ranks).view(-1, parts_of(len(ranks), PARTS))
    own: list[Any] = []
    for lines in (grid.T.tolist(), grid.tolist()):
        made = [(line, dist.new_group(line)) for line in lines]
        own += [group for line, group in made if dist.get_rank() in line]
    return DeviceMesh.from_group(own, kind, mesh=grid, mesh_dim_names=DIMENSIONS) if own else None


def wrap(
    model: nn.Module, fsdp: bool, group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> nn.Module:
    """For all ranks, or those of the group or of the mesh."""
    if fsdp:
        if group is not None:
            mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # type: ignore[attr-defined] # the first bucket's own limit
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.03)


def parts(model: nn.Module, steps: int, zero: bool = False) -> tuple[torch.optim.Optimizer, Any, ng.ElasticLoader]:
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        ng.ElasticLoader(Rows(), BATCH, seed=7),
    )


def whole_parameters(model: nn.Module) -> list[torch.Tensor]:
    """Those of all shards, which all ranks have to be there for."""
    if isinstance(model, FSDPModule):
        model.reshard()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


def fingerprint(model: nn.Module) -> str:
    import hashlib

    whole = b"".join(p.detach().cpu().numpy().tobytes() for p in whole_parameters(model))  # buffers are each rank's own
    return hashlib.sha256(whole).hexdigest()


class Strikes:
    """Which strike is next, the same on all ranks: a new one is told, as of any state that is in `keep`."""

    def __init__(self, plan: list[dict[str, Any]], folder: Path, rejoins: bool) -> None:
        self.plan, self.folder, self.rejoins = plan, folder, rejoins
        self.index = self.quiet = self.meetings = 0
        self.rank = dist.get_rank()
        self.inside = False
        self.new = bool(os.environ.get("NCCLGUARD_JOINS"))  # until its first step is complete

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index, "quiet": self.quiet, "meetings": self.meetings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index, self.quiet, self.meetings = state["index"], state["quiet"], state["meetings"]

    def after(self, ranks: tuple[int, ...], meetings: int) -> None:
        """A step is complete, by these ranks, which have met so many times."""
        self.new = False
        if self.rejoins and len(ranks) < SIZE:
            return
        if meetings != self.meetings:
            self.meetings, self.quiet, self.index = meetings, 0, self.index + 1
        else:
            self.quiet += 1

    @property
    def now(self) -> dict[str, Any] | None:
        """The strike of the step that begins or goes on."""
        if self.index >= len(self.plan) or self.quiet != self.plan[self.index]["quiet"]:
            return None
        return self.plan[self.index]

    @property
    def over(self) -> bool:
        """Whether all have come to pass, and some steps were made since: the same on all ranks."""
        return self.index >= len(self.plan) and self.quiet >= QUIET[0]

    def at(self, moment: str) -> None:
        """Die here if the plan says so."""
        strike = self.now
        if strike is not None and self.rank in strike["ranks"] and strike["moment"] == moment:
            self._die(f"{self.index}-{self.rank}", strike["moment"])

    def later(self, moment: str) -> None:
        """The same, for the second rank of a strike, while the first is being replaced or done without."""
        for index, strike in enumerate(self.plan):
            second = strike.get("second")
            if second and second["moment"] == moment and second["rank"] == self.rank:
                first = self.folder / f"struck-{index}-{strike['ranks'][0]}"
                if first.exists() and self.new == second["new"]:
                    self._die(f"{index}-second", moment)

    def _die(self, name: str, moment: str) -> None:
        path = self.folder / f"struck-{name}"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(file, json.dumps([self.rank, moment, time.time()]).encode())
        os.close(file)
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self, optimizer: torch.optim.Optimizer, hooked: nn.Module) -> None:
        """Have the moments inside of torch and of the library come by here."""
        from ncclguard.engine import runtime
        from ncclguard.training.continuation import Continuation
        from ncclguard.training.shards import Shards
        from ncclguard.training.zero import ZeroStates

        group = type(dist.group.WORLD)  # the guarded one, whose collectives come by there
        self.keeping = self.dealing = False
        reductions = 0

        def reduced(*_: Any, **__: Any) -> None:
            nonlocal reductions
            reductions = reductions + 1 if self.inside else 0
            if reductions == 2:
                self.at("reduction")

        for name in ("allreduce", "_reduce_scatter_base", "reduce_scatter_single"):  # DDP; FSDP2 by torch's version
            before(group, name, reduced)
        for kind in (Shards, ZeroStates):
            during(kind, "keep", lambda now: setattr(self, "keeping", now))
            during(kind, "_deal_out", lambda now: setattr(self, "dealing", now))
        for name in ("exchange", "all_gather_single"):  # what all say of the copies, where no copies are sent
            before(group, name, lambda *_: self.keeping and self.at("copies"))
        for name in ("alltoall", "broadcast"):
            before(group, name, lambda *_: self.dealing and self.later("dealing"))
        self.sharing = 0
        if hasattr(optimizer, "_sync_params"):
            during(type(optimizer), "_sync_params", lambda now: setattr(self, "sharing", int(now)))

        def shared(*_: Any) -> None:
            self.sharing += self.sharing > 0
            if self.sharing == 4:
                self.at("sharing")

        before(group, "broadcast", shared)
        hooked.register_full_backward_hook(lambda *_: self.at("backward"))
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        before(
            Continuation, "_meet", lambda _, what, *more: self.later("agreement") if what.startswith("again") else None
        )
        before(runtime, "prepare", lambda *_: self.later("known"))
        before(Continuation, "_welcome", lambda *_: self.later("newcomer-welcome" if self.new else "welcome"))
        sent = 0

        def broadcast(going: Any, tensor: torch.Tensor, source: int) -> None:
            nonlocal sent
            sent += tensor.dtype is torch.uint8 and tensor.numel() != 256
            if sent == 2:  # the description has arrived, the tensors have not
                sent = 0
                self.later("newcomer-transfer" if self.new else "transfer")

        before(Continuation, "_broadcast", broadcast)
        events = (self.folder / f"events-{self.rank}-{os.getpid()}.jsonl").open("w", buffering=1)
        spare = "ncclguard.training.spare" in sys.orig_argv

        def gone_on(going: Any, lost: Any) -> None:
            events.write(json.dumps(["without", list(lost), time.time(), False]) + "\n")

        def joined(going: Any, current: Any, *_: Any) -> None:
            if self.new:
                events.write(json.dumps(["joined", [self.rank], time.time(), spare]) + "\n")

        before(Continuation, "_now_without", gone_on)
        before(Continuation, "_attend", joined)  # the last that a newcomer does before its first step


def during(owner: Any, name: str, call: Callable[[bool], None]) -> None:
    """Have `call` called with True before, and with False behind."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        call(True)
        try:
            return original(*args, **named)
        finally:
            call(False)

    setattr(owner, name, wrapped)


def before(owner: Any, name: str, call: Callable[..., object]) -> None:
    """Have `call` called with the same arguments first."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        call(*args, **named)
        return original(*args, **named)

    setattr(owner, name, wrapped)


def train(folder: Path) -> None:
    """One rank of the training that is struck."""
    given = json.loads((folder / "plan.json").read_text())
    steps, rejoins = given["steps"], given["rejoins"]
    if os.environ.get("NCCLGUARD_JOINS"):
        for index, strike in enumerate(given["strikes"]):
            second = strike.get("second", {})
            if second.get("moment") == "newcomer-starts" and second["rank"] == int(os.environ["RANK"]):
                path = folder / f"struck-{index}-second"
                if (folder / f"struck-{index}-{strike['ranks'][0]}").exists() and not path.exists():
                    path.write_text(json.dumps([second["rank"], "newcomer-starts", time.time()]))
                    os.kill(os.getpid(), signal.SIGKILL)
    torch.set_num_threads(1)
    dist.init_process_group(given["backend"])
    rank, place = dist.get_rank(), take_device()
    model = make_model().to(place)
    mesh = mesh_of(list(range(SIZE)), place.type) if given["hsdp"] else None
    wrapped = wrap(model, given["fsdp"], mesh=mesh)
    optimizer, scheduler, loader = parts(wrapped, steps, given["zero"])
    strikes = Strikes(given["strikes"], folder, rejoins)
    strikes.install(optimizer, model[3])
    torch.manual_seed(100 + rank)
    out = (folder / f"rank-{rank}-{os.getpid()}.jsonl").open("w", buffering=1)

    copies = 1 if given["hsdp"] else 2 * (given["fsdp"] or given["zero"])

    @ng.resilient_step(wrapped, optimizer, loader=loader, keep=[scheduler, strikes], copies=copies)
    def one(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, list[int]]:
        if strikes.new:
            strikes.later("newcomer-step")
        optimizer.zero_grad()
        loss = wrapped(batch[0].to(place)).square().mean()
        strikes.at("forward")
        strikes.at("two")
        strikes.inside = True
        loss.backward()
        strikes.inside = False
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        optimizer.step()
        scheduler.step()
        strikes.at("behind")
        return mean.item(), batch[1].tolist()

    @ng.resilient_step
    def evaluate() -> float:
        strikes.at("evaluation")
        count = torch.ones(1, device=place)
        dist.all_reduce(count)
        return float(count)

    @ng.resilient_step
    def save() -> None:
        """To another name first, by the first rank; all wait for it."""
        parameters = whole_parameters(model)
        if rank == save.ranks[0]:
            draft = folder / "checkpoint.draft"
            torch.save({"parameters": parameters, "step": one.completed}, draft)
            strikes.at("checkpoint")
            draft.replace(folder / "checkpoint.pt")
        dist.barrier()

    life = int(os.environ.get("NCCLGUARD_JOINS", "0"))
    known = 0
    while one.completed < steps and not strikes.over:
        loss, samples = one()
        assert one._continuation is not None
        met = one._continuation.meetings
        out.write(json.dumps([one.completed, loss, samples, list(one.made_by), loader.position, met, life]) + "\n")
        strike = strikes.now
        if strike is not None and strike["moment"] == "evaluation":
            evaluate()
        if strike is not None and strike["moment"] == "checkpoint":
            save()
        strikes.after(one.ranks, one._continuation.meetings)
        known = len(one.losses)
        # A rank that is started again imports torch, which takes long on a busy machine.
        time.sleep(given["pause"] if len(one.ranks) == SIZE or not rejoins else 1.0)
    out.write(
        json.dumps(
            {
                "fingerprint": fingerprint(model),
                "losses": one.losses + evaluate.losses + save.losses,
                "joins": one.joins,
                "known": known,
            }
        )
        + "\n"
    )
    dist.barrier()
    dist.destroy_process_group()


def replay(folder: Path) -> None:
    """One rank of the undisturbed run with the same memberships."""
    from ncclguard.training.joining import seed_newcomer

    schedule = json.loads((folder / "schedule.json").read_text())
    given = json.loads((folder / "plan.json").read_text())
    fsdp, hsdp, steps = given["fsdp"], given["hsdp"], given["steps"]
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    rank, world, side = dist.get_rank(), dist.group.WORLD, dist.new_group(backend="gloo")
    place = take_device()
    model = make_model().to(place)
    wrapped = wrap(model, fsdp, mesh=mesh_of(list(range(SIZE)), place.type) if hsdp else None)
    optimizer, scheduler, loader = parts(wrapped, steps)
    options = checkpoint_state.StateDictOptions(full_state_dict=True)
    torch.manual_seed(100 + rank)
    members: list[int] = list(range(SIZE))
    for completed, (now, new, again) in enumerate(schedule):
        if again:
            source = next(r for r in members if r in now and r not in new)
            state: list[Any] = [None]
            if fsdp and rank in members:
                state = [[*checkpoint_state.get_state_dict(model, optimizer, options=options), scheduler.state_dict()]]
            elif rank == source:
                state = [[model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]]
            dist.broadcast_object_list(state, source, group=side)
            group = dist.new_group(now) if fsdp and not hsdp else None
            mesh = mesh_of(now, place.type) if hsdp else None
            if rank in now:
                numbers = torch.get_rng_state(), torch.cuda.get_rng_state() if place.type == "cuda" else None
                if fsdp:
                    model = make_model().to(place)
                    wrapped = wrap(model, fsdp, group, mesh)
                    optimizer, scheduler, _ = parts(wrapped, steps)
                    checkpoint_state.set_state_dict(
                        model, optimizer, model_state_dict=state[0][0], optim_state_dict=state[0][1], options=options
                    )
                    scheduler.load_state_dict(state[0][2])
                elif rank in new:
                    for part, values in zip((model, optimizer, scheduler), state[0], strict=True):
                        part.load_state_dict(values)
                torch.set_rng_state(numbers[0])
                if numbers[1] is not None:
                    torch.cuda.set_rng_state(numbers[1])
                if rank in new:
                    torch.manual_seed(100 + rank)
                    seed_newcomer(completed)
                if not fsdp:
                    del wrapped
                    part_of = world.go_on(tuple(now), completed + 1)  # type: ignore[union-attr]
                    wrapped = wrap(model, fsdp, part_of)
            members = now
        if rank in members:
            batch = loader.take(tuple(members), rank)
            optimizer.zero_grad()
            loss = wrapped(batch[0].to(place)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            loader.done()
        else:
            loader.position += BATCH * len(members)
    if rank in members:
        (folder / f"replay-{rank}").write_text(fingerprint(model))
    dist.barrier(side)
    dist.destroy_process_group()


# ---------------------------------------------------------------------- one run, and the campaign


def runs_of(moments: list[str], together: int, rejoins: bool) -> list[list[str]]:
    """Those of each run; without newcomers one rank has to be left at its end."""
    runs: list[list[str]] = [[]]
    lost = 0
    for moment in moments:
        kills = 2 if moment in ("two", *IN_MEETING, *IN_JOINING, "dealing") else 1
        if len(runs[-1]) == together or (not rejoins and lost + kills >= SIZE):
            runs.append([])
            lost = 0
        runs[-1].append(moment)
        lost += kills
    return runs


def plan_of(moments: list[str], rejoins: bool, hsdp: bool, rng: random.Random) -> list[dict[str, Any]]:
    """One strike for each moment, of random ranks; with HSDP of two that have not the same shard."""
    plan = []
    alive = set(range(SIZE))
    for moment in moments:
        first, other = rng.sample(sorted(alive), 2)
        if hsdp and (first - other) % PARTS == 0:
            other = rng.choice([rank for rank in sorted(alive) if (first - rank) % PARTS])
        strike: dict[str, Any] = {"quiet": rng.randint(*QUIET), "ranks": [first], "moment": moment}
        if moment == "two":
            strike["ranks"] = [first, other]
        elif moment == "checkpoint":
            strike["ranks"] = [min(alive)]  # the first one saves
        elif moment in (*IN_MEETING, *IN_JOINING, "dealing"):
            new = moment.startswith("newcomer")
            strike["moment"] = rng.choice(("forward", "backward", "optimizer"))
            if moment in ("agreement", "dealing"):
                strike["moment"] = "forward"
            strike["second"] = {"moment": moment, "rank": first if new else other, "new": new}
        plan.append(strike)
        if not rejoins:
            alive -= {*strike["ranks"], strike.get("second", {}).get("rank")}
    return plan


def run(folder: Path, what: str, *options: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"NCCLGUARD_REPORT_DIR": str(folder / "reports")}
    command = [
        sys.executable,
        "-m",
        "ncclguard",
        "run",
        "--nproc-per-node",
        str(SIZE),
        *options,
        __file__,
        what,
        str(folder),
    ]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # torch's agent ends its workers
        output, _ = process.communicate(timeout=60)
        output += "\n(timed out)"
    finally:
        process.kill()
    (folder / f"{what}.log").write_text(output)
    return subprocess.CompletedProcess(command, process.returncode, output)


def checked(folder: Path, plan: list[dict[str, Any]], rejoins: bool) -> dict[str, Any]:
    """What the ranks of a run have written; raises AssertionError with what does not hold."""
    told: dict[int, list[Any]] = {}
    ends: list[dict[str, Any]] = []
    for path in folder.glob("rank-*.jsonl"):
        for line in path.read_text().splitlines():
            said = json.loads(line)
            if isinstance(said, dict):
                ends.append(said)
            else:
                told.setdefault(said[0], []).append((int(path.name.split("-")[1]), *said[1:]))
    steps = max(told, default=0)
    assert len(told) == steps > 0, f"steps {sorted(set(range(1, steps + 1)) - set(told))} are missing"
    schedule: list[Any] = []
    lives: dict[int, int] = dict.fromkeys(range(SIZE), 0)
    position = meetings = 0
    loader = ng.ElasticLoader(Rows(), BATCH, seed=7)
    for step in range(1, steps + 1):
        assert len({(loss, tuple(made_by)) for _, loss, _, made_by, *_ in told[step]}) == 1, (step, told[step])
        made_by = told[step][0][3]
        # Behind the optimizer's step ranks may meet in which this one did not take part any more.
        met = min(one[5] for one in told[step])
        now = {rank: life for rank, *_, life in told[step]}
        new = [rank for rank in made_by if rank in now and rank in lives and now[rank] != lives[rank]]
        for rank, _, samples, _, behind, *_ in told[step]:
            expected = loader.indices(position + BATCH * made_by.index(rank), BATCH)
            assert samples == expected, f"rank {rank} used {samples} in step {step}, not {expected}"
            assert behind == position + BATCH * len(made_by), (step, behind)
        position += BATCH * len(made_by)
        schedule.append([made_by, new, met != meetings])
        lives, meetings = lives | now, met
    struck = sorted(json.loads(path.read_text()) for path in folder.glob("struck-*"))
    wanted = sum(len(strike["ranks"]) + ("second" in strike) for strike in plan)
    assert len(struck) == wanted, f"{len(struck)} of {wanted} strikes came to pass: {struck}"
    assert len({end["fingerprint"] for end in ends}) == 1, "parameters differ between ranks"
    last = schedule[-1][0]
    assert len(ends) == len(last), (len(ends), last)
    if rejoins:
        assert last == list(range(SIZE)), last
    (folder / "schedule.json").write_text(json.dumps(schedule))
    losses = max((end["losses"] for end in ends), key=len)
    joins = max((end["joins"] for end in ends), key=len)
    return {
        "schedule": schedule,
        "fingerprint": ends[0]["fingerprint"],
        "losses": losses,
        "joins": joins,
        "struck": struck,
    }


def seconds_after(folder: Path, struck: list[Any]) -> list[dict[str, Any]]:
    """For each kill: seconds until a survivor went on, and until the rank joined again, by a spare or not."""
    events = [json.loads(line) for path in folder.glob("events-*") for line in path.read_text().splitlines()]
    found = []
    for rank, moment, killed in struck:
        later = [other for one, _, other in struck if one == rank and other > killed]
        end = min(later, default=float("inf"))
        ours = [event for event in events if rank in event[1] and killed < event[2] < end]
        on = min((when for what, _, when, _ in ours if what == "without"), default=None)
        came = min(((when, spare) for what, _, when, spare in ours if what == "joined"), default=None)
        found.append(
            {
                "rank": rank,
                "moment": moment,
                "on": None if on is None else round(on - killed, 3),
                "joined": None if came is None else round(came[0] - killed, 3),
                "spare": came is not None and came[1],
            }
        )
    return found


def one_run(
    moments: list[str], seed: int, how: dict[str, Any], rejoins: bool, spares: int, keep: bool
) -> dict[str, Any]:
    """Run, check, replay, compare; the result says what did not hold, if anything."""
    rng = random.Random(f"{seed} {moments}")
    plan = plan_of(moments, rejoins, how["hsdp"], rng)
    steps = sum(strike["quiet"] + 40 for strike in plan) if rejoins else sum(strike["quiet"] + 8 for strike in plan)
    folder = Path(tempfile.mkdtemp(prefix="going-on-"))
    kills = sum(len(strike["ranks"]) + ("second" in strike) for strike in plan)
    given = {**how, "steps": steps, "rejoins": rejoins, "strikes": plan, "pause": 0.05 if rejoins else 0.0}
    (folder / "plan.json").write_text(json.dumps(given))
    options = ["--spares", str(min(spares, kills)), "--restart-lost", str(max(0, kills - spares))] if rejoins else []
    result: dict[str, Any] = {"moments": moments, "seed": seed, "plan": plan, "steps": steps, "folder": str(folder)}
    started = time.monotonic()
    done = run(folder, "train", *options, timeout=180 + 45 * kills)
    result["seconds"] = time.monotonic() - started
    try:
        assert done.returncode == 0, f"exit code {done.returncode}"
        found = checked(folder, plan, rejoins)
        result |= {"losses": found["losses"], "joins": found["joins"], "kills": seconds_after(folder, found["struck"])}
        again = run(folder, "replay", timeout=180 + 45 * kills)
        assert again.returncode == 0, f"the replay ended with exit code {again.returncode}"
        prints = {path.read_text() for path in folder.glob("replay-*")}
        assert prints == {found["fingerprint"]}, "the parameters are not those of the replay"
        result["ok"] = True
    except AssertionError as error:
        result |= {"ok": False, "what": str(error)[:2000]}
    if result["ok"] and not keep:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
    return result


def main() -> None:
    """Run the campaign, print a line for each run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="runs for each moment")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 with two copies of each shard")
    parser.add_argument("--hsdp", action="store_true", help="HSDP: two replicas of two shards, with spares")
    parser.add_argument(
        "--zero", action="store_true", help="DDP with ZeroRedundancyOptimizer and two copies of its state"
    )
    parser.add_argument(
        "--moment",
        nargs="+",
        choices=(*MOMENTS, *SHARDED, *OF_ZERO),
        metavar="MOMENT",
        help=f"all, unless given: {' '.join(MOMENTS)}, with --fsdp, --hsdp and --zero also {' '.join(SHARDED)}, "
        f"with --zero {' '.join(OF_ZERO)}",
    )
    parser.add_argument(
        "--backend",
        default="ncclguard",
        choices=("ncclguard", "ncclguard-nccl"),
        help="that of the training which is struck; the replay's is ncclguard",
    )
    parser.add_argument("--together", type=int, default=4, help="strikes in one run")
    parser.add_argument("--spares", type=int, default=2, help="spares of a run; further lost ranks are started again")
    parser.add_argument("--no-rejoin", action="store_true", help="neither spares nor restarts: fewer and fewer ranks")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs in which all held, too")
    parser.add_argument("--write", default="", help="a JSON file for the results")
    given = parser.parse_args()
    if given.fsdp + given.hsdp + given.zero > 1 or (given.hsdp and given.no_rejoin):
        parser.error(
            "--fsdp, --hsdp and --zero are one at a time; with --hsdp --no-rejoin a shard's ranks would all be killed"
        )
    results = []
    how = {"fsdp": given.fsdp or given.hsdp, "hsdp": given.hsdp, "zero": given.zero, "backend": given.backend}
    sharded = given.fsdp or given.hsdp or given.zero
    moments = given.moment or [*MOMENTS, *(SHARDED if sharded else ()), *(OF_ZERO if given.zero else ())]
    moments = [m for m in moments if not given.no_rejoin or m not in IN_JOINING]
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        order = random.Random(seed).sample(moments, len(moments))
        for chosen in runs_of(order, given.together, not given.no_rejoin):
            result = one_run(chosen, seed, how, not given.no_rejoin, given.spares, given.keep)
            results.append(result)
            state = "ok" if result["ok"] else f"FAILED: {result['what']} ({result['folder']})"
            print(
                f"seed {seed}, {', '.join(result['moments'])}: {state}; {result['seconds']:.0f} s, "
                f"load {os.getloadavg()[0]:.0f}",
                flush=True,
            )
            if given.write:
                Path(given.write).write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1))
    bad = sum(not result["ok"] for result in results)
    kills = [kill for result in results for kill in result.get("kills", [])]
    for what, seconds in (
        ("went on", [kill["on"] for kill in kills if kill["on"] is not None]),
        ("a spare joined", [kill["joined"] for kill in kills if kill["joined"] is not None and kill["spare"]]),
        (
            "a new process joined",
            [kill["joined"] for kill in kills if kill["joined"] is not None and not kill["spare"]],
        ),
    ):
        if seconds:
            print(
                f"{what}: {len(seconds)} times, {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s at most"
            )
    print(f"{len(results) - bad} of {len(results)} runs held")
    sys.exit(bad > 0)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] in ("train", "replay"):
        {"train": train, "replay": replay}[sys.argv[1]](Path(sys.argv[2]))
    else:
        main()
