"""Training with a real `transformers.Trainer` whose evaluations fail; run by test_transformers.py."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
from ncclguard.integrations.transformers import ResilientEvaluation, SurvivingEvaluation
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from ncclguard import faults
from tests.integrations.evaluation_parts import (
    CONNECTED_WITHIN,
    CULPRIT,
    GIVEN_UP,
    TIMEOUT,
    Fault,
    Model,
    attempt,
    start_together,
    summary,
)

warnings.filterwarnings("ignore", category=FutureWarning)
OPTIONS = {"timeout": TIMEOUT, "barrier_timeout": TIMEOUT, "max_attempts": 2}


class Regression(nn.Module):
    """The model with a loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.inner(inputs)[:, 0]
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random points."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, 16, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum()}


class Guarded(ResilientEvaluation, Trainer):  # type: ignore[misc]
    """The mixin at work; its evaluation strikes a fault from a list, one after the other."""

    evaluation_options = OPTIONS

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return _next_fault(self, super().evaluate, args, kwargs)


class Control(Trainer):  # type: ignore[misc]
    """Calls the evaluations that will succeed, which draw random numbers for their dataloader, and none of the others."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        name = self.names.pop(0) if self.names else "end"
        return {} if name in GIVEN_UP else super().evaluate(*args, **kwargs)


class Careless(Trainer):  # type: ignore[misc]
    """No guard: an evaluation that fails is caught by the program itself."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        if self.names:
            attempt(self.fault, self.names.pop(0), lambda: super(Careless, self).evaluate(*args, **kwargs))
        return {}


def _next_fault(trainer: Any, evaluate: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = trainer.names.pop(0) if trainer.names else "end"  # the Trainer also evaluates after its last step
    trainer.fault.begin(name)
    if name == "skip" and dist.get_rank() == CULPRIT:
        return {"eval_loss": float("nan"), "eval_mae": float("nan")}
    started = time.monotonic()
    metrics = evaluate(*args, **kwargs)
    report = vars(trainer)["_ncclguard_guards"]["evaluate"].report
    metrics = {key: value for key, value in metrics.items() if "per_second" not in key and "runtime" not in key}
    trainer.seen[name] = summary(report, time.monotonic() - started) | {"metrics": metrics}
    return metrics


class Counting(TrainerCallback):  # type: ignore[misc]
    """Tells the fault where evaluation is, and keeps the losses."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.losses: list[float] = []
        self.failed = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])
        self.failed += "eval_evaluation_failed" in logs


def trainer(kind: type[Trainer], folder: str, names: list[str], zero: int | None = None, **options: Any) -> Any:
    """A trainer that evaluates after every second step."""
    torch.manual_seed(7)
    model = Regression()
    fault = model.inner.blocks[1].fault = Fault()
    if zero is not None:
        options["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_steps=2 * len(names) + 1,
        eval_strategy="steps" if names else "no",
        eval_steps=2,
        logging_steps=1,
        use_cpu=True,
        seed=3,
        report_to=options.pop("report_to", []),
        disable_tqdm=True,
        **({"save_strategy": "no"} | options),
    )

    def metrics(prediction: Any) -> dict[str, float]:
        fault.in_metrics()
        return {"mae": float(np.abs(prediction.predictions - prediction.label_ids).mean())}

    made = kind(model, arguments, train_dataset=Data(256, 1), eval_dataset=Data(48, 2), compute_metrics=metrics)
    made.fault, made.names, made.seen = fault, list(names), {}
    made.counting = Counting(fault)
    made.add_callback(made.counting)
    original = made.evaluation_loop

    def evaluation_loop(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        fault.next_try()
        if fault.mine and fault.name == "batches":
            dataloader = _Short(dataloader)
        return original(dataloader, *args, **kwargs)

    made.evaluation_loop = evaluation_loop
    return made


class _Short:
    """A loader that ends early on one rank."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset, self.batch_size = loader, loader.dataset, loader.batch_size

    def __iter__(self) -> Any:
        return iter([next(iter(self.loader))])

    def __len__(self) -> int:
        return 1


def guarded(names: list[str], zero: int | None) -> None:
    """The same training twice: with the evaluations that fail, and with all the others only."""
    with tempfile.TemporaryDirectory() as folder:
        control = trainer(Control, folder, names, zero)
        control.train()
        made = trainer(Guarded, folder, names, zero)
        made.train()
        faults.report(
            control=control.counting.losses, losses=made.counting.losses, failed=made.counting.failed, **made.seen
        )
        dist.barrier()


def stopping(folder: str) -> None:
    """Best-model selection and early stopping through a failed evaluation, with the callback; metrics offline to W&B."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": folder, "WANDB_SILENT": "true"}
    made = trainer(
        Trainer, folder, ["none"] * 6, report_to=["wandb"] if _has_wandb() else [], load_best_model_at_end=True,
        metric_for_best_model="mae", greater_is_better=False, save_strategy="best", learning_rate=0.0,
    )  # fmt: skip
    made.add_callback(EarlyStoppingCallback(2))
    made.add_callback(SurvivingEvaluation(made, **OPTIONS))
    strikes = iter(["none", "metric", "none", "none", "none", "none"])
    evaluate, found = made.evaluate, []

    def next_evaluation(*args: Any, **kwargs: Any) -> Any:
        made.fault.begin(next(strikes))
        metrics = evaluate(*args, **kwargs)
        found.append([metrics.get("eval_evaluation_failed", 0.0), metrics["eval_mae"] == metrics["eval_mae"]])
        return metrics

    made.evaluate = next_evaluation
    made.train()
    made.fault.begin("none")
    predicted = made.predict(Data(16, 5)).predictions.shape
    faults.report(
        steps=made.state.global_step, best=made.state.best_metric, found=found, predicted=list(predicted),
        history=[entry for entry in made.state.log_history if "eval_evaluation_failed" in entry],
        saved=Path(made.state.best_model_checkpoint or "").name,
        wandb=[path.name for path in Path(folder).rglob("*.wandb")],
    )  # fmt: skip
    dist.barrier()


def partial() -> None:
    """Two data sets; the metric code raises in the second."""
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(Trainer, folder, [])
        SurvivingEvaluation(made, max_attempts=2)
        sets = itertools.cycle([lambda prediction: {"mae": 1.0}, lambda prediction: {}["f1"]])
        made.compute_metrics = lambda prediction: next(sets)(prediction)
        metrics = made.evaluate(eval_dataset={"first": Data(8, 1), "second": Data(8, 2)})
        faults.report(metrics={name: value for name, value in metrics.items() if "mae" in name or "evaluation" in name})


def _has_wandb() -> bool:
    import importlib.util

    return importlib.util.find_spec("wandb") is not None


def unguarded(name: str) -> None:
    """Two steps of training, an evaluation with the fault, one more step; plain gloo with a short limit."""
    start_together()
    # The Trainer's ddp_timeout is not for CPUs.
    dist.init_process_group("gloo", timeout=timedelta(seconds=CONNECTED_WITHIN))
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(Careless, folder, [name])
        made.train()
        faults.report(losses=made.counting.losses)
