"""Sends and receives of this process, numbered for each pair of ranks and direction: both ends mean the same one."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ncclguard import lifecycle, torch_compat

#: The source of a receive that takes what comes.
ANY: Final = -1
#: Pairs of which a rank says how many it has issued, those used last: a job of thousands may have all pairs.
SAID: Final = 256
#: Transfers, issued last, of which it is known which work is theirs.
KEPT: Final = 4096

#: What transfers are counted by: the group, "send", "recv" or "recv_anysource", and the peer's rank in the group.
_Key = tuple[dist.ProcessGroup, str, int]


class Pair(NamedTuple):
    """Two ranks of a group, one direction; `source` and `target` are global ranks."""

    group: str
    source: int
    target: int

    @property
    def channel(self) -> str:
        """Its name beside those of groups, such as "0:gloo" of a group's collectives."""
        source = "any" if self.source == ANY else self.source
        return f"{self.group}:gloo {source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or receive that this process has issued.

    `pair`: in which direction and group, the same on both ends. `ranks`: both ends, global; only the own one where
    the other may be any. `number`: which of the pair, from 1.
    """

    pair: Pair
    ranks: tuple[int, ...]
    number: int
    text: str
    numel: int


class _Issued(NamedTuple):
    """One that was issued, as little as can be: it is made on the program's path, and read when somebody waits."""

    work: weakref.ref[dist.Work]
    key: _Key
    number: int
    tag: int
    tensor: weakref.ref[torch.Tensor]


class Transfers:
    """The sends and receives that were issued since `start`; any thread."""

    def __init__(self) -> None:
        self._uncounted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.forget()

    def forget(self) -> None:
        """Begin anew: no group is left, or this process is a fork."""
        self._lock = threading.Lock()
        self._counts: dict[_Key, int] = {}  # what was used last is last
        self._issued: deque[tuple[Any, ...]] = deque(maxlen=KEPT)  # fields of _Issued

    def forget_group(self, group: dist.ProcessGroup) -> None:
        """The group is about to be destroyed; a later one may have its name."""
        with self._lock:
            self._counts = {key: count for key, count in self._counts.items() if key[0] is not group}
            kept = [entry for entry in self._issued if entry[1][0] is not group]
            self._issued = deque(kept, maxlen=KEPT)

    def leave_out(self, group: dist.ProcessGroup) -> None:
        """Some of its transfers may have been before `start`, so that this process cannot know their numbers."""
        self._uncounted.add(group)

    def note(
        self, group: dist.ProcessGroup, name: str, given: Sequence[Any], tensor: torch.Tensor, work: dist.Work
    ) -> None:
        """Count one: see `torch_compat.note_transfers`."""
        key = (group, name, ANY if name == "recv_anysource" else given[0])
        with self._lock:
            self._counts[key] = number = self._counts.pop(key, 0) + 1
        self._issued.append((weakref.ref(work), key, number, given[-1], weakref.ref(tensor)))

    def awaited(self) -> Iterator[tuple[int, Transfer]]:
        """Each thread that waits for a transfer at this moment, by ``threading.get_ident()``, with that transfer."""
        for thread, work in torch_compat.awaited_works().items():
            for entry in reversed(tuple(self._issued)):
                if entry[0]() is work:
                    with contextlib.suppress(ValueError):  # the group was destroyed meanwhile
                        yield thread, self._transfer(_Issued(*entry))
                    break

    def total(self, group: dist.ProcessGroup) -> int:
        """Count how many were issued on a group."""
        return sum(count for key, count in self._counted() if key[0] is group)

    def issued(self) -> dict[Pair, int]:
        """Count how many were issued, of the pairs used last.

        A receive that takes what comes may have been from anybody, so it counts for every source.
        """
        last: dict[Pair, int] = {}
        from_any: dict[tuple[str, int], int] = {}
        for key, count in self._counted()[-SAID:]:
            with contextlib.suppress(ValueError):
                pair = _pair(key)
                if pair.source == ANY:
                    from_any[pair.group, pair.target] = count
                else:
                    last[pair] = count
        return {pair: count + from_any.get((pair.group, pair.target), 0) for pair, count in last.items()}

    def _counted(self) -> list[tuple[_Key, int]]:
        with self._lock:
            return [(key, count) for key, count in self._counts.items() if key[0] not in self._uncounted]

    def _transfer(self, issued: _Issued) -> Transfer:
        group, name, _ = issued.key
        pair, tensor = _pair(issued.key), issued.tensor()
        if group in self._uncounted:
            raise ValueError("its number is not known")
        known = tuple(sorted({rank for rank in pair[1:] if rank != ANY}))
        peer = pair.target if name == "send" else pair.source
        text = _text(name, tensor, peer, pair.group, issued.tag, issued.number)
        return Transfer(pair, known, issued.number, text, 0 if tensor is None else tensor.numel())


def _pair(key: _Key) -> Pair:
    """Raises ValueError when the group was destroyed."""
    group, name, peer = key
    ranks = torch_compat.group_ranks(group)
    own, other = ranks[group.rank()], ANY if peer == ANY else ranks[peer]
    ends = (own, other) if name == "send" else (other, own)
    return Pair(torch_compat.group_name(group), *ends)


def _text(name: str, tensor: torch.Tensor | None, peer: int, group: str, tag: int, number: int) -> str:
    whom = "any rank" if peer == ANY else f"rank {peer}"
    way = "to" if name == "send" else "from"
    kept = f"tag {tag}, " if tag else ""
    what = "" if tensor is None else f"{str(tensor.dtype).rpartition('.')[2]} {list(tensor.shape)} "
    return f"{name.partition('_')[0]}({what}{way} {whom}, group {group}, {kept}number {number})"


transfers = Transfers()


def start() -> None:
    """Note every send and receive of this process from now on."""
    for group in torch_compat.known_groups():
        if torch_compat.sequence_number(group, "gloo"):
            transfers.leave_out(group)
    torch_compat.note_transfers(transfers.note)
    torch_compat.on_destroy(transfers.forget)
    torch_compat.on_destroy_group(transfers.forget_group)
    lifecycle.in_child(transfers.forget)
