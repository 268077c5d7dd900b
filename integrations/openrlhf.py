"""Guarded groups in the place of OpenRLHF's, between its trainer and the workers of its vLLM engines.

`install` has to be called in each process of the job. Run with OpenRLHF 0.11.2 on CPU, without vLLM.
"""

from __future__ import annotations

from typing import Any

import torch

from ncclguard.collectives import safe_broadcast
from ncclguard.process_group.joined import join

#: Seconds for a tensor to be broadcast, and for all to come to the group.
TIMEOUT = 120.0
JOIN_TIMEOUT = 600.0


class GuardedGroup:
    """A group with the method that OpenRLHF calls of vLLM's PyNcclCommunicator."""

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        label = f"vLLM worker {rank - 1}" if rank else "trainer"
        self._group = join(
            address, name="openrlhf", rank=rank, world_size=world_size, label=label, timeout=JOIN_TIMEOUT
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Broadcast in place, on the current stream. Raises CollectiveFailed on all, with who held it up."""
        safe_broadcast(tensor, src, self._group, timeout=TIMEOUT).raise_if_failed()


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: Any
) -> GuardedGroup:
    """Return the group of the trainer, rank 0, and all workers."""
    return GuardedGroup(f"tcp://{master_address}:{master_port}", rank, world_size)


def install() -> None:
    """Replace the function at both ends, where they are imported before and after."""
    import sys

    import openrlhf.utils.distributed_util as utilities

    utilities.stateless_init_process_group = stateless_init_process_group
    actor = sys.modules.get("openrlhf.trainer.ray.ppo_actor")
    if actor is not None:
        actor.stateless_init_process_group = stateless_init_process_group  # type: ignore[attr-defined]
