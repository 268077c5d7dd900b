"""OpenRLHF's ends of its group for weights: its workers' extension, and the trainer's calls, on CPU tensors."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ncclguard import faults
from ncclguard.errors import CollectiveFailed

LIMIT = 10.0
VERSIONS, STRUCK = 4, 3
NAMES = ("first", "second", "third")


def weight(version: int, name: str) -> torch.Tensor:
    return torch.full((300, 400), version * 10.0 + NAMES.index(name))


def worker_wrap() -> Any:
    """OpenRLHF's extension of a vLLM worker, without its package's other modules, which import vLLM."""
    (folder,) = importlib.util.find_spec("openrlhf").submodule_search_locations  # type: ignore[union-attr, misc]
    file = Path(folder) / "trainer" / "ray" / "vllm_worker_wrap.py"
    spec = importlib.util.spec_from_file_location("vllm_worker_wrap", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WorkerWrap()


def job(fault: str, port: int) -> None:
    from ncclguard.integrations import openrlhf

    openrlhf.install()
    openrlhf.TIMEOUT = LIMIT
    rank = int(os.environ["RANK"])
    had: list[Any] = []
    if rank == 0:
        from openrlhf.utils.distributed_util import stateless_init_process_group

        group = stateless_init_process_group("127.0.0.1", port, 0, 3, "cpu")
    else:
        on_cpu()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        worker = worker_wrap()
        worker.device, worker.model_config = "cpu", SimpleNamespace(dtype=torch.float32)
        model = SimpleNamespace(
            load_weights=lambda weights: had.append([(name, each.clone()) for name, each in weights])
        )
        worker.model_runner = SimpleNamespace(model=model)
        worker.init_process_group("127.0.0.1", port, rank, 3, "openrlhf")
    right = 0
    try:
        for version in range(VERSIONS):
            for name in NAMES:
                if (rank, version, name) == (2, STRUCK, "second"):
                    os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
                sent = weight(version, name)
                if rank == 0:
                    group.broadcast(sent, src=0, stream=None)
                else:
                    worker.update_weight(name, torch.float32, sent.shape)
                    ((arrived, tensor),) = had.pop()
                    assert arrived == name and torch.equal(tensor, sent)
            right += 1
            faults.report(right=right)
    except CollectiveFailed as error:
        faults.report(error=str(error), culprits=error.outcome.culprits)


def on_cpu() -> None:
    """Have the worker's tensors, which it makes on "cuda", made here."""
    empty = torch.empty
    torch.empty = lambda *size, device=None, **more: empty(*size, **more)  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
