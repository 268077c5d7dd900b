"""Smaller batches for the next try: said by a callable, by the name of an
attribute, or by a parameter of `evaluate`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

log = logging.getLogger("ncclguard")

#: "eval_batch_size" or "args.per_device_eval_batch_size": an attribute of the owner, a number or a DataLoader.
#: A callable is called with the divisor before each try, 1, 2, 4, ..., and with 1 after the last.
BatchSize = str | Callable[[int], object] | None


@contextmanager
def divided(owner: Any, batch_size: BatchSize, divisor: int) -> Iterator[None]:
    """Within it the evaluation's batches are `divisor` times smaller, and at least 1; afterwards as they were.

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


def parameter_default(evaluate: Callable[..., Any]) -> int | None:
    """The default of `evaluate`'s own `batch_size` parameter, if it has a number there."""
    parameter = inspect.signature(evaluate).parameters.get("batch_size")
    default = None if parameter is None else parameter.default
    return default if isinstance(default, int) and not isinstance(default, bool) else None
