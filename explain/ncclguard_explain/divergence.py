"""Ranks that are elsewhere than the others: in another collective, behind or ahead by its counters, alone in a call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from ncclguard_explain.cause import ROOTED, Cause
from ncclguard_explain.evidence import Evidence, Row, World, collectives_in
from ncclguard_explain.facts import Fact, Kind, Verdict, Work, united
from ncclguard_explain.failures import named_ranks
from ncclguard_explain.language import Message, tr
from ncclguard_explain.ranks import ranks_text


def _side_text(work: Work) -> str:
    shape = f" {list(work.shape)}" if work.shape is not None else ""
    numel = f" NumelIn={work.numel_in} NumelOut={work.numel_out}" if work.numel_in is not None else ""
    dtype = f" {work.dtype}" if work.dtype else ""
    return f"#{work.seq if work.seq is not None else '?'} {work.op or '?'}{shape}{numel}{dtype}"


def _by_majority(
    told: Mapping[tuple[object, ...], set[int]], works: dict[int, Work], world: World, of_all: bool = True
) -> Verdict:
    """Say who is in the minority; `told` is what a collective is told by -> its ranks, `works` those that said it."""
    ordered = sorted(told.items(), key=lambda item: (-len(item[1]), min(item[1], default=0)))
    first = {key: min(ranks & set(works), default=None) for key, ranks in ordered}
    sides = [
        (_side_text(works[one]), tuple(sorted(ranks))) for key, ranks in ordered if (one := first[key]) is not None
    ]
    if len(ordered) < 2:
        return Verdict(cause=Cause.UNKNOWN, sides=sides, reason=tr("all fingerprints agree"))
    total = sum(len(ranks) for _, ranks in ordered)
    majority = ordered[0][1]
    size = world.size if of_all and world.size is not None and world.basis != "highest rank seen" else total
    enough = len(majority) >= 3 or 2 * len(majority) > size  # two against one are few when most ranks have not spoken
    if len(majority) >= 2 and 2 * len(majority) > total and enough:
        odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        reason = tr(
            "{ranks} in another collective than the majority ({others})",
            ranks=ranks_text(odd),
            others=ranks_text(majority),
        )
        overturned = [
            tr("the call sites: the majority may have skipped a call that only {ranks} made", ranks=ranks_text(odd))
        ]
        return Verdict(odd, Cause.DIVERGED, "high", "majority", reason, sides=sides, overturned=overturned)
    both = tuple(sorted(works))
    if total == 2 and world.is_pair:
        reason = tr("the two ranks are in different collectives; which one strayed is not shown")
        overturned = [tr("the call sites of both: they say which of the two left the common path")]
        return Verdict(both, Cause.DIVERGED, "medium", "pair", reason, sides=sides, overturned=overturned)
    reason = tr("ranks are in different collectives and no side has a majority")
    return Verdict((), Cause.DIVERGED, "low", "no majority", reason, suspects=both, sides=sides)


def by_fingerprint(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: the majority of the fingerprints is right; a zeroed one is an absent peer."""
    facts = [fact for fact in evidence.of(Kind.FINGERPRINT) if fact.rank is not None and fact.work is not None]
    prints: dict[int, Work] = {}
    known: dict[int, Fact] = {}
    for fact in facts:
        assert fact.rank is not None and fact.work is not None
        if fact.name == "hccl":
            reason = tr(
                "{ranks} differ in an argument: {what}",
                ranks=ranks_text(f.rank for f in facts if f.rank is not None),
                what=fact.detail,
            )
            return Verdict(
                (), Cause.DIVERGED, "medium", "fingerprint", reason, facts, suspects=named_ranks(facts), work=fact.work
            )
        if fact.name != "absent" and (fact.rank not in prints or fact.name == "own"):
            prints[fact.rank] = fact.work
        known.setdefault(fact.rank, fact)
    absent = tuple(sorted({f.rank for f in facts if f.rank is not None and f.name == "absent"} - set(prints)))
    if absent:
        reason = tr(
            "{ranks} sent an empty fingerprint: absent from the check, not in a REDUCE", ranks=ranks_text(absent)
        )
        return Verdict(absent, Cause.UNKNOWN, "high", "empty fingerprint", reason, [known[rank] for rank in absent])
    if len(prints) < 2:
        return None
    told: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, work in prints.items():
        told[work.seq, work.op, work.shape, work.dtype].add(rank)
    sent = evidence.of(Kind.FINGERPRINT)
    for own, peer in zip(sent, sent[1:]):
        # A rank compares itself with rank 0, 1, 2, ... and stops at the first that differs: those before it agree.
        together = (own.name, peer.name) == ("own", "peer") and (own.line, own.file) == (peer.line, peer.file)
        if together and own.work and own.rank is not None:
            agree = {rank for rank in range(peer.rank or 0) if rank not in prints and rank in evidence.seen_ranks}
            told[own.work.seq, own.work.op, own.work.shape, own.work.dtype] |= agree
    verdict = _by_majority(told, prints, world)
    verdict.facts = list(known.values())
    verdict.rule = "collective fingerprints"
    return verdict


def is_collective(op: str | None) -> bool:
    """Return whether all ranks of a group take part; a pipeline's sends and receives differ by design."""
    return op is not None and op.upper() not in ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")


def rows_by_group(evidence: Evidence) -> list[list[Row]]:
    groups: dict[str | None, list[Row]] = defaultdict(list)
    default = next((row.group_key for row in evidence.rows if row.group and row.group.is_default), None)
    for row in evidence.rows:
        groups[row.group_key if row.group else default].append(row)
    return sorted(groups.values(), key=lambda rows: -len([row for row in rows if row.waiting]))


def _last_snapshot(evidence: Evidence, at: int) -> list[Fact]:
    """Return what a driver says of all ranks in the last step, if most of those that it lists have come to `at`."""
    told = evidence.of(Kind.NOTE, name="snapshot")
    last = max((fact.number or 0 for fact in told), default=0)
    found = [fact for fact in told if fact.number == last]
    return found if 2 * len([fact for fact in found if fact.enqueued == at]) > len(found) > 2 else []


def by_counters(evidence: Evidence, world: World) -> Verdict | None:
    """A rank whose last enqueued work is before the one that others wait in never called it, or is stuck inside."""
    for rows in rows_by_group(evidence):
        waiting = [row for row in rows if row.waiting]
        seqs = Counter(row.seq for row in waiting if row.seq is not None)
        if not seqs:
            continue
        at = min(seq for seq, times in seqs.items() if times == max(seqs.values()))
        short = [row for row in rows if not row.waiting and row.enqueued is not None and 0 <= row.enqueued < at]
        short += [row for row in rows if row.enqueued == -1 and not row.waiting]
        # What a rank was in when its peers' limit ran out; it may have come, and waited elsewhere, after that.
        settled = {row.rank for row in waiting if row.seq == at} | {row.rank for row in short}
        short += [
            Row(fact.rank, fact.group, enqueued=fact.enqueued, completed=fact.completed, facts=[fact])
            for fact in evidence.of(Kind.DUMP_RECEIVED) + _last_snapshot(evidence, at)
            if fact.rank is not None and fact.rank not in settled
            and fact.enqueued is not None and 0 <= fact.enqueued < at and rows[0].in_group(fact.group)
        ]  # fmt: skip
        if (alone := _in_one_more(rows, waiting, short, at)) is not None:
            return alone
        if short and (len(short) <= len(waiting) or world.size == 2):
            ranks = tuple(sorted({row.rank for row in short}))
            reason = tr(
                "{ranks} last enqueued work {enqueued}, while {others} wait in {at}: not called there, or stuck "
                "inside the call (only a stack can tell)",
                ranks=ranks_text(ranks),
                enqueued=short[0].enqueued,
                others=ranks_text(r.rank for r in waiting),
                at=at,
            )
            facts = [fact for row in short for fact in row.facts]
            return Verdict(ranks, Cause.UNKNOWN, "high", "counters", reason, facts)
    return None


def _in_one_more(rows: list[Row], waiting: list[Row], short: list[Row], at: int) -> Verdict | None:
    """One rank alone waits in a call; three others or more have ended all before it, and wait in none."""
    others = {row.rank for row in short if row.enqueued == row.completed == at - 1}
    if len(waiting) != 1 or len(others) < 3 or others != {row.rank for row in short} or not waiting[0].spans(None):
        return None
    rank = waiting[0].rank
    reason = tr(
        "rank {rank} waits alone in {where}; the logs of {others} end without a collective",
        rank=rank, where=f"#{at}", others=ranks_text(others),
    )  # fmt: skip
    overturned = [tr("a line of another rank in the same collective")]
    facts = [fact for row in waiting for fact in row.facts[:1]]
    return Verdict(
        (rank,),
        Cause.DIVERGED,
        "medium",
        "alone",
        reason,
        facts,
        overturned=overturned,
        work=waiting[0].work,
        group=waiting[0].group,
    )


def _enriched(works: dict[int, Work]) -> dict[int, Work]:
    """Return the collectives with what others say about the same one: a cut line does not differ from a whole one."""

    def bare(work: Work) -> bool:
        return work.numel_in is None and work.shape is None

    whole = [work for work in works.values() if work.op is not None and not bare(work)]
    more: dict[tuple[object, object], Work | None] = {}  # what others say, by what a cut line says
    found = {}
    for rank, work in works.items():
        found[rank] = work
        if not bare(work):
            continue
        key = work.seq, work.op
        if key not in more:
            same = [one for one in whole if work.seq in (None, one.seq) and work.op in (None, one.op)]
            more[key] = same[0] if len({one.signature() for one in same}) == 1 else None
        if more[key] is not None:
            found[rank] = united(work, more[key]) or work
    told = {work.seq for work in found.values() if work.op is not None}
    return {r: work for r, work in found.items() if work.op is not None or work.seq not in {None, *told}}


def by_divergence(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that wait in one group at another sequence number, operation or size than the majority."""
    for rows in rows_by_group(evidence):
        waiting = {
            row.rank: row
            for row in rows
            if row.waiting and row.work is not None and (row.work.op is None or is_collective(row.work.op))
        }
        works = _enriched({rank: row.work for rank, row in waiting.items() if row.work is not None})
        sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
        for rank, work in works.items():
            sides[work.signature()].add(rank)
        if len(sides) < 2:
            continue
        verdict = _by_majority(sides, works, world, next(iter(waiting.values())).spans(world.size))
        verdict = _ahead_by_one(verdict, works)
        if (
            verdict.rule == "pair" and len({work.seq for work in works.values()}) > 1
        ):  # one of them skipped, or added, a call
            verdict.culprits, verdict.suspects, verdict.confidence = (), verdict.culprits, "low"
        if verdict.culprits and all(work.seq is None for work in works.values()):
            verdict.confidence = "medium"  # by their tracebacks: which call it was of each is not known
            if ROOTED & {work.op for rank, work in works.items() if rank not in verdict.culprits}:
                verdict.culprits, verdict.suspects, verdict.confidence = (), verdict.culprits, "low"
                verdict.reason = tr("one of these calls ends on some ranks before the others have done their part")
        verdict.rule = f"divergence: {verdict.rule}"
        verdict.facts = [fact for row in waiting.values() for fact in row.facts[:1]]
        return verdict
    return None


def _ahead_by_one(verdict: Verdict, works: dict[int, Work]) -> Verdict:
    """Ranks at k, others at k + 1 of the same operation: those ahead completed k, which proves nothing against them."""
    odd = {works[rank].seq for rank in verdict.culprits if rank in works}
    rest = {work.seq for rank, work in works.items() if rank not in verdict.culprits}
    if verdict.rule != "majority" or len(odd) != 1 or len(rest) != 1:
        return verdict
    one, many = odd.pop(), rest.pop()
    if one is None or many is None or one != many + 1:
        return verdict
    reason = tr(
        "{ranks} already at #{one} while the others wait in #{many}: who held up #{many} cannot be told",
        ranks=ranks_text(verdict.culprits),
        one=one,
        many=many,
    )
    early = next(work for rank, work in works.items() if work.seq == many)
    ahead, sides = verdict.culprits, verdict.sides
    return Verdict((), Cause.UNKNOWN, "low", "ahead by one", reason, suspects=ahead, sides=sides, work=early)


def by_alone(evidence: Evidence, world: World) -> Verdict | None:
    """One rank alone in a collective of all ranks, while the others wait elsewhere or have ended without one."""
    size = world.size
    if size is None or size < 3 or any(fact.hidden for fact in evidence.facts):
        return None

    def place(row: Row) -> tuple[object, ...]:
        return (row.group_key, row.seq) if row.work is not None else (None, None)

    waits: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for row in evidence.rows:
        if row.waiting and row.rank < size:
            waits[place(row)].add(row.rank)
    everyone = {rank for ranks in waits.values() for rank in ranks}
    spoke = everyone | evidence.seen_ranks | (set(evidence.source_ranks.values()) if not world.merged else set())
    lonely = [row for row in evidence.rows if row.waiting and row.spans(size) and waits.get(place(row)) == {row.rank}]
    if not set(range(size)) <= spoke or len(lonely) != 1:
        return None
    row = lonely[0]
    others, rest = everyone - {row.rank}, set(range(size)) - {row.rank}
    if row.work is None and (others or not any(fact.kind in (Kind.GLOO_TIMEOUT, Kind.TIMEOUT) for fact in row.facts)):
        return None
    if others and others < rest:
        return None
    if any(one.waiting and one.rank != row.rank and one.group_key == row.group_key for one in evidence.rows):
        return None  # the same group at another number: who is ahead and who behind says more
    where: Message = tr("a collective")
    if row.work is not None:
        where = tr("{op} #{number}", op=row.work.op or where, number=row.work.seq)
    if others:
        reason = tr(
            "rank {rank} waits alone in {where} of group {group}; {others} wait in another one",
            rank=row.rank,
            where=where,
            group=row.group or tr("all ranks"),
            others=ranks_text(others),
        )
    else:
        reason = tr(
            "rank {rank} waits alone in {where}; the logs of {others} end without a collective",
            rank=row.rank,
            where=where,
            others=ranks_text(rest),
        )
    overturned = [tr("a line of another rank in the same collective")]
    return Verdict((row.rank,), Cause.DIVERGED, "medium", "alone", reason, row.facts[:2], overturned=overturned, work=row.work, group=row.group)  # fmt: skip


#: Calls that ranks of one job make differently when all is well.
_BETWEEN_TWO = frozenset(["send", "recv", "isend", "irecv", "batch_isend_irecv"])


def by_tracebacks(evidence: Evidence, world: World) -> Verdict | None:
    """All ranks have waited until gloo's limit, and the traceback of one alone is of another call than the others'."""
    waited = {fact.rank for fact in evidence.of(Kind.GLOO_TIMEOUT)} - {None}
    calls: dict[str, list[Fact]] = defaultdict(list)
    for rank in waited:
        traced = next((one for one in evidence.of(Kind.EXCEPTION) if one.rank == rank and one.frames), None)
        if traced is None:
            return None
        in_backward = "backward" if traced.frames[-1].endswith(" in _engine_run_backward") else ""
        calls[next(iter(collectives_in(traced)), in_backward)].append(traced)
    if world.size is None or world.size < 3 or waited != set(range(world.size)) or len(calls) != 2:
        return None
    few, many = sorted(calls, key=lambda call: len(calls[call]))
    if not few or not many or len(calls[few]) > 1 or {few, many} & _BETWEEN_TWO or many in ROOTED:
        return None
    named = (calls[few][0].rank or 0,)
    reason = tr("{ranks} waited in {call}, and all others in {other}", ranks=ranks_text(named), call=few, other=many)
    overturned = [tr("groups of their own, in which each of these calls belongs")]
    return Verdict(named, Cause.DIVERGED, "medium", "tracebacks", reason, calls[few], overturned=overturned)
