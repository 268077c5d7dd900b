"""Read every input once and put the facts together: one row per rank and group, each timeout counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ncclguard.explain import parse_collective, parse_context, parse_system, parse_transport
from ncclguard.explain.facts import WAITING, Fact, Group, Kind, Work
from ncclguard.explain.reader import Source, UnusableInput
from ncclguard.explain.scan import Line, Scanner
from ncclguard.explain.traces import Dump, read_dump

# Bounds memory on logs that are nothing but complaints; what was counted before is kept, timeouts and fingerprints
# always are.
MAX_FACTS = 100_000
_ALWAYS = WAITING | {Kind.FINGERPRINT, Kind.DUMP_RECEIVED, Kind.DESYNC, Kind.LAUNCHER}


@dataclass(slots=True)
class Row:
    """The state of one rank in one group; `work` is the oldest collective it waits in."""

    rank: int
    group: Group | None = None
    work: Work | None = None
    enqueued: int | None = None
    started: int | None = None
    completed: int | None = None
    waiting: bool = False
    basis: str = ""
    facts: list[Fact] = field(default_factory=list)

    @property
    def group_key(self) -> str | None:
        return self.group.key if self.group else None

    @property
    def seq(self) -> int | None:
        return self.work.seq if self.work else None


@dataclass(slots=True)
class Evidence:
    """All that the inputs say: facts in reading order, rows, flight-recorder dumps, sizes and damage."""

    sources: list[Source] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    dumps: dict[int, Dump] = field(default_factory=dict)
    stated_world: int | None = None
    local_size: int | None = None
    seen_ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    source_ranks: dict[int, int] = field(default_factory=dict)

    def of(self, *kinds: Kind) -> list[Fact]:
        """Return the facts of the given kinds, in reading order."""
        return [fact for fact in self.facts if fact.kind in kinds]


def parse_line(line: Line) -> Iterator[Fact]:
    """Yield the facts of one line: the families are tried in turn, the first that recognises it counts."""
    prefix = line.prefix
    make = Fact(
        kind=Kind.NOTE,
        file=line.source.name,
        line=line.number,
        text=prefix.text.strip()[:600],
        source=line.source.index,
        when=prefix.when,
        rank=prefix.rank,
        rank_basis=prefix.basis,
        hidden=prefix.hidden,
    )
    if line.context:
        yield from parse_context.parse(line, make)
        return
    found = False
    for parser in (parse_collective.parse, parse_transport.parse, parse_system.parse):
        for fact in parser(line, make):
            found = True
            yield fact
        if found:
            return


class Collector:
    """Gather the facts of all sources; `read` each source, then `finish` once."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._index: dict[tuple[object, ...], Fact] = {}
        self._prefixed: dict[int, set[int]] = {}
        self._task_wrong: set[int] = set()

    def read(self, source: Source, progress: Callable[[int], None] | None = None) -> None:
        """Read one source; a damaged or foreign one leaves a note, never an exception."""
        evidence = self.evidence
        evidence.sources.append(source)
        if source.kind != "text":
            try:
                dump = read_dump(source)
            except UnusableInput as error:
                evidence.notes.append(str(error))
                return
            finally:
                if progress is not None:
                    progress(source.size)
            evidence.bytes_read += source.size
            evidence.dumps[dump.rank] = dump
            return
        scanner = Scanner(source, progress)
        try:
            for line in scanner:
                self._take(line)
        except OSError as error:
            evidence.notes.append(f"{source.name}: {error.strerror or error}")
        evidence.bytes_read += scanner.size
        if scanner.damaged:
            evidence.notes.append(f"{source.name}: truncated; read as far as it goes")

    def _take(self, line: Line) -> None:
        evidence, prefix, index = self.evidence, line.prefix, line.source.index
        if prefix.basis == "prefix" and prefix.rank is not None:
            self._prefixed.setdefault(index, set()).add(prefix.rank)
            evidence.seen_ranks.add(prefix.rank)
            task = line.prefix.tag.split(":")[0].strip()
            if task.isdigit() and int(task) != prefix.rank:
                self._task_wrong.add(index)
        world = parse_context.world_size_of(line.text)
        if world is not None and world > (evidence.stated_world or 1):
            evidence.stated_world = world
        setup = parse_transport.setup_ranks(line.text)
        if setup and setup[3]:
            evidence.local_size = max(setup[3], evidence.local_size or 0)
        for fact in parse_line(line):
            fact.order = len(evidence.facts)
            work = fact.work
            key = (
                fact.source,
                fact.kind,
                fact.rank,
                fact.group_rank,
                work and (work.seq, work.op, work.numel_in, work.shape, work.ran_ms),
                fact.enqueued,
                fact.completed,
                fact.peers,
                fact.number,
                fact.detail if fact.kind is not Kind.NCCL_WARN else fact.detail[:80],
                fact.name,
                fact.after_symptom,
                fact.seconds if fact.kind is not Kind.PROGRESS else fact.line,
            )
            known = self._index.get(key)
            if known is not None:
                known.repeated += 1
                known.hidden = max(known.hidden, fact.hidden)
                if known.group is None:
                    known.group = fact.group
                continue
            if len(evidence.facts) >= MAX_FACTS and fact.kind not in _ALWAYS:
                continue
            self._index[key] = fact
            evidence.facts.append(fact)

    def finish(self) -> Evidence:
        """Settle which rank each fact belongs to, keep the last attempt of a restarted job, and build the rows."""
        evidence = self.evidence
        self._resolve_ranks()
        evidence.facts = _last_attempt(evidence)
        evidence.facts = _drop_copies(evidence.facts)
        evidence.seen_ranks |= {fact.rank for fact in evidence.facts if fact.rank is not None}
        evidence.rows = build_rows(evidence.facts)
        return evidence

    def _resolve_ranks(self) -> None:
        names = self._names()
        texts = {source.index for source in self.evidence.sources if source.kind == "text"}
        self.evidence.source_ranks = {
            index: rank for index, rank in names.items() if rank is not None and index in texts
        }
        for fact in self.evidence.facts:
            if fact.rank_basis == "task" and fact.source in self._task_wrong:
                fact.rank, fact.rank_basis = None, ""
            elif fact.rank_basis == "task":
                fact.rank_basis = "launcher"
            if (
                fact.rank is None
                and fact.kind not in (Kind.EXIT, Kind.WORKER_DIED, Kind.KERNEL_OOM, Kind.XID)
                and names.get(fact.source) is not None
            ):
                fact.rank, fact.rank_basis = names[fact.source], "file"
            if (
                fact.rank is None
                and fact.group_rank is not None
                and fact.kind in WAITING | {Kind.DUMP_RECEIVED, Kind.HEARTBEAT}
            ):
                fact.rank, fact.rank_basis = fact.group_rank, "group"
            if fact.kind in (Kind.BARRIER_REACHED, Kind.BARRIER_MISSING, Kind.STORE_KEY) and not fact.rank_basis:
                fact.rank_basis = "text"

    def _names(self) -> dict[int, int | None]:
        """Which rank each source belongs to: by its own [rankN] lines if they agree, else by its name."""
        names: dict[int, int | None] = {}
        local: dict[int, set[str]] = {}
        for source in self.evidence.sources:
            if source.rank is not None and source.rank_is_local and source.kind == "text":
                local.setdefault(source.rank, set()).add(source.name.rsplit("/attempt_", 1)[0])
        for source in self.evidence.sources:
            own = self._prefixed.get(source.index, set())
            if source.rank is None:
                names[source.index] = None
            elif len(own) == 1:
                names[source.index] = next(iter(own))
            elif source.rank_is_local and len(local.get(source.rank, ())) > 1:
                names[source.index] = None  # several nodes have this local rank
            else:
                names[source.index] = source.rank
        return names


def _last_attempt(evidence: Evidence) -> list[Fact]:
    attempts = {source.index: source.attempt for source in evidence.sources if source.attempt is not None}
    with_wait = {
        attempts[fact.source]
        for fact in evidence.facts
        if fact.source in attempts and fact.kind in WAITING | {Kind.FINGERPRINT, Kind.EXCEPTION}
    }
    if len(with_wait) < 2:
        return evidence.facts
    last = max(number for number in with_wait if number is not None)
    evidence.notes.append(
        f"the job was restarted; attempt {last} of the launcher is explained, earlier ones are left out"
    )
    return [fact for fact in evidence.facts if attempts.get(fact.source, last) == last]


def _drop_copies(facts: list[Fact]) -> list[Fact]:
    """Drop a timeout printed again without its global rank (`what(): [Rank 0] ...`): same work, same milliseconds."""
    known = {
        (fact.work.seq, fact.work.op, fact.work.ran_ms, fact.group_rank)
        for fact in facts
        if fact.work is not None and fact.kind in (Kind.TIMEOUT, Kind.BLOCKING) and fact.rank_basis not in ("group", "")
    }
    kept = []
    for fact in facts:
        if fact.rank_basis == "group" and fact.work is not None and known:
            key = (fact.work.seq, fact.work.op, fact.work.ran_ms, fact.group_rank)
            if key in known:
                continue
        kept.append(fact)
    return kept


def build_rows(facts: Sequence[Fact]) -> list[Row]:
    """Return one row per rank and group, from timeouts first, then status lines and replies to dump signals."""
    rows: dict[int, list[Row]] = {}
    timeouts = [fact for fact in facts if fact.kind in (Kind.TIMEOUT, Kind.BLOCKING) and fact.rank is not None]
    for fact in timeouts:
        assert fact.rank is not None
        mine = rows.setdefault(fact.rank, [])
        row = next((r for r in mine if _same_group(r, fact.group) and _same_seq(r, fact.work)), None)
        if row is None:
            row = Row(fact.rank, fact.group, fact.work, waiting=True, basis=fact.rank_basis)
            mine.append(row)
        _fill(row, fact)
    for fact in facts:
        if fact.kind in (Kind.STATUS, Kind.DUMP_RECEIVED) and fact.rank is not None:
            mine = rows.setdefault(fact.rank, [])
            row = next(
                (r for r in mine if fact.number is not None and r.seq == fact.number and _same_group(r, fact.group)),
                None,
            )
            row = row or next(
                (
                    r
                    for r in mine
                    if _same_group(r, fact.group) and (fact.number in (None, -1) or r.seq in (None, fact.number))
                ),
                None,
            )
            if row is None:
                row = Row(fact.rank, fact.group, basis=fact.rank_basis)
                if fact.kind is Kind.STATUS and fact.number is not None and fact.number > 0:
                    row.work, row.waiting = Work(None, fact.number), True
                mine.append(row)
            _fill(row, fact)
    for fact in facts:
        if fact.kind in WAITING and fact.rank is not None and fact.rank not in rows:
            rows[fact.rank] = [Row(fact.rank, None, None, waiting=True, basis=fact.rank_basis, facts=[fact])]
    return [row for rank in sorted(rows) for row in rows[rank]]


def _same_group(row: Row, group: Group | None) -> bool:
    return row.group is None or group is None or row.group.key == group.key


def _same_seq(row: Row, work: Work | None) -> bool:
    return row.work is None or work is None or row.work.seq is None or work.seq is None or row.work.seq == work.seq


def _fill(row: Row, fact: Fact) -> None:
    row.facts.append(fact)
    row.group = row.group or fact.group
    if (
        fact.work is not None
        and (row.work is None or row.work.op is None or (row.work.numel_in is None and fact.work.numel_in is not None))
    ) or (fact.work is not None and row.work is not None and row.work.ran_ms is None and fact.work.ran_ms is not None):
        row.work = fact.work
    row.enqueued = fact.enqueued if fact.enqueued is not None else row.enqueued
    row.started = fact.started if fact.started is not None else row.started
    if fact.completed is not None and not (fact.enqueued is not None and 0 <= fact.enqueued < fact.completed):
        row.completed = (
            fact.completed
        )  # a completed work that was never enqueued is garbage, seen in public logs: 910344404
