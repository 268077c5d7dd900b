"""Name the culprits from flight-recorder dumps: who is behind, idle, different, or the one dump that is absent.

Point-to-point records are left out: a pipeline stage waits for its neighbour by design. torch's own analyser takes the
first rank as its reference; here the majority is the reference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from ncclguard.explain.facts import Fact, Group, Kind, Work
from ncclguard.explain.traces import Dump, Entry
from ncclguard.explain.verdict import Verdict, ranks_text
from ncclguard.outcome import Cause


def _oldest(dumps: Mapping[int, Dump]) -> dict[str, dict[int, Entry]]:
    """Return group -> rank -> its oldest pending collective; one that a present member never recorded cannot have
    completed.
    """
    last: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            if not entry.p2p:
                last[entry.group][rank] = max(entry.seq, last[entry.group].get(rank, -1))
    found: dict[str, dict[int, Entry]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            pending = entry.pending or (entry.unsure and min(last[entry.group].values()) < entry.seq)
            if pending and not entry.p2p:
                known = found[entry.group].get(rank)
                if known is None or entry.seq < known.seq:
                    found[entry.group][rank] = entry
    return found


def _members(dumps: Mapping[int, Dump]) -> dict[str, set[int]]:
    groups: dict[str, set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        for name, ranks in dump.groups.items():
            groups[name] |= set(ranks)
        for entry in dump.entries:
            if entry.group not in dump.groups:
                groups[entry.group].add(rank)
    return groups


def _elements(sizes: tuple[tuple[int, ...], ...]) -> int | None:
    if not sizes:
        return None
    total = 0
    for shape in sizes:
        count = 1
        for part in shape:
            count *= part
        total += count
    return total


def work_of(entry: Entry) -> Work:
    """Return a recorded collective in the form that log lines have."""
    shape = entry.input_sizes[0] if len(entry.input_sizes) == 1 else None
    return Work(
        entry.op, entry.seq, _elements(entry.input_sizes), _elements(entry.output_sizes), shape, None, entry.timeout_ms
    )


def group_of(dumps: Mapping[int, Dump], name: str) -> Group:
    """Return the group of that name with the description any dump has for it."""
    description = next((dump.descriptions[name] for dump in dumps.values() if dump.descriptions.get(name)), None)
    return Group(name, None, description)


def _is_uneven(op: str) -> bool:
    """Whether ranks may legally pass other sizes to this collective."""
    return (
        any(word in op for word in ("all_to_all", "alltoall", "gather", "scatter"))
        and "_base" not in op
        and "all_gather" not in op
    )


def _different(waiting: Mapping[int, Entry]) -> tuple[set[int], list[tuple[str, tuple[int, ...]]]]:
    """Return the minority among ranks that wait at the same sequence number with another operation or other sizes, and
    the sides.
    """
    seqs = Counter(entry.seq for entry in waiting.values())
    seq, _ = seqs.most_common(1)[0]
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, entry in waiting.items():
        if entry.seq == seq:
            sizes = "" if _is_uneven(entry.op) else " " + "x".join(str(list(shape)) for shape in entry.input_sizes)
            sides[f"{entry.op}{sizes}"].append(rank)
    listed = [(text, tuple(sorted(ranks))) for text, ranks in sorted(sides.items(), key=lambda item: -len(item[1]))]
    if len(listed) < 2:
        return set(), []
    if 2 * len(listed[0][1]) > sum(len(ranks) for _, ranks in listed):
        return {rank for _, ranks in listed[1:] for rank in ranks}, listed
    return set(), listed


def name_culprits(dumps: Mapping[int, Dump]) -> Verdict:
    """Return the verdict on a set of dumps (rank -> dump).

    A rank is named when (a) its oldest pending collective in a group is older than a peer's, (b) it has nothing pending
    anywhere while peers of a group wait, (c) it waits at the same sequence number with another operation or shape than
    the majority, (d) its dump is absent and it alone can explain why a group's present members all wait.
    """
    pending, members = _oldest(dumps), _members(dumps)
    busy = {rank for waiting in pending.values() for rank in waiting}
    behind: set[int] = set()
    idle: set[int] = set()
    odd: set[int] = set()
    absent: set[int] = set()
    sides: list[tuple[str, tuple[int, ...]]] = []
    reasons: list[str] = []
    explained: dict[str, bool] = {}
    for name, waiting in sorted(pending.items()):
        here = members.get(name, set()) | set(waiting)
        top = max(entry.seq for entry in waiting.values())
        low = {rank for rank, entry in waiting.items() if entry.seq < top}
        if 2 * len(low) > len(waiting) and len(low) > 1:
            low = set(waiting) - low  # the odd ones are ahead
        lazy = {rank for rank in here - busy if rank in dumps and not _finished(dumps[rank], name, top)}
        if 2 * len(lazy) > len(here) and len(here) > 2:
            lazy = set()  # most of the group is elsewhere: those who wait may be the odd ones
        strange, found_sides = _different(waiting)
        sides = sides or found_sides
        explained[name] = bool(low or lazy or strange or len(found_sides) > 1)
        for ranks, total, why in (
            (low, behind, f"not at #{top}"),
            (lazy, idle, "nothing pending"),
            (strange, odd, f"another collective at #{top}"),
        ):
            if ranks:
                total |= ranks
                reasons.append(f"group {group_of(dumps, name)}: {ranks_text(ranks)} {why} while peers wait")
    for name, waiting in sorted(pending.items()):
        lacking = members.get(name, set()) - set(dumps)
        if len(lacking) == 1 and len(waiting) >= 2 and not explained[name] and not _queued(dumps, waiting):
            absent |= lacking
            reasons.append(
                f"group {group_of(dumps, name)}: every member that left a dump waits; {ranks_text(lacking)} left none"
            )
    culprits = tuple(sorted(behind | idle | odd | absent))
    verdict = Verdict(culprits=culprits, rule="flight recorder", reason="; ".join(dict.fromkeys(reasons)), sides=sides)
    verdict.facts = [_statement(rank, dumps.get(rank), pending, reasons) for rank in culprits]
    verdict.confidence = "high" if culprits and not absent else "medium" if culprits else "low"
    if (odd and odd == set(culprits)) or (not culprits and len(sides) > 1):
        verdict.cause = Cause.DIVERGED
    main = _main_group(pending, culprits, members)
    if main is not None:
        first = min(
            (entry for rank, entry in pending[main].items() if rank not in culprits), key=lambda e: e.seq, default=None
        )
        first = first or min(pending[main].values(), key=lambda e: e.seq)
        verdict.work, verdict.group = work_of(first), group_of(dumps, main)
    missing = {rank for ranks in members.values() for rank in ranks} - set(dumps) - set(culprits)
    verdict.suspects = tuple(sorted(missing)) if not culprits and pending else ()
    return verdict


def _statement(rank: int, dump: Dump | None, pending: Mapping[str, Mapping[int, Entry]], reasons: list[str]) -> Fact:
    """Return what the dumps say about one culprit, in the form of a log line; its frames are its last recorded call."""
    if dump is None:
        text = f"rank {rank}: no dump; {reasons[-1]}"
        return Fact(Kind.RECORDER, "(no dump)", 0, text, rank=rank, rank_basis="file")
    own = [
        f"{entry.op} #{entry.seq} of group {name}" for name, waiting in pending.items() if (entry := waiting.get(rank))
    ]
    last = max(dump.entries, key=lambda entry: entry.created_ns, default=None)
    text = f"rank {rank}: oldest pending {', '.join(own[:4])}" if own else f"rank {rank}: nothing pending"
    if last is not None:
        text += f"; last recorded {last.op} #{last.seq} ({last.state})"
    frames = last.frames if last is not None else ()
    return Fact(Kind.RECORDER, dump.file, 0, text, rank=rank, rank_basis="file", frames=frames)


def _finished(dump: Dump, group: str, seq: int) -> bool:
    """Whether this rank completed the collective that its peers wait in (a broadcast's source may)."""
    return any(
        entry.group == group and not entry.p2p and not entry.pending and entry.seq >= seq for entry in dump.entries
    )


def _queued(dumps: Mapping[int, Dump], waiting: Mapping[int, Entry]) -> bool:
    """Whether the waiting ranks were blocked by a point-to-point transfer before they came to this collective.

    Then the collective is only queued behind it, and an absent member explains nothing.
    """
    blocked = 0
    for rank, entry in waiting.items():
        older = [e for e in dumps[rank].entries if e.pending and e.p2p and e.created_ns <= entry.created_ns]
        blocked += bool(older)
    return 2 * blocked > len(waiting)


def _main_group(
    pending: Mapping[str, Mapping[int, Entry]], culprits: tuple[int, ...], members: Mapping[str, set[int]]
) -> str | None:
    """Return the group the incident is about: one with a culprit in it, most ranks waiting, longest pending."""
    if not pending:
        return None

    def weight(name: str) -> tuple[int, int, int]:
        return (
            sum(rank in members.get(name, set()) for rank in culprits),
            len(pending[name]),
            -min(entry.created_ns for entry in pending[name].values()),
        )

    return max(pending, key=weight)
