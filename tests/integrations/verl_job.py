"""A job of verl's own on CPUs, by ray: its managers of updates and its workers, with a stub of a trainer and of rollouts.

python verl_job.py FOLDER prints a line of JSON for each update.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from ncclguard.integrations.verl_manager import NcclguardCheckpointEngineManager
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig

MODULE = "ncclguard.integrations.verl"
LIMIT = 6.0
#: Seconds after which an update is said to hang: more than all limits together.
HANGS = 40.0
#: The versions in the middle of which the last worker of replica 1 is struck.
STRIKES = {2: "stop", 5: "raise", 7: "stop", 12: "kill"}
#: The version before which it is stopped, and after which it goes on.
IDLE = 8
CONFIG = CheckpointEngineConfig(
    backend="ncclguard",
    update_weights_bucket_megabytes=1,
    custom_backend_module=MODULE,
    engine_kwargs={"ncclguard": {"timeout": LIMIT, "join_within": 15.0}},
)


def weights(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(version)
    for number in range(5):
        yield f"layer{number}", torch.randn(300, 500, generator=made)


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    return hashlib.sha256(b"".join(name.encode() + each.numpy().tobytes() for name, each in tensors)).hexdigest()[:8]


class Trainer(Worker):  # type: ignore[misc]
    """What verl's ActorRolloutRefWorker does for an update."""

    def __init__(self) -> None:
        super().__init__()
        import_external_libs(MODULE)
        given = CONFIG.engine_kwargs["ncclguard"]
        self.engine = CheckpointEngineRegistry.new("ncclguard", is_master=self.rank == 0, bucket_size=1 << 20, **given)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.engine.send_weights(weights(global_steps), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(*args, **kwargs)


class Rollout:
    """A stub of a rollout in each of its workers, which writes down what it has."""

    def __init__(self, folder: str, replica: int) -> None:
        self.folder, self.replica_rank = Path(folder), replica

    async def update_weights(self, arriving: AsyncIterator[Any], global_steps: int, **_: Any) -> None:
        place = f"{self.replica_rank}.{os.environ['RANK']}"
        (self.folder / f"{place}.pid").write_text(str(os.getpid()))
        staged = []
        async for each in arriving:
            staged.append(each)
            if place == "1.1" and len(staged) == 2:
                strike(STRIKES.get(global_steps, ""))
        (self.folder / f"{place}.{global_steps}").write_text(digest(staged))


def strike(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("no memory is left for layer1")


class Replica:
    """What a manager calls of verl's RolloutReplica."""

    def __init__(self, rank: int, workers: list[Any]) -> None:
        self.replica_rank, self.workers = rank, workers

    async def nothing(self, **_: Any) -> None:
        pass

    abort_all_requests = release_kv_cache = resume_kv_cache = resume_generation = nothing


def group(name: str, count: int, cls: type, **kwargs: Any) -> RayWorkerGroup:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), **kwargs), device_name="cpu", name_prefix=name)


def update(manager: CheckpointEngineManager, version: int, folder: Path) -> threading.Thread:
    """Have a manager send a version, and print what came of it, after HANGS at the latest."""
    said: dict[str, Any] = {"version": version, "error": ""}

    def sends() -> None:
        try:
            manager.update_weights(version)
        except Exception as error:  # noqa: BLE001
            said["error"] = f"{type(error).__name__}: {error}"[-1500:]

    thread, began = threading.Thread(target=sends, daemon=True), time.monotonic()
    thread.start()
    thread.join(HANGS)
    said |= {"hangs": thread.is_alive(), "seconds": round(time.monotonic() - began, 2)}
    said["left_out"] = {each.replica_rank: why for each, why in getattr(manager, "left_out", {}).items()}
    said["has"] = {file.name[:3]: file.read_text() for file in sorted(folder.glob(f"?.?.{version}"))}
    said["sent"] = digest(weights(version))
    print("\n" + json.dumps(said), flush=True)
    return thread


def main(folder: Path) -> None:
    rollouts = SimpleNamespace(checkpoint_engine=CONFIG, name="stub")
    given = {"rollout_config": rollouts, "model_config": None}
    groups = [
        group(
            f"rollout_{replica}", workers, CheckpointEngineWorker, server_adapter=Rollout(str(folder), replica), **given
        )
        for replica, workers in enumerate((1, 2))
    ]
    trainers = group("trainer", 2, Trainer)
    for each in (trainers, *groups):  # they are up
        ray.get(each.execute_checkpoint_engine(["prepare"] * each.world_size), timeout=200)
    replicas = [Replica(number, each.workers) for number, each in enumerate(groups)]
    ours, verls = (
        kind(CONFIG, trainers, replicas) for kind in (NcclguardCheckpointEngineManager, CheckpointEngineManager)
    )
    for version in (1, 2, 3, 4, 5, 6):
        update(ours, version, folder)
        signal_worker(folder, signal.SIGCONT)
    update(verls, 7, folder)
    signal_worker(folder, signal.SIGCONT)
    time.sleep(1)
    signal_worker(folder, signal.SIGSTOP)
    hanging = update(verls, IDLE, folder)
    signal_worker(folder, signal.SIGCONT)
    hanging.join(60)
    update(ours, 9, folder)
    signal_worker(folder, signal.SIGSTOP)
    update(ours, 10, folder)
    signal_worker(folder, signal.SIGCONT)
    for version in (11, 12, 13):
        update(ours, version, folder)
    update(verls, 14, folder)


def signal_worker(folder: Path, number: signal.Signals) -> None:
    os.kill(int((folder / "1.1.pid").read_text()), number)


if __name__ == "__main__":
    os.environ["RAY_AUTH_MODE"] = "disabled"
    variables = {"NCCLGUARD_REPORT_DIR": "none", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    ray.init("local", num_cpus=20, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    main(Path(sys.argv[1]))
    ray.shutdown()
    sys.stdout.flush()
    os._exit(0)  # a thread may hang
