"""The report as data, what `--json` writes, and how it is made: name the culprits, classify, decide, list the evidence.

Fields are only added within a schema version.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Any, Final

from ncclguard_explain.arithmetic import ModelSizes, explain_numel
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.causes import Finding, classify, left_normally
from ncclguard_explain.culprits import find_culprits
from ncclguard_explain.decision import advise, decide, next_step
from ncclguard_explain.evidence import Evidence, Row, World, collectives_in, find_world
from ncclguard_explain.facts import CONSEQUENCES, WAITING, Fact, Group, Kind, Verdict, Work, united
from ncclguard_explain.incident_text import call_and_time
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ranks import ranks_text
from ncclguard_explain.recorder import work_of
from ncclguard_explain.witnesses import guard_incidents

SCHEMA_VERSION = 1


#: The words for how sure an answer is, for people.
CONFIDENCE = {
    "high": tr("high", "confidence"),
    "medium": tr("medium", "confidence"),
    "low": tr("low", "confidence"),
}

#: Prose is a `Message` where it can be said in another language; in the JSON it is English.
Prose = str


@dataclass(frozen=True)
class Collective:
    """The collective that was stuck; element counts, milliseconds; what the logs do not tell is null."""

    op: str | None = None
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    group: str | None = None
    timeout_ms: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class RankRow:
    """One rank in one group. `state` is waiting, missing, behind, ahead, different, failed or unknown."""

    rank: int
    state: str
    group: str | None = None
    seq: int | None = None
    op: str | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    timeout_ms: int | None = None
    ran_ms: int | None = None


@dataclass(frozen=True)
class Mention:
    """A line of the inputs, where it stands, and how often it was printed."""

    file: str
    line: int
    text: str
    kind: str
    rank: int | None = None
    count: int = 1


@dataclass(frozen=True)
class Event:
    """One parsed statement, with every figure it held."""

    kind: str
    file: str
    line: int
    rank: int | None = None
    group_rank: int | None = None
    group: str | None = None
    op: str | None = None
    seq: int | None = None
    numel_in: int | None = None
    numel_out: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    timeout_ms: int | None = None
    ran_ms: int | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    number: int | None = None
    seconds: float | None = None
    peers: tuple[int, ...] = ()
    name: str = ""
    detail: str = ""
    frames: tuple[str, ...] = ()
    count: int = 1
    hidden: int = 0


@dataclass(frozen=True)
class Side:
    """Ranks that agree with each other, and what they were in."""

    what: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """The answer: who, why, where, what to do.

    `culprits`, ranks of the job, is empty when it cannot be proved; `places` then names processes by what the log
    calls them, where that proves no rank ("EP rank 11", "Worker_DP1_TP3", a host).

    `decision` is restart, restart-without, fix-code, fix-environment, raise-limit or unknown; `without` says what a
    restart should leave out; `next_step` is the one thing to do. `survived` lists what the job went on after.
    `evidence` carries the answer, and `overturned_by` says what would prove it wrong.
    """

    schema_version: int
    incident: bool
    summary: Prose
    culprits: tuple[int, ...]
    places: tuple[Prose, ...]
    suspects: tuple[int, ...]
    cause: Cause
    cause_class: str
    confidence: str
    culprit_confidence: str
    reason: Prose
    class_reason: Prose
    decision: str
    decision_reason: Prose
    survived: tuple[Mention, ...]
    without: Prose
    next_step: Prose
    overturned_by: tuple[Prose, ...]
    collective: Collective | None
    ranks: tuple[RankRow, ...]
    sides: tuple[Side, ...]
    evidence: tuple[Mention, ...]
    consequences: tuple[Mention, ...]
    advice: tuple[Prose, ...]
    arithmetic: tuple[Prose, ...]
    stacks: tuple[Event, ...]
    effective_timeout_ms: int | None
    world_size: int | None
    world_size_basis: str
    logs_cover: tuple[int, ...]
    inputs: tuple[str, ...]
    bytes_read: int
    notes: tuple[Prose, ...]
    events: tuple[Event, ...]

    @property
    def further(self) -> tuple[Prose, ...]:
        """The advice beside `next_step`."""
        return tuple(text for text in self.advice if text != self.next_step)

    def to_json(self) -> str:
        """Return the report as JSON; bytes of names and lines that are no text are written as numbers."""
        text = json.dumps(self, indent=2, ensure_ascii=False, default=vars)
        return text.encode("utf-8", "backslashreplace").decode()


LISTED = 200
#: Incidents of ncclguard's own before the latest that are named.
EARLIER = 5
# Facts whose seconds are the limit that ran out.
_TIMED = frozenset(
    {Kind.GLOO_TIMEOUT, Kind.STORE_TIMEOUT, Kind.STORE_KEY, Kind.STORE_BARRIER, Kind.BARRIER_MISSING, Kind.RENDEZVOUS,
     Kind.TIMEOUT, Kind.GUARD}
)  # fmt: skip
#: Waits of engines that print the limit that ran out; others print how long they have waited so far.
_LIMITED = frozenset(["scheduler", "hang", "start", "graph", "monitor", "queue", "horovod", "xla_limit", "barrier"])
_RENDEZVOUS = ("RendezvousTimeoutError",)
_HCCL = re.compile(r"function error: Hccl([A-Z][A-Za-z]+)")  # torch_npu
_HOROVOD = re.compile(r"(?i:allreduce|allgather|broadcast|alltoall|reducescatter)")  # in a tensor's name
# What stands in the logs of healthy jobs too.
_QUIET = frozenset(
    {Kind.PROGRESS, Kind.PHASE, Kind.NCCL_INFO, Kind.NOTE, Kind.STACK, Kind.DATALOADER, Kind.JOINED, Kind.ALIVE,
     Kind.RETRIED}
)  # fmt: skip


def diagnose(
    evidence: Evidence,
    world_size: int | None = None,
    model: ModelSizes | None = None,
    zero: Mapping[str, object] | None = None,
) -> Report:
    """Return the report on what was read; `world_size` where the logs do not tell, `zero`: a DeepSpeed section."""
    world = find_world(evidence, world_size)
    verdict = find_culprits(evidence, world)
    finding = classify(evidence, world, verdict)
    cause = refine_cause(evidence, verdict, finding)
    work, group = _collective(evidence, verdict)
    quiet = _QUIET | ({Kind.PEER_CLOSED, Kind.STORE_LOST} if ended_in_order(evidence) else set())
    seen = bool(verdict.culprits or verdict.places or verdict.sides or finding.facts or work)
    seen = seen or any(fact.kind not in quiet for fact in evidence.facts) and not only_interrupted(evidence, quiet)
    # Somebody has looked where the processes of a job stand that does not move.
    seen = seen or bool(len(evidence.of(Kind.STACK)) > 1 and evidence.of(Kind.NOTE, name="stands still"))
    incident = seen or bool(evidence.broken_off)
    own = verdict.facts[0] if verdict.rule == "ncclguard incident" else None
    timeout = _timeout(evidence, work, own)
    decision = decide(evidence, verdict, finding, cause)
    evidence_facts, consequences = _roles(evidence, verdict, finding)
    told = {id(fact): fact for fact in [*verdict.facts, *evidence.facts] if fact.frames and fact.kind is not Kind.GUARD}
    stacks = tuple(_event(f) for f in told.values() if f.rank in verdict.culprits or f.kind is Kind.STACK)
    if own is not None and own.frames:
        stacks = (_event(own.clone(rank=own.peers[0] if own.peers else None)), *stacks)
    return Report(
        schema_version=SCHEMA_VERSION,
        incident=incident,
        summary=_summary(verdict, cause, finding, work, group) if seen else _nothing_seen(evidence),
        culprits=verdict.culprits,
        places=verdict.places,
        suspects=verdict.suspects,
        cause=cause,
        cause_class=finding.name,
        confidence=finding.confidence,
        culprit_confidence=verdict.confidence if verdict.culprits or verdict.places else "low",
        reason=verdict.reason,
        class_reason=finding.reason,
        decision=decision.action if incident else "unknown",
        decision_reason=decision.reason if incident else tr("no incident in these inputs"),
        survived=tuple(_mention(fact) for fact in survived(evidence)[:LISTED]),
        without=decision.without if incident else "",
        next_step=next_step(decision, verdict, finding, bool(stacks), own) if incident else "",
        overturned_by=tuple(verdict.overturned),
        collective=_as_collective(work, group, timeout),
        ranks=tuple(_rank_rows(evidence, verdict, world)),
        sides=tuple(Side(what=what, ranks=ranks) for what, ranks in verdict.sides),
        evidence=tuple(_mention(fact) for fact in evidence_facts[:LISTED]),
        consequences=tuple(_mention(fact) for fact in consequences[:LISTED]),
        advice=tuple(advise(finding, verdict, timeout, bool(stacks), own, bool(guard_incidents(evidence))))
        if incident
        else (),
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


#: Exceptions of ranks and launchers that somebody interrupts, and where a rank waits for others when that comes.
_INTERRUPTIONS: Final = frozenset(
    ["KeyboardInterrupt", "SignalException", "torch.distributed.elastic.multiprocessing.api.SignalException"]
)
_WAITS: Final = re.compile(
    r"distributed_c10d\.py|torch/autograd/|torch/cuda/|torch/_tensor\.py|/store\.py|"
    r" in (?:wait|barrier|synchronize|item|tolist|cpu|get|get_objects|result|join|poll|select|recv|clip_grad_norm_|backward)\b"
)
#: Calls in a program's own line that wait for the GPU, and so for whatever a collective there waits for.
_READS: Final = re.compile(
    r"\b(?:float|int|bool)\(|\.(?:item|cpu|tolist|numpy|backward|wait|synchronize|to)\(|clip_grad_norm_?\(|\bprint\(|"
    r"\b(?:all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier)\("
)
_LAUNCHES: Final = re.compile(
    r"distributed/(?:run|launch|elastic|launcher)|multiprocessing/|subprocess\.py|/launch\w*\.py"
)


def _is_of_a_program(fact: Fact) -> bool:
    """Return whether a traceback is of a program, and of no launcher that waits for its processes."""
    return bool(fact.frames) and not any(_LAUNCHES.search(frame) for frame in fact.frames)


def only_interrupted(evidence: Evidence, quiet: AbstractSet[Kind]) -> bool:
    """Return whether somebody has interrupted a job, and no rank of it is seen to have waited for another one."""
    raised = evidence.of(Kind.EXCEPTION)
    steps = len({fact.number for fact in evidence.of(Kind.ALIVE, Kind.PROGRESS)} - {None}) > 2
    return (
        any(
            fact.name == "KeyboardInterrupt" and (fact.rank is not None or (steps and _is_of_a_program(fact)))
            for fact in raised
        )
        and all(
            fact.kind in quiet or fact.name in _INTERRUPTIONS or fact.kind is Kind.ENDED_BY_LAUNCHER
            for fact in evidence.facts
        )
        and not any(_WAITS.search(frame) for fact in raised for frame in fact.frames[-4:])
        and not any(_READS.search(fact.code) for fact in raised)
    )


def ended_in_order(evidence: Evidence) -> bool:
    """Return whether closed connections, and a store that is gone, are what every job leaves that ends.

    destroy_process_group aborts the communicators (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `shutdown`). All
    ranks do it, or each process sees only its own connections close, or the last lines say that the training was over.
    The store is gone as soon as the process that holds it has ended; that this was its end must be said.
    """
    finished = any(fact.after_symptom and fact.name in ("finished", "succeeded") for fact in evidence.of(Kind.PHASE))
    aborts, closed = evidence.of(Kind.NOTE, name="abort_complete"), evidence.of(Kind.PEER_CLOSED)
    size = max((fact.completed or 0 for fact in aborts), default=0)
    all_abort = {fact.number for fact in aborts if fact.completed == size} >= set(range(size)) and size > 0
    only_own = all(fact.number in (None, fact.local_rank) for fact in closed)
    return finished or ((all_abort or only_own or not aborts) and not evidence.of(Kind.STORE_LOST))


def survived(evidence: Evidence) -> list[Fact]:
    """Return what looked like an incident and was none, since the job went on."""
    named = [fact for fact in reversed(evidence.of(Kind.RETRIED)) if fact.name]
    return list({(f.source, f.rank, f.name.rsplit(".", 1)[-1], f.detail): f for f in named}.values())[::-1]


#: Incidents of ncclguard's own that a job went on after, of which the summary tells.
SHOWN_SURVIVED = 3
#: torchrun's words of a SIGINT, and Python's.
_INTERRUPTED = re.compile(r"got signal: 2\b|^(?:\[\w+\]: ?)?KeyboardInterrupt$")
#: A log says nothing of a job that hangs and whose limits have not passed.
_STANDS = tr("If the job stands still now, `ncclguard hang` on its hosts says which rank it waits for.")


def _nothing_seen(evidence: Evidence) -> Message:
    if evidence.broken_off:
        place = next(iter(evidence.broken_off.values()))
        return tr("Uncertain: {place}, and the rest of it is missing. Pass the whole log.", place=place)
    again = survived(evidence)
    nothing = tr("No incident found in these inputs.")
    if not again:
        if any(_INTERRUPTED.search(fact.text) for fact in evidence.facts):
            return tr("No incident found in these inputs: the job was ended with Ctrl-C.")
        ended = any(fact.name in ("finished", "succeeded") for fact in evidence.of(Kind.PHASE))
        return nothing if ended else joined(" ", (nothing, _STANDS))
    told = [fact for fact in again if fact.detail]
    agreed = [fact for fact in told if fact.name in {cause.value for cause in Cause}]  # an incident of ncclguard's own
    if agreed:
        nothing = tr("No incident in these inputs has stopped the job.")
    known = list({call_and_time(fact.detail): fact for fact in reversed(agreed or told or again[:1])}.values())[::-1]
    shown = known[:SHOWN_SURVIVED] if agreed else known[:1]
    what = {"nothing": nothing, "what": joined("; ", (_survived_what(fact)[:160] for fact in shown))}
    if len(known) == len(shown):
        return tr("{nothing} The job went on after: {what}", **what)
    return tr("{nothing} The job went on after: {what} (and {count} more)", **what, count=len(known) - len(shown))


def _survived_what(fact: Fact) -> str:
    """Return the first sentence of what a log says; an exception's type stands before it."""
    named = fact.name[:1].isupper() or "." in fact.name
    said = re.split(r"\. |。", fact.detail)[0]
    return f"{fact.name}: {said}" if named else said or fact.text


def refine_cause(evidence: Evidence, verdict: Verdict, finding: Finding) -> Cause:
    """Say more than "unknown" about the culprits only where a line proves it."""
    if verdict.cause is not Cause.UNKNOWN:
        return verdict.cause
    name, sure, culprits = finding.name, finding.confidence != "low", set(verdict.culprits)
    if culprits:
        own = [fact for fact in evidence.facts if fact.rank in culprits and fact.rank_basis != "group"]
        ended = {fact.rank: fact.number for fact in evidence.of(Kind.LAUNCHER)}
        closed = any(fact.kind is Kind.GLOO_CLOSED for fact in own)
        if left_normally(evidence, verdict) or any(f.kind is Kind.PHASE and f.name == "finished" for f in own):
            return Cause.EXITED
        in_gloo = closed or any(fact.kind is Kind.EXCEPTION and "closed by peer" in fact.detail for fact in own)
        if verdict.rule == "counters" and in_gloo:
            return Cause.DIVERGED  # they sat in a collective of another backend
        busy = ("slow_rank_side_work", "checkpoint_io", "dataloader_stall", "unequal_batches", "timeout_too_short")
        alive = (name in busy and sure) or closed or all(ended.get(rank) == -15 for rank in culprits)
        return Cause.LATE if alive else Cause.UNKNOWN
    if name in ("network_fabric", "network_interface", "p2p_acs_iommu"):
        return Cause.NETWORK
    if name == "oom_or_crash_other_rank":
        kinds = {fact.kind for fact in finding.facts}
        if kinds & {Kind.EXCEPTION, Kind.CUDA, Kind.NCCL_WARN, Kind.WATCHDOG_EXCEPTION}:
            return Cause.FAILED
        return Cause.LOST if kinds & {Kind.KERNEL_OOM, Kind.WORKER_DIED, Kind.LAUNCHER} else Cause.UNKNOWN
    return Cause.DIVERGED if name in ("mismatch_shape_or_op", "rank_divergence") and sure else Cause.UNKNOWN


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
            fits = row.work and work and row.work.seq in (None, work.seq) and row.work.op in (None, work.op)
            if fits and row.group_key in (None, group.key if group else None):
                work = united(work, row.work)
        return work, group
    for fact in evidence.of(Kind.FINGERPRINT, Kind.DESYNC, Kind.RECORDER, Kind.ASYNC_ERROR, Kind.BARRIER_MISSING):
        of_victim = fact.rank not in culprits or len(culprits) > 1
        if fact.work is not None and fact.work.op is not None and of_victim and fact.name != "absent":
            numbered = fact.work.seq is not None or fact.number is None
            return fact.work if numbered else Work(fact.work.op, fact.number), fact.group
    tags = [fact.detail for fact in evidence.of(Kind.TIMEOUT, name="hccl") if fact.detail]
    tags += [hit[1].upper() for fact in evidence.of(Kind.EXCEPTION) if (hit := _HCCL.search(fact.detail))]
    tags += [
        hit[0].upper()
        for fact in evidence.of(Kind.ACCUSED)
        if fact.name.startswith("horovod") and (hit := _HOROVOD.search(fact.detail))
    ]
    work = Work(tags[0].partition("_")[0]) if tags else _called(evidence, culprits)
    return work or _met(evidence), None


def _met(evidence: Evidence) -> Work | None:
    """Return where processes waited for each other outside of any collective: a service's barrier, the rendezvous."""
    if evidence.of(Kind.ENGINE_WAIT, name="barrier") + evidence.of(Kind.ACCUSED, name="barrier"):
        return Work("barrier")
    met = [fact for fact in evidence.of(Kind.RENDEZVOUS) if fact.name == "clients" or fact.detail in _RENDEZVOUS]
    return Work("rendezvous") if met else None


def _fits(key: tuple[object, ...], row: Row) -> bool:
    """Return whether a poorer line (cut, or of a version that prints less) speaks of the same collective."""
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
        called = collectives_in(fact)
        if called and not (fact.rank in culprits and len(culprits) < 2):
            names[called[0]] += 1
    return Work(names.most_common(1)[0][0]) if names else None


def _timeout(evidence: Evidence, work: Work | None, own: Fact | None) -> int | None:
    if work is not None and work.timeout_ms is not None:
        return work.timeout_ms
    if own is not None and own.seconds is not None:  # others of its job may have had other limits
        return round(own.seconds * 100) * 10  # it is what was left of the limit when the call began
    printed = [fact for fact in evidence.facts if fact.kind in _TIMED and fact.seconds is not None]
    printed += [f for f in evidence.of(Kind.LAUNCHER, Kind.ACCUSED) if f.seconds is not None]
    printed += [f for f in evidence.of(Kind.NOTE) if f.name in ("dumped", "limit") and f.seconds is not None]
    if any(fact.detail in _RENDEZVOUS for fact in evidence.of(Kind.RENDEZVOUS)):
        printed += evidence.of(Kind.NOTE, name="join_limit")
    printed += [f for f in evidence.of(Kind.ENGINE_WAIT) if f.name in _LIMITED and f.seconds is not None]
    # The second NCCL backend prints how long it waited, some milliseconds beside the limit.
    values = (round(f.seconds or 0) or f.seconds or 0 if f.name == "nccl2" else f.seconds or 0 for f in printed)
    seconds = next((value for value in values if value < 1e9), None)
    if seconds is not None:
        return round(seconds * 1000)
    return next(
        (fact.work.timeout_ms for fact in evidence.facts if fact.work and fact.work.timeout_ms is not None), None
    )


def _as_collective(work: Work | None, group: Group | None, timeout: int | None) -> Collective | None:
    if work is None:
        return None
    own = _fields(Collective, work, group)
    if work.shape is not None and work.op in ("ALLREDUCE", "BROADCAST", "REDUCE"):  # torch before 2.1 prints no counts
        own.setdefault("numel_in", math.prod(work.shape))
    return Collective(**{**own, "timeout_ms": work.timeout_ms if work.timeout_ms is not None else timeout})


def _fields(model: type[Any], *sources: object) -> dict[str, Any]:
    """Return what the sources hold for the fields of a model, the first one's word first; a group becomes its name."""
    found: dict[str, Any] = {}
    for source in sources:
        if isinstance(source, Group):
            found["group"] = str(source)
            continue
        for name in (field.name for field in fields(model)):
            if name != "group" and getattr(source, name, None) is not None:
                found.setdefault(name, getattr(source, name))
    return found


def _rank_rows(evidence: Evidence, verdict: Verdict, world: World) -> list[RankRow]:
    named = {"failure": "failed", "flight recorder": "behind", "counters": "behind"}.get(verdict.rule, "missing")
    if verdict.rule == "ncclguard incident":
        named = {Cause.DIVERGED: "different", Cause.FAILED: "failed"}.get(verdict.cause, "missing")
    if "divergence" in verdict.rule or "fingerprints" in verdict.rule:
        named = "behind" if verdict.rule.endswith("behind") else "different"

    def state(rank: int, otherwise: str) -> str:
        return named if rank in verdict.culprits else otherwise

    rows: list[RankRow] = []
    for row in evidence.rows:
        own = state(row.rank, "waiting" if row.waiting else "unknown")
        rows.append(RankRow(state=own, **_fields(RankRow, row, row.work, row.group)))
    listed = {row.rank for row in rows}
    for fact in evidence.of(Kind.FINGERPRINT):
        if fact.rank is not None and fact.work is not None and fact.rank not in listed:
            listed.add(fact.rank)
            own = "missing" if fact.name == "absent" else state(fact.rank, "waiting")
            rows.append(RankRow(rank=fact.rank, state=own, **_fields(RankRow, fact.work)))
    for rank, dump in sorted(evidence.dumps.items()):
        if rank not in listed:
            listed.add(rank)
            pending = [entry for entry in dump.entries if entry.pending and not entry.p2p]
            first = min(pending, key=lambda entry: entry.created_ns, default=None)
            told = {**_fields(RankRow, work_of(first)), "group": first.group, "shape": None} if first else {}
            rows.append(RankRow(rank=rank, state=state(rank, "waiting" if pending else "unknown"), **told))
    waited = {rank for fact in verdict.facts for rank in fact.waiting}
    for rank in {*range(world.size or 0), *verdict.culprits, *waited} - listed:
        rows.append(RankRow(rank=rank, state=state(rank, "waiting" if rank in waited else "unknown")))
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


def _summary(verdict: Verdict, cause: Cause, finding: Finding, work: Work | None, group: Group | None) -> str:
    where: Message | str = (work.op if work else None) or tr("a collective")
    if work and work.seq is not None:
        where = tr("{op} #{number}", op=where, number=work.seq)
    if work and group:
        where = tr("{where} of group {group}", where=where, group=group)
    who = tr("Stuck in {where}; nobody can be named from these inputs", where=where)
    if verdict.culprits:
        who = tr("{ranks} held up {where}", ranks=ranks_text(verdict.culprits).capitalised(), where=where)
        if work is None and cause is Cause.FAILED:
            who = tr("Failure of {ranks}", ranks=ranks_text(verdict.culprits))
    elif verdict.places:
        who = tr("{places} held up {where}", places=joined(", ", verdict.places), where=where)
    elif work is None:
        who = tr("An incident; nobody can be named from these inputs")
    if finding.name == "unknown" or finding.confidence == "low":  # a guess is no headline
        if cause is not Cause.UNKNOWN:
            return tr("{who}. Cause: {cause}.", who=who, cause=WORD[cause])
        if finding.name == "unknown" and finding.facts:
            return tr("{who}. The inputs do not tell the cause: {reason}.", who=who, reason=finding.reason)
        return tr("{who}. The inputs do not tell the cause.", who=who)
    told = {"who": who, "name": finding.name, "confidence": CONFIDENCE[finding.confidence], "reason": finding.reason}
    if cause is Cause.UNKNOWN:
        return tr("{who}. Class {name} ({confidence} confidence): {reason}.", **told)
    return tr("{who}. Cause: {cause}; class {name} ({confidence} confidence): {reason}.", cause=WORD[cause], **told)


def _notes(evidence: Evidence, world: World, consequences: list[Fact]) -> list[str]:
    notes, size = list(evidence.notes), world.size
    earlier = guard_incidents(evidence)[:-1]
    if earlier:
        texts = [f"{fact.file}: {fact.detail}" for fact in earlier]
        text = tr(
            "{count} incidents of ncclguard are in these inputs, and the answer is about the latest. Before it: {texts}",
            count=len(texts) + 1,
            texts=joined("; ", texts[:EARLIER]),
        )
        notes.insert(0, text)
    if world.basis == "highest rank seen" and size is not None:
        text = tr(
            "the world's size is not stated; {size} is the highest rank seen plus one (--world-size N settles it)",
            size=size,
        )
        notes.append(text)
        if {row.rank for row in evidence.rows if row.waiting} == set(range(size)) and (size + 1) % 4 == 0:
            text = tr(
                "every rank seen waits; if the job has {size} ranks, rank {rank} is the one missing",
                size=size + 1,
                rank=size,
            )
            notes.append(text)
    if any(row.basis == "group" for row in evidence.rows):
        notes.append(tr("some lines carry only the rank inside the group; it is taken for the global rank"))
    if any(fact.hidden for fact in evidence.facts):
        notes.append(
            tr("Ray folded lines of several ranks into one ([repeated Nx across cluster]); silence proves nothing here")
        )
    if len(consequences) > LISTED:
        notes.append(tr("{count} more consequences are left out", count=len(consequences) - LISTED))
    return notes


def _mention(fact: Fact) -> Mention:
    return Mention(
        file=fact.file, line=fact.line, text=fact.text[:400], kind=fact.kind.value, rank=fact.rank, count=fact.repeated
    )


def _event(fact: Fact) -> Event:
    told = _fields(Event, fact, fact.work, fact.group)
    if fact.kind is Kind.STATUS and fact.number is not None:
        told.setdefault("seq", fact.number)
    return Event(**{**told, "kind": fact.kind.value, "count": fact.repeated})
