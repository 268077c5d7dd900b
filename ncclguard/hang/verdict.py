"""The rules that name who holds up a job, by where its ranks stand and whether they move; pure functions.

The rules never name a rank without proof. A rank that works is awaited, and is not to blame: a healthy job looks like
that while one rank saves or evaluates.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from ncclguard.environment.ras import Communicator
from ncclguard.hang.launches import behind, counts_of, strayed
from ncclguard.hang.names import names_of
from ncclguard.hang.stacks import INSIDE, Kind, Motion, Place, programs_line
from ncclguard_explain.cause import ADVICE, WORD, Cause
from ncclguard_explain.language import Message, joined, tr

#: What a rank stands in, for people.
WORDS: Mapping[Kind, Message] = {
    Kind.COLLECTIVE: tr("in a collective"),
    Kind.P2P: tr("in a send or receive"),
    Kind.BACKWARD: tr("in backward"),
    Kind.SETUP: tr("making a process group"),
    Kind.STORE: tr("waiting for the store"),
    Kind.RPC: tr("waiting for the answer to an RPC"),
    Kind.DEVICE: tr("waiting for its device"),
    Kind.EXIT: tr("at the end of its program"),
    Kind.WORKER: tr("a data loader's worker"),
    Kind.LOADER: tr("waiting for a data loader"),
    Kind.CHILD: tr("waiting for a child process"),
    Kind.NETWORK: tr("waiting for the network"),
    Kind.LOCK: tr("waiting for a lock or another thread"),
    Kind.IDLE: tr("waiting for requests or messages"),
    Kind.MANAGER: tr("a server of multiprocessing"),
    Kind.DEBUGGER: tr("at the prompt of a debugger"),
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
#: Calls that wait for one rank, or for whoever sets a key.
_OF_ONE: Final = frozenset([Kind.P2P, Kind.STORE, Kind.RPC])
#: Waits of which a reason tells one by one.
_SHOWN: Final = 4
#: Places that stacks cannot prove anything by: a device may compute, and a server may have nothing to do.
_UNPROVEN: Final = frozenset([Kind.DEVICE, Kind.IDLE])
#: Where ranks train, and not serve: a step of DDP, FSDP or DeepSpeed is one of all its ranks.
_TRAINING: Final = ("torch/nn/parallel/", "torch/distributed/fsdp/", "deepspeed/runtime/")
#: Where a rank waits to be told what to call, as a controller tells all of them.
_TOLD: Final = ("ray/", "torch/distributed/rpc/", "vllm/", "sglang/")
#: Places whose wait may end by what is not seen here: a disk, a server, another process or thread.
_MAY_END: Final = frozenset([Kind.FILE, Kind.NETWORK, Kind.LOADER, Kind.CHILD, Kind.LOCK, Kind.PYTHON, Kind.IDLE])


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank with a process: where it stands, and what it has done between the looks.

    `members` are the ranks of the group that its call is for, empty where they are not known.
    """

    rank: int
    state: str
    motion: Motion
    place: Place | None
    host: str = ""
    pid: int = 0
    trouble: Message | str = ""
    members: frozenset[int] = frozenset()
    gloo: bool = False

    @property
    def stopped(self) -> bool:
        """Tell whether a signal or a debugger has stopped it."""
        return self.state in "Tt"

    @property
    def waits(self) -> bool:
        """Tell whether it waits for its peers: inside of what they have to call too, and has not moved.

        Who joins a job, or asks the store or Ray, does that again and again, and wakes up for it; and works for it
        where the process has the store, or where the machine is slow. Who waits in a guarded call wakes up to see
        whether the others have agreed on its end.
        """
        if self.place is None or self.stopped or self.place.kind not in INSIDE:
            return False
        if self.place.guarded and self.motion is Motion.WAKING:
            return True
        return self.motion is Motion.STILL or (self.place.asks and self.motion in (Motion.WAKING, Motion.SPINNING))

    @property
    def may_wait(self) -> bool:
        """Tell whether it may wait: in one call for its device or its peers, and computing, as NCCL has the host do."""
        if self.place is None or self.stopped:
            return False
        on_device = self.place.kind is Kind.DEVICE and self.motion is not Motion.MOVING
        return self.waits or on_device or (self.place.inside and self.motion is Motion.SPINNING)


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

    `communicators` are those of NCCL whose ranks have launched unequal numbers, in the job's numbers of ranks. Ranks
    that are `counted` are told by their processes.
    """

    world_size: int
    seen: Sequence[Seen]
    ended: Mapping[int, int | None] = field(default_factory=dict)
    seconds: float = 0.0
    communicators: Sequence[Communicator] = ()
    counted: bool = False

    @property
    def everyone(self) -> frozenset[int]:
        """All ranks of the job."""
        if self.counted:
            return frozenset({one.rank for one in self.seen} | set(self.ended))
        return frozenset(range(self.world_size))

    @property
    def unseen(self) -> tuple[int, ...]:
        """Ranks that are on no host that was looked at."""
        return tuple(sorted(self.everyone - {one.rank for one in self.seen} - set(self.ended)))


#: Places in which a process asks for a lock in the file system until it gets it.
_FILE_LOCK: Final = re.compile(r"torch/utils/file_baton\.py:|filelock/")


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict on one job, by the first rule that applies."""
    for rule in (
        _stopped,
        _ended,
        _launched_otherwise,
        _launched_less,
        _late,
        _circle,
        _diverged,
        _nobody_came,
        _all_wait,
        _all_at_a_lock,
    ):
        verdict = rule(evidence)
        if verdict is not None:
            return verdict
    return _unclear(evidence)


def _waiting(evidence: Evidence) -> list[Seen]:
    return [one for one in evidence.seen if one.waits]


def _members(evidence: Evidence, some: Sequence[Seen]) -> dict[int, frozenset[int]]:
    """Return by rank who has to make the call too that it stands in, without those of which that is not known.

    DDP reduces over all ranks, but in a job with calls for some of them perhaps over these.
    """
    everyone = evidence.everyone
    of_some = any(o.place is not None and o.place.group and o.place.group[1] < len(everyone) for o in evidence.seen)
    found = {}
    for one in some:
        if one.place is None or one.place.kind in _OF_ONE:
            continue
        for_all = one.place.world and not (of_some and one.place.kind is Kind.BACKWARD)
        if one.place.group is not None:
            for_all = one.place.group[1] == len(everyone)
        if members := one.members or (everyone if for_all else frozenset()):
            found[one.rank] = members
    return found


def _needs(evidence: Evidence, waiting: Sequence[Seen]) -> dict[int, AbstractSet[int] | None]:
    """Return by rank without whom the call cannot end that it waits in, None where that is not known."""
    members = _members(evidence, waiting)
    calls: dict[tuple[str, frozenset[int]], set[int]] = {}
    for one in waiting:
        if one.place is not None and one.rank in members:
            calls.setdefault((one.place.op, members[one.rank]), set()).add(one.rank)
    late = {call: call[1] - ranks for call, ranks in calls.items()}
    # Threads answer RPCs, also beside a main thread that sleeps; but no thread does while another one keeps the GIL.
    answers = {one.rank for one in evidence.seen if one.place is not None and one.place.serves} or {
        one.rank
        for one in evidence.seen
        if one.place is not None and one.place.holds_gil and one.motion is Motion.STILL
    }
    needs: dict[int, AbstractSet[int] | None] = {}
    for one in waiting:
        needs[one.rank] = late.get((one.place.op, members.get(one.rank, frozenset()))) if one.place else None
        if one.place is not None and one.place.kind is Kind.P2P and one.place.peer is not None:
            needs[one.rank] = {one.place.peer}
        elif one.place is not None and one.place.kind is Kind.RPC:
            needs[one.rank] = answers - {one.rank} or None
    return needs


def _named(evidence: Evidence, ranks: Sequence[int], cause: Cause, confidence: str, reason: Message | str,
           advice: Message | str = "") -> Verdict:  # fmt: skip
    summary = tr("{ranks} held up the job: {cause}.", ranks=names_of(ranks).capitalised(), cause=WORD[cause])
    return Verdict(tuple(sorted(ranks)), cause, confidence, True, summary, reason, advice or ADVICE[cause])


def _where(some: Sequence[Seen]) -> Message:
    """Return who stands where, such as "ranks 0-1, 3 wait in all_reduce"."""
    groups: dict[str, list[Seen]] = {}
    for one in some:
        groups.setdefault(_at(one), []).append(one)
    parts = [tr("{ranks} at {place}", ranks=names_of(o.rank for o in same), place=at) for at, same in groups.items()]
    shown = parts[:4] + ([tr("others elsewhere")] if len(parts) > 4 else [])
    return joined(", ", shown)


def _at(one: Seen) -> str:
    """Return the program's own line, and after it torch's function or the innermost line, where that is another."""
    if one.place is None:
        return "?"
    *outer, last = one.place.stack
    own = programs_line(one.place.stack)
    if own == len(outer) or not outer:
        return last
    if own is None and not one.place.inside:
        return last
    return f"{outer[-1 if own is None else own]} -> {last}"


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
                  tr("{ranks} stopped by a signal or a debugger, the other ranks are not", ranks=names_of(ranks)),
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
                      tr("{ranks} ended by signal {signal}; {where}", ranks=names_of(killed), signal=signals,
                         where=where))  # fmt: skip
    if not waiting:
        return None
    ranks = sorted(codes)
    code = codes[ranks[0]]
    # Who ended because of another rank has an exit code too: that of an exception, or SIGABRT's.
    others = any(not one.waits and one not in still for one in evidence.seen) or bool(evidence.unseen)
    if len(ranks) > 1 or (code is not None and code < 0) or others:
        if len(ranks) > 1:
            summary = tr("{ranks} have ended, and others wait for them; which of them was the first cannot be told.",
                         ranks=names_of(ranks).capitalised())  # fmt: skip
        else:
            summary = tr("{ranks} has ended, and others wait for it; nothing here tells whether it was the first to fail.",
                         ranks=names_of(ranks).capitalised())  # fmt: skip
        failed = any(code is not None and code > 0 for code in codes.values())
        return Verdict((), Cause.FAILED if failed else Cause.UNKNOWN, "low", True, summary, _where(evidence.seen),
                       tr("Read the log of each rank that has ended: the earliest exception counts."))  # fmt: skip
    if code is None:
        return _named(evidence, ranks, Cause.LOST, "medium",
                      tr("{ranks} without a process on this host: ended, or never started; {where}",
                         ranks=names_of(ranks), where=where))  # fmt: skip
    cause = Cause.EXITED if code == 0 else Cause.FAILED
    reason = tr("{ranks} ended with exit code {code}; {where}", ranks=names_of(ranks), code=code, where=where)
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
        summary = tr("The others wait for {ranks}; what happens there cannot be told.", ranks=names_of(awaited))
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
    certain: set[int] = set()
    if waiting:
        needs = _needs(evidence, waiting).values()
        certain.update(*(some for some in needs if some is not None))
        # Whom some wait for by what is known of their calls; the others too where the rest may wait for them.
        if all(some is not None for some in needs) or (
            certain & {one.rank for one in outside} and all(map(_is_known, outside))
        ):
            outside = [one for one in outside if one.rank in certain]
    else:  # but perhaps all of them on their devices; then who has not run at all stands outside
        waiting = [one for one in outside if one.may_wait]
        outside = [one for one in outside if not one.may_wait]
        if any(one.motion is not Motion.STILL for one in outside):
            return None
    if not outside or not waiting:
        return None
    ranks = [one.rank for one in outside]
    unproven = [one for one in outside if one.place is not None and one.place.kind in _UNPROVEN]
    if all(_trains(one) for one in waiting):
        unproven = [one for one in unproven if not _is_missed(one)]
    if unproven and all(one.motion in (Motion.STILL, Motion.WAKING) for one in unproven):
        return _unproven(unproven, joined("; ", [_where(waiting), _where(outside)]))
    if any(not _is_known(one) for one in outside):
        return _awaited(outside, joined("; ", [_where(waiting), _where(outside)]))
    places = {one.place.stack[-1] for one in outside if one.place}
    if len(places) > 1 and len(outside) > 1:
        summary = tr("The others wait for {ranks}, which stand in different places; which of them holds them up cannot be told.",
                     ranks=names_of(ranks))  # fmt: skip
        return Verdict((), Cause.LATE, "low", True, summary, joined("; ", [_where(waiting), _where(outside)]),
                       ADVICE[Cause.LATE], tuple(ranks))  # fmt: skip
    if len(outside) > len(waiting) and all(_looks_again(one) for one in outside):
        return _awaited(outside, joined("; ", [_where(waiting), _where(outside)]))
    for_all = certain.issuperset(ranks)
    if (len(outside) > 1 or evidence.unseen) and not for_all:
        summary = tr("The others wait in groups whose members are not known, and {ranks} stand outside.",
                     ranks=names_of(ranks))  # fmt: skip
        return Verdict((), Cause.UNKNOWN, "low", True, summary, joined("; ", [_where(waiting), _where(outside)]),
                       ADVICE[Cause.LATE], tuple(ranks))  # fmt: skip
    by_sockets = any(one.members and one.members != evidence.everyone for one in waiting)
    proved = for_all and not (by_sockets or evidence.unseen or any(_looks_again(one) for one in outside))
    return _held_up_by(evidence, outside, _where(waiting), "high" if proved else "medium")


def _circle(evidence: Evidence) -> Verdict | None:
    """Name nobody where ranks wait for each other, one of them for a message: which of them is wrong is not seen."""
    waiting = {one.rank: one for one in _waiting(evidence)}
    needs = {rank: some or set() for rank, some in _needs(evidence, list(waiting.values())).items()}
    pairs = [one for one in waiting.values() if one.place and one.place.peer in waiting]
    pairs = [one for one in pairs if one.rank in _reached(one.rank, needs)]
    if not pairs:
        return None
    circle = {
        rank for rank in _reached(pairs[0].rank, needs) if rank in waiting and pairs[0].rank in _reached(rank, needs)
    }
    pairs = [one for one in pairs if one.rank in circle]
    summary = tr("{ranks} wait for each other, and none of them can go on; which of them is wrong cannot be told.",
                 ranks=names_of(circle).capitalised())  # fmt: skip
    awaited = {one.place.peer for one in pairs if one.place and one.place.peer is not None}
    told = [tr("{rank} waits in {op} for {peer}", rank=names_of([one.rank]), op=one.place.op, peer=names_of([one.place.peer]))
            for one in pairs[:_SHOWN] if one.place and one.place.peer is not None]  # fmt: skip
    step = tr(
        "Compare the sends and receives of both sides, and the calls before them: one is missing, or comes too early."
    )
    reason = joined("; ", [joined(", ", told), _where([waiting[rank] for rank in sorted(circle)])])
    return Verdict((), Cause.DIVERGED, "medium", True, summary, reason, step, tuple(sorted(awaited)))


def _reached(rank: int, needs: Mapping[int, AbstractSet[int]]) -> set[int]:
    """Return the ranks that a rank waits for, and those that these wait for."""
    found: set[int] = set()
    left = [rank]
    while left:
        more = needs.get(left.pop(), set()) - found
        found |= more
        left += more
    return found


def _is_known(one: Seen) -> bool:
    """Tell whether it stands outside of what its peers have to call too, and does not work."""
    return one.place is not None and not one.place.inside and one.motion in (Motion.STILL, Motion.WAKING)


def _trains(one: Seen) -> bool:
    """Tell whether it waits within a step of training."""
    if one.place is None:
        return False
    return one.place.kind is Kind.BACKWARD or any(frame.startswith(_TRAINING) for frame in one.place.stack)


def _is_missed(one: Seen) -> bool:
    """Tell whether it waits, without waking up, for messages of its own, and not for a controller's call."""
    if one.place is None or one.place.kind is not Kind.IDLE or one.motion is not Motion.STILL:
        return False
    return not one.place.stack[-1].startswith(_TOLD)


def _looks_again(one: Seen) -> bool:
    """Tell whether it sleeps again and again, as a loop does that looks for a file or a flag of another rank."""
    return one.place is not None and one.place.kind is Kind.SLEEP and one.motion is Motion.WAKING


def _awaited(some: Sequence[Seen], where: Message) -> Verdict:
    """Name nobody: the others wait for ranks that work, or of which it is not known what they do."""
    working = [one.rank for one in some if one.motion in (Motion.MOVING, Motion.SPINNING)]
    resting = [one.rank for one in some if one.rank not in working]
    ranks = [one.rank for one in some]
    if working:
        summary = (
            tr(
                "The others wait for {ranks}, at work as far as can be seen, or for {others}, where nothing moves; which of them holds them up cannot be told.",
                ranks=names_of(working),
                others=names_of(resting),
            )
            if resting
            else tr(
                "The others wait for {ranks}, at work as far as can be seen; nobody is to blame.",
                ranks=names_of(working),
            )
        )
        step: Message | str = tr(
            "Look again in a minute, or with --seconds 60: the same place in each look is no progress."
        )
    else:
        summary = tr("The others wait for {ranks}; what happens there cannot be told.", ranks=names_of(ranks))
        step = next((one.trouble for one in some if one.trouble), "") or ADVICE[Cause.UNKNOWN]
    return Verdict((), Cause.UNKNOWN, "low", True, summary, where, step, tuple(ranks))


def _held_up_by(evidence: Evidence, outside: Sequence[Seen], where: Message, confidence: str) -> Verdict:
    """Name ranks that stand in one place, by where that is."""
    first, ranks = outside[0], [one.rank for one in outside]
    assert first.place is not None
    reason = tr("unmoved for {seconds:.1f} s: {where}; {ranks} {what}, at {place}", ranks=names_of(ranks),
                what=WORDS[first.place.kind], place=_at(first), seconds=evidence.seconds, where=where)  # fmt: skip
    if first.place.kind is Kind.EXIT:
        step = tr(
            "It returned or raised before the others: the end of its log has the exception. What keeps its process alive is a thread or an exit handler that does not end: `py-spy dump --native --pid {pid}`, or `gdb -p {pid}` where no Python is left.",
            pid=first.pid,
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
            ranks=names_of(ranks),
        )
        step: Message = tr("If requests are waiting, find the process that should pass them on, and look at its log.")
        return Verdict((), Cause.UNKNOWN, "low", False, summary, where, step, ranks)
    summary = tr("The others wait for {ranks}, which wait for their devices; whether these compute, stacks do not tell.",
                 ranks=names_of(ranks))  # fmt: skip
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
    pairs = {one.place.kind for one in waiting if one.place} & _OF_ONE
    common, count = calls.most_common(1)[0]
    odd = [one for one in waiting if one.place and one.place.op != common]
    members = _members(evidence, waiting)
    for_all = all(members.get(one.rank) == evidence.everyone for one in waiting)
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
    if len(evidence.unseen) == 1:
        summary = tr("All ranks seen wait; {rank} was not seen.", rank=names_of(evidence.unseen))
    else:
        summary = tr("All ranks seen wait; {ranks} were not seen.", ranks=names_of(evidence.unseen))
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
        "Compare what they pass (shape, dtype, group) and how many steps each has made; then check the network between the hosts (`ncclguard doctor`)."
    )
    if not all(one.gloo for one in waiting):
        step = joined(" ", [step, _ASK_NCCL])
    return Verdict((), Cause.UNKNOWN, "low", True, summary, _where(waiting), step)


def _all_at_a_lock(evidence: Evidence) -> Verdict | None:
    """Find a lock in the file system that all ask for again and again, and that none of them holds."""
    asking = [one for one in evidence.seen if one.place and any(map(_FILE_LOCK.match, one.place.stack))]
    if not asking or len(asking) != len(evidence.seen) or any(one.motion is Motion.MOVING for one in asking):
        return None
    summary = tr("All ranks seen wait for a lock file, which none of them holds.")
    step = tr(
        "If no other process is at work on what it protects, it was left by one that was ended: delete it, and start again. torch's extensions keep theirs as NAME/lock in TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions)."
    )
    return Verdict((), Cause.UNKNOWN, "medium", True, summary, _where(asking), step, evidence.unseen)


def _unclear(evidence: Evidence) -> Verdict:
    if not evidence.seen:
        summary = tr("All its ranks have ended, some of them while they were looked at.")
        step = tr("Read what they have left: `ncclguard explain LOG...`.")
        return Verdict((), Cause.UNKNOWN, "low", False, summary, "", step)
    if not any(one.place for one in evidence.seen):
        summary = tr("No stack could be read; where the ranks stand cannot be told.")
        trouble = next((one.trouble for one in evidence.seen if one.trouble), "")
        step = tr(
            "Have py-spy installed where this runs (`pip install py-spy`), and look again. A job under `watch()` or in a guarded call "
            "tells by itself whom it waits for: `ncclguard top --all`."
        )
        return Verdict((), Cause.UNKNOWN, "low", False, summary, trouble, step)
    if all(one.may_wait for one in evidence.seen):
        summary = tr(
            "All ranks stand in the same calls as before; whether their devices compute or wait for each other, stacks do not tell."
        )
        step = _ASK_NCCL
        return Verdict((), Cause.UNKNOWN, "low", False, summary, _where(evidence.seen), step)
    moving = [one.rank for one in evidence.seen if one.motion in (Motion.MOVING, Motion.SPINNING, Motion.WAKING)]
    if moving:
        summary = tr("The job moves: nothing hangs by what is seen.")
        reason = tr("{ranks} moved within {seconds:.1f} s", ranks=names_of(moving), seconds=evidence.seconds)
        return Verdict((), Cause.UNKNOWN, "medium", False, summary, reason, "")
    summary = tr("No rank moves, and none waits for another in a collective.")
    step = tr("See where each of them stands: what they wait for is outside of torch.distributed.")
    return Verdict((), Cause.UNKNOWN, "low", False, summary, _where(evidence.seen), step)
