"""Read every input once and put the facts together: which rank each speaks of, each timeout once, one row per rank.

Also settled here: how many ranks there are, and whose logs would be among the inputs. Silence says nothing about a rank
whose log nobody passed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ncclguard_explain import incident_text, passages, places, quotations
from ncclguard_explain.census import LABEL
from ncclguard_explain.facts import EXPIRED, MAX_RANK, WAITING, Fact, Group, Kind, Work, united
from ncclguard_explain.jobs import Signs
from ncclguard_explain.language import joined, received, tr
from ncclguard_explain.patterns import parse_text
from ncclguard_explain.rank_map import NOBODY, OF_A_HOST, RankMap, place_rank
from ncclguard_explain.recorder import DUMP_LIMIT, Dump, dump_from, is_dump, load_plain
from ncclguard_explain.records import BINARY, Recoder, Record, Scanner, Source, UnusableInput, blocks, read_all

# Bounds memory on logs that are nothing but complaints; what was counted before is kept, timeouts and fingerprints
# always are.
MAX_FACTS = 100_000
#: Statements of which it is looked up who quotes them: a log with more of them is none that quotes.
LOOKS = 2_000
_ALWAYS = WAITING | {Kind.FINGERPRINT, Kind.DUMP_RECEIVED, Kind.DESYNC, Kind.LAUNCHER, Kind.EXIT}
OF_A_HEALTHY_JOB = frozenset(
    {Kind.RETRIED, Kind.PROGRESS, Kind.PHASE, Kind.NOTE, Kind.NCCL_INFO, Kind.JOINED, Kind.ALIVE, Kind.PEER_CLOSED}
)
# What may stand beside an exception that the program caught; the store's clients try again.
_SURVIVED_WITH = OF_A_HEALTHY_JOB | {Kind.EXCEPTION, Kind.NCCL_WARN, Kind.STORE_TIMEOUT, Kind.KERNEL_OOM}
#: NVIDIA's Xid numbers of faults that were corrected: a row of memory to be remapped, single-bit errors.
_CORRECTED = frozenset([63, 92, 94])
#: A process that the kernel has ended and whose name is that of a user's own tools, cut to 15 letters.
_NOT_OF_A_JOB = re.compile(
    r"\b(?:process \d+ \(|task=)(?:jupyter|code|node|java|rsession|MATLAB|firefox|chrome)[\w\-]*(?:\)|,)"
)
_IN_EVALUATION = re.compile(r"\b(?:name|phase)='evaluation ")
_JOB_OF_TABLE = re.compile(r"(\d+)[\s|].*COMPLETED")
_OF_THE_KERNEL = frozenset([Kind.XID, Kind.NIC, Kind.KERNEL_OOM])
_DAY, _YEAR = 86_400.0, 365 * 86_400.0  # in seconds; lines of the kernel do not tell the year
#: Several copies of one server, of which the log is: each counts its processes from 0 on.
_REPLICAS = re.compile(
    r"\bkubectl .*\blogs\b.* (?:-l|--selector|--all-pods|deploy(?:ment)?s?/)|\b(?i:replicas?[=: ]+|--replicas[= ])(?:[2-9]|\d\d)\b|"
    r"\b(?:[2-9]|\d\d|two|three|four|eight) (?:\w+ ){0,2}replicas\b|"
    r"\bworker(?:s|-urls)?['\"]?[=: ]+\[?['\"]?https?://[^\s,'\"]+['\"]?[, ]+['\"]?https?://"
)
#: Pods that a cluster runs on each of its nodes, beside those of the job.
_OF_CLUSTER = re.compile(
    r"pod/(?:fluent|promtail|vector-|filebeat|datadog|node-(?:exporter|problem|local)|\S*exporter|kube-|coredns|calico|cilium|canal|flannel|"
    r"weave|\S*csi-|\S*device-plugin|konnectivity|aws-node|ebs-|gke-|metrics-|prometheus|grafana|otel)"
)
#: Figures that tell no steps: clocks, dates, fractions, addresses; and words of lines that count a wait.
_NO_COUNT = re.compile(r"\d+(?:[-/:.,]\d+)+")
_WAITS = re.compile(
    r"(?i)wait|stall|alive|heart|elapsed|hang|hung|block|pending|idle|missing|retr|attempt|time|\bsec|uptime|queue|since|warn|error|fail|memory|temperature|poll"
)
#: Stalls and planned ends that a job may go on after, by the names of their rows, if that is all that its log has.
_PASSING = {Kind.ACCUSED: ("horovod", "horovod_ready", "instance"), Kind.ENGINE_WAIT: ("health", "transfer", "barrier"),
            Kind.SCHEDULER: ("PREEMPTION", "JOB REQUEUE", "TIME LIMIT", "Evicted", "Preempted")}  # fmt: skip


@dataclass
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
        """Return whether nothing says that this row is of another group."""
        return self.group is None or group is None or self.group.key == group.key

    def spans(self, size: int | None) -> bool:
        """Return whether the group is all ranks: the default group, an unnamed one, or one of the world's size."""
        whole = self.group is None or self.group.is_default or size == 2
        return whole or (size is not None and self.work is not None and self.work.ratio == size)


@dataclass
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
    replicated: bool = False  # torchft's replica groups, each with ranks from 0 on
    several_nodes: bool = False  # somebody says that these lines are of several nodes
    starts_ranks: bool = False  # a launcher on each node starts the ranks there
    agents: set[tuple[int, str, int]] = field(default_factory=set)  # input, host and process of torchrun's agents
    ranks: RankMap = field(default_factory=RankMap)
    seen_ranks: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    source_ranks: dict[int, int] = field(default_factory=dict)
    hosts: set[str] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    broken_off: dict[int, str] = field(default_factory=dict)
    open_lines: set[tuple[int, int]] = field(default_factory=set)
    unread: dict[int, str] = field(default_factory=dict)  # inputs that say nothing at all, and why

    def of(self, *kinds: Kind, name: str | None = None) -> list[Fact]:
        """Return the facts of the given kinds (and of that name), in reading order."""
        return [fact for fact in self.facts if fact.kind in kinds and name in (None, fact.name)]

    @property
    def one_node(self) -> bool:
        """Return whether nothing says that the job has more than one node."""
        if self.replicated or self.several_nodes or len(self.agents) > 1:
            return False
        if self.nodes is not None:
            return self.nodes == 1
        if self.local_size and max(self.seen_ranks, default=0) >= self.local_size:
            return False
        if self.stated_world is not None and self.local_size is not None:
            return self.stated_world <= self.local_size
        if (self.stated_world or 0) >= 16 or max(self.seen_ranks, default=0) >= 15:  # few hosts have 16 GPUs
            return False
        hosts = {fact.host for fact in self.facts if fact.host and "/" not in fact.host and fact.kind is not Kind.RAS}
        tasks = {fact.node for fact in self.of(Kind.EXIT) if fact.node is not None}
        return max(len(hosts), len(tasks), len(self.hosts)) <= 1

    def never_worked(self) -> list[Row]:
        """Return the rows that wait, if the stuck collective is a group's first and nothing ever completed."""
        rows = [row for row in self.rows if row.waiting and row.seq is not None]
        never = all((row.seq or 0) <= 2 and row.completed is not None and row.completed <= 0 for row in rows)
        return rows if never else []


@dataclass(frozen=True)
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
        """Return whether the job has two ranks; logs of single ranks or of one node do not tell."""
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
        place=prefix.place,
        where=prefix.host or prefix.container,
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
        for fact in parse_text(prefix.text, make):
            yield passages.with_rest(fact, prefix, record.following(6)) if fact.kind is Kind.EXCEPTION else fact


class Collector:
    """Gather the facts of all sources: `read` each (or `feed` it in parts), then `finish`, as often as wanted."""

    def __init__(self) -> None:
        self.evidence = Evidence()
        self._index: dict[tuple[object, ...], Fact] = {}
        self._prefixed: dict[int, set[int]] = {}
        self._task_wrong: set[int] = set()
        self._task_right: set[int] = set()
        self._tasks: dict[int, set[int]] = {}
        self._scanners: dict[int, Scanner] = {}
        self._signs = Signs()
        self._columns: dict[tuple[int, str], list[tuple[int, list[int]]]] = {}  # last lines of one kind, their figures
        self._told_world = 0  # by a launcher or a program, and not by the size of a communicator
        self._quoted: set[int] = set()  # inputs that are no logs
        self._served: set[int] = set()  # inputs in which an engine's workers speak
        self._ended: dict[int, set[int]] = {}  # input -> the ranks that a launcher's table tells
        self._looked = 0

    def read(self, source: Source, progress: Callable[[int], None] | None = None) -> None:
        """Read one source; a damaged or foreign one leaves a note, never an exception."""
        if source.kind != "text":
            self._read_document(source)
            if progress is not None:
                progress(source.size)
            return
        notes, recode, name = self.evidence.notes, Recoder(), source.name
        damaged, blank = False, True
        try:
            for data, broken in blocks(source):
                damaged |= broken
                blank = blank and not data.strip(b"\x00 \t\r\n")
                self.feed(source, recode(data))
                if progress is not None:
                    progress(len(data))
        except OSError as error:
            self._cannot(source, f"{name}: {error.strerror or error}")
        except UnusableInput as error:
            self._cannot(source, error.args[0])
        else:
            if damaged and blank:
                self._cannot(source, tr("{name}: truncated; read as far as it goes", name=name))
            elif damaged:
                notes.append(tr("{name}: truncated; read as far as it goes", name=name))
            elif blank:
                self.evidence.unread[source.index] = tr(
                    "{name}: empty; pass the log that the job's processes write to", name=name
                )
            elif recode.encoding == BINARY:
                self._cannot(source, tr("{name}: binary, no log and no dump; only the text in it was read", name=name))
            elif recode.encoding != "utf-8":
                notes.append(tr("{name}: not UTF-8; read as {encoding}", name=name, encoding=recode.encoding))
        self.feed(source, b"", final=True)
        if source.path is not None and source.path.exists() and source.path.stat().st_size > source.size:
            notes.append(tr("{name}: it grew while it was read; --follow reads on", name=name))

    def _cannot(self, source: Source, why: str) -> None:
        self.evidence.unread[source.index] = why
        self.evidence.notes.append(why)

    def feed(self, source: Source, data: bytes, final: bool = False, settle: bool = False) -> None:
        """Take more bytes of a log; `settle`: nothing follows for now."""
        if source.index not in self._scanners:
            self._scanners[source.index] = Scanner(source)
            self.evidence.sources.append(source)
            self._signs.job |= source.rank is not None or source.one_node
            if (text := quotations.what_it_is(source.name, data)) is not None:
                self._quoted.add(source.index)
                self.evidence.notes.append(text)
        self._signs.read(source.index, data)
        scanner = self._scanners[source.index]
        for record in scanner.feed(data, final, settle):
            self._take(record)
        self.evidence.bytes_read += len(data)
        self._prefixed.setdefault(source.index, set()).update(rank for rank in scanner.ranks if rank < MAX_RANK)
        self._tasks.setdefault(source.index, set()).update(scanner.tasks)
        hosts = set().union(*scanner.places.values()) if scanner.places else set()
        if scanner.places and (len(hosts) < 2 or any(len(there) > 1 for there in scanner.places.values())):
            self._task_wrong.add(source.index)  # each host counts from 0 on, as far as these lines tell
        if final and scanner.cut is not None:
            self.evidence.cut.add(scanner.cut)
        if final and scanner.broken_off and source.index not in self._quoted:
            self.evidence.broken_off[source.index] = tr(
                '{name} breaks off in "{broken_off}"', name=source.name, broken_off=scanner.broken_off[-80:]
            )
        if final and scanner.open_line:
            self.evidence.open_lines.add((source.index, scanner.open_line))
        for pid, rank in scanner.processes.items():
            self.evidence.ranks.process(pid, rank)
        if final:
            self.evidence.ranks.listed(scanner.started, scanner.hosts)
            self._scanners.pop(source.index)
            self.evidence.seen_ranks |= self._prefixed[source.index]

    def _read_document(self, source: Source) -> None:
        evidence = self.evidence
        evidence.sources.append(source)
        self._signs.job = True
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
            self._cannot(source, joined(": ", (source.name, received(said))))
            return
        except (ValueError, RecursionError) as error:
            why = tr(
                "{name}: not readable as JSON ({error}), and no flight-recorder dump", name=source.name, error=error
            )
            self._cannot(source, why)
            return
        servers = plain.get("server_list") if isinstance(plain, dict) else None
        if isinstance(servers, list) and (count := evidence.ranks.table(servers)):
            evidence.stated_world = max(evidence.stated_world or 0, count)
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
            text = tr("{name}: not a flight-recorder dump, and no document that is known here", name=source.name)
            evidence.notes.append(text)

    def _take(self, record: Record) -> None:
        evidence, prefix, index = self.evidence, record.prefix, record.source.index
        if index in self._quoted:
            return
        if prefix.basis == "prefix" and prefix.rank is not None and prefix.rank < MAX_RANK:
            self._prefixed.setdefault(index, set()).add(prefix.rank)
            evidence.seen_ranks.add(prefix.rank)
            if prefix.node:
                (self._task_wrong if prefix.node != prefix.rank else self._task_right).add(index)
            elif prefix.node == 0 != prefix.rank:
                self._task_wrong.add(index)
        if prefix.node is not None and prefix.local_rank:
            self._task_wrong.add(index)  # several ranks speak through one task
        if prefix.host and len(evidence.hosts) < 100:
            evidence.hosts.add(prefix.host)
        if prefix.place and index not in self._served and places.coordinates(prefix.place):
            self._served.add(index)
        text = record.text
        evidence.replicated |= "torchft" in text
        some = "kubectl" in text or "eplica" in text or "://" in text
        evidence.ranks.replicas |= some and _REPLICAS.search(text) is not None
        evidence.several_nodes |= passages.of_several_nodes(text)
        evidence.starts_ranks = evidence.starts_ranks or passages.starts_ranks(text)
        if (agent := passages.agent_of(text)) is not None and len(evidence.agents) < 100:
            evidence.agents.add((index, prefix.host or prefix.container or str(prefix.node or ""), agent))
        evidence.ranks.read(text, prefix, record.source, record.following)
        if "=" in text or ":" in text or " " in text:
            world, nodes, local = passages.sizes_of(text)
            if world is not None and (evidence.stated_world or 1) < world <= MAX_RANK:
                evidence.stated_world = world
            self._told_world = max(self._told_world, world or 0)
            evidence.nodes = max(evidence.nodes or 0, nodes or 0) or None
            evidence.local_size = max(evidence.local_size or 0, local or 0) or None
            if "size" in text or "--" in text:
                evidence.ranks.parallel.update(places.sizes_in(text))
        if record.last and not _WAITS.search(text):
            plain = _NO_COUNT.sub("", text)
            figures = [int(number) for number in re.findall(r"\d{1,15}", plain)]
            self._columns.setdefault((index, re.sub(r"\d+", "", plain)), []).append((record.number, figures))
        facts = list(read_record(record))
        if self._looked < LOOKS and any(fact.kind not in OF_A_HEALTHY_JOB for fact in facts):
            self._looked += 1
            *before, row = record.preceding()
            if quotations.is_printed(before, record.following):
                return
            quoted = "talk" if quotations.is_in_talk(before, record.following) else ""
            quoted = quoted or ("sentence" if quotations.is_introduced(before, row, record.following) else "")
            facts = [fact.clone(quoted=quoted) for fact in facts] if quoted else facts
        for fact in facts:
            self._add(fact)

    def _add(self, fact: Fact) -> None:
        evidence, work = self.evidence, fact.work
        if fact.rank is not None and not 0 <= fact.rank < MAX_RANK:
            fact.rank, fact.rank_basis = None, ""
        if any(peer >= MAX_RANK for peer in fact.peers):
            fact.peers = tuple(peer for peer in fact.peers if peer < MAX_RANK)
        if fact.kind is Kind.LAUNCHER and fact.rank is not None and fact.local_rank is not None:
            self._ended.setdefault(fact.source, set()).add(fact.rank)
        if fact.kind is Kind.JOINED and fact.name == "init":
            evidence.local_size = max(fact.local_rank or 0, evidence.local_size or 0) or None
            evidence.nodes = max(fact.node or 0, evidence.nodes or 0) or None
            if fact.completed and fact.completed > (evidence.stated_world or 1) and fact.completed < MAX_RANK:
                evidence.stated_world = fact.completed
        if _is_of_the_kernel(fact) and not fact.where:
            fact.where = evidence.ranks.kernels.get(fact.source, "")
        if fact.kind is Kind.SCHEDULER and not fact.host and fact.name in ("OOMKilled", "OOMKilling", "Evicted"):
            fact.host = evidence.ranks.pod_of(fact)
        if fact.kind is Kind.SCHEDULER and _OF_CLUSTER.match(fact.host):
            return
        if fact.kind is Kind.GUARD and 1 < (fact.number or 0) < MAX_RANK:
            evidence.stated_world = max(fact.number or 0, evidence.stated_world or 0)
        fact.order = len(evidence.facts)
        key = (
            fact.source,
            fact.kind,
            fact.line if fact.kind is Kind.RETRIED or fact.name in ("restarted", "succeeded") else None,
            fact.rank,
            fact.group_rank,
            fact.local_rank,
            fact.host or (fact.where if _is_of_the_kernel(fact) else ""),
            fact.place,
            fact.pid if fact.kind is not Kind.NCCL_WARN or fact.name == "ib_async" else None,
            work and (work.seq, work.op, work.numel_in, work.shape, work.ran_ms),
            fact.enqueued,
            fact.completed,
            fact.peers,
            fact.number,
            fact.detail if fact.kind is not Kind.NCCL_WARN else fact.detail[:80],
            fact.name,
            fact.after_symptom,
            fact.seconds if fact.kind is not Kind.PROGRESS else fact.line,
            fact.frames if fact.kind is Kind.STACK else None,
        )
        known = self._index.get(key)
        if known is not None:
            known.repeated += 1
            known.until = max(known.until, fact.line)
            known.quoted = known.quoted and fact.quoted
            known.hidden = max(known.hidden, fact.hidden)
            known.frames = known.frames or fact.frames
            for name in ("advice", "waiting", "sides"):  # a panel says more than the line before it
                setattr(known, name, getattr(known, name) or getattr(fact, name))
            if known.group is None:
                known.group = fact.group
            if fact.kind is Kind.ALIVE or fact.name in ("committed", "resumed", "load", *_PASSING.get(fact.kind, ())):
                known.line = fact.line  # what came after what is asked of the last one
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
        _leave_out_quotations(evidence)
        self._leave_out_what_is_of_no_job(evidence)
        evidence.facts = [one for fact in evidence.facts for one in _tasks(fact)]
        self._resolve_ranks(evidence)
        evidence.facts = _last_attempt(evidence)
        evidence.facts = _drop_copies(evidence.facts)
        _drop_earlier_attempts(evidence)
        _drop_other_days(evidence)
        _mark_healed(evidence)
        _mark_ended_well(evidence)
        _mark_pruned(evidence)
        _mark_told_to_end(evidence)
        _mark_traced_anew(evidence)
        _give_to_their_ranks(evidence)
        _give_to_who_crashed(evidence)
        _mark_stepped_over(evidence)
        _mark_evaluated(evidence)
        _mark_moving(evidence)
        _mark_shut_down(evidence)
        _mark_survived(evidence, self._counting())
        _mark_idle(evidence)
        for fact in evidence.of(Kind.RETRIED):  # the job goes on with wrong values
            if incident_text.ENDED_NEVERTHELESS.search(fact.detail):
                fact.kind = Kind.GUARD
        over = {fact.source: max(fact.line, fact.until) for fact in evidence.of(Kind.NOTE, name="barrier_completed")}
        evidence.facts = [  # the ranks that waited at set-up have met
            fact
            for fact in evidence.facts
            if fact.kind is not Kind.STORE_BARRIER or fact.name != "Waiting" or fact.line > over.get(fact.source, -1)
        ]
        over = {fact.source: max(fact.line, fact.until) for fact in evidence.of(Kind.NOTE, name="unstuck")}
        evidence.facts = [
            fact
            for fact in evidence.facts
            if (fact.kind, fact.name) != (Kind.ENGINE_WAIT, "xla") or fact.line > over.get(fact.source, -1)
        ]
        evidence.seen_ranks |= {
            fact.rank for fact in evidence.facts if fact.rank is not None and fact.kind is not Kind.LAUNCHER
        }
        evidence.rows = build_rows(evidence.facts)
        return evidence

    def _counting(self) -> list[Fact]:
        """Return where the last lines of an input count on, whatever they count: three lines before their end."""
        found = []
        for (source, _), rows in self._columns.items():
            last = sorted(rows, key=lambda row: row[0])[-3:]
            columns = list(zip(*(figures for _, figures in last)))
            if len(last) == 3 and any(column[0] < column[1] < column[2] for column in columns):
                found.append(Fact(Kind.NOTE, "", last[0][0], "", source, name="counts on"))
        return found

    def _leave_out_what_is_of_no_job(self, evidence: Evidence) -> None:
        foreign = [fact for fact in evidence.facts if self._signs.foreign(fact)]
        if foreign and all(fact in foreign or fact.kind in OF_A_HEALTHY_JOB | {Kind.STACK} for fact in evidence.facts):
            evidence.facts = [fact for fact in evidence.facts if fact not in foreign]
            evidence.broken_off = {}
            evidence.notes.append(
                tr(
                    "nothing here tells of a distributed job; what a plain program raised, or which of its processes the "
                    "kernel ended, is not explained"
                )
            )

    def _resolve_ranks(self, evidence: Evidence) -> None:
        evidence.ranks = evidence.ranks.settled(
            evidence.facts, evidence.sources, evidence.stated_world, evidence.local_size, self._told_world
        )
        _leave_out_other_worlds(evidence)
        names = self._names(evidence)
        texts = {source.index for source in evidence.sources if source.kind == "text"}
        evidence.source_ranks = {index: rank for index, rank in names.items() if rank is not None and index in texts}
        wrong = self._task_wrong | self._tasks_are_nodes(evidence)
        node_of_srun = bool(evidence.of(Kind.EXIT))
        if self._launchers_are_tasks(evidence):
            node_of_srun, wrong = True, wrong | self._tasks.keys()
        for fact in evidence.facts:
            a_node = fact.source in wrong or fact.local_rank is not None
            if (fact.rank_basis == "task" and a_node) or (
                fact.rank_basis == "srun" and (fact.source in self._task_wrong or node_of_srun)
            ):
                fact.rank, fact.rank_basis = None, ""
            elif fact.rank_basis in ("task", "srun"):
                fact.rank_basis = "launcher"
            place_rank(evidence.ranks, fact, evidence.local_size)
            if (
                fact.rank is None
                and fact.kind not in OF_A_HOST
                and not fact.place
                and names.get(fact.source) is not None
            ):
                fact.rank, fact.rank_basis = names[fact.source], "file"
        inside = WAITING | {Kind.DUMP_RECEIVED, Kind.HEARTBEAT}
        one_node = evidence.one_node
        for fact in filter(_is_of_the_kernel, evidence.facts):
            fact.where = fact.where or evidence.ranks.host_of(fact.file)
        for fact in evidence.of(Kind.EXIT):  # a launcher's table has the local rank and the process
            if fact.pid is not None and fact.local_rank is not None:
                known = evidence.ranks.rank_of(fact, one_node, evidence.local_size)
                if known is not None:
                    evidence.ranks.processes.setdefault(("", fact.pid), known[0])
        for fact in evidence.of(Kind.WORKER_DIED):  # the name of an actor has its rank
            if fact.pid is not None and fact.rank is not None:
                for host in {fact.where, "" if one_node else fact.where}:
                    evidence.ranks.processes.setdefault((host, fact.pid), fact.rank)
        for fact in evidence.facts:
            if fact.rank is not None:
                continue
            if fact.source in evidence.ranks.labelled and (label := LABEL.match(fact.text)) is not None:
                fact.rank, fact.rank_basis = int(label[1]), "prefix"
                continue
            known = evidence.ranks.rank_of(fact, one_node, evidence.local_size)
            if known is not None:
                fact.rank, fact.rank_basis = known
            elif fact.group_rank is not None and fact.kind in inside:
                fact.rank, fact.rank_basis = fact.group_rank, "group"
        trained = {fact.source for fact in evidence.of(*WAITING, Kind.LAUNCHER) if fact.rank is not None}
        if trained - self._served:  # the log of a job, and beside it that of the server that it asks
            for fact in evidence.facts:
                if fact.source in self._served - trained and places.coordinates(fact.place):
                    fact.rank, fact.rank_basis = None, ""

    def _launchers_are_tasks(self, evidence: Evidence) -> bool:
        """Return whether srun started one launcher on each node, which started the ranks there."""
        tasks = {task for numbers in self._tasks.values() for task in numbers}
        ended = evidence.of(Kind.LAUNCHER, Kind.ENDED_BY_LAUNCHER)
        tasks |= {fact.node or 0 for fact in ended if fact.rank_basis == "srun"}
        fits = evidence.nodes is None or max(tasks, default=0) < evidence.nodes
        return evidence.starts_ranks and fits and not self._task_right

    def _tasks_are_nodes(self, evidence: Evidence) -> set[int]:
        """Return the sources whose `N: ` of srun is a node: one task only, or one that several ranks speak through."""
        found = {source for source, tasks in self._tasks.items() if len(tasks) == 1}
        inner: dict[tuple[int, int | None], set[int]] = {}
        for fact in evidence.facts:
            if fact.node is not None and fact.group_rank is not None:
                inner.setdefault((fact.source, fact.node), set()).add(fact.group_rank)
        return found | {source for (source, _), ranks in inner.items() if len(ranks) > 1}

    def _names(self, evidence: Evidence) -> dict[int, int | None]:
        """Find which rank each source belongs to: by its own [rankN] lines if they agree, else by its name."""
        names: dict[int, int | None] = {}
        local: dict[int, set[str]] = {}
        for source in evidence.sources:
            if source.rank is not None and source.rank_is_local and source.kind == "text":
                local.setdefault(source.rank, set()).add(source.name.rsplit("/attempt_", 1)[0])
        for source in evidence.sources:
            own = self._prefixed.get(source.index, set())
            alone = evidence.ranks.speaker(f"#{source.index}") if source.rank is None and len(own) <= 1 else None
            if alone is not None:
                names[source.index] = alone
                pod = source.name.rsplit("/", 1)[-1].partition(".")[0]
                evidence.ranks.hosts.setdefault(pod, set()).add(alone)
            elif source.rank is None:
                names[source.index] = None
            elif len(own) == 1:
                names[source.index] = next(iter(own))
            elif len(own) > 1:
                names[source.index] = None  # a log of several ranks, whatever its name
            elif (ended := self._ended.get(source.index)) and source.rank not in ended:
                names[source.index] = None  # of a node, whose launcher tells of other ranks
            elif (of_file := evidence.ranks.of_file(source)) is not None:
                names[source.index] = None if of_file < 0 else of_file
            elif source.rank_is_local and len(local.get(source.rank, ())) > 1:
                names[source.index] = None  # several nodes have this local rank
            else:
                names[source.index] = source.rank
        return names


def _leave_out_quotations(evidence: Evidence) -> None:
    """Leave out what talks with a model quote, and sentences before a job that works, where nothing else accuses."""
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB | {Kind.STACK}]
    works: dict[int, list[int]] = {}
    for fact in evidence.of(Kind.ALIVE, Kind.PROGRESS):
        works.setdefault(fact.source, []).append(fact.line)
    if accusing and all(
        fact.quoted == "talk"
        or (fact.quoted and len([line for line in works.get(fact.source, ()) if line > max(fact.line, fact.until)]) > 1)
        for fact in accusing
    ):
        evidence.facts = [fact for fact in evidence.facts if not fact.quoted]
        evidence.broken_off = {}
        evidence.notes.append(tr("messages that are quoted, in talks with a model or in sentences, are left out"))


def _leave_out_other_worlds(evidence: Evidence) -> None:
    """Leave without a rank whoever has a higher number in a group than its rank: the group has processes of other jobs.

    An engine's worker in the group over which a trainer sends its weights is such a one: its rank is the engine's.
    """
    others = {
        fact.rank
        for fact in evidence.of(*WAITING, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION)
        if fact.rank is not None and fact.rank_basis == "prefix" and (fact.group_rank or 0) > fact.rank
    }
    for fact in evidence.facts:
        if fact.rank in others and fact.rank_basis == "prefix":
            fact.rank, fact.rank_basis = None, ""
    evidence.seen_ranks -= others
    for process in [process for process, rank in evidence.ranks.processes.items() if rank in others]:
        evidence.ranks.processes[process] = NOBODY


def _is_of_the_kernel(fact: Fact) -> bool:
    return fact.kind in _OF_THE_KERNEL or fact.name in ("host_memory", "segfault")


def _tasks(fact: Fact) -> list[Fact]:
    """Return a fact about several tasks of srun as one for each."""
    if fact.rank_basis != "srun" or len(fact.peers) < 2:
        return [fact]
    return [fact.clone(rank=task, node=task, peers=()) for task in fact.peers]


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
    text = tr(
        "the job was restarted; attempt {last} of the launcher is explained, earlier ones are left out", last=last
    )
    evidence.notes.append(text)
    return [fact for fact in evidence.facts if attempts.get(fact.source, last) == last]


#: Steps of a job that has begun again, more than which show that all its ranks have.
_AGAIN = 2


def _drop_earlier_attempts(evidence: Evidence) -> None:
    """Count as survived what stands before a job's last restart, where something went wrong after it too.

    It is torchrun that tells of one, or a job that has failed, begins again where it was and steps on until then.
    """
    for note in evidence.of(Kind.NOTE, name="restarted"):
        own = [fact for fact in evidence.facts if fact.source == note.source and fact.kind not in OF_A_HEALTHY_JOB]
        if any(fact.line > note.line for fact in own):
            for fact in own:
                fact.kind = fact.kind if fact.line > note.line else Kind.RETRIED
    ended = evidence.of(Kind.EXIT) + evidence.of(Kind.NOTE, name="restarts")
    steps = [one for one in evidence.of(Kind.ALIVE) if one.name == "train" and one.number is not None]
    for note in evidence.of(Kind.NOTE, name="resumed"):
        own = [fact for fact in evidence.facts if fact.source == note.source and fact.kind not in OF_A_HEALTHY_JOB]
        behind = min((fact.line for fact in own if fact.line > note.line), default=0)
        made = {one.number for one in steps if one.source == note.source and note.line < one.line < behind}
        if len(made) > _AGAIN and any(one.source == note.source and one.line <= note.line for one in ended):
            for fact in own:
                fact.kind = fact.kind if fact.line > note.line else Kind.RETRIED


def _drop_other_days(evidence: Evidence) -> None:
    """Count as survived what a kernel's log tells of another day than that on which the job's limits ran out."""
    limits = evidence.of(*EXPIRED)
    expired = [fact.when for fact in limits if fact.when is not None]
    logs = {fact.source for fact in limits}
    for fact in evidence.of(Kind.XID, Kind.NIC, Kind.KERNEL_OOM, Kind.CUDA) if expired else []:
        if (
            fact.when is not None
            and fact.source not in logs
            and all(_DAY < (when - fact.when) % _YEAR < _YEAR - _DAY for when in expired)
        ):
            fact.kind = Kind.RETRIED


def _mark_healed(evidence: Evidence) -> None:
    """Count as survived what torchft's replica groups went on after: each of them has committed a step behind it."""
    last: dict[int, dict[str, int]] = {}
    for fact in evidence.of(Kind.NOTE, name="committed"):
        last.setdefault(fact.source, {})[fact.detail] = fact.line
    for fact in evidence.facts:
        healed = min(last.get(fact.source, {"": 0}).values())
        if fact.kind not in OF_A_HEALTHY_JOB and max(fact.line, fact.until) < healed:
            fact.kind = Kind.RETRIED


#: Exit codes of a process that has been told to end.
_TOLD_CODES = frozenset([143])


#: What a communicator raises, which is of no use from then on.
_OF_NCCL = re.compile(r"\bNCCL error\b|DistBackendError")


def _is_in_collective(fact: Fact) -> bool:
    if fact.kind not in (Kind.EXCEPTION, Kind.STACK):
        return False
    inside = any("distributed_c10d.py" in frame for frame in fact.frames)
    return inside or _OF_NCCL.search(f"{fact.name}: {fact.detail}") is not None


def _loses_gpu(fact: Fact) -> bool:
    """Return whether a rank's GPU obeys its process no more; an engine or an actor, which has a place, starts anew."""
    return fact.kind is Kind.CUDA and fact.rank is not None and not fact.place


_HOUR, _TIMES = 3_600.0, 10  # in which a job that works makes a step: times its longest step before


def _stood(fact: Fact, alive: list[Fact]) -> bool:
    """Return whether a job had made no step for long when its planned end came, by the clocks of its log."""
    if fact.when is None:
        return False
    steps = sorted({one.when for one in alive if one.source == fact.source and one.when and one.when < fact.when})
    longest = max((after - before for before, after in zip(steps, steps[1:])), default=None)
    return longest is not None and fact.when - steps[-1] > max(_HOUR, _TIMES * longest)


def _not_to_excuse(evidence: Evidence) -> list[Fact]:
    """Return what no word of an end, and no step behind it, makes good; a statement for all ranks does.

    Limits that expired for several ranks and waits of several; an exception or a stack in a collective, and what ends a
    communicator or a rank's use of its GPU; a process that its launcher saw fail; a job that had stood for long when
    its time was over. A rank that steps on, or one that is told to end, says nothing about the others.
    """
    waits = evidence.of(*(WAITING | EXPIRED) - {Kind.DUMP_OBSERVED, Kind.STORE_KEY})
    who = {(fact.rank, fact.group_rank, fact.place) for fact in waits} - {(None, None, "")}
    ended = [
        fact
        for fact in evidence.of(Kind.LAUNCHER, Kind.EXIT)
        if (fact.number or 0) > 0 and fact.number not in _TOLD_CODES
    ]
    ended += [fact for fact in evidence.of(Kind.EXCEPTION) if fact.name == "ExecuteUserScriptError"]  # of SageMaker
    inside = [fact for fact in evidence.facts if _is_in_collective(fact) or _loses_gpu(fact)]
    alive = evidence.of(Kind.ALIVE, Kind.PROGRESS)
    ended += [fact for fact in evidence.of(Kind.SCHEDULER, name="TIME LIMIT") if _stood(fact, alive)]
    return (waits if len(who) > 1 else []) + ended + inside


#: Ends that a scheduler, a launcher of all ranks or a runner of tests tells; others may tell of one process, of one
#: host, or of a pipe's last program.
_OF_ALL = re.compile(
    r"worker group successfully finished|Job '[^']+' succeeded|^Job completed successfully|# Out of bounds values : 0 OK|--- PASS: |"
    r"^=+ .*\d+ passed|COMPLETED|\b(?i:job)\b.{0,30}\b(?i:completed)\b|\b[Aa]ll (?:\w+ ){0,2}(?:replicas|ranks|workers|processes|tasks|nodes)\b|"
    r"\b(?i:sweep|study|search|all trials)\b"
)
#: Ends of one process, of one host, or of the processes of one agent.
_OF_ONE = re.compile(r"Process \d+ exits successfully|Reporting training SUCCESS|worker group successfully finished")


#: What a script prints of the program that it has run.
_OF_A_SHELL = re.compile(r"^(?:\+ )?exit(?: code:)? 0$")
#: SageMaker's name of a host, in front of each of its lines.
_OF_SAGEMAKER = re.compile(r"algo-\d+\b")


def _speaker(fact: Fact) -> tuple[int | None, str]:
    return fact.node, fact.where


def _mark_ended_well(evidence: Evidence) -> None:
    """Count everything as survived where the job says at its end that it has succeeded, in every log that accuses.

    It is the launcher, the shell or the scheduler that says so, for all ranks; a rank that has finished proves nothing
    about the others. What one host says is of its own processes, of all of them.
    """
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB]
    ends: dict[int, int] = {}
    processes: dict[tuple[int, int | None, str], set[str]] = {}
    hard = bool(_not_to_excuse(evidence))
    most = max((fact.rank for fact in accusing if fact.rank is not None), default=1) + 1
    raised = any(fact.kind is Kind.EXCEPTION and fact.rank is not None and fact.frames for fact in accusing)
    for fact in evidence.of(Kind.PHASE, Kind.PROGRESS, name="succeeded"):
        job = _JOB_OF_TABLE.match(fact.detail)  # a table may have other jobs too
        if not fact.after_symptom or (hard and _OF_ALL.search(fact.detail) is None):
            continue
        if raised and _OF_A_SHELL.search(fact.detail):  # of the last program of a pipe, perhaps
            continue
        if job is not None and not any(
            re.search(rf"\b{job[1]}\b", one.text) for one in accusing if one.kind is Kind.SCHEDULER
        ):
            continue
        if _OF_ONE.search(fact.detail):
            if any(one.source == fact.source and _speaker(one) != _speaker(fact) for one in accusing):
                continue
            host = _OF_SAGEMAKER.match(fact.detail)
            if host is not None and any(one.rank is not None and host[0] not in one.text for one in accusing):
                continue
            if (of_one := re.search(r"Process (\d+) exits", fact.detail)) is not None:
                there = processes.setdefault((fact.source, *_speaker(fact)), set())
                there.add(of_one[1])
                if len(there) < (evidence.local_size or evidence.stated_world or most):
                    continue
        ends[fact.source] = max(fact.line, ends.get(fact.source, 0))
    if ends and all(fact.line < ends.get(fact.source, 0) for fact in accusing):
        for fact in accusing:
            fact.kind = Kind.RETRIED


#: Kinds and exceptions by which processes end that are told to, and lines around a tuner's word in which they do.
_OF_A_STOP = frozenset({Kind.ENDED_BY_LAUNCHER, Kind.STORE_LOST, Kind.GLOO_CLOSED, Kind.TEARDOWN, Kind.ABORTED})
_STOPPED = re.compile(r"(?:TrialPruned|EarlyStop\w*|TrialStopped|SIGTERMException|SignalException|ChildFailedError)$")
_BEFORE_STOP, _BEHIND_STOP = 50, 200
#: What a process that has been told to end raises SystemExit with.
_EXITS = frozenset(["", "0", "15", "143"])


#: How Ray says of what a worker died, where it was not killed by who started it.
_OF_A_CRASH = re.compile(r"(?i)exit|signal|memory|segv|error|unexpected|node|crash|connection")


def _is_of_a_stop(fact: Fact) -> bool:
    if fact.kind is Kind.EXCEPTION:
        return _STOPPED.search(fact.name) is not None or (fact.name == "SystemExit" and fact.detail in _EXITS)
    if fact.kind is Kind.WORKER_DIED:
        return _OF_A_CRASH.search(fact.detail) is None
    return fact.kind in _OF_A_STOP or (fact.kind in (Kind.LAUNCHER, Kind.EXIT) and fact.number in (-15, 143))


#: Exceptions by which a process ends that is told to, beside those of a trial that is stopped.
_OF_AN_END_TOLD = frozenset(["CancelledError", "KeyboardInterrupt", "GeneratorExit", "SIGTERMException"])
_BY_SIGNAL = re.compile(r"(?i:\bsignal(?:ed|led)?\b.{0,40}\b15\b)|SIGTERM|\bray\.kill\b")


def _is_of_an_end_told(fact: Fact) -> bool:
    name = fact.name.rsplit(".", 1)[-1]
    if fact.kind is Kind.EXCEPTION:
        return (
            name in _OF_AN_END_TOLD
            or _is_of_a_stop(fact)
            or _BY_SIGNAL.search(f"{fact.detail} {fact.text}") is not None
        )
    if fact.kind is Kind.WORKER_DIED and _BY_SIGNAL.search(fact.text):
        return True
    return fact.kind in (Kind.ENGINE_END, Kind.STACK) or _is_of_a_stop(fact)


def _mark_told_to_end(evidence: Evidence) -> None:
    """Count as survived how processes end behind words on an end that was planned, if that is all there is.

    A server that is replaced, or of which fewer are wanted, and a program that ends at its user's wish: it has been
    told so not long before, and trains no further in between.
    """
    told = evidence.of(Kind.NOTE, name="planned end")
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB | {Kind.STACK}]
    if not told or _not_to_excuse(evidence):
        return
    steps = [one for one in evidence.of(Kind.ALIVE, Kind.PROGRESS) if one.name == "train"]
    for fact in accusing:
        notes = [one for one in told if one.source == fact.source and 0 < fact.line - one.line <= _BEHIND_STOP]
        if not _is_of_an_end_told(fact) or not any(
            not any(step.source == note.source and note.line < step.line < fact.line for step in steps)
            for note in notes
        ):
            return
    for fact in accusing:
        fact.kind = Kind.RETRIED


def _mark_pruned(evidence: Evidence) -> None:
    """Count as survived how the processes of a trial end that a tuner has stopped on purpose, if that is all."""
    told = evidence.of(Kind.NOTE, name="pruned")
    told += [fact for fact in evidence.of(Kind.EXCEPTION) if fact.name.endswith("TrialPruned")]
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB | {Kind.STACK}]
    if told and all(
        _is_of_a_stop(fact)
        and any(one.line - _BEFORE_STOP <= fact.line <= max(one.line, one.until) + _BEHIND_STOP
                for one in told if one.source == fact.source)
        for fact in accusing
    ):  # fmt: skip
        for fact in accusing:
            fact.kind = Kind.RETRIED


def _mark_traced_anew(evidence: Evidence) -> None:
    """Count a changed trace of DeepSpeed's, which healthy jobs print too, as survived where the job has gone on."""
    last: dict[int, int] = {}
    for fact in evidence.of(Kind.ALIVE, Kind.PROGRESS, Kind.PHASE):
        last[fact.source] = max(fact.line, last.get(fact.source, 0))
    for fact in evidence.of(Kind.TRACE_INVALIDATED) if not evidence.of(*WAITING, *EXPIRED) else ():
        if max(fact.line, fact.until) < last.get(fact.source, 0):
            fact.kind = Kind.RETRIED


def _mark_stepped_over(evidence: Evidence) -> None:
    """Count everything as survived where the job is seen to step on behind all that a log has against it."""
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB | {Kind.STACK}]
    steps = [
        one for one in evidence.of(Kind.ALIVE, Kind.PROGRESS) if one.after_symptom and one.name in ("train", "generate")
    ]
    sources = {fact.source for fact in steps}
    there = [fact for fact in accusing if fact.source in sources]
    if len({fact.source for fact in there}) != 1 or not _tell_all(there, accusing):
        return
    anew = max((note.line for note in evidence.of(Kind.NOTE, name="restarted")), default=0)  # of all ranks
    if any(fact.source not in sources or fact.line > anew for fact in _not_to_excuse(evidence)):
        return
    last = max(there, key=lambda fact: max(fact.line, fact.until))
    end = max(max(fact.line, fact.until) + 2 * len(fact.frames) for fact in there)
    begun = [one for one in evidence.of(Kind.NOTE, name="resumed") if one.source == last.source and one.line > end]
    after = {one.number for one in steps if begun and one.source == last.source and one.line > begun[-1].line}
    if _steps_on(last, end, steps) or len(after - {None}) > _MANY:
        for fact in accusing:
            fact.kind = Kind.RETRIED


def _mark_evaluated(evidence: Evidence) -> None:
    """Count everything as survived where `resilient_evaluate` says that it ended an evaluation, and the job goes on.

    Each rank says so, and its incidents, which are written by a thread of their own, may stand behind that.
    """
    over = {fact.source: max(fact.line, fact.until) for fact in evidence.of(Kind.NOTE, name="evaluation over")}
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB]
    there = [
        fact
        for fact in accusing
        if fact.line < over.get(fact.source, 0)
        or (fact.source in over and fact.kind is Kind.GUARD and _IN_EVALUATION.search(fact.detail))
    ]
    if there and _tell_all(there, accusing):
        for fact in accusing:
            fact.kind = Kind.RETRIED


def _tell_all(some: Sequence[Fact], accusing: Sequence[Fact]) -> bool:
    """Return whether some facts say all that these do: reports and a launcher's own log repeat what a log has."""
    told = {_told(fact) for fact in some}
    return all(_told(fact) in told for fact in accusing)


def _told(fact: Fact) -> tuple[object, ...]:
    """Return what a fact says, wherever it stands: an incident is in a job's log and in its reports."""
    if fact.kind is Kind.GUARD:  # in another language, perhaps, and at more length
        return fact.kind, fact.peers, *incident_text.call_and_time(fact.detail)
    return fact.kind, fact.rank, fact.number, fact.name, fact.detail


def _give_to_who_crashed(evidence: Evidence) -> None:
    """Count an end by SIGSEGV of which nobody says whose it is for the one rank of which the kernel tells it."""
    ends = [fact for fact in evidence.of(Kind.LAUNCHER, Kind.EXIT) if fact.number == -11]
    when = [fact.when for fact in ends if fact.when is not None]
    crashed = {
        fact.rank
        for fact in evidence.of(Kind.NOTE, name="segfault")
        if fact.when is None or all(abs(fact.when - one) < _DAY for one in when)  # the clocks may be of two time zones
    }
    if len(crashed) == 1 and all(fact.rank in {None, *crashed} for fact in ends):
        for fact in ends:
            fact.rank = fact.rank if fact.rank is not None else next(iter(crashed))


def _give_to_their_ranks(evidence: Evidence) -> None:
    """Count the last line of a traceback for the rank that the traceback is said to be of, whoever prints it."""
    raised = evidence.of(Kind.EXCEPTION)
    told: dict[tuple[int, str], list[Fact]] = {}
    for fact in raised:
        if fact.frames and (fact.rank_basis == "text" or fact.until):
            told.setdefault((fact.source, fact.detail), []).append(fact)
    for fact in raised:
        for one in told.get((fact.source, fact.detail), ()) if not fact.frames else ():
            begin, most = (one.line, 400) if one.rank_basis == "text" else (one.until, 2 * len(one.frames) + 3)
            same = one.name.endswith(fact.name) and begin < fact.line <= begin + most
            if same and fact.rank_basis == "prefix":
                fact.rank, fact.rank_basis = one.rank, one.rank_basis


def _is_of_text(fact: Fact) -> bool:
    """Return whether an exception is of code that a program ran as text, and not of what dataclasses write."""
    *outer, last = fact.frames or ("",)
    ran = all(frame.startswith("<") for frame in outer) or "exec" in outer[-1]
    return last.startswith("<") and ran and " in __" not in last and "<frozen" not in last


def _mark_survived(evidence: Evidence, counting: list[Fact]) -> None:
    """Count as survived what a job went on after: an exception that was caught, a warning of NCCL that only advises.

    An exception was caught where its rank's log says at the end that the training is complete, or says that it tries
    again and the training goes on behind that. Only in inputs that know of no end of a process and of nobody who waits:
    a rank whose lines have no prefix may have raised while another one went on.
    """
    ignored = {(note.source, note.line + 1) for note in evidence.of(Kind.NOTE, name="ignored")}
    unseen = [fact for fact in evidence.of(Kind.EXCEPTION) if (fact.source, fact.line) in ignored]
    for fact in evidence.of(Kind.EXCEPTION):
        last = any(  # the last line of such a traceback, which has a row of its own
            (one.source, one.detail) == (fact.source, fact.detail)
            and one.line <= fact.line <= one.line + 3 * len(one.frames) + 2
            for one in unseen
        )
        if _is_of_text(fact) or last:
            fact.kind = Kind.RETRIED
    anew = {(fact.source, fact.line) for fact in evidence.of(Kind.RETRIED)}
    works = {(one.source, one.line) for one in evidence.of(Kind.ALIVE, Kind.PROGRESS, Kind.PHASE)}
    for fact in evidence.of(Kind.GLOO_CLOSED):  # of a connection that is tried anew, and with which the job goes on
        if (fact.source, fact.line) in anew and any(
            source == fact.source and line > max(fact.line, fact.until) for source, line in works
        ):
            fact.kind = Kind.RETRIED
    passing = _passing(evidence)
    known = {id(fact) for fact in passing}
    if any(fact.kind not in _SURVIVED_WITH and id(fact) not in known for fact in evidence.facts):
        return
    if _not_to_excuse(evidence):
        return
    alive = [f for f in evidence.of(Kind.ALIVE, Kind.PROGRESS, Kind.PHASE) if f.after_symptom]
    alive = [fact for fact in alive if fact.kind is not Kind.PHASE or fact.name == "finished"]
    resumed = evidence.of(Kind.NOTE, name="resumed")
    for fact in passing:
        after = alive + counting if fact.kind in (Kind.ACCUSED, Kind.ENGINE_WAIT) else alive
        if _has_passed(fact, after, resumed) or _is_mended(evidence, fact, alive):
            fact.kind = Kind.RETRIED
    retries = evidence.of(Kind.RETRIED)
    ranked = {fact.source for fact in evidence.facts if fact.rank is not None}
    for fact in evidence.of(Kind.EXCEPTION, Kind.NCCL_WARN, Kind.STORE_TIMEOUT, Kind.KERNEL_OOM):
        end = max(fact.line, fact.until) + 2 * len(fact.frames)  # a frame and its source line
        after = [one for one in alive if one.source == fact.source and one.line > end]
        again = [
            one.line
            for one in retries
            if one.source == fact.source and one.line >= fact.line
            and (one.rank == fact.rank or "all ranks" in one.text or (None in (one.rank, fact.rank) and one.line <= end + 4))
        ]  # fmt: skip
        warned = fact.kind is Kind.NCCL_WARN
        once = fact.kind is Kind.EXCEPTION and fact.until <= fact.line + 3 * len(fact.frames) + 2
        steps = [one for one in after if one.kind is not Kind.PHASE and one.name in ("train", "serve")]
        answers = [one for one in after if one.name in ("serve", "generate") and one.kind is Kind.ALIVE]
        generated = places.is_parent(fact.place) and any('"POST ' in one.text for one in answers)
        # Who prints the steps of the job speaks for all its ranks, which meet in each; one step may still be in flight.
        job = len({one.detail for one in steps}) > 1
        complete = any(
            one.name == "finished" and one.rank in (fact.rank, *[None] * (warned or fact.rank == 0 or job))
            for one in after
        ) or (fact.rank is None and len(answers) > (1 if generated else 2) and answers == after[-len(answers) :])
        flapped = fact.name == "ib_async" and warned and job
        if (
            complete
            or flapped
            or _steps_on(fact, end, alive, once and fact.source not in ranked)
            or (_is_warned(fact) and len({one.detail for one in steps if _speaker(one) == _speaker(fact)}) > 2)
            or _advises(fact)
            and after
            or again
            and any(one.line > again[0] for one in after)
        ):
            fact.kind = Kind.RETRIED


#: A warning of a logger: who prints it has caught what it tells of. Who ships logs calls all of stderr INFO.
_WARNED = re.compile(r"(?:[^a-z\n]{0,60}|\S+ )(?<![A-Za-z])WARN(?:ING)?\b(?!.{0,40}\b(?:ERROR|CRITICAL|FATAL)\b)")


def _is_warned(fact: Fact) -> bool:
    told = f"{fact.name} {fact.detail} {fact.text}"
    return not fact.frames and _WARNED.match(fact.text) is not None and _ENDS_A_RANK.search(told) is None


_CLOCK = re.compile(r"(?<![\d:])\d{1,2}:\d\d(?::\d\d)?(?!\d)")


def _mark_moving(evidence: Evidence) -> None:
    """Count stacks as no sign of a hang where the job's log steps on behind the time at which they were taken."""
    taken = max((fact.detail for fact in evidence.of(Kind.NOTE, name="stacks taken")), default=None)
    stacks = evidence.of(Kind.STACK)
    if taken is None or any(fact.kind not in OF_A_HEALTHY_JOB | {Kind.STACK} for fact in evidence.facts):
        return
    there = {fact.source for fact in stacks}
    steps = [fact for fact in evidence.of(Kind.ALIVE) if fact.source not in there and fact.number is not None]
    clocks = {fact.number: clock[0].zfill(5) for fact in steps if (clock := _CLOCK.search(fact.text))}
    if len([clock for clock in clocks.values() if clock[: len(taken)] > taken]) > 2:
        for fact in stacks:
            fact.kind = Kind.RETRIED


#: What the other processes of an engine say when it has been told to end.
_OF_AN_END = frozenset({Kind.WORKER_DIED, Kind.ENGINE_END, Kind.ENGINE_WAIT})


def _mark_shut_down(evidence: Evidence) -> None:
    """Count as survived what an engine's processes say of each other behind its end in order, if nothing was before."""
    ends: dict[int, int] = {}
    for note in evidence.of(Kind.NOTE, name="shut_down"):
        ends.setdefault(note.source, note.line)
    accusing = [fact for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB | {Kind.TEARDOWN, Kind.STORE_LOST}]
    if all("Parent process exited" in fact.text for fact in accusing):  # a server has been told to end, and says so
        loads = sorted(evidence.of(Kind.NOTE, name="load"), key=lambda note: note.line)
        last = {(note.source, note.detail): note.number for note in loads}
        idle = {source: all(n == 0 for (of, _), n in last.items() if of == source) for source, _ in last}
        for note in evidence.of(Kind.NOTE, name="server_down") + evidence.of(Kind.NOTE, name="http_down"):
            asked = idle.get(note.source) or note.text.startswith("^C")
            if note.name == "server_down" or asked:  # one that hangs is shut down as well
                ends[note.source] = min(note.line, ends.get(note.source, note.line))
    if all(fact.kind in _OF_AN_END and fact.line > ends.get(fact.source, fact.line) for fact in accusing):
        for fact in accusing:
            fact.kind = Kind.RETRIED
        for fact in evidence.of(Kind.STORE_LOST) if accusing else []:
            fact.kind = Kind.RETRIED


#: The loops in which SGLang's schedulers and vLLM's workers wait for work; SGLang's meet in a broadcast there.
_LOOP = re.compile(r" in (?:recv_requests|acquire_read)$")


def _mark_idle(evidence: Evidence) -> None:
    """Count stacks as no sign of a hang where all of them are of an engine that waits for work."""
    stacks = evidence.of(Kind.STACK)
    if all(any(_LOOP.search(frame) for frame in fact.frames) for fact in stacks):
        for fact in stacks:
            fact.kind = Kind.RETRIED


#: Steps behind the first lines of a log without ranks by which its order is taken for that of time.
_MANY = 5


#: What tells that a bar is one of steps: words of training, and none of samples or documents.
_OF_STEPS = re.compile(r"(?i)^[^|%]{0,80}(?<![a-z])(?:train(?:ing)?|epochs?|steps?|iter\w*)\b[^|%]*\d+%\||\bloss\b")
_OF_DATA = re.compile(
    r"(?i)\b(?:data ?set|examples?|docs|documents|shards?|files|samples|tokens|map|rows|prefetch\w*)\b"
)


def _of_steps(bar: Fact) -> bool:
    """Return whether a bar counts steps of training, which all ranks make together."""
    return bar.name == "train" and _OF_STEPS.match(bar.text) is not None and _OF_DATA.search(bar.text) is None


def _steps_on(fact: Fact, end: int, alive: list[Fact], plain: bool = False) -> bool:
    """Return whether the job makes three steps or more after it, which no rank makes alone.

    By the clock that the lines print, else by their place in the log: then a step before it has to show that its order
    is that of time, and not that the logs of ranks stand one behind the other; or there are many and no line of the log
    has a rank (`plain`).
    """
    steps = [one for one in alive if one.kind is Kind.ALIVE and one.source == fact.source and one.number is not None]
    bars = [one for one in alive if one.kind is Kind.PROGRESS and one.source == fact.source and _of_steps(one)]
    steps = steps or [one for one in bars if one.number is not None and one.rank in (None, 0)]
    before = [one.number or 0 for one in steps if one.line < fact.line]
    numbers = [one.number or 0 for one in steps if one.line > end and (one.when or _YEAR) >= (fact.when or 0)]
    timed = fact.when is not None and all(one.when is not None for one in steps)
    if len({*numbers}) <= 2 or numbers != sorted(numbers):
        return False
    begun = plain and not before and not (fact.frames and _ENDS_A_RANK.search(f"{fact.name} {fact.detail}"))
    in_order = max(before, default=MAX_RANK) <= numbers[0] or (begun and len({*numbers}) > _MANY)
    return timed or in_order


#: Errors that few programs catch: a traceback of one is that of the end of a rank, and no warning tells of them.
_ENDS_A_RANK = re.compile(
    r"OutOfMemoryError|CUDA|NCCL|DistBackendError|\bHIP\b|HCCL|killed by signal|exited unexpectedly"
)


def _passing(evidence: Evidence) -> list[Fact]:
    """Return what a job may go on after: stalls, corrected faults, and planned ends with what they ended."""
    found = [fact for fact in evidence.facts if fact.name in _PASSING.get(fact.kind, ())]
    found += [
        fact for fact in evidence.of(Kind.XID) if fact.number in _CORRECTED or "nonfatal" in fact.detail.lower()
    ] + evidence.of(Kind.NIC)
    found += [fact for fact in evidence.of(Kind.KERNEL_OOM) if _NOT_OF_A_JOB.search(fact.detail)]
    planned = {fact.source for fact in found if fact.kind is Kind.SCHEDULER}
    planned |= {fact.source for fact in evidence.of(Kind.NOTE, name="resumed")}
    found += [
        fact
        for fact in evidence.of(Kind.LAUNCHER, Kind.ENDED_BY_LAUNCHER)
        if fact.source in planned and (fact.number == -15 or fact.kind is Kind.ENDED_BY_LAUNCHER)
    ]
    found += [fact for fact in evidence.of(Kind.EXCEPTION) if fact.source in planned and told_to_end(fact)]
    return found


def told_to_end(fact: Fact) -> bool:
    """Return whether an exception says that somebody has told its process to end."""
    name = fact.name.rsplit(".", 1)[-1]
    return name in ("SIGTERMException", "KeyboardInterrupt") or (
        name == "SignalException" and re.search(r"\b(?:15|SIGTERM)\b", fact.detail) is not None
    )


def _has_passed(fact: Fact, alive: list[Fact], resumed: list[Fact]) -> bool:
    """Return whether the job is seen to work after it: of an end, after it has begun again where it was."""
    if fact.kind in _OF_THE_KERNEL:  # in a file of its own the order is not known: then the job has to have finished
        return any(one.line > fact.line if one.source == fact.source else one.name == "finished" for one in alive)
    since: int | None = fact.line
    if fact.kind not in (Kind.ACCUSED, Kind.ENGINE_WAIT):
        since = min((one.line for one in resumed if one.source == fact.source and one.line > fact.line), default=None)
    return since is not None and any(one.source == fact.source and one.line > since for one in alive)


def _is_mended(evidence: Evidence, fact: Fact, alive: list[Fact]) -> bool:
    """Return whether what the kernel tells of is mended by its own words, or not the job's, which ends in steps.

    Of a link that has come up again it has to be the log of the job that tells of the port's fault and goes on.
    """
    steps = [one for one in alive if one.name in ("train", "serve") and one.kind is not Kind.PHASE]
    behind = {one.detail for one in steps if None not in (one.when, fact.when) and (one.when or 0) > (fact.when or 0)}
    if fact.kind is Kind.XID:
        told = re.search(r"\b(?:correct(?:ed|able)|no action needed)\b", fact.detail)
        marked = "New row marked for remapping" in fact.detail and len(behind) > 2
        return fact.number in _CORRECTED and (marked or (told is not None and len({one.detail for one in steps}) > 2))
    if fact.kind is Kind.KERNEL_OOM:
        return _NOT_OF_A_JOB.search(fact.detail) is not None and len(behind) > 2
    seen = evidence.of(Kind.NCCL_WARN, name="ib_async")
    after = [len({one.detail for one in steps if one.source == told.source and one.line > told.line}) for told in seen]
    up = [one for one in evidence.of(Kind.NOTE, name="link_up") if one.source == fact.source and one.line > fact.line]
    return fact.kind is Kind.NIC and min(after, default=0) > 2 and any(fact.detail.startswith(one.detail) for one in up)


def _advises(fact: Fact) -> bool:
    """Return whether a warning of NCCL is of no kind that is known to end a job."""
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
            work = called(facts, fact.rank) if fact.kind is Kind.GLOO_TIMEOUT else None
            rows[fact.rank] = [Row(fact.rank, None, work, waiting=True, basis=fact.rank_basis, facts=[fact])]
    return [row for rank in sorted(rows) for row in rows[rank]]


def called(facts: Iterable[Fact], rank: int) -> Work | None:
    """Return the collective in which a rank's tracebacks and stacks show it (gloo prints no work); None without one."""
    for fact in facts:
        if fact.rank == rank and fact.kind in (Kind.EXCEPTION, Kind.STACK):
            found = collectives_in(fact)
            if found:
                return Work(found[0])
    return None


def collectives_in(fact: Fact) -> list[str]:
    """Return the collectives of `torch.distributed` that are among a fact's frames, outermost first."""
    names = [place[1] for frame in fact.frames if (place := _API.search(frame))]
    return [name for name in names if name not in _NOT_COLLECTIVE]


_API = re.compile(r"distributed_c10d\.py:\d+ in (\w+)")
_NOT_COLLECTIVE = frozenset(
    {"wrapper", "init_process_group", "new_group", "_new_process_group_helper", "destroy_process_group",
     "_store_based_barrier"}
)  # fmt: skip


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
        gathered = [row.work.ratio or 0 for row in evidence.rows if row.work]  # a group has at least so many ranks
        highest = max(highest, max(gathered, default=0) - 1)
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
