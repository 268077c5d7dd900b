"""A training with Lightning's Trainer, for two epochs: `lightning_trainer.py STRATEGY RANKS`; prints the last loss."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def configure_model(self) -> None:
        """Shard the layers where the strategy asks for it."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss of a batch, as the mean of all ranks in the log."""
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the same steps on all ranks."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main(strategy: str, ranks: str) -> None:
    """Train, and print what all ranks have come to."""
    L.seed_everything(1)
    inputs = torch.randn(256, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
    chosen: Any = {"ddp": DDPStrategy, "fsdp2": ModelParallelStrategy}[strategy]
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu", devices=int(ranks), strategy=chosen(process_group_backend="gloo"), max_epochs=2, **quiet
    )
    trainer.fit(Model(), data)
    if trainer.is_global_zero:
        print(f"RESULT {float(trainer.callback_metrics['loss_epoch']):.6f}")


main(*sys.argv[1:])
