"""A training with Ray Train: `ray_train.py RANKS`; prints the last loss."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def train(config: dict[str, str]) -> None:
    """Make some steps of DDP; rank 0 writes its loss."""
    torch.manual_seed(1)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank = ray.train.get_context().get_world_rank()
    inputs = torch.randn(64, 8) + rank
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
    if rank == 0:
        Path(config["folder"], "loss").write_text(f"{float(loss):.6f}")


def main(ranks: str) -> None:
    """Run the training on so many workers of a Ray of this machine's own."""
    ray.init(num_cpus=int(ranks) + 1, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory(prefix="suites-ray-") as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend=os.environ["SUITES_BACKEND"], init_method="tcp"),
            scaling_config=ScalingConfig(num_workers=int(ranks)),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
        print("RESULT", Path(folder, "loss").read_text())
    ray.shutdown()


main(*sys.argv[1:])
