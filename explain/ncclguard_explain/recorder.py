"""Flight-recorder dumps of torch 2.3 to 2.15 (both NCCL backends, and gloo), pickled or JSON, and what they prove.

A dump comes from another machine, so it is read by an unpickler that refuses every global: only lists, dicts, strings
and numbers can come out of it. torch is not needed.

Point-to-point records are left out: a pipeline stage waits for its neighbour by design. torch's own analyser takes the
first rank as its reference; here the majority is the reference.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ncclguard_explain.cause import Cause
from ncclguard_explain.facts import Fact, Group, Kind, Verdict, Work
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ranks import ranks_text
from ncclguard_explain.records import UnusableInput

DUMP_LIMIT = 1 << 30


class _Plain(pickle.Unpickler):
    """An unpickler for plain data only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(tr("refused: the dump asks for {module}.{name}", module=module, name=name))

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError(tr("refused: the dump asks for a persistent object"))


@dataclass(frozen=True)
class Entry:
    """One recorded operation; `seq` counts within the group, `pending` is true unless it completed.

    `unsure`: gloo retires an operation both when it completes and when it times out, and notes neither. `stale`: the
    second NCCL backend of torch 2.15 dumps on each rank at a time of its own and calls all that is pending "scheduled",
    so what a peer has completed is complete here too.
    """

    group: str
    seq: int
    op: str
    state: str
    pending: bool
    unsure: bool
    p2p: bool
    stale: bool
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    created_ns: int
    timeout_ms: int | None
    frames: tuple[str, ...]


@dataclass
class Dump:
    """One rank's dump: the groups it knows (name -> members), its operations in order, its counters per group."""

    rank: int
    file: str
    version: str
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    status: dict[str, dict[str, int]] = field(default_factory=dict)
    written_ns: int | None = None


def load_plain(data: bytes) -> Any:
    """Unpickle bytes that hold nothing but plain data.

    Raises:
        UnusableInput: the bytes ask for a class or function, or are damaged.
    """
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:
        text = tr("not a readable flight-recorder pickle ({name}: {error})", name=type(error).__name__, error=error)
        raise UnusableInput(text) from error


def _int(value: object, default: int = -1) -> int:
    if isinstance(value, (int, float)):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return default


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(
        tuple(_int(part, 0) for part in row) if isinstance(row, (list, tuple)) else (_int(row, 0),) for row in value
    )


def _frames(value: object) -> tuple[str, ...]:
    """Return "file:line in function" of a recorded Python stack, outermost first (torch records innermost first)."""
    rows = value if isinstance(value, (list, tuple)) else ()
    found = [
        f"{row.get('filename')}:{row.get('line')} in {row.get('name')}" for row in rows if isinstance(row, Mapping)
    ]
    return tuple(reversed(found[:16]))


def _entry(raw: Mapping[str, Any]) -> Entry:
    group = raw.get("process_group") or ("", "")
    p2p = bool(raw.get("is_p2p"))
    state = str(raw.get("state", ""))
    limit = _int(raw.get("timeout_ms"), 0)
    name = str(raw.get("profiling_name", ""))
    open_ended = state != "completed" and raw.get("time_discovered_completed_ns") is None
    unsure = open_ended and bool(raw.get("retired")) and name.startswith("gloo:")
    return Entry(
        group=str(group[0]) if isinstance(group, (list, tuple)) and group else str(raw.get("pg_id", "")),
        seq=_int(raw.get("p2p_seq_id" if p2p else "collective_seq_id", raw.get("seq_id"))),
        op=name.split(":", 1)[-1],
        state=state,
        pending=open_ended and not unsure,
        unsure=unsure,
        p2p=p2p,
        stale=name.startswith("nccl2:"),
        input_sizes=_sizes(raw.get("input_sizes")),
        output_sizes=_sizes(raw.get("output_sizes")),
        dtypes=tuple(str(part) for part in raw.get("input_dtypes") or ()),
        created_ns=_int(raw.get("time_created_ns"), 0),
        timeout_ms=limit or None,
        frames=_frames(raw.get("frames")),
    )


def is_dump(data: object) -> bool:
    """Return whether plain data has the fields of a flight-recorder dump."""
    return isinstance(data, Mapping) and ("entries" in data or "pg_config" in data or "pg_status" in data)


def dump_from(data: object, rank: int, file: str) -> Dump:
    """Build a dump out of plain data; names of groups are taken leniently (gloo in torch 2.13 leaves them empty)."""
    if not isinstance(data, Mapping) or not is_dump(data):
        raise UnusableInput(tr("{file}: not a flight-recorder dump", file=file))
    dump = Dump(rank, file, str(data.get("version", "")))
    config = data.get("pg_config")
    for key, raw in config.items() if isinstance(config, Mapping) else ():
        if isinstance(raw, Mapping):
            name = str(raw.get("name") or key)
            dump.groups[name] = tuple(int(part) for part in re.findall(r"\d+", str(raw.get("ranks", ""))))
            dump.descriptions[name] = str(raw.get("desc", ""))
    entries = data.get("entries")
    for raw in entries if isinstance(entries, (list, tuple)) else ():
        if isinstance(raw, Mapping):
            dump.entries.append(_entry(raw))
    status = data.get("pg_status")
    for key, raw in status.items() if isinstance(status, Mapping) else ():
        if isinstance(raw, Mapping):
            dump.status[str(key)] = {str(name): _int(value) for name, value in raw.items()}
    named = {entry.group for entry in dump.entries}
    if "" in dump.groups and len(dump.groups) == 1 and len(named) == 1:  # torch 2.13 on gloo
        dump.groups[next(iter(named))] = dump.groups.pop("")
    return dump


#: Operations that no rank completes before all have come.
_TOGETHER = (
    "all_reduce",
    "allreduce",
    "all_gather",
    "allgather",
    "reduce_scatter",
    "barrier",
    "all_to_all",
    "alltoall",
)


def _oldest(dumps: Mapping[int, Dump]) -> dict[str, dict[int, Entry]]:
    """Return group -> rank -> its oldest pending collective.

    One that a present member never recorded cannot have completed.
    """
    last: dict[str, dict[int, int]] = defaultdict(dict)
    done: dict[str, int] = defaultdict(lambda: -1)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            if entry.p2p:
                continue
            last[entry.group][rank] = max(entry.seq, last[entry.group].get(rank, -1))
            if entry.stale and not entry.pending and any(word in entry.op for word in _TOGETHER):
                done[entry.group] = max(done[entry.group], entry.seq)
    found: dict[str, dict[int, Entry]] = defaultdict(dict)
    for rank, dump in dumps.items():
        for entry in dump.entries:
            pending = entry.pending or (entry.unsure and min(last[entry.group].values()) < entry.seq)
            if entry.stale and entry.seq <= done[entry.group]:
                pending = False
            if pending and not entry.p2p:
                known = found[entry.group].get(rank)
                if known is None or entry.seq < known.seq:
                    found[entry.group][rank] = entry
    return found


def _came_last(dumps: Mapping[int, Dump], waiting: Mapping[int, Entry]) -> tuple[int, ...]:
    """Return the minority that entered the collective after half of its limit, counted from the call before.

    Each rank's time runs from a collective that all of them recorded, so no clocks of two hosts are compared.
    """
    seqs = {entry.seq for entry in waiting.values()}
    if len(seqs) != 1 or len(waiting) < 2:
        return ()
    group, seq = next(iter(waiting.values())).group, seqs.pop()
    limit = max((entry.timeout_ms or 0 for entry in waiting.values()), default=0) or 60_000
    calls = {
        rank: {entry.seq: entry.created_ns for entry in dumps[rank].entries if entry.group == group and not entry.p2p}
        for rank in waiting
    }
    common = set.intersection(*(set(times) for times in calls.values()))
    before = max((one for one in common if one < seq), default=None)
    if before is None:
        return ()
    waits = {rank: (times[seq] - times[before]) / 1e6 for rank, times in calls.items()}
    median = sorted(waits.values())[(len(waits) - 1) // 2]
    late = tuple(sorted(rank for rank, spent in waits.items() if spent - median > 0.5 * limit))
    return late if 2 * len(late) < len(waits) or len(waits) == 2 == 2 * len(late) else ()


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
    return sum(math.prod(shape) for shape in sizes) if sizes else None


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
    """Return whether ranks may legally pass other sizes to this collective."""
    return (
        any(word in op for word in ("all_to_all", "alltoall", "gather", "scatter"))
        and "_base" not in op
        and "all_gather" not in op
    )


def _different(waiting: Mapping[int, Entry]) -> tuple[set[int], list[tuple[str, tuple[int, ...]]]]:
    """Return the minority that waits at the same number in another operation or other sizes, and the sides."""
    seqs = Counter(entry.seq for entry in waiting.values())
    seq, _ = seqs.most_common(1)[0]
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, entry in waiting.items():
        if entry.seq == seq:
            sizes = "" if _is_uneven(entry.op) else " " + "x".join(str(list(shape)) for shape in entry.input_sizes)
            sides[f"{entry.op}{sizes}{' ' + ', '.join(entry.dtypes) if entry.dtypes else ''}"].append(rank)
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
    reasons: list[Message] = []
    explained: dict[str, bool] = {}
    unread: set[int] = set()
    late: set[int] = set()
    for name, waiting in sorted(pending.items()):
        here = members.get(name, set()) | set(waiting)
        top = max(entry.seq for entry in waiting.values())
        low = {rank for rank, entry in waiting.items() if entry.seq < top}
        if 2 * len(low) > len(waiting) and len(low) > 1:
            low = set(waiting) - low  # the odd ones are ahead
        lazy = {rank for rank in here - busy if rank in dumps and not _finished(dumps[rank], name, top)}
        early = {rank for rank in lazy if _written_before(dumps[rank], waiting)}
        unread |= early  # its dump was written before its peers came here: it says nothing about now
        lazy -= early
        if 2 * len(lazy) > len(here) and len(here) > 2:
            lazy = set()  # most of the group is elsewhere: those who wait may be the odd ones
        strange, found_sides = _different(waiting)
        sides = sides or found_sides
        explained[name] = bool(low or lazy or strange or len(found_sides) > 1)
        for ranks, total, why in (
            (low, behind, tr("not at #{top}", top=top)),
            (lazy, idle, tr("nothing pending")),
            (strange, odd, tr("another collective at #{top}", top=top)),
        ):
            if ranks:
                total |= ranks
                text = tr(
                    "group {group}: {ranks} {why} while peers wait",
                    group=group_of(dumps, name),
                    ranks=ranks_text(ranks),
                    why=why,
                )
                reasons.append(text)
    for name, waiting in sorted(pending.items()):
        lacking = members.get(name, set()) - set(dumps)
        if len(lacking) == 1 and len(waiting) >= 2 and not explained[name] and not _queued(dumps, waiting):
            absent |= lacking
            text = tr(
                "group {group}: every member that left a dump waits; {ranks} left none",
                group=group_of(dumps, name),
                ranks=ranks_text(lacking),
            )
            reasons.append(text)
    if not (behind | idle | odd | absent):
        for name, waiting in sorted(pending.items()):
            if members.get(name, set()) <= set(waiting):
                late |= set(_came_last(dumps, waiting))
        if late:
            text = tr(
                "{ranks} entered the collective when its peers had waited for most of their limit",
                ranks=ranks_text(late),
            )
            reasons.append(text)
    culprits = tuple(sorted(behind | idle | odd | absent | late))
    verdict = Verdict(
        culprits=culprits, rule="flight recorder", reason=joined("; ", dict.fromkeys(reasons)), sides=sides
    )
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
    if late:
        verdict.cause, verdict.confidence = Cause.LATE, "medium"
    missing = ({rank for ranks in members.values() for rank in ranks} - set(dumps) - set(culprits)) | unread
    verdict.suspects = tuple(sorted(missing)) if pending else ()
    if missing and culprits and len(missing) <= 4:
        left = tr("{ranks} left no dump: a second fault may be hidden there", ranks=ranks_text(missing))
        verdict.reason = joined("; ", (verdict.reason, left))
    if missing and culprits:
        text = tr(
            "the dump of {ranks}: a second fault may be hidden there, none of them left one to read",
            ranks=ranks_text(missing),
        )
        verdict.overturned.append(text)
    return verdict


def _written_before(dump: Dump, waiting: Mapping[int, Entry]) -> bool:
    first = min(entry.created_ns for entry in waiting.values())
    return dump.written_ns is not None and 0 < dump.written_ns < first


def _statement(
    rank: int, dump: Dump | None, pending: Mapping[str, Mapping[int, Entry]], reasons: Sequence[str]
) -> Fact:
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
    """Return whether this rank completed the collective that its peers wait in (a broadcast's source may)."""
    return any(
        entry.group == group and not entry.p2p and not entry.pending and entry.seq >= seq for entry in dump.entries
    )


def _queued(dumps: Mapping[int, Dump], waiting: Mapping[int, Entry]) -> bool:
    """Return whether the waiting ranks were blocked by a point-to-point transfer before they came to this collective.

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
    """Return the group the incident is about: one that waits for culprits alone, most ranks waiting, longest pending.

    Where others than the culprits are lacking too, these may wait in another group for them.
    """
    if not pending:
        return None

    def weight(name: str) -> tuple[int, bool, int, int]:
        return (
            sum(rank in members.get(name, set()) for rank in culprits),
            members.get(name, set()) - set(pending[name]) <= set(culprits),
            len(pending[name]),
            -min(entry.created_ns for entry in pending[name].values()),
        )

    return max(pending, key=weight)
