"""Evaluation on one rank: it believes to be alone in the world, while the others
wait for its result and see a countdown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ncclguard import _torch

log = logging.getLogger("ncclguard")

#: Seconds between two lines of the countdown.
EVERY = 10.0


@contextmanager
def alone_in_the_world(models: Iterable[nn.Module]) -> Iterator[None]:
    """Within it torch.distributed has one rank, this one, so that collectives return at once; DDP sends no buffers.

    Raises ValueError for a model whose parameters are spread over ranks (ZeRO-3): it cannot be evaluated on one of
    them.
    """
    models = tuple(models)
    if any(hasattr(parameter, "ds_id") for model in models for parameter in model.parameters()):
        raise ValueError(
            "the parameters are partitioned over the ranks (ZeRO-3), so one rank cannot evaluate alone: "
            "use smaller batches, or switch the evaluation off"
        )
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    wrappers = [m for model in models for m in model.modules() if isinstance(m, DistributedDataParallel)]
    synced = [wrapper.require_forward_param_sync for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.require_forward_param_sync = False
    try:
        with _torch.world_of_one():
            yield
    finally:
        for wrapper, before in zip(wrappers, synced, strict=True):
            wrapper.require_forward_param_sync = before


@contextmanager
def countdown(what: str, seconds: float, every: float = EVERY) -> Iterator[None]:
    """Log how long this rank will wait at most, every few seconds, from a thread of its own."""
    over = threading.Event()
    deadline = time.monotonic() + seconds

    def tick() -> None:
        while not over.wait(every):
            log.warning("ncclguard: waiting for %s, %.0f s left", what, max(0.0, deadline - time.monotonic()))

    thread = threading.Thread(target=tick, name="ncclguard-countdown", daemon=True)
    log.warning("ncclguard: waiting for %s, for at most %.0f s", what, seconds)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)
