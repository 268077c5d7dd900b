"""Shards that are there twice, so that a training whose state is sharded goes on when a rank is lost (FSDP2, HSDP).

After each optimizer step every rank sends its shard, parameters and the optimizer's state, to its neighbour, which
keeps it in host memory; and it keeps its own. A step counts when these copies are complete on all ranks. Until then
those of the step before are kept, so that whatever happens in a step, all survivors have the state from before it:
their own, and the lost one's with its neighbour. They deal it out anew among themselves, by the rows of each tensor,
and the model and the optimizer go on as the same objects with a smaller mesh.

Where a mesh has replicas (HSDP), the ranks at the same place of each have the same shard, so that nothing is sent: a
step counts when all have said that they have made it, and each keeps its own shard. As many ranks as are left make a
mesh with as few parts as there were at first, or the next larger number by which theirs can be divided: a single
replica in the worst case. `copies` counts the replicas: neighbours keep what is missing to it.

A copy ends with a checksum that its owner took of what it sent. It is compared when the copy has arrived, and again
before it is used: one that is not as it was is left aside, on all ranks alike.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from ncclguard import torch_compat
from ncclguard.checksum import checksum
from ncclguard.coordination.liveness import host_key
from ncclguard.errors import GuardConfigError, GuardError
from ncclguard.process_group.group import GuardedProcessGroup
from ncclguard.torch_compat import sharding
from ncclguard_explain.language import joined, say, told, tr
from ncclguard_explain.ranks import ranks_text

log = logging.getLogger("ncclguard")

#: Bytes that a rank sends to another in one collective.
PIECE = 32 << 20
#: Where tensors begin in a row of bytes: any dtype may. PIECE is a multiple of it.
_ALIGNED = 16
#: Bytes of the checksum behind a row.
_SUM = 16
#: How often what has not arrived as it was sent is sent.
TRIES = 3


class Sharded(NamedTuple):
    """One tensor that is sharded on dimension 0: a parameter, by its number, or a value of its optimizer's state."""

    parameter: int
    key: str  # empty for the parameter itself
    shape: tuple[int, ...]
    dtype: torch.dtype


class Layout:
    """The layout of some tensors' shards in a row of bytes, when `count` ranks share them as torch's `chunk` does.

    The row is as long for each rank, though the last ones may have fewer rows of a tensor, or none.

    >>> layout = Layout([Sharded(0, "", (5, 2), torch.float32)], 2)
    >>> layout.rows(0, 0), layout.rows(0, 1), layout.nbytes
    ((0, 3), (3, 5), 32)
    """

    def __init__(self, tensors: Sequence[Sharded], count: int) -> None:
        self.tensors = tuple(tensors)
        self.count = count
        self.row_numels = [_product(tensor.shape[1:]) for tensor in tensors]
        self.chunks = [-(-tensor.shape[0] // count) for tensor in tensors]
        sizes = [
            chunk * numel * tensor.dtype.itemsize
            for tensor, chunk, numel in zip(tensors, self.chunks, self.row_numels, strict=True)
        ]
        self.starts = [0, *accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        self.nbytes = self.starts[-1]

    def rows(self, number: int, index: int) -> tuple[int, int]:
        """The first row of a tensor that the rank at `index` has, and the one behind its last."""
        length, chunk = self.tensors[number].shape[0], self.chunks[number]
        return min(index * chunk, length), min((index + 1) * chunk, length)

    def part(self, row: torch.Tensor, number: int, index: int) -> torch.Tensor:
        """The shard of a tensor, as a view of the bytes of the rank at `index`."""
        tensor, (first, last) = self.tensors[number], self.rows(number, index)
        begin = self.starts[number]
        end = begin + (last - first) * self.row_numels[number] * tensor.dtype.itemsize
        return row[begin:end].view(tensor.dtype).view(last - first, *tensor.shape[1:])


def _product(sizes: Sequence[int]) -> int:
    return torch.Size(sizes).numel()


def keepers(members: Sequence[int], hosts: Mapping[int, int], copies: int, parts: int) -> dict[int, tuple[int, ...]]:
    """Choose which ranks keep copies of each rank's shard: those that come next when the hosts take turns.

    Left out are those that have the same of `parts` shards themselves.

    >>> keepers((0, 1, 2, 3), {0: 7, 1: 7, 2: 8, 3: 8}, 1, 4)
    {0: (2,), 2: (1,), 1: (3,), 3: (0,)}
    """
    which = {rank: place % parts for place, rank in enumerate(members)}
    met: dict[int, int] = {}
    turns = []
    for rank in members:
        turns.append((met.get(hosts[rank], 0), rank))
        met[hosts[rank]] = met.get(hosts[rank], 0) + 1
    ring = [rank for _, rank in sorted(turns)]
    return {
        rank: tuple(one for one in (*ring[place + 1 :], *ring[:place]) if which[one] != which[rank])[:copies]
        for place, rank in enumerate(ring)
    }


def parts_of(ranks: int, least: int) -> int:
    """Return in how many parts so many ranks share the state: the fewest from `least` on of which all have one.

    >>> parts_of(6, 2), parts_of(7, 2), parts_of(63, 8), parts_of(1, 2)
    (2, 7, 9, 1)
    """
    return next((parts for parts in range(least, ranks) if ranks % parts == 0), ranks)


@dataclass
class Copies:
    """The copies of one step and some tensors: this rank's own shards, and those kept for others, by rank.

    `kept_by`: for each member, in order, who keeps copies of its shard. Each row of bytes has its checksum behind it;
    `total`: that of this rank's row, when it was sent.
    """

    layout: Layout
    kept_by: dict[int, tuple[int, ...]]
    own: torch.Tensor
    others: dict[int, torch.Tensor] = field(default_factory=dict)
    total: torch.Tensor | None = None

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self.kept_by))

    def place(self, rank: int) -> int:
        """Return which of the parts a member has."""
        return self.members.index(rank) % self.layout.count

    def seal(self) -> None:
        """Put the checksum behind this rank's own row, the one that was sent if it was."""
        self.own[-_SUM:] = _total(self.own[:-_SUM]) if self.total is None else self.total


def told_by_all(
    group: GuardedProcessGroup, rank: int, members: tuple[int, ...], last: int, ranks: Sequence[int]
) -> dict[int, list[int]]:
    """Tell all members of some ranks, up to `last`; returns what each that has any has told. `rank`: this one."""
    if len(members) == 1:
        return {rank: list(ranks)} if ranks else {}
    own = torch.zeros(last + 1, dtype=torch.uint8)
    own[list(ranks)] = 1
    told_by_each = own.new_empty(len(members) * own.numel())
    group.all_gather_single(told_by_each, own).wait()
    found = told_by_each.view(len(members), -1)
    return {one: row.nonzero().flatten().tolist() for one, row in zip(members, found, strict=True) if row.any()}


def told_hosts(group: GuardedProcessGroup, members: tuple[int, ...]) -> dict[int, int]:
    """Return which members share a host; told when all copies are new."""
    own = torch.tensor([zlib.crc32(host_key().encode())])
    said = own.new_empty(len(members))
    group.all_gather_single(said, own).wait()
    return dict(zip(members, said.tolist(), strict=True))


def make_known(
    group: GuardedProcessGroup, ranks: tuple[int, ...], members: tuple[int, ...], whole: GuardedProcessGroup
) -> None:
    """Have torch know a group made by hand, once, by a name of its own: that of `members`, or a part of it."""
    if group not in torch_compat.known_groups():
        key = zlib.crc32(str((members, ranks) if group.is_part else members).encode())
        name = f"{torch_compat.group_name(whole)}-{'part-' * group.is_part}{key:08x}"
        sharding.make_known(group, name, ranks, whole)


def sealed(data: torch.Tensor) -> torch.Tensor:
    """Return a row of bytes with the checksum behind it that `intact` compares."""
    return torch.cat([data, _total(data)])


def intact(row: torch.Tensor) -> bool:
    """Return whether a row of bytes is as it was when the checksum behind it was taken."""
    return row.numel() <= _SUM or torch.equal(_total(row[:-_SUM]), row[-_SUM:])


def _total(data: torch.Tensor) -> torch.Tensor:
    """Return the checksum of a row, in bytes: of the checksums of its pieces, as they are sent."""
    return checksum(torch.stack([checksum(piece) for piece in torch.split(data, PIECE)])).view(torch.uint8)


class Live(NamedTuple):
    """The tensors that are sharded now, and this rank's part of each."""

    tensors: list[Sharded]
    parts: list[torch.Tensor]


class Shards:
    """The sharded state of models and their optimizers, on one group, with each shard on `copies` further ranks.

    `settle` and `keep` are called by all members at the same place, and raise what the failed collective raises, with
    nothing changed that a later `settle` among fewer would need. `load`: loads the newest checkpoint on all ranks
    alike, where a shard is lost with all its copies.
    """

    #: Models are dealt out by `settle` too, also to a new rank.
    models_are_whole = False

    def __init__(
        self,
        group: GuardedProcessGroup,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        copies: int,
        load: Callable[[], object] | None,
    ) -> None:
        self.models, self.optimizers = tuple(models), tuple(optimizers)
        for model in models:
            found = sharding.obstacle(model, group)
            if found:
                raise GuardConfigError(
                    told("{name} cannot go on without a rank: {obstacle}", name=type(model).__name__, obstacle=found)
                )
            if sharding.mesh_of([model]).shape != sharding.mesh_of(models).shape:
                raise GuardConfigError(told("sharded models of one step have meshes of one shape: make them alike"))
        if not optimizers:
            raise GuardConfigError(told("a sharded model goes on with its optimizer: give that to resilient_step too"))
        self._group = group
        self._copies, self._load = copies, load
        for one in (one for model in models for one in sharding.groups_of(model)):
            _become_part(one, group)
        self._least = sharding.mesh_of(models).shape[-1]  # the parts that the state was cut into at first
        # A lost shard may be had from another rank, so all agree on each step, and tell each other of damage.
        self._is_held_twice = copies > 0 or sharding.replicas(models[0]) > 1
        self._parameters = sharding.parameters(models)
        known = {id(parameter) for parameter in self._parameters}
        for optimizer in optimizers:
            for each in (p for one in optimizer.param_groups for p in one["params"]):
                if id(each) not in known:
                    raise GuardConfigError(
                        told(
                            "the optimizer has a parameter that is in none of the models: make it after "
                            "fully_shard, of model.parameters()"
                        )
                    )
        self._members = torch_compat.group_ranks(group)
        self._rank = self._members[group.rank()]
        self._hosts: dict[int, int] = {}
        self._fixed: Copies | None = None  # of parameters that no optimizer has
        self._moving: Copies | None = None
        self._plain: list[tuple[nn.Parameter, torch.Tensor]] = []  # what is not sharded, with a copy
        self._states: list[dict[str, Any] | None] = []  # of each parameter, where no shard: a number of `Sharded`
        self._seen: object = None
        self._spare: list[torch.Tensor] = []
        self._anew: set[int] = set()  # members whose process is a new one, which has no shards yet

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that this rank has for copies now."""
        kept = [copies for copies in (self._fixed, self._moving) if copies is not None]
        rows = [row for copies in kept for row in (copies.own, *copies.others.values())]
        return sum(row.numel() for row in (*rows, *self._spare))

    # ------------------------------------------------------------------ what steps call

    def settle(self, members: tuple[int, ...], group: GuardedProcessGroup) -> None:
        """Have the state of the last complete step lie on `members`, of which `group` is made, before a try begins."""
        if members != self._members or self._anew:
            self._deal_out(members, group)
        elif self._seen != self._versions():  # the first time, or a checkpoint was loaded
            self._fixed = self._moving = None
            self.keep()

    def forget_step(self) -> None:
        """Have the models begin their next step as if the one that failed had not begun."""
        for model in self.models:
            sharding.reset(model)

    def keep(self) -> None:
        """The step is complete, once all members have the copies of what it made: parameters, optimizers' state."""
        fixed, moving = self._live()
        if not self._hosts:
            self._hosts = told_hosts(self._group, self._members)
        if self._fixed is not None and self._fixed.layout.tensors != tuple(fixed.tensors):
            self._fixed = None  # a parameter was frozen, or is not any more
        kept_fixed, kept_moving = self._fixed, self._moving
        layouts = [self._layout(live.tensors, self._members) for live in (fixed, moving)]
        if kept_fixed is None:
            kept_fixed = self._sent(layouts[0], self._members, self._reader(layouts[0], fixed))
        received = self._sent(layouts[1], self._members, self._reader(layouts[1], moving))
        # From here on all members have them: what follows is this rank's own doing.
        if self._fixed is None:
            self._copy_own(kept_fixed, fixed, None)
            self._fixed = kept_fixed
        self._copy_own(received, moving, kept_moving)
        self._moving = received
        self._note()

    # ------------------------------------------------------------------ a new rank

    def begins_anew(self, rank: int) -> None:
        """Another process has taken this rank's place, and has none of its shards until the next `settle`."""
        self._anew.add(rank)

    def state_for_newcomer(self) -> dict[str, Any]:
        """Return what a new rank needs before it takes part in a `settle` that deals out shards to it too.

        It is the same on all members, between two steps; what one of them says will do.
        """
        if self._fixed is None or self._moving is None:
            raise GuardError(told("there are no copies yet: call settle before a rank is taken in"))
        return {
            "tensors": (self._fixed.layout.tensors, self._moving.layout.tensors),
            "kept_by": self._moving.kept_by,
            "parts": self._moving.layout.count,
            "hosts": self._hosts,
            "anew": tuple(self._anew),
            "plain": [value for _, value in self._plain],
            "states": self._states,
            "buffers": [list(model.buffers()) for model in self.models],
            "groups": [
                [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
                for optimizer in self.optimizers
            ],
        }

    def take_state(self, state: Mapping[str, Any]) -> None:
        """On the new rank, whose models are sharded over as many ranks as the job began with."""
        self._members = tuple(sorted(state["kept_by"]))
        self._fixed, self._moving = (
            Copies(Layout(tensors, state["parts"]), state["kept_by"], _NOTHING) for tensors in state["tensors"]
        )
        self._hosts, self._states = dict(state["hosts"]), list(state["states"])
        self._anew = set(state["anew"])
        plain = [parameter for parameter in self._parameters if not sharding.is_sharded(parameter)]
        self._plain = list(zip(plain, state["plain"], strict=True))
        with torch.no_grad():
            for model, values in zip(self.models, state["buffers"], strict=True):
                for buffer, value in zip(model.buffers(), values, strict=True):
                    buffer.copy_(value)
        for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
            for own, group in zip(optimizer.param_groups, groups, strict=True):
                own.update(group)

    # ------------------------------------------------------------------ the live state

    def _live(self) -> tuple[Live, Live]:
        """Return what no optimizer changes, and what one does. Raises GuardConfigError for state of an unknown kind."""
        trained = {id(p) for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]}
        fixed, moving = Live([], []), Live([], [])
        for number, parameter in enumerate(self._parameters):
            if sharding.is_sharded(parameter):
                into = moving if id(parameter) in trained else fixed
                into.tensors.append(Sharded(number, "", tuple(parameter.shape), parameter.dtype))
                into.parts.append(sharding.local(parameter))
                for key, value in self._state_of(parameter).items():
                    if sharding.is_sharded(value):
                        into.tensors.append(Sharded(number, key, tuple(value.shape), value.dtype))
                        into.parts.append(sharding.local(value))
                        if not sharding.on_first_dimension(value):
                            raise GuardConfigError(
                                told(
                                    "{key} of the optimizer's state is sharded as {placements}",
                                    key=key,
                                    placements=value.placements,
                                )
                            )
                    elif isinstance(value, torch.Tensor) and value.numel() > 1 and not sharding.is_whole(value):
                        raise GuardConfigError(
                            told(
                                "{key} of the optimizer's state is a plain tensor of {shape} for a parameter "
                                "that is sharded, so nobody knows which rows it is of: use an optimizer of "
                                "torch.optim",
                                key=key,
                                shape=tuple(value.shape),
                            )
                        )
        return fixed, moving

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]  # type: ignore[no-any-return]
        return {}

    def _note(self) -> None:
        """Keep what is not sharded, and know the state again."""
        self._plain = [(p, p.detach().clone()) for p in self._parameters if not sharding.is_sharded(p)]
        self._states = []
        for parameter in self._parameters:
            state = self._state_of(parameter)
            kept = {key: _SHARDED if sharding.is_sharded(value) else _clone(value) for key, value in state.items()}
            self._states.append(kept if state else None)
        self._seen = self._versions()

    def _versions(self) -> object:
        """Unlike what it was as soon as anybody has written into the state, or put other tensors there."""
        fixed, moving = self._live()
        plain = [p for p in self._parameters if not sharding.is_sharded(p)]
        return [(id(tensor), torch_compat.version_of(tensor)) for tensor in (*fixed.parts, *moving.parts, *plain)]

    # ------------------------------------------------------------------ copies

    def _layout(self, tensors: Sequence[Sharded], members: tuple[int, ...]) -> Layout:
        """Return how `members` share these tensors."""
        return Layout(tensors, parts_of(len(members), self._least))

    def _reader(self, layout: Layout, live: Live) -> Callable[[int, int], torch.Tensor]:
        """Reads bytes of the row of this rank's parts, which are written into one piece that is used again."""
        device = live.parts[0].device if live.parts else torch.device("cpu")
        piece = torch.empty(min(PIECE, layout.nbytes + _SUM), dtype=torch.uint8, device=device)

        def read(begin: int, end: int) -> torch.Tensor:
            piece.zero_()  # between tensors, too, for the checksum
            for start, part in zip(layout.starts, live.parts, strict=False):
                nbytes = part.numel() * part.element_size()
                first, last = max(start, begin), min(start + nbytes, end)
                if first < last:
                    source = part.reshape(-1).view(torch.uint8)[first - start : last - start]
                    piece[first - begin : last - begin].copy_(source)
            return piece[: end - begin]

        return read

    def _sent(self, layout: Layout, members: tuple[int, ...], read: Callable[[int, int], torch.Tensor]) -> Copies:
        """Send this rank's row, which `read` has, to those who keep it, and get those that this rank keeps."""
        for _ in range(TRIES):
            copies = self._sent_once(layout, members, read)
            damaged = self._named(members, [rank for rank, row in copies.others.items() if not intact(row)])
            if not damaged:
                return copies
            self._say(members, (
                tr("a copy of the shard of {ranks} did not arrive at rank {rank} as it was sent: it is sent again", "log",
                   ranks=ranks_text(ranks), rank=rank) for rank, ranks in damaged.items()
            ))  # fmt: skip
        text = told(
            "copies of shards did not arrive at {ranks} as they were sent, {count} times: look at the network and the "
            "memory of these ranks",
            ranks=ranks_text(damaged),
            count=TRIES,
        )
        raise GuardError(text)

    def _sent_once(self, layout: Layout, members: tuple[int, ...], read: Callable[[int, int], torch.Tensor]) -> Copies:
        missing = max(0, self._copies - len(members) // layout.count + 1)
        by_rank = keepers(members, self._hosts, missing, layout.count)
        sources = [rank for rank, kept_by in by_rank.items() if self._rank in kept_by]
        copies = Copies(layout, by_rank, _NOTHING)
        copies.others = {rank: self._row(layout.nbytes) for rank in sources}
        if len(members) == 1 or not missing or not layout.nbytes:
            return copies
        total, sums = layout.nbytes + _SUM, list[torch.Tensor]()
        for begin in range(0, total, PIECE):
            end = min(begin + PIECE, total)
            sent = read(begin, end)
            if begin < layout.nbytes:
                sums.append(checksum(sent[: layout.nbytes - begin]))
            if end == total:
                copies.total = checksum(torch.stack(sums)).view(torch.uint8)
                sent[-_SUM:] = copies.total
            inputs = [sent if rank in by_rank[self._rank] else sent[:0] for rank in members]
            direct = sent.device.type == "cpu"
            outputs = [
                (copies.others[rank][begin:end] if direct else torch.empty_like(sent)) if rank in sources else sent[:0]
                for rank in members
            ]
            self._group.exchange(outputs, inputs, f"copies, bytes {begin} to {end} of {total}").wait()
            if not direct:
                for rank, output in zip(members, outputs, strict=True):
                    if rank in sources:
                        copies.others[rank][begin:end].copy_(output)
        return copies

    def _named(self, members: tuple[int, ...], ranks: Sequence[int]) -> dict[int, list[int]]:
        """Tell all members of some former or present ones; returns what each that has any has told."""
        if not self._is_held_twice:
            return {self._rank: list(ranks)} if ranks else {}
        return told_by_all(self._group, self._rank, members, max(*self._members, *members), ranks)

    def _say(self, members: tuple[int, ...], texts: Iterable[str]) -> None:
        """One rank logs them."""
        if self._rank == members[0]:
            for text in texts:
                log.error("ncclguard: %s", say(text))

    def _row(self, nbytes: int) -> torch.Tensor:
        """Host memory, of an older copy if there is one of that length."""
        for place, row in enumerate(self._spare):
            if row.numel() == nbytes + _SUM:
                return self._spare.pop(place)
        return torch.empty(nbytes + _SUM, dtype=torch.uint8)

    def _copy_own(self, copies: Copies, live: Live, before: Copies | None) -> None:
        """Keep this rank's own shards too, and give the memory of the copies before to those that come next."""
        self._spare.clear()
        if before is not None and before.layout.tensors == copies.layout.tensors:
            copies.own = before.own
            self._spare = list(before.others.values())
        else:
            copies.own = torch.zeros(copies.layout.nbytes + _SUM, dtype=torch.uint8)
        index = copies.place(self._rank)
        for number, part in enumerate(live.parts):
            copies.layout.part(copies.own, number, index).copy_(part)
        if self._is_held_twice:
            copies.seal()

    # ------------------------------------------------------------------ without those that are lost

    def _deal_out(self, members: tuple[int, ...], group: GuardedProcessGroup) -> None:
        started = time.monotonic()
        self.forget_step()
        damaged: dict[int, list[int]] = {}
        if self._fixed is None or self._moving is None:
            missing = tuple(rank for rank in self._members if rank not in members or rank in self._anew)
        else:
            damaged = self._named(members, self._damaged())
            self._say(members, (
                tr("rank {rank}'s copy of the shard of {ranks} is not as it was when it was made, and is not used", "log",
                   ranks=ranks_text(ranks), rank=rank) for rank, ranks in damaged.items()
            ))  # fmt: skip
            holders = self._holders(members, damaged)
            missing = tuple(rank for rank in self._members if self._moving.place(rank) not in holders)
        if missing:
            self._begin_again(missing, damaged, members, group)
            return
        assert self._fixed is not None
        assert self._moving is not None
        if not set(members) <= set(self._hosts):
            self._hosts = told_hosts(self._group, members)
        dealt = []
        for copies in (self._fixed, self._moving):
            fresh = self._dealt(copies, holders, members)
            sent = self._sent(fresh.layout, members, lambda begin, end, row=fresh.own: row[begin:end])  # type: ignore[misc]
            sent.own = fresh.own
            sent.seal()
            dealt.append(sent)
        self._install(dealt, members, group)
        self._fixed, self._moving = dealt
        self._spare.clear()
        self._note()
        if self._rank == members[0]:
            taken = time.monotonic() - started
            have = tr(
                "{ranks} have the shards of all after {seconds:.1f} s", "log", ranks=ranks_text(members), seconds=taken
            )
            if len(members) == 1:
                have = tr(
                    "{ranks} has the shards of all after {seconds:.1f} s",
                    "log",
                    ranks=ranks_text(members),
                    seconds=taken,
                )
            log.warning("ncclguard: %s", say(have))

    def _damaged(self) -> list[int]:
        """Return whose shards this rank has, and not as they were when they were copied."""
        if not self._is_held_twice or self._rank in self._anew:
            return []
        kept = [
            {self._rank: copies.own, **copies.others} for copies in (self._fixed, self._moving) if copies is not None
        ]
        return sorted({rank for rows in kept for rank, row in rows.items() if not intact(row)})

    def _holders(self, members: tuple[int, ...], damaged: Mapping[int, Sequence[int]]) -> Holders:
        """Return of whom each part can be had, where it can."""
        assert self._moving is not None
        holders: Holders = {}
        for rank, kept_by in sorted(self._moving.kept_by.items()):
            for one in (rank, *kept_by):
                if one in members and one not in self._anew and rank not in damaged.get(one, ()):
                    holders.setdefault(self._moving.place(rank), []).append((one, rank))
        return holders

    def _dealt(self, copies: Copies, holders: Holders, members: tuple[int, ...]) -> Copies:
        """This rank's part of all rows, when `members` share them; each row is sent by one of those that have it."""
        for _ in range(TRIES):
            dealt, wrong = self._dealt_once(copies, holders, members)
            damaged = self._named(members, wrong)
            if not damaged:
                return dealt
            self._say(members, (
                tr("what {ranks} has sent of shards did not arrive at rank {rank} as it was sent: it is sent again", "log",
                   ranks=ranks_text(ranks), rank=rank) for rank, ranks in damaged.items()
            ))  # fmt: skip
        text = told(
            "shards did not arrive at {ranks} as they were sent, {count} times: look at the network and the memory of "
            "these ranks, and start again from a checkpoint",
            ranks=ranks_text(damaged),
            count=TRIES,
        )
        raise GuardError(text)

    def _dealt_once(self, copies: Copies, holders: Holders, members: tuple[int, ...]) -> tuple[Copies, list[int]]:
        """Return this rank's part, and who has sent what did not arrive as it was."""
        old, new = copies.layout, self._layout(copies.layout.tensors, members)
        fresh, wrong = torch.zeros(new.nbytes + _SUM, dtype=torch.uint8), set[int]()
        own = members.index(self._rank)
        sources = [_sources(holders, rank, place) for place, rank in enumerate(members)]
        for numbers in _batches(old):
            inputs, outputs, places = [], [], []
            for place, rank in enumerate(members):
                mine = [
                    old.part(copies.own if whose == self._rank else copies.others[whose], number, part)[first:last]
                    for number in numbers
                    for part, (source, whose) in sources[place].items()
                    if source == self._rank
                    for first, last in [_common(old, number, part, new, place % new.count)]
                    if first < last
                ]
                inputs.append(_summed(_bytes_of(mine)))
                into = [
                    new.part(fresh, number, own % new.count)[first:last]
                    for number in numbers
                    for part, (source, _) in sources[own].items()
                    if source == rank
                    for first, last in [_common(new, number, own % new.count, old, part)]
                    if first < last
                ]
                places.append(into)
                nbytes = sum(map(_nbytes, into))
                outputs.append(torch.empty(nbytes + _SUM if nbytes else 0, dtype=torch.uint8))
            if len(members) == 1:
                outputs = inputs
            else:
                self._group.alltoall(outputs, inputs).wait()
            for rank, into, output in zip(members, places, outputs, strict=True):
                if not torch.equal(_summed(output[:-_SUM])[-_SUM:], output[-_SUM:]):
                    wrong.add(rank)
                for target, part in zip(into, torch.split(output[:-_SUM], list(map(_nbytes, into))), strict=True):
                    target.copy_(part.clone().view(target.dtype).view(target.shape))
        return Copies(new, {rank: () for rank in members}, fresh), sorted(wrong)

    def _install(self, dealt: Sequence[Copies], members: tuple[int, ...], group: GuardedProcessGroup) -> None:
        """Have models and optimizers go on with these shards, on `group`. Nothing is communicated."""
        before = sharding.mesh_of(self.models)
        count = dealt[0].layout.count
        index = members.index(self._rank) % count
        make_known(group, members, members, self._group)
        if before.ndim == 1:
            mesh = sharding.mesh_over([group], torch.tensor(members), before)
        else:
            ranks = torch.tensor(members).view(-1, count)
            groups = []
            for part in (members[index::count], tuple(ranks[members.index(self._rank) // count].tolist())):
                groups.append(group.part(part))
                make_known(groups[-1], part, members, self._group)
            mesh = sharding.mesh_over(groups, ranks, before)
        parts: dict[tuple[int, str], torch.Tensor] = {}
        for copies in dealt:
            for number, tensor in enumerate(copies.layout.tensors):
                parts[tensor.parameter, tensor.key] = copies.layout.part(copies.own, number, index)
        shapes = {(t.parameter, t.key): t.shape for copies in dealt for t in copies.layout.tensors}
        moved = {}
        for number, parameter in enumerate(self._parameters):
            if (number, "") in parts:
                moved[id(parameter)] = _padded(parts[number, ""], shapes[number, ""], count, sharding.local(parameter))
        devices = {id(p): sharding.local(p).device for p in self._parameters}
        sharding.move(self.models, mesh, moved)
        with torch.no_grad():
            for parameter, value in self._plain:
                parameter.copy_(value)
        for number, (parameter, state) in enumerate(zip(self._parameters, self._states, strict=False)):
            for optimizer in self.optimizers:
                optimizer.state.pop(parameter, None)
            if state is None:
                continue
            owner = next(
                one for one in self.optimizers if any(parameter is p for g in one.param_groups for p in g["params"])
            )
            owner.state[parameter] = {
                key: sharding.of_same_kind(
                    parts[number, key].to(devices[id(parameter)], copy=True), mesh, shapes[number, key]
                )
                if isinstance(value, _Marker)
                else sharding.on_mesh(_clone(value), mesh)
                for key, value in state.items()
            }
        self._members = members
        self._anew.clear()
        self._hosts = {rank: host for rank, host in self._hosts.items() if rank in members}

    def _begin_again(
        self,
        missing: tuple[int, ...],
        damaged: Mapping[int, Sequence[int]],
        members: tuple[int, ...],
        group: GuardedProcessGroup,
    ) -> None:
        """Nobody has some of the shards: load a checkpoint, on all alike."""
        if self._load is None:
            kept = [
                tr("rank {rank} kept that of {ranks}, damaged", rank=rank, ranks=ranks_text(ranks))
                for rank, ranks in damaged.items()
            ]
            text = told(
                "the shards of {ranks} are lost, with all copies of them ({copies}): start again from a checkpoint; give "
                "load=, a function that loads the newest one, to go on from it in place",
                ranks=ranks_text(missing),
                copies=joined("; ", (f"copies={self._copies}", *kept)),
            )
            raise GuardError(text)
        log.warning(
            "ncclguard: %s",
            told("the shards of {ranks} are lost with all copies: a checkpoint is loaded", ranks=ranks_text(missing)),
        )
        if self._fixed is None or self._moving is None:
            live = self._live()
            self._note()
            tensors = [one.tensors for one in live]
        else:
            tensors = [list(copies.layout.tensors) for copies in (self._fixed, self._moving)]
        self._fixed = self._moving = None  # also when `load` fails, because another rank is lost
        layouts = [self._layout(each, members) for each in tensors]
        dealt = [
            Copies(layout, {rank: () for rank in members}, torch.zeros(layout.nbytes + _SUM, dtype=torch.uint8))
            for layout in layouts
        ]
        self._install(dealt, members, group)
        self._load()
        self.keep()


#: For each part: the members that have it, each with the rank whose row it is in.
Holders = dict[int, list[tuple[int, int]]]


def _sources(holders: Holders, rank: int, place: int) -> dict[int, tuple[int, int]]:
    """Return of whom a member gets each part: of itself where it can be, else of one by turns."""
    return {
        part: next((one for one in those if one[0] == rank), those[place % len(those)])
        for part, those in holders.items()
    }


def _become_part(group: Any, whole: GuardedProcessGroup) -> None:
    """Have a group of a mesh carried by the group of the steps. Raises GuardConfigError for another backend's."""
    if group is whole:
        return
    if not (isinstance(group, GuardedProcessGroup) and type(group).one_by_one and type(whole).one_by_one):
        raise GuardConfigError(
            told(
                'a model with replicas (HSDP) goes on without a rank on the backend "ncclguard" only: call '
                'init_process_group("ncclguard"), and init_device_mesh without another backend'
            )
        )
    group.become_part(whole, torch_compat.group_ranks(group))


class _Marker:
    """Stands for a value that is sharded, and lies with the shards."""


_SHARDED = _Marker()
_NOTHING = torch.empty(0, dtype=torch.uint8)


def _clone(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _summed(data: torch.Tensor) -> torch.Tensor:
    """Return bytes with their checksum behind them; none for no bytes."""
    return torch.cat([data, checksum(data).view(torch.uint8)]) if data.numel() else data


def _bytes_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return (
        torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        if parts
        else torch.empty(0, dtype=torch.uint8)
    )


def _batches(layout: Layout) -> Iterator[list[int]]:
    """Tensors that are sent together, so that a rank has about PIECE bytes of them."""
    batch: list[int] = []
    for number in range(len(layout.tensors)):
        if batch and layout.starts[number + 1] - layout.starts[batch[0]] > PIECE:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _common(layout: Layout, number: int, index: int, other: Layout, other_index: int) -> tuple[int, int]:
    """The rows that a rank in one layout shares with a rank in another, counted from its own first row."""
    (first, last), (begin, end) = layout.rows(number, index), other.rows(number, other_index)
    return max(first, begin) - first, max(min(last, end), max(first, begin)) - first


def _padded(part: torch.Tensor, shape: Sequence[int], count: int, like: torch.Tensor) -> torch.Tensor:
    """A copy in memory that has as many rows as the longest part."""
    memory = torch.zeros(-(-shape[0] // count), *shape[1:], dtype=part.dtype, device=like.device)
    memory[: part.size(0)].copy_(part)
    return memory[: part.size(0)]


def wanted(models: Sequence[nn.Module], copies: int, load: Callable[[], object] | None) -> bool:
    """Return whether these models are sharded; raises GuardConfigError where a lost shard has no rule."""
    sharded = [model for model in models if sharding.shards_parameters(model)]
    if not sharded and (copies or load is not None):
        raise GuardConfigError(told("copies and load are for sharded models (fully_shard): leave them out"))
    alone = [model for model in sharded if sharding.replicas(model) == 1]
    if alone and not copies and load is None:
        raise GuardConfigError(
            told(
                "{name} is sharded: a rank that is lost takes its shard with it. Give copies=1, so that its "
                "neighbour has a copy, or load=, a function that loads the newest checkpoint; or replicate it "
                "(HSDP)",
                name=type(alone[0]).__name__,
            )
        )
    return bool(sharded)
