"""The table of collectives: how each is carried, kept restorable and undone, what must be equal, and how it is counted.

`safe_*` (`ncclguard.collectives`), the backend "ncclguard" (`ncclguard.process_group`) and the bench all read this
table. A new collective is a row here, an `Execution` where none of those that exist fits, and a function that checks
its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from ncclguard.engine.chunking import ChunkPlan
from ncclguard.engine.execution import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Execution,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    SparseReduce,
)
from ncclguard.protocol.decision import EVERYBODY, NOBODY
from ncclguard.transport.base import Kind

#: Of a collective that has none, such as a barrier.
NO_TENSOR = torch.empty(0, device="cpu")


class Arguments(NamedTuple):
    """The arguments that one rank brings to a collective.

    `tensor`: what is reduced, sent or received, alike on all ranks. `others`: the tensors of which there is one for
    each rank; `outputs`: those that an all-to-all fills. `op`: the name of the reduce op. `root`: the global rank that
    sends to all, or receives from all.
    """

    tensor: torch.Tensor = NO_TENSOR
    others: Sequence[torch.Tensor] = ()
    op: str = ""
    root: int = NOBODY
    outputs: Sequence[torch.Tensor] = ()


class Conditions(NamedTuple):
    """Under which a collective is carried out: the group's global `ranks`, this `rank`, the pieces, a closing round."""

    ranks: tuple[int, ...]
    rank: int
    plan: ChunkPlan
    closing: bool


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One row of the table.

    `carrier`: the collective of the backend that carries the data, None where there are none; whether the backend can
    carry a dtype and a reduce op is asked of it. `execution`: makes what moves the data, keeps them restorable and
    writes the result. `root`: what the text of a call names its root. `needs`: the rank that the collective cannot go
    on without: nobody in particular, its root, or every rank. `closing`: whether all ranks meet once more before one
    calls the collective complete: always, never, or where its result is too large to be kept for others. `whole`:
    whether its bytes are those of what is gathered or scattered, as nccl-tests count; else those of one rank's tensor.
    `traffic`: its factor from algbw to busbw for so many ranks, by nccl-tests (doc/PERFORMANCE.md).
    """

    name: str
    carrier: Kind | None
    execution: Callable[[Arguments, Conditions], Execution]
    root: str = ""
    needs: Literal["nobody", "root", "everybody"] = "nobody"
    closing: Literal["by size", "always", "never"] = "by size"
    whole: bool = False
    traffic: Callable[[int], float] = lambda ranks: 1.0

    def named(self, name: str) -> Collective:
        """Return the same collective under another name, as a part of a larger operation."""
        return replace(self, name=name)

    def detail(self, arguments: Arguments) -> str:
        """The arguments for people, after the tensor: "SUM", "src=0"."""
        root = f"{self.root}={arguments.root}" if self.root else ""
        return ", ".join(part for part in (arguments.op, root) if part)

    def key(self, arguments: Arguments) -> tuple[object, ...]:
        """Return what must be equal on all ranks besides the tensor's shape and dtype."""
        return (*((arguments.op,) if arguments.op else ()), *((arguments.root,) if self.root else ()))

    def awaited(self, arguments: Arguments) -> int:
        """The protocol's word for `needs`."""
        return {"nobody": NOBODY, "root": arguments.root, "everybody": EVERYBODY}[self.needs]

    def closes(self, nbytes: int, ranks: int, kept_nbytes: int) -> bool:
        """Return whether a call that moves so many bytes of each rank has a closing round."""
        if self.closing == "by size":
            return nbytes * (ranks if self.whole else 1) > kept_nbytes
        return self.closing == "always"


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks if ranks > 0 else 0.0


ALL_REDUCE = Collective(
    "all_reduce", "all_reduce", lambda a, c: AllReduce(a.tensor, a.op, c.plan, c.closing, staged=a.tensor.is_cuda),
    traffic=lambda ranks: 2 * _share(ranks),
)  # fmt: skip
BARRIER = Collective("barrier", None, lambda a, c: Barrier(c.plan), closing="never", traffic=lambda ranks: 0.0)
BROADCAST = Collective(
    "broadcast", "broadcast",
    lambda a, c: Broadcast(a.tensor, a.root, c.rank, c.plan, c.closing, staged=a.tensor.is_cuda),
    root="src", needs="root",
)  # fmt: skip
ALL_GATHER = Collective(
    "all_gather", "all_gather", lambda a, c: AllGather(a.others, a.tensor, c.ranks, c.plan, c.closing),
    whole=True, traffic=_share,
)  # fmt: skip
REDUCE_SCATTER = Collective(
    "reduce_scatter", "reduce_scatter", lambda a, c: ReduceScatter(a.tensor, a.others, a.op, c.plan),
    needs="everybody", closing="always", whole=True, traffic=_share,
)  # fmt: skip
ALL_GATHER_OBJECT = ALL_GATHER.named("all_gather_object")
BROADCAST_OBJECT_LIST = BROADCAST.named("broadcast_object_list")
# Collectives of the backend "ncclguard" only, so far.
MESSAGE = BROADCAST.named("send_recv")
REDUCE = Collective(
    "reduce", "all_reduce", lambda a, c: Reduce(a.tensor, a.op, a.root, c.rank), root="dst", needs="root",
    closing="always",
)  # fmt: skip
GATHER = Collective(
    "gather", "all_gather", lambda a, c: Gather(a.tensor, a.others, a.root), root="dst", needs="everybody",
    closing="always",
)  # fmt: skip
SCATTER = Collective(
    "scatter", "broadcast", lambda a, c: Scatter(a.tensor, a.others, a.root), root="src", needs="everybody",
    closing="always",
)  # fmt: skip
SPARSE_ALL_REDUCE = Collective(
    "all_reduce", None, lambda a, c: SparseReduce(a.tensor, a.op == "AVG"), closing="always",
    traffic=ALL_REDUCE.traffic,
)  # fmt: skip


ALL_TO_ALL = Collective(
    "all_to_all", "all_gather", lambda a, c: AllToAll(a.outputs, a.others, nothing=not c.plan.pieces),
    needs="everybody", closing="always", traffic=_share,
)  # fmt: skip

TABLE: dict[str, Collective] = {
    row.name: row
    for row in (
        ALL_REDUCE, BARRIER, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_GATHER_OBJECT, BROADCAST_OBJECT_LIST, MESSAGE,
        REDUCE, GATHER, SCATTER, ALL_TO_ALL,
    )
}  # fmt: skip


def bus_factor(op: str, ranks: int) -> float:
    """Return `busbw` / `algbw` of an operation on `ranks` ranks: how much of its bytes the busiest link has to carry.

    By nccl-tests (doc/PERFORMANCE.md): all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n, where bytes are
    those of the gathered or scattered whole; broadcast 1; a barrier has no bytes, so 0. 1 for any other name.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("barrier", 4)
    (1.5, 0.75, 0.0)
    """
    row = TABLE.get(op)
    return 1.0 if row is None else row.traffic(ranks)
