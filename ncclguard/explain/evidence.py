"""Read every input once and put the facts together: which rank each speaks of, each timeout once, one row per rank.

Also settled here: how many ranks there are, and whose logs would be among the inputs. Silence says nothing about a rank
whose log nobody passed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ncclguard.explain import passages
from ncclguard.explain.facts import MAX_RANK, WAITING, Fact, Group, Kind, Work, united
from ncclguard.explain.patterns import parse_text
from ncclguard.explain.recorder import DUMP_LIMIT, Dump, dump_from, is_dump, load_plain
from ncclguard.explain.records import Record, Scanner, Source, UnusableInput, blocks, read_all
from ncclguard.language import joined, received, tr

# Bounds memory on logs that are nothing but complaints; what was counted before is kept, timeouts and fingerprints
# always are.
MAX_FACTS = 100_000
_ALWAYS = WAITING | {Kind.FINGERPRINT, Kind.DUMP_RECEIVED, Kind.DESYNC, Kind.LAUNCHER, Kind.EXIT}
# What may stand beside an exception that the program caught.
_SURVIVED_WITH = frozenset(
    {Kind.EXCEPTION, Kind.RETRIED, Kind.PROGRESS, Kind.PHASE, Kind.NOTE, Kind.NCCL_INFO, Kind.JOINED, Kind.ALIVE,
     Kind.PEER_CLOSED}
)  # fmt: skip
_OF_A_HOST = frozenset(
    {Kind.EXIT, Kind.WORKER_DIED, Kind.KERNEL_OOM, Kind.XID, Kind.NIC, Kind.SCHEDULER, Kind.RAS, Kind.GUARD}
)


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

    def in_group(self, group: Group | None) -> bool:
        """Whether nothing says that this row is of another group."""
        return self.group is None or group is None or self.group.key == group.key

    def spans(self, size: int | None) -> bool:
        """Whether the group is all ranks: the default group, an unnamed one, or one whose size is the world's."""
        whole = self.group is None or self.group.is_default or size == 2
        return whole or (size is not None and self.work is not None and self.work.ratio == size)


@dataclass(slots=True)
class Evidence:
    """All that the inputs say: facts in reading order, rows, flight-recorder dumps, sizes and damage.

    `cut` holds the ranks whose log ends inside an error line: what they do not say proves nothing. `broken_off` holds
    a sentence for each input that ends inside a line that starts like one of an incident; `open_lines` are the (source,
    line) of last lines without a newline.
    """

    sources: list[Source] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    dumps: dict[int, Dump] = field(default_factory=dict)
    stated_world: int | None = None
    local_size: int | None = None
    nodes: int | None = None
    seen_ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    source_ranks: dict[int, int] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    broken_off: dict[int, str] = field(default_factory=dict)
    open_lines: set[tuple[int, int]] = field(default_factory=set)

    def of(self, *kinds: Kind, name: str | None = None) -> list[Fact]:
        """Return the facts of the given kinds (and of that name), in reading order."""
        return [fact for fact in self.facts if fact.kind in kinds and name in (None, fact.name)]

    @property
    def one_node(self) -> bool:
        """Whether nothing says that the job has more than one node."""
        if self.nodes is not None:
            return self.nodes == 1
        if self.stated_world is not None and self.local_size is not None:
            return self.stated_world <= self.local_size
        if (self.stated_world or 0) > 16 or max(self.seen_ranks, default=0) > 15:
            return False
        hosts = {fact.host for fact in self.facts if fact.host and "/" not in fact.host and fact.kind is not Kind.RAS}
        tasks = {fact.node for fact in self.of(Kind.EXIT) if fact.node is not None}
        return max(len(hosts), len(tasks), len(self.hosts)) <= 1

    def never_worked(self) -> list[Row]:
        """Return the rows that wait, if the stuck collective is a group's first and nothing ever completed."""
        rows = [row for row in self.rows if row.waiting and row.seq is not None]
        never = all((row.seq or 0) <= 2 and row.completed is not None and row.completed <= 0 for row in rows)
        return rows if never else []


@dataclass(frozen=True, slots=True)
class World:
    """The job's size (None when unknown), how it is known, and the ranks whose silence would mean something.

    `merged`: one of the inputs is a log of several ranks.
    """

    size: int | None
    basis: str
    covered: frozenset[int]
    merged: bool

    @property
    def is_pair(self) -> bool:
        """Whether the job has two ranks; logs of single ranks or of one node do not tell, there may be more of them."""
        return self.size == 2 and (self.basis != "highest rank seen" or self.merged)


def read_record(record: Record) -> Iterator[Fact]:
    """Yield the facts of one record."""
    prefix = record.prefix
    make = Fact(
        kind=Kind.NOTE,
        file=record.source.name,
        line=record.number,
        text=prefix.text.strip()[:600],
        source=record.source.index,
        when=prefix.when,
        rank=prefix.rank,
        rank_basis=prefix.basis,
        hidden=prefix.hidden,
        local_rank=prefix.local_rank,
        node=prefix.node,
        pid=prefix.pid,
    )
    if record.context:
        yield from passages.read_progress(prefix.text, make, record.last)
        return
    if '"culprits"' in prefix.text or "torchelastic.worker.status" in prefix.text:
        yield from passages.read_line(prefix.text, make)
        return
    facts, whole = passages.read(prefix.text, prefix, record.following, make)
    yield from facts
    if not whole:
        yield from parse_text(prefix.text, make)


class Collector:
    """Gather the facts of all sources: `read` each (or `feed` it in parts), then `finish`, as often as wanted."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._index: dict[tuple[object, ...], Fact] = {}
        self._prefixed: dict[int, set[int]] = {}
        self._task_wrong: set[int] = set()
        self._tasks: dict[int, set[int]] = {}
        self._scanners: dict[int, Scanner] = {}

    def read(self, source: Source, progress: Callable[[int], None] | None = None) -> None:
        """Read one source; a damaged or foreign one leaves a note, never an exception."""
        if source.kind != "text":
            self._read_document(source)
            if progress is not None:
                progress(source.size)
            return
        damaged = False
        try:
            for data, broken in blocks(source):
                damaged |= broken
                self.feed(source, data)
                if progress is not None:
                    progress(len(data))
        except OSError as error:
            self.evidence.notes.append(f"{source.name}: {error.strerror or error}")
        self.feed(source, b"", final=True)
        if damaged:
            self.evidence.notes.append(tr("{name}: truncated; read as far as it goes", name=source.name))

    def feed(self, source: Source, data: bytes, final: bool = False, settle: bool = False) -> None:
        """Take more bytes of a log; `settle`: nothing follows for now."""
        if source.index not in self._scanners:
            self._scanners[source.index] = Scanner(source)
            self.evidence.sources.append(source)
        scanner = self._scanners[source.index]
        for record in scanner.feed(data, final, settle):
            self._take(record)
        self.evidence.bytes_read += len(data)
        self._prefixed.setdefault(source.index, set()).update(rank for rank in scanner.ranks if rank < MAX_RANK)
        self._tasks.setdefault(source.index, set()).update(scanner.tasks)
        if final and scanner.cut is not None:
            self.evidence.cut.add(scanner.cut)
        if final and scanner.broken_off:
            self.evidence.broken_off[source.index] = tr(
                '{name} breaks off in "{broken_off}"', name=source.name, broken_off=scanner.broken_off[-80:]
            )
        if final and scanner.open_line:
            self.evidence.open_lines.add((source.index, scanner.open_line))
        if final:
            self._scanners.pop(source.index)
            self.evidence.seen_ranks |= self._prefixed[source.index]

    def _read_document(self, source: Source) -> None:
        evidence = self.evidence
        evidence.sources.append(source)
        evidence.bytes_read += source.size
        try:
            data = read_all(source, DUMP_LIMIT)
            plain = load_plain(data) if source.kind == "pickle" else json.loads(data)
            if is_dump(plain):
                if source.rank is None:
                    raise UnusableInput(tr("its name does not end in a rank, so it is not known whose dump it is"))
                dump = dump_from(plain, source.rank, source.name)
                dump.written_ns = source.path.stat().st_mtime_ns if source.path is not None else None
                evidence.dumps[source.rank] = dump
                return
        except UnusableInput as error:
            said = str(error).removeprefix(f"{source.name}: ")
            evidence.notes.append(joined(": ", (source.name, received(said))))
            return
        except (ValueError, RecursionError) as error:
            evidence.notes.append(
                tr("{name}: not readable as JSON ({error}), and no flight-recorder dump", name=source.name, error=error)
            )
            return
        make = Fact(Kind.NOTE, source.name, 0, "", source.index)
        if source.rank is not None and not source.rank_is_local:
            make.rank, make.rank_basis = source.rank, "file"
        elif source.rank is not None:
            make.local_rank = source.rank
        found = passages.read_document(plain, make)
        for fact in found:
            self._add(fact)
        if not found:
            evidence.notes.append(
                tr("{name}: not a flight-recorder dump, and no document that is known here", name=source.name)
            )

    def _take(self, record: Record) -> None:
        evidence, prefix, index = self.evidence, record.prefix, record.source.index
        if prefix.basis == "prefix" and prefix.rank is not None and prefix.rank < MAX_RANK:
            self._prefixed.setdefault(index, set()).add(prefix.rank)
            evidence.seen_ranks.add(prefix.rank)
            if prefix.node is not None and prefix.node != prefix.rank:
                self._task_wrong.add(index)
        if prefix.host and len(evidence.hosts) < 100:
            evidence.hosts.add(prefix.host)
        text = record.text
        if "=" in text or ":" in text or " " in text:
            world, nodes, local = passages.sizes_of(text)
            if world is not None and (evidence.stated_world or 1) < world <= MAX_RANK:
                evidence.stated_world = world
            evidence.nodes = max(evidence.nodes or 0, nodes or 0) or None
            evidence.local_size = max(evidence.local_size or 0, local or 0) or None
        for fact in read_record(record):
            self._add(fact)

    def _add(self, fact: Fact) -> None:
        evidence, work = self.evidence, fact.work
        if fact.rank is not None and not 0 <= fact.rank < MAX_RANK:
            fact.rank, fact.rank_basis = None, ""
        if any(peer >= MAX_RANK for peer in fact.peers):
            fact.peers = tuple(peer for peer in fact.peers if peer < MAX_RANK)
        if fact.kind is Kind.JOINED and fact.name == "init":
            evidence.local_size = max(fact.local_rank or 0, evidence.local_size or 0) or None
            evidence.nodes = max(fact.node or 0, evidence.nodes or 0) or None
            if fact.completed and fact.completed > (evidence.stated_world or 1) and fact.completed < MAX_RANK:
                evidence.stated_world = fact.completed
        fact.order = len(evidence.facts)
        key = (
            fact.source,
            fact.kind,
            fact.line if fact.kind is Kind.RETRIED else None,
            fact.rank,
            fact.group_rank,
            fact.local_rank,
            fact.host,
            fact.pid if fact.kind is not Kind.NCCL_WARN else None,
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
            known.frames = known.frames or fact.frames
            if known.group is None:
                known.group = fact.group
            return
        if len(evidence.facts) >= MAX_FACTS and fact.kind not in _ALWAYS:
            return
        self._index[key] = fact
        evidence.facts.append(fact)

    def finish(self) -> Evidence:
        """Return the evidence so far: each fact with its rank, the last attempt of a restarted job, and the rows."""
        kept = self.evidence
        evidence = replace(
            kept,
            facts=[replace(fact) for fact in kept.facts],
            notes=list(kept.notes),
            seen_ranks=set(kept.seen_ranks).union(*self._prefixed.values()) if self._prefixed else set(kept.seen_ranks),
        )
        self._resolve_ranks(evidence)
        evidence.facts = _last_attempt(evidence)
        evidence.facts = _drop_copies(evidence.facts)
        _mark_survived(evidence)
        over = {fact.source: fact.line for fact in evidence.of(Kind.NOTE) if fact.name == "barrier_completed"}
        evidence.facts = [  # the ranks that waited at set-up have met
            fact
            for fact in evidence.facts
            if fact.kind is not Kind.STORE_BARRIER or fact.name != "Waiting" or fact.line > over.get(fact.source, -1)
        ]
        evidence.seen_ranks |= {
            fact.rank for fact in evidence.facts if fact.rank is not None and fact.kind is not Kind.LAUNCHER
        }
        evidence.rows = build_rows(evidence.facts)
        return evidence

    def _resolve_ranks(self, evidence: Evidence) -> None:
        names = self._names(evidence)
        texts = {source.index for source in evidence.sources if source.kind == "text"}
        evidence.source_ranks = {index: rank for index, rank in names.items() if rank is not None and index in texts}
        wrong = self._task_wrong | self._tasks_are_nodes(evidence)
        node_of_srun = bool(evidence.of(Kind.EXIT))  # srun started one launcher on each node
        for fact in evidence.facts:
            a_node = fact.source in wrong or fact.local_rank is not None
            if (fact.rank_basis == "task" and a_node) or (
                fact.rank_basis == "srun" and (fact.source in self._task_wrong or node_of_srun)
            ):
                fact.rank, fact.rank_basis = None, ""
            elif fact.rank_basis in ("task", "srun"):
                fact.rank_basis = "launcher"
            if fact.rank is None and fact.kind not in _OF_A_HOST and names.get(fact.source) is not None:
                fact.rank, fact.rank_basis = names[fact.source], "file"
        processes = _processes(evidence)
        inside = WAITING | {Kind.DUMP_RECEIVED, Kind.HEARTBEAT}
        for fact in evidence.facts:
            if fact.rank is not None:
                continue
            by_pid = by_place = None
            if fact.pid is not None and fact.kind is not Kind.ENDED_BY_LAUNCHER:
                by_pid = processes.get((fact.host, fact.pid), processes.get(("", fact.pid)))
            if fact.local_rank is not None and fact.kind is not Kind.JOINED:
                by_place = global_rank(evidence, fact)
            if by_pid is not None:
                fact.rank, fact.rank_basis = by_pid, "pid"
            elif by_place is not None:
                fact.rank, fact.rank_basis = by_place, "local"
            elif fact.group_rank is not None and fact.kind in inside:
                fact.rank, fact.rank_basis = fact.group_rank, "group"

    def _tasks_are_nodes(self, evidence: Evidence) -> set[int]:
        """Return the sources whose `N: ` of srun is a node: one task only, or one that several ranks speak through."""
        found = {source for source, tasks in self._tasks.items() if len(tasks) == 1}
        inner: dict[tuple[int, int | None], set[int]] = {}
        for fact in evidence.facts:
            if fact.node is not None and fact.group_rank is not None:
                inner.setdefault((fact.source, fact.node), set()).add(fact.group_rank)
        return found | {source for (source, _), ranks in inner.items() if len(ranks) > 1}

    def _names(self, evidence: Evidence) -> dict[int, int | None]:
        """Which rank each source belongs to: by its own [rankN] lines if they agree, else by its name."""
        names: dict[int, int | None] = {}
        local: dict[int, set[str]] = {}
        for source in evidence.sources:
            if source.rank is not None and source.rank_is_local and source.kind == "text":
                local.setdefault(source.rank, set()).add(source.name.rsplit("/attempt_", 1)[0])
        for source in evidence.sources:
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


def _processes(evidence: Evidence) -> dict[tuple[str, int], int]:
    """Return (host, pid) -> rank, as NCCL's communicators of the whole job and launchers tell it."""
    found: dict[tuple[str, int], int] = {}
    inits = [fact for fact in evidence.of(Kind.JOINED) if fact.name == "init" and fact.pid is not None]
    largest = max((fact.completed or 0 for fact in inits), default=0)
    for fact in inits:
        if fact.completed == largest and fact.number is not None:
            found[fact.host, fact.pid or 0] = found["", fact.pid or 0] = fact.number
    for fact in evidence.of(Kind.LAUNCHER):
        if fact.rank is not None and fact.pid is not None:
            found.setdefault(("", fact.pid), fact.rank)
    for fact in evidence.of(Kind.EXIT):
        if fact.pid is not None and fact.local_rank is not None:
            rank = global_rank(evidence, fact)
            if rank is not None:
                found.setdefault(("", fact.pid), rank)
    return found


def global_rank(evidence: Evidence, fact: Fact) -> int | None:
    """Return the global rank behind a local one, where the node's place is known or there is only one node."""
    if fact.local_rank is None or fact.name == "command":
        return None
    if fact.node is not None and fact.kind is Kind.EXIT:
        if fact.node == 0:
            return fact.local_rank
        return fact.node * evidence.local_size + fact.local_rank if evidence.local_size else None
    return fact.local_rank if evidence.one_node else None


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
        tr("the job was restarted; attempt {last} of the launcher is explained, earlier ones are left out", last=last)
    )
    return [fact for fact in evidence.facts if attempts.get(fact.source, last) == last]


def _mark_survived(evidence: Evidence) -> None:
    """Count as survived what a job went on after: an exception that was caught, a warning of NCCL that only advises.

    An exception was caught where its rank's log says at the end that the training is complete, or says that it tries
    again and the training goes on behind that. Only in inputs that know of no end of a process and of nobody who waits:
    a rank whose lines have no prefix may have raised while another one went on.
    """
    if any(fact.kind not in _SURVIVED_WITH and not _advises(fact) for fact in evidence.facts):
        return
    alive = [f for f in evidence.of(Kind.ALIVE, Kind.PROGRESS, Kind.PHASE) if f.after_symptom]
    alive = [fact for fact in alive if fact.kind is not Kind.PHASE or fact.name == "finished"]
    retries = evidence.of(Kind.RETRIED)
    for fact in evidence.of(Kind.EXCEPTION, Kind.NCCL_WARN):
        end = fact.line + 2 * len(fact.frames)  # a frame and its source line
        later = [one for one in alive if one.source == fact.source and one.line > end]
        again = [
            one.line for one in retries if (one.source, one.rank) == (fact.source, fact.rank) and one.line >= fact.line
        ]
        complete = any(one.name == "finished" and one.rank == fact.rank for one in later)
        if complete or _advises(fact) and later or again and any(one.line > again[0] for one in later):
            fact.kind = Kind.RETRIED


def _advises(fact: Fact) -> bool:
    """Whether a warning of NCCL is of no kind that is known to end a job."""
    return fact.kind is Kind.NCCL_WARN and fact.name == "other"


def _drop_copies(facts: list[Fact]) -> list[Fact]:
    """Drop a timeout printed again without its global rank (`what(): [Rank 0] ...`): same work, same milliseconds."""

    def key(fact: Fact) -> tuple[object, ...]:
        work = fact.work or Work(None)
        return work.seq, work.op, work.ran_ms, fact.group_rank

    timeouts = [fact for fact in facts if fact.work is not None and fact.kind in (Kind.TIMEOUT, Kind.BLOCKING)]
    known = {key(fact) for fact in timeouts if fact.rank_basis not in ("group", "")}
    return [fact for fact in facts if fact.rank_basis != "group" or fact.work is None or key(fact) not in known]


def build_rows(facts: Sequence[Fact]) -> list[Row]:
    """Return one row per rank and group, from timeouts first, then status lines and replies to dump signals."""
    rows: dict[int, list[Row]] = {}
    for fact in sorted(
        (one for one in facts if one.kind in (Kind.TIMEOUT, Kind.BLOCKING)), key=lambda f: f.work is None
    ):
        if fact.rank is not None:
            mine, work = rows.setdefault(fact.rank, []), fact.work
            same = [r for r in mine if r.in_group(fact.group) and (work is None or work.same_seq(r.work))]
            if not same:
                same = [Row(fact.rank, fact.group, work, waiting=True, basis=fact.rank_basis)]
                mine += same
            _fill(same[0], fact)
    for fact in facts:
        if fact.kind in (Kind.STATUS, Kind.DUMP_RECEIVED) and fact.rank is not None:
            mine, at = rows.setdefault(fact.rank, []), fact.number
            near = [r for r in mine if r.in_group(fact.group) and (at in (None, -1) or r.seq in (None, at))]
            same = [r for r in near if at is not None and r.seq == at] or near
            if not same:
                same = [Row(fact.rank, fact.group, basis=fact.rank_basis)]
                if fact.kind is Kind.STATUS and at is not None and at > 0:
                    same[0].work, same[0].waiting = Work(None, at), True
                mine += same
            _fill(same[0], fact)
    for fact in facts:
        if fact.kind in WAITING and fact.rank is not None and fact.rank not in rows:
            rows[fact.rank] = [Row(fact.rank, None, None, waiting=True, basis=fact.rank_basis, facts=[fact])]
    return [row for rank in sorted(rows) for row in rows[rank]]


def _fill(row: Row, fact: Fact) -> None:
    row.facts.append(fact)
    row.group = row.group or fact.group
    if fact.work is not None and fact.work.same_seq(row.work):
        row.work = united(row.work, fact.work)
    row.enqueued = fact.enqueued if fact.enqueued is not None else row.enqueued
    row.started = fact.started if fact.started is not None else row.started
    # A completed work that was never enqueued is garbage, seen in public logs: 910344404.
    if fact.completed is not None and not (fact.enqueued is not None and 0 <= fact.enqueued < fact.completed):
        row.completed = fact.completed


def find_world(evidence: Evidence, given: int | None) -> World:
    """Settle the world's size: given > stated in the logs > dumps > element counts > launcher > highest rank seen."""
    seen = set(evidence.seen_ranks) | set(evidence.dumps)
    for fact in evidence.of(Kind.FINGERPRINT, Kind.BARRIER_MISSING, Kind.DESYNC, Kind.DUMP_RECEIVED, Kind.LAUNCHER):
        seen |= {fact.rank or 0} if fact.kind in (Kind.FINGERPRINT, Kind.LAUNCHER) else set(fact.peers)
    named = set(evidence.source_ranks.values())
    highest = max(seen | named, default=-1)
    size, basis = None, "unknown"
    summary = {fact.rank for fact in evidence.of(Kind.LAUNCHER) if fact.rank is not None}
    recorded = max((len(ranks) for dump in evidence.dumps.values() for ranks in dump.groups.values()), default=0)
    of_all = [row.work for row in evidence.rows if row.work and (row.group is None or row.group.is_default)]
    ratios = {work.ratio or 0 for work in of_all} - {0}
    sized = evidence.of(Kind.STORE_BARRIER) + [fact for fact in evidence.of(Kind.TIMEOUT) if fact.name == "hccl"]
    stated = max(filter(None, [evidence.stated_world, *(fact.number for fact in sized)]), default=None)
    if stated is not None and stated > MAX_RANK:
        stated = None
    launched = evidence.nodes * evidence.local_size if evidence.nodes and evidence.local_size else None
    if given is not None:
        size, basis = given, "given"
    elif stated is not None and stated > highest and stated > 1:
        size, basis = stated, "stated"
    elif launched is not None and MAX_RANK >= launched > max(highest, 1):
        size, basis = launched, "stated"
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
        return covered | {rank for rank in speaking if rank < (size or 0)}, False
    if not loose:
        return covered, False
    if any(source.one_node for source in loose):
        return set(range(min(seen), max(seen) + 1)) if seen else set(), False
    if size is None:
        return set(seen), merged
    local = evidence.local_size or (8 if size > 8 and size % 8 == 0 else size)
    nodes = {rank // local for rank in seen if rank < size}
    return {rank for rank in range(size) if rank // local in nodes}, merged
