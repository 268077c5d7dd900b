"""The likely class of cause, by rules in order of how specific their evidence is; "unknown" when none applies.

Each rule sees all facts and the verdict on the culprits and answers with a class, a confidence and the lines it rests
on. The rules speak of mechanisms, never of one incident.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ncclguard_explain import engines, incident_text
from ncclguard_explain.cause import WORD, Cause
from ncclguard_explain.connections import fabric_errors, own_addresses
from ncclguard_explain.evidence import Evidence, World
from ncclguard_explain.facts import EXPIRED, WAITING, Fact, Kind, Verdict, Work
from ncclguard_explain.failures import (
    deadly_exits,
    follows_from_peers,
    hardware_errors,
    own_exceptions,
    sticky_cuda,
)
from ncclguard_explain.language import Message, tr
from ncclguard_explain.passages import phase_of
from ncclguard_explain.patterns import nccl_error_family


@dataclass
class Finding:
    """A class of cause with its confidence ("high", "medium", "low"), the reason and the lines.

    `action` is the decision, where it follows from the lines alone.
    """

    name: str
    confidence: str
    reason: Message | str
    facts: list[Fact] = field(default_factory=list)
    action: str = ""


@dataclass
class Case:
    """The evidence that a rule may look at."""

    evidence: Evidence
    world: World
    verdict: Verdict

    @property
    def waiting(self) -> list[Fact]:
        return self.evidence.of(*WAITING)

    @property
    def works(self) -> list[Work]:
        return [row.work for row in self.evidence.rows if row.work is not None]

    @property
    def absent(self) -> bool:
        """Return whether a culprit is named because it did not come, not because it failed or differs."""
        rules = ("silence", "counters", "store key", "monitored barrier", "desync report")
        return self.verdict.rule in rules and bool(self.verdict.culprits)

    @property
    def zero_waits_alone(self) -> bool:
        """Return whether rank 0 is the one that waits while others are silent: in a collective that they never call."""
        ranks = {fact.rank for fact in self.waiting}
        return ranks == {0} and bool(self.verdict.culprits) and 0 not in self.verdict.culprits

    def phases(self, *names: str, of_waiting: bool = False) -> list[Fact]:
        """Return what the awaited ranks did last: context lines and stacks that speak of these phases.

        A line without a rank is taken for rank 0's, which prints for the job; it tells nothing about another culprit.
        `of_waiting`: what the ranks that wait did instead.
        """
        waiting = {fact.rank for fact in self.waiting}
        found: list[Fact] = []
        for fact in self.evidence.of(Kind.PROGRESS, Kind.PHASE, Kind.STACK, Kind.EXCEPTION):
            name = fact.name
            if fact.kind in (Kind.STACK, Kind.EXCEPTION):
                name = next((phase for frame in reversed(fact.frames) if (phase := phase_of(frame))), "")
            if name not in names:
                continue
            speaker = fact.rank if fact.rank is not None else 0
            if of_waiting:
                fits = speaker in waiting
            elif self.verdict.culprits:
                fits = speaker in self.verdict.culprits
            else:
                fits = fact.rank is None or fact.rank not in waiting
            if fits:
                found.append(fact)
        return found


Choice = tuple[Iterable[Fact], str, str, str]  # facts, class, confidence, reason


def _first(*choices: Choice) -> Finding | None:
    """Return the first choice that has facts."""
    for facts, name, confidence, reason in choices:
        if found := list(facts):
            return Finding(name, confidence, reason, found)
    return None


def gradient_like(work: Work) -> bool:
    """Return whether a collective looks like a flat gradient bucket: an all-reduce of one long dimension."""
    long = len(work.shape) == 1 and work.shape[0] > 10_000 if work.shape is not None else (work.numel_in or 0) > 10_000
    return work.op in ("ALLREDUCE", "all_reduce", "allreduce") and long


def left_normally(evidence: Evidence, verdict: Verdict) -> bool:
    """Return whether the culprits left by themselves.

    The launcher lists every other rank as failed or ended, or theirs as aborted by the end of a Python process.
    """
    listed = {fact.rank: fact.number for fact in evidence.of(Kind.LAUNCHER) if fact.rank is not None}
    closed = all(fact.kind is Kind.GLOO_CLOSED for fact in verdict.facts)
    ended = bool(evidence.of(Kind.NOTE, name="ended"))
    left = [rank for rank in verdict.culprits if rank not in listed or (ended and listed[rank] == -6)]
    return bool(listed and verdict.culprits) and len(left) == len(verdict.culprits) and closed


def hardware(case: Case) -> Finding | None:
    facts = hardware_errors(case.evidence)
    memory = [fact for fact in facts if fact.name == "host_memory"]
    what = (
        tr("Xid {number}", number=facts[0].number)
        if facts and facts[0].kind is Kind.XID
        else tr("an ECC error or a lost GPU")
    )
    unhealthy = case.evidence.of(Kind.SCHEDULER, name="DeviceUnhealthy")
    return _first(
        (memory, "gpu_hardware", "high", tr("the kernel reports an uncorrectable error of the host's memory")),
        (facts, "gpu_hardware", "high", tr("the driver reports {what}", what=what)),
        (unhealthy, "gpu_hardware", "medium", tr("the scheduler calls a device unhealthy")),
    )


# cudaGetErrorString (CUDA 12) of errors that lie in how a host is set up, not in a program.
UNFIT_DRIVER = (
    "driver version is insufficient", "no kernel image is available", "no CUDA-capable device",
    "system not yet initialized", "system has unsupported display driver", "forward compatibility was attempted",
)  # fmt: skip
OUT_OF_MEMORY = frozenset(["OOMKilled", "OOMKilling", "SystemOOM"])


def machine_taken(case: Case) -> Finding | None:
    """The scheduler or the cluster says that a host failed, was reclaimed, or ran out of memory or time."""
    events = case.evidence.of(Kind.SCHEDULER)
    memory = [f for f in events if f.name in OUT_OF_MEMORY or (f.name == "Evicted" and "memory" in f.detail)]
    gone = [fact for fact in events if fact.name != "TIME LIMIT"]
    crash, taken = "oom_or_crash_other_rank", gone[0].name.lower() if gone else ""
    return _first(
        (memory, crash, "high", tr("the cluster ended a process that used too much memory")),
        (gone, crash, "high", tr("the scheduler took a process or host away ({event})", event=taken)),
        (events if not case.waiting else [], "timeout_too_short", "low", tr("the job's own time limit ended it")),
    )


def guard(case: Case) -> Finding | None:
    """ncclguard's own incident: the class follows from the cause that the ranks agreed on."""
    of_verdict = case.verdict.rule == "ncclguard incident"
    facts = (case.verdict.facts if of_verdict else case.evidence.of(Kind.GUARD))[:1]
    names = {"diverged": "rank_divergence", "failed": "oom_or_crash_other_rank", "lost": "oom_or_crash_other_rank",
             "exited": "rank_divergence", "network": "network_fabric", "late": "slow_rank_side_work"}  # fmt: skip
    known = [fact for fact in facts if fact.name in names and not incident_text.is_from_outside(fact)]
    return _first(
        *(
            (known, names[f.name], "medium", tr("the ranks agreed on the cause {cause}", cause=WORD[Cause(f.name)]))
            for f in known
        )
    )


def shared_memory(case: Case) -> Finding | None:
    words = ("/dev/shm", "shared memory segment", "shared memory (shm)", "insufficient shared memory")
    facts = case.evidence.of(Kind.NCCL_WARN, Kind.EXCEPTION, Kind.DATALOADER)
    found = [f for f in facts if f.name == "shm" or any(word in f.text or word in f.detail for word in words)]
    return _first((found, "shared_memory", "high", tr("shared memory could not be had")))


def iommu(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.NOTE, name="iommu_fault")
    return _first((facts, "p2p_acs_iommu", "high", tr("the IOMMU refused a device's access")))


def transport_mismatch(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.NCCL_WARN, name="size_mismatch") + case.evidence.of(Kind.GLOO_ABORT)
    return _first((facts, "mismatch_shape_or_op", "high", tr("the two ends of one transfer disagree about its size")))


def network(case: Case) -> Finding | None:
    evidence, calm = case.evidence, not case.waiting
    errors = evidence.of(Kind.EXCEPTION, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION)
    family = {id(f): nccl_error_family(f.name + " " + f.text + " " + f.detail) for f in errors}
    errors = [fact for fact in errors if family[id(fact)]]
    family = {id(f): nccl_error_family(f.text + " " + f.detail) for f in errors}

    def of(*names: str) -> list[Fact]:
        warned = [fact for fact in evidence.of(Kind.NCCL_WARN) if fact.name in names]
        return warned + [fact for fact in errors if family[id(fact)] in names]

    fabric = fabric_errors(evidence) + [f for f in errors if family[id(f)] in ("ib", "ib_async") and f.number != 5]
    driver = [f for f in evidence.of(Kind.NCCL_WARN, Kind.CUDA) if any(words in f.detail for words in UNFIT_DRIVER)]
    mesh, nic = evidence.of(Kind.RENDEZVOUS, name="gloo_mesh"), evidence.of(Kind.NIC)
    return _first(
        (mesh, "network_interface", "medium", tr("gloo could not connect the ranks: an address that the peer cannot reach")),
        (fabric, "network_fabric", "high", tr("InfiniBand or RoCE completed with an error; status 5 lines are flushes that follow")),
        (nic, "network_fabric", "high", tr("a network card was reset or lost its link")),
        (of("topology"), "library_bug", "low", tr("ranks disagree about one communicator's topology")),
        (of("duplicate_gpu"), "oom_or_crash_other_rank", "high", tr("two ranks were given one GPU")),
        (driver, "library_bug", "medium", tr("the driver and the CUDA runtime do not fit each other")),
        (of("no_interface"), "network_interface", "high", tr("NCCL found no interface to use")),
        (of("connect"), "network_interface", "medium", tr("a connection was refused or timed out at set-up: an address that the peer cannot reach")),
        (of("p2p"), "p2p_acs_iommu", "medium", tr("GPU peer-to-peer could not be used")),
        (of("oom"), "oom_or_crash_other_rank", "medium", tr("NCCL could not allocate memory on a rank")),
        (of("version"), "library_bug", "medium", tr("ranks load different NCCL versions")),
        (of("closed") if calm else [], "network_fabric", "low", tr("a connection broke in mid-transfer")),
        (own_addresses(evidence), "network_interface", "medium",
         tr("several hosts gave NCCL an address that each has for itself: none reaches the other")),
        (of("system", "internal") if calm else [], "network_interface", "low",
         tr("NCCL failed outside any collective and says no more; between hosts that is most often the "
"chosen interface")),
    )  # fmt: skip


def store(case: Case) -> Finding | None:
    barrier = case.evidence.of(Kind.STORE_BARRIER)[:3] if {f.kind for f in case.waiting} <= {Kind.STORE_BARRIER} else []
    lost = [f for f in case.evidence.of(Kind.STORE_KEY) if "imeout" not in f.detail and "timed out" not in f.detail]
    name = "store_rendezvous"
    # Whoever had stopped, or been ended, before it was not ended by it: the launcher's next try did not come about.
    stopped: dict[int, int] = {}
    for fact in case.evidence.of(*EXPIRED, Kind.ENGINE_WAIT, Kind.EXIT, Kind.LAUNCHER):
        if fact.kind not in (Kind.EXIT, Kind.LAUNCHER) or (fact.number or 0) < 0:
            stopped.setdefault(fact.source, fact.line)
    met = [fact for fact in case.evidence.of(Kind.RENDEZVOUS) if fact.line <= stopped.get(fact.source, fact.line)]
    unknown = case.evidence.of(Kind.NOTE, name="no_address")
    if met and unknown:
        reason = tr("the rendezvous did not complete: no address is known of {host}", host=unknown[0].detail)
        return Finding(name, "high", reason, unknown[:1] + met)
    return _first(
        (met, name, "high", tr("the rendezvous did not complete")),
        (barrier, name, "high", tr("not all ranks came to the barrier that ends init_process_group")),
        (lost, name, "medium", tr("the store was lost while communicators were set up")),
    )


def first_use(case: Case) -> Finding | None:
    rows, size = case.evidence.never_worked(), case.world.size
    if case.verdict.rule == "first collective":
        return Finding("p2p_acs_iommu", "low", case.verdict.reason, case.verdict.facts)
    if case.verdict.culprits or not rows or size is None or not {row.rank for row in rows} >= set(range(size)):
        return None
    facts, never = [row.facts[0] for row in rows], tr("the first collective never completed and all ranks are in it")
    if case.evidence.one_node and size <= 8:
        return Finding("p2p_acs_iommu", "low", tr("{never}: the transport between the GPUs", never=never), facts)
    return Finding("network_interface", "low", tr("{never}: the transport between the nodes", never=never), facts)


# NVIDIA's Xid catalogue: those that an application's own fault raises.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 69})


def ddp_unused(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.UNUSED)
    return _first((facts, "unused_params", "high", tr("DDP says parameters took no part in the loss")))


def crash(case: Case) -> Finding | None:
    evidence, name = case.evidence, "oom_or_crash_other_rank"
    closed = case.verdict.facts if case.verdict.rule == "peer closed" else []
    faults = [fact for fact in evidence.of(Kind.XID) if fact.number in APPLICATION_XIDS]
    loader = [fact for fact in evidence.of(Kind.DATALOADER) if "killed by signal" in fact.detail]
    absent = evidence.of(Kind.FINGERPRINT, name="absent")
    return _first(
        (own_exceptions(evidence), name, "high", tr("a rank raised an exception of its own")),
        (
            engines.accused_of_raising(evidence),
            name,
            "high",
            tr("a tool says that a rank raised, or found NaN in its own values"),
        ),
        (sticky_cuda(evidence), name, "high", tr("a CUDA error of a rank's own kernel surfaced")),
        (evidence.of(Kind.KERNEL_OOM), name, "high", tr("the kernel's out-of-memory killer ended a process")),
        (evidence.of(Kind.WORKER_DIED), name, "medium", tr("a worker process died")),
        (deadly_exits(evidence), name, "high", tr("a rank was ended by a signal")),
        (evidence.of(Kind.RAS, name="dead"), name, "medium", tr("a process is dead by NCCL's RAS network")),
        (closed, name, "medium", tr("a process closed its connections")),
        (faults, name, "medium", tr("the driver stopped a faulting application")),
        (absent, name, "medium", tr("a peer was absent from the check of collectives")),
        (loader, name, "medium", tr("a data-loader worker was killed")),
    )


def differing(case: Case) -> Finding | None:
    """Ranks in different collectives: which difference says whether data, code path or gradients diverged."""
    if len(case.verdict.sides) < 2:
        return None
    facts = [f for f in case.evidence.of(Kind.FINGERPRINT) if f.name != "absent" and f.work is not None]
    works = [fact.work for fact in facts if fact.work is not None]
    if len({(work.op, work.shape, work.dtype) for work in works}) < 2:
        rows = [row for row in case.evidence.rows if row.waiting and row.work and row.work.op and row.facts]
        facts = [row.facts[0] for row in rows]
        works = [row.facts[0].work or row.work for row in rows if row.work is not None]
    told = "flight recorder" in case.verdict.rule or case.verdict.rule == "ncclguard incident"
    calls = {text.replace("(", " ").split()[0] for text, _ in case.verdict.sides}
    sides = {text for text, _ in case.verdict.sides}
    if told and len({text.partition(" of group ")[0] for text in sides}) == 1 < len(sides):
        return Finding(
            "rank_divergence", "high", tr("ranks made the same call on different groups"), facts or case.verdict.facts
        )
    if len({work.op for work in works}) > 1 or (told and len(calls) > 1):
        return Finding("rank_divergence", "high", tr("ranks issued different operations at the same point"), facts)
    if len({work.seq for work in works}) > 1:
        return Finding("rank_divergence", "high", tr("ranks issued different numbers of collectives"), facts)
    if works and all(gradient_like(work) for work in works):
        reason = tr("gradient buckets differ in size: some ranks produced no gradient for a part of the model")
        return Finding("unused_params", "medium", reason, facts)
    flat = all(work.shape is None or len(work.shape) == 1 for work in works)
    if works and flat and all("_BASE" in (work.op or "") or "REDUCE_SCATTER" in (work.op or "") for work in works):
        reason = tr("ranks gather different parameters: they run different modules")
        return Finding("rank_divergence", "medium", reason, facts)
    shapes = {found[0] for text, _ in case.verdict.sides if (found := re.search(r"\[[^\]]*\]", text))}
    reason = tr("one operation, tensors of different shapes")
    if len(case.verdict.sides) > 1 and len(shapes) == 1:
        reason = tr("one operation of one shape, with another dtype, reduce op or source")
    return Finding("mismatch_shape_or_op", "medium", reason, facts or case.verdict.facts)


def recorder(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.RECORDER) if "MISMATCH" in fact.name and "STATE" not in fact.name]
    return _first((facts, "mismatch_shape_or_op", "medium", tr("torch's flight-recorder analyser found a mismatch")))


def divergence(case: Case) -> Finding | None:
    evidence, name = case.evidence, "rank_divergence"
    if case.verdict.rule == "parameters":
        return Finding(name, "high", case.verdict.reason, case.verdict.facts)
    raised = [fact for fact in evidence.of(Kind.EXCEPTION) if fact.rank in case.verdict.culprits]
    sat = raised if case.verdict.rule == "counters" and any(fact.frames for fact in raised) else []
    stacks: dict[int, str] = {}
    for fact in evidence.of(Kind.STACK):
        if fact.rank is not None and fact.frames:
            stacks.setdefault(fact.rank, phase_of(" ".join(fact.frames)) or fact.frames[-1])
    apart = evidence.of(Kind.STACK) if len(set(stacks.values())) > 1 else []
    trace = evidence.of(Kind.TRACE_INVALIDATED)
    return _first(
        (trace, name, "medium", tr("DeepSpeed's ZeRO-3 trace changed: the modules that run depend on the batch")),
        (sat, name, "medium", tr("the ranks that are behind sat in another collective")),
        (apart, name, "low", tr("the stacks of the ranks are in different places")),
    )


def peer_gone(case: Case) -> Finding | None:
    evidence, closed = case.evidence, case.evidence.of(Kind.GLOO_CLOSED)
    remote = [fact for fact in evidence.of(Kind.ASYNC_ERROR) if "remote process exited" in fact.text]
    if left_normally(evidence, case.verdict) and not (remote and not closed):
        reason = tr("a rank left normally while its peers went on: it made fewer calls")
        return Finding("rank_divergence", "low", reason, closed)
    alone = not evidence.of(Kind.GLOO_TIMEOUT, Kind.TIMEOUT, Kind.BLOCKING, Kind.BARRIER_MISSING)
    name = "oom_or_crash_other_rank"
    return _first(
        (remote if not closed else [], name, "low", tr("a peer's process ended, or the network between them broke")),
        (closed if alone else [], name, "low", tr("a peer's connections closed: its process ended")),
    )


def first_exit(case: Case) -> Finding | None:
    verdict = case.verdict
    return _first(
        (verdict.facts if verdict.rule == "first exit" else [], "oom_or_crash_other_rank", "low", verdict.reason)
    )


def teardown(case: Case) -> Finding | None:
    beats = case.evidence.of(Kind.HEARTBEAT) if not case.waiting and case.phases("finished", "checkpoint") else []
    return _first((beats, "library_bug", "low", tr("training was over; only the watchdog's own heartbeat complains")))


TINY = 8  # elements: a flag or a metric, not data
SHORT_LIMIT_MS = 120_000
DEFAULT_LIMIT_S = 1500.0  # a little under torch's 30 minutes, where no limit is printed


def _counting(evidence: Evidence) -> list[Fact]:
    """Return the last lines of programs that count on towards a number that they have not reached."""
    series: dict[tuple[object, ...], list[Fact]] = {}
    for fact in sorted(evidence.of(Kind.NOTE, name="count"), key=lambda fact: (fact.source, fact.line)):
        series.setdefault((fact.source, fact.rank, fact.detail, fact.completed), []).append(fact)
    told = {key: [fact.number or 0 for fact in facts] for key, facts in series.items()}
    return [series[key][-1] for key, numbers in told.items() if len(set(numbers)) > 2 and numbers == sorted(numbers)]


def still_at_work(case: Case) -> Finding | None:
    """The awaited process worked on when the limit ran out: by its log it comes nearer to the end, step by step."""
    found = [fact for fact in _counting(case.evidence) if fact.rank is not None and fact.rank in case.verdict.culprits]
    found = case.verdict.facts if case.verdict.rule == "unfinished" else found
    if not case.verdict.culprits and not case.waiting:  # a server, for the answer of which another program waited
        gave_up = case.evidence.of(Kind.ENGINE_WAIT) + [
            fact for fact in case.evidence.of(Kind.EXCEPTION) if "imeout" in fact.name or "imed out" in fact.detail
        ]
        clients = {fact.source for fact in gave_up}
        found = [f for f in _counting(case.evidence) if clients and f.source not in clients and f.after_symptom]
    elif not case.absent and case.verdict.rule != "unfinished":
        return None
    reason = tr("the awaited process was still at work when the limit ran out")
    return _first((found, "timeout_too_short", "medium", reason))


def side_work(case: Case) -> Finding | None:
    """One rank busy with something the others do not do: saving, preprocessing, evaluating, uploading."""
    if not case.waiting and case.verdict.rule not in ("stacks", "watchdog") or case.zero_waits_alone:
        return None
    named = bool(case.verdict.culprits)
    prompts = case.evidence.of(Kind.NOTE, name="debugger") if case.absent else []
    if named and (locks := case.phases("lock")):
        reason = tr("a rank waits for the lock of a file, which may be left from a process that is gone")
        return Finding("slow_rank_side_work", "medium", reason, locks, "fix-environment")
    loader = case.evidence.of(Kind.DATALOADER) + case.phases("loader")
    return _first(
        (case.phases("preprocess"), "slow_rank_side_work", "medium", tr("a rank was still preprocessing data while the others waited")),
        (prompts, "rank_divergence", "medium", tr("a debugger's prompt waits for somebody")),
        (case.phases("skipped") if named else [], "rank_divergence", "medium", tr("a rank says that it returned early")),
        (case.phases("compile") if named else [], "slow_rank_side_work", "medium", tr("a rank was compiling while the others waited")),
        (case.phases("checkpoint"), "checkpoint_io", "medium", tr("a rank was saving while the others waited")),
        (loader, "dataloader_stall", "medium", tr("the data loader complained or was busy just before the stall")),
        (case.phases("logger"), "slow_rank_side_work", "medium", tr("a rank was starting its experiment logger")),
    )  # fmt: skip


def main_only(case: Case) -> Finding | None:
    if case.verdict.rule == "alone":
        facts = case.phases("upload", "checkpoint", "evaluate", "logger", "generate") + case.verdict.facts
        reason = tr("one rank waits alone: a collective inside a branch that the other ranks do not take")
        return Finding("rank_divergence", "medium", reason, facts)
    if not case.zero_waits_alone or case.verdict.rule != "silence":
        return None
    facts = case.phases("upload", "checkpoint", "evaluate", "logger", of_waiting=True)
    reason = tr("rank 0 waits alone: a collective inside a main-process-only branch")
    return Finding("rank_divergence", "medium" if facts else "low", reason, facts + case.waiting[:1])


def unequal(case: Case) -> Finding | None:
    """The absent rank goes on training: the ranks have different numbers of batches."""
    if not case.absent:
        return None
    told: dict[int, int] = {}
    for fact in case.evidence.of(Kind.NOTE, name="batches"):
        if fact.rank is not None:
            told.setdefault(fact.rank, fact.number or 0)
    others = {number for rank, number in told.items() if rank not in case.verdict.culprits}
    apart = [f for f in case.evidence.of(Kind.NOTE, name="batches") if f.rank in case.verdict.culprits]
    apart = [fact for fact in apart if len(others) == 1 and told[fact.rank or 0] not in others]
    short = [fact for fact in case.evidence.of(Kind.NOTE, name="no_more")]
    short = short if {fact.rank for fact in short} == {*case.verdict.culprits} else []
    bars = case.phases("train")
    first = min((fact.line for fact in case.waiting), default=0)
    files = {fact.file for fact in case.waiting[:1]}
    later = [fact for fact in bars if fact.after_symptom and fact.line > first and fact.file in files]
    end = [fact for fact in bars if (fact.number or 0) >= 90]
    tiny = any((work.numel_in or 99) <= TINY or work.shape in ((1,), ()) for work in case.works)
    return _first(
        (short, "unequal_batches", "high", tr("the awaited rank had no more batches")),
        (apart, "unequal_batches", "medium", tr("the awaited rank has another number of batches than the others")),
        (later if end or tiny else [], "unequal_batches", "medium",
         tr("the absent rank's progress bar goes on after the timeout: it has more batches")),
        (end if tiny else [], "unequal_batches", "low",
         tr("a one-element collective at the end of an epoch: ranks may have different numbers of batches")),
    )  # fmt: skip


def zero_alone_missing(case: Case) -> Finding | None:
    """Return whether everybody waits for rank 0: the rank that does what only the main process does."""
    if case.verdict.culprits != (0,) or not case.absent:
        return None
    tiny = any((w.numel_in or 99) <= TINY or (w.shape is not None and len(w.shape) <= 1) for w in case.works)
    many = len({fact.rank for fact in case.waiting}) >= 2 or tiny or case.verdict.rule == "store key"
    busy, name = case.phases("evaluate", "upload", "generate", "load"), "slow_rank_side_work"
    reason = tr("all ranks but rank 0 wait: it does work that only the main process does")
    return _first((busy, name, "medium", tr("rank 0 was busy with work of its own while the others waited"))) or (
        Finding(name, "low", reason, case.waiting[:3]) if many else None
    )


def too_short(case: Case) -> Finding | None:
    limits = [work.timeout_ms for work in case.works if work.timeout_ms]
    limits += [int(f.seconds * 1000) for f in case.evidence.of(Kind.GLOO_TIMEOUT, Kind.BARRIER_MISSING) if f.seconds]
    if not limits or max(limits) >= SHORT_LIMIT_MS or not case.absent:
        return None
    alive = [fact for fact in case.phases("train", "evaluate", "preprocess", "generate") if fact.after_symptom]
    reason = tr("the limit was {seconds:g} s and the absent rank went on working", seconds=max(limits) / 1000)
    return _first((alive, "timeout_too_short", "low", reason))


def long_wait(case: Case) -> Finding | None:
    """A phase that has been going on for as long as the timeout, on whatever rank."""
    limits = {work.timeout_ms / 1000 for work in case.works if work.timeout_ms}
    limits |= {fact.seconds for fact in case.evidence.of(Kind.STORE_TIMEOUT, Kind.STORE_KEY) if fact.seconds}
    phases, least = ("preprocess", "evaluate", "generate", "load", "upload"), 0.9 * min(limits or {DEFAULT_LIMIT_S})
    busy = [f for f in case.evidence.of(Kind.PROGRESS) if f.name in phases and f.seconds and f.seconds >= least]
    return _first((busy, "slow_rank_side_work", "medium", tr("one rank's work took as long as the others' limit")))


def named_by_tool(case: Case) -> Finding | None:
    """A tool named who is missing; what that proves is in its table."""
    rule = case.verdict.rule.removeprefix("tool: ")
    if rule not in engines.ACCUSED or not (case.verdict.culprits or case.verdict.places):
        return None
    meaning = engines.ACCUSED[rule]
    pending = case.evidence.of(Kind.NOTE, name="unschedulable")
    if rule == "barrier" and pending:
        reason = tr("the cluster has no node for a process of the job")
        return Finding("store_rendezvous", "medium", reason, pending, "fix-environment")
    busy = case.phases("compile", "preprocess") if meaning.name == "unknown" and case.verdict.culprits else []
    if busy:
        return Finding("slow_rank_side_work", "medium", case.verdict.reason, busy)
    if case.verdict.cause is Cause.DIVERGED:
        return Finding("rank_divergence", "medium", case.verdict.reason, case.verdict.facts, "fix-code")
    return Finding(meaning.name, "medium", case.verdict.reason, case.verdict.facts, meaning.action)


def environment(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.ENVIRONMENT)
    if not facts:
        return None
    meaning = engines.ENVIRONMENT[facts[0].name]
    return Finding(meaning.name, "high", meaning.what, [f for f in facts if f.name == facts[0].name], "fix-environment")


def quoted(case: Case) -> Finding | None:
    """A parent quotes the exception of a worker that it does not name."""
    facts = [f for f in case.evidence.of(Kind.ENGINE_END, name="echo") if not follows_from_peers("", f.detail)]
    return _first((facts, "oom_or_crash_other_rank", "medium", tr("an engine quotes the exception of a worker")))


def waits(case: Case) -> Finding | None:
    """An engine's wait ran out: that accuses nobody."""
    facts = case.evidence.of(Kind.ENGINE_WAIT)
    found = [fact for fact in facts if fact.name in engines.WAITS]
    return Finding("unknown", "low", engines.WAITS[found[0].name], found) if found else None


RULES: tuple[Callable[[Case], Finding | None], ...] = (
    hardware, environment, shared_memory, machine_taken, named_by_tool, ddp_unused, iommu, transport_mismatch, crash,
    quoted, differing, recorder, network,
    store, guard, long_wait, side_work, main_only, unequal, divergence, still_at_work, too_short, zero_alone_missing, teardown,
    first_use, peer_gone, waits, first_exit,
)  # fmt: skip


def classify(evidence: Evidence, world: World, verdict: Verdict) -> Finding:
    """Return the first class whose rule applies, else "unknown"."""
    case = Case(evidence, world, verdict)
    if verdict.rule == "ncclguard incident" and any(map(incident_text.is_from_outside, verdict.facts)):
        return Finding("unknown", "low", tr("the job was ended from outside"))
    if verdict.rule == "ncclguard inquiry":  # what broke then is a consequence
        return Finding("slow_rank_side_work", "medium", tr("the rank that was awaited was at work of its own"))
    for rule in RULES:
        finding = rule(case)
        if finding is not None:
            return finding
    return Finding("unknown", "low", tr("nothing in the inputs tells the cause"))
