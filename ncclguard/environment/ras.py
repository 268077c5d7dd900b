"""Statements of NCCL's RAS (2.24 and newer) about the communicators of a job; `ncclguard_explain.ras` asks it.

`doctor` and the report of an incident ask it, and `explain --ras`. RAS is a witness for communicators that no process
group of torch stands for; it decides nothing and accuses nobody. Nothing here imports torch, and no caller of a
collective ever waits for it.

What it said when an incident began is quoted in the report, beside the verdict. RAS sees communicators of an inference
engine, of a weight exchange, and of the ranks that a job's other programs have. What it cannot see is who is to blame:
its counts are those of launches and not of ends, a process that is stopped and one that is gone look alike to it for a
minute, and a communicator that the guard ends is one that RAS calls aborted.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from pydantic import BaseModel, ValidationError

from ncclguard.incident.model import Incident
from ncclguard.incident.timeline import Quoted, RasQuote
from ncclguard_explain.language import joined, tr
from ncclguard_explain.ranks import ranks_text
from ncclguard_explain.ras import AT_MOST, NoWitness, address_of, ask

#: Values of ncclResult_t that are no errors (nccl.h): ncclSuccess and ncclInProgress.
SUCCESS, IN_PROGRESS = 0, 7
#: What the others are called (``ncclErrorToString`` in src/ras/client_support.cc).
ERRORS: Final = {
    1: tr("an unhandled CUDA error"),
    2: tr("a system error"),
    3: tr("an internal error"),
    4: tr("an invalid argument"),
    5: tr("invalid usage"),
    6: tr("a remote process error"),
    8: tr("a timeout"),
}
#: Ranks of one communicator of which something is said one by one; of more, their numbers.
SHOWN_RANKS: Final = 4


# ---------------------------------------------------------------------- the document, and what it comes to


class RankState(BaseModel):
    """The progress of a rank with its communicator; `init_state` and `async_error` are values of ncclResult_t."""

    init_state: int = SUCCESS
    async_error: int = SUCCESS
    finalize_called: bool = False
    destroy_flag: bool = False
    abort_flag: bool = False


class Member(BaseModel):
    """A rank, by its number in the communicator."""

    rank: int
    host: str = ""
    pid: int = 0


class Rank(Member):
    """A rank that has answered, with the operations that it has launched."""

    status: RankState = RankState()
    collective_counts: dict[str, int] = {}


class Absence(BaseModel):
    """Why a rank has not answered; both False: its process answers, and has no such communicator any more."""

    unresponsive: bool = False
    considered_dead: bool = False


class MissingRank(Member):
    """A rank that has not answered."""

    status: Absence = Absence()


class Communicator(BaseModel):
    """One communicator of the job; `ranks` are those that have answered."""

    hash: str
    size: int
    ranks: tuple[Rank, ...] = ()
    missing_ranks: tuple[MissingRank, ...] = ()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of all ranks, in order of rank."""
        found = {one.rank: one.pid for one in (*self.ranks, *self.missing_ranks)}
        return tuple(found[rank] for rank in sorted(found))

    def troubles(self) -> tuple[str, ...]:
        """Return what is not in order, for people, with the communicator's own numbers of ranks; empty if all is.

        The counts of launches differ in every job that runs, for a moment; in one that stands still they tell who is
        behind.
        """
        return (*self.defects(), *self.uneven())

    def defects(self) -> tuple[str, ...]:
        """Ranks that are missing, have met an error, or are in another state than others."""
        dead = [one for one in self.missing_ranks if one.status.considered_dead]
        silent = [one for one in self.missing_ranks if one.status.unresponsive and not one.status.considered_dead]
        without = [one for one in self.missing_ranks if one not in dead and one not in silent]
        told = [
            _said(dead, tr("considered dead by RAS"), tr("considered dead by RAS")),
            _said(silent, tr("does not answer RAS"), tr("do not answer RAS")),
            _said(without, tr("has left it: the process answers RAS"), tr("have left it: their processes answer RAS")),
        ]
        for value in sorted({error for one in self.ranks for error in _errors(one)}):
            met = ERRORS.get(value) or tr("error {code}", code=value)
            ranks = (one for one in self.ranks if value in _errors(one))
            told.append(_said(ranks, tr("has met {text}", text=met), tr("have met {text}", text=met)))
        aborting = [one for one in self.ranks if one.status.abort_flag]
        begun = [one for one in self.ranks if one.status.init_state == IN_PROGRESS and one not in aborting]
        told.append(_said(aborting, tr("is aborting it"), tr("are aborting it")))
        told.append(_said(begun, tr("has not finished making it"), tr("have not finished making it")))
        return tuple(filter(None, told))

    def uneven(self) -> tuple[str, ...]:
        """The operations that some ranks have launched more often than others; a count says nothing of their ends."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.collective_counts)
        found = []
        for name in names:
            by_count: dict[int, list[int]] = {}
            for rank in self.ranks:
                by_count.setdefault(rank.collective_counts.get(name, 0), []).append(rank.rank)
            if len(by_count) > 1:
                sides = sorted(by_count.items(), key=lambda side: (-len(side[1]), -side[0]))
                said = [
                    tr("{count} by {ranks}", count=count, ranks=ranks_text(numbers))
                    for count, numbers in sides[:SHOWN_RANKS]
                ]
                more = ["..."] if len(sides) > SHOWN_RANKS else []
                found.append(tr("{name} launched {text}", name=name, text=joined(", ", [*said, *more])))
        return tuple(found)


#: NCCL 2.28.9 writes no comma behind this line of a rank that has not answered (recorded on an H200).
_WITHOUT_COMMA: Final = re.compile(r'("nvml_dev": -?\d+)(\s+"status")')


class _Document(BaseModel):
    nccl_version: str
    communicators: tuple[Communicator, ...]


class Report(BaseModel):
    """The answer of RAS on a job. `text` is all there is of NCCL before 2.28.7; `communicators` is None then."""

    address: str
    nccl_version: str
    communicators: tuple[Communicator, ...] | None = None
    text: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """Return what RAS itself lists under "Errors" and "Warnings", where it answered in text."""
        _, _, found = self.text.partition("\nErrors\n")
        lines = [line.strip() for line in found.splitlines()]
        return tuple(line for line in lines if line and line != "Warnings" and set(line) != {"="})


def report(address: str, *, within: float, at_most: int = AT_MOST) -> Report:
    """Ask RAS at `address` and return what it says of the job, after `within` seconds at the latest.

    Raises:
        NoWitness: nobody answers there, or not with what RAS says.
    """
    text = ask(address, within=within, form="json", at_most=at_most)
    if not text.lstrip().startswith("{"):
        words = text.split("\n", 1)[0].split()
        if words[:2] != ["NCCL", "version"] or len(words) < 3:
            begins = tr("the answer is none of RAS; it begins with {said}", said=repr(text[:60]))
            raise NoWitness(joined(": ", (address, begins)))
        return Report(address=address, nccl_version=words[2], text=text)
    try:
        found = _Document.model_validate_json(_WITHOUT_COMMA.sub(r"\1,\2", text))
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{name}: " for name in first["loc"])
        unread = tr(
            "the answer ({count} bytes) cannot be read: {error}", count=len(text), error=f"{where}{first['msg']}"
        )
        raise NoWitness(joined(": ", (address, unread))) from None
    return Report(address=address, nccl_version=found.nccl_version, communicators=found.communicators)


def _said(ranks: Iterable[Member], one: str, several: str) -> str:
    found = list(ranks)
    if not found:
        return ""
    names = ranks_text(rank.rank for rank in found)
    if len(found) <= SHOWN_RANKS:
        places = [tr("pid {pid} on {host}", pid=rank.pid, host=rank.host) for rank in found]
        names = tr("{ranks} ({details})", ranks=names, details=joined(", ", places))
    return joined(" ", (names, one if len(found) == 1 else several))


def _errors(rank: Rank) -> set[int]:
    return {rank.status.init_state, rank.status.async_error} - {SUCCESS, IN_PROGRESS}


#: Seconds that RAS is given, of which it gives a third to the processes that do not answer it; nobody waits for it.
WITHIN: Final = 6.0
#: An answer that was asked for less than so many seconds ago serves for another incident too: a rank that is away holds
#: up all of its groups.
SHARED: Final = 5.0
#: Bytes of an answer that a training process reads: 7,000 ranks.
QUOTED_AT_MOST: Final = 4 << 20
#: Communicators that are quoted, and lines of RAS itself where it has no JSON.
QUOTED: Final = 8
LINES: Final = 24


def quote(
    report: Report, groups: Mapping[str, Sequence[int]], pids: Mapping[int, int], own: int | None = None
) -> RasQuote:
    """Quote what is not in order; communicators that no process group of torch stands for come first.

    `groups`: the ranks of the process groups by name; `pids`: the processes of ranks, as far as they are known; `own`:
    this process. An answer in which it does not appear is that of another job and quoted nowhere; one in text names no
    process of ranks that are in order, so it cannot be told whose it is.
    """
    head = RasQuote(address=report.address, nccl=report.nccl_version)
    if report.communicators is None:
        lines = report.lines
        return head.model_copy(update={"lines": lines[:LINES], "more": len(lines[LINES:])})
    own = os.getpid() if own is None else own
    if not report.communicators:  # those of a guarded call end with its verdict, before an answer can come
        reason = tr(
            "{address} knows of no communicator: there is none, or it was ended already", address=report.address
        )
        return head.model_copy(update={"reason": reason})
    if not any(own in one.pids for one in report.communicators):
        reason = tr(
            "{address} answers for {count} communicators, and this process ({pid}) is in none: they may be another job's",
            address=report.address,
            count=len(report.communicators),
            pid=own,
        )
        return head.model_copy(update={"reason": reason})
    found = [_quoted(one, troubles, groups, pids) for one in report.communicators if (troubles := one.troubles())]
    found.sort(key=lambda one: bool(one.groups))
    quoted = {"communicators": tuple(found[:QUOTED]), "more": len(found[QUOTED:])}
    return head.model_copy(update={"count": len(report.communicators), **quoted})


def _quoted(
    communicator: Communicator,
    troubles: tuple[str, ...],
    groups: Mapping[str, Sequence[int]],
    pids: Mapping[int, int],
) -> Quoted:
    same = tuple(name for name, ranks in groups.items() if _same(communicator.pids, ranks, pids))
    if same:
        members = tr("the ranks of process group {group}", group=same[0])
        if len(same) > 1:
            members = tr("the ranks of process groups {groups}", groups=", ".join(same))
    else:
        known = _members(communicator.pids, pids)
        members = tr("{members}, for which torch has no process group here", members=known)
    return Quoted(hash=communicator.hash, size=communicator.size, groups=same, members=members, troubles=troubles)


def _same(processes: Sequence[int], ranks: Sequence[int], pids: Mapping[int, int]) -> bool:
    """Return whether a communicator has the ranks of a group, in their order, as far as their processes are known."""
    if len(processes) != len(ranks):
        return False
    known = [(pids[rank], pid) for rank, pid in zip(ranks, processes) if rank in pids]
    return bool(known) and all(expected == pid for expected, pid in known)


def _members(processes: Sequence[int], pids: Mapping[int, int]) -> str:
    count = Counter(pids.values())
    ranks = {pid: rank for rank, pid in pids.items() if count[pid] == 1}  # two hosts may have a process of one number
    known = [ranks[pid] for pid in processes if pid in ranks]
    others = len(processes) - len(known)
    parts = [ranks_text(known)] if known else []
    if others:
        one, many = tr("1 process"), tr("{count} processes", count=others)
        if known:
            one, many = tr("1 other process"), tr("{count} other processes", count=others)
        parts.append(many if others > 1 else one)
    return joined(" and ", parts)


class Witness:
    """Asks RAS in a thread of its own, for reports of incidents; `quote` waits, and is for threads nobody waits for.

    `wanted`: whether this process may have communicators of NCCL at all; `known`: the ranks of its process groups by
    name, and the processes of ranks, of which an incident may know more than the others.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        known: Callable[[Incident], tuple[Mapping[str, Sequence[int]], Mapping[int, int]]],
    ) -> None:
        self._wanted = wanted
        self._known = known
        self._lock = threading.Lock()
        self._begun = float("-inf")
        self._done = threading.Event()
        self._done.set()
        self._found: Report | NoWitness = NoWitness(tr("it was not asked"))

    @property
    def patience(self) -> float:
        """Seconds within which an answer comes, or none."""
        return 2 * WITHIN

    def begin(self) -> bool:
        """Ask, unless that was done a moment ago; False where there is nothing to ask about."""
        if not self._wanted():
            return False
        with self._lock:
            now = time.monotonic()
            if self._done.is_set() and now - self._begun >= SHARED:
                self._begun, self._done = now, threading.Event()
                self._found = NoWitness(tr("the question to it failed"))
                try:
                    threading.Thread(target=self._ask, args=(self._done,), name="ncclguard-ras", daemon=True).start()
                except RuntimeError:  # the program has ended: Python 3.12 starts no threads any more
                    self._found = NoWitness(tr("the program had ended before it could be asked"))
                    self._done.set()
        return True

    def quote(self, incident: Incident, seconds: float) -> RasQuote | None:
        """Return what RAS says, or why there is nothing; None if that takes longer than `seconds`."""
        if not self._done.wait(seconds):
            return None
        found = self._found
        return RasQuote(reason=str(found)) if isinstance(found, NoWitness) else quote(found, *self._known(incident))

    def _ask(self, done: threading.Event) -> None:
        try:
            self._found = report(address_of(), within=WITHIN, at_most=QUOTED_AT_MOST)
        except NoWitness as why:
            self._found = why
        finally:
            done.set()
