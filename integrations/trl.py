"""Weights of TRL's AsyncGRPOTrainer for vLLM servers over `ncclguard.weights`: what its argument weight_transfer takes.

The servers run with `--weight-transfer-config '{"backend": "ncclguard"}'`. Run with TRL 1.16.0 on CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from ncclguard.integrations.vllm_engines import Engines

from ncclguard.weights import Published, Sender


class NcclguardWeightTransfer:
    """Sends to several servers; one that fails is left out, and training goes on while one has the weights.

    `clients`: TRL's VLLMClient of each server, by name. `address`: of `ncclguard store`. `timeout`: seconds for a
    version, `join_within`: for all servers to come to it. `published`: what became of the last one.
    """

    def __init__(
        self,
        clients: Mapping[str, Any],
        address: str,
        *,
        name: str = "weights",
        timeout: float = 120.0,
        join_within: float = 60.0,
        retries: int = 2,
        device: str = "cpu",
    ) -> None:
        self.engines = Engines(clients, timeout + join_within)
        self.published: Published | None = None
        self._given: dict[str, Any] = {"name": name, "timeout": timeout, "retries": retries, "device": device}
        self._address, self._within, self._version = address, join_within, 0

    def init_weight_transfer(self) -> None:
        """Open the channel, and have the workers of all servers come to it."""
        clients = list(self.engines.clients.values())
        for client in clients:
            client.wait_for_server_ready()
        self._sender = Sender(self._address, **self._given)
        info = {"address": self._address, "name": self._given["name"], "workers": clients[0].get_world_size()}
        limits = {"timeout": self._given["timeout"] + self._within, "tries": self._given["retries"] + 1}
        self.engines.init_weight_transfer_engine({**info, **limits})

    def pause(self) -> None:
        """Pause the servers, and those that are back."""
        self.engines.take_back()
        self.engines.each("pause")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Gather all in this host's memory, and send it from there: other ranks gather too, and have to be done first.

        Raises RuntimeError where no server has the weights.
        """
        tensors = {name: tensor.detach().to("cpu") for name, tensor in iterator}
        self._version += 1
        self.published = self.engines.send(self._sender, tensors, self._version, self._within)

    def resume(self) -> None:
        """Let those go on that have the weights."""
        self.engines.each("resume")

    def destroy(self) -> None:
        """End the channel."""
        self._sender.close()
