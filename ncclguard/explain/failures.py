"""Positive evidence that a rank failed or died by itself: an exception of its own, a signal, a CUDA error."""

from __future__ import annotations

from collections.abc import Iterable

from ncclguard.explain.collect import Evidence
from ncclguard.explain.facts import WAITING, Fact, Kind
from ncclguard.explain.parse_system import follows_from_peers
from ncclguard.explain.verdict import Verdict, ranks_text
from ncclguard.explain.world import World
from ncclguard.outcome import Cause

_DEADLY = {-9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE"}
# A limit ran out; before torch gives up on a peer its whole limit has passed.
EXPIRED = (
    Kind.TIMEOUT,
    Kind.BLOCKING,
    Kind.STATUS,
    Kind.DUMP_RECEIVED,
    Kind.DUMP_OBSERVED,
    Kind.GLOO_TIMEOUT,
    Kind.STORE_TIMEOUT,
)
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "ECC",
    "out of memory",
)


def own_exceptions(evidence: Evidence) -> list[Fact]:
    """Return exceptions that no peer's absence explains, of ranks that did not wait for others themselves.

    A rank that also reports a timeout, or whose fingerprint was compared, was alive then: what it raised before it
    caught, what it raised later follows.
    """
    waited = {
        fact.rank
        for fact in evidence.facts
        if fact.kind in WAITING or (fact.kind is Kind.FINGERPRINT and fact.name != "absent")
    }
    waited.discard(None)
    expired: dict[int, int] = {}
    for fact in evidence.of(*EXPIRED):
        expired.setdefault(fact.source, fact.line)
    found = []
    for fact in evidence.of(Kind.EXCEPTION):
        if follows_from_peers(fact.name, fact.detail) or fact.name.endswith("Warning") or fact.rank in waited:
            continue
        if fact.line > expired.get(fact.source, fact.line) or (fact.name == "RuntimeError" and not fact.detail):
            continue  # after the peers' limit it cannot be why they waited; without a text it proves nothing
        found.append(fact)
    return found


def sticky_cuda(evidence: Evidence) -> list[Fact]:
    """Return CUDA errors of a rank's own kernels; NCCL and the watchdog only print them because they come by first."""
    found = [fact for fact in evidence.of(Kind.CUDA) if any(word in fact.detail for word in _STICKY)]
    found += [
        fact
        for fact in evidence.of(Kind.NCCL_WARN)
        if fact.name == "cuda" and any(word in fact.detail for word in _STICKY)
    ]
    found += [
        fact
        for fact in evidence.of(Kind.WATCHDOG_EXCEPTION)
        if "CUDA error" in fact.detail and "Work" not in fact.detail
    ]
    return found


def deadly_exits(evidence: Evidence) -> list[Fact]:
    """Return exits by a signal that no watchdog and no launcher sends to end a job that already failed."""
    forced = any(fact.name == "forced_kill" for fact in evidence.of(Kind.NOTE))
    found = [
        fact
        for fact in evidence.of(Kind.LAUNCHER)
        if fact.number in _DEADLY and (fact.name == "first" or fact.number != -9)
    ]
    if not found and not forced:
        found = [fact for fact in evidence.of(Kind.LAUNCHER) if fact.number in _DEADLY]
    return found


def _named(facts: Iterable[Fact]) -> tuple[int, ...]:
    return tuple(sorted({fact.rank for fact in facts if fact.rank is not None and fact.rank_basis != "group"}))


def by_failure(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that raised or died while peers wait; when most ranks did, nobody is singled out."""
    unused = [fact for fact in evidence.of(Kind.UNUSED) if fact.rank is not None]
    for facts, cause, what in (
        (unused, Cause.DIVERGED, "raised DDP's unused-parameter error"),
        (own_exceptions(evidence), Cause.FAILED, "raised"),
        (sticky_cuda(evidence), Cause.FAILED, "hit a CUDA error of its own"),
        (deadly_exits(evidence), Cause.LOST, "ended by a signal"),
    ):
        ranks = _named(facts)
        if not ranks:
            continue
        if len(ranks) > 1 and world.size is not None and 2 * len(ranks) > world.size:
            return Verdict(
                rule="failure",
                cause=cause,
                confidence="medium",
                reason=f"most ranks ({ranks_text(ranks)}) {what}",
                facts=facts,
                suspects=ranks,
            )
        if len(ranks) == world.size:
            continue
        first = facts[0]
        text = f"{first.name}: {first.detail}" if first.kind is Kind.EXCEPTION else (first.detail or first.text)
        if first.kind is Kind.LAUNCHER:
            text = _DEADLY.get(first.number or 0, str(first.number))
        return Verdict(ranks, cause, "high", "failure", f"{ranks_text(ranks)} {what}: {text[:300]}", facts)
    return None
