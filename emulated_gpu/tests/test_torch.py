"""torch on the emulator: operations in the order of streams, autograd, graphs, process groups, and its name."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, check, run

RECENT = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: torch 2.15 has a new backend under the name "nccl", and the old one beside it.
BACKENDS = ["nccl", "nccl-legacy", "nccl-lazy"] if RECENT >= (2, 15) else ["nccl"]


def names(_: Rank) -> list[Any]:
    return [
        torch.cuda.is_available(),
        torch.cuda.device_count(),
        torch.cuda.get_device_name(),
        torch.cuda.get_device_properties(0).name,
    ]


def test_a_process_can_tell_that_its_gpu_is_emulated() -> None:
    """Nobody may take what runs here for a run on a GPU."""
    assert check(run(names, 1, settings={"EMULATED_GPUS": 2})) == [[True, 2, "emulated GPU", "emulated GPU"]]


def knob_of_a_running_process(_: Rank) -> str:
    import emulated_gpu

    emulated_gpu.set("EMULATED_CUDA_OUT_OF_MEMORY_AT", 1)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 20, device="cuda")
    emulated_gpu.set("EMULATED_CUDA_OUT_OF_MEMORY_AT", 0)
    with pytest.raises(ValueError, match="no setting"):
        emulated_gpu.set("EMULATED_NONSENSE", 1)
    return str(torch.ones(2, device="cuda").tolist())


def test_a_running_process_can_set_a_fault() -> None:
    """emulated_gpu.set, and torch's own out-of-memory error; what follows works."""
    assert check(run(knob_of_a_running_process, 1)) == ["[1.0, 1.0]"]


def stream_order(_: Rank) -> list[Any]:
    one = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(int(4e8))  # 0.2 s
        y = (x * 3).cumsum(0)
        x.add_(1)
        pending = not one.query()
    one.synchronize()
    return [pending, y.tolist(), x.tolist()]


def test_operations_wait_for_their_stream() -> None:
    """In place and with new results; the shapes are known before the values."""
    assert check(run(stream_order, 1)) == [[True, [3, 6, 9, 12], [2] * 4]]


def lists_on_a_stream(_: Rank) -> list[Any]:
    one = torch.cuda.Stream()
    x = [torch.full((3,), 4.0, device="cuda"), torch.full((2, 2), 9.0, device="cuda")]
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(int(4e8))  # 0.2 s
        roots = torch._foreach_sqrt(x)
        pending = not one.query()
    one.synchronize()
    return [pending, [root.tolist() for root in roots]]


def test_lists_of_new_tensors_wait_for_their_stream() -> None:
    """As AdamW makes them: a host that waited here, with the GIL, would keep a rank's other threads from the collective
    that its stream waits for.
    """
    assert check(run(lists_on_a_stream, 1)) == [[True, [[2.0] * 3, [[3.0] * 2] * 2]]]


def trains(_: Rank) -> list[float]:
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        data = torch.randn(32, 8)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _step in range(5):
            optimizer.zero_grad()
            loss = model(data.to(device)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_gives_what_the_cpu_gives() -> None:
    """The same kernels compute it."""
    ((cpu, gpu),) = check(run(trains, 1))
    assert cpu == pytest.approx(gpu, rel=1e-5)


def captures(_: Rank) -> list[float]:
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    (x + 1).sum()
    with torch.cuda.graph(graph):
        y = (x * 2 + 1).sum()
    seen = []
    for value in (1.0, 2.0):
        x.fill_(value)
        graph.replay()
        seen.append(y.item())
    return seen


def test_a_graph_of_operations_replays() -> None:
    """torch.cuda.graph, with the memory pool of the graph."""
    assert check(run(captures, 1)) == [[9.0, 15.0]]


def illegal_access(_: Rank) -> list[str]:
    import emulated_gpu

    x = torch.ones(3, device="cuda")
    torch.cuda.synchronize()
    emulated_gpu.set("EMULATED_CUDA_ERROR_AT", 1)
    said = []
    for action in (
        lambda: (x.add_(1), torch.cuda.synchronize()),
        lambda: torch.ones(3, device="cuda"),
        lambda: x.cpu(),
    ):
        try:
            action()
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    return said


def test_a_sticky_error_reaches_torch_in_cudas_words() -> None:
    """What logs of real jobs say, from then on at each call."""
    said = check(run(illegal_access, 1))[0]
    assert said == ["CUDA error: an illegal memory access was encountered"] * 3


def transforms(_: Rank) -> list[float]:
    return torch.fft.fft(torch.ones(4, device="cuda")).real.tolist()


def test_an_operation_of_another_library_is_computed_too() -> None:
    """cuFFT is not emulated, and not needed: ATen's operation is replaced before it would be called."""
    assert check(run(transforms, 1)) == [[4, 0, 0, 0]]


def launches_a_kernel(_: Rank) -> None:
    torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")(
        torch.ones(2, device="cuda")
    )


def test_a_function_that_is_not_emulated_says_its_name_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    """A kernel compiled at run time needs NVRTC."""
    (ended,) = run(launches_a_kernel, 1)
    said = capfd.readouterr().err
    assert ended.code == 1 and "emulated GPU: nvrtc" in said and "is not emulated; do this part on the CPU" in said


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def process_group(rank: Rank, backend: str, port: int) -> dict[str, Any]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank.rank), WORLD_SIZE=str(rank.size))
    torch.cuda.set_device(rank.rank)
    dist.init_process_group(backend)
    value = torch.full((3,), float(rank.rank), device="cuda")
    dist.all_reduce(value)
    gathered = [torch.empty(1, device="cuda") for _ in range(rank.size)]
    dist.all_gather(gathered, torch.full((1,), float(rank.rank), device="cuda"))
    pair = dist.new_group([0, 2])
    part = torch.ones(1, device="cuda")
    if rank.rank != 1:
        dist.all_reduce(part, group=pair)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda(), device_ids=[rank.rank])
    model(torch.full((1, 2), float(rank.rank), device="cuda")).sum().backward()
    gradient = model.module.weight.grad.tolist()
    name = type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__
    result = {
        "value": value.tolist(),
        "gathered": [t.item() for t in gathered],
        "part": part.item(),
        "gradient": gradient,
        "name": name,
    }
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_process_group_and_ddp_work(backend: str) -> None:
    """Each of torch's backends for NCCL, on three ranks with a GPU each."""
    ended = check(run(process_group, 3, backend, _port(), settings={"EMULATED_GPUS": 3}))
    name = {
        "nccl": "ProcessGroupNCCL2" if RECENT >= (2, 15) else "ProcessGroupNCCL",
        "nccl-lazy": "ProcessGroupNCCLLazy",
    }
    for rank, got in enumerate(ended):
        assert got == {
            "value": [3.0] * 3, "gathered": [0, 1, 2], "part": 1 if rank == 1 else 2, "gradient": [[1.0, 1.0]],
            "name": name.get(backend, "ProcessGroupNCCL"),
        }  # fmt: skip
