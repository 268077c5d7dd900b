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
from ncclguard.weights import Receiver, Sender
from tests.gpu.parts import NEEDS_GPU, SHARED_GPU, share_gpu

pytestmark = NEEDS_GPU

LIMIT = 4.0


def sends(port: int, fault: str) -> None:
    rank = int(os.environ["RANK"])
    share_gpu()
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


def channel(port: int) -> None:
    rank = int(os.environ["RANK"])
    share_gpu()
    torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{port}"
    if rank == 0:
        with Sender(address, timeout=60, bucket_mb=1.0, device="cuda") as sender:
            sender.wait_for(2, within=60)
            for version in range(3):
                state = {f"layer{n}": torch.full((200_000,), float(version), device="cuda") for n in range(3)}
                published = sender.publish(state, version)
                faults.report(**{f"version {version}": published.engines})
        return
    with Receiver(address, engine=f"engine {rank}") as receiver:
        for _ in range(4):  # one comes twice to who is left
            update = receiver.next(timeout=60)
            assert update is not None
            staged = dict(update)
            if rank == 2 and update.version == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if update.commit():
                right = all(each.is_cuda and bool((each == float(update.version)).all()) for each in staged.values())
                faults.report(**{f"version {update.version}": right and len(staged) == 3})
            if update.version == 2:
                break


def test_versions_of_weights_on_the_gpu_go_on_without_an_engine_that_is_killed() -> None:
    result = faults.run_ranks(channel, 3, args=[10_000 + os.getpid() % 9000], env=dict(SHARED_GPU), timeout=100)
    both, one = ["engine 1", "engine 2"], ["engine 1"]
    assert result[0].reports == {"version 0": both, "version 1": one, "version 2": one}, result
    assert result[1].reports == {"version 0": True, "version 1": True, "version 2": True}, result
