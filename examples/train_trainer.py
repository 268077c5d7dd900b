"""transformers.Trainer: torchrun --nproc_per_node 2 examples/train_trainer.py --fault metric"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from common import Classifier, Fault, Images, arguments
from ncclguard.integrations.transformers import ResilientEvaluation
from transformers import EvalPrediction, Trainer, TrainingArguments

import ncclguard as ng

options = arguments()
ng.setup_env()
fault = Fault(options.fault, options.timeout)


class MyTrainer(ResilientEvaluation, Trainer):  # type: ignore[misc]
    """The mixin is all that ncclguard needs."""

    evaluation_options = {"timeout": options.timeout, "barrier_timeout": options.timeout}  # noqa: RUF012


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    fault.strike()
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    trainer = MyTrainer(
        Classifier(),
        TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=32,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=10,
            save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Images(2048, seed=1),
        eval_dataset=Images(256, seed=999),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
