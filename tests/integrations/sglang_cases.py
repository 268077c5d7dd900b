"""A trainer and two engines in a group that SGLang's own helper makes, which takes any backend's name."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ncclguard.integrations import plugins

from ncclguard import faults

#: Seconds after which a broadcast is said to hang: several limits.
HANGS = 30.0


def helper() -> Any:
    """SGLang's function, without what its module imports."""
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(folder) / "srt" / "utils" / "common.py").read_text())
    name = "init_custom_process_group"
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace: dict[str, Any] = {"torch_release": tuple(int(part) for part in torch.__version__.split(".")[:2])}
    exec(compile(ast.Module(found, []), "sglang", "exec"), namespace)  # noqa: S102
    return namespace[name]


def job(backend: str, port: int) -> None:
    plugins.sglang()  # what SGLang does by the entry point
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which SGLang's engines have
    address = f"tcp://127.0.0.1:{port}"
    group = helper()(backend=backend, init_method=address, world_size=3, rank=rank, group_name="weights")
    said: list[Any] = []
    for version in range(3):
        if (rank, version) == (2, 2):
            os.kill(os.getpid(), signal.SIGSTOP)
        weights = [torch.full((2_000_000,), version * 10.0 + each if rank == 0 else -1.0) for each in range(3)]

        def update(weights: list[torch.Tensor] = weights, version: int = version) -> None:
            try:
                for work in [dist.broadcast(weight, 0, group=group, async_op=True) for weight in weights]:
                    work.wait()
                said.append([weight[-1].item() - version * 10.0 for weight in weights])
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=update, daemon=True)
        thread.start()
        thread.join(HANGS)
        if thread.is_alive():
            said.append("hangs")
        faults.report(said=said)
    if backend == "gloo":
        os._exit(0)  # a thread hangs
