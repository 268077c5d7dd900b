"""Batches for as many ranks as there are: no sample is lost or repeated when ranks are, within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ncclguard_explain.language import told


class ElasticLoader:
    """Batches out of an endless sequence of epochs, each a permutation of the data set, shared by the ranks.

    A step takes the next `batch_size` samples of the sequence for each rank that takes part, whoever that is, and an
    epoch ends in the middle of a batch where it has to. So `position`, the number of samples that completed steps have
    used, is all there is to keep: `state_dict()` has it, and a step that is done again with fewer ranks begins there.
    `seed`, and `shuffle` (True): the permutation, equal on all ranks. `batch_size` may be changed between two steps on
    all ranks alike. All else goes to torch's DataLoader; its worker processes, if any, start again when the ranks or
    the batch size change. Raises ValueError for a data set without samples or a batch size below 1, TypeError for
    what is neither.

    >>> loader = ElasticLoader(range(10), batch_size=2, shuffle=False)
    >>> loader.take(ranks=(0, 1, 3), rank=3)
    tensor([4, 5])
    >>> loader.done()
    >>> loader.take(ranks=(0, 3), rank=3), loader.indices(loader.position, 4)
    (tensor([8, 9]), [6, 7, 8, 9])
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, *, seed: int = 0, shuffle: bool = True, **options: Any
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise TypeError(told("ElasticLoader takes the data set itself, not a DataLoader: give loader.dataset"))
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                told(
                    "ElasticLoader takes a data set with a length and samples by number, not {kind}: put its "
                    "samples into a list",
                    kind=type(dataset).__name__,
                )
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int):
            raise TypeError(
                told(
                    "batch_size must be a whole number, not {kind}: give for example 32", kind=type(batch_size).__name__
                )
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.position = 0
        self._length = len(dataset)
        if self._length < 1 or batch_size < 1:
            raise ValueError(
                told(
                    "{count} samples in batches of {batch_size}: there must be at least 1 of both",
                    count=self._length,
                    batch_size=batch_size,
                )
            )
        self._seed, self._shuffle = seed, shuffle
        # An iterator draws a seed for its workers when it begins, which must not shift the program's random numbers.
        self._options = {"generator": torch.Generator().manual_seed(seed), **options}
        DataLoader(dataset, batch_sampler=(), **self._options)  # raises for options that it does not know
        self._orders: dict[int, list[int]] = {}
        self._made: tuple[object, ...] = ()  # what `_batches` are for: the next position, ranks, rank, batch size
        self._batches: Iterator[Any] = iter(())
        self._taken = 0

    @property
    def epoch(self) -> int:
        """Return how many times completed steps have used the whole data set."""
        return self.position // self._length

    def take(self, ranks: tuple[int, ...], rank: int) -> Any:
        """The batch of `rank` in the next step of `ranks` (global, in order), from `position` on."""
        wanted = (self.position, ranks, rank, self.batch_size)
        if wanted != self._made:
            share = _Share(self, self.position, ranks.index(rank), len(ranks), self.batch_size)
            self._batches = iter(DataLoader(self.dataset, batch_sampler=share, **self._options))
        batch = next(self._batches)
        self._taken = self.batch_size * len(ranks)
        self._made = (self.position + self._taken, *wanted[1:])
        return batch

    def done(self) -> None:
        """The step that `take` was for is complete on all ranks: go on behind its samples."""
        self.position += self._taken
        self._taken = 0

    def indices(self, position: int, count: int) -> list[int]:
        """The samples at `count` places of the sequence from `position` on."""
        found: list[int] = []
        while len(found) < count:
            epoch, offset = divmod(position + len(found), self._length)
            found += self._order(epoch)[offset : offset + count - len(found)]
        return found

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the checkpoint was."""
        self.position, self._taken = int(state["position"]), 0

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # two epochs meet in a batch; older ones are over
                del self._orders[min(self._orders)]
            generator = torch.Generator().manual_seed(self._seed + epoch)
            drawn = torch.randperm(self._length, generator=generator) if self._shuffle else torch.arange(self._length)
            self._orders[epoch] = drawn.tolist()
        return self._orders[epoch]


class _Share:
    """One rank's batches of indices, without end."""

    def __init__(self, loader: ElasticLoader, position: int, place: int, ranks: int, batch_size: int) -> None:
        self._loader, self._batch = loader, batch_size
        self._start, self._stride = position + place * batch_size, ranks * batch_size

    def __iter__(self) -> Iterator[list[int]]:
        start = self._start
        while True:
            yield self._loader.indices(start, self._batch)
            start += self._stride
