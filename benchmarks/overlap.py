"""Communication behind computation on CUDA: torch's "nccl" beside the guarded backends.

    ./scripts/emulated-gpu --gpus 3 torchrun --nproc-per-node 3 benchmarks/overlap.py [KIND ...]
    torchrun --nproc-per-node 2 benchmarks/overlap.py [KIND ...]

Kernels take a time that is given (`torch.cuda._sleep` of 4 to 8 ms). On emulated GPUs links carry 100 MB/s, so that a
step has about as much computation as communication; on real ones tensors are 16 times as large. Ranks that have to
share a GPU reach each other over NCCL's sockets, and need NVIDIA's Multi-Process Service to compute beside each other.
Backends take turns; medians of what rank 0 measures; one JSON line. `mb` is what
the device holds more after the last step than after the first. `resilient` is the step of `ddp` with that of
the optimizer, and with `resilient_step` around it on the guarded backends; there `host_ms` is what the host is held by
issuing before the commit.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ncclguard

EMULATED = "EMULATED_GPUS" in os.environ  # scripts/emulated-gpu sets it
ELEMENTS = 250_000 if EMULATED else 4_000_000  # of each of eight tensors
BUCKET_MB = ELEMENTS * 4 / 1e6
MS = int(1.98e6)  # cycles of a millisecond
BACKENDS = ("nccl", "ncclguard", "ncclguard-nccl")
ROUNDS = 8
Step = Callable[[], float]  # seconds that the host was held by issuing


class Busy(torch.autograd.Function):
    """A layer that takes 4 ms forward and 8 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(4 * MS)
        ctx.size = weight.shape
        return x + 0 * weight.reshape(-1)[:1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch.cuda._sleep(8 * MS)
        return gradient, torch.ones(ctx.size, device=gradient.device)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Busy.apply(x, self.weight)


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(8))).cuda()


def tensors() -> list[torch.Tensor]:
    return [torch.ones(ELEMENTS, device="cuda") for _ in range(8)]


def ddp(group: Any) -> Step:
    model = nn.parallel.DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=BUCKET_MB)

    def step() -> float:
        model.zero_grad()
        model(torch.ones(1, device="cuda")).sum().backward()
        return 0.0

    return step


def fsdp2(group: Any) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = layers(), DeviceMesh.from_group(group, "cuda")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step() -> float:
        model(torch.ones(1, device="cuda")).sum().backward()
        return 0.0

    return step


def asynchronous(group: Any) -> Step:
    """Eight kernels, an asynchronous all-reduce behind each, then eight waits."""
    given = tensors()

    def step() -> float:
        works = []
        for tensor in given:
            torch.cuda._sleep(8 * MS)
            works.append(dist.all_reduce(tensor, group=group, async_op=True))
        for work in works:
            work.wait()
        return 0.0

    return step


def behind(group: Any) -> Step:
    """Eight all-reduces issued behind a kernel of 100 ms."""
    given = tensors()

    def step() -> float:
        torch.cuda._sleep(100 * MS)
        began = time.perf_counter()
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in given]
        held = time.perf_counter() - began
        for work in works:
            work.wait()
        return held

    return step


def messages(group: Any) -> Step:
    """A kernel, and the activations to the next rank while the next kernel runs: a pipeline's steady state."""
    given, received = tensors(), tensors()
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def step() -> float:
        works: list[Any] = []
        for out, into in zip(given, received, strict=True):
            torch.cuda._sleep(8 * MS)
            works += dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % size),
                    dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % size),
                ]
            )
        for work in works:
            work.wait()
        return 0.0

    return step


def one_f_one_b(group: Any) -> Step:
    """Four micro-batches, a stage on each rank: forwards until the pipeline is full, then one of each in turn."""
    rank, size, count = dist.get_rank(group), dist.get_world_size(group), 4
    activation, received = (torch.ones(ELEMENTS // 2, device="cuda") for _ in range(2))
    gradient, returned = (torch.ones(ELEMENTS // 2, device="cuda") for _ in range(2))

    def exchange(*operations: Any) -> None:
        given = [dist.P2POp(call, tensor, group=group, group_peer=peer) for call, tensor, peer in operations]
        for work in dist.batch_isend_irecv(given) if given else ():
            work.wait()

    first, last = rank == 0, rank == size - 1

    def forward(*more: Any) -> None:
        exchange(*more, *(() if first else ((dist.irecv, received, rank - 1),)))
        torch.cuda._sleep(4 * MS)

    def backward(*more: Any) -> None:
        exchange(*more, *(() if last else ((dist.irecv, returned, rank + 1),)))
        torch.cuda._sleep(8 * MS)

    def step() -> float:
        ahead = min(size - rank - 1, count)
        down = () if last else ((dist.isend, activation, rank + 1),)
        up = () if first else ((dist.isend, gradient, rank - 1),)
        for _ in range(ahead):
            forward()
            exchange(*down)
        for number in range(count - ahead):
            forward()
            backward(*down)
            if number < count - ahead - 1:
                exchange(*up)
        for _ in range(ahead):
            exchange(*up)
            backward()
        exchange(*up)
        return 0.0

    return step


def tensor_parallel(group: Any) -> Step:
    """Four pairs of a column-wise and a row-wise linear layer of DTensor: an all-reduce in each direction."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(96, 96), nn.Linear(96, 96)
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Busy.apply(self.down(self.up(x)), self.weight)

    mesh = DeviceMesh.from_group(group, "cuda")
    model = nn.Sequential(*(Pair() for _ in range(4))).cuda()
    for pair in model:
        parallelize_module(pair, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    given = torch.ones(512, 96, device="cuda", requires_grad=True)

    def step() -> float:
        model(given).sum().backward()
        return 0.0

    return step


def captured(group: Any) -> Step:
    """Replays a graph of eight kernels, with an all-reduce behind each."""
    given, graph = tensors(), torch.cuda.CUDAGraph()
    dist.all_reduce(given[0], group=group)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for tensor in given:
            torch.cuda._sleep(4 * MS)
            dist.all_reduce(tensor, group=group)

    def step() -> float:
        graph.replay()
        return 0.0

    return step


def resilient(group: Any) -> Step:
    """A step of DDP with SGD, which returns for how long the host was held before that of the optimizer."""
    model = nn.parallel.DistributedDataParallel(layers(), process_group=group, bucket_cap_mb=BUCKET_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = [0.0]

    def one() -> None:
        optimizer.zero_grad()
        began = time.perf_counter()
        model(torch.ones(1, device="cuda")).sum().backward()
        held[0] = time.perf_counter() - began
        optimizer.step()

    run = one if dist.get_backend(group) == "nccl" else ncclguard.resilient_step(model, optimizer, group=group)(one)

    def step() -> float:
        run()
        return held[0]

    return step


KINDS = {"ddp": ddp, "fsdp2": fsdp2, "asynchronous": asynchronous, "behind": behind, "messages": messages,
         "1f1b": one_f_one_b, "tensor parallel": tensor_parallel, "captured": captured, "resilient": resilient}  # fmt: skip
#: A sender and a receiver of the staged backend are two collectives, one behind the other: a ring of them waits. It
#: refuses a capture.
LEFT_OUT = {("messages", "ncclguard"), ("1f1b", "ncclguard"), ("captured", "ncclguard")}


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def limit_links(mb_per_second: int) -> None:
    if EMULATED:
        import emulated_gpu

        emulated_gpu.set("EMULATED_NCCL_LINK_MBPS", mb_per_second)


def main() -> None:
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"ncclguard-{os.environ['RANK']}"  # ranks that share a GPU look like as many hosts
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    groups = {name: dist.new_group(backend=name, timeout=timedelta(seconds=60)) for name in BACKENDS}
    found: dict[str, Any] = {}
    for kind in sys.argv[1:] or KINDS:
        make = KINDS[kind]
        steps = {name: make(group) for name, group in groups.items() if (kind, name) not in LEFT_OUT}
        limit_links(0)
        for step in steps.values():
            step()
            torch.cuda.synchronize()
        more = dict.fromkeys(steps, 0)
        limit_links(100)
        took: dict[str, list[float]] = {name: [] for name in steps}
        held: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                dist.barrier(group=groups["nccl"])
                torch.cuda.synchronize()
                before, began = used(), time.perf_counter()
                held[name].append(step())
                torch.cuda.synchronize()
                took[name].append(time.perf_counter() - began)
                more[name] += used() - before
        medians = {name: statistics.median(times) for name, times in took.items()}
        found[kind] = {
            name: {
                "ms": round(1e3 * seconds, 1),
                "ratio": round(seconds / medians["nccl"], 3),
                "host_ms": round(1e3 * statistics.median(held[name]), 2),
                "mb": round(more[name] / 1e6, 1),
            }
            for name, seconds in medians.items()
        }
    if dist.get_rank() == 0:
        print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), **found}), flush=True)
    dist.barrier(group=groups["nccl"])
    os._exit(0)


if __name__ == "__main__":
    main()
