"""The processes that one runtime joins: those of the job, or those of one group outside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ncclguard import torch_compat


@dataclass(frozen=True, slots=True)
class World:
    """The store where the processes meet, and which of them this one is.

    `group`: the name of a group outside the job, the same on all of its processes; "" for the job. `label`: what
    reports call this process, such as "engine 2". `has_store`: the process of rank 0 may have the store, so that it
    gives the others a moment when it leaves.
    """

    store: torch_compat.Store
    rank: int
    size: int
    group: str = ""
    label: str = ""
    has_store: bool = True

    @classmethod
    def of_job(cls) -> World:
        """Return the processes of the default process group. Raises ValueError where there is none."""
        return cls(torch_compat.default_store(), dist.get_rank(), dist.get_world_size())

    @property
    def host(self) -> str:
        """The host of the store of a group outside the job; "" for the job, whose launcher tells it."""
        return torch_compat.store_host(self.store) if self.group else ""
