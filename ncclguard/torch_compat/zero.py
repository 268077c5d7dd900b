"""The parts of the optimizer's state and who has them, by private names of torch's `ZeroRedundancyOptimizer` (ZeRO-1).

Ran on torch 2.8.0, 2.11.0 and 2.13.0 (CPU). `obstacle` says what an optimizer has that cannot be partitioned anew.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def is_one(optimizer: object) -> bool:
    """Return whether this is ZeRO-1's optimizer; by its name, because the import takes long."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def obstacle(optimizer: Any, group: dist.ProcessGroup) -> str:
    """Return why the parameters cannot be dealt out anew among some ranks of `group`; "" if they can."""
    if not hasattr(optimizer, "_clear_cache") or not hasattr(optimizer, "_init_local_optimizer"):
        return f"torch {torch.__version__} partitions in another way: torch 2.13's was tried"
    if optimizer._overlap_with_ddp:
        return "it steps within DDP's communication hook: leave overlap_with_ddp out"
    if optimizer.process_group is not group:
        return "it is not on the process group of the steps: leave process_group out"
    return ""


def parameters(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of all ranks, in the same order on all."""
    return list(optimizer._index_to_param)


def own(optimizer: Any) -> list[int]:
    """Return which parameters this rank steps, by their numbers, in order."""
    places = optimizer._param_to_rank
    return [number for number, each in enumerate(optimizer._index_to_param) if places[each] == optimizer.rank]


def states(optimizer: Any) -> Any:
    """Return the state of the parameters that this rank steps."""
    return optimizer.optim.state


def repartition(optimizer: Any, group: dist.ProcessGroup, rank: int, size: int) -> None:
    """Have each rank of `group`, which torch knows, step other parameters, by the optimizer's own rule; without state.

    Hyperparameters stay; parameters that are views of a bucket get other memory.
    """
    optimizer.process_group, optimizer.rank, optimizer.world_size = group, rank, size
    optimizer._clear_cache()
    optimizer._init_local_optimizer()
    optimizer._build_param_buckets()
