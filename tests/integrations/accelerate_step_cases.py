"""A real Accelerate loop that goes on when ranks are killed, and the same training in one process; run by test_accelerate_step.py."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from ncclguard.integrations.accelerate import resilient_step
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ncclguard as ng
from ncclguard import faults

SIZE, STEPS, MICRO, PARTS, SAMPLES, WIDTH = 4, 8, 3, 2, 50, 16
#: Rank, step, moment.
Kill = tuple[int, int, str]
BEFORE = ("forward", "second", "backward")  # gradients are not reduced yet: the step is done again
MOMENTS = (*BEFORE, "reduced", "optimizer", "behind", "evaluation", "saving")


class Rows(Dataset[tuple[torch.Tensor, int]]):
    """Each sample says which it is."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index


def make(
    dropout: float = 0.2,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ng.ElasticLoader]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.5)
    return model, optimizer, scheduler, ng.ElasticLoader(Rows(), MICRO * PARTS, seed=7)


class Lines(GeneralTracker):
    """A tracker that opens its file where it is started, which is the main process."""

    name, requires_logging_directory, tracker = "lines", False, None

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] | None = None

    @on_main_process
    def start(self) -> None:
        self.lines = []

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.lines.append([step, values["loss"]])  # type: ignore[union-attr]


def train(kills: list[Kill], port: int, folder: str, options: dict[str, Any]) -> None:
    """Two micro-batches a step, an evaluation and a checkpoint after each; reports what each completed step was."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")
    rank = dist.get_rank()
    lines = Lines()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS, log_with=lines, **options)
    plain, optimizer, scheduler, loader = make()
    held_out: Any = DataLoader(Rows(22), batch_size=3)
    model, optimizer, scheduler, held_out = accelerator.prepare(plain, optimizer, scheduler, held_out)
    mine = [tuple(kill[1:]) for kill in kills if kill[0] == rank]

    def strike(moment: str) -> None:
        if (one.completed - (moment in ("evaluation", "saving")), moment) in mine:
            os.kill(os.getpid(), signal.SIGKILL)

    plain[0].weight.register_hook(lambda _: strike("backward"))
    optimizer.optimizer.register_step_pre_hook(lambda *_: strike("optimizer"))
    torch.manual_seed(100 + rank)

    @resilient_step(accelerator, model, optimizer, loader=loader, keep=[scheduler])
    def one(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, list[int]]:
        mean = 0.0
        for part, rows in enumerate(batch[0].split(MICRO)):
            with accelerator.accumulate(model):
                loss = model(rows).square().mean()
                strike(("forward", "second")[part])
                mean += accelerator.reduce(loss.detach(), "mean").item() / PARTS
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    strike("reduced")
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        strike("behind")
        return mean, batch[1].tolist()

    @resilient_step(accelerator)
    def evaluate() -> list[int]:
        seen = []
        for number, (_, numbers) in enumerate(held_out):
            if number == 1:
                strike("evaluation")
            seen += accelerator.gather_for_metrics(numbers).tolist()
        return sorted(seen)

    @resilient_step(accelerator)
    def save() -> None:
        accelerator.wait_for_everyone()
        strike("saving")
        accelerator.save_state(f"{folder}/{one.completed}")
        accelerator.wait_for_everyone()

    for step in range(STEPS):
        loss, samples = one()
        main = accelerator.is_main_process
        if accelerator.is_main_process and not accelerator.trackers:  # on the first of those that are left
            accelerator.init_trackers("lines")
        accelerator.log({"loss": loss}, step=step)
        # Told step by step: a rank that is killed later has told of the steps before.
        faults.report(**{f"step {step}": [loss, samples, one.made_by, main, one.ranks]})
        evaluated = evaluate()
        save()
        faults.report(**{f"evaluated {step}": evaluated})
    faults.report(
        end=[one.ranks, accelerator.num_processes, accelerator.process_index],
        parameters=[p.tolist() for p in plain.parameters()],
        rate=scheduler.get_last_lr(),
        lines=lines.lines,
        objects=told(lambda: accelerator.gather_for_metrics([rank], use_gather_object=True)),
    )
    dist.destroy_process_group()


def told(call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - which is what a test is about
        return f"{type(error).__name__}: {error}"


def undisturbed(ranks: list[list[int]], dropout: float = 0.2) -> tuple[list[float], list[list[float]], list[float]]:
    """Plain torch in one process: the losses of these ranks step by step, the parameters, and the learning rate."""
    model, optimizer, scheduler, loader = make(dropout)
    position, losses, generators = 0, [], {}
    for rank in range(SIZE):
        torch.manual_seed(100 + rank)
        generators[rank] = torch.get_rng_state()
    for members in ranks:
        total = 0.0
        for place, rank in enumerate(members):
            torch.set_rng_state(generators[rank])
            rows = torch.stack(
                [Rows()[row][0] for row in loader.indices(position + place * MICRO * PARTS, MICRO * PARTS)]
            )
            for part in rows.split(MICRO):
                loss = model(part).square().mean() / PARTS / len(members)
                loss.backward()
                total += loss.item()
            torch.empty((), dtype=torch.int64).random_()  # an iteration over a DataLoader, to evaluate, draws a seed
            generators[rank] = torch.get_rng_state()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for _ in members:  # as a prepared scheduler does
            scheduler.step()
        position += MICRO * PARTS * len(members)
        losses.append(total)
    return losses, [p.tolist() for p in model.parameters()], scheduler.get_last_lr()


def refused(port: int) -> None:
    """What raises, on each rank by itself."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    dist.init_process_group("ncclguard")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    plain = nn.Linear(WIDTH, 1)
    data: Any = DataLoader(Rows(), batch_size=MICRO)
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(plain, optimizer, data)

    def one(rows: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(rows).square().mean())
            optimizer.step()

    step = resilient_step(accelerator, model, optimizer)(one)
    fails = ng.resilient_step(model, optimizer, on_lost="fail", check_every=1)(one)
    for _ in range(2 * PARTS):
        fails(torch.ones(MICRO, WIDTH))
    sharding = SimpleNamespace(distributed_type="DistributedType.FSDP")
    faults.report(
        plain=told(lambda: ng.resilient_step(model, optimizer)(one)),
        iterating=told(lambda: [step(rows) for rows, _ in data]),
        accumulates=told(lambda: resilient_step(accelerator, model, optimizer, accumulates=True)),
        sharded=told(lambda: resilient_step(sharding, model, optimizer)),
        met=step.group is not None,
        failing=[fails.completed, fails.group is None],
        between=told(
            lambda: resilient_step(accelerator, model, optimizer, loader=ng.ElasticLoader(Rows(), MICRO))(
                lambda batch: one(batch[0])
            )()
        ),
    )
    dist.destroy_process_group()
