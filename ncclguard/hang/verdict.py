"""The rules that name who holds up a job, by where its ranks stand and whether they move; pure functions.

The rules never name a rank without proof. A rank that works is awaited, and is not to blame: a healthy job looks like
that while one rank saves or evaluates.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ncclguard.environment.ras import Communicator
from ncclguard.hang.launches import behind, counts_of, strayed
from ncclguard.hang.stacks import INSIDE, Kind, Motion, Place
from ncclguard_explain.cause import ADVICE, WORD, Cause
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ranks import ranks_text

#: What a rank stands in, for people.
WORDS: Mapping[Kind, Message] = {
    Kind.COLLECTIVE: tr("in a collective"),
    Kind.P2P: tr("in a send or receive"),
    Kind.BACKWARD: tr("in backward"),
    Kind.SETUP: tr("making a process group"),
    Kind.STORE: tr("waiting for the store"),
    Kind.DEVICE: tr("waiting for its device"),
    Kind.EXIT: tr("at the end of its program"),
    Kind.WORKER: tr("a data loader's worker"),
    Kind.LOADER: tr("waiting for a data loader"),
    Kind.CHILD: tr("waiting for a child process"),
    Kind.NETWORK: tr("waiting for the network"),
    Kind.LOCK: tr("waiting for a lock or another thread"),
    Kind.IDLE: tr("waiting for requests or messages"),
    Kind.MANAGER: tr("a server of multiprocessing"),
    Kind.SLEEP: tr("asleep"),
    Kind.FILE: tr("waiting for a file"),
    Kind.PYTHON: tr("in other code"),
}

#: Signals that peers of a lost rank do not end by; torch's watchdog and an exception in C++ end them by SIGABRT.
_OWN_SIGNALS: Final = frozenset(
    [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS]
)
#: What launchers, schedulers and terminals send to end a job, before they send SIGKILL.
_ASKED: Final = frozenset([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
_ASK_NCCL: Final = tr(
    "Ask NCCL how far each rank is: `ncclguard explain --ras`, twice; counts that do not move are a hang."
)
#: Places that stacks cannot prove anything by: a device may compute, and a server may have nothing to do.
_UNPROVEN: Final = frozenset([Kind.DEVICE, Kind.IDLE])
#: Places whose wait may end by what is not seen here: a disk, a server, another process or thread.
_MAY_END: Final = frozenset([Kind.FILE, Kind.NETWORK, Kind.LOADER, Kind.CHILD, Kind.LOCK, Kind.PYTHON])


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank with a process: where it stands, and what it has done between the looks."""

    rank: int
    state: str
    motion: Motion
    place: Place | None
    host: str = ""
    pid: int = 0
    trouble: Message | str = ""

    @property
    def stopped(self) -> bool:
        """Tell whether a signal or a debugger has stopped it."""
        return self.state in "Tt"

    @property
    def waits(self) -> bool:
        """Tell whether it waits for its peers: inside of what they have to call too, and has not moved.

        Who joins a job or asks the store does that again and again, and wakes up for it.
        """
        if self.place is None or self.stopped or self.place.kind not in INSIDE:
            return False
        asks = self.place.kind in (Kind.SETUP, Kind.STORE) and self.motion is Motion.WAKING
        return self.motion is Motion.STILL or asks

    @property
    def may_wait(self) -> bool:
        """Tell whether it may wait: in one call for its device or its peers, and computing, as NCCL has the host do."""
        if self.place is None or self.stopped:
            return False
        on_device = self.place.kind is Kind.DEVICE and self.motion is not Motion.MOVING
        return self.waits or on_device or (self.place.inside and self.motion is Motion.SPINNING)

    def needs(self, rank: int) -> bool:
        """Tell whether the call that it stands in cannot end without a rank, by what is known of the call."""
        if self.place is None or not self.place.inside:
            return False
        return self.place.peer == rank if self.place.kind is Kind.P2P else self.place.world


@dataclass(frozen=True, slots=True)
class Verdict:
    """The culprits, empty where nobody can be named; `awaited` are ranks that others wait for, at work or unclear.

    `stands` tells whether ranks wait that have not moved.
    """

    culprits: tuple[int, ...]
    cause: Cause
    confidence: str
    stands: bool
    summary: Message
    reason: Message | str
    next_step: Message | str
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence on one job; `ended` has the ranks without a process and their exit codes where known.

    `communicators` are those of NCCL whose ranks have launched unequal numbers, in the job's numbers of ranks.
    """

    world_size: int
    seen: Sequence[Seen]
    ended: Mapping[int, int | None] = field(default_factory=dict)
    seconds: float = 0.0
    communicators: Sequence[Communicator] = ()

    @property
    def unseen(self) -> tuple[int, ...]:
        """Ranks that are on no host that was looked at."""
        known = {one.rank for one in self.seen} | set(self.ended)
        return tuple(rank for rank in range(self.world_size) if rank not in known)


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict on one job, by the first rule that applies."""
    for rule in (_stopped, _ended, _launched_otherwise, _launched_less, _late, _diverged, _nobody_came, _all_wait):
        verdict = rule(evidence)
        if verdict is not None:
            return verdict
    return _unclear(evidence)


def _waiting(evidence: Evidence) -> list[Seen]:
    return [one for one in evidence.seen if one.waits]


def _named(evidence: Evidence, ranks: Sequence[int], cause: Cause, confidence: str, reason: Message | str,
           advice: Message | str = "") -> Verdict:  # fmt: skip
    summary = tr("{ranks} held up the job: {cause}.", ranks=ranks_text(ranks).capitalised(), cause=WORD[cause])
    return Verdict(tuple(sorted(ranks)), cause, confidence, True, summary, reason, advice or ADVICE[cause])


def _where(some: Sequence[Seen]) -> Message:
    """Return who stands where, such as "ranks 0-1, 3 wait in all_reduce"."""
    groups: dict[str, list[Seen]] = {}
    for one in some:
        groups.setdefault(_at(one), []).append(one)
    parts = [tr("{ranks} at {place}", ranks=ranks_text(o.rank for o in same), place=at) for at, same in groups.items()]
    shown = parts[:4] + ([tr("others elsewhere")] if len(parts) > 4 else [])
    return joined(", ", shown)


def _at(one: Seen) -> str:
    """Return the program's own line, and torch's function after it."""
    if one.place is None:
        return "?"
    *outer, last = one.place.stack
    if not one.place.inside:
        return last
    own = [frame for frame in outer if not frame.startswith("torch/")] or outer
    return " -> ".join([*own[-1:], last])


def _stopped(evidence: Evidence) -> Verdict | None:
    stopped = [one for one in evidence.seen if one.stopped]
    if not stopped:
        return None
    pids = " ".join(str(one.pid) for one in stopped)
    resume = tr(
        "Somebody has stopped it (SIGSTOP, a debugger, a frozen terminal). To have it go on: kill -CONT {some}",
        some=pids,
    )
    if len(stopped) == len(evidence.seen):
        summary = tr("All ranks seen are stopped by a signal or a debugger: the job as a whole is suspended.")
        return Verdict((), Cause.UNKNOWN, "high", True, summary, "", resume)
    ranks = [one.rank for one in stopped]
    return _named(evidence, ranks, Cause.STUCK, "high",
                  tr("{ranks} stopped by a signal or a debugger, the other ranks are not", ranks=ranks_text(ranks)),
                  resume)  # fmt: skip


def _ended(evidence: Evidence) -> Verdict | None:
    """Name ranks without a process while others stand; one whose own failure was a consequence is not named."""
    left = [one for one in evidence.seen if one.place is not None and one.place.kind is Kind.EXIT]
    still = [one for one in left if one.motion in (Motion.STILL, Motion.WAKING)]
    waiting = _waiting(evidence)
    blind = all(one.place is None and one.motion is not Motion.MOVING for one in evidence.seen)
    if not evidence.ended or not (waiting or still or blind):
        return None
    codes = evidence.ended
    asked = any(code is not None and -code in _ASKED for code in codes.values())
    own = _OWN_SIGNALS - {signal.SIGKILL} if asked else _OWN_SIGNALS
    killed = [rank for rank, code in codes.items() if code is not None and -code in own]
    where = _where(waiting or still) if waiting or still else tr("the others still run")
    if killed:
        signals = ", ".join(sorted({str(-(codes[rank] or 0)) for rank in killed}))
        return _named(evidence, killed, Cause.LOST, "medium" if blind else "high",
                      tr("{ranks} ended by signal {signal}; {where}", ranks=ranks_text(killed), signal=signals,
                         where=where))  # fmt: skip
    if not waiting:
        return None
    ranks = sorted(codes)
    code = codes[ranks[0]]
    # Who ended because of another rank has an exit code too: that of an exception, or SIGABRT's.
    others = any(not one.waits and one not in still for one in evidence.seen) or bool(evidence.unseen)
    if len(ranks) > 1 or (code is not None and code < 0) or others:
        summary = tr("{ranks} have ended, and others wait for them; which of them was the first cannot be told.",
                     ranks=ranks_text(ranks).capitalised())  # fmt: skip
        failed = any(code is not None and code > 0 for code in codes.values())
        return Verdict((), Cause.FAILED if failed else Cause.UNKNOWN, "low", True, summary, _where(evidence.seen),
                       tr("Read the log of each of them: the earliest exception counts."))  # fmt: skip
    if code is None:
        return _named(evidence, ranks, Cause.LOST, "medium",
                      tr("{ranks} without a process on this host: ended, or never started; {where}",
                         ranks=ranks_text(ranks), where=where))  # fmt: skip
    cause = Cause.EXITED if code == 0 else Cause.FAILED
    reason = tr("{ranks} ended with exit code {code}; {where}", ranks=ranks_text(ranks), code=code, where=where)
    return _named(evidence, ranks, cause, "high", reason)


def _launched_otherwise(evidence: Evidence) -> Verdict | None:
    """Name one rank that has launched another order of NCCL's collectives than most ranks of its communicator."""
    if any(one.motion is Motion.MOVING for one in evidence.seen):
        return None
    ranks = sorted({rank for one in evidence.communicators for rank in strayed(one)})
    if len(ranks) != 1 or evidence.ended:
        return None
    return _named(evidence, ranks, Cause.DIVERGED, "medium",
                  joined("; ", [counts_of(evidence.communicators), _where(evidence.seen)]))  # fmt: skip


def _launched_less(evidence: Evidence) -> Verdict | None:
    """Name who has launched less on NCCL than those that wait for it, and waits for nobody itself."""
    waits = behind(evidence.communicators)
    awaited = {rank for others in waits.values() for rank in others if not waits[rank]}
    waiting = [one for one in evidence.seen if waits.get(one.rank)]
    if not awaited or any(one.motion is Motion.MOVING for one in waiting):
        return None
    outside = [one for one in evidence.seen if one.rank in awaited]
    where = joined("; ", [counts_of(evidence.communicators), _where(waiting)])
    if len(outside) < len(awaited):
        summary = tr("The others wait for {ranks}; what happens there cannot be told.", ranks=ranks_text(awaited))
        return Verdict((), Cause.UNKNOWN, "low", True, summary, where,
                       _missing(evidence) or ADVICE[Cause.UNKNOWN], tuple(sorted(awaited)))  # fmt: skip
    unproven = [one for one in outside if one.place is not None and one.place.kind in _UNPROVEN]
    if unproven:
        return _unproven(unproven, where)
    if any(not _is_known(one) for one in outside):
        return _awaited(outside, where)
    if len({one.place.stack[-1] for one in outside if one.place}) > 1:
        return _named(evidence, [one.rank for one in outside], Cause.LATE, "high",
                      joined("; ", [where, _where(outside)]))  # fmt: skip
    return _held_up_by(evidence, outside, where, "high")


def _late(evidence: Evidence) -> Verdict | None:
    """Name who stands outside of what all others wait in; nobody while one of those outside works."""
    waiting = _waiting(evidence)
    outside = [one for one in evidence.seen if not one.waits]
    if not waiting:  # but perhaps all of them on their devices; then who has not run at all stands outside
        waiting = [one for one in outside if one.may_wait]
        outside = [one for one in outside if not one.may_wait]
        if any(one.motion is not Motion.STILL for one in outside):
            return None
    if not outside or not waiting:
        return None
    ranks = [one.rank for one in outside]
    unproven = [one for one in outside if one.place is not None and one.place.kind in _UNPROVEN]
    if unproven and all(one.motion in (Motion.STILL, Motion.WAKING) for one in unproven):
        return _unproven(unproven, joined("; ", [_where(waiting), _where(outside)]))
    if any(not _is_known(one) for one in outside):
        return _awaited(outside, joined("; ", [_where(waiting), _where(outside)]))
    places = {one.place.stack[-1] for one in outside if one.place}
    if len(places) > 1 and len(outside) > 1:
        summary = tr("The others wait for {ranks}, which stand in different places; which of them holds them up cannot be told.",
                     ranks=ranks_text(ranks))  # fmt: skip
        return Verdict((), Cause.LATE, "low", True, summary, joined("; ", [_where(waiting), _where(outside)]),
                       ADVICE[Cause.LATE], tuple(ranks))  # fmt: skip
    if len(outside) > len(waiting) and all(_looks_again(one) for one in outside):
        return _awaited(outside, joined("; ", [_where(waiting), _where(outside)]))
    for_all = all(any(one.waits and one.needs(rank) for one in waiting) for rank in ranks)
    if (len(outside) > 1 or evidence.unseen) and not for_all:
        summary = tr("The others wait in groups whose members are not known, and {ranks} stand outside.",
                     ranks=ranks_text(ranks))  # fmt: skip
        return Verdict((), Cause.UNKNOWN, "low", True, summary, joined("; ", [_where(waiting), _where(outside)]),
                       ADVICE[Cause.LATE], tuple(ranks))  # fmt: skip
    proved = for_all and not evidence.unseen and not any(_looks_again(one) for one in outside)
    return _held_up_by(evidence, outside, _where(waiting), "high" if proved else "medium")


def _is_known(one: Seen) -> bool:
    """Tell whether it stands outside of what its peers have to call too, and does not work."""
    return one.place is not None and not one.place.inside and one.motion in (Motion.STILL, Motion.WAKING)


def _looks_again(one: Seen) -> bool:
    """Tell whether it sleeps again and again, as a loop does that looks for a file or a flag of another rank."""
    return one.place is not None and one.place.kind is Kind.SLEEP and one.motion is Motion.WAKING


def _awaited(some: Sequence[Seen], where: Message) -> Verdict:
    """Name nobody: the others wait for ranks that work, or of which it is not known what they do."""
    working = [one.rank for one in some if one.motion in (Motion.MOVING, Motion.SPINNING)]
    ranks = [one.rank for one in some]
    if working:
        summary = tr(
            "The others wait for {ranks}, at work as far as can be seen; nobody is to blame.",
            ranks=ranks_text(working),
        )
        step: Message | str = tr(
            "Look again in a minute, or with --seconds 60: the same place in each look is no progress."
        )
    else:
        summary = tr("The others wait for {ranks}; what happens there cannot be told.", ranks=ranks_text(ranks))
        step = next((one.trouble for one in some if one.trouble), "") or ADVICE[Cause.UNKNOWN]
    return Verdict((), Cause.UNKNOWN, "low", True, summary, where, step, tuple(working or ranks))


def _held_up_by(evidence: Evidence, outside: Sequence[Seen], where: Message, confidence: str) -> Verdict:
    """Name ranks that stand in one place, by where that is."""
    first, ranks = outside[0], [one.rank for one in outside]
    assert first.place is not None
    reason = tr("unmoved for {seconds:.1f} s: {where}; {ranks} {what}, at {place}", ranks=ranks_text(ranks),
                what=WORDS[first.place.kind], place=_at(first), seconds=evidence.seconds, where=where)  # fmt: skip
    if first.place.kind is Kind.EXIT:
        step = tr(
            "It returned or raised before the others: the end of its log has the exception. What keeps its process alive is a thread that does not end."
        )
        return _named(evidence, ranks, Cause.EXITED, confidence, reason, step)
    if first.state == "D":
        reason = tr("{text}; the kernel does not answer it (state D)", text=reason)
    elif first.place.holds_gil and first.motion is Motion.STILL:
        reason = tr("{text}, and holds the GIL: it waits in C", text=reason)
        step = tr(
            "It stands in a call into C or C++ that does not return: `py-spy dump --native --pid {pid}` shows which.",
            pid=first.pid,
        )
        return _named(evidence, ranks, Cause.STUCK, confidence, reason, step)
    if first.place.kind in _MAY_END:
        confidence = "medium"
    return _named(evidence, ranks, Cause.LATE, confidence, reason)


def _unproven(some: Sequence[Seen], where: Message) -> Verdict:
    """Name nobody: the others wait for ranks that may stand where they stand in a healthy job too."""
    ranks = tuple(one.rank for one in some)
    if any(one.place is not None and one.place.kind is Kind.IDLE for one in some):
        summary = tr(
            "The others wait for {ranks}, which wait for requests or messages: a server that has nothing to do looks like that.",
            ranks=ranks_text(ranks),
        )
        step: Message = tr("If requests are waiting, find the process that should pass them on, and look at its log.")
        return Verdict((), Cause.UNKNOWN, "low", False, summary, where, step, ranks)
    summary = tr("The others wait for {ranks}, which wait for their devices; whether these compute, stacks do not tell.",
                 ranks=ranks_text(ranks))  # fmt: skip
    step = _ASK_NCCL
    return Verdict((), Cause.UNKNOWN, "low", True, summary, where, step, ranks)


def _diverged(evidence: Evidence) -> Verdict | None:
    """Name one rank alone in another collective of all ranks than the rest of the job."""
    waiting = _waiting(evidence)
    if len(waiting) != len(evidence.seen) or not waiting:
        return None
    calls = Counter(one.place.op for one in waiting if one.place)
    if len(calls) < 2:
        return None
    pairs = {one.place.kind for one in waiting if one.place} & {Kind.P2P, Kind.STORE}
    common, count = calls.most_common(1)[0]
    odd = [one for one in waiting if one.place and one.place.op != common]
    for_all = all(one.place is not None and one.place.world for one in waiting)
    where = _where(waiting)
    if len(odd) == 1 and count > 1 and for_all and not pairs and not evidence.unseen and not evidence.ended:
        return _named(evidence, [odd[0].rank], Cause.DIVERGED, "medium", where)
    summary = tr("The ranks wait in different calls; which side is wrong cannot be told.")
    if pairs or evidence.unseen:
        return Verdict((), Cause.UNKNOWN, "low", True, summary, where, _missing(evidence) or ADVICE[Cause.DIVERGED])
    return Verdict((), Cause.DIVERGED, "medium" if for_all else "low", True, summary, where, ADVICE[Cause.DIVERGED])


def _missing(evidence: Evidence) -> Message | str:
    if not evidence.unseen:
        return ""
    return tr("Look at the other hosts too: `ncclguard hang --collect DIR` on each, then `ncclguard hang DIR`.")


def _nobody_came(evidence: Evidence) -> Verdict | None:
    waiting = _waiting(evidence)
    if not evidence.unseen or not waiting or len(waiting) != len(evidence.seen):
        return None
    summary = tr("All ranks seen wait; {ranks} were not seen.", ranks=ranks_text(evidence.unseen))
    return Verdict((), Cause.UNKNOWN, "low", True, summary, _where(waiting), _missing(evidence), evidence.unseen)


def _all_wait(evidence: Evidence) -> Verdict | None:
    waiting = _waiting(evidence)
    if not waiting or len(waiting) != len(evidence.seen):
        return None
    assert waiting[0].place is not None
    summary = tr(
        "All ranks wait in {op}, and none of them moves; nobody can be named by their stacks.", op=waiting[0].place.op
    )
    step = tr(
        "Compare what they pass (shape, dtype, group) and how many steps each has made; then check the network between the hosts (`ncclguard doctor`), and ask NCCL with `ncclguard explain --ras`."
    )
    return Verdict((), Cause.UNKNOWN, "low", True, summary, _where(waiting), step)


def _unclear(evidence: Evidence) -> Verdict:
    if not evidence.seen:
        summary = tr("All its ranks have ended, some of them while they were looked at.")
        step = tr("Read what they have left: `ncclguard explain LOG...`.")
        return Verdict((), Cause.UNKNOWN, "low", False, summary, "", step)
    if not any(one.place for one in evidence.seen):
        summary = tr("No stack could be read; where the ranks stand cannot be told.")
        trouble = next((one.trouble for one in evidence.seen if one.trouble), "")
        return Verdict((), Cause.UNKNOWN, "low", False, summary, trouble, "")
    if all(one.may_wait for one in evidence.seen):
        summary = tr(
            "All ranks stand in the same calls as before; whether their devices compute or wait for each other, stacks do not tell."
        )
        step = _ASK_NCCL
        return Verdict((), Cause.UNKNOWN, "low", False, summary, _where(evidence.seen), step)
    moving = [one.rank for one in evidence.seen if one.motion in (Motion.MOVING, Motion.SPINNING, Motion.WAKING)]
    if moving:
        summary = tr("The job moves: nothing hangs by what is seen.")
        reason = tr("{ranks} moved within {seconds:.1f} s", ranks=ranks_text(moving), seconds=evidence.seconds)
        return Verdict((), Cause.UNKNOWN, "medium", False, summary, reason, "")
    summary = tr("No rank moves, and none waits for another in a collective.")
    step = tr("See where each of them stands: what they wait for is outside of torch.distributed.")
    return Verdict((), Cause.UNKNOWN, "low", False, summary, _where(evidence.seen), step)
