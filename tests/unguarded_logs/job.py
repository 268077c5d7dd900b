"""A plain NCCL job in which one rank is struck by a fault: what `record.py` runs, one process a rank.

Nothing of ncclguard watches it; its faults only are used. Arguments: the backend, the fault, and the rank that is struck.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ncclguard.faults import injection

LIMIT = 6.0  # seconds of the process group
STRUCK_STEP = 4
STEPS = 8


def load_batch(fault: str) -> None:
    """Where the struck rank is when the fault begins."""
    if fault == "late":
        time.sleep(10_000)  # the recorder ends it
    elif fault == "late-then-comes":
        time.sleep(LIMIT + 3.0)  # its peers have given up by then
    elif fault == "kill":
        injection.kill(0)
    elif fault == "stop":
        injection.stop(None)
    elif fault == "gil":
        injection.hold_gil(10_000)
    elif fault == "exception":
        raise ValueError("could not decode sample 1184: unexpected end of file")
    elif fault == "oom":
        torch.empty(200 * 2**30, dtype=torch.uint8, device="cuda")
    elif fault == "exit":
        sys.exit(0)
    elif fault == "reset":
        injection.reset_own_connections()
    elif fault == "partition":
        injection.cut_off(10_000)


def gradients(fault: str, struck: bool) -> torch.Tensor:
    if struck and fault == "mismatch-shape":
        return torch.ones(999, device="cuda")
    if struck and fault == "mismatch-dtype":
        return torch.ones(1000, device="cuda", dtype=torch.float64)
    return torch.ones(1000, device="cuda")


def train(fault: str, struck_rank: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parameters = torch.zeros(1000, device="cuda")
    dist.broadcast(parameters, 0)
    for step in range(STEPS):
        struck = rank == struck_rank and step == STRUCK_STEP
        if struck:
            load_batch(fault)
        gradient = gradients(fault, struck)
        if not (struck and fault == "skip"):
            dist.all_reduce(gradient)
        if struck and fault == "extra":
            dist.all_reduce(gradient)
        losses = [torch.empty(1, device="cuda") for _ in range(size)]
        dist.all_gather(losses, gradient[:1].float())
        parameters -= 0.01 * gradient.mean().float()
        print(f"rank {rank} step {step} loss {float(sum(losses)):.4f}", flush=True)
        time.sleep(0.2)


def main() -> None:
    backend, fault, struck_rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT))
    train(fault, struck_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
