"""The numbers of collectives that the ranks of a job have launched, by NCCL's RAS: who launched less holds up the rest.

RAS (NCCL 2.24 and newer) runs in every job that uses NCCL and answers for all its hosts. It is asked twice: counts that
moved in between are those of a job that moves.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from ncclguard.environment.ras import Communicator, Rank, report
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ras import NoWitness, address_of

#: Seconds that RAS is given for an answer.
WITHIN: Final = 3.0
#: Communicators of which a report says something.
AT_MOST: Final = 16


class Launches:
    """The answers of RAS so far; `environs` are those of the ranks, which say where it listens."""

    def __init__(self, environs: Iterable[Mapping[str, str]]) -> None:
        self._addresses: dict[str, None] = {}
        for environ in environs:
            with contextlib.suppress(NoWitness):  # it is switched off
                self._addresses[address_of(environ)] = None
        self._before: dict[str, Communicator] = {}
        self._now: dict[str, Communicator] = {}
        self.troubles: tuple[Message, ...] = ()

    def ask(self) -> None:
        """Ask once more, which takes a moment where RAS answers and `WITHIN` at each address where it does not."""
        self._before, self._now = self._now, {}
        troubles = []
        for address in self._addresses:
            try:
                answer = report(address, within=WITHIN)
            except NoWitness as why:
                troubles.append(tr("NCCL's RAS tells nothing: {because}", because=why.reason))
                continue
            found = of_text(answer.text) if answer.communicators is None else answer.communicators
            self._now.update((one.hash, one) for one in found)
        self.troubles = tuple(troubles)

    @property
    def uneven(self) -> list[Communicator]:
        """The communicators whose ranks had launched unequal numbers when it was asked last."""
        return [one for one in self._now.values() if one.uneven()]

    @property
    def standing(self) -> list[Communicator]:
        """The communicators of these whose numbers were the same the time before."""
        return [one for one in self.uneven if one.hash in self._before and self._before[one.hash].ranks == one.ranks]


#: What RAS writes before NCCL 2.28.7 of a communicator whose ranks have launched unequal numbers (client_support.cc).
_GROUP: Final = re.compile(r"^ +(\d+)(?: +\S+){3} +(\d+) +\d+ +[A-Z]+ +\S*MISMATCH", re.MULTILINE)
_UNEVEN: Final = re.compile(r"^#(\d+)-\d+ \((\w+)\) MISMATCH$")
_OPERATION: Final = re.compile(r"^Communicator ranks have different (\w+) operation counts$")
_MANY: Final = re.compile(r"^\d+ ranks have (?:launched up to operation (\d+)|not launched any operations)$")
_ONE: Final = re.compile(
    r"^Rank (\d+) (?:has (?:launched up to operation (\d+)|not launched any operations) )?-- GPU \S+ managed by process (\d+) on node (\S+)$"
)


def of_text(text: str) -> list[Communicator]:
    """Return the communicators of which RAS says in words that some ranks have launched less.

    It lists the ranks of small parts and says of the largest how much it has launched: that is what all others have, of
    which no process is known then (0).
    """
    sizes = {group: int(size) for group, size in _GROUP.findall(text)}
    listed: dict[str, dict[str, dict[int, Rank]]] = {}  # the communicator's hash, the operation, the rank
    most: dict[tuple[str, str], int] = {}
    size_of, name, operation, launched = dict[str, int](), "", "", 0
    for line in map(str.strip, text.splitlines()):
        if (found := _UNEVEN.match(line)) is not None:
            name, operation = found[2], ""
            size_of[name] = sizes.get(found[1], 0)
        elif (found := _OPERATION.match(line)) is not None:
            operation = found[1]
            listed.setdefault(name, {})[operation] = {}
        elif operation and (found := _MANY.match(line)) is not None:
            launched = int(found[1] or 0)
            most.setdefault((name, operation), launched)  # the most frequent number comes first
        elif operation and (found := _ONE.match(line)) is not None:
            number = launched if found[2] is None and "launched" not in line else int(found[2] or 0)
            rank = Rank(rank=int(found[1]), host=found[4], pid=int(found[3]), collective_counts={operation: number})
            listed[name][operation][rank.rank] = rank
    made = []
    for name, operations in listed.items():
        ranks = {}
        for number in range(size_of[name]):
            told = [own[number] for own in operations.values() if number in own]
            counts = {op: most.get((name, op), 0) for op in operations}
            for one in told:
                counts.update(one.collective_counts)
            blank = told[0] if told else Rank(rank=number)
            ranks[number] = blank.model_copy(update={"collective_counts": counts})
        made.append(Communicator(hash=name, size=size_of[name], ranks=tuple(ranks.values())))
    return made


def of_job(communicators: Iterable[Communicator], pids: Mapping[int, int], world_size: int) -> list[Communicator]:
    """Return those of one job with its own numbers of ranks; `pids` has the process of each rank that was seen.

    Left out is a communicator of which some rank's number in the job is not known: its process is on a host that was
    not looked at, or two hosts have a process of that number.
    """
    count = Counter(pids.values())
    ranks = {pid: rank for rank, pid in pids.items() if count[pid] == 1}
    found = []
    for one in communicators:
        if not any(pid in count for pid in one.pids):
            continue
        whole = one.size == world_size and all(ranks.get(rank.pid, rank.rank) == rank.rank for rank in one.ranks)
        numbers = {rank.rank: rank.rank if whole else ranks.get(rank.pid) for rank in one.ranks}
        if None not in numbers.values():
            renamed = [rank.model_copy(update={"rank": numbers[rank.rank]}) for rank in one.ranks]
            found.append(one.model_copy(update={"ranks": tuple(renamed)}))
    return found[:AT_MOST]


def behind(communicators: Iterable[Communicator]) -> dict[int, set[int]]:
    """Return whom each rank waits for by the counts: those that have launched less in a communicator of both."""
    waits: dict[int, set[int]] = {}
    for one in communicators:
        launched = {rank.rank: sum(rank.collective_counts.values()) for rank in one.ranks}
        for rank, count in launched.items():
            waits.setdefault(rank, set()).update(other for other, less in launched.items() if less < count)
    return waits


def strayed(communicator: Communicator) -> list[int]:
    """Return the ranks that have launched another order than most: more of one operation, and less of another.

    Of ranks that launch the same in order, one that is ahead has launched at least as often what the others have.
    """
    found = []
    for rank in communicator.ranks:
        others = [other for other in communicator.ranks if other is not rank and _differs(rank, other)]
        if 2 * len(others) > len(communicator.ranks):
            found.append(rank.rank)
    return found


def _differs(one: Rank, other: Rank) -> bool:
    names = {*one.collective_counts, *other.collective_counts}
    more = [one.collective_counts.get(name, 0) - other.collective_counts.get(name, 0) for name in names]
    return min(more, default=0) < 0 < max(more, default=0)


def counts_of(communicators: Iterable[Communicator]) -> Message | str:
    """Return who has launched what, for people."""
    return joined("; ", list(dict.fromkeys(text for one in communicators for text in one.uneven()))[:AT_MOST])
