"""Statements of tools other than torch about who is missing: engines, launchers, runtimes and watchers.

Two kinds of statements are told apart. A wait (of an RPC, a queue, a channel, a scheduler's watchdog) accuses nobody,
not even the one that it waits for, because only one of many replies is awaited. A tool that lists who has not come is a
witness: it is taken at its word, unless the one that it names speaks afterwards. What it names is a rank only where its
numbering is the job's; else the answer is the name that the tool gives.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ncclguard_explain import places
from ncclguard_explain.cause import Cause
from ncclguard_explain.evidence import Evidence, World
from ncclguard_explain.facts import EXPIRED, Fact, Kind, Verdict
from ncclguard_explain.language import Message, joined, tr
from ncclguard_explain.ranks import ranks_text


@dataclass(frozen=True)
class Meaning:
    """The meaning of a kind of statement: the cause, its class, and the decision where it follows from that alone."""

    what: Message
    cause: Cause = Cause.UNKNOWN
    name: str = "unknown"
    action: str = ""


#: Faults of the hosts, by the name that their rows have in the table of formats.
ENVIRONMENT = {
    "shm": Meaning(tr("shared memory could not be had"), name="shared_memory"),
    "gpu_taken": Meaning(tr("GPUs of this host have unequal free memory: another process holds some"), Cause.FAILED, "oom_or_crash_other_rank"),
    "resources": Meaning(tr("the cluster has not the resources that the job asks for"), name="store_rendezvous"),
    "server": Meaning(tr("the server of the weight updates could not be reached, or has an old group"), Cause.NETWORK, "network_interface"),
    "rdma": Meaning(tr("NVSHMEM could not set RDMA up"), Cause.NETWORK, "network_fabric"),
    "oneccl": Meaning(tr("oneCCL could not build its communicator"), Cause.NETWORK, "store_rendezvous"),
    "hccl": Meaning(tr("HCCL could not bind a port or allocate memory"), name="network_interface"),
    "kv": Meaning(tr("a transfer of KV cache between two engines failed; the line names the link, not who is at fault"), Cause.NETWORK, "network_fabric"),
    "fabric": Meaning(tr("RoCE gave a transfer up between the two devices that the line names"), Cause.NETWORK, "network_fabric"),
}  # fmt: skip

#: Waits of engines; nobody is named by them, and the call that waits is not the operation that hangs.
WAITS = {
    "rpc": tr("an engine waited for the reply of a worker; that accuses nobody, and the method is not what hangs"),
    "channel": tr("a channel between processes was not filled in time; that accuses nobody"),
    "get": tr("a driver waited for results; that accuses nobody"),
    "scheduler": tr("a scheduler made no step within its limit: it waits itself"),
    "hang": tr("an executor made no step within its limit: it waits itself"),
    "start": tr("processes of the engine were not ready in time; which one is not told"),
    "mesh": tr("replicas waited for others to join their mesh"),
    "queue": tr("a queue or a server was awaited; that accuses nobody"),
    "barrier": tr("tasks waited in a barrier"),
    "xla": tr("threads waited for others to join a collective"),
    "xla_limit": tr("threads waited for others to join a collective"),
    "megascale": tr("slices waited for each other"),
    "monitor": tr("a rank sent no heartbeat; in a hang all ranks stop sending them"),
    "kernel": tr("a communication kernel ran out of time: the device that reports it waits for others"),
    "graph": tr("a collective of a captured graph ran out of time: the rank that reports it waits"),
    "transfer": tr("a transfer between engines was not complete in time; that accuses nobody"),
    "health": tr("a health check got no answer"),
    "horovod": tr("Horovod shut down because some ranks did not submit what the others waited for"),
    "deepep": tr("ranks waited for the tokens of others in an expert-parallel dispatch or combine"),
}

#: What a tool that names somebody proves, by the name of the statement.
ACCUSED = {
    "unhealthy": Meaning(tr("sends no heartbeats any more"), Cause.LOST, "oom_or_crash_other_rank", "unknown"),
    "restarted": Meaning(tr("has restarted under a new identity"), Cause.LOST, "oom_or_crash_other_rank", "restart"),
    "barrier": Meaning(tr("did not come to the barrier")),
    "unconnected": Meaning(tr("never connected to the root"), Cause.UNKNOWN, "store_rendezvous", "fix-environment"),
    "horovod": Meaning(tr("did not submit the tensors that the others wait for")),
    "mesh": Meaning(tr("did not join the mesh"), Cause.LOST, "oom_or_crash_other_rank", "restart"),
    "deepep": Meaning(tr("did not send what all the others wait for")),
    "lost": Meaning(tr("is called lost by the others"), Cause.LOST, "oom_or_crash_other_rank", "unknown"),
    "stuck": Meaning(tr("is called stuck by the others"), Cause.STUCK),
    "cqe": Meaning(tr("has errors on its link"), Cause.NETWORK, "network_fabric", "fix-environment"),
    "chip": Meaning(tr("has bad chips"), Cause.FAILED, "gpu_hardware", "restart-without"),
    "link": Meaning(tr("has trouble with its network"), Cause.NETWORK, "network_fabric", "fix-environment"),
    "program": Meaning(tr("runs another program than the others"), Cause.DIVERGED, "rank_divergence", "fix-code"),
    "input": Meaning(tr("waits for its input data"), Cause.LATE, "dataloader_stall", "fix-code"),
    "failed": Meaning(tr("reports an error that it cannot recover from"), Cause.FAILED, "oom_or_crash_other_rank", "unknown"),
    "suspected": Meaning(tr("is held for the culprit")),
    "gpu_hang": Meaning(tr("hangs by its driver"), Cause.FAILED, "gpu_hardware", "restart-without"),
    "slow": Meaning(tr("is slower than the others"), Cause.LATE, "unknown"),
    "blocked": Meaning(tr("stands in the kernel"), Cause.STUCK, "unknown"),
    "silent": Meaning(tr("answers none of the others"), Cause.LOST, "oom_or_crash_other_rank", "unknown"),
    "coordinator": Meaning(tr("answers none of the others"), Cause.NETWORK, "network_fabric", "fix-environment"),
    "actor": Meaning(tr("died"), Cause.LOST, "oom_or_crash_other_rank", "unknown"),
}  # fmt: skip


def accused_of_raising(evidence: Evidence) -> list[Fact]:
    """Return, one for each rank, what tools say that a rank raised or found in its own values."""
    facts = [f for f in evidence.of(Kind.ACCUSED) if f.name in ("nan", "raised", "checkpoint")]
    return [fact.clone(rank=rank, rank_basis="text") for fact in facts for rank in fact.peers]


def place_text(fact: Fact) -> Message | str:
    """Return the name of a process that is not known by its rank; an empty string where the line gives it none."""
    if fact.place and not places.is_parent(fact.place):
        return fact.place if fact.pid is None or places.coordinates(fact.place) else f"{fact.place} pid {fact.pid}"
    if fact.host and fact.local_rank is not None:
        return tr("local rank {rank} on {host}", rank=fact.local_rank, host=fact.host)
    if fact.place and fact.group_rank is not None:
        return tr("worker {rank} of {engine}", rank=fact.group_rank, engine=fact.place)
    return ""


def by_tool(evidence: Evidence, world: World) -> Verdict | None:
    """Return who a tool names outright; the first statement of a kind that names somebody counts."""
    weaker = None
    for rule in (
        _lost_instance,
        _apart_from_first,
        _listed,
        _absent_from_mesh,
        _awaited_experts,
        _awaited_by_horovod,
        _stopped_for,
        _silent_to_others,
        _blocked,
        _at_a_place,
        _dead_actors,
    ):
        verdict = rule(evidence, world)
        if verdict is not None and (verdict.culprits or verdict.places):
            return verdict
        weaker = weaker or verdict
    return weaker


def _verdict(name: str, ranks: Iterable[int], facts: list[Fact], sure: str = "high") -> Verdict:
    named = tuple(sorted(set(ranks)))
    reason = tr("{ranks} {what}", ranks=ranks_text(named), what=ACCUSED[name].what)
    overturned = [tr("a later line of {ranks}: who still speaks is alive", ranks=ranks_text(named))]
    return Verdict(named, ACCUSED[name].cause, sure, f"tool: {name}", reason, facts, overturned=overturned)


def _at(name: str, where: Iterable[str], facts: list[Fact], sure: str = "medium") -> Verdict:
    named = tuple(dict.fromkeys(where))
    reason = tr("{places} {what}", places=joined(", ", named), what=ACCUSED[name].what)
    return Verdict((), ACCUSED[name].cause, sure, f"tool: {name}", reason, facts, places=named)


_OF_SSH = 255  # the exit status by which ssh says that it has lost its connection


def _speaks_later(evidence: Evidence, rank: int, fact: Fact) -> bool:
    own = [one for one in evidence.facts if one.rank == rank and one.kind not in (Kind.ACCUSED, Kind.ENGINE_END)]
    own = [one for one in own if one.kind is not Kind.LAUNCHER or one.number not in (-9, _OF_SSH)]
    own = [
        one for one in own if one.kind is not Kind.ENGINE_WAIT or (one.name, one.rank_basis) == ("barrier", "prefix")
    ]
    return any(one.source != fact.source or one.line > fact.line for one in own)


def _listed(evidence: Evidence, world: World) -> Verdict | None:
    """JAX's coordination service and HCCL's root list who has not come or not answered."""
    for name in ("unconnected", "barrier", "unhealthy", "restarted"):
        facts = evidence.of(Kind.ACCUSED, name=name)
        named = {rank for fact in facts for rank in fact.peers if not _speaks_later(evidence, rank, fact)}
        accused = {rank for fact in facts for rank in fact.peers}
        cut = {fact.source for fact in evidence.of(Kind.NOTE, name="cut_off")} - {fact.source for fact in facts}
        if name == "unhealthy" and accused == set(range(1, len(accused) + 1)) and min(len(accused), len(cut)) > 1:
            return _verdict("coordinator", [0], facts, "medium")  # it hears none of them, and they live
        if not named:
            continue
        ends = evidence.of(Kind.KERNEL_OOM, Kind.EXIT, Kind.WORKER_DIED)
        ends += [
            fact
            for fact in evidence.of(Kind.EXCEPTION)
            if "coordination" not in fact.text + fact.detail + fact.name
            and "Xla" not in fact.name
            and "JaxRuntime" not in fact.name
        ]
        died = len(named) == 1 and any(fact.rank in (None, *named) for fact in ends)
        if name == "unhealthy" and not died and len(named) > 1:  # the coordinator's network, as likely as theirs
            reason = tr("{ranks} {what}", ranks=ranks_text(named), what=ACCUSED[name].what)
            return Verdict(rule="tool: unhealthy", reason=reason, facts=facts, suspects=tuple(sorted(named)))
        if world.size is not None and 2 * len(named) > world.size and world.size > 2:
            what = ACCUSED[name].what
            reason = tr("most ranks ({ranks}) {what}", ranks=ranks_text(named), what=what)
            return Verdict(rule=f"tool: {name}", reason=reason, facts=facts, suspects=tuple(sorted(named)))
        several = name == "restarted" and len(named) > 1  # two jobs share the coordinator's port
        return _verdict(name, named, facts, "medium" if several or (name == "unhealthy" and not died) else "high")
    return None


def by_unfinished(evidence: Evidence, world: World) -> Verdict | None:
    """One rank alone has not compiled its kernels, of those that say that they do, when others run into their limit."""
    waits = evidence.of(Kind.ENGINE_WAIT) + evidence.of(*EXPIRED)
    waiting = {fact.rank for fact in waits + evidence.of(Kind.EXCEPTION)} - {None}
    bars = [fact for fact in evidence.of(Kind.PROGRESS) if "DeepGEMM" in fact.detail and fact.rank is None]
    behind: dict[int, Fact] = {}
    for note in evidence.of(Kind.NOTE, name="compiles"):
        own = [fact for fact in bars if fact.source == note.source and fact.line > note.line]
        last = max(own, key=lambda fact: fact.line, default=None)
        later = [one for one in evidence.facts if one.rank == note.rank and last is not None and one.line > last.line]
        if note.rank is not None and last is not None and (last.number or 0) < 100 and not later:
            behind[note.rank] = last
    if not waits or len(behind) != 1 or behind.keys() & waiting or len(waiting) < 2:
        return None
    (rank,) = behind
    reason = tr(
        "{ranks} still compiled when the others gave up: {text}",
        ranks=ranks_text(behind),
        text=behind[rank].detail[:100],
    )
    return Verdict((rank,), Cause.LATE, "medium", "unfinished", reason, [behind[rank]])


def _apart_from_first(evidence: Evidence, world: World) -> Verdict | None:
    """JAX compares what each process brings to a barrier with what process 0 sent: the minority is elsewhere."""
    facts = [
        fact
        for fact in evidence.of(Kind.EXCEPTION)
        if "sync_global_devices name mismatch" in fact.detail and fact.rank is not None
    ]
    differ = {fact.rank for fact in facts if fact.rank is not None}
    others = set(range(world.size or 0)) - differ
    if not facts or 0 not in others or len(differ) == len(others):
        return None
    odd = differ if len(differ) < len(others) else others
    return _verdict("program", odd, facts, "medium") if len(odd) == 1 or odd == differ else None


def _lost_instance(evidence: Evidence, world: World) -> Verdict | None:
    """Another instance of a server, of which only the others' logs tell: what ended it is not among the inputs."""
    facts = evidence.of(Kind.ACCUSED, name="instance")
    hosts = dict.fromkeys(fact.host for fact in facts)
    reason = tr("others have lost the instance at {hosts}, whose own log is needed", hosts=", ".join(hosts))
    return Verdict(rule="tool: instance", cause=Cause.LOST, reason=reason, facts=facts) if facts else None


def _absent_from_mesh(evidence: Evidence, world: World) -> Verdict | None:
    """All that wait for the mesh print their number and its size; who does not print is absent."""
    facts = evidence.of(Kind.ENGINE_WAIT, name="mesh")
    sizes = {fact.number for fact in facts}
    if not facts or len(sizes) != 1 or any(fact.hidden for fact in evidence.facts):
        return None
    size = sizes.pop() or 0
    here = {fact.group_rank for fact in facts}
    absent = set(range(min(size, 65_536))) - here
    if not absent or len(absent) >= len(here):
        return Verdict(rule="tool: mesh", reason=tr("replicas wait for their mesh"), facts=facts)
    return _verdict("mesh", absent, facts, "high" if len(here) > 2 else "medium")


def _awaited_experts(evidence: Evidence, world: World) -> Verdict | None:
    """DeepEP prints for each waiter whom it waits for; one that all wait for, and that does not wait itself."""
    for name, frame in (("deepep", ""), ("deepep_notify", ""), ("deepep_node", "NVL")):
        facts = [
            fact for fact in evidence.of(Kind.ENGINE_WAIT, name=name) if fact.group_rank is not None and fact.peers
        ]
        waiters = {fact.group_rank for fact in facts}
        told: dict[int, set[int | None]] = defaultdict(set)
        for fact in facts:
            for peer in fact.peers:
                told[peer].add(fact.group_rank)
        suspects = {
            peer for peer in told if peer not in waiters and 10 * len(told[peer]) > len(waiters)
        }  # lines run into each other
        if not suspects and name == "deepep":
            waiting = evidence.of(Kind.ENGINE_WAIT, name=name)
            here = {fact.rank for fact in waiting} - {None}
            others = set(range(world.size or 0)) - here
            whole = not any(fact.hidden for fact in evidence.facts)
            if whole and len(here) > 2 and len(others) == 1 and others <= evidence.seen_ranks | world.covered:
                return _verdict("deepep", others, waiting, "medium")
        if not suspects:
            continue
        most = max(suspects, key=lambda peer: len(told[peer]))
        if len(suspects) > 1 or len(told[most]) < 2:
            where = ", ".join(str(peer) for peer in sorted(suspects))
            reason = tr("an expert-parallel rank waits for number {places} of its group", places=where)
            return Verdict(rule="tool: deepep", reason=reason, facts=facts)
        both = [
            fact
            for fact in facts
            if fact.rank is not None and fact.rank_basis == "prefix" and fact.group_rank is not None
        ]
        own = {(fact.rank or 0) - (fact.group_rank or 0) for fact in both}
        known = (
            _experts(evidence).get(most)
            if not frame
            else most
            if evidence.one_node and (world.size or 9) <= 8
            else None
        )
        if known is None and not frame and len(own) == 1 and len(both) > 2:
            known = most + own.pop()  # all that wait print both their place in the group and their rank in the job
        size = len(waiters) + 1 if world.basis == "highest rank seen" or world.size is None else world.size
        if known is None and not frame and size > 2 and waiters | {most} == set(range(size)):
            known = most  # all the others of the job wait: its numbers are the job's
        if known is not None:
            return _verdict("deepep", [known], facts, "medium")
        text = tr("EP rank {rank}", rank=most) if not frame else tr("number {rank} of its node", rank=most)
        return _at("deepep", [text], facts)
    return None


def _experts(evidence: Evidence) -> dict[int, int]:
    """Return the job's rank of each place in the expert group that the names of processes prove."""
    found: dict[int, int] = {}
    for place, rank in evidence.ranks.places.items():
        expert = places.coordinates(place).get("EP")
        if expert is not None:
            found[expert] = rank
    if evidence.stated_world is not None and evidence.ranks.parallel.get("ep") == evidence.stated_world:
        found = {rank: rank for rank in range(evidence.stated_world)} | found
    return found


def _awaited_by_horovod(evidence: Evidence, world: World) -> Verdict | None:
    """Horovod's stall inspector names for each tensor the ranks that have not submitted it."""
    facts = _in_last_report(evidence, evidence.of(Kind.ACCUSED, name="horovod"))
    ready = [f for f in evidence.of(Kind.ACCUSED, name="horovod_ready") if world.size is not None]
    missing = {frozenset(fact.peers) for fact in facts}
    missing |= {frozenset(set(range(world.size or 0)) - set(fact.peers)) for fact in ready}
    missing.discard(frozenset())
    if not missing:
        return None
    named = frozenset().union(*missing)
    common = frozenset.intersection(*missing) or _in_every_report(evidence, facts)
    if common and (common < named or len(missing) == 1):
        return _verdict("horovod", common if len(missing) > 1 else named, facts + ready)
    reason = tr(
        "different ranks lack different tensors ({ranks}); which one strayed is not shown", ranks=ranks_text(named)
    )
    few = len(named) == 2 or (world.size is not None and 2 * len(named) < world.size)
    return Verdict(tuple(sorted(named)) if few else (), Cause.DIVERGED, "medium", "tool: horovod", reason, facts + ready,
                   suspects=() if few else tuple(sorted(named)))  # fmt: skip


def _in_last_report(evidence: Evidence, facts: list[Fact]) -> list[Fact]:
    """Return what the last report of an input says, as each lists all; of those that it marks for the end only these.

    The older reports of whom it lists too are kept, by which it is told who is missing all the time.
    """
    last: dict[int, int] = {}
    for note in evidence.of(Kind.NOTE, name="stall_report"):
        last[note.source] = max(note.line, note.until, last.get(note.source, 0))
    late = [fact for fact in facts if max(fact.line, fact.until) >= last.get(fact.source, 0)]
    late = [fact for fact in late if fact.completed] or late
    named = {peer for fact in late for peer in fact.peers}
    return [fact for fact in facts if named.issuperset(fact.peers)]


def _in_every_report(evidence: Evidence, facts: list[Fact]) -> frozenset[int]:
    """Return who is missing in all of several reports of the ranks that lack tensors; the others have come since."""
    reports = sum(fact.repeated for fact in evidence.of(Kind.NOTE, name="stall_report"))
    counts: Counter[int] = Counter()
    for fact in facts:
        counts.update(dict.fromkeys(fact.peers, fact.repeated))
    return frozenset(rank for rank, count in counts.items() if reports > 1 and count == reports)


def _stopped_for(evidence: Evidence, world: World) -> Verdict | None:
    """NeMo's straggler detection has ended the job because of these ranks; one that only warns ends nothing."""
    facts = evidence.of(Kind.NOTE, name="straggler")
    named = {rank for fact in facts[-1:] for rank in fact.peers}
    stopped = evidence.of(Kind.ENGINE_END, name="straggler")
    return _verdict("slow", named, facts[-1:] + stopped, "medium") if stopped and named else None


def _silent_to_others(evidence: Evidence, world: World) -> Verdict | None:
    """Mooncake's backend: at least two ranks got no answer from one that says nothing itself."""
    facts = evidence.of(Kind.ACCUSED, name="silent")
    told = {peer: {fact.number for fact in facts if peer in fact.peers} for fact in facts for peer in fact.peers}
    accusing = {fact.number for fact in facts}
    named = [peer for peer, by in told.items() if peer not in accusing and len(by) >= 2]
    return _verdict("silent", named, facts, "medium") if len(named) == 1 else None


def _blocked(evidence: Evidence, world: World) -> Verdict | None:
    """The kernel's own watch over tasks in uninterruptible sleep: a rank's process that reads or writes a file."""
    facts = [fact for fact in evidence.of(Kind.ACCUSED, name="blocked") if fact.rank is not None]
    named = {fact.rank for fact in facts if fact.rank is not None}
    return _verdict("blocked", named, facts, "medium") if len(named) == 1 else None


_EXCEPTION_TYPES = (("Lost", "lost"), ("LOST", "lost"), ("Stuck", "stuck"), ("STUCK", "stuck"), ("cqe", "cqe"))
_CAUSES = (("chip", "chip"), ("core", "chip"), ("network", "link"), ("inconsistent", "program"), ("module", "program"),
           ("input", "input"), ("unrecoverable", "failed"))  # fmt: skip


def _at_a_place(evidence: Evidence, world: World) -> Verdict | None:
    """A runtime names a host or a device of it: HCCL's cluster exception, Megascale's digest, ROCm's hang."""
    facts = evidence.of(Kind.ACCUSED, name="location")[:1]
    if facts:
        name = next((key for word, key in _EXCEPTION_TYPES if word in facts[0].detail), "suspected")
        first = evidence.ranks.first.get(facts[0].host, -1)
        if first >= 0 and facts[0].rank is not None:
            return _verdict(name, [facts[0].rank], facts, "medium")
        where = tr("device {device} of {host}", device=facts[0].local_rank, host=facts[0].host)
        return _at(name, [where], facts)
    facts = evidence.of(Kind.ACCUSED, name="megascale")[:1]
    if facts:
        lower = facts[0].detail.lower()
        name = next((key for word, key in _CAUSES if word in lower), "suspected")
        hosts = facts[0].host.split()
        return _at(name, hosts, facts) if hosts else None
    facts = evidence.of(Kind.CUDA, name="gpu_hang")
    gpus = {fact.detail.partition("GPU ")[2].split(" ")[0] for fact in facts}
    return _at("gpu_hang", [tr("GPU {device}", device=gpu) for gpu in sorted(gpus)], facts) if gpus else None


def _dead_actors(evidence: Evidence, world: World) -> Verdict | None:
    """Actors of Ray that died, by rank where the log proves it; not those that waited or raised before."""
    before = {fact.pid for fact in evidence.facts if fact.pid is not None and fact.kind in
              (Kind.TIMEOUT, Kind.EXCEPTION, Kind.STATUS, Kind.WATCHDOG_EXCEPTION)}  # fmt: skip
    told_to_go = ("INTENDED", "cancelled before it started")
    facts = [
        fact
        for fact in evidence.of(Kind.WORKER_DIED)
        if fact.name in ("actor", "replica")
        and (fact.pid is None or fact.pid not in before)
        and not any(word in fact.detail for word in told_to_go)
        and "error raised in its creation task" not in fact.text  # which may follow from others
    ]
    ranks = {fact.rank for fact in facts if fact.rank is not None}
    whole_nodes = all("node has died" in fact.detail + fact.text for fact in facts)
    if ranks and whole_nodes:  # what else ran there
        ranks |= {
            rank for fact in facts if fact.where for rank in evidence.ranks.ranks_on(fact.where, evidence.local_size)
        }
    if ranks and (world.size is None or (2 - whole_nodes) * len(ranks) < max(world.size, 3)):
        return _verdict("actor", ranks, facts, "medium")
    replicas = [fact.detail for fact in facts if fact.name == "replica"]
    actors = Counter(fact.place for fact in facts if fact.place)
    where = [*actors, *replicas]
    return _at("actor", where, facts) if 0 < len(where) <= 4 else None
