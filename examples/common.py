"""A tiny classifier, generated images, and an evaluation that fails on purpose: what the examples share."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import Dataset

CLASSES = 4


class Images(Dataset[dict[str, torch.Tensor]]):
    """Noise with a bright quarter; the label says which quarter."""

    def __init__(self, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (length,), generator=generator)
        self.images = torch.randn(length, 3, 16, 16, generator=generator)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            top, left = 8 * (label // 2), 8 * (label % 2)
            image[:, top : top + 8, left : left + 8] += 1.0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """Two convolutions and a head; returns loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, CLASSES),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def arguments() -> argparse.Namespace:
    """What all examples take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=("none", "oom", "metric", "late"), default="none")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds of one collective in an evaluation")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    return parser.parse_args()


class Fault:
    """Strikes in the second evaluation, on the last rank."""

    def __init__(self, name: str, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self.last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        self.evaluations = 0

    def strike(self) -> None:
        """Called in the middle of each evaluation."""
        self.evaluations += 1
        if not self.last or self.evaluations < 2 or self.name == "none":
            return
        if self.name == "late" and self.evaluations == 2:
            time.sleep(2 * self.timeout + 1)
        if self.name == "oom" and self.evaluations == 2:  # smaller batches will do
            raise torch.OutOfMemoryError("out of memory on purpose")
        if self.name == "metric" and self.evaluations == 2:  # each try would raise it, so there is one
            raise KeyError("f1")


def counted(
    model: nn.Module, batches: Iterable[dict[str, torch.Tensor]], place: torch.device, fault: Fault
) -> torch.Tensor:
    """How many images this rank's model sees rightly, and how many there are: float32[2]."""
    counts = torch.zeros(2, device=place)
    for number, batch in enumerate(batches):
        if number == 1:
            fault.strike()
        batch = {name: value.to(place) for name, value in batch.items()}
        right = model(**batch)["logits"].argmax(-1) == batch["labels"]
        counts += torch.tensor([float(right.sum()), float(len(right))], device=place)
    return counts


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())
