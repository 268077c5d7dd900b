"""What a rule about the class of cause may look at, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclguard.explain.collect import Evidence
from ncclguard.explain.facts import WAITING, Fact, Kind, Work
from ncclguard.explain.parse_context import phase_of
from ncclguard.explain.verdict import Verdict
from ncclguard.explain.world import World


@dataclass(slots=True)
class Finding:
    """A class of cause with its confidence ("high", "medium", "low"), the reason and the lines."""

    name: str
    confidence: str
    reason: str
    facts: list[Fact] = field(default_factory=list)


@dataclass(slots=True)
class Case:
    """What a rule may look at."""

    evidence: Evidence
    world: World
    verdict: Verdict

    @property
    def waiting(self) -> list[Fact]:
        return [fact for fact in self.evidence.facts if fact.kind in WAITING]

    def by_silence(self) -> bool:
        return self.verdict.rule in ("silence", "counters", "store key", "monitored barrier", "desync report") and bool(
            self.verdict.culprits
        )


def gradient_like(work: Work) -> bool:
    """Whether a collective looks like a flat gradient bucket: an all-reduce of one long dimension."""
    long = (work.shape is not None and len(work.shape) == 1 and work.shape[0] > 10_000) or (
        work.shape is None and (work.numel_in or 0) > 10_000
    )
    return work.op in ("ALLREDUCE", "all_reduce", "allreduce") and long


def phases(case: Case, *names: str, of_waiting: bool = False) -> list[Fact]:
    """Return what the awaited ranks did last: context lines and stacks that speak of these phases.

    A line without a rank is taken for rank 0's, which prints for the job; it tells nothing about another culprit.
    `of_waiting`: what the ranks that wait did instead.
    """
    waiting = {fact.rank for fact in case.waiting}
    found: list[Fact] = []
    for fact in case.evidence.of(Kind.PROGRESS, Kind.PHASE, Kind.STACK, Kind.EXCEPTION):
        name = fact.name
        if fact.kind in (Kind.STACK, Kind.EXCEPTION):
            name = next((phase for frame in reversed(fact.frames) if (phase := phase_of(frame))), "")
        if name not in names:
            continue
        speaker = fact.rank if fact.rank is not None else 0
        if of_waiting:
            fits = speaker in waiting
        elif case.verdict.culprits:
            fits = speaker in case.verdict.culprits
        else:
            fits = fact.rank is None or fact.rank not in waiting
        if fits:
            found.append(fact)
    return found


def alone(case: Case) -> bool:
    """Whether rank 0 is the one that waits while others are silent: it entered a collective the others never call."""
    ranks = {fact.rank for fact in case.waiting}
    return ranks == {0} and bool(case.verdict.culprits) and 0 not in case.verdict.culprits


def left_normally(evidence: Evidence, verdict: Verdict) -> bool:
    """Whether the launcher lists every other rank as failed or ended: who is not listed there had left by itself."""
    summary = {fact.rank for fact in evidence.of(Kind.LAUNCHER)}
    return (
        bool(summary and verdict.culprits)
        and not summary & set(verdict.culprits)
        and all(f.kind is Kind.GLOO_CLOSED for f in verdict.facts)
    )
