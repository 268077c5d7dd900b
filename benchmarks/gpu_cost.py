"""What looking at values costs on a GPU: a step of training with and without `watch_numerics`, and `check_replicas`.

    torchrun --nproc-per-node 2 benchmarks/gpu_cost.py [--depth 12] [--width 1024] [--rows 8192] [--rounds 10]
    ./scripts/emulated-gpu --gpus 2 torchrun --nproc-per-node 2 benchmarks/gpu_cost.py --depth 2 --width 32 --rows 16

Steps of DDP with AdamW in bfloat16 by autocast, without their all-reduce (`no_sync`), which ranks that share a GPU
send over sockets: their ratio is one of computing alone. Rounds of five steps of either kind take turns, the first of a
round by its number. Ranks that share a GPU need NVIDIA's Multi-Process Service to compute beside each other.
One JSON line: medians of what rank 0 measures, in ms, with the least and the most; bytes are those that are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ncclguard as ng

STEPS = 5  # of one round


class Block(nn.Module):
    """The feed-forward half of a transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def timed(call: Callable[[], Any]) -> float:
    """Return how many ms the call takes, with what it has left to the device."""
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def spread(times: list[float]) -> list[float]:
    return [round(of(times), 2) for of in (statistics.median, min, max)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"depth": 12, "width": 1024, "rows": 8192, "rounds": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"  # ranks that share a GPU look like as many hosts
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(given.width) for _ in range(given.depth))).cuda()
    model = DistributedDataParallel(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(given.rows, given.width, device="cuda")

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with model.no_sync(), torch.autocast("cuda", torch.bfloat16):
                model(data).float().square().mean().backward()
            optimizer.step()

    def watched() -> float:
        numerics = ng.watch_numerics(model)
        try:
            return timed(steps)
        finally:
            numerics.close()

    with torch.autocast("cuda", torch.bfloat16):
        model(data).float().square().mean().backward()  # DDP's own first all-reduce
    timed(steps)
    watched()
    plain, looked = [], []
    for turn in range(given.rounds):
        for of in (plain, looked) if turn % 2 else (looked, plain):
            of.append((timed(steps) if of is plain else watched()) / STEPS)
    for tensor in (*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())):
        dist.broadcast(tensor.data, 0)  # steps without an all-reduce may have made them differ
    assert ng.check_replicas(model, optimizer)
    checks = [timed(lambda: ng.check_replicas(model, optimizer)) for _ in range(given.rounds)]
    compared = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    if dist.get_rank() == 0:
        found = {
            "torch": torch.__version__, "device": torch.cuda.get_device_name(),
            "parameters": sum(p.numel() for p in model.parameters()), "step_ms": spread(plain),
            "watch_numerics_ms": spread(looked),
            "watch_numerics_ratio": round(statistics.median(a / b for a, b in zip(looked, plain, strict=True)), 4),
            "check_replicas_ms": spread(checks), "check_replicas_bytes": compared,
        }  # fmt: skip
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
