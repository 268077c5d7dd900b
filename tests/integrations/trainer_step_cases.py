"""A real `transformers.Trainer` that goes on when ranks are killed, and the same training in one process."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import torch
import torch.distributed as dist
from ncclguard.integrations.transformers import ResilientEvaluation, ResilientTraining, patch_trainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import ncclguard as ng
from ncclguard import faults

warnings.filterwarnings("ignore", category=FutureWarning)
SIZE, STEPS, MICRO, PARTS, SAMPLES, LENGTH, HELD_OUT, EVALUATED = 4, 8, 2, 2, 60, 6, 21, 3
#: Rank, step, moment.
Kill = tuple[int, int, str]
BEFORE = ("count", "forward", "second", "backward")  # the step's resilient part is not over: it is done again
MOMENTS = (*BEFORE, "optimizer", "behind", "evaluation", "saving")


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences whose first tokens do not count, more or fewer of them; `asked` are those that were asked for."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.tokens = torch.randint(0, 32, (count, LENGTH), generator=generator)
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked.append(index)
        labels = self.tokens[index].clone()
        labels[: 1 + index % 4] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def make() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape))


class Strikes:
    """Kills its rank at one moment of one step."""

    mine: Any = ()
    parts = 0

    def strike(self, moment: str, step: int) -> None:
        if (step, moment) in self.mine:
            os.kill(os.getpid(), signal.SIGKILL)

    def _get_num_items_in_batch(self: Any, batch_samples: Any, device: Any) -> Any:
        if len(batch_samples) == PARTS and batch_samples[0]:  # a step's own, and not one of an evaluation
            self.strike("count", self.state.global_step)
            self.parts = 0
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            self.strike(("forward", "second")[self.parts], self.state.global_step)
            self.parts += 1
        return super().compute_loss(*args, **kwargs)  # type: ignore[misc]

    def _save_rng_state(self: Any, output_dir: str) -> None:
        self.strike("saving", self.state.global_step - 1)
        super()._save_rng_state(output_dir)  # type: ignore[misc]


class Striking(Strikes, ResilientTraining, Trainer):  # type: ignore[misc]
    """Goes on."""


class Around(Strikes, ResilientEvaluation, ResilientTraining, Trainer):  # type: ignore[misc]
    """Has evaluations that survive, around the steps."""


class Inside(Strikes, ResilientTraining, ResilientEvaluation, Trainer):  # type: ignore[misc]
    """Has them inside a step."""


KINDS = {kind.__name__: kind for kind in (Striking, Around, Inside)}


class Telling(TrainerCallback):  # type: ignore[misc]
    """Tells of each step, and strikes where callbacks are called."""

    def __init__(self, trainer: Striking) -> None:
        self.trainer = trainer
        self.predictions = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.strike("optimizer", state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.strike("behind", state.global_step - 1)
        self.predictions = 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.predictions += 1
        if self.predictions == 2:
            self.trainer.strike("evaluation", state.global_step - 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        step = state.global_step - 1
        if "loss" in logs:
            values = [logs["loss"], logs["learning_rate"], self.trainer._loader.position, args.world_size]
            faults.report(**{f"step {step}": values})
        if "eval_loss" in logs:
            faults.report(**{f"evaluated {step}": [logs["eval_loss"], args.world_size]})


def trainer(folder: str, kind: type[Any] = Striking, **options: Any) -> Any:
    given = {
        "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": PARTS, "per_device_eval_batch_size": EVALUATED,
        "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 1, "eval_strategy": "steps",
        "eval_steps": 1, "report_to": [], "use_cpu": True, "seed": 7, "weight_decay": 0.01, **options,
    }  # fmt: skip
    made = kind(make(), TrainingArguments(folder, **given), train_dataset=Rows(SAMPLES), eval_dataset=Rows(HELD_OUT))
    made.add_callback(Telling(made))
    return made


def join(port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    torch.set_num_threads(1)
    dist.init_process_group("ncclguard")


def train(kills: list[Kill], port: int, folder: str, resume: bool, kind: str) -> None:
    """Two micro-batches a step, an evaluation and a checkpoint after each."""
    join(port)
    made = trainer(folder, KINDS.get(kind, Striking))
    if kind == "patched":
        patch_trainer(made)
    made.mine = [tuple(kill[1:]) for kill in kills if kill[0] == dist.get_rank()]
    made.model.model.layers[0].mlp.up_proj.weight.register_hook(
        lambda _: made.strike("backward", made.state.global_step)
    )
    made.train(resume_from_checkpoint=resume)
    faults.report(
        end=[
            made.args.world_size,
            made.args.process_index,
            made.state.is_world_process_zero,
            made.state.is_local_process_zero,  # without which no line of a loss is printed
            made.args.should_save,
        ],
        parameters=[p.flatten().tolist() for p in made.model.parameters()],
        callbacks=sorted(type(each).__name__ for each in made.callback_handler.callbacks),
        flos=made.state.total_flos,
    )
    dist.destroy_process_group()


def undisturbed(ranks: list[list[int]]) -> tuple[list[float], list[dict[int, float]], list[list[float]]]:
    """Plain torch in one process, with all rows of these ranks in one batch.

    Returns the losses; those evaluated by each number of ranks, which deals the padding out; the parameters.
    """
    model, rows, held_out = make(), Rows(SAMPLES), Rows(HELD_OUT)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0}], 1e-2
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    loader, losses, evaluated = ng.ElasticLoader(rows, 1, seed=7), [], []
    for members in ranks:
        count = MICRO * PARTS * len(members)
        total, counted = _loss(model, rows, loader.indices(loader.position, count))
        (total / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loader.position += count
        losses.append(total.item() / counted)
        evaluated.append({number: _evaluated(model, held_out, number) for number in range(1, SIZE + 1)})
    return losses, evaluated, [p.flatten().tolist() for p in model.parameters()]


def _loss(model: Any, rows: Rows, indices: list[int]) -> tuple[torch.Tensor, int]:
    """The sum over the tokens that count, and their number."""
    batch = [rows[index] for index in indices]
    labels = torch.stack([row["labels"] for row in batch])
    counted = int((labels[:, 1:] != -100).sum())
    inputs = torch.stack([row["input_ids"] for row in batch])
    return model(input_ids=inputs, labels=labels).loss * counted, counted


def _evaluated(model: Any, rows: Rows, ranks: int) -> float:
    """As the Trainer does it: a batch for each rank, from the beginning again at the end; each by the tokens of all."""
    batches = HELD_OUT // EVALUATED
    found: list[float] = []
    with torch.no_grad():
        while len(found) < batches:
            of = [(len(found) + place) % batches * EVALUATED for place in range(ranks)]
            sums = [_loss(model, rows, [*range(at, at + EVALUATED)]) for at in of]
            counted = sum(number for _, number in sums)
            found += [float(total) * ranks / counted for total, _ in sums]
    return sum(found[:batches]) / batches


def told(call: Any) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - which is what a test is about
        return f"{type(error).__name__}: {error}"


def refused(port: int, folder: str) -> None:
    """What raises, on each rank by itself."""
    join(port)
    found = {}
    for name, options in {
        "lengths": {"train_sampling_strategy": "group_by_length"},
        "tokens": {"include_num_input_tokens_seen": "all"},
    }.items():
        found[name] = told(trainer(folder, **options).train)
    made = trainer(folder)
    os.environ["NCCLGUARD_JOINS"] = "1"
    found["joins"] = told(made.train)
    faults.report(**found, made=Path(folder).exists())
    del os.environ["NCCLGUARD_JOINS"]
    dist.destroy_process_group()
