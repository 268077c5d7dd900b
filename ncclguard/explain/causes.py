"""The likely class of cause, by rules in order of how specific their evidence is; "unknown" when none applies.

Each rule sees all facts and the verdict on the culprits and answers with a class, a confidence and the lines it rests
on. The rules speak of mechanisms, never of one incident.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ncclguard.explain.context import phase_of
from ncclguard.explain.culprits import deadly_exits, hardware_errors, own_exceptions, sticky_cuda
from ncclguard.explain.evidence import Evidence, World
from ncclguard.explain.facts import WAITING, Fact, Kind, Verdict, Work
from ncclguard.explain.patterns import nccl_error_family


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


def hardware(case: Case) -> Finding | None:
    facts = hardware_errors(case.evidence)
    if facts:
        what = f"Xid {facts[0].number}" if facts[0].kind is Kind.XID else "an ECC error or a lost GPU"
        return Finding("gpu_hardware", "high", f"the driver reports {what}", facts)
    unhealthy = [fact for fact in case.evidence.of(Kind.SCHEDULER) if fact.name == "DeviceUnhealthy"]
    return Finding("gpu_hardware", "medium", "the scheduler calls a device unhealthy", unhealthy) if unhealthy else None


# cudaGetErrorString (CUDA 12) of errors that lie in how a host is set up, not in a program.
UNFIT_DRIVER = (
    "driver version is insufficient",
    "no kernel image is available",
    "no CUDA-capable device",
    "system not yet initialized",
    "system has unsupported display driver",
    "forward compatibility was attempted",
)
OUT_OF_MEMORY = frozenset(["OOMKilled", "OOMKilling", "SystemOOM"])


def machine_taken(case: Case) -> Finding | None:
    """The scheduler or the cluster says that a host failed, was reclaimed, or ran out of memory or time."""
    events = case.evidence.of(Kind.SCHEDULER)
    memory = [
        fact for fact in events if fact.name in OUT_OF_MEMORY or (fact.name == "Evicted" and "memory" in fact.detail)
    ]
    if memory:
        return Finding(
            "oom_or_crash_other_rank", "high", "the cluster ended a process that used too much memory", memory
        )
    gone = [fact for fact in events if fact.name != "TIME LIMIT"]
    if gone:
        return Finding(
            "oom_or_crash_other_rank",
            "high",
            f"the scheduler took a process or host away ({gone[0].name.lower()})",
            gone,
        )
    limit = [fact for fact in events if fact.name == "TIME LIMIT"]
    return (
        Finding("timeout_too_short", "low", "the job's own time limit ended it", limit)
        if limit and not case.waiting
        else None
    )


def guard(case: Case) -> Finding | None:
    """ncclguard's own incident: the class follows from the cause that the ranks agreed on."""
    facts = case.evidence.of(Kind.GUARD)
    names = {"diverged": "rank_divergence", "failed": "oom_or_crash_other_rank", "lost": "oom_or_crash_other_rank",
             "exited": "rank_divergence", "network": "network_fabric", "late": "slow_rank_side_work"}  # fmt: skip
    if not facts or facts[0].name not in names:
        return None
    return Finding(names[facts[0].name], "medium", f"the ranks agreed on the cause {facts[0].name}", facts[:1])


def shared_memory(case: Case) -> Finding | None:
    words = ("/dev/shm", "shared memory segment", "shared memory (shm)", "insufficient shared memory")
    facts = [
        f
        for f in case.evidence.of(Kind.NCCL_WARN, Kind.EXCEPTION, Kind.DATALOADER)
        if f.name == "shm" or any(word in f.text or word in f.detail for word in words)
    ]
    return Finding("shared_memory", "high", "shared memory could not be had", facts) if facts else None


def iommu(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.NOTE) if fact.name == "iommu_fault"]
    return Finding("p2p_acs_iommu", "high", "the IOMMU refused a device's access", facts) if facts else None


def transport_mismatch(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.NCCL_WARN) if fact.name == "size_mismatch"]
    facts += case.evidence.of(Kind.GLOO_ABORT)
    return (
        Finding("mismatch_shape_or_op", "high", "the two ends of one transfer disagree about its size", facts)
        if facts
        else None
    )


def network(case: Case) -> Finding | None:
    mesh = [fact for fact in case.evidence.of(Kind.RENDEZVOUS) if fact.name == "gloo_mesh"]
    if mesh:
        return Finding(
            "network_interface",
            "medium",
            "gloo could not connect the ranks: an address that the peer cannot reach",
            mesh,
        )
    warnings = case.evidence.of(Kind.NCCL_WARN)
    errors = [
        f
        for f in case.evidence.of(Kind.EXCEPTION, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION)
        if nccl_error_family(f.name + " " + f.text + " " + f.detail)
    ]
    families = [(fact, fact.name) for fact in warnings] + [
        (fact, nccl_error_family(fact.text + " " + fact.detail) or "") for fact in errors
    ]

    def of(*names: str) -> list[Fact]:
        return [fact for fact, family in families if family in names]

    primary = [fact for fact in of("ib", "ib_async") if fact.number != 5]
    if primary:
        return Finding(
            "network_fabric",
            "high",
            "InfiniBand or RoCE completed with an error; status 5 lines are flushes that follow",
            primary,
        )
    if case.evidence.of(Kind.NIC):
        return Finding(
            "network_fabric", "high", "a network card was reset or lost its link", case.evidence.of(Kind.NIC)
        )
    if of("topology"):
        return Finding("library_bug", "low", "ranks disagree about one communicator's topology", of("topology"))
    if of("duplicate_gpu"):
        return Finding("oom_or_crash_other_rank", "high", "two ranks were given one GPU", of("duplicate_gpu"))
    unfit = [
        fact
        for fact in case.evidence.of(Kind.NCCL_WARN, Kind.CUDA)
        if any(words in fact.detail for words in UNFIT_DRIVER)
    ]
    if unfit:
        return Finding("library_bug", "medium", "the driver and the CUDA runtime do not fit each other", unfit)
    if of("no_interface"):
        return Finding("network_interface", "high", "NCCL found no interface to use", of("no_interface"))
    if of("connect"):
        return Finding(
            "network_interface",
            "medium",
            "a connection was refused or timed out at set-up: an address that the peer cannot reach",
            of("connect"),
        )
    if of("p2p"):
        return Finding("p2p_acs_iommu", "medium", "GPU peer-to-peer could not be used", of("p2p"))
    if of("oom"):
        return Finding("oom_or_crash_other_rank", "medium", "NCCL could not allocate memory on a rank", of("oom"))
    if of("version"):
        return Finding("library_bug", "medium", "ranks load different NCCL versions", of("version"))
    if of("closed") and not case.waiting:
        return Finding("network_fabric", "low", "a connection broke in mid-transfer", of("closed"))
    setup = of("system", "internal")
    if setup and not case.waiting:
        return Finding(
            "network_interface",
            "low",
            "NCCL failed outside any collective and says no more; between hosts that is most often the chosen "
            "interface",
            setup,
        )
    return None


def store(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.RENDEZVOUS)
    if facts:
        return Finding("store_rendezvous", "high", "the rendezvous did not complete", facts)
    barrier = case.evidence.of(Kind.STORE_BARRIER)
    if barrier and all(fact.kind is Kind.STORE_BARRIER for fact in case.waiting):
        return Finding(
            "store_rendezvous", "high", "not all ranks came to the barrier that ends init_process_group", barrier[:3]
        )
    lost = [f for f in case.evidence.of(Kind.STORE_KEY) if "imeout" not in f.detail and "timed out" not in f.detail]
    if lost:
        return Finding("store_rendezvous", "medium", "the store was lost while communicators were set up", lost)
    return None


def first_use(case: Case) -> Finding | None:
    if case.verdict.rule == "first collective":
        return Finding("p2p_acs_iommu", "low", case.verdict.reason, case.verdict.facts)
    rows = [row for row in case.evidence.rows if row.waiting and row.seq is not None]
    nothing = bool(rows) and all(
        (row.seq or 0) <= 2 and row.completed is not None and row.completed <= 0 for row in rows
    )
    if (
        nothing
        and not case.verdict.culprits
        and case.world.size is not None
        and case.world.size <= 8
        and {row.rank for row in rows} >= set(range(case.world.size))
    ):
        return Finding(
            "p2p_acs_iommu",
            "low",
            "the first collective never completed and all ranks are in it: the transport between the GPUs",
            [row.facts[0] for row in rows],
        )
    return None


# NVIDIA's Xid catalogue: those that an application's own fault raises.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 69})


def ddp_unused(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.UNUSED)
    return Finding("unused_params", "high", "DDP says parameters took no part in the loss", facts) if facts else None


def crash(case: Case) -> Finding | None:
    evidence = case.evidence
    for facts, sure, reason in (
        (own_exceptions(evidence), "high", "a rank raised an exception of its own"),
        (sticky_cuda(evidence), "high", "a CUDA error of a rank's own kernel surfaced"),
        (evidence.of(Kind.KERNEL_OOM), "high", "the kernel's out-of-memory killer ended a process"),
        (evidence.of(Kind.WORKER_DIED), "medium", "a worker process died"),
        (deadly_exits(evidence), "high", "a rank was ended by a signal"),
        ([f for f in evidence.of(Kind.RAS) if f.name == "dead"], "medium", "a process is dead by NCCL's RAS network"),
        (
            case.verdict.facts if case.verdict.rule == "peer closed" else [],
            "medium",
            "a process closed its connections",
        ),
        (
            [f for f in evidence.of(Kind.XID) if f.number in APPLICATION_XIDS],
            "medium",
            "the driver stopped a faulting application",
        ),
        (
            [f for f in evidence.of(Kind.FINGERPRINT) if f.name == "absent"],
            "medium",
            "a peer was absent from the check of collectives",
        ),
        (
            [f for f in evidence.of(Kind.DATALOADER) if "killed by signal" in f.detail],
            "medium",
            "a data-loader worker was killed",
        ),
    ):
        if facts:
            return Finding("oom_or_crash_other_rank", sure, reason, facts)
    return None


def differing(case: Case) -> Finding | None:
    """Ranks in different collectives: which difference says whether data, code path or gradients diverged."""
    facts = [f for f in case.evidence.of(Kind.FINGERPRINT) if f.name != "absent" and f.work is not None]
    if len({(f.work.op, f.work.shape, f.work.dtype) for f in facts if f.work}) < 2:
        facts = [row.facts[0] for row in case.evidence.rows if row.waiting and row.work and row.work.op and row.facts]
    if len(case.verdict.sides) < 2:
        return None
    works = [fact.work for fact in facts if fact.work is not None]
    recorded = "flight recorder" in case.verdict.rule
    if len({work.op for work in works}) > 1 or (
        recorded and len({text.split()[0] for text, _ in case.verdict.sides}) > 1
    ):
        return Finding("rank_divergence", "high", "ranks issued different operations at the same point", facts)
    if len({work.seq for work in works}) > 1:
        return Finding("rank_divergence", "high", "ranks issued different numbers of collectives", facts)
    if works and all(gradient_like(work) for work in works):
        return Finding(
            "unused_params",
            "medium",
            "gradient buckets differ in size: some ranks produced no gradient for a part of the model",
            facts,
        )
    flat = all(work.shape is None or len(work.shape) == 1 for work in works)
    if works and flat and all("_BASE" in (work.op or "") or "REDUCE_SCATTER" in (work.op or "") for work in works):
        return Finding(
            "rank_divergence", "medium", "ranks gather different parameters: they run different modules", facts
        )
    return Finding(
        "mismatch_shape_or_op", "medium", "one operation, tensors of different shapes", facts or case.verdict.facts
    )


def recorder(case: Case) -> Finding | None:
    facts = [fact for fact in case.evidence.of(Kind.RECORDER) if "MISMATCH" in fact.name and "STATE" not in fact.name]
    return (
        Finding("mismatch_shape_or_op", "medium", "torch's flight-recorder analyser found a mismatch", facts)
        if facts
        else None
    )


def divergence(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.TRACE_INVALIDATED)
    if facts:
        return Finding(
            "rank_divergence",
            "medium",
            "DeepSpeed's ZeRO-3 trace changed: the modules that run depend on the batch",
            facts,
        )
    if case.verdict.rule == "counters" and any(
        f.kind is Kind.EXCEPTION and f.rank in case.verdict.culprits and f.frames for f in case.evidence.facts
    ):
        facts = [f for f in case.evidence.of(Kind.EXCEPTION) if f.rank in case.verdict.culprits]
        return Finding("rank_divergence", "medium", "the ranks that are behind sat in another collective", facts)
    stacks: dict[int, str] = {}
    for fact in case.evidence.of(Kind.STACK):
        if fact.rank is not None and fact.frames:
            stacks.setdefault(fact.rank, phase_of(" ".join(fact.frames)) or fact.frames[-1])
    if len(set(stacks.values())) > 1:
        return Finding(
            "rank_divergence", "low", "the stacks of the ranks are in different places", case.evidence.of(Kind.STACK)
        )
    return None


def peer_gone(case: Case) -> Finding | None:
    facts = case.evidence.of(Kind.GLOO_CLOSED)
    remote = [f for f in case.evidence.of(Kind.ASYNC_ERROR) if "remote process exited" in f.text]
    if remote and not facts:
        return Finding(
            "oom_or_crash_other_rank", "low", "a peer's process ended, or the network between them broke", remote
        )
    if left_normally(case.evidence, case.verdict):
        return Finding(
            "rank_divergence", "low", "a rank left normally while its peers went on: it made fewer calls", facts
        )
    if facts and not any(
        f.kind in (Kind.GLOO_TIMEOUT, Kind.TIMEOUT, Kind.BLOCKING, Kind.BARRIER_MISSING) for f in case.evidence.facts
    ):
        return Finding("oom_or_crash_other_rank", "low", "a peer's connections closed: its process ended", facts)
    return None


def first_exit(case: Case) -> Finding | None:
    if case.verdict.rule == "first exit":
        return Finding("oom_or_crash_other_rank", "low", case.verdict.reason, case.verdict.facts)
    return None


def teardown(case: Case) -> Finding | None:
    beats = case.evidence.of(Kind.HEARTBEAT)
    if beats and not case.waiting and phases(case, "finished", "checkpoint"):
        return Finding("library_bug", "low", "training was over; only the watchdog's own heartbeat complains", beats)
    return None


TINY = 8  # elements: a flag or a metric, not data
SHORT_LIMIT_MS = 120_000
DEFAULT_LIMIT_S = 1500.0  # a little under torch's 30 minutes, where no limit is printed


def side_work(case: Case) -> Finding | None:
    """One rank busy with something the others do not do: saving, preprocessing, evaluating, uploading."""
    if not case.waiting:
        return None
    loader = case.evidence.of(Kind.DATALOADER) + phases(case, "loader")
    for facts, name, reason in (
        (
            phases(case, "preprocess"),
            "slow_rank_side_work",
            "a rank was still preprocessing data while the others waited",
        ),
        (phases(case, "checkpoint"), "checkpoint_io", "a rank was saving while the others waited"),
        (loader, "dataloader_stall", "the data loader complained or was busy just before the stall"),
        (phases(case, "logger"), "slow_rank_side_work", "a rank was starting its experiment logger"),
    ):
        if facts and not alone(case):
            return Finding(name, "medium", reason, facts)
    return None


def main_only(case: Case) -> Finding | None:
    if case.verdict.rule == "alone":
        facts = phases(case, "upload", "checkpoint", "evaluate", "logger", "generate")
        return Finding(
            "rank_divergence",
            "medium",
            "one rank waits alone: a collective inside a branch that the other ranks do not take",
            facts + case.verdict.facts,
        )
    if alone(case) and case.verdict.rule == "silence":
        facts = phases(case, "upload", "checkpoint", "evaluate", "logger", of_waiting=True)
        return Finding(
            "rank_divergence",
            "medium" if facts else "low",
            "rank 0 waits alone: a collective inside a main-process-only branch",
            facts + case.waiting[:1],
        )
    return None


def unequal(case: Case) -> Finding | None:
    """The absent rank goes on training: the ranks have different numbers of batches."""
    if not case.by_silence():
        return None
    bars = phases(case, "train")
    after = [f for f in bars if f.after_symptom]
    before = [f for f in bars if not f.after_symptom]
    first = min((f.line for f in case.waiting), default=0)
    later = [f for f in after if f.line > first and f.file == case.waiting[0].file]
    end = [f for f in before + after if (f.number or 0) >= 90]
    tiny = any(
        (row.work.numel_in or 99) <= TINY or (row.work.shape is not None and row.work.shape in ((1,), ()))
        for row in case.evidence.rows
        if row.work
    )
    if later and (end or tiny):
        return Finding(
            "unequal_batches",
            "medium",
            "the absent rank's progress bar goes on after the timeout: it has more batches",
            later,
        )
    if end and tiny:
        return Finding(
            "unequal_batches",
            "low",
            "a one-element collective at the end of an epoch: ranks may have different numbers of batches",
            end,
        )
    return None


def zero_alone_missing(case: Case) -> Finding | None:
    """Everybody waits for rank 0: the rank that does what only the main process does."""
    if case.verdict.culprits != (0,) or not case.by_silence():
        return None
    facts = phases(case, "evaluate", "upload", "generate", "load")
    if facts:
        return Finding(
            "slow_rank_side_work", "medium", "rank 0 was busy with work of its own while the others waited", facts
        )
    tiny = any(
        (row.work.numel_in or 99) <= TINY or (row.work.shape is not None and len(row.work.shape) <= 1)
        for row in case.evidence.rows
        if row.work
    )
    others = {fact.rank for fact in case.waiting}
    if len(others) >= 2 or tiny or case.verdict.rule == "store key":
        return Finding(
            "slow_rank_side_work",
            "low",
            "all ranks but rank 0 wait: it does work that only the main process does",
            case.waiting[:3],
        )
    return None


def too_short(case: Case) -> Finding | None:
    limits = [row.work.timeout_ms for row in case.evidence.rows if row.work and row.work.timeout_ms]
    limits += [int(f.seconds * 1000) for f in case.evidence.of(Kind.GLOO_TIMEOUT, Kind.BARRIER_MISSING) if f.seconds]
    alive = [f for f in phases(case, "train", "evaluate", "preprocess", "generate") if f.after_symptom]
    if limits and max(limits) < SHORT_LIMIT_MS and case.by_silence() and alive:
        return Finding(
            "timeout_too_short",
            "low",
            f"the limit was {max(limits) / 1000:g} s and the absent rank went on working",
            alive,
        )
    return None


def long_wait(case: Case) -> Finding | None:
    """A phase that has been going on for as long as the timeout, on whatever rank."""
    limits = {row.work.timeout_ms / 1000 for row in case.evidence.rows if row.work and row.work.timeout_ms}
    limits |= {fact.seconds for fact in case.evidence.of(Kind.STORE_TIMEOUT, Kind.STORE_KEY) if fact.seconds}
    busy = [
        f
        for f in case.evidence.of(Kind.PROGRESS)
        if f.seconds
        and f.name in ("preprocess", "evaluate", "generate", "load", "upload")
        and f.seconds >= 0.9 * min(limits or {DEFAULT_LIMIT_S})
    ]
    return (
        Finding("slow_rank_side_work", "medium", "one rank's work took as long as the others' limit", busy)
        if busy
        else None
    )


RULES: tuple[Callable[[Case], Finding | None], ...] = (
    hardware,
    shared_memory,
    machine_taken,
    ddp_unused,
    iommu,
    transport_mismatch,
    crash,
    differing,
    recorder,
    network,
    store,
    guard,
    long_wait,
    side_work,
    main_only,
    unequal,
    divergence,
    too_short,
    zero_alone_missing,
    teardown,
    first_use,
    peer_gone,
    first_exit,
)


def classify(evidence: Evidence, world: World, verdict: Verdict) -> Finding:
    """Return the first class whose rule applies, else "unknown"."""
    case = Case(evidence, world, verdict)
    for rule in RULES:
        finding = rule(case)
        if finding is not None:
            return finding
    return Finding("unknown", "low", "nothing in the inputs tells the cause")
