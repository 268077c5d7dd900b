"""From inputs to a report: read, name, classify, advise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from ncclguard.explain.arithmetic import explain_numel
from ncclguard.explain.causes import Finding, classify, left_normally
from ncclguard.explain.culprits import find_culprits
from ncclguard.explain.decision import advise, decide, next_step
from ncclguard.explain.evidence import Evidence, Row, World, find_world, united
from ncclguard.explain.facts import CONSEQUENCES, WAITING, Fact, Group, Kind, Verdict, Work, ranks_text
from ncclguard.explain.model_table import ModelSizes
from ncclguard.explain.recorder import work_of
from ncclguard.explain.report import Collective, Event, Mention, RankRow, Report, Side
from ncclguard.outcome import Cause

LISTED = 200
# Facts whose seconds are the limit that ran out.
_TIMED = frozenset(
    {
        Kind.GLOO_TIMEOUT,
        Kind.STORE_TIMEOUT,
        Kind.STORE_KEY,
        Kind.STORE_BARRIER,
        Kind.BARRIER_MISSING,
        Kind.RENDEZVOUS,
        Kind.TIMEOUT,
        Kind.GUARD,
    }
)
_API = re.compile(r"distributed_c10d\.py:\d+ in (\w+)")
_NOT_COLLECTIVE = frozenset(
    {
        "wrapper",
        "init_process_group",
        "new_group",
        "_new_process_group_helper",
        "destroy_process_group",
        "_store_based_barrier",
    }
)
# What stands in the logs of healthy jobs too.
_QUIET = frozenset(
    {
        Kind.PROGRESS,
        Kind.PHASE,
        Kind.NCCL_INFO,
        Kind.NOTE,
        Kind.STACK,
        Kind.DATALOADER,
        Kind.JOINED,
        Kind.ALIVE,
        Kind.RETRIED,
    }
)


def diagnose(
    evidence: Evidence,
    world_size: int | None = None,
    model: ModelSizes | None = None,
    zero: Mapping[str, object] | None = None,
) -> Report:
    """Return the report on what was read.

    `world_size` helps where the logs do not tell; `zero` is a DeepSpeed section.
    """
    world = find_world(evidence, world_size)
    verdict = find_culprits(evidence, world)
    finding = classify(evidence, world, verdict)
    cause = refine_cause(evidence, verdict, finding)
    work, group = _collective(evidence, verdict)
    quiet = _QUIET
    if not any(fact.name == "abort_complete" for fact in evidence.of(Kind.NOTE)):
        quiet |= {Kind.PEER_CLOSED}  # NCCL's proxy prints it of every process that ends, also of one that is done
    incident = bool(
        verdict.culprits
        or verdict.sides
        or finding.facts
        or any(fact.kind not in quiet for fact in evidence.facts)
        or work
    )
    timeout = _timeout(evidence, work)
    decision = decide(evidence, world, verdict, finding, cause)
    evidence_facts, consequences = _roles(evidence, verdict, finding)
    told = {id(fact): fact for fact in [*verdict.facts, *evidence.facts] if fact.frames}
    stacks = tuple(_event(f) for f in told.values() if f.rank in verdict.culprits or f.kind is Kind.STACK)
    return Report(
        incident=incident,
        summary=_summary(verdict, cause, finding, work, group, incident),
        culprits=verdict.culprits,
        suspects=verdict.suspects,
        cause=cause,
        cause_class=finding.name,
        confidence=finding.confidence,
        culprit_confidence=verdict.confidence if verdict.culprits else "low",
        reason=verdict.reason,
        class_reason=finding.reason,
        decision=decision.action if incident else "unknown",
        decision_reason=decision.reason if incident else "no incident in these inputs",
        without=decision.without if incident else "",
        next_step=next_step(decision, verdict, finding, bool(stacks)) if incident else "",
        overturned_by=tuple(verdict.overturned),
        collective=_as_collective(work, group, timeout),
        ranks=tuple(_rank_rows(evidence, verdict, world)),
        sides=tuple(Side(what=what, ranks=ranks) for what, ranks in verdict.sides),
        evidence=tuple(_mention(fact) for fact in evidence_facts[:LISTED]),
        consequences=tuple(_mention(fact) for fact in consequences[:LISTED]),
        advice=tuple(advise(finding.name, verdict, timeout, bool(stacks))) if incident else (),
        arithmetic=tuple(explain_numel(work, model, zero)) if work else (),
        stacks=stacks[:LISTED],
        effective_timeout_ms=timeout,
        world_size=world.size,
        world_size_basis=world.basis,
        logs_cover=tuple(sorted(world.covered)),
        inputs=tuple(source.name for source in evidence.sources),
        bytes_read=evidence.bytes_read,
        notes=tuple(_notes(evidence, world, consequences)),
        events=tuple(_event(fact) for fact in evidence.facts[:5000]),
    )


def refine_cause(evidence: Evidence, verdict: Verdict, finding: Finding) -> Cause:
    """Say more than "unknown" about the culprits only where a line proves it."""
    if verdict.cause is not Cause.UNKNOWN:
        return verdict.cause
    culprits = set(verdict.culprits)
    own = [fact for fact in evidence.facts if fact.rank in culprits and fact.rank_basis != "group"]
    if culprits:
        summary = {fact.rank: fact for fact in evidence.of(Kind.LAUNCHER)}
        if left_normally(evidence, verdict):
            return Cause.EXITED
        if any(fact.kind is Kind.PHASE and fact.name == "finished" for fact in own):
            return Cause.EXITED
        if verdict.rule == "counters" and any(
            fact.kind is Kind.GLOO_CLOSED or (fact.kind is Kind.EXCEPTION and "closed by peer" in fact.detail)
            for fact in own
        ):
            return Cause.DIVERGED  # they sat in a collective of another backend
        alive = (
            finding.name
            in ("slow_rank_side_work", "checkpoint_io", "dataloader_stall", "unequal_batches", "timeout_too_short")
            and finding.confidence != "low"
        )
        if (
            alive
            or any(fact.kind is Kind.GLOO_CLOSED for fact in own)
            or all(rank in summary and summary[rank].number == -15 for rank in culprits)
        ):
            return Cause.LATE
        return Cause.UNKNOWN
    if finding.name in ("network_fabric", "network_interface", "p2p_acs_iommu"):
        return Cause.NETWORK
    if finding.name == "oom_or_crash_other_rank":
        kinds = {fact.kind for fact in finding.facts}
        return (
            Cause.FAILED
            if kinds & {Kind.EXCEPTION, Kind.CUDA, Kind.NCCL_WARN, Kind.WATCHDOG_EXCEPTION}
            else Cause.LOST
            if kinds & {Kind.KERNEL_OOM, Kind.WORKER_DIED, Kind.LAUNCHER}
            else Cause.UNKNOWN
        )
    if finding.name in ("mismatch_shape_or_op", "rank_divergence") and finding.confidence != "low":
        return Cause.DIVERGED
    return Cause.UNKNOWN


def _collective(evidence: Evidence, verdict: Verdict) -> tuple[Work | None, Group | None]:
    if verdict.work is not None:
        return verdict.work, verdict.group
    culprits = set(verdict.culprits)
    rows = [row for row in evidence.rows if row.waiting and row.work is not None]
    rows = [row for row in rows if row.rank not in culprits] or rows
    if rows:
        times: dict[tuple[object, ...], list[Row]] = {}
        for row in rows:
            assert row.work is not None
            same = next((key for key in times if _fits(key, row)), (row.group_key, *row.work.signature()))
            times.setdefault(same, []).append(row)
        best = max(
            times.values(), key=lambda same: (len(same), max((row.work.ran_ms or 0) for row in same if row.work))
        )
        group = next((row.group for row in best if row.group), None)
        work = best[0].work
        for row in best + rows:  # what all lines of the same group and sequence number say together
            if (
                row.work is not None
                and work is not None
                and row.work.seq in (None, work.seq)
                and row.work.op in (None, work.op)
            ):
                work = united(work, row.work) if row.group_key in (None, group.key if group else None) else work
        return work, group
    for fact in evidence.of(Kind.FINGERPRINT, Kind.DESYNC, Kind.RECORDER, Kind.ASYNC_ERROR):
        if (
            fact.work is not None
            and fact.work.op is not None
            and (fact.rank not in culprits or len(culprits) > 1)
            and fact.name != "absent"
        ):
            work = fact.work if fact.work.seq is not None or fact.number is None else Work(fact.work.op, fact.number)
            return work, fact.group
    return _called(evidence, culprits), None


def _fits(key: tuple[object, ...], row: Row) -> bool:
    """Whether a poorer line (cut, or of a version that prints less) speaks of the same collective."""
    work = row.work
    return (
        work is not None
        and (row.group_key in (None, key[0]))
        and work.seq == key[1]
        and (work.op is None or (work.op == key[2] and work.numel_in is None))
    )


def _called(evidence: Evidence, culprits: set[int]) -> Work | None:
    """The collective in the tracebacks of ranks that failed because of their peers (gloo prints no work)."""
    names: Counter[str] = Counter()
    for fact in evidence.of(Kind.EXCEPTION, Kind.STACK):
        if fact.rank in culprits and len(culprits) < 2:
            continue
        found = [
            name for frame in fact.frames if (place := _API.search(frame)) and (name := place[1]) not in _NOT_COLLECTIVE
        ]
        if found:
            names[found[0]] += 1
    return Work(names.most_common(1)[0][0]) if names else None


def _timeout(evidence: Evidence, work: Work | None) -> int | None:
    if work is not None and work.timeout_ms is not None:
        return work.timeout_ms
    for fact in evidence.facts:
        if fact.kind in _TIMED and fact.seconds is not None and fact.seconds < 1e9:
            return round(fact.seconds * 1000)
    return next(
        (fact.work.timeout_ms for fact in evidence.facts if fact.work is not None and fact.work.timeout_ms is not None),
        None,
    )


def _as_collective(work: Work | None, group: Group | None, timeout: int | None) -> Collective | None:
    if work is None:
        return None
    return Collective(
        op=work.op,
        seq=work.seq,
        numel_in=work.numel_in,
        numel_out=work.numel_out,
        group=str(group) if group else None,
        timeout_ms=work.timeout_ms if work.timeout_ms is not None else timeout,
        shape=work.shape,
        dtype=work.dtype,
    )


def _rank_rows(evidence: Evidence, verdict: Verdict, world: World) -> list[RankRow]:
    named = {"failure": "failed", "flight recorder": "behind"}.get(verdict.rule, "missing")
    if "divergence" in verdict.rule or "fingerprints" in verdict.rule:
        named = "behind" if verdict.rule.endswith("behind") else "different"
    if verdict.rule == "counters":
        named = "behind"
    rows: list[RankRow] = []
    listed: set[int] = set()
    for row in evidence.rows:
        state = named if row.rank in verdict.culprits else "waiting" if row.waiting else "unknown"
        work = row.work or Work(None)
        rows.append(
            RankRow(
                rank=row.rank,
                state=state,
                group=str(row.group) if row.group else None,
                seq=work.seq,
                op=work.op,
                numel_in=work.numel_in,
                numel_out=work.numel_out,
                shape=work.shape,
                dtype=work.dtype,
                enqueued=row.enqueued,
                started=row.started,
                completed=row.completed,
                timeout_ms=work.timeout_ms,
                ran_ms=work.ran_ms,
            )
        )
        listed.add(row.rank)
    for fact in evidence.of(Kind.FINGERPRINT):
        if fact.rank is not None and fact.work is not None and fact.rank not in listed:
            listed.add(fact.rank)
            state = "missing" if fact.name == "absent" else named if fact.rank in verdict.culprits else "waiting"
            rows.append(
                RankRow(
                    rank=fact.rank,
                    state=state,
                    seq=fact.work.seq,
                    op=fact.work.op,
                    shape=fact.work.shape,
                    dtype=fact.work.dtype,
                )
            )
    for rank, dump in sorted(evidence.dumps.items()):
        pending = [entry for entry in dump.entries if entry.pending and not entry.p2p]
        if rank not in listed:
            listed.add(rank)
            first = min(pending, key=lambda entry: entry.created_ns, default=None)
            state = named if rank in verdict.culprits else "waiting" if pending else "unknown"
            work = work_of(first) if first else Work(None)
            rows.append(
                RankRow(
                    rank=rank,
                    state=state,
                    group=first.group if first else None,
                    seq=work.seq,
                    op=work.op,
                    numel_in=work.numel_in,
                    numel_out=work.numel_out,
                    timeout_ms=work.timeout_ms,
                )
            )
    for rank in sorted((set(range(world.size or 0)) | set(verdict.culprits)) - listed):
        rows.append(RankRow(rank=rank, state=named if rank in verdict.culprits else "unknown"))
    return sorted(rows, key=lambda row: (row.rank, row.group or ""))


def _roles(evidence: Evidence, verdict: Verdict, finding: Finding) -> tuple[list[Fact], list[Fact]]:
    """Return the lines that the answer rests on and those that follow from the incident, both in time order."""
    basis: dict[int, Fact] = {id(fact): fact for fact in verdict.facts + finding.facts}
    consequences = [
        fact
        for fact in evidence.facts
        if id(fact) not in basis
        and (
            fact.kind in CONSEQUENCES | WAITING
            or fact.kind in (Kind.EXCEPTION, Kind.DUMP_RECEIVED, Kind.EXIT, Kind.WATCHDOG_EXCEPTION, Kind.NCCL_WARN)
        )
    ]
    return _in_time(list(basis.values())), _in_time(consequences)


def _in_time(facts: list[Fact]) -> list[Fact]:
    """Sort by printed time where all lines have one, else by reading order."""
    if all(fact.when is not None for fact in facts):
        return sorted(facts, key=lambda fact: (fact.when or 0.0, fact.order))
    return sorted(facts, key=lambda fact: fact.order)


def _summary(
    verdict: Verdict, cause: Cause, finding: Finding, work: Work | None, group: Group | None, incident: bool
) -> str:
    if not incident:
        return "No incident found in these inputs."
    where = (
        f"{work.op or 'a collective'}{f' #{work.seq}' if work.seq is not None else ''}"
        f"{f' of group {group}' if group else ''}"
        if work
        else "a collective"
    )
    who = (
        f"{ranks_text(verdict.culprits)} held up {where}"
        if verdict.culprits
        else f"Stuck in {where}; nobody can be named from these inputs"
    )
    who = who[0].upper() + who[1:]
    return f"{who}. Cause: {cause.value}; class {finding.name} ({finding.confidence} confidence): {finding.reason}."


def _notes(evidence: Evidence, world: World, consequences: list[Fact]) -> list[str]:
    notes = list(evidence.notes)
    if world.basis == "highest rank seen":
        notes.append(
            f"the world's size is not stated; {world.size} is the highest rank seen plus one (--world-size N "
            f"settles it)"
        )
        waiting = {row.rank for row in evidence.rows if row.waiting}
        if world.size is not None and waiting == set(range(world.size)) and (world.size + 1) % 4 == 0:
            notes.append(
                f"every rank seen waits; if the job has {world.size + 1} ranks, rank {world.size} is the one missing"
            )
    if any(row.basis == "group" for row in evidence.rows):
        notes.append("some lines carry only the rank inside the group; it is taken for the global rank")
    if any(fact.hidden for fact in evidence.facts):
        notes.append(
            "Ray folded lines of several ranks into one ([repeated Nx across cluster]); silence proves nothing here"
        )
    if len(consequences) > LISTED:
        notes.append(f"{len(consequences) - LISTED} more consequences are left out")
    return notes


def _mention(fact: Fact) -> Mention:
    return Mention(
        file=fact.file, line=fact.line, text=fact.text[:400], kind=fact.kind.value, rank=fact.rank, count=fact.repeated
    )


def _event(fact: Fact) -> Event:
    work = fact.work or Work(None)
    return Event(
        kind=fact.kind.value,
        file=fact.file,
        line=fact.line,
        rank=fact.rank,
        group_rank=fact.group_rank,
        group=str(fact.group) if fact.group else None,
        op=work.op,
        seq=work.seq if work.seq is not None else fact.number if fact.kind is Kind.STATUS else None,
        numel_in=work.numel_in,
        numel_out=work.numel_out,
        shape=work.shape,
        dtype=work.dtype,
        timeout_ms=work.timeout_ms,
        ran_ms=work.ran_ms,
        enqueued=fact.enqueued,
        started=fact.started,
        completed=fact.completed,
        number=fact.number,
        seconds=fact.seconds,
        peers=fact.peers,
        name=fact.name,
        detail=fact.detail,
        frames=fact.frames,
        count=fact.repeated,
        hidden=fact.hidden,
    )
