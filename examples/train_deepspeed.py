"""DeepSpeed ZeRO-3: torchrun --nproc_per_node 2 examples/train_deepspeed.py --fault late (or the deepspeed launcher)"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import ncclguard as ng

limits = ng.setup_env().limits  # before deepspeed, which reads variables when it is imported

import deepspeed
import torch.distributed as dist
from common import Classifier, Fault, Images, arguments, counted, device
from ncclguard.integrations.deepspeed import patch_trainer
from torch.utils.data import DataLoader

options = arguments()
place = device()
deepspeed.init_distributed(
    "nccl" if place.type == "cuda" else "gloo", verbose=False, timeout=limits.process_group_timeout
)
rank = dist.get_rank()
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


class Monitor:
    """Prints; in a real training wandb.log or the like."""

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
        print(f"step {step}: {metrics}", flush=True)


class Trainer:
    """The usual shape: a model (the engine), a monitor, evaluate(step)."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
        self.train_loader = DataLoader(Images(2048, seed=rank), batch_size=16, shuffle=True)
        self.eval_loader = DataLoader(Images(128, seed=999 + rank), batch_size=32)
        self.monitor = Monitor()
        self.fault = Fault(options.fault, options.timeout)

    def train(self) -> None:
        for step, batch in zip(range(1, options.steps + 1), self.train_loader, strict=False):
            self.model.train()
            loss = self.model(**{name: value.to(place) for name, value in batch.items()})["loss"]
            self.model.backward(loss)
            self.model.step()
            if step % 10 == 0:
                accuracy, _ = self.evaluate(step)
                if rank == 0:
                    print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)

    @torch.no_grad()
    def evaluate(self, step: int | None = None) -> tuple[float, float]:
        """Accuracy over all ranks, and how many images were seen."""
        self.model.eval()
        counts = counted(self.model, self.eval_loader, place, self.fault)
        deepspeed.comm.all_reduce(counts)
        return float(counts[0] / counts[1]), float(counts[1])


trainer = Trainer()
# This line is all that ncclguard needs.
patch_trainer(trainer, timeout=options.timeout, barrier_timeout=options.timeout, batch_size="eval_loader")
trainer.train()
dist.destroy_process_group()
