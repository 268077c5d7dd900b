"""Several ranks of the CPU transport as threads of one process, with real connections between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.distributed import HashStore, Store

from ncclguard.transport.base import Pending
from ncclguard.transport.links import Links, connect
from ncclguard.transport.streams import StreamCommunicator
from ncclguard.transport.votes import Exchange

T = TypeVar("T")
#: Global rank of the first; the others follow.
FIRST = 10


@contextmanager
def links(
    size: int, store: Store | None = None, direct: bool = True, host: str = "127.0.0.1", star: bool | None = False
) -> Iterator[list[Links]]:
    """The connections of each of `size` ranks."""
    keys = HashStore() if store is None else store
    end = time.monotonic() + 20
    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(lambda index: connect(keys, host, size, index, end, direct, star), range(size)))
    try:
        yield made
    finally:
        for one in made:
            one.stop()
            one.close()


@contextmanager
def exchanges(size: int, star: bool = False) -> Iterator[list[Exchange]]:
    """An exchange for each rank."""
    with links(size, star=star) as made:
        numbers = range(FIRST, FIRST + size)
        yield [Exchange(numbers, one) for one in made]


@contextmanager
def communicators(size: int, direct: bool = True, star: bool = False) -> Iterator[list[StreamCommunicator]]:
    """A communicator for each rank."""
    with links(size, direct=direct, star=star) as made:
        ranks = tuple(range(FIRST, FIRST + size))
        found = [StreamCommunicator(one, ranks, 1) for one in made]
        for communicator in found:
            communicator.closes = True  # else no memory is read
        try:
            yield found
        finally:
            for communicator in found:
                communicator.close()


def on_all(ranks: Sequence[Any], run: Callable[[int, Any], T]) -> list[T]:
    """Run `run(index, rank)` on all at the same time; raises what one of them raises."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks)), ranks))


def finish(pending: Pending, seconds: float = 30.0) -> None:
    """Wait for the end in slices, as the guard does."""
    end = time.monotonic() + seconds
    while not pending.wait(0.05):
        assert time.monotonic() < end
