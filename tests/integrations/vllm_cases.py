"""A trainer and two engines of vLLM on CPUs: its factories, base classes, clients and reloading, with a small model.

Each engine is a process of one worker with an HTTP server that does what vLLM's does with these requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from ncclguard import faults
from ncclguard.weights import Update

ENGINES, LIMIT = ("A", "B"), 8.0
#: What befalls B while a version arrives, or when it is loaded.
STRIKES = {2: "stop", 4: "raise", 6: "kill"}
VERSIONS = 7


class Model(torch.nn.Module):
    """Loads as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(600, 600), torch.nn.Linear(600, 10)
        self.refuses = False

    def load_weights(self, weights: Any) -> None:
        if self.refuses:
            raise ValueError("size mismatch for first.weight")
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameter = parameters[name]
            load = getattr(parameter, "weight_loader", lambda to, what: to.data.copy_(what))
            load(parameter, weight)


def digest(model: torch.nn.Module) -> str:
    parts = (name.encode() + each.detach().numpy().tobytes() for name, each in sorted(model.named_parameters()))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:8]


def job(address: str, ports: list[int]) -> None:
    from ncclguard.integrations import plugins

    plugins.vllm()  # what vLLM does by the entry point
    if int(os.environ["RANK"]) == 0:
        trains(address, ports)
    else:
        serves(ports)


def trains(address: str, ports: list[int]) -> None:
    from ncclguard.integrations.vllm import NcclguardTrainerInitInfo
    from ncclguard.integrations.vllm_engines import Engines
    from vllm.distributed.weight_transfer.base import ModuleSource, VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    faults.wait_until_told("go", seconds=150)
    clients = {name: HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{port}", 60) for name, port in zip(ENGINES, ports)}
    engines = Engines(clients, timeout=3 * LIMIT)
    assert isinstance(engines, VLLMWeightSyncClient)
    model = Model()
    info = NcclguardTrainerInitInfo(address=address, rank=0, timeout=LIMIT, join_within=LIMIT, retries=1)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=engines, source=ModuleSource(model))
    sent = []
    for version in range(1, VERSIONS + 1):
        for parameter in model.parameters():
            parameter.data.normal_()
        said: dict[str, Any] = {"version": version, "digest": digest(model), "engines": [], "error": ""}
        try:
            said["engines"] = trainer.send_weights().engines
        except RuntimeError as error:
            said["error"] = str(error)
        said["failed"] = dict(engines.failed)
        sent.append(said)
        faults.report(sent=sent)
        if version in STRIKES:
            faults.report(**{f"struck {version}": True})
            faults.wait_until_told(f"go on after {version}", seconds=60)
    trainer.shutdown()
    faults.report(done=True)


@contextlib.contextmanager
def struck(fault: str) -> Iterator[None]:
    """Kill or stop this process when a tensor of the next version has arrived."""
    arriving = Update.__iter__

    def strikes(update: Update) -> Iterator[tuple[str, torch.Tensor]]:
        for number, named in enumerate(arriving(update)):
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            yield named

    Update.__iter__ = strikes if fault in ("kill", "stop") else arriving  # type: ignore[method-assign]
    try:
        yield
    finally:
        Update.__iter__ = arriving  # type: ignore[method-assign]


def serves(ports: list[int]) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    rank = int(os.environ["RANK"])
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
    model = Model()
    record_metadata_for_reloading(model)
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="ncclguard"), config, torch.device("cpu"), model
    )
    served: list[Any] = []

    def handle(path: str, body: dict[str, Any]) -> None:
        if path == "/init_weight_transfer_engine":
            engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
        elif path == "/start_weight_update":
            engine.start_weight_update()
        elif path == "/update_weights":
            fault = STRIKES.get(body["update_info"]["version"], "") if ENGINES[rank - 1] == "B" else ""
            model.refuses = fault == "raise"
            with struck(fault):
                engine.update_weights(body["update_info"])
        elif path == "/finish_weight_update":
            engine.finish_weight_update()
            served.append([body["weight_version"], digest(model)])
            faults.report(served=served)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}") or {}
            try:
                handle(self.path, body)
                self.send_response(200)
            except Exception as error:  # noqa: BLE001
                faults.report(error=str(error))
                self.send_response(500, str(error)[:200].replace("\n", " "))
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", ports[rank - 1]), Handler)
    faults.report(ready=True)
    server.serve_forever()
