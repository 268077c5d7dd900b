"""The weight sync of TRL's AsyncGRPOTrainer with two servers that are stubs: each has a model in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import unittest.mock
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch

from ncclguard import faults
from ncclguard.weights import Receiver

SERVERS, LIMIT = ("A", "B"), 8.0
#: What befalls B when it is to receive a version.
STRIKES = {2: signal.SIGSTOP, 5: signal.SIGKILL}
VERSIONS = 6


def made() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 10))


def digest(model: torch.nn.Module) -> str:
    parts = (name.encode() + each.detach().numpy().tobytes() for name, each in sorted(model.named_parameters()))
    return hashlib.sha256(b"".join(parts)).hexdigest()[:8]


def job(address: str, ports: list[int]) -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        trains(address, ports)
    else:
        serves(SERVERS[rank - 1], ports[rank - 1])


def trains(address: str, ports: list[int]) -> None:
    """Sync as the trainer does, by its own method, between steps that are left out."""
    from accelerate import Accelerator
    from ncclguard.integrations.trl import NcclguardWeightTransfer
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    clients = {name: VLLMClient(f"http://127.0.0.1:{port}") for name, port in zip(SERVERS, ports)}
    transfer = NcclguardWeightTransfer(clients, address, timeout=LIMIT, join_within=LIMIT)
    trainer = AsyncGRPOTrainer.__new__(AsyncGRPOTrainer)
    with unittest.mock.patch.dict(os.environ, {"WORLD_SIZE": "1"}):  # the trainer is alone in its job
        trainer.accelerator = Accelerator(cpu=True)
    trainer.model, trainer.weight_transfer = made(), transfer
    trainer.rollout_worker, trainer.model_version, trainer._lora_sync = None, 0, False
    trainer._metrics = {"train": defaultdict(list)}
    faults.wait_until_told("go", seconds=100)
    transfer.init_weight_transfer()
    sent = []
    for version in range(1, VERSIONS + 1):
        for parameter in trainer.model.parameters():
            parameter.data.normal_()
        trainer._sync_weight()
        published, left_out = transfer.published, dict(transfer.engines.failed)
        sent.append([digest(trainer.model), list(published.engines) if published else [], left_out])
        if version in STRIKES:
            faults.report(**{f"struck {version}": True})
            faults.wait_until_told(f"go on after {version}", seconds=60)
    faults.report(sent=sent, version=trainer.model_version)
    transfer.destroy()


def serves(name: str, port: int) -> None:
    model, served = made(), list[str]()
    staged: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {"receiver": None, "paused": False}

    def init(info: dict[str, Any]) -> None:
        if state["receiver"] is not None:
            state["receiver"].close()
        state["receiver"] = Receiver(info["address"], name=info["name"], engine=info["engine"])
        state["tries"] = info["tries"]

    def update(info: dict[str, Any]) -> None:
        if name == "B" and info["version"] in STRIKES:
            os.kill(os.getpid(), STRIKES[info["version"]])
        for _ in range(state["tries"]):
            arriving = state["receiver"].next(timeout=2 * LIMIT)
            assert state["paused"] and arriving is not None
            staged.clear()
            staged.update(arriving)
            if arriving.commit():
                return
        raise RuntimeError("it was not committed")

    def finish(_: Any) -> None:
        model.load_state_dict(staged)
        served.append(digest(model))
        faults.report(served=served)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, json.dumps({"world_size": 1}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            path = self.path.partition("?")[0]
            try:
                if path in ("/pause", "/resume"):
                    state["paused"] = path == "/pause"
                elif path == "/init_weight_transfer_engine":
                    init(body["init_info"])
                elif path == "/update_weights":
                    update(body["update_info"])
                elif path == "/finish_weight_update":
                    finish(body)
                self.answer(200, "")
            except Exception as error:  # noqa: BLE001
                faults.report(error=str(error))
                self.answer(500, str(error))

        def answer(self, code: int, text: str) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    faults.report(ready=True)
    server.serve_forever()
