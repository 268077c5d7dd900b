"""Ranks, hosts and seconds in words: runs shortened, and in a job of many ranks whole hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ncclguard_explain.language import Message, joined, received, tr

#: Culprits, sides and groups of waiting ranks that are shown one by one.
SHOWN_GROUPS: Final = 8


def ranks_text(ranks: Iterable[int]) -> Message:
    """Return ranks for people, runs shortened.

    >>> ranks_text([3]), ranks_text([0, 1, 2, 5]), ranks_text([])
    ('rank 3', 'ranks 0-2, 5', 'no rank')
    """
    numbers = sorted(set(ranks))
    if not numbers:
        return tr("no rank")
    parts = runs([str(number) for number in numbers])
    if len(parts) > 2 * SHOWN_GROUPS:
        return tr("ranks {some}, ... ({count} in all)", some=", ".join(parts[: 2 * SHOWN_GROUPS]), count=len(numbers))
    return tr("rank {rank}", rank=parts[0]) if len(numbers) == 1 else tr("ranks {numbers}", numbers=", ".join(parts))


#: Ranks of a job up to which each is told by its number alone; in larger jobs they are told by their hosts.
FEW_RANKS: Final = 64
#: Kinds of host names that are told apart, names without a pattern that are shown, and hosts of which single ranks are.
SHOWN_NAMES: Final = 4
#: Part of all ranks from which on it is shorter to tell the others.
MOST: Final = 0.9


def hosts_text(names: Iterable[str]) -> Message:
    """Return host names for people: numbers in them become ranges, as in the lists of Slurm.

    >>> hosts_text(["node0012", "node0013", "node0019"]), hosts_text(["gpu-a-7"])
    ('hosts node[0012-0013,0019]', 'host gpu-a-7')
    >>> hosts_text(["anna", "bert", "carl", "dora", "emil", "fritz"])
    'hosts anna, bert, carl, dora, ... (6 in all)'
    """
    found = sorted(set(names), key=_natural)
    if not found:
        return tr("no host")
    if len(found) == 1:
        return tr("host {host}", host=found[0])
    parts, cut = _folded_names(found)
    if len(parts) > SHOWN_NAMES:
        return tr("hosts {some}, ... ({count:,} in all)", some=", ".join(parts[:SHOWN_NAMES]), count=len(found))
    if cut:
        return tr("hosts {some} ({count:,} in all)", some=", ".join(parts), count=len(found))
    return tr("hosts {some}", some=", ".join(parts))


def _natural(name: str) -> list[tuple[int, str]]:
    """For an order in which node9 comes before node10."""
    return [(int(part), part) if part.isdecimal() else (0, part) for part in re.split("([0-9]+)", name)]


def _folded_names(names: Sequence[str]) -> tuple[list[str], bool]:
    """Names that differ in one number share an entry; also whether numbers were left out."""
    shapes: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = re.split("([0-9]+)", name)
        shapes.setdefault(tuple(parts[::2]), []).append(parts)
    found, cut = [], False
    for same in shapes.values():
        varying = [place for place in range(1, len(same[0]), 2) if len({parts[place] for parts in same}) > 1]
        if not varying:
            found.append("".join(same[0]))
            continue
        last = varying[-1]
        series: dict[tuple[str, str], list[str]] = {}
        for parts in same:
            series.setdefault(("".join(parts[:last]), "".join(parts[last + 1 :])), []).append(parts[last])
        for (before, after), numbers in series.items():
            every = runs(numbers)
            cut = cut or len(every) > SHOWN_GROUPS
            shown = [*every[:SHOWN_GROUPS], "..."] if len(every) > SHOWN_GROUPS else every
            found.append(f"{before}[{','.join(shown)}]{after}" if len(numbers) > 1 else f"{before}{numbers[0]}{after}")
    return found, cut


def runs(numbers: Sequence[str]) -> list[str]:
    """Return numbers as they are written, runs of equally padded ones as first-last."""
    found: list[list[str]] = []
    for number in numbers:
        last = found[-1][1] if found else ""
        follows = last != "" and int(number) == int(last) + 1
        if follows and (len(number) == len(last) or not (number.startswith("0") or last.startswith("0"))):
            found[-1][1] = number
        else:
            found.append([number, number])
    return [first if first == last else f"{first}-{last}" for first, last in found]


class Hosts:
    """The ranks of each host, to tell of ranks by their hosts in a job of more than `FEW_RANKS`.

    `everyone`: all ranks of the job, of which `hosts` knows as many as have said where they are.

    >>> hosts = Hosts({rank: f"node{rank // 8:02}" for rank in range(80)}, range(80))
    >>> hosts.text(range(16, 40))
    'hosts node[02-04], all 24 ranks (16-39)'
    >>> hosts.text(range(20, 40))
    'hosts node[03-04], all 16 ranks (24-39), and ranks 20-23 on host node02'
    >>> hosts.text(set(range(80)) - {17})
    '79 ranks, all but rank 17 on host node02'
    >>> Hosts({0: "a", 1: "b"}, range(2)).text([1])
    'rank 1'
    """

    def __init__(self, hosts: Mapping[int, str], everyone: Iterable[int]) -> None:
        self._hosts = hosts
        self._everyone = frozenset(everyone)
        self._members: dict[str, int] = {}
        for rank in self._everyone:
            host = hosts.get(rank, "")
            if host:
                self._members[host] = self._members.get(host, 0) + 1

    @property
    def told(self) -> bool:
        """Return whether ranks are told by their hosts: the job has many, and for most of them it is known."""
        return len(self._everyone) > FEW_RANKS and 2 * sum(self._members.values()) > len(self._everyone)

    def host(self, rank: int) -> str:
        """The name of a rank's host, empty where it is not known."""
        return self._hosts.get(rank, "")

    def text(self, ranks: Iterable[int]) -> Message:
        """Ranks for people: whole hosts, then ranks of others; by their numbers alone in a job of few ranks."""
        asked = sorted(set(ranks))
        if not asked or not self.told:
            return ranks_text(asked)
        others = self._everyone.difference(asked)
        if not others:
            return tr("all {count:,} ranks", count=len(asked))
        if len(asked) >= MOST * len(self._everyone):
            return tr("{count:,} ranks, all but {others}", count=len(asked), others=self.text(others))
        found: dict[str, list[int]] = {}
        for rank in asked:
            found.setdefault(self.host(rank), []).append(rank)
        unknown = found.pop("", [])
        whole = {host: here for host, here in found.items() if 1 < len(here) == self._members.get(host)}
        parts: list[Message] = []
        if whole:
            inside = sorted(rank for here in whole.values() for rank in here)
            every = tr("all {count:,} ranks", count=len(inside))
            parts.append(tr("{hosts}, {part}", hosts=hosts_text(whole), part=_numbered(every, inside)))
        some = {host: here for host, here in found.items() if host not in whole}
        if len(some) <= SHOWN_NAMES:
            parts += [tr("{part} on host {host}", part=ranks_text(here), host=host) for host, here in some.items()]
        else:
            inside = sorted(rank for here in some.values() for rank in here)
            many = _numbered(tr("{count:,} ranks", count=len(inside)), inside)
            parts.append(tr("{part} on {hosts}", part=many, hosts=hosts_text(some)))
        if unknown:
            lost = ranks_text(unknown)
            if parts and len(unknown) > 1:
                lost = tr("{part} on hosts that are not known", part=lost)
            elif parts:
                lost = tr("{part} on a host that is not known", part=lost)
            parts.append(lost)
        return parts[0] if len(parts) == 1 else joined(", and ", (joined(", ", parts[:-1]), parts[-1]))


def _numbered(text: Message, ranks: Sequence[int]) -> Message:
    """With their numbers in brackets, where these are few runs."""
    numbers = ranks_text(ranks)
    if numbers.count(",") >= SHOWN_NAMES:
        return text
    return tr("{ranks} ({numbers})", ranks=text, numbers=numbers.split(" ", 1)[1])


def called(ranks: str, text: str) -> Message:
    """Say what ranks on one side of a mismatch have called, by the text of that side."""
    nothing, more, why = text.partition("nothing more: ")
    if more and not nothing:
        return tr("{ranks} called nothing more: {why}", ranks=ranks, why=received(why))
    return tr("{ranks} called {operation}", ranks=ranks, operation=received(text))


def duration(seconds: float) -> str:
    """Return seconds for people, with minutes beside them where that helps."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return tr("{seconds:.0f} s ({minutes:.3g} min)", seconds=seconds, minutes=seconds / 60)
