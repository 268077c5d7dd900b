"""How many ranks there are, and whose logs would be here: silence says nothing about a rank whose log nobody passed."""

from __future__ import annotations

from dataclasses import dataclass

from ncclguard.explain.collect import Evidence, Row
from ncclguard.explain.facts import Kind


@dataclass(frozen=True, slots=True)
class World:
    """The job's size (None when unknown), how it is known, and the ranks whose silence would mean something."""

    size: int | None
    basis: str
    covered: frozenset[int]
    merged: bool

    @property
    def is_pair(self) -> bool:
        """Whether the job has two ranks; logs of single ranks or of one node do not tell, there may be more of them."""
        return self.size == 2 and (self.basis != "highest rank seen" or self.merged)


def ratio_of(row: Row) -> int | None:
    """Return the group's size out of an all-gather's or reduce-scatter's element counts, or None."""
    work = row.work
    if work is None or work.op is None or not work.numel_in or not work.numel_out:
        return None
    big, small = max(work.numel_in, work.numel_out), min(work.numel_in, work.numel_out)
    if (
        not any(word in work.op.upper() for word in ("ALLGATHER", "ALL_GATHER", "REDUCE_SCATTER"))
        or big % small
        or big == small
    ):
        return None
    return big // small


def is_world_group(row: Row, size: int | None) -> bool:
    """Whether a row's group spans the job: the default group, an unnamed one, or one whose size is the world's."""
    return row.group is None or row.group.is_default or size == 2 or (size is not None and ratio_of(row) == size)


def find_world(evidence: Evidence, given: int | None) -> World:
    """Settle the world's size: given > stated in the logs > dumps > element counts > launcher > highest rank seen."""
    seen = set(evidence.seen_ranks) | set(evidence.dumps)
    for fact in evidence.of(Kind.FINGERPRINT, Kind.BARRIER_MISSING, Kind.DESYNC, Kind.DUMP_RECEIVED, Kind.LAUNCHER):
        seen |= {fact.rank or 0} if fact.kind is Kind.FINGERPRINT else set(fact.peers)
    named = set(evidence.source_ranks.values())
    highest = max(seen | named, default=-1)
    size, basis = None, "unknown"
    summary = {fact.rank for fact in evidence.of(Kind.LAUNCHER) if fact.rank is not None}
    recorded = max((len(ranks) for dump in evidence.dumps.values() for ranks in dump.groups.values()), default=0)
    ratios = {
        ratio for row in evidence.rows if (row.group is None or row.group.is_default) and (ratio := ratio_of(row))
    }
    if given is not None:
        size, basis = given, "given"
    elif evidence.stated_world and evidence.stated_world > highest:
        size, basis = evidence.stated_world, "stated"
    elif recorded > max(highest, 1):
        size, basis = recorded, "flight recorder"
    elif len(ratios) == 1 and max(ratios) > highest:
        size, basis = max(ratios), "element counts"
    elif highest >= 1:
        size, basis = highest + 1, "launcher" if highest in summary else "highest rank seen"
    covered, merged = _covered(evidence, size, seen, named)
    return World(size, basis, frozenset(covered), merged)


def _covered(evidence: Evidence, size: int | None, seen: set[int], named: set[int]) -> tuple[set[int], bool]:
    """Return the ranks whose log would be here, and whether a log of several ranks is among the inputs."""
    texts = [source for source in evidence.sources if source.kind == "text"]
    loose = [source for source in texts if source.rank is None]
    merged = bool(loose)
    covered = set(named)
    if named and loose:
        # Logs per rank beside others (the launcher's own output): the loose ones count only for ranks that speak in
        # them.
        speaking = {fact.rank for fact in evidence.facts if fact.rank is not None and fact.rank_basis == "prefix"}
        return covered | (speaking & set(range(size or 0))), False
    if not loose:
        return covered, False
    if any(source.one_node for source in loose):
        return set(range(min(seen), max(seen) + 1)) if seen else set(), False
    if size is None:
        return set(seen), merged
    local = evidence.local_size or (8 if size > 8 and size % 8 == 0 else size)
    nodes = {rank // local for rank in seen if rank < size}
    return {rank for rank in range(size) if rank // local in nodes}, merged
