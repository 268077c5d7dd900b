"""Plain DDP: torchrun --nproc_per_node 2 examples/train_ddp.py --fault oom"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import Classifier, Fault, Images, arguments, counted, device
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ncclguard as ng

options = arguments()
ng.setup_env()
place = device()
dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
rank = dist.get_rank()


class Trainer:
    """A training loop as many have it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(Classifier().to(place))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        data = Images(2048, seed=rank)
        self.train_loader = DataLoader(data, batch_size=16, shuffle=True)
        held_out = Images(256, seed=999)
        self.eval_loader = DataLoader(held_out, batch_size=32, sampler=DistributedSampler(held_out, shuffle=False))
        self.fault = Fault(options.fault, options.timeout)

    def train(self) -> None:
        for step, batch in zip(range(1, options.steps + 1), self.train_loader, strict=False):
            self.model.train()
            loss = self.model(**{name: value.to(place) for name, value in batch.items()})["loss"]
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 10 == 0:
                accuracy, _ = self.evaluate(step)
                if rank == 0:
                    print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy:.3f}", flush=True)

    # This line is all that ncclguard needs.
    @ng.resilient_evaluate(timeout=options.timeout, barrier_timeout=options.timeout, batch_size="eval_loader")
    @torch.no_grad()
    def evaluate(self, step: int | None = None) -> tuple[float, float]:
        """Accuracy over all ranks, and how many images were seen."""
        self.model.eval()
        counts = counted(self.model, self.eval_loader, place, self.fault)
        dist.all_reduce(counts)
        return float(counts[0] / counts[1]), float(counts[1])


Trainer().train()
dist.destroy_process_group()
