"""A training and an evaluation with transformers' Trainer under torchrun; prints both losses."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same on all ranks."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


set_seed(1)
with tempfile.TemporaryDirectory(prefix="suites-trainer-") as folder:
    options: Any = {"report_to": [], "disable_tqdm": True, "save_strategy": "steps", "save_steps": 4}
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)),
        TrainingArguments(folder, use_cpu=True, max_steps=8, per_device_train_batch_size=4, **options),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        compute_metrics=lambda found: {"rows": len(found.predictions)},
    )
    loss = trainer.train().training_loss
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"RESULT {loss:.6f} {found['eval_loss']:.6f} {found['eval_rows']}")
    dist.destroy_process_group()
