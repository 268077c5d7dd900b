"""The backend "ncclguard" for `init_process_group` and `new_group`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ncclguard import _torch

NAME = "ncclguard"


def register() -> None:
    """Make the name known to torch; once. Other groups, and the defaults of torch, are not touched."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _torch.records_itself(NAME)


def _create(options: Any, _: Any) -> dist.ProcessGroup:
    from ncclguard.process_group.group import GuardedProcessGroup
    from ncclguard.process_group.kernels import serve_cpp_callers

    serve_cpp_callers()
    # torch's default is nobody's choice: the guard's own settings come before it.
    chosen = None if options.timeout == default_pg_timeout else options.timeout.total_seconds()
    return GuardedProcessGroup(options.group_rank, options.group_size, chosen)
