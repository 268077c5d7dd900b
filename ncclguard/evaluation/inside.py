"""The inside of one try of an evaluation: what surrounds the program's own function while it runs.

The function's collectives run on guarded groups within limits, and all ranks learn of its exception at once. From the
second try on its batches are smaller. A rank that evaluates alone has a world of one rank. What the function records is
kept as a partial result.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ncclguard import process_group, torch_compat
from ncclguard.coordination.sections import Sections
from ncclguard.engine import runtime
from ncclguard.incident.stacks import describe_exception
from ncclguard.phases import inside_section

log = logging.getLogger("ncclguard")

#: Seconds between two lines of the countdown of ranks that wait for the one that evaluates alone.
EVERY = 10.0

#: "eval_batch_size" or "args.per_device_eval_batch_size": an attribute of the owner, a number or a DataLoader.
#: A callable is called with the divisor before each try, 1, 2, 4, ..., and with 1 after the last.
BatchSize = str | Callable[[int], object] | None


def members_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks that evaluate together; (0,) without torch.distributed."""
    if not (dist.is_available() and dist.is_initialized()):
        return (0,)
    return torch_compat.group_ranks(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]


@contextmanager
def one_try(name: str, members: tuple[int, ...], timeout: float) -> Iterator[process_group.redirected]:
    """Run a block with limits, on guarded groups, whose exception all ranks learn of at once.

    Every collective in the block has `timeout` seconds. `name` is the same on all ranks and unlike that of any other
    try. The redirection that is yielded has the failed outcomes of the block's collectives, also afterwards. Call
    `settle` once all ranks have met.
    """
    redirection = process_group.redirected(timeout=timeout)
    if len(members) == 1:
        with inside_section(name, timeout):
            yield redirection
        return
    sections = _sections()
    sections.enter(name, members)
    try:
        with inside_section(name, timeout), redirection:
            yield redirection
    except BaseException as error:
        sections.leave(describe_exception(error))
        raise
    sections.leave()


def settle(members: tuple[int, ...]) -> None:
    """Say that all ranks have met, or have agreed that they did not: no rank waits for this one inside the try."""
    if len(members) > 1:
        _sections().settle()


def _sections() -> Sections:
    return runtime.current().monitor.sections


# ---------------------------------------------------------------------- smaller batches


@contextmanager
def divided(owner: Any, batch_size: BatchSize, divisor: int) -> Iterator[None]:
    """Run a block with batches `divisor` times smaller, and at least of size 1; afterwards they are as before.

    Raises AttributeError or TypeError when `batch_size` names nothing that can be divided.
    """
    if batch_size is None or divisor == 1:
        yield
        return
    if callable(batch_size):
        batch_size(divisor)
        try:
            yield
        finally:
            batch_size(1)
        return
    *path, name = batch_size.split(".")
    holder = owner
    for step in path:
        holder = getattr(holder, step)
    before = getattr(holder, name)
    setattr(holder, name, smaller(before, divisor))
    try:
        yield
    finally:
        setattr(holder, name, before)


def smaller(value: Any, divisor: int) -> Any:
    """A batch size, or a DataLoader, with batches `divisor` times smaller and at least 1.

    >>> smaller(32, 4), smaller(2, 8)
    (8, 1)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return max(1, value // divisor)
    if isinstance(value, DataLoader):
        return _smaller_loader(value, divisor)
    raise TypeError(
        f"a batch size is a whole number or a DataLoader, not {type(value).__name__}: give a callable instead"
    )


def _smaller_loader(loader: DataLoader[Any], divisor: int) -> DataLoader[Any]:
    """The same loader with another batch size, which torch does not let change; the sampler is the same object."""
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise TypeError("this DataLoader has a batch sampler of its own: give `batch_size` as a callable instead")
    options: dict[str, Any] = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return DataLoader(
        loader.dataset,
        batch_size=max(1, loader.batch_size // divisor),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **options,
    )


def default_batch_size(evaluate: Callable[..., Any]) -> int | None:
    """The default of `evaluate`'s own parameter `batch_size`, if that is a number."""
    parameter = inspect.signature(evaluate).parameters.get("batch_size")
    default = None if parameter is None else parameter.default
    return default if isinstance(default, int) and not isinstance(default, bool) else None


# ---------------------------------------------------------------------- one rank alone


@contextmanager
def alone_in_the_world(models: Iterable[nn.Module]) -> Iterator[None]:
    """Run a block in which torch.distributed has this rank only, so that collectives return at once.

    DDP sends no buffers in the block.

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
        with torch_compat.world_of_one():
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


# ---------------------------------------------------------------------- partial results


@dataclass
class Recorder:
    """What one try has recorded on this rank."""

    results: dict[int, Any] = field(default_factory=dict)  # by count; another rank may be at any of them
    total: int = 0
    latest_only: bool = False

    @property
    def latest(self) -> Any:
        return self.results[max(self.results)] if self.results else None

    def add(self, result: Any, done: int, total: int) -> None:
        """Keep a partial result; with `latest_only`, in place of those that cover less."""
        self.total = total
        if self.latest_only:
            if done < max(self.results, default=0):
                return
            self.results.clear()
        self.results[done] = result


_current: Recorder | None = None


def record_partial(result: Any, done: int, total: int = 0) -> None:
    """Say inside an evaluation that `result` covers `done` of `total` data sets or batches.

    If the evaluation has to be given up, the result with the largest `done` that *every* rank recorded is returned in
    its place, so record what is the same on all ranks; with `combine=` the ranks' own parts are combined instead. Every
    result is kept until the evaluation ends, because another rank may have got less far: record figures, not
    predictions. With `combine=` only the latest is. Outside of a guarded evaluation it does nothing. Raises ValueError
    for a count that cannot be.

    >>> record_partial((0.31, 0.9), done=1, total=3)
    """
    if done < 0 or (total and done > total):
        raise ValueError(f"done is {done} of {total}: give the number of data sets or batches that are in")
    if _current is not None:
        _current.add(result, done, total)


@contextmanager
def recorded(*, latest_only: bool = False) -> Iterator[Recorder]:
    """Keep what the block records; with `latest_only`, no result that a later one covers."""
    global _current
    _current = recorder = Recorder(latest_only=latest_only)
    try:
        yield recorder
    finally:
        _current = None


def recording() -> bool:
    """Whether a try is in progress in this process."""
    return _current is not None
