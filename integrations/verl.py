"""Weights for verl's rollouts over `ncclguard.weights`: the checkpoint engine "ncclguard".

`ncclguard.integrations.verl_manager` goes on without a replica that fails. Run with verl 0.9.1 on CPU.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ncclguard.torch_compat import TCPStore
from ncclguard.weights import Receiver, Sender
from ncclguard_explain.language import told

_stores: list[TCPStore] = []  # one, in the manager's process


class WeightsNotSent(RuntimeError):
    """Rollouts do not have a version: `reasons`, by engine; `sent` where the others have it."""

    def __init__(self, reasons: dict[str, str], sent: bool) -> None:
        super().__init__(reasons, sent)
        self.reasons, self.sent = reasons, sent

    def __str__(self) -> str:
        return "\n".join(f"{name}: {why}" for name, why in self.reasons.items()) or told("the weights were not sent")


@CheckpointEngineRegistry.register("ncclguard")
class NcclguardCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends from the trainer's first rank. `timeout`: seconds for it; `join_within`: for all rollouts to be there."""

    def __init__(
        self, bucket_size: int, is_master: bool = False, timeout: float = 120, join_within: float = 60
    ) -> None:
        self._bucket, self._is_master, self._timeout, self._within = bucket_size, is_master, timeout, join_within
        self._end: Sender | Receiver | None = None

    def prepare(self) -> dict[str, Any]:
        """Return the name of the worker group, which is that of one replica."""
        return {"engine": os.environ.get("WG_PREFIX", "rollout")}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Give each update a channel of its own, and each worker its place in its engine."""
        if not _stores:
            _stores.append(TCPStore(ray.util.get_node_ip_address(), 0, is_master=True, wait_for_workers=False))
        channel = (f"tcp://{_stores[0].host}:{_stores[0].port}", f"verl {secrets.token_hex(4)}")
        names = [each["engine"] for each in metadata[actors:]]
        places = [(name, names[:at].count(name), names.count(name)) for at, name in enumerate(names)]
        sender = {"channel": [channel] * actors, "engines": [sorted(set(names))] * actors}
        return sender, {"channel": [channel] * rollouts, "place": places}

    def init_process_group(self, channel: tuple[str, str], engines: Any = None, place: Any = None) -> None:
        """Open this process's end: the sender to these engines, or the receiver at a place in one."""
        self.finalize()
        (address, name), self._engines = channel, engines
        if place is not None:
            engine, worker, workers = place
            self._end = Receiver(address, name=name, engine=engine, worker=worker, workers=workers)
        elif self._is_master:
            device, bucket = "cuda" if torch.cuda.is_available() else "cpu", max(1, self._bucket >> 20)
            # one try: the generator of weights communicates with the trainer's other ranks, and comes once
            self._end = Sender(address, name=name, timeout=self._timeout, retries=0, bucket_mb=bucket, device=device)

    def finalize(self) -> None:
        """Close it."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    async def send_weights(self, weights: Iterable[Any], global_steps: int | None = None) -> dict[str, float]:
        """Send them from this thread, in which the generator communicates. Raises WeightsNotSent."""
        sender, tensors = self._end, iter(weights)
        if not isinstance(sender, Sender):
            deque(tensors, maxlen=0)
            return {}
        came = sender.wait_for(self._engines, self._within)
        sent = sender.publish(lambda: tensors, global_steps or 0)
        deque(tensors, maxlen=0)  # what the other ranks still gather
        self.finalize()
        reasons = {name: str(getattr(why, "summary", why)) for name, why in sent.left_out.items()}
        late = told("it has not come to the update in {seconds:g} s", seconds=self._within)
        reasons |= {name: late for name in self._engines if name not in came}
        if reasons or not sent:
            raise WeightsNotSent(reasons, bool(sent))
        return {"weights/seconds": sent.seconds}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield them as they arrive; raises where not all have them, and then none may serve them."""
        receiver, loop = self._end, asyncio.get_running_loop()
        assert isinstance(receiver, Receiver)
        device = torch.cuda.current_device() if torch.cuda.is_available() else -1
        with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
            update = await loop.run_in_executor(thread, receiver.next, self._timeout + self._within)
            if update is None:
                raise TimeoutError(told("no weights have come in {seconds:g} s", seconds=self._timeout + self._within))
            with update:
                while (named := await loop.run_in_executor(thread, next, iter(update), None)) is not None:
                    yield named
                if not await loop.run_in_executor(thread, update.commit):
                    text = told(
                        "the weights were not committed: {why}", why=update.error or told("a member refused it")
                    )
                    raise RuntimeError(text)
