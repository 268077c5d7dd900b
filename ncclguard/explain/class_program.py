"""Classes of cause that lie in the ranks' programs: crashes, different collectives, unused parameters."""

from __future__ import annotations

from ncclguard.explain.case import Case, Finding, gradient_like, left_normally, phases
from ncclguard.explain.facts import Kind
from ncclguard.explain.failures import deadly_exits, own_exceptions, sticky_cuda
from ncclguard.explain.parse_context import phase_of

# NVIDIA's Xid catalogue: those that an application's own fault raises.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 69})


def ddp_unused(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.UNUSED)
    return Finding("unused_params", "high", "DDP says parameters took no part in the loss", facts) if facts else None


def crash(case: Case) -> Finding | None:
    evidence = case.evidence
    for facts, sure, reason in (
        (own_exceptions(evidence), "high", "a rank raised an exception of its own"),
        (sticky_cuda(evidence), "high", "a CUDA error of a rank's own kernel surfaced"),
        (evidence.of(Kind.KERNEL_OOM), "high", "the kernel's out-of-memory killer ended a process"),
        (evidence.of(Kind.WORKER_DIED), "medium", "a worker process died"),
        (deadly_exits(evidence), "high", "a rank was ended by a signal"),
        (
            [f for f in evidence.of(Kind.XID) if f.number in APPLICATION_XIDS],
            "medium",
            "the driver stopped a faulting application",
        ),
        (
            [f for f in evidence.of(Kind.FINGERPRINT) if f.name == "absent"],
            "medium",
            "a peer was absent from the check of collectives",
        ),
        (
            [f for f in evidence.of(Kind.DATALOADER) if "killed by signal" in f.detail],
            "medium",
            "a data-loader worker was killed",
        ),
    ):
        if facts:
            return Finding("oom_or_crash_other_rank", sure, reason, facts)
    return None


def differing(case: Case) -> Finding | None:
    """Ranks in different collectives: which difference says whether data, code path or gradients diverged."""
    facts = [f for f in case.evidence.of(Kind.FINGERPRINT) if f.name != "absent" and f.work is not None]
    if len({(f.work.op, f.work.shape, f.work.dtype) for f in facts if f.work}) < 2:
        facts = [row.facts[0] for row in case.evidence.rows if row.waiting and row.work and row.work.op and row.facts]
    if len(case.verdict.sides) < 2:
        return None
    works = [fact.work for fact in facts if fact.work is not None]
    recorded = "flight recorder" in case.verdict.rule
    if len({work.op for work in works}) > 1 or (
        recorded and len({text.split()[0] for text, _ in case.verdict.sides}) > 1
    ):
        return Finding("rank_divergence", "high", "ranks issued different operations at the same point", facts)
    if len({work.seq for work in works}) > 1:
        return Finding("rank_divergence", "high", "ranks issued different numbers of collectives", facts)
    if works and all(gradient_like(work) for work in works):
        return Finding(
            "unused_params",
            "medium",
            "gradient buckets differ in size: some ranks produced no gradient for a part of the model",
            facts,
        )
    flat = all(work.shape is None or len(work.shape) == 1 for work in works)
    if works and flat and all("_BASE" in (work.op or "") or "REDUCE_SCATTER" in (work.op or "") for work in works):
        return Finding(
            "rank_divergence", "medium", "ranks gather different parameters: they run different modules", facts
        )
    return Finding(
        "mismatch_shape_or_op", "medium", "one operation, tensors of different shapes", facts or case.verdict.facts
    )


def recorder(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.RECORDER) if "MISMATCH" in fact.name and "STATE" not in fact.name]
    return (
        Finding("mismatch_shape_or_op", "medium", "torch's flight-recorder analyser found a mismatch", facts)
        if facts
        else None
    )


def divergence(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.TRACE_INVALIDATED)
    if facts:
        return Finding(
            "rank_divergence",
            "medium",
            "DeepSpeed's ZeRO-3 trace changed: the modules that run depend on the batch",
            facts,
        )
    if case.verdict.rule == "counters" and any(
        f.kind is Kind.EXCEPTION and f.rank in case.verdict.culprits and f.frames for f in case.evidence.facts
    ):
        facts = [f for f in case.evidence.of(Kind.EXCEPTION) if f.rank in case.verdict.culprits]
        return Finding("rank_divergence", "medium", "the ranks that are behind sat in another collective", facts)
    stacks: dict[int, str] = {}
    for fact in case.evidence.of(Kind.STACK):
        if fact.rank is not None and fact.frames:
            stacks.setdefault(fact.rank, phase_of(" ".join(fact.frames)) or fact.frames[-1])
    if len(set(stacks.values())) > 1:
        return Finding(
            "rank_divergence", "low", "the stacks of the ranks are in different places", case.evidence.of(Kind.STACK)
        )
    return None


def peer_gone(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.GLOO_CLOSED)
    if left_normally(case.evidence, case.verdict):
        return Finding(
            "rank_divergence", "low", "a rank left normally while its peers went on: it made fewer calls", facts
        )
    if facts and not any(
        f.kind in (Kind.GLOO_TIMEOUT, Kind.TIMEOUT, Kind.BLOCKING, Kind.BARRIER_MISSING) for f in case.evidence.facts
    ):
        return Finding("oom_or_crash_other_rank", "low", "a peer's connections closed: its process ended", facts)
    return None


def teardown(case: Case) -> Finding | None:
    beats = case.evidence.of(Kind.HEARTBEAT)
    if beats and not case.waiting and phases(case, "finished", "checkpoint"):
        return Finding("library_bug", "low", "training was over; only the watchdog's own heartbeat complains", beats)
    return None
