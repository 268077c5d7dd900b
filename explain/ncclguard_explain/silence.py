"""Ranks that say nothing where all others do; only those whose log would be among the inputs."""

from __future__ import annotations

from ncclguard_explain.cause import Cause
from ncclguard_explain.connections import fabric_errors
from ncclguard_explain.divergence import is_collective, rows_by_group
from ncclguard_explain.evidence import Evidence, World
from ncclguard_explain.facts import WAITING, Kind, Verdict
from ncclguard_explain.language import tr
from ncclguard_explain.ranks import ranks_text


def _in_a_call(evidence: Evidence) -> set[int]:
    """Ranks that say by an error of their own that they were inside a collective when it was torn down."""
    facts = evidence.of(Kind.ABORTED, Kind.ASYNC_ERROR)
    facts += [fact for fact in evidence.of(Kind.EXCEPTION) if fact.name.endswith("DistBackendError")]
    return {fact.rank for fact in facts if fact.rank is not None}


def by_silence_in_group(evidence: Evidence, world: World) -> Verdict | None:
    """A rank absent from a smaller group, where the group's members can be told from the ranks that wait in it.

    A line of torch 2.3 or newer holds both the global rank and the rank inside the group; two such pairs fix an even
    spacing, and a rank inside the gap is a member.
    """
    if any(fact.hidden for fact in evidence.facts):
        return None
    for rows in rows_by_group(evidence):
        pairs = {
            fact.group_rank: row.rank
            for row in rows
            if row.waiting and row.work is not None and (is_collective(row.work.op) or row.work.op == "RECV")
            for fact in row.facts
            if fact.rank_basis == "prefix" and fact.group_rank is not None
        }
        if len(pairs) < 2 or rows[0].group is None or rows[0].group.is_default:
            continue
        (low, first), (high, last) = min(pairs.items()), max(pairs.items())
        spacing, uneven = divmod(last - first, high - low)
        if uneven or spacing < 1 or any(rank != first + (inner - low) * spacing for inner, rank in pairs.items()):
            continue
        size = next((ratio for row in rows if row.work and (ratio := row.work.ratio)), high + 1)
        members = {first + (inner - low) * spacing for inner in range(size)}
        silent = members - {row.rank for row in evidence.rows} - _in_a_call(evidence)
        received = [row for row in rows if row.work is not None and row.work.op == "RECV"]
        if received and (len(received) < len(rows) or not silent <= {min(members), max(members)} or len(pairs) < 3):
            continue  # in a pipeline each waits for its neighbour, and at last for the stage at an end
        if len(silent) == 1 and silent <= set(world.covered):
            who = ranks_text(pairs.values())
            reason = tr(
                "{who} waited in group {group}; its member {ranks} printed nothing",
                who=who,
                group=rows[0].group,
                ranks=ranks_text(silent),
            )
            facts = [fact for row in rows for fact in row.facts[:1]]
            return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts)
    return None


def by_silence(evidence: Evidence, world: World) -> Verdict | None:
    """The minority that printed nothing while the rest wait in a group of all ranks."""
    size = world.size
    if size is None or size < 2 or any(fact.hidden for fact in evidence.facts):
        return None
    waiting = {row.rank for row in evidence.rows if row.waiting and row.spans(size) and row.rank < size}
    in_one = {row.rank for row in evidence.rows if row.waiting and row.rank < size}
    if len({row.group_key for row in evidence.rows if row.waiting}) == 1 and size > 2 and len(in_one) == size - 1:
        waiting = in_one  # all but one of the job are in this group: also a pipeline, in which each waits for the next
    waits = [fact for fact in evidence.facts if fact.kind in WAITING and fact.rank in waiting]
    facts = list({fact.rank: fact for fact in reversed(waits)}.values())
    spoke = {row.rank for row in evidence.rows} | _in_a_call(evidence) | evidence.cut
    spoke |= {fact.rank for fact in evidence.of(Kind.NOTE, name="waits_elsewhere") if fact.rank is not None}
    silent = tuple(sorted(set(world.covered) - spoke))
    said = evidence.seen_ranks | set(evidence.source_ranks.values()) | {fact.rank for fact in evidence.facts}
    begun = min((fact.line for fact in facts), default=0)
    bars = [fact for fact in evidence.of(Kind.PROGRESS, Kind.ALIVE) if fact.rank is None and fact.line > begun]
    unheard: tuple[int, ...] = ()
    # One is at work, with what it was at before, and others never spoke.
    earlier = [fact for fact in evidence.of(Kind.PROGRESS, Kind.ALIVE) if fact.rank is None and fact.line <= begun]
    goes_on = any(
        all((fact.number or 0) > (one.number or 0) for one in earlier if one.name == fact.name)
        and any(one.name == fact.name for one in earlier)
        for fact in bars
    )
    if goes_on and 0 in silent and len(silent) > 1 and not said & (set(silent) - {0}):
        silent, unheard = (0,), silent[1:]
    kinds = {fact.kind for fact in facts}
    if not waiting or not silent or (kinds <= {Kind.GLOO_CLOSED} and len(waiting) + len(silent) < size):
        return None
    stopped_early = kinds <= {Kind.GLOO_CLOSED, Kind.GLOO_TIMEOUT, Kind.BARRIER_REACHED}
    heard = set(evidence.source_ranks.values()) | evidence.seen_ranks
    heard |= {0} if bars else set()  # the rank that prints for the job goes on, elsewhere than in the call
    pair = world.is_pair and len(waiting) == 1 and set(silent) <= heard
    if world.is_pair and not pair:
        reason = tr(
            "only {ranks} speaks in these inputs; that the other does not proves nothing", ranks=ranks_text(waiting)
        )
        return Verdict(rule="silence", reason=reason, suspects=silent, facts=facts)
    known = size > 3 or world.basis != "highest rank seen" or set(silent) <= heard  # two ranks tell no job's size
    few = (len(silent) == 1 and known) or 4 * len(silent) <= size
    if not pair and (len(silent) >= len(waiting) or not few or (stopped_early and len(silent) > 1)):
        reason = tr("too many ranks are silent to name one")
        return Verdict(rule="silence", reason=reason, suspects=silent, facts=facts) if len(silent) <= 8 else None
    if evidence.never_worked() and (pair or len(silent) >= len(waiting)):
        return None
    calls = {row.seq for row in evidence.rows if row.waiting and row.seq is not None}
    joined = {fact.number for fact in evidence.of(Kind.JOINED)}
    if calls and max(calls) <= 1 and set(silent) <= joined:
        reason = tr(
            "{ranks} set its channels up and printed no timeout; the first collective never worked: the transport",
            ranks=ranks_text(silent),
        )
        return Verdict(rule="first collective", cause=Cause.NETWORK, reason=reason, facts=facts)
    reason = tr(
        "{ranks} waited; {others} printed nothing of the kind", ranks=ranks_text(waiting), others=ranks_text(silent)
    )
    if fabric_errors(evidence):
        reason = tr("{reason}, but the fabric reports errors", reason=reason)
        return Verdict(rule="silence", cause=Cause.NETWORK, reason=reason, facts=facts, suspects=silent)
    torn = {source for source, _ in evidence.open_lines if source in evidence.broken_off}
    if any(source.rank is None for source in evidence.sources if source.index in torn):
        reason = tr(
            "{reason}, but the log breaks off there: its line may be among those that are missing", reason=reason
        )
        return Verdict(rule="silence", reason=reason, facts=facts, suspects=silent)
    sure = "low" if pair and world.basis == "highest rank seen" else "medium"
    overturned = [
        tr("a timeout line of {ranks} for the same collective, in a log that is not here", ranks=ranks_text(silent))
    ]
    return Verdict(silent, Cause.UNKNOWN, sure, "silence", reason, facts, suspects=unheard, overturned=overturned)
