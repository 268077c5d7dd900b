"""verl's manager of updates, which goes on without a replica that fails or does not answer, and takes it back later.

For the option checkpoint_manager_class of verl, beside the checkpoint engine of `ncclguard.integrations.verl`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ncclguard.integrations.verl import WeightsNotSent
from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from ncclguard_explain.language import told

log = logging.getLogger("ncclguard")


class NcclguardCheckpointEngineManager(CheckpointEngineManager):  # type: ignore[misc]
    """Updates the replicas that can be updated; the others are in `left_out`, with the reason."""

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        super().__init__(config, actor_wg, replicas)
        given = config.engine_kwargs.get("ncclguard", {})
        self._within = given.get("join_within", 60)
        self._limit = given.get("timeout", 120) + self._within + 10
        self.left_out: dict[Any, str] = {}

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Send a version until all replicas that are left have it. Raises RuntimeError where none is."""
        for replica in list(self.left_out):
            self._take_back(replica)
        while self.replicas:
            await self._all("abort_all_requests")
            await self._all("release_kv_cache")
            metrics = self._send(global_steps)
            if metrics is not None:
                await self._all("resume_kv_cache")
                await self._all("resume_generation")
                return metrics | {"weights/left_out": len(self.left_out)}
        raise RuntimeError("\n".join(f"{_name(each)}: {why}" for each, why in self.left_out.items()))

    async def _all(self, method: str) -> None:
        calls = (asyncio.wait_for(getattr(each, method)(), self._within) for each in self.replicas)
        done = await asyncio.gather(*calls, return_exceptions=True)
        self._leave_out({each: why for each, why in zip(self.replicas, done) if isinstance(why, BaseException)})

    def _send(self, global_steps: int | None) -> dict[str, Any] | None:
        """Send once; None where it has to be sent again, to those that are left."""
        actors, count, replicas = self.actor_wg, self.actor_wg.world_size, self.replicas
        owners = [each for each in replicas for _ in each.workers]
        rollout = _group(worker for each in replicas for worker in each.workers)
        metadata: list[dict[str, str]] = [{}] * count + [{"engine": _name(each)} for each in owners]
        actor, worker = self.backend_cls.build_topology(count, len(owners), metadata)
        opened = actors.execute_checkpoint_engine(method=["init_process_group"] * count, **actor)
        self._settle(rollout.execute_checkpoint_engine(method=["init_process_group"] * len(owners), **worker), owners)
        ray.get(opened, timeout=self._within)
        if self.replicas != replicas:
            return None
        sending = actors.update_weights(global_steps=global_steps, mode=self.backend)
        receiving = rollout.update_weights(global_steps=global_steps)
        metrics: dict[str, Any] = {}
        try:
            for result in ray.get(sending, timeout=self._limit):
                metrics |= result or {}
        except WeightsNotSent as error:
            why = error.cause.reasons  # it comes as ray's RayTaskError too
            reasons = {each: why[_name(each)] for each in replicas if _name(each) in why}
            self._leave_out(reasons)
            if not reasons:
                raise
            if not error.cause.sent:
                _failures([ref for ref, owner in zip(receiving, owners) if owner not in reasons], self._within)
                return None  # they have heard of it too
        self._settle(receiving, owners)
        return metrics

    def _settle(self, refs: list[Any], owners: list[Any]) -> None:
        """Wait for workers, and leave out the replicas of those that fail or do not end in time."""
        owned = {ref: owner for ref, owner in zip(refs, owners) if owner in self.replicas}
        self._leave_out({owned[ref]: error for ref, error in _failures(list(owned), self._within).items()})

    def _leave_out(self, reasons: Mapping[Any, object]) -> None:
        self.left_out |= {replica: str(why) or type(why).__name__ for replica, why in reasons.items()}
        for replica in reasons:
            text = told("ncclguard: {name} is left out: {why}", name=_name(replica), why=self.left_out[replica])
            log.warning("%s", text)
        self.remove_replicas(list(reasons))

    def _take_back(self, replica: Any) -> None:
        """Take a replica back whose workers all answer."""
        refs = _group(replica.workers).execute_checkpoint_engine(method=["prepare"] * len(replica.workers))
        if _failures(refs, min(5.0, self._within)):
            return
        del self.left_out[replica]
        self.add_replicas([replica])


def _group(workers: Iterable[Any]) -> Any:
    return RayWorkerGroup(worker_handles=list(workers), ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))


def _failures(refs: list[Any], limit: float) -> dict[Any, RayError]:
    """Wait for all; returns why some have no result, those among them that are not there in time."""
    ray.wait(refs, num_returns=len(refs), timeout=limit)
    failures: dict[Any, RayError] = {}
    for ref in refs:
        try:
            ray.get(ref, timeout=0)
        except RayError as error:
            failures[ref] = error
    return failures


def _name(replica: Any) -> str:
    return f"replica {replica.replica_rank}"
