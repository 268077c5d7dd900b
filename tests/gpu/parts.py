"""What the ranks of the NCCL tests share. Several of them use one GPU."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule

from ncclguard import faults, torch_compat
from ncclguard.transport.base import Pending, TransportError
from ncclguard.transport.nccl import NcclBuilder, NcclCommunicator

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs an NVIDIA GPU and torch with NCCL"
    ),
]

#: scripts/emulated-gpu sets it.
EMULATED = "EMULATED_GPUS" in os.environ
NEEDS_EMULATED = pytest.mark.skipif(not EMULATED, reason="needs the emulated GPU, whose faults can be chosen")

MOVES_SHARDS = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="resilient_step moves shards of FSDP2 from torch 2.13 on"
)

# Several ranks on one GPU look like as many hosts to NCCL (init.cc compares host hash and bus id), and use its sockets.
SHARED_GPU = {
    "NCCLGUARD_AUTOSTART": "0",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}

#: The backends of NCCL: "nccl" is the default one of this torch, "nccl-lazy" came with 2.15.
NCCL_BACKENDS = ["nccl", "nccl-lazy"] if hasattr(dist, "ProcessGroupNCCLLazy") else ["nccl"]

DEVICE = torch.device("cuda", 0)


def emulate(name: str, value: object) -> None:
    """Set one of the emulator's variables in this process."""
    import emulated_gpu

    emulated_gpu.set(name, value)


def hang_device(x: torch.Tensor, *, beside_capture: bool = False) -> None:
    """Have a kernel hang on the current stream: on an emulated GPU for ever, on a real one for a minute."""
    if not beside_capture:  # which begins behind such a first use: nothing may wait for the device in it
        x.mul_(1.0)  # its first use loads it, for which CUDA waits for the device
        torch.cuda.synchronize()
    if EMULATED:
        emulate("EMULATED_CUDA_ENDLESS_KERNEL_AT", 1)
    else:
        torch.cuda._sleep(int(1.2e11))
    x.mul_(1.0)


def share_gpu() -> None:
    """Have NCCL take this rank for one on a host of its own, before its first communicator."""
    os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"


def join(backend: str = "gloo", limit: float = 120.0) -> int:
    share_gpu()
    torch.cuda.set_device(0)
    dist.init_process_group(backend, timeout=timedelta(seconds=limit))
    return dist.get_rank()


def leave() -> NoReturn:
    """End without destroying the groups, which may wait for a peer that is gone; in `run_together`, after all others.

    The end of a process whose collective is complete can break it for who is not as far: NCCL sends from its threads.
    """
    faults.report(done=True)
    faults.wait_until_told("end", seconds=300)
    os._exit(0)


def run_together(
    program: Callable[..., object],
    size: int,
    *,
    args: Sequence[object] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
) -> faults.JobResult:
    """As `faults.run_ranks`; a rank in `leave` stays until each of the others has come to that too, or has ended."""
    with faults.start_ranks(program, size, args=args, env=env, timeout=timeout) as job:
        for rank in range(size):
            with contextlib.suppress(faults.RanksFailed):
                job.wait_for("done", [rank], seconds=timeout)
        job.tell("end")
        return job.wait()


def nccl2() -> bool:
    """Whether "nccl" is the backend of that name that came with torch 2.15."""
    return hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2", "1") != "0"


def build(generation: int, seconds: float = 60.0) -> NcclCommunicator:
    store = torch_compat.clone_store(torch_compat.default_store())
    ranks = tuple(range(dist.get_world_size()))
    prefix = f"transport/{generation}"
    return NcclBuilder(DEVICE).build(store, prefix, ranks, dist.get_rank(), generation, seconds)


def finish(pending: Pending, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not pending.wait(0.1):
        if time.monotonic() > end:
            raise AssertionError(f"not complete after {seconds} s")


def build_again(seconds: float = 60.0) -> None:
    """The next generation works: reports the sum of one over all ranks as ``again``."""
    communicator = build(2, seconds)
    tensor = torch.ones(1, device="cuda")
    finish(communicator.all_reduce(tensor, ReduceOp.SUM))
    faults.report(again=float(tensor))
    communicator.close()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except TransportError as error:
        return str(error)
    return ""
