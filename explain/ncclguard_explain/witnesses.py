"""Witnesses that name a rank outright: an incident of ncclguard, a dump, a table, a watchdog, RAS, a barrier."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ncclguard_explain import incident_text
from ncclguard_explain.cause import Cause
from ncclguard_explain.evidence import Evidence, World, told_to_end
from ncclguard_explain.facts import EXPIRED, WAITING, Fact, Kind, Verdict
from ncclguard_explain.failures import BARRIER_KEY, IN_COLLECTIVE, WAITS_FOR_DEVICE, by_failure, own_exceptions
from ncclguard_explain.language import joined, received, tr
from ncclguard_explain.rank_map import blocks_of
from ncclguard_explain.ranks import ranks_text
from ncclguard_explain.recorder import name_culprits


def by_watchdog(evidence: Evidence, world: World) -> Verdict | None:
    """The watchdog of one rank alone is stuck, or its monitor hears nothing, and its stack is in no collective."""
    beats = evidence.of(Kind.HEARTBEAT) or evidence.of(Kind.ENGINE_WAIT, name="monitor")
    ranks = {fact.rank for fact in beats}
    first = {fact.rank for fact in evidence.of(Kind.LAUNCHER, name="first") or evidence.of(Kind.EXIT, name="local")}
    stacks = [fact for fact in evidence.of(Kind.STACK) if fact.rank in ranks and fact.frames and "Main" in fact.text]
    rank = ranks.pop() if len(ranks) == 1 and ranks == first and not evidence.of(*EXPIRED) else None
    if rank is None or not stacks or WAITS_FOR_DEVICE.search(stacks[-1].frames[-1]):
        return None
    if any(IN_COLLECTIVE.search(frame) for frame in stacks[-1].frames[-5:]):
        return None
    reason = tr(
        "the watchdog of {ranks} alone is stuck, while it is at work: {frame}",
        ranks=ranks_text([rank]),
        frame=stacks[-1].frames[-1],
    )
    return Verdict((rank,), Cause.LATE, "medium", "watchdog", reason, [*beats[:1], stacks[-1]])


def by_ras(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's RAS: processes that are dead or do not answer, and ranks that have launched fewer operations."""
    facts = evidence.of(Kind.RAS)
    gone = [fact for fact in facts if fact.name in ("dead", "silent", "error")]
    if gone:
        ranks = tuple(sorted({*(r for f in gone for r in f.peers), *(f.rank for f in gone if f.rank is not None)}))
        cause, what, sure = next(
            row[1:]
            for row in (
                ("dead", Cause.LOST, tr("is dead"), "high"),
                ("error", Cause.FAILED, tr("reports an asynchronous error"), "medium"),
                ("silent", Cause.UNKNOWN, tr("does not answer"), "medium"),
            )
            if row[0] in {fact.name for fact in gone}
        )
        if ranks and (world.size is None or 2 * len(ranks) < max(world.size, 3)):
            return Verdict(
                ranks, cause, sure, "ras", tr("{who} {what} by NCCL's RAS", who=ranks_text(ranks), what=what), gone
            )
        where = ", ".join(sorted({fact.host for fact in gone if fact.host})) or tr("one of the hosts")
        who = tr("a process on {hosts}", hosts=where)
        return Verdict(rule="ras", cause=cause, reason=tr("{who} {what} by NCCL's RAS", who=who, what=what), facts=gone)
    uneven = [fact for fact in facts if fact.name in ("behind", "ahead") and fact.peers]
    if not uneven:
        return None
    first = max(uneven, key=lambda fact: fact.repeated)
    proven = first.repeated > 1 or bool(evidence.of(*EXPIRED))
    who, counts = ranks_text(first.peers), first.detail
    if first.name == "behind":
        one = tr("{ranks} has launched fewer operations than the others ({counts})", ranks=who, counts=counts)
        many = tr("{ranks} have launched fewer operations than the others ({counts})", ranks=who, counts=counts)
    else:
        one = tr("{ranks} has launched more operations than the others ({counts})", ranks=who, counts=counts)
        many = tr("{ranks} have launched more operations than the others ({counts})", ranks=who, counts=counts)
    text = one if len(first.peers) == 1 else many
    overturned = [tr("a second query a few seconds later with other counts: then the job moves, and nobody is stuck")]
    if (first.completed or world.size or 0) > 2 * len(first.peers) and (proven or first.name == "behind"):
        sure = "high" if proven else "low"
        return Verdict(first.peers, Cause.UNKNOWN, sure, "ras", text, uneven, overturned=overturned, work=first.work)
    return Verdict(rule="ras", reason=text, facts=uneven, suspects=first.peers, overturned=overturned)


_BEGINS_EVALUATION = re.compile(r"name='evaluation .*, beginning of try \d+'")


def by_guard(evidence: Evidence, world: World) -> Verdict | None:
    """An incident of ncclguard's own: the ranks agreed on it while they lived.

    The latest counts, because the job may have gone on after one before; and another rank's own exception may be what
    ended it.
    """
    written, found = written_incidents(evidence), guard_incidents(evidence)
    if not found:
        return None
    first = found[-1]
    if not written and {fact.rank for fact in own_exceptions(evidence)} - {None, *first.peers}:
        return None
    if incident_text.is_from_outside(first) and not first.peers and (awaited := by_inquiry(evidence, world)):
        return awaited
    cause = Cause(first.name) if first.name in {cause.value for cause in Cause} else Cause.UNKNOWN
    reason = received(first.detail) if first.detail else tr("the ranks agreed on it")
    named = set(first.peers)
    others = set(range(world.size or max(named, default=0))) - named
    if cause is Cause.EXITED and _BEGINS_EVALUATION.search(first.detail) and len(named) > len(others) > 0:
        alone = tuple(sorted(others))
        reason = joined("; ", (reason, tr("{ranks} alone called this evaluation", ranks=ranks_text(alone))))
        return Verdict((), cause, "high", "ncclguard incident", reason, [first], work=first.work, suspects=alone)
    return Verdict(
        tuple(sorted(named)), cause, "high", "ncclguard incident", reason, [first], work=first.work,
        sides=list(first.sides), suspects=incident_text.not_come(first),
    )  # fmt: skip


#: A rank that is awaited and of which nothing is said that it is at work of its own.
_ELSEWHERE = re.compile(r"(?:has not come: |没有来：)(?!it is at |它在 )|does not answer|没有应答")


def by_inquiry(evidence: Evidence, world: World) -> Verdict | None:
    """Return whom ncclguard's calls were waiting for when the job was ended from outside, by its own log."""
    notes = evidence.of(Kind.NOTE, name="not come")
    if not notes or not all(map(incident_text.is_from_outside, evidence.of(Kind.GUARD))):
        return None
    last = max(notes, key=lambda note: max(note.line, note.until))
    line = max(last.line, last.until)
    told = [note for note in notes if note.source == last.source and max(note.line, note.until) == line]
    moved = [one for one in evidence.of(Kind.ALIVE, Kind.PROGRESS) if one.source == last.source and one.line > line]
    ended = evidence.of(Kind.ENDED_BY_LAUNCHER, Kind.SCHEDULER) + list(filter(told_to_end, evidence.of(Kind.EXCEPTION)))
    ended = [one for one in ended if one.source != last.source or one.line > line]
    failed = [one for one in evidence.of(Kind.EXIT, Kind.LAUNCHER) if one.number not in (None, -2, -9, -15, 130, 143)]
    ranks = tuple(sorted({note.number for note in told if note.number is not None}))
    elsewhere = any(_ELSEWHERE.search(note.text) for note in told)
    if moved or not ended or failed or elsewhere or own_exceptions(evidence):
        return None
    reason = tr(
        "the others waited for {ranks} when the job was ended: {place}", ranks=ranks_text(ranks), place=told[0].detail
    )
    return Verdict(ranks, Cause.LATE, "high", "ncclguard inquiry", reason, [*told, ended[0]])


_SESSION = re.compile(r"incident ([0-9a-f]{8})-")


def _without_its_end(evidence: Evidence, incidents: list[Fact]) -> list[Fact]:
    """Return incidents without one that only tells how a job ended for what the one before it had told of.

    A rank that had made another call than the others is then the first to have no more of them.
    """
    before, last = incidents[-2:] if len(incidents) > 1 else (None, None)
    if before is None or last is None:
        return incidents
    call = incident_text.ENDS_CALL.split(last.detail)[0] if incident_text.is_from_outside(last) else ""
    ended = incident_text.STOOD_STILL.search(before.text) and call and call in before.text
    left = (before.name, last.name) == ("diverged", "exited") and (
        set(last.peers) == set(before.peers) or _evaluates_alone_again(before, last)
    )
    if (ended and not _stepped(evidence, before, last)) or (left and not _stepped(evidence, before, last, 3)):
        return incidents[:-1]
    return incidents


def _evaluates_alone_again(before: Fact, last: Fact) -> bool:
    """Return whether ranks that had begun an evaluation alone began the next, and the others had left by then."""
    both = all(_BEGINS_EVALUATION.search(one.detail) for one in (before, last))
    return both and set(last.peers).isdisjoint(before.peers)


def _stepped(evidence: Evidence, before: Fact, later: Fact, times: int = 1) -> bool:
    """Return whether the program has gone on between two lines of a log, by so many steps."""
    until = later.line if later.source == before.source else math.inf
    lines = [fact for fact in evidence.of(Kind.ALIVE, Kind.PROGRESS) if fact.source == before.source]
    between = [fact for fact in lines if before.line < fact.line < until]
    return len({fact.number for fact in between}) >= times


def written_incidents(evidence: Evidence) -> list[Fact]:
    """Return ncclguard's incidents from its own JSON, the latest last."""
    return sorted((f for f in evidence.of(Kind.GUARD) if f.completed is not None), key=lambda fact: fact.when or 0.0)


def guard_incidents(evidence: Evidence) -> list[Fact]:
    """Return ncclguard's incidents once each, the latest last: from its own JSON, or else what logs tell of them."""
    found: dict[str, Fact] = {}
    told = written_incidents(evidence) or evidence.of(Kind.GUARD)
    # What is told of as the same fault, which goes on, is none of its own.
    same = {_sentence(note.detail) for note in evidence.of(Kind.NOTE, name="fault goes on")}
    told = [fact for fact in told if not any(fact.detail.startswith(one) for one in same if one)] or told
    # Who interrupts a job that hangs gives each rank an exception that is no rank's fault.
    for fact in [fact for fact in told if "KeyboardInterrupt" not in fact.text] or told:
        name = _sentence(fact.detail)  # an error and a panel go on in different ways
        longer = next((known for known in found if name and (known.startswith(name) or name.startswith(known))), name)
        if len(longer) < len(name):
            found[name] = found.pop(longer).clone(detail=fact.detail)
        elif longer != name:
            name, fact = longer, fact.clone(detail=found[longer].detail)
        before = found.pop(name, fact)
        found[name] = fact if fact.advice else before  # the panel says more than the other lines
    return _without_its_end(evidence, _once_lost(evidence, found.values()))


def _sentence(text: str) -> str:
    return re.split(r"\. |。|\.$", text)[0]


def _once_lost(evidence: Evidence, incidents: Iterable[Fact]) -> list[Fact]:
    """Return the incidents, of those by which the same ranks were lost at once the one that its panel tells of.

    Whatever waits for such a rank ends with it, too.
    """
    kept: list[Fact] = []
    for fact in incidents:
        before = kept[-1] if kept else fact
        sessions = {found[1] for one in (before, fact) if (found := _SESSION.search(one.text))}
        same = kept and before.name == fact.name == "lost" and before.peers == fact.peers and len(sessions) < 2
        if not same or _stepped(evidence, before, fact):
            kept.append(fact)
        elif fact.advice and not before.advice:
            kept[-1] = fact
    return kept


def by_traces(evidence: Evidence, world: World) -> Verdict | None:
    """Flight-recorder dumps of two ranks or more."""
    if len(evidence.dumps) < 2:
        return None
    verdict = name_culprits(evidence.dumps)
    failure = by_failure(evidence, world)
    if failure is not None and failure.culprits and set(failure.culprits) <= set(verdict.culprits):
        verdict.cause = failure.cause
        verdict.facts += failure.facts
        verdict.reason = joined("; ", (verdict.reason, failure.reason))
    elif failure is not None and failure.culprits and not set(failure.culprits) & set(evidence.dumps):
        verdict.culprits = tuple(sorted({*verdict.culprits, *failure.culprits}))  # it ended before it could leave one
        verdict.suspects = tuple(rank for rank in verdict.suspects if rank not in failure.culprits)
        verdict.facts += failure.facts
        verdict.reason = joined("; ", filter(None, (verdict.reason, failure.reason)))
    return verdict if verdict.culprits or verdict.sides else None


_PARAMETERS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")


def by_parameters(evidence: Evidence, world: World) -> Verdict | None:
    """DDP's check at set-up (torch/csrc/distributed/c10d/reducer.cpp, 1.12 to 2.15): models of unequal length."""
    facts = [fact for fact in evidence.of(Kind.EXCEPTION) if _PARAMETERS.search(fact.detail)]
    told = {int(rank): int(count) for fact in facts for one in _PARAMETERS.findall(fact.detail)
            for rank, count in (one[:2], one[2:]) if int(count)}  # fmt: skip
    if len(set(told.values())) < 2:  # a model has parameters: 0 is a place of the buffer that nobody has filled
        return None
    most, many = Counter(told.values()).most_common(1)[0]
    odd = tuple(sorted(rank for rank, count in told.items() if count != most))
    size = world.size if world.size is not None and world.basis != "highest rank seen" else len(told)
    text = ", ".join(f"{rank}: {count}" for rank, count in sorted(told.items()))
    reason = tr("the ranks' models differ in their number of parameters ({counts})", counts=text)
    if many < 2 or 2 * many <= size:
        return Verdict((), Cause.DIVERGED, "low", "parameters", reason, facts, suspects=tuple(sorted(told)))
    return Verdict(odd, Cause.DIVERGED, "high", "parameters", reason, facts)


_DIFFERS = re.compile(
    r"(?i)mismatch|differ|diverge|inconsisten|not (?:the same|equal|identical)|check ?sum|\bcrc|\bhash"
)


def by_table(evidence: Evidence, world: World) -> Verdict | None:
    """A table of all ranks, the last one that was printed: all that raise say that ranks differ, and it tells which."""
    tables = sorted(evidence.of(Kind.NOTE, name="table"), key=lambda fact: (fact.source, max(fact.line, fact.until)))
    raised = own_exceptions(evidence)
    if not tables or not raised or any(not _DIFFERS.search(f"{fact.name} {fact.detail}") for fact in raised):
        return None
    last = tables[-1]
    stated = world.basis in ("given", "stated")
    if not last.peers or (stated and last.number != world.size) or len({fact.source for fact in tables}) > 1:
        return None
    reason = tr("{ranks} differ from most of the others in what was printed of all", ranks=ranks_text(last.peers))
    return Verdict(last.peers, Cause.DIVERGED, "high", "table", reason, [last, *raised[:1]])


def by_desync_report(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_NCCL_DESYNC_DEBUG: the ranks that the report calls lagging."""
    told = evidence.of(Kind.DESYNC)
    furthest = max((fact.number or 0 for fact in told), default=0)
    facts = [f for f in told if f.name == "lagging" or (f.name == "unfinished" and (f.number or 0) < furthest)]
    named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
    if not named or (world.size is not None and 2 * len(named) > world.size and world.size > 2):
        return None
    reason = tr("the desync report says {ranks} lag behind", ranks=ranks_text(named))
    if facts[0].detail:
        reason = tr("the desync report says {ranks} {what}", ranks=ranks_text(named), what=facts[0].detail)
    return Verdict(named, Cause.UNKNOWN, "high", "desync report", reason, facts)


def by_analyser(evidence: Evidence, world: World) -> Verdict | None:
    """torch's analyser of dumps prints who has not joined a collective, and who differs from the first rank in it."""
    told = [fact for fact in evidence.of(Kind.RECORDER) if fact.peers]
    absent = [fact for fact in told if fact.name == "missing"]
    if absent:  # of several collectives: a rank that is missing in all of them, others may wait elsewhere
        named = frozenset.intersection(*(frozenset(fact.peers) for fact in absent))
        # A rank without a dump is missing too; who says itself that it waits in this very call has joined.
        calls = {fact.number for fact in absent}
        first = min((number for number in calls if number is not None), default=0)
        named -= {row.rank for row in evidence.rows if row.waiting and row.seq is not None and row.seq >= first}
        if not named:
            return None
        few = all(2 * len(named) < (fact.completed or world.size or 0) for fact in absent)
        there = {row.rank for row in evidence.rows if row.waiting and row.seq in calls}
        few = few or (world.size == 2 and there == {0, 1} - named)  # the other one says it, too
        reason = tr(
            "torch's analyser of the dumps finds that {ranks} did not join", ranks=ranks_text(named or absent[0].peers)
        )
        if few:
            return Verdict(
                tuple(sorted(named)), Cause.UNKNOWN, "medium", "analyser", reason, absent, work=absent[0].work
            )
        return Verdict(rule="analyser", reason=reason, facts=absent, suspects=tuple(sorted(named)), work=absent[0].work)
    odd = [fact for fact in told if "MISMATCH" in fact.name and "STATE" not in fact.name]
    ranks = tuple(sorted({rank for fact in odd for rank in fact.peers}))
    if not ranks:
        return None
    reason = tr(
        "torch's analyser of the dumps finds a difference between {ranks} and the first rank", ranks=ranks_text(ranks)
    )
    few = all(2 * len(ranks) < (fact.completed or world.size or 0) for fact in odd)
    culprits, suspects, sure = (ranks, (), "medium") if few else ((), ranks, "low")
    return Verdict(culprits, Cause.DIVERGED, sure, "analyser", reason, odd, suspects=suspects, work=odd[0].work)


def by_lost_host(evidence: Evidence, world: World) -> Verdict | None:
    """A scheduler says that a host or a pod is gone, and the log proves which ranks were there."""
    for fact in evidence.of(Kind.SCHEDULER):
        host = fact.host.removeprefix("pod/").removeprefix("node/")
        if not host and fact.name in ("OOMKilled", "Evicted"):  # `kubectl describe` of a pod, in a file named after it
            host = evidence.ranks.host_of(fact.file)
        if not host and fact.name == "PREEMPTION" and "instance-action" in fact.text:  # its own host says so
            host = fact.where
        if not host or fact.name in ("TIME LIMIT", "JOB REQUEUE"):
            continue
        ranks = evidence.ranks.ranks_on(host, evidence.local_size)
        ended = [
            one
            for one in evidence.of(Kind.EXIT, Kind.LAUNCHER, Kind.ENDED_BY_LAUNCHER)
            if one.host and one.rank is not None
        ]
        ranks |= {
            one.rank for one in ended if one.host == host and one.rank_basis == "launcher" and one.rank is not None
        }
        elsewhere = {one.rank for one in ended if one.host != host and one.rank_basis == "launcher"}
        if (
            not ranks
            and world.size is not None
            and world.basis in ("given", "stated")
            and len(elsewhere) > world.size // 2
        ):
            ranks = set(range(world.size)) - elsewhere  # srun tells the tasks of all the other hosts
        ranks = ranks or _gap(ended)
        size = world.size
        if size is not None:  # those that were lost may be the highest ones
            size = max(size, 1 + max((rank for there in evidence.ranks.hosts.values() for rank in there), default=0))
        if ranks and (size is None or len(ranks) < size):
            named = tuple(sorted(ranks))
            reason = tr(
                "{ranks} ran on {host}: {event}", ranks=ranks_text(named), host=host, event=fact.name or fact.text
            )
            overturned = [tr("an error of another rank that came before: the host was then taken away afterwards")]
            return Verdict(named, Cause.LOST, "medium", "lost host", reason, [fact], overturned=overturned)
    return None


def _gap(ended: Sequence[Fact]) -> set[int]:
    """Return the tasks of the one host of which srun tells none, where those of all others are blocks of one length."""
    told: dict[str, set[int]] = {}
    for fact in ended:
        if fact.rank is not None and fact.rank_basis == "launcher":
            told.setdefault(fact.host, set()).add(fact.rank)
    size, blocks = blocks_of(told)
    if len(told) < 2 or any(len(tasks) != size for tasks in told.values()):
        return set()
    gap = set(range(max(blocks.values(), default=0))) - set(blocks.values())
    return {block * size + at for block in gap for at in range(size)} if len(gap) == 1 else set()


def by_stacks(evidence: Evidence, world: World) -> Verdict | None:
    """Stacks of nearly all ranks, taken while they hang: all but a few stand in a collective."""
    last: dict[int, Fact] = {}
    inside: set[int] = set()
    moved: set[int] = set()
    for fact in evidence.of(Kind.STACK):  # a rank may have one for each thread
        if fact.rank is not None and fact.frames:
            before, main = last.get(fact.rank), "MainThread" in fact.text
            if before is None or main or "MainThread" not in before.text:
                last[fact.rank] = fact
            if before is not None and main and "MainThread" in before.text and before.frames != fact.frames:
                moved.add(fact.rank)
            inside |= {fact.rank} if any(IN_COLLECTIVE.search(frame) for frame in fact.frames[-5:]) else set()
    outside = set(last) - inside
    nameless = [fact for fact in evidence.of(Kind.STACK) if fact.rank is None and "MainThread" in fact.text]
    others = len([fact for fact in nameless if any(map(IN_COLLECTIVE.search, fact.frames[-5:]))])
    # A rank that waits for its device may wait for this collective.
    devices = {rank for rank in outside if WAITS_FOR_DEVICE.search(last[rank].frames[-1])}
    outside -= devices
    # Without a limit the job may move; but who has dumped its stacks, and nothing else, asks about a hang.
    still = (Kind.STACK, Kind.NOTE, Kind.PHASE)
    done = {fact.order for fact in evidence.of(Kind.PROGRESS) if fact.number == 100}
    dumped = not moved and all(fact.kind in still or fact.order in done for fact in evidence.facts)
    there = {fact.source for fact in last.values()}
    # Somebody gave the job up; its own log tells of nothing else.
    ended = evidence.of(Kind.ENDED_BY_LAUNCHER) + evidence.of(Kind.NOTE, name="interrupted")
    keyboard = evidence.of(Kind.EXCEPTION, name="KeyboardInterrupt")
    ended += keyboard
    given_up = ended and not moved and all(
        fact.kind in still or fact in keyboard
        or (fact.source not in there and fact.kind in (Kind.PROGRESS, Kind.ALIVE, Kind.ENDED_BY_LAUNCHER))
        for fact in evidence.facts
    )  # fmt: skip
    told = evidence.of(Kind.NOTE, name="stands still") and not moved
    limits = evidence.of(*EXPIRED, Kind.ENGINE_WAIT) or dumped or given_up or told
    if (
        not limits
        or len(last) < (3 if world.size != 2 else 2)
        or len(last) < (world.size or 0) - (world.size != 2)
        or not outside
        or (
            3 * len(outside) > len(inside) + len(devices) + others
            and not (world.size == 2 and len(outside) == len(inside) == 1)
        )
        or (
            len(devices) > len(inside)
            and (len(devices) < 3 or len({last[rank].frames[:-1] or last[rank].frames for rank in devices}) > 1)
        )
    ):
        return None
    facts = [last[rank] for rank in sorted(outside)]
    reason = tr(
        "{others} stand in a collective and {ranks} elsewhere: {frame}",
        others=ranks_text(inside), ranks=ranks_text(outside), frame=facts[0].frames[-1],
    )  # fmt: skip
    overturned = [tr("a second look a few seconds later with other stacks: then the job moves, and nobody is stuck")]
    return Verdict(tuple(sorted(outside)), Cause.LATE, "medium", "stacks", reason, facts, overturned=overturned)


def by_section(evidence: Evidence, world: World) -> Verdict | None:
    """nvidia-resiliency-ext's monitors: one rank alone has not left a section of its program in time.

    Where the others did not leave theirs either, they all stand in one, and the one rank is in another or in none.
    """
    facts = [fact for fact in evidence.of(Kind.ENGINE_WAIT, name="monitor") if fact.detail and fact.rank is not None]
    sections: dict[str, set[int]] = defaultdict(set)
    for fact in facts:
        sections[fact.detail].add(fact.rank or 0)
    hosts = {(fact.rank, fact.host) for fact in facts}
    if not sections or own_exceptions(evidence) or len(hosts) > len({rank for rank, _ in hosts}):
        return None  # of several hosts with the same numbers, which are local ranks
    *others, (name, odd) = sorted(sections.items(), key=lambda item: -len(item[1]))
    size = max(world.size or 0, 1 + max(max(ranks) for ranks in sections.values()))
    if len(odd) != 1 or size < 3 or len(others) > 1 or (others and len(others[0][1] - odd) < size - 1):
        return None
    own = [fact for fact in facts if fact.rank in odd and fact.detail == name]
    reason = tr("{ranks} alone did not leave section {name} within its limit", ranks=ranks_text(odd), name=name)
    if others:
        reason = tr(
            "all ranks but {ranks} stand in section {name}: {text}",
            ranks=ranks_text(odd), name=others[0][0], text=own[0].text[:200],
        )  # fmt: skip
    return Verdict(tuple(odd), Cause.LATE, "medium", "section", reason, own)


def by_heartbeats(evidence: Evidence, world: World) -> Verdict | None:
    """nvidia-resiliency-ext's monitors: in a hang all ranks fall silent at once; one that does long before began it."""
    facts = [
        fact for fact in evidence.of(Kind.ENGINE_WAIT, name="monitor") if not fact.detail and fact.rank is not None
    ]
    last = sorted((fact.when - fact.seconds, fact.order, fact) for fact in facts
                  if fact.when is not None and fact.seconds is not None)  # fmt: skip
    sources = {fact.source for fact in facts}
    if len(last) < 3 or len(last) != len(facts) or len(sources) > 1 or len({fact.rank for fact in facts}) < len(last):
        return None
    (first, _, fact), (second, _, other) = last[:2]
    if second - first < max(60.0, (fact.seconds or 0.0) / 2) or last[-1][0] - second > (second - first) / 2:
        return None
    reason = tr(
        "{ranks} sent its last heartbeat {seconds:.0f} s before all the others stopped",
        ranks=ranks_text([fact.rank or 0]),
        seconds=second - first,
    )
    return Verdict((fact.rank or 0,), Cause.UNKNOWN, "medium", "heartbeats", reason, [fact, other])


def by_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """monitored_barrier: rank 0 names who did not come; when rank 0 itself says nothing, it is the one."""
    facts = evidence.of(Kind.BARRIER_MISSING)
    if facts:
        came = {fact.rank for fact in evidence.of(Kind.BARRIER_REACHED)}
        named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
        reason = tr("rank 0 reports that {ranks} did not reach the barrier", ranks=ranks_text(named))
        if came & set(named):  # each says it of the other: the connection between them, or both
            return Verdict(rule="monitored barrier", reason=reason, facts=facts, suspects=tuple(sorted({0, *named})))
        return Verdict(named, Cause.UNKNOWN, "high", "monitored barrier", reason, facts)
    reached = evidence.of(Kind.BARRIER_REACHED)
    asked = [fact for fact in reached if fact.rank == 0 and fact.peers]  # rank 0 asks one after the other
    if asked:
        named, reason = asked[0].peers, tr("rank 0 waited in the barrier for {ranks}", ranks=ranks_text(asked[0].peers))
        return Verdict(named, Cause.UNKNOWN, "high", "monitored barrier", reason, asked)
    zero_waits = any(fact.rank == 0 and fact.kind in WAITING for fact in evidence.facts)
    if not reached or zero_waits or 0 not in world.covered:
        return None
    who = ranks_text({fact.rank for fact in reached if fact.rank is not None})
    reason = tr("{who} reached the barrier and waited for rank 0, which printed nothing", who=who)
    return Verdict((0,), Cause.UNKNOWN, "medium", "monitored barrier", reason, reached)


def by_store_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """The store-based barrier at set-up prints who waits and how many have come."""
    facts = evidence.of(Kind.STORE_BARRIER)
    if not facts:
        return None
    size = max(fact.number or 0 for fact in facts)
    come = max(fact.completed or 0 for fact in facts)
    if come > size:
        reason = tr(
            "{count} processes have come to a barrier of {size}: the store is shared with another job, or stale",
            count=come,
            size=size,
        )
        return Verdict(rule="store barrier", reason=reason, facts=facts[:3])
    here = {fact.rank for fact in facts if fact.rank is not None}
    keys = {key for fact in facts for key in BARRIER_KEY.findall(fact.text)}
    if len(keys) == 1:  # who has entered says so, before half a minute has passed and it says that it waits
        here |= {
            fact.rank
            for fact in evidence.of(Kind.NOTE, name="entered")
            if fact.rank is not None and fact.detail in keys
        }
    missing = tuple(sorted(set(range(size)) - here)) if size <= 65_536 else ()
    reason = tr("{count} of {size} ranks came to the barrier that ends init_process_group", count=come, size=size)
    if missing and len(missing) == size - come and here:
        rest = tr("all but {ranks} wait in it", ranks=ranks_text(missing))
        reason = joined("; ", (reason, rest))
        overturned = [tr("a line of {ranks} in this barrier", ranks=ranks_text(missing))]
        return Verdict(missing, Cause.UNKNOWN, "high", "store barrier", reason, facts, overturned=overturned)
    return Verdict(rule="store barrier", reason=reason, facts=facts[:3], suspects=missing if len(missing) <= 8 else ())


def by_hccl(evidence: Evidence, world: World) -> Verdict | None:
    """Ascend's HCCL names the peer whose record did not come; the rank that prints it is a victim."""
    facts = evidence.of(Kind.TIMEOUT, name="hccl")
    victims = {fact.rank for fact in facts if fact.rank is not None}
    # A line that has the speaker's rank both in the job and in its group tells where the group begins.
    shifts = {(fact.rank or 0) - (fact.group_rank or 0) for fact in facts
              if fact.rank_basis == "prefix" and fact.group_rank is not None and fact.peers}  # fmt: skip
    if len(shifts) > 1:
        return None
    shift = shifts.pop() if shifts else 0
    told = Counter(peer + shift for fact in facts for peer in set(fact.peers))
    suspects = tuple(sorted(set(told) - victims))
    if not suspects:
        return None
    if len(suspects) == 1 and len(victims) >= 2:
        reason = tr("{ranks} wait for {others}", ranks=ranks_text(victims), others=ranks_text(suspects))
        return Verdict(suspects, Cause.UNKNOWN, "medium", "hccl", reason, facts)
    reason = tr("the rank that printed the timeout waits for {ranks}", ranks=ranks_text(suspects))
    return Verdict(rule="hccl", reason=reason, facts=facts, suspects=suspects)


def by_store_key(evidence: Evidence, world: World) -> Verdict | None:
    """The peers wait for a key that one rank sets before its first NCCL call."""
    facts = [fact for fact in evidence.of(Kind.STORE_KEY) if "imeout" in fact.detail or "timed out" in fact.detail]
    owners = {peer for fact in facts for peer in fact.peers}
    if len(owners) != 1 or any(fact.rank in owners for fact in facts):
        return None
    owner = next(iter(owners))
    who = ranks_text({fact.rank for fact in facts if fact.rank is not None})
    reason = tr("{who} waited for the NCCL id that rank {owner} sets at its first collective", who=who, owner=owner)
    return Verdict((owner,), Cause.UNKNOWN, "medium", "store key", reason, facts)
