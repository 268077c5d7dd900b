"""What NCCL's RAS said when an incident began: quoted in its report, beside the verdict and without a say in it.

RAS sees communicators that no process group of torch stands for: those of an inference engine, of a weight exchange,
and of the ranks that a job's other programs have. What it cannot see is who is to blame. Its counts are those of
launches and not of ends, a process that is stopped and one that is gone look alike to it for a minute, and a
communicator that the guard ends is one that RAS calls aborted. So it accuses nobody here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ncclguard.environment import ras
from ncclguard.incident.model import Incident, ranks_text
from ncclguard.incident.timeline import Quoted, RasQuote

#: Seconds that RAS is given, of which it gives a third to the processes that do not answer it; nobody waits for it.
WITHIN: Final = 6.0
#: An answer that was asked for less than so many seconds ago serves for another incident too: a rank that is away holds
#: up all of its groups.
SHARED: Final = 5.0
#: Bytes of an answer that a training process reads: 7,000 ranks.
AT_MOST: Final = 4 << 20
#: Communicators that are quoted, and lines of RAS itself where it has no JSON.
QUOTED: Final = 8
LINES: Final = 24


def quote(
    report: ras.Report, groups: Mapping[str, Sequence[int]], pids: Mapping[int, int], own: int | None = None
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
    if not any(own in one.pids for one in report.communicators):
        reason = (
            f"{report.address} answers for {len(report.communicators)} communicators, and this process ({own}) is in none: "
            "they may be another job's"
        )
        return head.model_copy(update={"reason": reason})
    found = [_quoted(one, troubles, groups, pids) for one in report.communicators if (troubles := one.troubles())]
    found.sort(key=lambda one: bool(one.groups))
    quoted = {"communicators": tuple(found[:QUOTED]), "more": len(found[QUOTED:])}
    return head.model_copy(update={"count": len(report.communicators), **quoted})


def _quoted(
    communicator: ras.Communicator,
    troubles: tuple[str, ...],
    groups: Mapping[str, Sequence[int]],
    pids: Mapping[int, int],
) -> Quoted:
    same = tuple(name for name, ranks in groups.items() if _same(communicator.pids, ranks, pids))
    if same:
        members = f"the ranks of process group{'s' * (len(same) > 1)} {', '.join(same)}"
    else:
        members = f"{_members(communicator.pids, pids)}, for which torch has no process group here"
    return Quoted(hash=communicator.hash, size=communicator.size, groups=same, members=members, troubles=troubles)


def _same(processes: Sequence[int], ranks: Sequence[int], pids: Mapping[int, int]) -> bool:
    """Whether a communicator has the ranks of a group, in their order, as far as their processes are known."""
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
        parts.append(f"{others} {'other ' if known else ''}process{'es' * (others > 1)}")
    return " and ".join(parts)


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
        self._found: ras.Report | ras.NoWitness = ras.NoWitness("it was not asked")

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
                self._found = ras.NoWitness("the question to it failed")
                try:
                    threading.Thread(target=self._ask, args=(self._done,), name="ncclguard-ras", daemon=True).start()
                except RuntimeError:  # the program has ended: Python 3.12 starts no threads any more
                    self._found = ras.NoWitness("the program had ended before it could be asked")
                    self._done.set()
        return True

    def quote(self, incident: Incident, seconds: float) -> RasQuote | None:
        """What RAS says, or why there is nothing; None if that takes longer than `seconds`."""
        if not self._done.wait(seconds):
            return None
        found = self._found
        return RasQuote(reason=str(found)) if isinstance(found, ras.NoWitness) else quote(found, *self._known(incident))

    def _ask(self, done: threading.Event) -> None:
        try:
            self._found = ras.report(ras.address_of(), within=WITHIN, at_most=AT_MOST)
        except ras.NoWitness as why:
            self._found = why
        finally:
            done.set()
