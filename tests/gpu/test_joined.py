"""A joined group of processes without a job in common carries CUDA tensors over NCCL, and has one verdict."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU

pytestmark = NEEDS_GPU

LIMIT = 4.0


def sends(port: int, fault: str) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    group = ng.join(
        f"tcp://127.0.0.1:{port}", name="weights", rank=rank, world_size=3, label=f"engine {rank}", timeout=60
    )
    said: dict[str, Any] = {}
    for version in range(3):
        weights = torch.full((1000,), float(version) if rank == 0 else -1.0, device="cuda")
        if version == 1 and rank == 2:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "late":
                time.sleep(LIMIT + 3)
        outcome = ng.safe_broadcast(weights, src=0, group=group, timeout=60 if version == 0 else LIMIT)
        if version == 1:
            said |= {"cause": "" if outcome.ok else str(outcome.cause), "culprits": outcome.culprits}
        else:
            said[f"version {version}"] = outcome.ok and bool((weights == float(version)).all())
    faults.report(**said)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("fault", "cause"), [("none", ""), ("late", "late"), ("kill", "lost"), ("stop", "stuck")])
def test_weights_arrive_over_nccl_or_the_engine_that_is_to_blame_is_named(fault: str, cause: str) -> None:
    port = 20_000 + 4 * (os.getpid() % 3000) + ["none", "late", "kill", "stop"].index(fault)
    result = faults.run_ranks(sends, 3, args=[port, fault], env=dict(SHARED_GPU), timeout=60)
    for rank in (0, 1):
        said = result[rank].reports
        assert said["version 0"], result
        assert (said["cause"], said["culprits"]) == (cause, [2] if cause else []), result
        assert said["version 2"] is (fault in ("none", "late")), result
