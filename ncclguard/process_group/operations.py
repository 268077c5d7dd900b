"""Collectives of torch, carried out by the engine: what is checked before, what runs, what the caller gets.

Every function checks the arguments in the caller's thread, raising TypeError or ValueError, and returns what the queue
then runs; that raises the typed error of a failed outcome. Tensors are written through `.data`, so that autograd does
not count a collective as a change, as it does not with torch's own backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp

from ncclguard import torch_compat
from ncclguard.engine.call import Terms, check_tensor, describe, nbytes_of
from ncclguard.engine.chunking import EMPTY, ONE, ChunkPlan, plan
from ncclguard.engine.dispatch import check_carried
from ncclguard.engine.execution import as_bytes, divided, overwrite
from ncclguard.engine.table import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    MESSAGE,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SPARSE_ALL_REDUCE,
    Arguments,
    Collective,
)
from ncclguard.errors import GuardError
from ncclguard.transport.memory import reduction, writable
from ncclguard_explain.language import told

Perform = Callable[[], None]
#: What the ranks of an all-to-all tell each other before it.
_SIZES = ALL_GATHER.named(ALL_TO_ALL.name)


class Run(Protocol):
    """Runs one collective of the table to its verdict, and raises if that is a failure."""

    def __call__(self, collective: Collective, arguments: Arguments, cut: ChunkPlan, **said: Any) -> None: ...


class Operation:
    """A checked collective on one group, and the way to the engine; `index`: this rank's place in the group."""

    def __init__(self, terms: Terms, index: int, run: Run) -> None:
        self.terms = terms
        self.index = index
        self.run = run
        self.size = len(terms.ranks)

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, tensor: torch.Tensor, op: object) -> Perform:
        if tensor.is_sparse:
            return self._sparse(tensor, op)
        check_tensor(tensor, "tensor", written=True)
        kind = self._reduction(ALL_REDUCE, tensor, op)
        cut = self._cut_up(tensor)
        return self._unless_alone(lambda: self.run(ALL_REDUCE, Arguments(tensor.data, op=kind), cut))

    def _sparse(self, tensor: torch.Tensor, op: object) -> Perform:
        kind = torch_compat.reduce_op_name(op)
        if kind not in ("SUM", "AVG") or tensor.is_cuda:
            raise ValueError(
                f"{kind} of a sparse tensor on {tensor.device} is not supported: use SUM or AVG on the CPU"
            )
        said = {"detail": f"sparse {describe(tensor)}, {kind}", "key": (kind, "sparse", tensor.sparse_dim())}
        return self._unless_alone(lambda: self.run(SPARSE_ALL_REDUCE, Arguments(tensor, op=kind), ONE, **said))

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: object) -> Perform:
        """Reduce them as one tensor for each dtype; the callers' are written when all of them have succeeded."""
        for tensor in tensors:
            check_tensor(tensor, "tensor", written=True)
        kinds = [self._reduction(ALL_REDUCE, tensor, op) for tensor in tensors]

        def perform() -> None:
            done = []
            for same in _by_dtype(tensors):
                flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
                self.all_reduce(flat, getattr(ReduceOp, kinds[0]))()
                done.append((same, flat))
            for same, flat in done:
                _spread(flat, same)

        return self._unless_alone(perform)

    def reduce(self, tensor: torch.Tensor, root: int, op: object) -> Perform:
        check_tensor(tensor, "tensor", written=True)
        kind = self._reduction(REDUCE, tensor, op)
        arguments = Arguments(tensor, op=kind, root=self._checked_root(root))
        return self._unless_alone(lambda: self.run(REDUCE, arguments, ONE))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object) -> Perform:
        check_tensor(output, "output", written=True)
        self._check_length(inputs, "inputs")
        kind = self._reduction(REDUCE_SCATTER, output, op)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        self._check_own_input(output, inputs)
        if self.size == 1:
            return lambda: _put(output, inputs[0])
        longest = max(tensor.numel() for tensor in inputs)
        uneven = any(tensor.numel() != longest for tensor in inputs)
        key = (kind, shapes) if uneven else (kind, longest)

        def perform() -> None:
            sent = [_padded(tensor, longest) for tensor in inputs] if uneven else [tensor.data for tensor in inputs]
            target = output.new_empty(longest) if uneven else output.data
            cut = self.terms.plan(longest, None, output.element_size())
            like, detail = sent[0].reshape(-1), f"{describe(output)}, {kind}"
            self.run(REDUCE_SCATTER, Arguments(target, sent, op=kind), cut, like=like, detail=detail, key=key)
            if uneven:
                _put(output, target[: output.numel()])

        return perform

    def reduce_scatter_flat(self, output: torch.Tensor, tensor: torch.Tensor, op: object) -> Perform:
        return self.reduce_scatter(output, self._cut(tensor, output, "input"), op)

    def reduce_scatter_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: object
    ) -> Perform:
        """Reduce and scatter them as one tensor for each dtype."""
        pieces = [self._cut(tensor, output, "input") for output, tensor in zip(outputs, inputs, strict=True)]
        for output in outputs:
            self._reduction(REDUCE_SCATTER, output, op)

        def perform() -> None:
            done = []
            of = {id(output): cut for output, cut in zip(outputs, pieces, strict=True)}
            for same in _by_dtype(outputs):
                flat = torch.cat([output.detach().reshape(-1) for output in same])
                sent = [
                    torch.cat([of[id(output)][rank].detach().reshape(-1) for output in same])
                    for rank in range(self.size)
                ]
                self.reduce_scatter(flat, sent, op)()
                done.append((same, flat))
            for same, flat in done:
                _spread(flat, same)

        return perform

    # ------------------------------------------------------------------ moving data

    def broadcast(self, tensor: torch.Tensor, root: int) -> Perform:
        check_tensor(tensor, "tensor", written=True)
        check_carried(BROADCAST, tensor, self.terms)
        source, cut = self._checked_root(root), self._cut_up(tensor)
        return self._unless_alone(lambda: self.run(BROADCAST, Arguments(tensor.data, root=source), cut))

    def message(self, tensor: torch.Tensor, source: int, target: int, tag: int) -> Perform:
        """One message between two ranks of the group, which alone take part."""
        check_carried(MESSAGE, tensor, self.terms)
        ranks, cut = (self.terms.ranks[source], self.terms.ranks[target]), self._cut_up(tensor)
        detail = f"{tensor.numel()} elements, {ranks[0]} to {ranks[1]}, tag {tag}"
        arguments, like = Arguments(tensor.data, root=ranks[0]), tensor.detach().reshape(-1)
        return lambda: self.run(MESSAGE, arguments, cut, like=like, detail=detail, key=(*ranks, tag))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Perform:
        check_tensor(tensor, "tensor")
        self._check_length(outputs, "outputs")
        for output in outputs:
            check_tensor(output, "output", written=True)
        check_carried(ALL_GATHER, tensor, self.terms)
        sizes = self._checked_sizes(outputs, tensor)
        if self.size == 1:
            return lambda: _put(outputs[0], tensor)
        longest = max(sizes)
        uneven = any(size != longest for size in sizes)

        def perform() -> None:
            targets, sent = [output.data for output in outputs], tensor.data
            if uneven:
                targets, sent = [tensor.new_empty(longest) for _ in outputs], _padded(tensor, longest)
            cut = self.terms.plan(longest, None, tensor.element_size())
            # By length, because a rank may gather the same elements into another shape.
            like, key = sent.reshape(-1), (sizes,) if uneven else ()
            self.run(ALL_GATHER, Arguments(sent, targets), cut, like=like, detail=describe(tensor), key=key)
            if uneven:
                for output, target in zip(outputs, targets, strict=True):
                    _put(output, target[: output.numel()])

        return perform

    def all_gather_flat(self, output: torch.Tensor, tensor: torch.Tensor) -> Perform:
        return self.all_gather(self._cut(output, tensor, "output"), tensor)

    def all_gather_many(self, outputs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> Perform:
        """`outputs[k][i]` is `tensors[k]` of the i-th rank; all in one row of bytes."""
        for own, tensor in zip(outputs, tensors, strict=True):
            self._check_length(own, "outputs")
            if any(output.numel() != tensor.numel() or output.dtype != tensor.dtype for output in own):
                raise ValueError(f"every output of {describe(tensor)} must be like it")
        lengths = [nbytes_of(tensor) for tensor in tensors]

        def perform() -> None:
            sent = torch.cat([as_bytes(tensor) for tensor in tensors])
            slots = [torch.empty_like(sent) for _ in range(self.size)]
            self.all_gather(slots, sent)()
            for rank, slot in enumerate(slots):
                for own, part in zip(outputs, divided(slot, lengths), strict=True):
                    overwrite(own[rank], part.clone())  # a view may not start where its dtype wants

        return perform if tensors else lambda: None

    def all_gather_flat_many(self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Perform:
        cut = [self._cut(output, tensor, "output") for output, tensor in zip(outputs, tensors, strict=True)]
        return self.all_gather_many(cut, tensors)

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Perform:
        check_tensor(tensor, "tensor")
        check_carried(GATHER, tensor, self.terms)
        target = self._checked_root(root)
        if self.index == root:
            self._check_length(outputs, "outputs")
            for output in outputs:
                check_tensor(output, "output", written=True)
            if any(output.numel() != tensor.numel() or output.dtype != tensor.dtype for output in outputs):
                raise ValueError(f"every output must be like the input, which is {describe(tensor)}")
        if self.size == 1:
            return lambda: _put(outputs[0], tensor)
        arguments = Arguments(tensor, outputs if self.index == root else [], root=target)
        like, detail = tensor.detach().reshape(-1), f"{describe(tensor)}, dst={target}"
        return lambda: self.run(GATHER, arguments, ONE, like=like, detail=detail)

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Perform:
        check_tensor(output, "output", written=True)
        check_carried(SCATTER, output, self.terms)
        source = self._checked_root(root)
        if self.index == root:
            self._check_scattered(output, inputs)
        if self.size == 1:
            return lambda: _put(output, inputs[0])
        arguments = Arguments(output, inputs if self.index == root else [], root=source)
        like, detail = output.detach().reshape(-1), f"{describe(output)}, src={source}"
        return lambda: self.run(SCATTER, arguments, ONE, like=like, detail=detail)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], known: object = None
    ) -> Perform:
        """Exchange tensors: `outputs[i]` is what the i-th rank has for this one.

        Sizes may differ and are compared first, because others end a process. `known` stands for the sizes where every
        rank knows those of all, and every rank sends something; then only this is compared, with the call.
        """
        self._check_length(outputs, "outputs")
        self._check_length(inputs, "inputs")
        first = inputs[0]
        for output in outputs:
            check_tensor(output, "output", written=True)
        for tensor in (*outputs, *inputs):
            check_tensor(tensor, "tensor")
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise ValueError(f"all tensors must be alike, but there are {describe(first)} and {describe(tensor)}")
        check_carried(ALL_TO_ALL, first, self.terms)
        if self.size == 1:
            if outputs[0].numel() != first.numel():
                raise ValueError(f"the output is {describe(outputs[0])}, the input {describe(first)}: make them alike")
            return lambda: _put(outputs[0], first)

        def perform() -> None:
            if known is not None:
                arguments, like = Arguments(others=inputs, outputs=outputs), first.new_empty(0)
                self.run(ALL_TO_ALL, arguments, ONE, like=like, detail=str(known), key=(known,))
                return
            sizes = self._sizes([tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs])
            moved = tuple(tuple(sent) for sent, _ in sizes)
            cut = ONE if any(map(any, moved)) else EMPTY
            detail = f"{sum(map(sum, moved))} elements of {str(first.dtype).removeprefix('torch.')}"
            arguments, like = Arguments(others=inputs, outputs=outputs), first.new_empty(0)
            self.run(ALL_TO_ALL, arguments, cut, like=like, detail=detail, key=(moved,))

        return perform

    def _sizes(self, sent: list[int], expected: list[int]) -> list[tuple[list[int], list[int]]]:
        """Return what every rank sends and expects. Raises ValueError on all ranks where it does not agree."""
        own = torch.tensor([sent, expected], dtype=torch.int64)
        tables = [torch.empty_like(own) for _ in range(self.size)]
        self.run(_SIZES, Arguments(own, tables), plan(own.numel()), detail="sizes", key=("sizes",))
        sizes = [(table[0].tolist(), table[1].tolist()) for table in tables]
        for source, (outgoing, _) in enumerate(sizes):
            for target, (_, incoming) in enumerate(sizes):
                if outgoing[target] != incoming[source]:
                    ranks = self.terms.ranks
                    raise ValueError(
                        f"all_to_all: rank {ranks[source]} sends {outgoing[target]} elements to rank {ranks[target]}, which "
                        f"expects {incoming[source]}: give input and output splits that agree"
                    )
        return sizes

    def barrier(self, **said: Any) -> Perform:
        """`said`: what is compared besides, and told of where it differs."""
        return self._unless_alone(lambda: self.run(BARRIER, Arguments(), EMPTY, **said))

    # ------------------------------------------------------------------ inside

    def _reduction(self, collective: Collective, tensor: torch.Tensor, op: object) -> str:
        name = torch_compat.reduce_op_name(op)
        # Frameworks that find no gloo take the mean of integers, as NCCL has it: Lightning of its batch sizes.
        integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        check_carried(collective, tensor, self.terms, "SUM" if name == "AVG" and integers else name)
        return name

    def _cut_up(self, tensor: torch.Tensor) -> ChunkPlan:
        return self.terms.plan(tensor.numel(), None, tensor.element_size())

    def _unless_alone(self, perform: Perform) -> Perform:
        return perform if self.size > 1 else lambda: None

    def _checked_root(self, root: int) -> int:
        """The global rank of a rank within the group."""
        if not 0 <= root < self.size:
            raise ValueError(f"rank {root} is not in the group, which has {self.size}: ranks count from 0 within it")
        return self.terms.ranks[root]

    def _check_length(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self.size:
            raise ValueError(f"there are {len(tensors)} {what} for a group of {self.size} ranks: give one for each")

    def _checked_sizes(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the lengths of what is gathered, of which this rank's own is to be that of its tensor."""
        sizes = tuple(output.numel() for output in outputs)
        if sizes[self.index] != tensor.numel() or any(output.dtype != tensor.dtype for output in outputs):
            raise ValueError(
                f"the input is {describe(tensor)}, but its output {describe(outputs[self.index])}: make them alike"
            )
        return sizes

    def _check_own_input(self, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        own = inputs[self.index]
        if own.numel() != output.numel() or any(tensor.dtype != output.dtype for tensor in inputs):
            raise ValueError(
                f"output is {describe(output)}, but the input for this rank is {describe(own)}: make them alike"
            )

    def _check_scattered(self, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        self._check_length(inputs, "inputs")
        if any(tensor.numel() != output.numel() or tensor.dtype != output.dtype for tensor in inputs):
            raise ValueError(f"every input must be like the output, which is {describe(output)}")

    def _cut(self, whole: torch.Tensor, part: torch.Tensor, what: str) -> list[torch.Tensor]:
        """Views of a whole, one for each rank."""
        check_tensor(whole, what)
        check_tensor(part, "tensor")
        if whole.numel() != part.numel() * self.size or whole.dtype != part.dtype:
            raise ValueError(
                f"{what} is {describe(whole)} where {self.size} times {describe(part)} are needed: make it that many elements"
            )
        if not whole.is_contiguous():
            raise ValueError(f"{what} is not contiguous: call contiguous() first")
        return list(whole.detach().view(-1).view(self.size, part.numel()).unbind(0))


class PartOperation(Operation):
    """A collective within each of several parts of a group: one exchange of the whole group, or two, with one verdict.

    So a rank that is lost in one part is lost for all of them at the same place. `places`: where this part's ranks are
    in the group; all parts are as long, and their tensors too. What a part of more than two ranks has in common is
    computed by one of them, so that all have the same bits.
    """

    def __init__(self, whole: Operation, places: Sequence[int]) -> None:
        super().__init__(whole.terms, list(places).index(whole.index), whole.run)
        self.size = len(places)
        self._places = places
        self._everybody = whole.size

    def all_reduce(self, tensor: torch.Tensor, op: object) -> Perform:
        if tensor.is_sparse:
            raise self._refused("all_reduce of a sparse tensor")
        check_tensor(tensor, "tensor", written=True)
        kind, numel = self._combined(ALL_REDUCE, tensor, op), tensor.numel()

        def perform() -> None:
            if self.size == 2:  # one exchange has as many bytes as two of a half each
                _put(tensor, self._reduced(ALL_REDUCE.name, [_row(tensor)] * 2, kind))
                return
            share = -(-numel // self.size)
            sent = list(_padded(tensor, share * self.size).view(self.size, share).unbind(0))
            total = self._reduced(ALL_REDUCE.name, sent, kind)
            shares = [torch.empty_like(total) for _ in sent]
            self._exchange(ALL_REDUCE.name, shares, [total] * self.size, (kind, numel, "shares"))
            _put(tensor, torch.cat(shares)[:numel])

        return self._unless_alone(perform) if numel else lambda: None

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object) -> Perform:
        check_tensor(output, "output", written=True)
        self._check_length(inputs, "inputs")
        kind = self._combined(REDUCE_SCATTER, output, op)
        self._check_own_input(output, inputs)
        if self.size == 1:
            return lambda: _put(output, inputs[0])
        return lambda: _put(output, self._reduced(REDUCE_SCATTER.name, [_row(one) for one in inputs], kind))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Perform:
        check_tensor(tensor, "tensor", written=True)
        source = self._source(root)
        return self._unless_alone(lambda: _put(tensor, self._from(source, tensor, [_row(tensor)] * self.size)))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Perform:
        check_tensor(output, "output", written=True)
        source = self._source(root)
        if self.index == source:
            self._check_scattered(output, inputs)
        if self.size == 1:
            return lambda: _put(output, inputs[0])
        return lambda: _put(output, self._from(source, output, [_row(one) for one in inputs]))

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Perform:
        check_tensor(tensor, "tensor")
        self._check_length(outputs, "outputs")
        for output in outputs:
            check_tensor(output, "output", written=True)
        sizes = self._checked_sizes(outputs, tensor)
        if self.size == 1:
            return lambda: _put(outputs[0], tensor)
        return lambda: self._exchange(ALL_GATHER.name, outputs, [_row(tensor)] * self.size, sizes)

    def reduce(self, tensor: torch.Tensor, root: int, op: object) -> Perform:
        raise self._refused("reduce")

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> Perform:
        raise self._refused("gather")

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], known: object = None
    ) -> Perform:
        raise self._refused("all_to_all")

    @staticmethod
    def _refused(what: str) -> GuardError:
        return GuardError(
            told(
                "{what} is not carried on a group of the mesh of a model that goes on without lost ranks: make a group "
                "for it with new_group",
                what=what,
            )
        )

    def _combined(self, collective: Collective, tensor: torch.Tensor, op: object) -> str:
        kind = self._reduction(collective, tensor, op)
        if kind not in _COMBINE:
            raise self._refused(f"{collective.name} with {kind}")
        return kind

    def _source(self, root: int) -> int:
        self._checked_root(root)
        return root

    def _from(self, source: int, like: torch.Tensor, sent: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the rank at `source` of this part has `sent` this one."""
        found, nothing = _row(like).new_empty(like.numel()), _row(like).new_empty(0)
        received = [found if place == source else nothing for place in range(self.size)]
        inputs = sent if self.index == source else [nothing] * self.size
        self._exchange(BROADCAST.name, received, inputs, (source, like.numel()))
        return found

    def _reduced(self, name: str, inputs: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
        """Return the reduction of what all ranks of this part have for this one.

        It is added up in the order of the ring that carries a group's own: the next rank's first, this one's last.
        """
        combine = _COMBINE[kind]
        received = [torch.empty_like(inputs[self.index]) for _ in inputs]
        self._exchange(name, received, inputs, (kind, *(one.numel() for one in inputs)))
        total, *others = (received[(self.index + distance) % self.size] for distance in range(1, self.size + 1))
        for other in others:
            total = combine(total, other)
        reduction(kind).finish(total, self.size)
        return total

    def _exchange(
        self, name: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], said: Sequence[object]
    ) -> None:
        """Send `inputs[i]` to the i-th rank of this part, and get `outputs[i]` from it."""
        nothing = _row(outputs[0]).new_empty(0)
        sent, received = [nothing] * self._everybody, [nothing] * self._everybody
        for place, output, tensor in zip(self._places, outputs, inputs, strict=True):
            sent[place], received[place] = tensor, output
        detail = f"{sum(output.numel() for output in outputs)} elements, in parts of {self.size} ranks"
        arguments = Arguments(others=sent, outputs=received)
        self.run(ALL_TO_ALL.named(name), arguments, ONE, like=nothing, detail=detail, key=(self.size, *said))


#: How two ranks' tensors are reduced.
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """In an order that is the same on all ranks."""
    ordered = sorted(tensors, key=lambda tensor: str(tensor.dtype))  # stable
    return [list(same) for _, same in groupby(ordered, key=lambda tensor: tensor.dtype)]


def _spread(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for tensor, part in zip(tensors, divided(flat, [tensor.numel() for tensor in tensors]), strict=True):
        _put(tensor, part)


def _put(tensor: torch.Tensor, part: torch.Tensor) -> None:
    with writable(tensor):
        tensor.data.copy_(part.detach().view(tensor.shape))


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat, flat.new_zeros(numel - flat.numel())])
