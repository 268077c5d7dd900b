"""How each collective of torch is carried out by the engine: what is checked before, what runs, what the caller gets.

Every function checks the arguments in the caller's thread, raising TypeError or ValueError, and returns what the lane
then runs; that raises the typed error of a failed outcome. Tensors are written through `.data`, so that autograd does
not count a collective as a change, as it does not with torch's own backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch.distributed import ReduceOp

from ncclguard import _torch
from ncclguard.calls import EMPTY, Call, check_tensor, describe, nbytes_of
from ncclguard.chunking import plan
from ncclguard.execution import AllGather, AllReduce, Barrier, Broadcast, Execution, ReduceScatter, writable
from ncclguard.process_group.staged import AllToAll, Gather, Reduce, Scatter, SparseReduce, as_bytes, divided, overwrite

Perform = Callable[[], None]
#: Runs one engine call to its verdict and raises if that is a failure: (execution, tensor to describe, text, key).
Run = Callable[[Execution, "torch.Tensor | None", str, tuple[object, ...]], None]


class Operation:
    """One collective on one group: the checked call, and the way to the engine.
    `index`: this rank's place in the group.
    """

    def __init__(self, call: Call, index: int, run: Run) -> None:
        self.call = call
        self.index = index
        self.run = run
        self.size = len(call.ranks)

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, tensor: torch.Tensor, op: object) -> Perform:
        if tensor.is_sparse:
            return self._sparse(tensor, op)
        check_tensor(tensor, "tensor", written=True)
        kind = self._reduction("all_reduce", tensor, op)
        closing = nbytes_of(tensor) > self.call.config.closing_nbytes
        pieces = self.call.plan(tensor.numel(), None, tensor.element_size())

        def perform() -> None:
            work = AllReduce(tensor.data, kind, pieces, closing, staged=tensor.is_cuda)
            self.run(work, tensor, f"{describe(tensor)}, {kind}", (kind,))

        return self._unless_alone(perform)

    def _sparse(self, tensor: torch.Tensor, op: object) -> Perform:
        kind = _torch.reduce_op_name(op)
        if kind not in ("SUM", "AVG") or tensor.is_cuda:
            raise ValueError(
                f"{kind} of a sparse tensor on {tensor.device} is not supported: use SUM or AVG on the CPU"
            )
        text = f"sparse {describe(tensor)}, {kind}"
        return self._unless_alone(
            lambda: self.run(SparseReduce(tensor, kind == "AVG"), tensor, text, (kind, "sparse", tensor.sparse_dim()))
        )

    def all_reduce_many(self, tensors: Sequence[torch.Tensor], op: object) -> Perform:
        """As one tensor for each dtype; the callers' are written when all of them have succeeded."""
        for tensor in tensors:
            check_tensor(tensor, "tensor", written=True)
        kinds = [self._reduction("all_reduce", tensor, op) for tensor in tensors]

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
        kind = self._reduction("all_reduce", tensor, op)
        self._check_root(root)
        text = f"{describe(tensor)}, {kind}, dst={self.call.ranks[root]}"
        return self._unless_alone(lambda: self.run(Reduce(tensor, kind, root, self.index), tensor, text, (kind, root)))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: object) -> Perform:
        check_tensor(output, "output", written=True)
        self._check_length(inputs, "inputs")
        kind = self._reduction("reduce_scatter", output, op)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        if inputs[self.index].numel() != output.numel() or any(tensor.dtype != output.dtype for tensor in inputs):
            raise ValueError(
                f"output is {describe(output)}, but the input for this rank is {describe(inputs[self.index])}: make them alike"
            )
        if self.size == 1:
            return lambda: _put(output, inputs[0])
        longest = max(tensor.numel() for tensor in inputs)
        uneven = any(tensor.numel() != longest for tensor in inputs)
        key = (kind, shapes) if uneven else (kind, longest)

        def perform() -> None:
            sent = [_padded(tensor, longest) for tensor in inputs] if uneven else [tensor.data for tensor in inputs]
            target = output.new_empty(longest) if uneven else output.data
            work = ReduceScatter(target, sent, kind, self.call.plan(longest, None, output.element_size()))
            self.run(work, sent[0].reshape(-1), f"{describe(output)}, {kind}", key)
            if uneven:
                _put(output, target[: output.numel()])

        return perform

    def reduce_scatter_flat(self, output: torch.Tensor, tensor: torch.Tensor, op: object) -> Perform:
        return self.reduce_scatter(output, self._cut(tensor, output, "input"), op)

    def reduce_scatter_many(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], op: object
    ) -> Perform:
        """As one tensor for each dtype."""
        pieces = [self._cut(tensor, output, "input") for output, tensor in zip(outputs, inputs, strict=True)]
        for output in outputs:
            self._reduction("reduce_scatter", output, op)

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
        self.call.check("broadcast", tensor)
        self._check_root(root)
        source = self.call.ranks[root]
        closing = nbytes_of(tensor) > self.call.config.closing_nbytes
        pieces = self.call.plan(tensor.numel(), None, tensor.element_size())

        def perform() -> None:
            own = self.call.ranks[self.index]
            work = Broadcast(tensor.data, source, own, pieces, closing, staged=tensor.is_cuda)
            self.run(work, tensor, f"{describe(tensor)}, src={source}", (source,))

        return self._unless_alone(perform)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Perform:
        check_tensor(tensor, "tensor")
        self._check_length(outputs, "outputs")
        for output in outputs:
            check_tensor(output, "output", written=True)
        self.call.check("all_gather", tensor)
        sizes = tuple(output.numel() for output in outputs)
        if sizes[self.index] != tensor.numel() or any(output.dtype != tensor.dtype for output in outputs):
            raise ValueError(
                f"the input is {describe(tensor)}, but its output {describe(outputs[self.index])}: make them alike"
            )
        if self.size == 1:
            return lambda: _put(outputs[0], tensor)
        longest = max(sizes)
        uneven = any(size != longest for size in sizes)

        def perform() -> None:
            targets, sent = [output.data for output in outputs], tensor.data
            if uneven:
                targets, sent = [tensor.new_empty(longest) for _ in outputs], _padded(tensor, longest)
            closing = longest * tensor.element_size() * self.size > self.call.config.closing_nbytes
            pieces = self.call.plan(longest, None, tensor.element_size())
            work = AllGather(targets, sent, self.call.ranks, pieces, closing)
            # By length, because a rank may gather the same elements into another shape.
            self.run(work, sent.reshape(-1), describe(tensor), (sizes,) if uneven else ())
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
        self.call.check("all_gather", tensor)
        self._check_root(root)
        if self.index == root:
            self._check_length(outputs, "outputs")
            for output in outputs:
                check_tensor(output, "output", written=True)
            if any(output.numel() != tensor.numel() or output.dtype != tensor.dtype for output in outputs):
                raise ValueError(f"every output must be like the input, which is {describe(tensor)}")
        if self.size == 1:
            return lambda: _put(outputs[0], tensor)
        text = f"{describe(tensor)}, dst={self.call.ranks[root]}"
        own = outputs if self.index == root else []
        return lambda: self.run(Gather(tensor, own, root), tensor.detach().reshape(-1), text, (root,))

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> Perform:
        check_tensor(output, "output", written=True)
        self.call.check("broadcast", output)
        self._check_root(root)
        if self.index == root:
            self._check_length(inputs, "inputs")
            if any(tensor.numel() != output.numel() or tensor.dtype != output.dtype for tensor in inputs):
                raise ValueError(f"every input must be like the output, which is {describe(output)}")
        if self.size == 1:
            return lambda: _put(output, inputs[0])
        text = f"{describe(output)}, src={self.call.ranks[root]}"
        own = inputs if self.index == root else []
        return lambda: self.run(Scatter(output, own, root), output.detach().reshape(-1), text, (root,))

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Perform:
        """`outputs[i]` is what the i-th rank has for this one; sizes may differ and are
        compared first, because others end a process.
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
        self.call.check("all_gather", first)
        if self.size == 1:
            if outputs[0].numel() != first.numel():
                raise ValueError(f"the output is {describe(outputs[0])}, the input {describe(first)}: make them alike")
            return lambda: _put(outputs[0], first)

        def perform() -> None:
            sizes = self._sizes([tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs])
            moved = tuple(tuple(sent) for sent, _ in sizes)
            work = AllToAll(outputs, inputs, nothing=not any(map(any, moved)))
            text = f"{sum(map(sum, moved))} elements of {str(first.dtype).removeprefix('torch.')}"
            self.run(work, first.new_empty(0), text, (moved,))

        return perform

    def _sizes(self, sent: list[int], expected: list[int]) -> list[tuple[list[int], list[int]]]:
        """What every rank sends and expects. All ranks find the same, so where it does not
        agree all of them raise ValueError.
        """
        own = torch.tensor([sent, expected], dtype=torch.int64)
        tables = [torch.empty_like(own) for _ in range(self.size)]
        self.run(AllGather(tables, own, self.call.ranks, plan(own.numel()), closing=False), own, "sizes", ("sizes",))
        sizes = [(table[0].tolist(), table[1].tolist()) for table in tables]
        for source, (outgoing, _) in enumerate(sizes):
            for target, (_, incoming) in enumerate(sizes):
                if outgoing[target] != incoming[source]:
                    ranks = self.call.ranks
                    raise ValueError(
                        f"all_to_all: rank {ranks[source]} sends {outgoing[target]} elements to rank {ranks[target]}, which "
                        f"expects {incoming[source]}: give input and output splits that agree"
                    )
        return sizes

    def barrier(self) -> Perform:
        return self._unless_alone(lambda: self.run(Barrier(EMPTY), None, "", ()))

    # ------------------------------------------------------------------ inside

    def _reduction(self, kind: str, tensor: torch.Tensor, op: object) -> str:
        name = _torch.reduce_op_name(op)
        self.call.check(kind, tensor, name)  # type: ignore[arg-type]
        return name

    def _unless_alone(self, perform: Perform) -> Perform:
        return perform if self.size > 1 else lambda: None

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"rank {root} is not in the group, which has {self.size}: ranks count from 0 within it")

    def _check_length(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self.size:
            raise ValueError(f"there are {len(tensors)} {what} for a group of {self.size} ranks: give one for each")

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
