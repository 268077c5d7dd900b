"""Weights for vLLM's engines over `ncclguard.weights`: both ends of the weight transfer "ncclguard".

A version is loaded by a worker when all members have it, and by none else. Run with vLLM 0.33.0's Python files on CPU.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from ncclguard.integrations import plugins
from ncclguard.integrations.vllm_engines import Engines
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ncclguard.weights import Published, Receiver, Sender
from ncclguard_explain.language import told

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class NcclguardInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """For a worker: the channel, and the engine that it is one of `workers` of; seconds and tries for a version."""

    address: str
    name: str
    engine: str
    workers: int
    timeout: float
    tries: int


@dataclass
class NcclguardUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A worker needs no more: the names and shapes come with the weights."""

    version: int


class NcclguardEngine(WeightTransferEngine):  # type: ignore[misc]
    """A worker's end."""

    init_info_cls, update_info_cls = NcclguardInitInfo, NcclguardUpdateInfo
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: NcclguardInitInfo) -> None:
        """Take the worker's place in the channel."""
        self.shutdown()
        self._info, parallel = init_info, self.parallel_config
        self._receiver = Receiver(
            init_info.address,
            name=init_info.name,
            engine=init_info.engine,
            worker=parallel.data_parallel_index * parallel.world_size + parallel.rank,
            workers=init_info.workers,
        )

    def start_weight_update(self) -> None:
        """Leave the model as it is until a version has arrived."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a version and load it; vLLM's own needs an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: NcclguardUpdateInfo) -> None:
        """Stage a version, and load it where all have it; else the model keeps its own, and RuntimeError says why."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        assert self._receiver is not None, "init_weight_transfer_engine comes first"
        why: object = told("no weights have come in {seconds:g} s", seconds=self._info.timeout)
        until = time.monotonic() + self._info.timeout
        for _ in range(self._info.tries):
            update = self._receiver.next(max(0.001, until - time.monotonic()))
            if update is None:
                break
            staged = list(update)
            if update.commit():
                initialize_layerwise_reload(self.model)
                with disable_mtp_completeness_check():
                    self.model.load_weights(staged)
                return
            why = update.error or told("a member refused it")
        raise RuntimeError(told("version {version} was not committed: {why}", version=update_info.version, why=why))

    def finish_weight_update(self) -> None:
        """End the reloading."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the channel."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


@dataclass
class NcclguardTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The channel, and its limits.

    `address`: of `ncclguard store`; `workers`: of an engine; `timeout`: seconds for a version, `join_within`: for all
    engines to come to it; `retries`: above 0 only where one trainer rank has all weights, since each try gathers anew.
    """

    backend: ClassVar[str] = "ncclguard"
    address: str
    name: str = "weights"
    workers: int = 1
    timeout: float = 120.0
    join_within: float = 60.0
    retries: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class NcclguardTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's end. `client`: one engine's, or `Engines` of several, of which those that fail are left out."""

    init_info_cls = NcclguardTrainerInitInfo

    @classmethod
    def trainer_init(
        cls,
        init_info: NcclguardTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient | Engines,
        source: WeightSource | None = None,
    ) -> Self:
        """Open the channel, and have the engines' workers come to it."""
        engines = client if isinstance(client, Engines) else Engines({"vllm": client})
        made = cls(client=engines, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        made._info, made._version = init_info, 0
        if made.is_sender:
            i = init_info
            made._sender = Sender(i.address, name=i.name, timeout=i.timeout, retries=i.retries, device=i.device)
            limits = {"timeout": i.timeout + i.join_within, "tries": i.retries + 1}
            engines.init_weight_transfer_engine({"address": i.address, "name": i.name, "workers": i.workers, **limits})
        return made

    def send_weights(self) -> Published | None:
        """Send a version; returns which engines may serve it, and why others may not. RuntimeError where none may."""
        assert self.source is not None
        if not self.is_sender:
            deque(self.source.iter_full(), maxlen=0)
            return None
        self._version += 1
        engines: Engines = self.client
        engines.take_back()
        published: Published = engines.send(
            self._sender, self.source.iter_full, self._version, self._info.join_within, str(self._version)
        )
        return published

    def shutdown(self) -> None:
        """End the channel; the engines keep what they have."""
        if self.is_sender:
            self._sender.close()


plugins.vllm()
