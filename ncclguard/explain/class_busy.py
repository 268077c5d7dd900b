"""Classes of cause where a rank is alive and busy elsewhere: saving, preprocessing, loading, more batches."""

from __future__ import annotations

from ncclguard.explain.case import Case, Finding, alone, phases
from ncclguard.explain.facts import Kind

TINY = 8  # elements: a flag or a metric, not data
SHORT_LIMIT_MS = 120_000
DEFAULT_LIMIT_S = 1500.0  # a little under torch's 30 minutes, where no limit is printed


def side_work(case: Case) -> Finding | None:
    """One rank busy with something the others do not do: saving, preprocessing, evaluating, uploading."""
    if not case.waiting:
        return None
    loader = case.evidence.of(Kind.DATALOADER) + phases(case, "loader")
    for facts, name, reason in (
        (
            phases(case, "preprocess"),
            "slow_rank_side_work",
            "a rank was still preprocessing data while the others waited",
        ),
        (phases(case, "checkpoint"), "checkpoint_io", "a rank was saving while the others waited"),
        (loader, "dataloader_stall", "the data loader complained or was busy just before the stall"),
        (phases(case, "logger"), "slow_rank_side_work", "a rank was starting its experiment logger"),
    ):
        if facts and not alone(case):
            return Finding(name, "medium", reason, facts)
    return None


def main_only(case: Case) -> Finding | None:
    if alone(case) and case.verdict.rule == "silence":
        facts = phases(case, "upload", "checkpoint", "evaluate", "logger", of_waiting=True)
        return Finding(
            "rank_divergence",
            "medium" if facts else "low",
            "rank 0 waits alone: a collective inside a main-process-only branch",
            facts + case.waiting[:1],
        )
    return None


def unequal(case: Case) -> Finding | None:
    """The absent rank goes on training: the ranks have different numbers of batches."""
    if not case.by_silence():
        return None
    bars = phases(case, "train")
    after = [f for f in bars if f.after_symptom]
    before = [f for f in bars if not f.after_symptom]
    first = min((f.line for f in case.waiting), default=0)
    later = [f for f in after if f.line > first and f.file == case.waiting[0].file]
    end = [f for f in before + after if (f.number or 0) >= 90]
    tiny = any(
        (row.work.numel_in or 99) <= TINY or (row.work.shape is not None and row.work.shape in ((1,), ()))
        for row in case.evidence.rows
        if row.work
    )
    if later and (end or tiny):
        return Finding(
            "unequal_batches",
            "medium",
            "the absent rank's progress bar goes on after the timeout: it has more batches",
            later,
        )
    if end and tiny:
        return Finding(
            "unequal_batches",
            "low",
            "a one-element collective at the end of an epoch: ranks may have different numbers of batches",
            end,
        )
    return None


def zero_alone_missing(case: Case) -> Finding | None:
    """Everybody waits for rank 0: the rank that does what only the main process does."""
    if case.verdict.culprits != (0,) or not case.by_silence():
        return None
    facts = phases(case, "evaluate", "upload", "generate", "load")
    if facts:
        return Finding(
            "slow_rank_side_work", "medium", "rank 0 was busy with work of its own while the others waited", facts
        )
    tiny = any(
        (row.work.numel_in or 99) <= TINY or (row.work.shape is not None and len(row.work.shape) <= 1)
        for row in case.evidence.rows
        if row.work
    )
    others = {fact.rank for fact in case.waiting}
    if len(others) >= 2 or tiny or case.verdict.rule == "store key":
        return Finding(
            "slow_rank_side_work",
            "low",
            "all ranks but rank 0 wait: it does work that only the main process does",
            case.waiting[:3],
        )
    return None


def too_short(case: Case) -> Finding | None:
    limits = [row.work.timeout_ms for row in case.evidence.rows if row.work and row.work.timeout_ms]
    limits += [int(f.seconds * 1000) for f in case.evidence.of(Kind.GLOO_TIMEOUT, Kind.BARRIER_MISSING) if f.seconds]
    alive = [f for f in phases(case, "train", "evaluate", "preprocess", "generate") if f.after_symptom]
    if limits and max(limits) < SHORT_LIMIT_MS and case.by_silence() and alive:
        return Finding(
            "timeout_too_short",
            "low",
            f"the limit was {max(limits) / 1000:g} s and the absent rank went on working",
            alive,
        )
    return None


def long_wait(case: Case) -> Finding | None:
    """A phase that has been going on for as long as the timeout, on whatever rank."""
    limits = {row.work.timeout_ms / 1000 for row in case.evidence.rows if row.work and row.work.timeout_ms}
    limits |= {fact.seconds for fact in case.evidence.of(Kind.STORE_TIMEOUT, Kind.STORE_KEY) if fact.seconds}
    busy = [
        f
        for f in case.evidence.of(Kind.PROGRESS)
        if f.seconds
        and f.name in ("preprocess", "evaluate", "generate", "load", "upload")
        and f.seconds >= 0.9 * min(limits or {DEFAULT_LIMIT_S})
    ]
    return (
        Finding("slow_rank_side_work", "medium", "one rank's work took as long as the others' limit", busy)
        if busy
        else None
    )
