"""Name the ranks that held the others up, by rules in the order of how much they prove; an empty answer is an answer.

The rank that prints a timeout is a victim. Every rule here looks for the rank that is absent from, behind, ahead of or
different from what the victims wait in; silence counts last, and only for ranks whose log would be among the inputs.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ncclguard.explain.collect import Evidence, Row
from ncclguard.explain.facts import WAITING, Fact, Kind, Work
from ncclguard.explain.failures import by_failure
from ncclguard.explain.trace_rules import name_culprits
from ncclguard.explain.verdict import Verdict, ranks_text
from ncclguard.explain.world import World, is_world_group, ratio_of
from ncclguard.outcome import Cause

Rule = Callable[[Evidence, World], "Verdict | None"]


def _side_text(work: Work) -> str:
    shape = f" {list(work.shape)}" if work.shape is not None else ""
    numel = f" NumelIn={work.numel_in} NumelOut={work.numel_out}" if work.numel_in is not None else ""
    dtype = f" {work.dtype}" if work.dtype else ""
    return f"#{work.seq if work.seq is not None else '?'} {work.op or '?'}{shape}{numel}{dtype}"


def by_traces(evidence: Evidence, world: World) -> Verdict | None:
    """Flight-recorder dumps of two ranks or more."""
    if len(evidence.dumps) < 2:
        return None
    verdict = name_culprits(evidence.dumps)
    failure = by_failure(evidence, world)
    if failure is not None and failure.culprits and set(failure.culprits) <= set(verdict.culprits):
        verdict.cause = failure.cause
        verdict.facts += failure.facts
        verdict.reason += f"; {failure.reason}"
    return verdict if verdict.culprits or verdict.sides else None


def by_fingerprint(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: fingerprints of the ranks, the majority is right; a zeroed one is an absent
    peer.
    """
    facts = evidence.of(Kind.FINGERPRINT)
    prints: dict[int, Work] = {}
    absent: set[int] = set()
    known: dict[int, Fact] = {}
    for fact in facts:
        if fact.rank is None or fact.work is None:
            continue
        if fact.name == "absent":
            absent.add(fact.rank)
        elif fact.rank not in prints or fact.name == "own":
            prints[fact.rank] = fact.work
        known.setdefault(fact.rank, fact)
    absent -= set(prints)
    if absent:
        reason = f"{ranks_text(absent)} sent an empty fingerprint: absent from the check, not in a REDUCE"
        return Verdict(
            tuple(sorted(absent)),
            Cause.UNKNOWN,
            "high",
            "empty fingerprint",
            reason,
            [known[rank] for rank in sorted(absent)],
        )
    if len(prints) < 2:
        return None
    sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, work in prints.items():
        sides[(work.seq, work.op, work.shape, work.dtype)].add(rank)
    told = {key: set(ranks) for key, ranks in sides.items()}
    for own, peer in itertools.pairwise(facts):
        # A rank compares itself with rank 0, 1, 2, ... and stops at the first that differs: those before it agree.
        if (
            own.name == "own"
            and peer.name == "peer"
            and own.line == peer.line
            and own.file == peer.file
            and own.work
            and own.rank is not None
        ):
            key = (own.work.seq, own.work.op, own.work.shape, own.work.dtype)
            told.setdefault(key, set()).update(r for r in range(peer.rank or 0) if r not in prints)
    verdict = _by_majority(told, {key: min(ranks) for key, ranks in sides.items()}, prints, world, len(prints))
    verdict.facts = list(known.values())
    verdict.rule = "collective fingerprints"
    return verdict


def _by_majority(
    told: dict[tuple[object, ...], set[int]],
    first: dict[tuple[object, ...], int],
    works: dict[int, Work],
    world: World,
    known: int,
) -> Verdict:
    ordered = sorted(told.items(), key=lambda item: (-len(item[1]), min(item[1], default=0)))
    sides = [(_side_text(works[first[key]]), tuple(sorted(ranks))) for key, ranks in ordered if key in first]
    if len(ordered) < 2:
        return Verdict(cause=Cause.UNKNOWN, sides=sides, reason="all fingerprints agree")
    total = sum(len(ranks) for _, ranks in ordered)
    majority = ordered[0][1]
    if len(majority) >= 2 and 2 * len(majority) > total:
        odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        reason = f"{ranks_text(odd)} in another collective than the majority ({ranks_text(majority)})"
        return Verdict(odd, Cause.DIVERGED, "high" if total >= 3 else "medium", "majority", reason, sides=sides)
    if total == 2 and world.is_pair:
        reason = "the two ranks are in different collectives; which of them is right cannot be told from the logs"
        return Verdict(tuple(sorted(works)), Cause.DIVERGED, "medium", "pair", reason, sides=sides)
    reason = "ranks are in different collectives and no side has a majority"
    return Verdict((), Cause.DIVERGED, "low", "no majority", reason, suspects=tuple(sorted(works)), sides=sides)


def by_desync_report(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_NCCL_DESYNC_DEBUG: the ranks that the report calls lagging."""
    facts = [fact for fact in evidence.of(Kind.DESYNC) if fact.name == "lagging"]
    named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
    if not named or (world.size is not None and 2 * len(named) > world.size and world.size > 2):
        return None
    what = facts[0].detail or "lag behind"
    return Verdict(
        named, Cause.UNKNOWN, "high", "desync report", f"the desync report says {ranks_text(named)} {what}", facts
    )


def by_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """monitored_barrier: rank 0 names who did not come; when rank 0 itself says nothing, it is the one."""
    facts = evidence.of(Kind.BARRIER_MISSING)
    if facts:
        named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
        return Verdict(
            named,
            Cause.UNKNOWN,
            "high",
            "monitored barrier",
            f"rank 0 reports that {ranks_text(named)} did not reach the barrier",
            facts,
        )
    reached = evidence.of(Kind.BARRIER_REACHED)
    waiting = {fact.rank for fact in reached}
    if (
        reached
        and 0 not in waiting
        and 0 in world.covered
        and not any(f.rank == 0 and f.kind in WAITING for f in evidence.facts)
    ):
        who = ranks_text({rank for rank in waiting if rank is not None})
        reason = f"{who} reached the barrier and waited for rank 0, which printed nothing"
        return Verdict((0,), Cause.UNKNOWN, "medium", "monitored barrier", reason, reached)
    return None


def _is_collective(op: str | None) -> bool:
    """Whether all ranks of a group take part; a pipeline's sends and receives differ by design."""
    return op is not None and op.upper() not in ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")


def _stuck_at(rows: Sequence[Row]) -> int | None:
    seqs = Counter(row.seq for row in rows if row.waiting and row.seq is not None)
    if not seqs:
        return None
    count = max(seqs.values())
    return min(seq for seq, times in seqs.items() if times == count)


def _by_group(evidence: Evidence) -> list[list[Row]]:
    groups: dict[str | None, list[Row]] = defaultdict(list)
    default = next((row.group_key for row in evidence.rows if row.group and row.group.is_default), None)
    for row in evidence.rows:
        groups[row.group_key if row.group else default].append(row)
    return sorted(groups.values(), key=lambda rows: -len([row for row in rows if row.waiting]))


def by_counters(evidence: Evidence, world: World) -> Verdict | None:
    """A rank whose last enqueued work is before the one that others wait in never called it, or is stuck inside the
    call.
    """
    for rows in _by_group(evidence):
        at = _stuck_at(rows)
        waiting = [row for row in rows if row.waiting]
        if at is None or not waiting:
            continue
        short = [row for row in rows if not row.waiting and row.enqueued is not None and 0 <= row.enqueued < at]
        short += [row for row in rows if row.enqueued == -1 and not row.waiting]
        if short and (len(short) <= len(waiting) or world.size == 2):
            ranks = tuple(sorted({row.rank for row in short}))
            reason = (
                f"{ranks_text(ranks)} last enqueued work {short[0].enqueued}, while "
                f"{ranks_text([row.rank for row in waiting])} "
                f"wait in {at}: not called there, or stuck inside the call (only a stack can tell)"
            )
            return Verdict(
                ranks, Cause.UNKNOWN, "high", "counters", reason, [fact for row in short for fact in row.facts]
            )
    return None


def by_divergence(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that wait in one group at another sequence number, operation or size than the majority."""
    for rows in _by_group(evidence):
        waiting = {
            row.rank: row for row in rows if row.waiting and row.work is not None and _is_collective(row.work.op)
        }
        works = {rank: row.work for rank, row in waiting.items() if row.work is not None}
        sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
        for rank, work in works.items():
            sides[work.signature()].add(rank)
        if len(sides) < 2:
            continue
        first = {key: min(ranks) for key, ranks in sides.items()}
        verdict = _by_majority(sides, first, works, world, len(works))
        seqs = {rank: work.seq for rank, work in works.items() if work.seq is not None}
        if not verdict.culprits or verdict.rule == "pair":
            low = min(seqs.values(), default=0)
            if len(works) == 2 and world.is_pair and len(set(seqs.values())) == 2:
                rank = min(seqs, key=lambda r: seqs[r])
                verdict = Verdict(
                    (rank,),
                    Cause.DIVERGED,
                    "medium",
                    "behind",
                    f"rank {rank} waits in {low}, its peer is already past it",
                    sides=verdict.sides,
                )
        verdict.rule = f"divergence: {verdict.rule}"
        verdict.facts = [fact for row in waiting.values() for fact in row.facts[:1]]
        return verdict
    return None


def by_store_key(evidence: Evidence, world: World) -> Verdict | None:
    """The peers wait for a key that one rank sets before its first NCCL call."""
    facts = [fact for fact in evidence.of(Kind.STORE_KEY) if "imeout" in fact.detail or "timed out" in fact.detail]
    owners = {peer for fact in facts for peer in fact.peers}
    if len(owners) != 1 or any(fact.rank in owners for fact in facts):
        return None
    owner = next(iter(owners))
    who = ranks_text({fact.rank for fact in facts if fact.rank is not None})
    reason = f"{who} waited for the NCCL id that rank {owner} sets at its first collective"
    return Verdict((owner,), Cause.UNKNOWN, "medium", "store key", reason, facts)


def _in_a_call(evidence: Evidence) -> set[int]:
    """Ranks that say by an error of their own that they were inside a collective when it was torn down."""
    facts = evidence.of(Kind.ABORTED, Kind.ASYNC_ERROR)
    facts += [f for f in evidence.of(Kind.EXCEPTION) if f.name.endswith("DistBackendError")]
    return {fact.rank for fact in facts if fact.rank is not None}


def by_silence_in_group(evidence: Evidence, world: World) -> Verdict | None:
    """A rank absent from a smaller group, where the group's members can be told from the ranks that wait in it.

    A line of torch 2.3 or newer holds both the global rank and the rank inside the group; two such pairs fix an even
    spacing, and a rank inside the gap is a member.
    """
    if any(fact.hidden for fact in evidence.facts):
        return None
    for rows in _by_group(evidence):
        pairs = {
            fact.group_rank: row.rank
            for row in rows
            if row.waiting and row.work is not None and _is_collective(row.work.op)
            for fact in row.facts
            if fact.rank_basis == "prefix" and fact.group_rank is not None
        }
        if len(pairs) < 2 or rows[0].group is None or rows[0].group.is_default:
            continue
        (low, first), (high, last) = min(pairs.items()), max(pairs.items())
        spacing, uneven = divmod(last - first, high - low)
        if uneven or spacing < 1 or any(rank != first + (inner - low) * spacing for inner, rank in pairs.items()):
            continue
        size = next((ratio for row in rows if (ratio := ratio_of(row))), high + 1)
        members = {first + (inner - low) * spacing for inner in range(size)}
        silent = members - {row.rank for row in evidence.rows} - _in_a_call(evidence)
        if len(silent) == 1 and len(pairs) > 1 and silent <= set(world.covered):
            who = ranks_text(set(pairs.values()))
            reason = f"{who} wait in group {rows[0].group}; its member {ranks_text(silent)} printed nothing"
            facts = [fact for row in rows for fact in row.facts[:1]]
            return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts)
    return None


def by_silence(evidence: Evidence, world: World) -> Verdict | None:
    """The minority that printed nothing while the rest wait in a group of all ranks."""
    if world.size is None or world.size < 2:
        return None
    waiting = {
        row.rank for row in evidence.rows if row.waiting and is_world_group(row, world.size) and row.rank < world.size
    }
    waits = [fact for fact in evidence.facts if fact.kind in WAITING and fact.rank in waiting]
    facts = list({fact.rank: fact for fact in reversed(waits)}.values())
    if not waiting or any(fact.hidden for fact in evidence.facts):
        return None
    spoke = {row.rank for row in evidence.rows} | _in_a_call(evidence)
    silent = tuple(sorted(set(world.covered) - spoke))
    if not silent:
        return None
    broken = all(fact.kind is Kind.GLOO_CLOSED for fact in facts)
    stopped_early = all(fact.kind in (Kind.GLOO_CLOSED, Kind.GLOO_TIMEOUT, Kind.BARRIER_REACHED) for fact in facts)
    pair = world.is_pair and len(waiting) == 1
    if broken and len(waiting) + len(silent) < world.size:
        return None
    few = len(silent) == 1 or 4 * len(silent) <= world.size
    if not pair and (len(silent) >= len(waiting) or not few or (stopped_early and len(silent) > 1)):
        return (
            Verdict(rule="silence", reason="too many ranks are silent to name one", suspects=silent, facts=facts)
            if len(silent) <= 8
            else None
        )
    if _never_worked(evidence) and (pair or len(silent) >= len(waiting)):
        return None
    reason = f"{ranks_text(waiting)} wait; {ranks_text(silent)} printed nothing of the kind"
    return Verdict(
        silent,
        Cause.UNKNOWN,
        "low" if pair and world.basis == "highest rank seen" else "medium",
        "silence",
        reason,
        facts,
    )


def _never_worked(evidence: Evidence) -> bool:
    """Whether the stuck collective is the group's first and nothing ever completed: the transport is the suspect."""
    rows = [row for row in evidence.rows if row.waiting and row.seq is not None]
    return bool(rows) and all(
        (row.seq or 0) <= 2 and (row.completed is not None and row.completed <= 0) for row in rows
    )


RULES: tuple[tuple[str, Rule], ...] = (
    ("traces", by_traces),
    ("failure", by_failure),
    ("fingerprint", by_fingerprint),
    ("desync", by_desync_report),
    ("barrier", by_barrier),
    ("counters", by_counters),
    ("store key", by_store_key),
)


def find_culprits(evidence: Evidence, world: World) -> Verdict:
    """Return the first verdict that names somebody, else the most telling one that does not."""
    fallback: list[Verdict] = []
    for _, rule in RULES:
        verdict = rule(evidence, world)
        if verdict is not None and verdict.culprits:
            return verdict
        if verdict is not None:
            fallback.append(verdict)
    divergence, silence = by_divergence(evidence, world), by_silence(evidence, world)
    for verdict in (divergence, silence, by_silence_in_group(evidence, world)):
        if verdict is not None and verdict.culprits:
            if divergence is not None and not verdict.sides:
                verdict.sides = divergence.sides
            return verdict
        if verdict is not None:
            fallback.append(verdict)
    return fallback[0] if fallback else Verdict()
