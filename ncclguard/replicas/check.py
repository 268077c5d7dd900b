"""`check_replicas`: whether all replicas of a model are alike, to the last bit; and if not, which one is not.

All ranks exchange one checksum of all that they have. Where these differ, further exchanges find the tensors, then the
element. Each step follows from what all ranks have been told, so that all take the same ones.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ncclguard import torch_compat
from ncclguard.checksum import bytes_of, checksum, elements
from ncclguard.collectives import safe_all_gather, safe_broadcast
from ncclguard.config import seconds
from ncclguard.errors import GuardConfigError, ReplicasDiffer
from ncclguard.groups import group_of
from ncclguard.replicas.tensors import KINDS, Item, State, collect, refuse_partitioned, several
from ncclguard.spelling import hinted
from ncclguard.transport.memory import writable
from ncclguard_explain.language import Message, joined, say, told, tr
from ncclguard_explain.ranks import ranks_text

OnDifference = Literal["report", "repair", "stop"]
#: Parts that are told apart in one exchange while the first that differs is looked for.
PARTS: Final = 64
#: Tensors whose checksums are exchanged at once where some differ.
_ITEMS: Final = 4096
#: Bytes that one broadcast of a repair carries, and of a line of text in an exchange.
PIECE, _LINE = 32 << 20, 256
#: Bits of a tensor's word in an exchange: it may differ, was compared before, and is as it was then.
_ALLOWED, _KNOWN, _UNCHANGED = 1, 2, 4
_ROW_MAJOR: Final = torch.contiguous_format


class Exchange(Protocol):
    """A way to give all ranks of a group a small tensor of each; raises the typed error of a failed collective."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks, in order."""

    @property
    def index(self) -> int:
        """The place of this rank among these."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors, all of one shape, as one with a dimension more, in their order."""

    def broadcast(self, tensor: torch.Tensor, index: int) -> None:
        """Write that of the rank at `index` over `tensor`."""


class SafeExchange:
    """An exchange by the guarded collectives, all of which together have `timeout` seconds."""

    def __init__(self, group: ProcessGroup | None, timeout: float | None) -> None:
        self._group = group_of(group)
        self.ranks = (0,) if self._group is None else torch_compat.group_ranks(self._group)
        self.index = 0 if self._group is None else self.ranks.index(dist.get_rank())
        self._end = None if timeout is None else time.monotonic() + timeout

    def _options(self) -> dict[str, Any]:
        left = None if self._end is None else max(0.001, self._end - time.monotonic())
        return {"group": self._group, "timeout": left, "on_lost": "fail", "name": "check_replicas"}

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        found = [torch.empty_like(tensor) for _ in self.ranks]
        safe_all_gather(found, tensor, **self._options()).raise_if_failed()
        return torch.stack(found)

    def broadcast(self, tensor: torch.Tensor, index: int) -> None:
        safe_broadcast(tensor, self.ranks[index], **self._options()).raise_if_failed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference of replicas: a tensor's first element that differs, as two ranks have it.

    `rank` is the lowest that differs from the majority at that element, and `other_rank` the lowest of the majority;
    where there is none, the two lowest ranks that differ. `index`: of the element, in the whole tensor where it
    is sharded; None where the models themselves differ, by what `value` and `other_value` say, or where it could
    not be found again. `bits`: how many of the element's bits differ, 0 without an element.
    """

    name: str
    index: tuple[int, ...] | None
    rank: int
    value: Any
    other_rank: int
    other_value: Any
    bits: int

    def __str__(self) -> str:
        two = {"rank": self.rank, "value": self.value, "other": self.other_rank, "other_value": self.other_value}
        if self.index is None:
            return told("{name}: {value} on rank {rank}, {other_value} on rank {other}", name=self.name, **two)
        name = f"{self.name}{list(self.index)}" if self.index else self.name
        return told(
            "{name} is {value} on rank {rank} and {other_value} on rank {other} (bits that differ: {bits})",
            name=name,
            bits=self.bits,
            **two,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The result of `check_replicas`, the same on all ranks but for `nbytes`; true when all replicas are alike.

    Attributes: `ok`; `ranks` (global ranks that differ, or did before a repair, each from a strict majority of those
    that have the same part; empty where there is none); `first` (the first `Difference`, None where there is none);
    `differing` (names of all tensors that differ, or did); `participants` (who was compared); `tensors`, `nbytes` (how
    many were compared, and this rank's bytes of them); `left_out` (what was not, by name, and why); `repaired`;
    `seconds`.
    """

    ok: bool
    ranks: tuple[int, ...] = ()
    first: Difference | None = None
    differing: tuple[str, ...] = ()
    participants: tuple[int, ...]
    tensors: int
    nbytes: int
    left_out: Mapping[str, str]
    repaired: bool = False
    seconds: float

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        """Say what was found, in a sentence or two, and what to do."""
        if len(self.participants) == 1:
            parts = [tr("one rank has nobody to compare with")]
        elif self.first is None:
            parts = [
                tr(
                    "{ranks} have the same {count} tensors and numbers ({size:.3g} MB)",
                    ranks=ranks_text(self.participants),
                    count=self.tensors,
                    size=self.nbytes / 1e6,
                )
            ]
        else:
            parts = [self._what(), tr("the first: {difference}", difference=str(self.first))]
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            some = ", ".join(names[:2]) + (f", ... ({len(names)})" if len(names) > 2 else "")
            parts.append(tr("not compared: {some} ({why})", some=some, why=why))
        if self.repaired:
            parts.append(tr("written over with the majority's values, and compared again: all agree"))
        elif self.first is not None and not self.differing:
            parts.append(tr("make model and optimizer alike on all ranks"))
        elif self.first is not None and self.ranks:
            text = tr(
                'test the GPU and the memory of {ranks}; on_difference="repair" writes the majority\'s values there',
                ranks=ranks_text(self.ranks),
            )
            parts.append(text)
        elif self.first is not None:
            parts.append(tr("nobody knows whose values are right: go on from a checkpoint"))
        return say(joined("; ", parts))

    def _what(self) -> Message:
        if not self.differing:
            return tr("the ranks have different models or optimizers")
        count, number = len(self.differing), self.tensors
        if not self.ranks:
            return tr(
                "values differ in {count} of {number} tensors, and none has a majority", count=count, number=number
            )
        return tr(
            "{ranks} of {all}: other values than on most ranks in {count} of {number} tensors",
            ranks=ranks_text(self.ranks),
            all=len(self.participants),
            count=count,
            number=number,
        )


@dataclass
class Memory:
    """The buffers of a model as the checks before have found them: which may differ, and their checksums then."""

    may_differ: set[str] = field(default_factory=set)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)


_memories: weakref.WeakKeyDictionary[nn.Module, Memory] = weakref.WeakKeyDictionary()


def memory_of(models: Sequence[nn.Module]) -> Memory:
    """Return what is known of these models, which lasts as long as the first of them."""
    return _memories.setdefault(models[0], Memory())


class Minority(NamedTuple):
    """A tensor, or a part of one, that its ranks do not all have alike; ranks by their places in the exchange.

    `members`: all that have this part; `source`: the first of the majority, None where there is none; `others`: those
    that differ from the majority.
    """

    item: Item
    members: tuple[int, ...]
    source: int | None
    others: tuple[int, ...]
    nbytes: int


# ---------------------------------------------------------------------- what all decide by


Value = TypeVar("Value", bound="tuple[int, ...]")


def majority(values: Mapping[int, Value]) -> tuple[int | None, tuple[int, ...]]:
    """Return the first place of a strict majority's value and the places of all others; None and () without one.

    >>> majority({0: (1,), 1: (2,), 2: (1,)}), majority({0: (1,), 1: (2,)})
    ((0, (1,)), (None, ()))
    """
    value, count = Counter(values.values()).most_common(1)[0]
    if 2 * count <= len(values):
        return None, ()
    return min(place for place, own in values.items() if own == value), tuple(
        place for place, own in values.items() if own != value
    )


def _classes(parts: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the places of ranks that have the same part, where there are several of a part."""
    found: dict[int, list[int]] = {}
    for place, part in enumerate(parts):
        found.setdefault(part, []).append(place)
    return [tuple(places) for places in found.values() if len(places) > 1]


class Comparison:
    """One comparison of a state with those of the other ranks; each method is called on all ranks alike."""

    def __init__(self, state: State, exchange: Exchange, memory: Memory) -> None:
        self._state, self._exchange, self._memory = state, exchange, memory
        self._places = range(len(exchange.ranks))

    def run(self, anew: Callable[[], State] | None = None) -> tuple[list[Minority], Difference | None, tuple[int, ...]]:
        """Return what differs of tensors, the first difference, and the ranks that differ from a majority.

        `anew`: collects the state once more where the checksums were taken over a time, and differ.
        """
        sums = self._state.summed(self._memory.may_differ)
        heads = self._exchange.gather(self._head(sums)).tolist()
        digests = {place: tuple(one[:2]) for place, one in enumerate(heads)}
        if len(set(digests.values())) > 1:
            return self._other_structure(digests)
        classes = [_classes([one[2 + 3 * kind] for one in heads]) for kind in range(KINDS)]
        agreed = all(
            len({tuple(heads[place][3 + 3 * kind : 5 + 3 * kind]) for place in members}) == 1
            for kind in range(KINDS)
            for members in classes[kind]
        )
        found: list[Minority] = []
        if not agreed:
            if anew is not None:
                self._state = anew()
                sums = self._state.summed(self._memory.may_differ)
            found = self._differing(sums, classes)
        rows = zip(self._state.items, sums.tolist(), strict=True)
        self._memory.sums = {item.name: (row[0], row[1]) for item, row in rows if item.buffer}
        named = {self._exchange.ranks[place] for one in found for place in one.others}
        return found, self._first(found[0]) if found else None, tuple(sorted(named))

    def _head(self, sums: torch.Tensor) -> torch.Tensor:
        """Return all that is sent where all agree: a digest of the structure, and each kind's part and checksum."""
        head = torch.zeros(2 + 3 * KINDS, dtype=torch.int64)
        head[:2] = self._state.structure()
        kinds = torch.tensor([item.kind for item in self._state.items])
        for kind, part in enumerate(self._state.parts):
            head[2 + 3 * kind] = part
            head[3 + 3 * kind : 5 + 3 * kind] = checksum(sums[kinds == kind])
        return head

    # ------------------------------------------------------------------ other models

    def _other_structure(
        self, digests: dict[int, tuple[int, ...]]
    ) -> tuple[list[Minority], Difference | None, tuple[int, ...]]:
        source, others = majority(digests)
        lengths = self._exchange.gather(torch.tensor([len(self._state.lines)])).flatten().tolist()
        place = self._narrowed(max(lengths), self._state.structure, self._places) or 0
        line = self._state.lines[place] if place < len(self._state.lines) else ("", "")
        text = f"{line[0]}\n{line[1]}".encode()[:_LINE].ljust(_LINE, b"\0")
        raw = self._exchange.gather(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        lines = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace").partition("\n") for one in raw]
        mine, theirs = _two({place: tuple(one) for place, one in enumerate(raw.tolist())}, source, others)
        name = lines[theirs][0] or lines[mine][0]
        values = [
            lines[one][2] if lines[one][0] == name else " ".join(lines[one][::2]).strip() or tr("nothing")
            for one in (mine, theirs)
        ]
        ranks = self._exchange.ranks
        first = Difference(
            name=name,
            index=None,
            rank=ranks[mine],
            value=values[0],
            other_rank=ranks[theirs],
            other_value=values[1],
            bits=0,
        )
        return [], first, tuple(ranks[place] for place in others)

    # ------------------------------------------------------------------ which tensors

    def _differing(self, sums: torch.Tensor, classes: list[list[tuple[int, ...]]]) -> list[Minority]:
        """Exchange the checksums of all tensors, and return which differ and may not."""
        found: list[Minority] = []
        items, memory = self._state.items, self._memory
        for begin in range(0, len(items), _ITEMS):
            some = items[begin : begin + _ITEMS]
            own = torch.zeros(len(some), 4, dtype=torch.int64)
            own[:, :2] = sums[begin : begin + _ITEMS]
            for row, item in zip(own, some, strict=True):
                before = memory.sums.get(item.name)
                row[2] = item.tensor.numel() * item.tensor.element_size()
                row[3] = (
                    _ALLOWED * (item.name in memory.may_differ)
                    + _KNOWN * (before is not None)
                    + _UNCHANGED * (before == tuple(row[:2].tolist()))
                )
            told_by_all = self._exchange.gather(own).tolist()
            for number, item in enumerate(some):
                rows = {place: tuple(told_by_all[place][number]) for place in self._places}
                different = [
                    (members, {place: rows[place][:3] for place in members})
                    for members in classes[item.kind]
                    if len({rows[place][:3] for place in members}) > 1
                ]
                if not different:
                    continue
                if item.buffer and _may_differ(rows, [values for _, values in different]):
                    memory.may_differ.add(item.name)
                    continue
                for members, values in different:
                    source, others = majority(values)
                    nbytes = values[members[0] if source is None else source][2]
                    found.append(Minority(item, members, source, others, nbytes))
        return found

    # ------------------------------------------------------------------ which element

    def _first(self, minority: Minority) -> Difference:
        """Find the first element that differs, and how it is on two ranks."""
        item, ranks = minority.item, self._exchange.ranks
        size = item.tensor.element_size()
        own = item.tensor.numel()
        takes_part = self._exchange.index in minority.members

        def digest(first: int, last: int) -> torch.Tensor:
            if not takes_part:
                return torch.zeros(2, dtype=torch.int64)
            return checksum(item.tensor, first, min(last, own)).cpu()

        place = self._narrowed(minority.nbytes // size, digest, minority.members)
        found = torch.zeros(2 + len(item.offset), dtype=torch.int64)
        if place is not None and takes_part:
            found[:2].view(torch.uint8)[:size] = bytes_of(elements(item.tensor, place, place + 1))
            for dimension, index in enumerate(_unravelled(place, item.tensor.shape)):
                found[2 + dimension] = item.offset[dimension] + index
        rows = self._exchange.gather(found)
        mine, theirs = _two(
            {one: tuple(rows[one, :2].tolist()) for one in minority.members}, minority.source, minority.others
        )
        values = [rows[one, :2].view(torch.uint8) for one in (mine, theirs)]
        gone = tr("could not be found again")
        shown = [gone if place is None else value[:size].view(item.tensor.dtype).item() for value in values]
        return Difference(
            name=item.name,
            index=None if place is None else tuple(rows[mine, 2:].tolist()),
            rank=ranks[mine],
            value=shown[0],
            other_rank=ranks[theirs],
            other_value=shown[1],
            bits=sum((a ^ b).bit_count() for a, b in zip(*(value.tolist() for value in values), strict=True)),
        )

    def _narrowed(self, length: int, digest: Callable[[int, int], torch.Tensor], members: Iterable[int]) -> int | None:
        """Return the first of `length` places at which the members differ, by digests of parts; None if nowhere."""
        first, last = 0, length
        while True:
            step = max(1, -(-(last - first) // PARTS))
            cuts = range(first, last, step)
            own = torch.stack([digest(cut, min(cut + step, last)) for cut in cuts])
            everybodys = self._exchange.gather(own)[list(members)]
            different = (everybodys != everybodys[0]).any(2).any(0).nonzero()
            if not len(different):
                return None
            first = cuts[int(different[0])]
            last = min(first + step, last)
            if step == 1:
                return first

    # ------------------------------------------------------------------ repair

    def repair(self, found: Iterable[Minority]) -> None:
        """Write the majority's values over those of each minority, in place; each has a majority."""
        for one in found:
            assert one.source is not None
            tensor, size = one.item.tensor, one.item.tensor.element_size()
            writes = self._exchange.index in one.others
            into = (
                tensor if not writes or tensor.is_contiguous() else torch.empty_like(tensor, memory_format=_ROW_MAJOR)
            )
            for begin in range(0, one.nbytes, PIECE):
                end = min(begin + PIECE, one.nbytes)
                piece = torch.empty(end - begin, dtype=torch.uint8)
                if self._exchange.index == one.source:
                    piece.copy_(bytes_of(elements(tensor, begin // size, end // size)))
                self._exchange.broadcast(piece, one.source)
                if writes:
                    with torch.no_grad(), writable(into):
                        elements(into, begin // size, end // size).copy_(piece.view(tensor.dtype))
            if into is not tensor:
                with torch.no_grad(), writable(tensor):
                    tensor.copy_(into)
            if writes and one.item.write is not None:
                one.item.write(tensor.item())


def _may_differ(rows: Mapping[int, tuple[int, ...]], classes: Sequence[Mapping[int, tuple[int, ...]]]) -> bool:
    """Return whether a buffer that differs may: no rank has compared it before, or each rank changes it by itself.

    A rank whose process is a new one has compared nothing; what any rank knows counts.
    """
    known = [words[3] for words in rows.values()]
    if any(word & _ALLOWED for word in known) or not any(word & _KNOWN for word in known):
        return True
    if any(majority(values)[0] is not None for values in classes):
        return False
    return not any(word & _UNCHANGED for word in known)


def _two(values: Mapping[int, tuple[int, ...]], source: int | None, others: Sequence[int]) -> tuple[int, int]:
    """Return a place that differs and one that it differs from, the lowest of the majority if there is one."""
    base = min(values) if source is None else source
    differ = [place for place in (others or sorted(values)) if values[place] != values[base]]
    return (differ or [place for place in values if place != base])[0], base


def _unravelled(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        found.append(index)
    return tuple(reversed(found))


# ---------------------------------------------------------------------- for programs


def check_on_difference(on_difference: object) -> None:
    """Raise GuardConfigError for what is no `on_difference`."""
    if on_difference not in get_args(OnDifference):
        refusal = told('on_difference must be "report", "repair" or "stop", got {value}', value=repr(on_difference))
        raise GuardConfigError(refusal)


@dataclass(frozen=True)
class Options:
    """Options of `check_replicas` and of a step's checks, checked. Raises GuardConfigError for those that cannot be."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    ignore: Sequence[str]
    on_difference: OnDifference

    def __post_init__(self) -> None:
        if not self.models:
            raise GuardConfigError(told("there is no model whose replicas could be compared: give one"))
        check_on_difference(self.on_difference)
        if isinstance(self.ignore, str) or not all(isinstance(one, str) for one in self.ignore):
            raise GuardConfigError(told('ignore must be a list of names or patterns, such as ["*.running_mean"]'))
        refuse_partitioned(self.models, self.optimizers)

    def collected(self) -> State:
        """Collect what is compared, as it is now."""
        return collect(self.models, self.optimizers, self.ignore)


def compare(options: Options, exchange: Exchange, state: State | None = None) -> ReplicaReport:
    """Compare the replicas, and do what is to be done where they differ.

    `state`: with checksums that were taken before; where they differ, it is collected anew. Raises ReplicasDiffer.
    """
    started, memory = time.monotonic(), memory_of(options.models)
    anew = options.collected if state is not None else None
    state = options.collected() if state is None else state
    comparison = Comparison(state, exchange, memory)
    found, first, ranks = comparison.run(anew) if len(exchange.ranks) > 1 else ([], None, ())
    left_out = {**state.left_out, **dict.fromkeys(sorted(memory.may_differ), _MAY_DIFFER)}
    report = ReplicaReport(
        ok=first is None,
        ranks=ranks,
        first=first,
        differing=tuple(dict.fromkeys(one.item.name for one in found)),
        participants=exchange.ranks,
        tensors=len([item for item in state.items if item.name not in left_out]),
        nbytes=state.nbytes,
        left_out=left_out,
        seconds=time.monotonic() - started,
    )
    if report.ok or options.on_difference == "report":
        return report
    if options.on_difference == "stop" or not found or any(one.source is None for one in found):
        raise ReplicasDiffer(report)
    comparison.repair(found)
    again = compare(replace(options, on_difference="stop"), exchange)
    return replace(report, ok=True, repaired=True, seconds=report.seconds + again.seconds)


_MAY_DIFFER: Final = tr("a buffer in which ranks have values of their own")


@hinted
def check_replicas(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    group: ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    ignore: Sequence[str] = (),
    on_difference: OnDifference = "report",
) -> ReplicaReport:
    """Compare the replicas of a model on all ranks of the group, bit by bit, and return a report, true when all agree.

    `model`, `optimizer`: one or several. Compared are names, shapes and dtypes, parameters, buffers, the optimizer's
    state and hyperparameters; of DTensors (FSDP2) the parts that another rank has too, as with HSDP. `ignore`: names
    that may differ, or patterns such as "*.running_mean"; buffers that each rank has its own values in are found by the
    checks themselves. `on_difference`: "report"; "repair": the majority's values are written over the others', in
    place, and all is compared again; "stop": raise. `timeout`: seconds or timedelta for all exchanges together.

    All ranks of the group call it at the same place, between two steps. Where all agree it takes one exchange of 112
    bytes of each rank.

    Raises ReplicasDiffer on all ranks where they differ and it is to stop, or cannot repair them: no majority, or other
    models. Raises GuardConfigError for options that cannot be and for what has no replicas (FSDP1, ZeRO), before
    anything is sent; and as `raise_if_failed` does when an exchange fails.

    >>> import torch, ncclguard as ng
    >>> report = ng.check_replicas(torch.nn.Linear(2, 1))
    >>> bool(report), report.ranks, report.tensors
    (True, (), 2)
    """
    options = Options(
        several(model, nn.Module, "model", "check_replicas"),
        several(optimizer, torch.optim.Optimizer, "optimizer", "check_replicas"),
        ignore,
        on_difference,
    )
    return compare(options, SafeExchange(group, seconds(timeout, "timeout")))


class PeriodicCheck:
    """A comparison once in `every` calls of `step`, for which a part of the tensors is summed in each of them."""

    def __init__(self, options: Options, every: int) -> None:
        self._options, self._every = options, every
        self._key: object = None
        self._state: State | None = None
        self._calls = 0
        self._begins: list[int] = []  # the bytes before each item

    def step(self, exchange: Exchange, key: object) -> ReplicaReport | None:
        """Do a call's part; returns the report of one that completes a comparison. Raises as `check_replicas` does.

        `key`: another one begins anew, the same on all ranks: a rank is gone, or a new one has summed nothing yet.
        """
        if len(exchange.ranks) == 1:
            return None
        if key != self._key:
            self._key, self._state = key, None
        if self._state is None:
            self._state, self._calls = self._options.collected(), 0
            sizes = [item.tensor.numel() * item.tensor.element_size() for item in self._state.items]
            self._begins = list(accumulate(sizes, initial=0))
        self._calls += 1
        if self._calls < self._every:
            part = self._begins[-1] * self._calls / self._every
            self._state.sum_up_to(bisect_left(self._begins, part), memory_of(self._options.models).may_differ)
            return None
        state, self._state = self._state, None
        return compare(self._options, exchange, state)
