"""What the ranks of the model share: the store, the budget of faults, and the record that the invariants are checked against."""

from __future__ import annotations

from typing import NamedTuple

from ncclguard.outcome import Cause
from ncclguard.protocol.decision import Action, Verdict
from tests.protocol.process import Broken, Result


class Record(NamedTuple):
    """What one operation came to, as far as anybody has been told."""

    ok: bool
    cause: Cause | None
    culprits: tuple[int, ...]
    total: int
    fingerprint: int
    ranks: int  # bit mask: those who returned the success before a verdict; or those a failing verdict does not rest on


class Shared(NamedTuple):
    """The store, the faults, the record. Bit masks are over ranks."""

    budget: int
    crashed: int = 0
    stopped: int = 0  # may be silent for as long as they like; may run at any time
    left: int = 0  # exited before the end of their program
    gave_up: int = 0
    raised: int = 0  # in the newest generation
    hurried: bool = False  # a deadline has passed although nobody was idle, in the newest generation
    unlucky: bool = False  # another fault than a broken transport has happened
    top: int = 0  # the newest generation: the one without verdict
    revoked: bool = False
    reports: tuple[int, ...] = ()  # by rank, of the newest generation; -1 for none
    verdicts: tuple[tuple[int, int], ...] = ()  # generation -> verdict, as long as somebody may read it
    results: tuple[tuple[int, int], ...] = ()  # sequence -> sum, donated
    records: tuple[tuple[int, Record], ...] = ()


def put(pairs: tuple[tuple[int, object], ...], key: int, value: object) -> tuple:  # type: ignore[type-arg]
    return tuple(sorted({**dict(pairs), key: value}.items()))


def returned(shared: Shared, rank: int, result: Result) -> Shared:
    """Check a result against what others were told, and remember it."""
    if not result.agreed:
        if not (shared.stopped | shared.gave_up) >> rank & 1:
            raise Broken(f"rank {rank} could reach the store and was never silent, but has no agreed result: {result}")
        return shared
    known: Record | None = dict(shared.records).get(result.sequence)
    told = Record(result.ok, result.cause, result.culprits, result.total, result.fingerprint if result.ok else 0, 0)
    if known is None:
        record = told._replace(ranks=1 << rank)
    elif known[:5] == told[:5]:
        record = known._replace(ranks=known.ranks | 1 << rank) if known.ok else known
    elif result.ok and not known.ok and not result.closing and known.ranks >> rank & 1:
        return shared  # silent when the verdict was written; it will be overruled
    else:
        raise Broken(f"operation {result.sequence}: rank {rank} is told {told}, but it was {known}")
    return shared._replace(records=put(shared.records, result.sequence, record))


def decided(shared: Shared, verdict: Verdict, covered: int, uncovered: int, closing: bool) -> Shared:
    """Check a verdict against what was returned already, and remember it."""
    known: Record | None = dict(shared.records).get(verdict.sequence)
    if verdict.action is Action.COMMIT:
        if known is not None and not known.ok:
            raise Broken(f"operation {verdict.sequence} is committed after it failed: {known}")
        return shared
    if known is not None and known.ok and (closing or known.ranks & covered):
        raise Broken(f"operation {verdict.sequence} was returned as a success by {known.ranks:b}; verdict {verdict}")
    if verdict.action is Action.RESUME:
        # Only processes that are gone can have returned it: the others do it again without them.
        return shared._replace(records=tuple(pair for pair in shared.records if pair[0] != verdict.sequence))
    record = Record(False, verdict.cause, verdict.culprit_ranks, 0, 0, uncovered)
    return shared._replace(records=put(shared.records, verdict.sequence, record))
