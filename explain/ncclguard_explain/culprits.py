"""Name the ranks that held the others up, by rules in the order of how much they prove; an empty answer is an answer.

The rank that prints a timeout is a victim. The rules look for the rank that is dead (an exception of its own, a broken
GPU, a signal, a connection that closed), or absent from, behind, ahead of or different from what the victims wait in;
silence counts last, and only for ranks whose log would be among the inputs. Each verdict carries the facts it rests on
and says what would overturn it. `causes` and `decision` use the functions that select the facts of a failure too.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ncclguard_explain import engines, incident_text, places
from ncclguard_explain.cause import Cause
from ncclguard_explain.evidence import Evidence, Row, World, collectives_in
from ncclguard_explain.facts import EXPIRED, WAITING, Fact, Kind, Verdict, Work, united
from ncclguard_explain.language import Message, joined, received, tr
from ncclguard_explain.ranks import ranks_text
from ncclguard_explain.recorder import name_culprits

# An exception with one of these in its text follows from a peer's absence or from another's failure.
_FOLLOWS = re.compile(
    r"initializing process group in store|Connection closed by peer|Connection reset by peer|Broken pipe"
    r"|Socket Timeout|[Tt]imed out waiting|atchdog caught|caught collective|communicator was aborted"
    r"|remote process exited|ncclRemoteError|pair closure|monitoredBarrier|Detected mismatch between coll"
    rf"|\b(?:{'|'.join(incident_text.ERRORS)}): "
    r"|wait timeout after|Timeout waiting for key|store->get|client socket has timed out|waiting for clients"
    r"|WorkNCCL|timed out in blocking|NCCL operations have failed|collective operation timeout|work sequence id"
    r"|function error: Hccl|Worker failure: |handshake_setup_failed|Read timed out\. \(read timeout"
    r"|Signals\.SIG|SignalException|Failed to recv|sendBytes failed|recvValue failed|Operation timed out"
    r"|DataLoader worker .{0,40}killed by signal: (?:Terminated|Hangup|Interrupt)"
    r"|CUDA error: an illegal.*NCCL|unhandled system error|NCCL error|ncclInternalError|NCCL operation (?:timed out|failed)"
    r"|DeepEP error|EPException|RPC call to|Executor failed|Worker failed with|workers? failed|Engine ?[Cc]ore|died unexpectedly"
    r"|(?<!DataLoader )(?<!Loader )[Tt]imed ?out (?:waiting|building|after)|can't be reached|[Ff]ailed to connect|[Cc]onnection refused"
    r"|coordination service|Barrier timed out|heartbeat|Broken promise|NPU function error|HCCL|hccl api failed|CheckpointException"
    r"|expects same model across all ranks|connectFullMesh failed|Horovod has been shut down|no live replica|no response from peer|Hang detected on rank|ranks arrived|(?:[Mm]issing|[Aa]bsent) ranks|memory capacity is unbalanced|Insufficient space in /dev/shm|placement group|Server failed to become healthy|is not ready after|DeadLock detected"
    r"|RemoteDisconnected|[Ss]erver ?[Dd]isconnected|Remote end closed|[Cc]onnection attempts failed|StatusCode\.UNAVAILABLE"
    r"|peer (?:has |may have )?(?:closed|disconnected|exited)|NRT_TIMEOUT|workspace wait failed"
    r"|[Cc]ollective (?:call|op|operation)s? (?:has |have |was |were )?(?:returned|failed|aborted|interrupted)|sync_global_devices name mismatch|status: (?:Cancelled|DeadlineExceeded)"
    r"|MODULE:PT_BRIDGE Exception in \w+ thread|peer (?:rank )?(?:has )?(?:crashed|failed|died)|The Inner error is reported as above|ACL stream synchronize failed(?!.{0,20}error code)|MPI_ERR_(?:OTHER|INTERN|PROC_FAILED)|syn(?:Event|Stream)Synchronize timeout|ndpoint is not connected|[Rr]equest cancell?ed|lease expired"
)
_FOLLOWING_TYPES = frozenset(
    ["ChildFailedError", "ProcessExitedException", "ProcessRaisedException", "SignalException", "KeyboardInterrupt",
     "SystemExit", "CalledProcessError", "DistStoreError", "DistNetworkError", "DistBackendError", "BrokenPipeError",
     "ConnectionResetError", "ConnectionRefusedError", "EOFError", "RendezvousConnectionError", "GeneratorExit",
     "CollectiveFingerPrint", "SIGTERMException", "GuardError", *incident_text.ERRORS,
     "RayTaskError", "TimeoutError", "GetTimeoutError", "RayChannelTimeoutError", "RayChannelError", "EngineDeadError",
     "EngineGenerateError", "KVTransferError", "ActorDiedError", "RayActorError", "ActorUnavailableError",
     "WorkerCrashedError", "NodeDiedError", "RendezvousTimeoutError", "RendezvousClosedError", "CheckpointException",
     "DeadlockDetectedException", "EPException", "CancelledError", "BrokenBarrierError", "ConnectionAbortedError",
     "Again", "ReadTimeout", "ConnectTimeout", "MaxRetryError", "NewConnectionError", "WorkerHealthCheckTimeoutError", "WorkerGroupStartupTimeoutError", "AsyncEngineDeadError",
     "ConnectError", "RemoteProtocolError", "ClientConnectorError", "ServerDisconnectedError", "RemoteDisconnected"]
)  # fmt: skip
_BARRIER_KEY = re.compile(r"store_based_barrier_key:\d+")
_PEER_GONE = re.compile(r"remote process exited|ncclRemoteError|[Cc]onnection refused|Connection reset by peer")
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_DEADLY = {-9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE"}
#: The waits of engines at whose limit they end the process, and some of them its peers.
_ENDS_ITSELF = frozenset(["monitor", "hang", "scheduler", "xla_limit"])
_STICKY = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch", "out of memory",
           "Memory access fault", "fault from GPU", "aicore exception", "aivector error")  # fmt: skip
_OF_DEVICE = re.compile(r"(?:CUDA|HIP) error: |AcceleratorError|hipError|cudaError")
_OF_A_CALL = ("invalid resource handle", "invalid device ordinal")
#: Frames of a rank that waits for its device, and so perhaps for a collective that it has issued.
_WAITS_FOR_DEVICE = re.compile(
    r"synchronize|_engine_run_backward| in (?:item|tolist|cpu|backward)$|^(?!.*(?:file_baton|filelock|threading\.py)).* in wait$"
)
#: Frames of a rank that stands in a collective: torch's, and the engines' own.
_IN_COLLECTIVE = re.compile(
    r"distributed_c10d\.py|device_communicators/|custom_all_reduce|pynccl|all_?reduce|all_?gather|broadcast_pyobj"
)
# NVIDIA's Xid catalogue: those that point at the GPU, its memory or its link.
_ECC = re.compile(r"ECC error|(?i:multi[- ]bit ecc|ecc uncorrect)")
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})


def follows_from_peers(type_name: str, text: str) -> bool:
    """Return whether an exception is what a rank sees when a peer is gone or absent, not a failure of its own."""
    name = type_name.rsplit(".", 1)[-1]
    if name == "EOFError" and text:  # a pipe that has closed says nothing; of a file its reader says what is wrong
        return False
    if "was built without" in text:  # torch without libuv: the store's own error
        return False
    return name in _FOLLOWING_TYPES or _FOLLOWS.search(text) is not None


def went_on(evidence: Evidence, failure: Fact) -> bool:
    """Return whether a rank retried or went on training after it raised: then that is not why its peers wait."""
    for fact in evidence.of(Kind.RETRIED, Kind.ALIVE):
        same = fact.source == failure.source and fact.line >= failure.line and fact.rank == failure.rank
        end = failure.line + 3 * len(failure.frames)  # each frame with its source and the marks below that
        alive = fact.rank is not None and fact.line > end
        if same and (fact.kind is Kind.RETRIED or alive):
            return failure.rank is not None or not evidence.of(Kind.EXIT, Kind.LAUNCHER)
    return False


def _experts_waited(evidence: Evidence) -> bool:
    """Return whether DeepEP's kernels ran into their limit, where they trap: a peer caused their CUDA errors."""
    return any(fact.name.startswith("deepep") for fact in evidence.of(Kind.ENGINE_WAIT))


def own_exceptions(evidence: Evidence) -> list[Fact]:
    """Return exceptions that no peer's absence explains, of ranks that did not wait for others themselves.

    A rank that also reports a timeout, or whose fingerprint was compared, was alive then: what it raised before it
    caught, what it raised later follows.
    """
    waited = {fact.rank for fact in evidence.facts if fact.kind in WAITING and fact.rank is not None}
    waited |= {f.rank for f in evidence.of(Kind.FINGERPRINT) if f.name != "absent" and f.rank is not None}
    quoted = {(f.source, f.name, f.detail) for f in evidence.of(Kind.EXCEPTION) if f.rank_basis == "text"}
    expired: dict[int, int] = {}
    for fact in evidence.of(*EXPIRED):
        expired.setdefault(fact.source, fact.line)
    trapped = _experts_waited(evidence)
    return [
        fact
        for fact in evidence.of(Kind.EXCEPTION)
        if not follows_from_peers(fact.name, fact.detail)
        and not fact.name.endswith("Warning")
        and not (trapped and "unspecified launch" in fact.detail)
        and (fact.rank_basis == "text" or (fact.source, fact.name, fact.detail) not in quoted)  # of another rank
        and not (fact.place and places.is_parent(fact.place) and ("", fact.pid) not in evidence.ranks.processes)
        and fact.rank not in waited
        and fact.line <= expired.get(fact.source, fact.line)  # after the limit it cannot be why the peers waited
        and (fact.name != "RuntimeError" or fact.detail)  # without a text it proves nothing
        and not (fact.name == "RuntimeError" and _is_cut(evidence, fact))  # the rest may explain it
        and not went_on(evidence, fact)
    ]


def _is_cut(evidence: Evidence, fact: Fact) -> bool:
    """Return whether an exception's last line is its log's last one and has no end."""
    end = fact.line + 3 * len(fact.frames) + 1  # each frame with its source and the marks below that
    return any(source == fact.source and fact.line <= line <= end for source, line in evidence.open_lines)


def sticky_cuda(evidence: Evidence) -> list[Fact]:
    """Return CUDA errors of a rank's own kernels; NCCL and the watchdog only print them because they come by first."""
    told = evidence.of(Kind.CUDA) + evidence.of(Kind.NCCL_WARN, name="cuda") + evidence.of(Kind.NCCL_WARN, name="oom")
    found = [fact for fact in told if any(word in fact.detail for word in _STICKY)]
    expired = {fact.source: fact.line for fact in reversed(evidence.of(*EXPIRED))}
    found += [  # a communicator that is torn down leaves these behind too
        fact
        for fact in evidence.of(Kind.CUDA)
        if any(word in fact.detail for word in _OF_A_CALL) and fact.line < expired.get(fact.source, fact.line + 1)
    ]
    if _experts_waited(evidence):
        return []
    of_watchdog = evidence.of(Kind.WATCHDOG_EXCEPTION)
    return found + [fact for fact in of_watchdog if "CUDA error" in fact.detail and "Work" not in fact.detail]


def hardware_errors(evidence: Evidence) -> list[Fact]:
    """Return reports of a broken GPU: ECC, lost from the bus, an Xid of the hardware; of one rank where it is known."""
    found = [fact for fact in evidence.of(Kind.XID) if fact.number in HARDWARE_XIDS]
    return found + [
        fact
        for fact in evidence.of(Kind.CUDA, Kind.EXCEPTION, Kind.NCCL_WARN, Kind.WATCHDOG_EXCEPTION)
        if _ECC.search(f"{fact.text} {fact.detail}")
        or "fallen off the bus" in fact.text
        or fact.name in ("hardware", "host_memory", "gpu", "gpu_hang")
    ]


def lost_a_peer(evidence: Evidence) -> set[int]:
    """Return the ranks whose watchdogs ended them because a peer's process or connection was gone."""
    facts = evidence.of(Kind.WATCHDOG_EXCEPTION, Kind.ASYNC_ERROR)
    return {fact.rank for fact in facts if fact.rank is not None and _PEER_GONE.search(fact.detail + fact.text)}


def deadly_exits(evidence: Evidence) -> list[Fact]:
    """Return exits by a signal that no watchdog and no launcher sends to end a job that already failed."""
    forced = {fact.number for fact in evidence.of(Kind.NOTE, name="forced_kill")}
    waited = {fact.rank for fact in evidence.facts if fact.kind in WAITING} - {None}  # its own watchdog ends it
    announced = evidence.of(Kind.NOTE, name="will_end")
    announced += [fact for fact in evidence.of(Kind.ENGINE_WAIT) if fact.name in _ENDS_ITSELF]
    deaths = [
        fact
        for fact in evidence.of(Kind.LAUNCHER, Kind.EXIT)
        if (
            fact.number in _DEADLY
            and fact.pid not in forced
            and not (fact.number == -9 and any(_announces(one, fact) for one in announced))
        )
        or (fact.name == "first" and fact.number is None and fact.rank not in waited and not _follows(evidence, fact))
    ]
    # A launcher that has seen one end ends the others: of several such lines of one launcher only the first counts.
    chosen: dict[int, int] = {}  # source -> line, which may hold several tasks of srun
    first = [fact for fact in deaths if fact.name in ("first", "oom", "local", "command")]
    for fact in sorted(first, key=lambda one: (one.source, one.name != "oom", one.line)):
        chosen.setdefault(fact.source, fact.line)
    # Of each source the processes that its launcher ended; others ended by themselves.
    closed: dict[int, set[int | None]] = {}
    for fact in evidence.of(Kind.ENDED_BY_LAUNCHER):
        if fact.pid is not None:
            closed.setdefault(fact.source, set()).add(fact.pid)
    found = [
        fact
        for fact in deaths
        if chosen.get(fact.source) == fact.line
        or (fact.number != -9 and fact.name in ("failure", "event", ""))
        or (fact.name == "failure" and fact.pid not in closed.get(fact.source, {fact.pid}))
        or (fact.name == "tasks" and not _ended_before(evidence, fact))
    ]
    found = found or _aborted_alone(evidence)
    if found or forced or len({fact.rank for fact in deaths}) != 1:
        return found
    # One alone: it died by itself, unless its launcher killed it because another rank had been the first to end.
    others = {fact.source for fact in evidence.of(Kind.LAUNCHER, Kind.EXIT) if fact.name == "first"}
    return [
        fact
        for fact in deaths
        if fact.pid not in closed.get(fact.source, ()) and not (fact.number == -9 and fact.source in others)
    ]


def _follows(evidence: Evidence, end: Fact) -> bool:
    """Return whether another rank had raised right before an end without a code or signal, in the same log.

    A server that has answered in between has survived that.
    """
    before = [one for one in own_exceptions(evidence) if one.source == end.source and one.line < end.line]
    last = max((one for one in before if one.rank not in (None, end.rank)), key=lambda one: one.line, default=None)
    alive = evidence.of(Kind.ALIVE, Kind.PROGRESS)
    return last is not None and not any(one.source == end.source and last.line < one.line < end.line for one in alive)


def _aborted_alone(evidence: Evidence) -> list[Fact]:
    """Return the abort of one rank where its launcher ended two others or more by SIGTERM, and nobody had waited."""
    aborted = [fact for fact in evidence.of(Kind.LAUNCHER) if fact.number == -6 and fact.rank is not None]
    ranks = {fact.rank for fact in aborted}
    others = {fact.rank for fact in evidence.of(Kind.ENDED_BY_LAUNCHER)} - {None}
    waited = evidence.of(*EXPIRED, Kind.ENGINE_WAIT) or ranks & lost_a_peer(evidence)
    return aborted if len(ranks) == 1 and len(others - ranks) >= 2 and not waited else []


def _announces(one: Fact, death: Fact) -> bool:
    """Return whether what a watch said it would end, after it had waited, is this process: then that is no cause.

    Of a monitor that says nothing of its own hand (NVRx) the lines may stand in any order.
    """
    if one.name == "monitor":
        return None in (one.rank, death.rank) or one.rank == death.rank
    same_log = one.source == death.source
    if same_log and one.line >= death.line:
        return False
    told = [mine == its for mine, its in ((one.pid, death.pid), (one.rank, death.rank)) if None not in (mine, its)]
    of_all = one.detail == "all" or "propagating" in one.text
    return any(told) or (same_log and (of_all or not told))


def _ended_before(evidence: Evidence, fact: Fact) -> bool:
    """Return whether a launcher had begun to end its tasks, or one had ended by itself, before these were killed."""
    ends = evidence.of(Kind.EXIT, Kind.LAUNCHER, Kind.ENDED_BY_LAUNCHER, Kind.SCHEDULER)
    return any(one.source == fact.source and one.line < fact.line and one.name != "tasks" for one in ends)


def _alike(facts: Sequence[Fact]) -> bool:
    """Return whether failures of several ranks are one and the same: one exception, or one signal of a fault."""
    kinds = {
        (fact.name.rsplit(".", 1)[-1], _DIGITS.sub("", fact.detail)[:60])
        for fact in facts
        if fact.kind is Kind.EXCEPTION
    }
    signals = {fact.number for fact in facts if fact.kind in (Kind.LAUNCHER, Kind.EXIT)}
    return len(kinds) == 1 and not signals or not kinds and len(signals) == 1 and not signals & {-9, None}


def _apart(facts: Sequence[Fact], broken: Sequence[Fact]) -> list[Fact]:
    """Return the failures without those, behind a broken device's, that two other ranks or more have in common."""
    begun: dict[int, int] = {}
    for fact in broken:
        begun[fact.source] = min(fact.line, begun.get(fact.source, fact.line))
    ranks = {fact.rank for fact in broken}

    def key(fact: Fact) -> tuple[str, str]:
        return fact.name.rsplit(".", 1)[-1], _DIGITS.sub("", fact.detail)[:60]

    told: dict[tuple[str, str], set[int]] = defaultdict(set)
    for fact in facts:
        if fact.rank is not None and fact.rank not in ranks and fact.line >= begun.get(fact.source, 0):
            told[key(fact)].add(fact.rank)
    return [fact for fact in facts if len(told[key(fact)]) < 2]


def first_to_exit(evidence: Evidence) -> list[Fact]:
    """Return the ends with an ordinary exit code that a launcher noticed first; they do not say why."""
    found = [fact for fact in evidence.of(Kind.EXIT) if (fact.number or 0) > 0]
    return found or [fact for fact in evidence.of(Kind.LAUNCHER, name="first") if (fact.number or 0) > 0]


def _on_one_gpu(evidence: Evidence) -> list[Fact]:
    """Return what NCCL says of ranks that were given the same GPU, once for each of them."""
    told = evidence.of(Kind.NCCL_WARN, name="duplicate_gpu")
    pairs = [(fact, {int(found[1]), int(found[2])}) for fact in told if (found := _ONE_GPU.search(fact.detail))]
    # NCCL counts in its communicator, which is the job where the speaker is one of the two.
    return [fact.clone(rank=rank, rank_basis="text") for fact, pair in pairs if fact.rank in pair for rank in pair]


def _on_all_gpus(evidence: Evidence, world: World, raised: list[Fact]) -> list[Fact]:
    """Give exceptions that tell their process's GPU its rank, where the ranks of a node have used up all of theirs."""
    gpus = {id(fact): int(found[1]) for fact in raised if (found := _GPU_FULL.search(fact.detail))}
    alone = evidence.one_node and not _named(raised) and len(gpus) == len(raised) and (world.size or 0) > 1
    once = sorted(gpus[id(fact)] for fact in raised if fact.frames and alone)
    if not alone or once != [*range(world.size or 0)] or len({fact.source for fact in raised}) > 1:
        return raised
    return [fact.clone(rank=gpus[id(fact)], rank_basis="local") for fact in raised]


def _named(facts: Iterable[Fact]) -> tuple[int, ...]:
    return tuple(sorted({fact.rank for fact in facts if fact.rank is not None and fact.rank_basis != "group"}))


_UNUSED = tr("raised DDP's unused-parameter error")
_HARDWARE = tr("lost its GPU")
_RAISED = tr("raised")
_CUDA = tr("hit a CUDA error of its own")
_SIGNAL = tr("ended by a signal")
_NO_SPACE = re.compile(r"No space left|failed to extend|extending")
_SHM = tr("could not get shared memory")
_SAME_GPU = tr("share one GPU, and which of them chose it wrongly is not shown")
_ONE_GPU = re.compile(r"Duplicate GPU detected ?: rank (\d+) and rank (\d+)")
_GPU_FULL = re.compile(r"CUDA out of memory.*?\bGPU (\d{1,2})(?:;| has a total)")
_OUT_OF_MEMORY = tr("was ended by the kernel's out-of-memory killer")


def by_failure(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that raised or died while peers wait; when most ranks did, nobody is singled out."""
    raised, aborted = _raised(evidence, world), _aborts_unprovoked(evidence)
    raised = _of_who_ended_first(evidence, world, raised, _who_ended_first(evidence, raised, aborted))
    broken, sticky = _of_who_aborted(evidence, aborted)
    found: Verdict | None = None
    for facts, cause, what in (
        ([f for f in evidence.of(Kind.UNUSED) if f.rank is not None], Cause.DIVERGED, _UNUSED),
        (broken, Cause.FAILED, _HARDWARE),
        (_on_one_gpu(evidence), Cause.FAILED, _SAME_GPU),
        (raised, Cause.FAILED, _RAISED),
        ([f for f in evidence.of(Kind.NCCL_WARN, name="shm") if _NO_SPACE.search(f.detail)], Cause.FAILED, _SHM),
        (sticky, Cause.FAILED, _CUDA),
        (deadly_exits(evidence), Cause.LOST, _SIGNAL),
        ([fact for fact in evidence.of(Kind.KERNEL_OOM) if fact.rank is not None], Cause.LOST, _OUT_OF_MEMORY),
    ):  # fmt: skip
        if what is _RAISED and found is not None and found.culprits and _named(broken):
            facts = _apart(facts, broken)  # what several others raise alike follows from the broken device
        ranks = _named(facts)
        where = tuple(dict.fromkeys(text for fact in facts if fact.rank is None and (text := engines.place_text(fact))))
        if not ranks and where and found is None and len(where) <= 4:
            first = next(fact for fact in facts if engines.place_text(fact))
            reason = tr(
                "{places} {what}: {text}", places=joined(", ", where), what=what, text=_failure_text(first)[:300]
            )
            found = Verdict((), cause, "medium", "failure", reason, facts, places=where)
        if not ranks or (found is not None and set(ranks) <= set(found.culprits)):
            continue
        together = (
            what is _SAME_GPU
            or what in (_RAISED, _SIGNAL)
            and (_alike(facts) or all(fact.name == "oom" for fact in facts))
        )
        # Of a fault that a device reports when it is asked next, nothing tells whose kernel was the first.
        together = together and not any(_OF_DEVICE.search(fact.detail) for fact in facts)
        if len(ranks) > 1 and world.size is not None and 2 * len(ranks) > world.size and not together:
            if found is not None:
                continue
            reason = tr("most ranks ({ranks}) {what}", ranks=ranks_text(ranks), what=what)
            return Verdict((), cause, "medium", "failure", reason, facts, suspects=ranks)
        if len(ranks) == world.size and world.size > 1 and not together:
            continue
        first = next(fact for fact in facts if fact.rank is not None)
        told = _failure_text(first)[:300].rstrip(" .。")
        reason = tr("{ranks} {what}: {text}", ranks=ranks_text(ranks), what=what, text=told)
        if found is None or not found.culprits:
            basis = {fact.rank_basis for fact in facts if fact.rank is not None} - {"group"}
            overturned = [
                tr(
                    "a failure of another rank that happened before, in a log that is not here; then that of {ranks} "
                    "follows from it",
                    ranks=ranks_text(ranks),
                )
            ]
            if "local" in basis:
                overturned.append(
                    tr("a second node: the launcher names a rank of its node, taken here for the rank of the job")
                )
            sure = "medium" if basis <= {"local"} or what is _SAME_GPU else "high"
            found = Verdict(ranks, cause, sure, "failure", reason, facts, overturned=overturned)
        elif what in (_RAISED, _HARDWARE, _CUDA) or any(
            fact.name in ("first", "oom", "local") for fact in facts
        ):  # a second fault, by evidence of its own
            found.culprits = tuple(sorted({*found.culprits, *ranks}))
            found.reason = joined("; ", (found.reason, reason))
            found.facts = found.facts + facts
    return found


def _raised(evidence: Evidence, world: World) -> list[Fact]:
    """Return exceptions that follow from no peer, with the rank where the line above says whose traceback it is."""
    before = {(fact.source, fact.line): fact.rank for fact in first_to_exit(evidence) if fact.rank is not None}
    before |= {(fact.source, fact.line): fact.peers[0] for fact in evidence.of(Kind.NOTE, name="snippet") if fact.peers}
    raised = [
        fact if fact.rank is not None or (rank := before.get((fact.source, fact.line - 1))) is None
        else fact.clone(rank=rank, rank_basis="text")
        for fact in own_exceptions(evidence) + engines.accused_of_raising(evidence)
    ]  # fmt: skip
    return _on_all_gpus(evidence, world, raised)


def _aborts_unprovoked(evidence: Evidence) -> list[Fact]:
    """Return ends of ranks that may be aborts of their own: no watchdog of theirs had waited, no peer was gone."""
    ends = evidence.of(Kind.LAUNCHER, name="first") + evidence.of(Kind.LAUNCHER, name="aborted")
    ends += evidence.of(Kind.ENGINE_END, name="abort") + evidence.of(Kind.EXIT, name="local")
    expired = {key for fact in evidence.of(*EXPIRED) for key in (("source", fact.source), ("rank", fact.rank))}
    expired |= {("rank", rank) for rank in lost_a_peer(evidence)}
    ends = [
        fact
        for fact in ends
        if fact.number in (-6, None) and fact.rank is not None
        and not expired & {("source", fact.source), ("rank", fact.rank)}
    ]  # fmt: skip
    if len({fact.rank for fact in ends}) < 2:
        return ends
    thrown = evidence.of(Kind.EXCEPTION)  # those of whom C++ itself says that a peer was gone have followed
    torn = {fact.source for fact in thrown if "::" in fact.name and follows_from_peers(fact.name, fact.detail)}
    return [fact for fact in ends if fact.source not in torn]


def _who_ended_first(evidence: Evidence, raised: Sequence[Fact], aborted: Sequence[Fact]) -> dict[int, Fact]:
    """Return the ranks of which a launcher says that they ended first, or else what comes nearest to saying so."""
    first = {fact.rank: fact for fact in first_to_exit(evidence) if fact.rank is not None}
    if len(raised) == 1 and not first:
        first = _ended_behind(evidence, raised[0])
    if not first and not evidence.of(*EXPIRED):
        first = {fact.rank: fact for fact in evidence.of(Kind.LAUNCHER, name="aborted") if fact.rank is not None}
        # MPI_ABORT is called by who has raised, and by an engine's watch over a hang.
        aborts = [] if first or evidence.of(Kind.ENGINE_WAIT) else evidence.of(Kind.ENGINE_END, name="abort")
        first |= {fact.rank: fact for fact in aborts if fact.rank is not None}
        announced = {fact.rank for fact in evidence.of(Kind.NOTE, name="will_end")} - {None}
        first = {} if announced - first.keys() else first  # another rank ends them all: this one only carries it out
    alone = len(raised) == 1 and raised[0].repeated == 1 and "::" in raised[0].name
    if alone and not first and len({fact.rank for fact in aborted}) == 1 and aborted[0].source == raised[0].source:
        # An exception of C++ that nobody catches aborts its process.
        first = {fact.rank: fact for fact in aborted[:1] if fact.rank is not None}
    return first


def _of_who_ended_first(evidence: Evidence, world: World, raised: list[Fact], first: Mapping[int, Fact]) -> list[Fact]:
    """Give one traceback without a rank to the one process that ended by itself."""
    others = [fact for fact in evidence.of(Kind.LAUNCHER, name="failure") if (fact.number or 0) > 0]
    several = len({fact.rank for fact in others} - first.keys()) > 0 and (
        len([fact for fact in raised if fact.frames]) > 1 or any(fact.frames and fact.repeated > 2 for fact in raised)
    )  # of processes that all raised by themselves the one that a launcher noticed first is any
    if world.size is not None and world.size > 1:  # a traceback is read by two rows
        several = several or any(fact.frames and fact.repeated >= 2 * world.size for fact in raised)
    if len(first) != 1 or not raised or several or _named(raised) or len({fact.name for fact in raised}) > 2:
        return raised
    (rank,) = first
    return [fact.clone(rank=rank, rank_basis="launcher") for fact in raised] + list(first.values())


def _of_who_aborted(evidence: Evidence, aborted: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Return errors of devices and sticky ones of CUDA; the runtime aborts the process whose kernel or GPU fails."""
    broken, sticky = hardware_errors(evidence), sticky_cuda(evidence)
    if len({fact.rank for fact in aborted}) != 1 or _named(broken + sticky):
        return broken, sticky
    there, basis = {fact.source for fact in aborted}, "local" if aborted[0].rank_basis == "local" else "launcher"

    def given(fact: Fact) -> Fact:
        on_host = fact.kind is Kind.XID or fact.source not in there
        return fact if on_host else fact.clone(rank=aborted[0].rank, rank_basis=basis)

    return [given(fact) for fact in broken], [given(fact) for fact in sticky]


def _ended_behind(evidence: Evidence, raised: Fact) -> dict[int, Fact]:
    """Return the task of srun that ends right behind a traceback, by its rank, if it is the first one to end."""
    ends = [fact for fact in evidence.of(Kind.LAUNCHER) if fact.source == raised.source]
    first = min(ends, key=lambda fact: fact.line, default=None)
    if first is None or first.rank is None or (first.number or 0) <= 0 or first.rank_basis != "launcher":
        return {}
    there = raised.line < first.line <= raised.line + 2 * len(raised.frames) + 2  # each frame with its source
    return {first.rank: first} if there and raised.repeated < 3 else {}  # a traceback is read by two rows


def _failure_text(fact: Fact) -> str:
    if fact.kind in (Kind.LAUNCHER, Kind.EXIT):
        return _DEADLY.get(fact.number or 0, fact.text)
    return f"{fact.name}: {fact.detail}" if fact.kind is Kind.EXCEPTION else fact.detail or fact.text


def by_first_exit(evidence: Evidence, world: World) -> Verdict | None:
    """A launcher says who ended first and not why: worth a look, no proof."""
    aborted = [f for f in evidence.of(Kind.EXIT, Kind.LAUNCHER) if f.number == -6 and f.name in ("local", "first")]
    after = lost_a_peer(evidence)
    facts = [fact for fact in first_to_exit(evidence) or aborted if fact.rank is None or fact.rank not in after]
    if not facts or evidence.of(*EXPIRED):
        return None
    first = facts[0]
    who = tr("a process")
    if first.rank is not None:
        who = ranks_text([first.rank])
    elif first.local_rank is not None:
        who = tr("local rank {rank}", rank=first.local_rank)
    others = [fact for fact in evidence.of(Kind.LAUNCHER) if fact.name == "failure" and fact.rank != first.rank]
    if first.name == "first" and first.rank is not None and others and all(fact.number == -6 for fact in others):
        reason = tr(
            "{ranks} exited first with code {code}; the others were aborted after it", ranks=who, code=first.number
        )
        return Verdict((first.rank,), Cause.FAILED, "medium", "first exit", reason, facts)
    reason = tr("{ranks} exited first, cause not shown", ranks=who)
    if first.number is not None:
        reason = tr("{ranks} exited first with code {code}, cause not shown", ranks=who, code=first.number)
    return Verdict((), Cause.UNKNOWN, "low", "first exit", reason, facts, _named(facts[:1]))


def by_peer_closed(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's proxy threads say whose connection closed; after an abort that is only the teardown."""
    aborts: dict[int, int] = {}
    for fact in evidence.of(Kind.NOTE, name="abort_complete"):
        aborts.setdefault(fact.source, fact.line)
    facts = [fact for fact in evidence.of(Kind.PEER_CLOSED) if fact.line < aborts.get(fact.source, 1 << 60)]
    if not facts or not evidence.one_node or len({fact.host for fact in facts if fact.host}) > 1:
        return None
    local = facts[0].local_rank
    first = list(itertools.takewhile(lambda fact: fact.local_rank == local, facts))
    speakers = {fact.pid if fact.pid is not None else (fact.line, fact.order) for fact in first}
    own = any(fact.number == local for fact in first)  # it says so itself: an orderly end, in which each closes its own
    devices = [fact.number for fact in facts if fact.number is not None]
    size = world.size or evidence.local_size or max([local or 0, *devices]) + 1
    if local is None or own or len(speakers) < max(2, min(size, 8) - 2):
        return None
    reason = tr(
        "{count} processes say that the connection of local rank {local} closed", count=len(speakers), local=local
    )
    overturned = [tr("an abort of all communicators before these lines")]
    return Verdict((local,), Cause.LOST, "medium", "peer closed", reason, facts, overturned=overturned)


#: Interfaces that no other host reaches: of the host alone, of its containers and of its virtual machines.
_OWN_INTERFACE = re.compile(r"lo$|docker|virbr|podman|cni|br-|veth|flannel|cali")


def _on_own_interfaces(evidence: Evidence) -> list[Fact]:
    return [fact for fact in evidence.of(Kind.NCCL_INFO) if _OWN_INTERFACE.match(fact.name) and fact.host]


def own_addresses(evidence: Evidence) -> list[Fact]:
    """Return what hosts told NCCL to be reached at, where two have one and the same address and nothing came of it."""
    waited = evidence.of(*WAITING, *EXPIRED) or any(
        "KeyboardInterrupt" in one.name for one in evidence.of(Kind.EXCEPTION)
    )
    if not waited or evidence.of(Kind.JOINED, Kind.ALIVE, Kind.PROGRESS):
        return []
    told = [fact for fact in _on_own_interfaces(evidence) if fact.name != "lo"]
    shared = {
        one.detail for one in told if any(one.detail == other.detail and one.host != other.host for other in told)
    }
    return [fact for fact in told if fact.detail in shared][:4]


def by_unreachable(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks of one host have told NCCL an address that only this host has, and the others cannot reach it."""
    own = _on_own_interfaces(evidence)
    told = {fact.detail for fact in own}
    failed = [
        fact
        for fact in evidence.of(Kind.NCCL_WARN, name="connect")
        if any(f" {address}<" in f" {fact.detail}" for address in told)
    ]
    hosts = {fact.host for fact in own}
    if len(hosts) != 1 or not failed or any(fact.host in hosts for fact in failed):
        return None
    host = hosts.pop()
    ranks = tuple(sorted(evidence.ranks.hosts.get(host, ())))
    reason = tr("{host} has told NCCL the address of {name}, which no other host reaches", host=host, name=own[0].name)
    places = () if ranks else (host,)
    return Verdict(ranks, Cause.NETWORK, "medium", "unreachable", reason, own[:1] + failed, places=places)


def by_port(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks of one host say that their own port is down, and those of others that a peer does not answer."""
    own = [fact for fact in evidence.of(Kind.NCCL_WARN, name="ib_async") if "port error" in fact.detail]
    hosts = {fact.host for fact in own}
    told = [fact for fact in fabric_errors(evidence) if fact.name == "ib" and fact.host not in hosts]
    ranks = {fact.rank for fact in own if fact.rank is not None}
    if len(hosts) != 1 or not told or not ranks or any(fact.rank is None for fact in own):
        return None
    reason = tr(
        "the port of {ranks} has lost its link, and other hosts get no answer from a peer", ranks=ranks_text(ranks)
    )
    return Verdict(tuple(sorted(ranks)), Cause.NETWORK, "medium", "port", reason, own + told)


def by_clients(evidence: Evidence, world: World) -> Verdict | None:
    """Tasks that had ended by srun, or pods that never started, when torch's store misses just as many clients."""
    for fact in evidence.of(Kind.RENDEZVOUS, name="clients"):
        ended = [
            note
            for note in evidence.of(Kind.NOTE, name="tasks_ended")
            if note.source == fact.source and note.line < fact.line
        ]
        pods = evidence.of(Kind.NOTE, name="not started")
        ranks = {rank for note in ended + pods for rank in note.peers}
        came, size = (int(number) for number in re.findall(r"\d+", fact.detail))
        if ranks and len(ranks) == size - came and max(ranks) < size:
            reason = tr("{ranks} ended before the others had met", ranks=ranks_text(ranks))
            if not ended:
                reason = tr("the containers of {ranks} have never started", ranks=ranks_text(ranks))
            return Verdict(tuple(sorted(ranks)), Cause.LOST, "medium", "clients", reason, [*ended, *pods, fact])
    return None


def by_watchdog(evidence: Evidence, world: World) -> Verdict | None:
    """The watchdog of one rank alone is stuck, or its monitor hears nothing, and its stack is in no collective."""
    beats = evidence.of(Kind.HEARTBEAT) or evidence.of(Kind.ENGINE_WAIT, name="monitor")
    ranks = {fact.rank for fact in beats}
    first = {fact.rank for fact in evidence.of(Kind.LAUNCHER, name="first") or evidence.of(Kind.EXIT, name="local")}
    stacks = [fact for fact in evidence.of(Kind.STACK) if fact.rank in ranks and fact.frames and "Main" in fact.text]
    rank = ranks.pop() if len(ranks) == 1 and ranks == first and not evidence.of(*EXPIRED) else None
    if rank is None or not stacks or _WAITS_FOR_DEVICE.search(stacks[-1].frames[-1]):
        return None
    if any(_IN_COLLECTIVE.search(frame) for frame in stacks[-1].frames[-5:]):
        return None
    reason = tr(
        "the watchdog of {ranks} alone is stuck, while it is at work: {frame}",
        ranks=ranks_text([rank]),
        frame=stacks[-1].frames[-1],
    )
    return Verdict((rank,), Cause.LATE, "medium", "watchdog", reason, [*beats[:1], stacks[-1]])


def by_ras(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's RAS: processes that are dead or do not answer, and ranks that have launched fewer operations."""
    facts = evidence.of(Kind.RAS)
    gone = [fact for fact in facts if fact.name in ("dead", "silent", "error")]
    if gone:
        ranks = tuple(sorted({*(r for f in gone for r in f.peers), *(f.rank for f in gone if f.rank is not None)}))
        cause, what, sure = next(
            row[1:]
            for row in (
                ("dead", Cause.LOST, tr("is dead"), "high"),
                ("error", Cause.FAILED, tr("reports an asynchronous error"), "medium"),
                ("silent", Cause.UNKNOWN, tr("does not answer"), "medium"),
            )
            if row[0] in {fact.name for fact in gone}
        )
        if ranks and (world.size is None or 2 * len(ranks) < max(world.size, 3)):
            return Verdict(
                ranks, cause, sure, "ras", tr("{who} {what} by NCCL's RAS", who=ranks_text(ranks), what=what), gone
            )
        where = ", ".join(sorted({fact.host for fact in gone if fact.host})) or tr("one of the hosts")
        who = tr("a process on {hosts}", hosts=where)
        return Verdict(rule="ras", cause=cause, reason=tr("{who} {what} by NCCL's RAS", who=who, what=what), facts=gone)
    uneven = [fact for fact in facts if fact.name in ("behind", "ahead") and fact.peers]
    if not uneven:
        return None
    first = max(uneven, key=lambda fact: fact.repeated)
    proven = first.repeated > 1 or bool(evidence.of(*EXPIRED))
    who, counts = ranks_text(first.peers), first.detail
    if first.name == "behind":
        one = tr("{ranks} has launched fewer operations than the others ({counts})", ranks=who, counts=counts)
        many = tr("{ranks} have launched fewer operations than the others ({counts})", ranks=who, counts=counts)
    else:
        one = tr("{ranks} has launched more operations than the others ({counts})", ranks=who, counts=counts)
        many = tr("{ranks} have launched more operations than the others ({counts})", ranks=who, counts=counts)
    text = one if len(first.peers) == 1 else many
    overturned = [tr("a second query a few seconds later with other counts: then the job moves, and nobody is stuck")]
    if (first.completed or world.size or 0) > 2 * len(first.peers) and (proven or first.name == "behind"):
        sure = "high" if proven else "low"
        return Verdict(first.peers, Cause.UNKNOWN, sure, "ras", text, uneven, overturned=overturned, work=first.work)
    return Verdict(rule="ras", reason=text, facts=uneven, suspects=first.peers, overturned=overturned)


def fabric_errors(evidence: Evidence) -> list[Fact]:
    """Return what InfiniBand, RoCE or EFA report; completions with status 5 are flushes that follow from another."""
    return [fact for fact in evidence.of(Kind.NCCL_WARN) if fact.name in ("ib", "ib_async") and fact.number != 5]


def by_gone_peer(evidence: Evidence, world: World) -> Verdict | None:
    """All but one rank report that a peer's process ended; the one whose log is here and says nothing is that peer."""
    facts = [
        fact
        for fact in evidence.of(Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION, Kind.EXCEPTION)
        if fact.rank is not None and "remote process exited" in fact.text + fact.detail
    ]
    told = {fact.rank for fact in facts if fact.rank is not None}
    spoke = told | {row.rank for row in evidence.rows} | {fact.rank for fact in evidence.of(*EXPIRED)}
    silent = set(world.covered) - spoke
    if len(silent) != 1 or world.size is None or len(told) < max(2, world.size - 1) or fabric_errors(evidence):
        return None
    reason = tr(
        "{ranks} report that a peer's process ended or the network broke; {others} printed nothing of the kind",
        ranks=ranks_text(told),
        others=ranks_text(silent),
    )
    overturned = [
        tr(
            "a later line of {ranks}, or the same error in its log: then the network between them broke",
            ranks=ranks_text(silent),
        )
    ]
    return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts, overturned=overturned)


Rule = Callable[[Evidence, World], "Verdict | None"]
Sides = Mapping[tuple[object, ...], set[int]]


# --- what a witness says outright ---


_BEGINS_EVALUATION = re.compile(r"name='evaluation .*, beginning of try \d+'")


def by_guard(evidence: Evidence, world: World) -> Verdict | None:
    """An incident of ncclguard's own: the ranks agreed on it while they lived.

    The latest counts, because the job may have gone on after one before; and another rank's own exception may be what
    ended it.
    """
    written, found = written_incidents(evidence), guard_incidents(evidence)
    if not found:
        return None
    first = found[-1]
    if not written and {fact.rank for fact in own_exceptions(evidence)} - {None, *first.peers}:
        return None
    cause = Cause(first.name) if first.name in {cause.value for cause in Cause} else Cause.UNKNOWN
    reason = received(first.detail) if first.detail else tr("the ranks agreed on it")
    named = set(first.peers)
    others = set(range(world.size or max(named, default=0))) - named
    if cause is Cause.EXITED and _BEGINS_EVALUATION.search(first.detail) and len(named) > len(others) > 0:
        alone = tuple(sorted(others))
        reason = joined("; ", (reason, tr("{ranks} alone called this evaluation", ranks=ranks_text(alone))))
        return Verdict((), cause, "high", "ncclguard incident", reason, [first], work=first.work, suspects=alone)
    return Verdict(
        tuple(sorted(named)), cause, "high", "ncclguard incident", reason, [first], work=first.work,
        sides=list(first.sides),
    )  # fmt: skip


_SESSION = re.compile(r"incident ([0-9a-f]{8})-")


def _without_its_end(evidence: Evidence, incidents: list[Fact]) -> list[Fact]:
    """Return incidents without one that only tells how a job ended for what the one before it had told of.

    A rank that had made another call than the others is then the first to have no more of them.
    """
    before, last = incidents[-2:] if len(incidents) > 1 else (None, None)
    if before is None or last is None:
        return incidents
    call = incident_text.ENDS_CALL.split(last.detail)[0] if incident_text.FROM_OUTSIDE.search(last.text) else ""
    ended = incident_text.STOOD_STILL.search(before.text) and call and call in before.text
    left = (before.name, last.name) == ("diverged", "exited") and set(last.peers) == set(before.peers)
    if (ended and not _stepped(evidence, before, last)) or (left and not _stepped(evidence, before, last, 3)):
        return incidents[:-1]
    return incidents


def _stepped(evidence: Evidence, before: Fact, later: Fact, times: int = 1) -> bool:
    """Return whether the program has gone on between two lines of a log, by so many steps."""
    until = later.line if later.source == before.source else math.inf
    lines = [fact for fact in evidence.of(Kind.ALIVE, Kind.PROGRESS) if fact.source == before.source]
    between = [fact for fact in lines if before.line < fact.line < until]
    return len({fact.number for fact in between}) >= times


def written_incidents(evidence: Evidence) -> list[Fact]:
    """Return ncclguard's incidents from its own JSON, the latest last."""
    return sorted((f for f in evidence.of(Kind.GUARD) if f.completed is not None), key=lambda fact: fact.when or 0.0)


def guard_incidents(evidence: Evidence) -> list[Fact]:
    """Return ncclguard's incidents once each, the latest last: from its own JSON, or else what logs tell of them."""
    found: dict[str, Fact] = {}
    told = written_incidents(evidence) or evidence.of(Kind.GUARD)
    # Who interrupts a job that hangs gives each rank an exception that is no rank's fault.
    for fact in [fact for fact in told if "KeyboardInterrupt" not in fact.text] or told:
        name = re.split(r"\. |。", fact.detail)[0]  # an error and a panel go on in different ways
        longer = next((known for known in found if name and (known.startswith(name) or name.startswith(known))), name)
        if len(longer) < len(name):
            found[name] = found.pop(longer).clone(detail=fact.detail)
        elif longer != name:
            name, fact = longer, fact.clone(detail=found[longer].detail)
        before = found.pop(name, fact)
        found[name] = fact if fact.advice else before  # the panel says more than the other lines
    return _without_its_end(evidence, _once_lost(evidence, found.values()))


def _once_lost(evidence: Evidence, incidents: Iterable[Fact]) -> list[Fact]:
    """Return the incidents, of those by which the same ranks were lost at once the one that its panel tells of.

    Whatever waits for such a rank ends with it, too.
    """
    kept: list[Fact] = []
    for fact in incidents:
        before = kept[-1] if kept else fact
        sessions = {found[1] for one in (before, fact) if (found := _SESSION.search(one.text))}
        same = kept and before.name == fact.name == "lost" and before.peers == fact.peers and len(sessions) < 2
        if not same or _stepped(evidence, before, fact):
            kept.append(fact)
        elif fact.advice and not before.advice:
            kept[-1] = fact
    return kept


def by_traces(evidence: Evidence, world: World) -> Verdict | None:
    """Flight-recorder dumps of two ranks or more."""
    if len(evidence.dumps) < 2:
        return None
    verdict = name_culprits(evidence.dumps)
    failure = by_failure(evidence, world)
    if failure is not None and failure.culprits and set(failure.culprits) <= set(verdict.culprits):
        verdict.cause = failure.cause
        verdict.facts += failure.facts
        verdict.reason = joined("; ", (verdict.reason, failure.reason))
    elif failure is not None and failure.culprits and not set(failure.culprits) & set(evidence.dumps):
        verdict.culprits = tuple(sorted({*verdict.culprits, *failure.culprits}))  # it ended before it could leave one
        verdict.suspects = tuple(rank for rank in verdict.suspects if rank not in failure.culprits)
        verdict.facts += failure.facts
        verdict.reason = joined("; ", filter(None, (verdict.reason, failure.reason)))
    return verdict if verdict.culprits or verdict.sides else None


_PARAMETERS = re.compile(r"Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params")


def by_parameters(evidence: Evidence, world: World) -> Verdict | None:
    """DDP's check at set-up (torch/csrc/distributed/c10d/reducer.cpp, 1.12 to 2.15): models of unequal length."""
    facts = [fact for fact in evidence.of(Kind.EXCEPTION) if _PARAMETERS.search(fact.detail)]
    told = {int(rank): int(count) for fact in facts for one in _PARAMETERS.findall(fact.detail)
            for rank, count in (one[:2], one[2:]) if int(count)}  # fmt: skip
    if len(set(told.values())) < 2:  # a model has parameters: 0 is a place of the buffer that nobody has filled
        return None
    most, many = Counter(told.values()).most_common(1)[0]
    odd = tuple(sorted(rank for rank, count in told.items() if count != most))
    size = world.size if world.size is not None and world.basis != "highest rank seen" else len(told)
    text = ", ".join(f"{rank}: {count}" for rank, count in sorted(told.items()))
    reason = tr("the ranks' models differ in their number of parameters ({counts})", counts=text)
    if many < 2 or 2 * many <= size:
        return Verdict((), Cause.DIVERGED, "low", "parameters", reason, facts, suspects=tuple(sorted(told)))
    return Verdict(odd, Cause.DIVERGED, "high", "parameters", reason, facts)


_DIFFERS = re.compile(
    r"(?i)mismatch|differ|diverge|inconsisten|not (?:the same|equal|identical)|check ?sum|\bcrc|\bhash"
)


def by_table(evidence: Evidence, world: World) -> Verdict | None:
    """A table of all ranks, the last one that was printed: all that raise say that ranks differ, and it tells which."""
    tables = sorted(evidence.of(Kind.NOTE, name="table"), key=lambda fact: (fact.source, max(fact.line, fact.until)))
    raised = own_exceptions(evidence)
    if not tables or not raised or any(not _DIFFERS.search(f"{fact.name} {fact.detail}") for fact in raised):
        return None
    last = tables[-1]
    stated = world.basis in ("given", "stated")
    if not last.peers or (stated and last.number != world.size) or len({fact.source for fact in tables}) > 1:
        return None
    reason = tr("{ranks} differ from most of the others in what was printed of all", ranks=ranks_text(last.peers))
    return Verdict(last.peers, Cause.DIVERGED, "high", "table", reason, [last, *raised[:1]])


def by_desync_report(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_NCCL_DESYNC_DEBUG: the ranks that the report calls lagging."""
    told = evidence.of(Kind.DESYNC)
    furthest = max((fact.number or 0 for fact in told), default=0)
    facts = [f for f in told if f.name == "lagging" or (f.name == "unfinished" and (f.number or 0) < furthest)]
    named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
    if not named or (world.size is not None and 2 * len(named) > world.size and world.size > 2):
        return None
    reason = tr("the desync report says {ranks} lag behind", ranks=ranks_text(named))
    if facts[0].detail:
        reason = tr("the desync report says {ranks} {what}", ranks=ranks_text(named), what=facts[0].detail)
    return Verdict(named, Cause.UNKNOWN, "high", "desync report", reason, facts)


def by_analyser(evidence: Evidence, world: World) -> Verdict | None:
    """torch's analyser of dumps prints who has not joined a collective, and who differs from the first rank in it."""
    told = [fact for fact in evidence.of(Kind.RECORDER) if fact.peers]
    absent = [fact for fact in told if fact.name == "missing"]
    if absent:  # of several collectives: a rank that is missing in all of them, others may wait elsewhere
        named = frozenset.intersection(*(frozenset(fact.peers) for fact in absent))
        # A rank without a dump is missing too; who says itself that it waits in this very call has joined.
        calls = {fact.number for fact in absent}
        first = min((number for number in calls if number is not None), default=0)
        named -= {row.rank for row in evidence.rows if row.waiting and row.seq is not None and row.seq >= first}
        if not named:
            return None
        few = all(2 * len(named) < (fact.completed or world.size or 0) for fact in absent)
        there = {row.rank for row in evidence.rows if row.waiting and row.seq in calls}
        few = few or (world.size == 2 and there == {0, 1} - named)  # the other one says it, too
        reason = tr(
            "torch's analyser of the dumps finds that {ranks} did not join", ranks=ranks_text(named or absent[0].peers)
        )
        if few:
            return Verdict(
                tuple(sorted(named)), Cause.UNKNOWN, "medium", "analyser", reason, absent, work=absent[0].work
            )
        return Verdict(rule="analyser", reason=reason, facts=absent, suspects=tuple(sorted(named)), work=absent[0].work)
    odd = [fact for fact in told if "MISMATCH" in fact.name and "STATE" not in fact.name]
    ranks = tuple(sorted({rank for fact in odd for rank in fact.peers}))
    if not ranks:
        return None
    reason = tr(
        "torch's analyser of the dumps finds a difference between {ranks} and the first rank", ranks=ranks_text(ranks)
    )
    few = all(2 * len(ranks) < (fact.completed or world.size or 0) for fact in odd)
    culprits, suspects, sure = (ranks, (), "medium") if few else ((), ranks, "low")
    return Verdict(culprits, Cause.DIVERGED, sure, "analyser", reason, odd, suspects=suspects, work=odd[0].work)


def by_lost_host(evidence: Evidence, world: World) -> Verdict | None:
    """A scheduler says that a host or a pod is gone, and the log proves which ranks were there."""
    for fact in evidence.of(Kind.SCHEDULER):
        host = fact.host.removeprefix("pod/").removeprefix("node/")
        if not host and fact.name in ("OOMKilled", "Evicted"):  # `kubectl describe` of a pod, in a file named after it
            host = evidence.ranks.host_of(fact.file)
        if not host or fact.name in ("TIME LIMIT", "JOB REQUEUE", "PREEMPTION"):
            continue
        ranks = evidence.ranks.ranks_on(host, evidence.local_size)
        ended = [
            one
            for one in evidence.of(Kind.EXIT, Kind.LAUNCHER, Kind.ENDED_BY_LAUNCHER)
            if one.host and one.rank is not None
        ]
        ranks |= {
            one.rank for one in ended if one.host == host and one.rank_basis == "launcher" and one.rank is not None
        }
        elsewhere = {one.rank for one in ended if one.host != host and one.rank_basis == "launcher"}
        if (
            not ranks
            and world.size is not None
            and world.basis in ("given", "stated")
            and len(elsewhere) > world.size // 2
        ):
            ranks = set(range(world.size)) - elsewhere  # srun tells the tasks of all the other hosts
        size = world.size
        if size is not None:  # those that were lost may be the highest ones
            size = max(size, 1 + max((rank for there in evidence.ranks.hosts.values() for rank in there), default=0))
        if ranks and (size is None or len(ranks) < size):
            named = tuple(sorted(ranks))
            reason = tr(
                "{ranks} ran on {host}: {event}", ranks=ranks_text(named), host=host, event=fact.name or fact.text
            )
            overturned = [tr("an error of another rank that came before: the host was then taken away afterwards")]
            return Verdict(named, Cause.LOST, "medium", "lost host", reason, [fact], overturned=overturned)
    return None


def by_stacks(evidence: Evidence, world: World) -> Verdict | None:
    """Stacks of nearly all ranks, taken while they hang: all but a few stand in a collective."""
    last: dict[int, Fact] = {}
    inside: set[int] = set()
    moved: set[int] = set()
    for fact in evidence.of(Kind.STACK):  # a rank may have one for each thread
        if fact.rank is not None and fact.frames:
            before, main = last.get(fact.rank), "MainThread" in fact.text
            if before is None or main or "MainThread" not in before.text:
                last[fact.rank] = fact
            if before is not None and main and "MainThread" in before.text and before.frames != fact.frames:
                moved.add(fact.rank)
            inside |= {fact.rank} if any(_IN_COLLECTIVE.search(frame) for frame in fact.frames[-5:]) else set()
    outside = set(last) - inside
    # A rank that waits for its device may wait for this collective.
    devices = {rank for rank in outside if _WAITS_FOR_DEVICE.search(last[rank].frames[-1])}
    outside -= devices
    # Without a limit the job may move; but who has dumped its stacks, and nothing else, asks about a hang.
    still = (Kind.STACK, Kind.NOTE, Kind.PHASE)
    done = {fact.order for fact in evidence.of(Kind.PROGRESS) if fact.number == 100}
    dumped = not moved and all(fact.kind in still or fact.order in done for fact in evidence.facts)
    there = {fact.source for fact in last.values()}
    # Somebody gave the job up; its own log tells of nothing else.
    ended = evidence.of(Kind.ENDED_BY_LAUNCHER) + evidence.of(Kind.NOTE, name="interrupted")
    keyboard = evidence.of(Kind.EXCEPTION, name="KeyboardInterrupt")
    ended += keyboard
    given_up = ended and not moved and all(
        fact.kind in still or fact in keyboard
        or (fact.source not in there and fact.kind in (Kind.PROGRESS, Kind.ALIVE, Kind.ENDED_BY_LAUNCHER))
        for fact in evidence.facts
    )  # fmt: skip
    limits = evidence.of(*EXPIRED, Kind.ENGINE_WAIT) or dumped or given_up
    if (
        not limits
        or len(last) < 3
        or len(last) < (world.size or 0) - 1
        or not outside
        or 3 * len(outside) > len(inside) + len(devices)
        or (
            len(devices) > len(inside)
            and (len(devices) < 3 or len({last[rank].frames[:-1] or last[rank].frames for rank in devices}) > 1)
        )
    ):
        return None
    facts = [last[rank] for rank in sorted(outside)]
    reason = tr(
        "{others} stand in a collective and {ranks} elsewhere: {frame}",
        others=ranks_text(inside), ranks=ranks_text(outside), frame=facts[0].frames[-1],
    )  # fmt: skip
    overturned = [tr("a second look a few seconds later with other stacks: then the job moves, and nobody is stuck")]
    return Verdict(tuple(sorted(outside)), Cause.LATE, "medium", "stacks", reason, facts, overturned=overturned)


def by_section(evidence: Evidence, world: World) -> Verdict | None:
    """nvidia-resiliency-ext's monitors: one rank alone has not left a section of its program in time.

    Where the others did not leave theirs either, they all stand in one, and the one rank is in another or in none.
    """
    facts = [fact for fact in evidence.of(Kind.ENGINE_WAIT, name="monitor") if fact.detail and fact.rank is not None]
    sections: dict[str, set[int]] = defaultdict(set)
    for fact in facts:
        sections[fact.detail].add(fact.rank or 0)
    hosts = {(fact.rank, fact.host) for fact in facts}
    if not sections or own_exceptions(evidence) or len(hosts) > len({rank for rank, _ in hosts}):
        return None  # of several hosts with the same numbers, which are local ranks
    *others, (name, odd) = sorted(sections.items(), key=lambda item: -len(item[1]))
    size = max(world.size or 0, 1 + max(max(ranks) for ranks in sections.values()))
    if len(odd) != 1 or size < 3 or len(others) > 1 or (others and len(others[0][1] - odd) < size - 1):
        return None
    own = [fact for fact in facts if fact.rank in odd and fact.detail == name]
    reason = tr("{ranks} alone did not leave section {name} within its limit", ranks=ranks_text(odd), name=name)
    if others:
        reason = tr(
            "all ranks but {ranks} stand in section {name}: {text}",
            ranks=ranks_text(odd), name=others[0][0], text=own[0].text[:200],
        )  # fmt: skip
    return Verdict(tuple(odd), Cause.LATE, "medium", "section", reason, own)


def by_heartbeats(evidence: Evidence, world: World) -> Verdict | None:
    """nvidia-resiliency-ext's monitors: in a hang all ranks fall silent at once; one that does long before began it."""
    facts = [
        fact for fact in evidence.of(Kind.ENGINE_WAIT, name="monitor") if not fact.detail and fact.rank is not None
    ]
    last = sorted((fact.when - fact.seconds, fact.order, fact) for fact in facts
                  if fact.when is not None and fact.seconds is not None)  # fmt: skip
    sources = {fact.source for fact in facts}
    if len(last) < 3 or len(last) != len(facts) or len(sources) > 1 or len({fact.rank for fact in facts}) < len(last):
        return None
    (first, _, fact), (second, _, other) = last[:2]
    if second - first < max(60.0, (fact.seconds or 0.0) / 2) or last[-1][0] - second > (second - first) / 2:
        return None
    reason = tr(
        "{ranks} sent its last heartbeat {seconds:.0f} s before all the others stopped",
        ranks=ranks_text([fact.rank or 0]),
        seconds=second - first,
    )
    return Verdict((fact.rank or 0,), Cause.UNKNOWN, "medium", "heartbeats", reason, [fact, other])


def by_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """monitored_barrier: rank 0 names who did not come; when rank 0 itself says nothing, it is the one."""
    facts = evidence.of(Kind.BARRIER_MISSING)
    if facts:
        came = {fact.rank for fact in evidence.of(Kind.BARRIER_REACHED)}
        named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
        reason = tr("rank 0 reports that {ranks} did not reach the barrier", ranks=ranks_text(named))
        if came & set(named):  # each says it of the other: the connection between them, or both
            return Verdict(rule="monitored barrier", reason=reason, facts=facts, suspects=tuple(sorted({0, *named})))
        return Verdict(named, Cause.UNKNOWN, "high", "monitored barrier", reason, facts)
    reached = evidence.of(Kind.BARRIER_REACHED)
    asked = [fact for fact in reached if fact.rank == 0 and fact.peers]  # rank 0 asks one after the other
    if asked:
        named, reason = asked[0].peers, tr("rank 0 waited in the barrier for {ranks}", ranks=ranks_text(asked[0].peers))
        return Verdict(named, Cause.UNKNOWN, "high", "monitored barrier", reason, asked)
    zero_waits = any(fact.rank == 0 and fact.kind in WAITING for fact in evidence.facts)
    if not reached or zero_waits or 0 not in world.covered:
        return None
    who = ranks_text({fact.rank for fact in reached if fact.rank is not None})
    reason = tr("{who} reached the barrier and waited for rank 0, which printed nothing", who=who)
    return Verdict((0,), Cause.UNKNOWN, "medium", "monitored barrier", reason, reached)


def by_store_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """The store-based barrier at set-up prints who waits and how many have come."""
    facts = evidence.of(Kind.STORE_BARRIER)
    if not facts:
        return None
    size = max(fact.number or 0 for fact in facts)
    come = max(fact.completed or 0 for fact in facts)
    if come > size:
        reason = tr(
            "{count} processes have come to a barrier of {size}: the store is shared with another job, or stale",
            count=come,
            size=size,
        )
        return Verdict(rule="store barrier", reason=reason, facts=facts[:3])
    here = {fact.rank for fact in facts if fact.rank is not None}
    keys = {key for fact in facts for key in _BARRIER_KEY.findall(fact.text)}
    if len(keys) == 1:  # who has entered says so, before half a minute has passed and it says that it waits
        here |= {
            fact.rank
            for fact in evidence.of(Kind.NOTE, name="entered")
            if fact.rank is not None and fact.detail in keys
        }
    missing = tuple(sorted(set(range(size)) - here)) if size <= 65_536 else ()
    reason = tr("{count} of {size} ranks came to the barrier that ends init_process_group", count=come, size=size)
    if missing and len(missing) == size - come and here:
        rest = tr("all but {ranks} wait in it", ranks=ranks_text(missing))
        reason = joined("; ", (reason, rest))
        overturned = [tr("a line of {ranks} in this barrier", ranks=ranks_text(missing))]
        return Verdict(missing, Cause.UNKNOWN, "high", "store barrier", reason, facts, overturned=overturned)
    return Verdict(rule="store barrier", reason=reason, facts=facts[:3], suspects=missing if len(missing) <= 8 else ())


def by_hccl(evidence: Evidence, world: World) -> Verdict | None:
    """Ascend's HCCL names the peer whose record did not come; the rank that prints it is a victim."""
    facts = evidence.of(Kind.TIMEOUT, name="hccl")
    victims = {fact.rank for fact in facts if fact.rank is not None}
    # A line that has the speaker's rank both in the job and in its group tells where the group begins.
    shifts = {(fact.rank or 0) - (fact.group_rank or 0) for fact in facts
              if fact.rank_basis == "prefix" and fact.group_rank is not None and fact.peers}  # fmt: skip
    if len(shifts) > 1:
        return None
    shift = shifts.pop() if shifts else 0
    told = Counter(peer + shift for fact in facts for peer in set(fact.peers))
    suspects = tuple(sorted(set(told) - victims))
    if not suspects:
        return None
    if len(suspects) == 1 and len(victims) >= 2:
        reason = tr("{ranks} wait for {others}", ranks=ranks_text(victims), others=ranks_text(suspects))
        return Verdict(suspects, Cause.UNKNOWN, "medium", "hccl", reason, facts)
    reason = tr("the rank that printed the timeout waits for {ranks}", ranks=ranks_text(suspects))
    return Verdict(rule="hccl", reason=reason, facts=facts, suspects=suspects)


def by_store_key(evidence: Evidence, world: World) -> Verdict | None:
    """The peers wait for a key that one rank sets before its first NCCL call."""
    facts = [fact for fact in evidence.of(Kind.STORE_KEY) if "imeout" in fact.detail or "timed out" in fact.detail]
    owners = {peer for fact in facts for peer in fact.peers}
    if len(owners) != 1 or any(fact.rank in owners for fact in facts):
        return None
    owner = next(iter(owners))
    who = ranks_text({fact.rank for fact in facts if fact.rank is not None})
    reason = tr("{who} waited for the NCCL id that rank {owner} sets at its first collective", who=who, owner=owner)
    return Verdict((owner,), Cause.UNKNOWN, "medium", "store key", reason, facts)


# --- who is elsewhere than the others ---


def _side_text(work: Work) -> str:
    shape = f" {list(work.shape)}" if work.shape is not None else ""
    numel = f" NumelIn={work.numel_in} NumelOut={work.numel_out}" if work.numel_in is not None else ""
    dtype = f" {work.dtype}" if work.dtype else ""
    return f"#{work.seq if work.seq is not None else '?'} {work.op or '?'}{shape}{numel}{dtype}"


def _by_majority(told: Sides, works: dict[int, Work], world: World, of_all: bool = True) -> Verdict:
    """Say who is in the minority; `told` is what a collective is told by -> its ranks, `works` those that said it."""
    ordered = sorted(told.items(), key=lambda item: (-len(item[1]), min(item[1], default=0)))
    first = {key: min(ranks & set(works), default=None) for key, ranks in ordered}
    sides = [
        (_side_text(works[one]), tuple(sorted(ranks))) for key, ranks in ordered if (one := first[key]) is not None
    ]
    if len(ordered) < 2:
        return Verdict(cause=Cause.UNKNOWN, sides=sides, reason=tr("all fingerprints agree"))
    total = sum(len(ranks) for _, ranks in ordered)
    majority = ordered[0][1]
    size = world.size if of_all and world.size is not None and world.basis != "highest rank seen" else total
    enough = len(majority) >= 3 or 2 * len(majority) > size  # two against one are few when most ranks have not spoken
    if len(majority) >= 2 and 2 * len(majority) > total and enough:
        odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        reason = tr(
            "{ranks} in another collective than the majority ({others})",
            ranks=ranks_text(odd),
            others=ranks_text(majority),
        )
        overturned = [
            tr("the call sites: the majority may have skipped a call that only {ranks} made", ranks=ranks_text(odd))
        ]
        return Verdict(odd, Cause.DIVERGED, "high", "majority", reason, sides=sides, overturned=overturned)
    both = tuple(sorted(works))
    if total == 2 and world.is_pair:
        reason = tr("the two ranks are in different collectives; which one strayed is not shown")
        overturned = [tr("the call sites of both: they say which of the two left the common path")]
        return Verdict(both, Cause.DIVERGED, "medium", "pair", reason, sides=sides, overturned=overturned)
    reason = tr("ranks are in different collectives and no side has a majority")
    return Verdict((), Cause.DIVERGED, "low", "no majority", reason, suspects=both, sides=sides)


def by_fingerprint(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: the majority of the fingerprints is right; a zeroed one is an absent peer."""
    facts = [fact for fact in evidence.of(Kind.FINGERPRINT) if fact.rank is not None and fact.work is not None]
    prints: dict[int, Work] = {}
    known: dict[int, Fact] = {}
    for fact in facts:
        assert fact.rank is not None and fact.work is not None
        if fact.name == "hccl":
            reason = tr(
                "{ranks} differ in an argument: {what}",
                ranks=ranks_text(f.rank for f in facts if f.rank is not None),
                what=fact.detail,
            )
            return Verdict(
                (), Cause.DIVERGED, "medium", "fingerprint", reason, facts, suspects=_named(facts), work=fact.work
            )
        if fact.name != "absent" and (fact.rank not in prints or fact.name == "own"):
            prints[fact.rank] = fact.work
        known.setdefault(fact.rank, fact)
    absent = tuple(sorted({f.rank for f in facts if f.rank is not None and f.name == "absent"} - set(prints)))
    if absent:
        reason = tr(
            "{ranks} sent an empty fingerprint: absent from the check, not in a REDUCE", ranks=ranks_text(absent)
        )
        return Verdict(absent, Cause.UNKNOWN, "high", "empty fingerprint", reason, [known[rank] for rank in absent])
    if len(prints) < 2:
        return None
    told: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, work in prints.items():
        told[work.seq, work.op, work.shape, work.dtype].add(rank)
    sent = evidence.of(Kind.FINGERPRINT)
    for own, peer in zip(sent, sent[1:]):
        # A rank compares itself with rank 0, 1, 2, ... and stops at the first that differs: those before it agree.
        together = (own.name, peer.name) == ("own", "peer") and (own.line, own.file) == (peer.line, peer.file)
        if together and own.work and own.rank is not None:
            agree = {rank for rank in range(peer.rank or 0) if rank not in prints and rank in evidence.seen_ranks}
            told[own.work.seq, own.work.op, own.work.shape, own.work.dtype] |= agree
    verdict = _by_majority(told, prints, world)
    verdict.facts = list(known.values())
    verdict.rule = "collective fingerprints"
    return verdict


def _is_collective(op: str | None) -> bool:
    """Return whether all ranks of a group take part; a pipeline's sends and receives differ by design."""
    return op is not None and op.upper() not in ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")


def _by_group(evidence: Evidence) -> list[list[Row]]:
    groups: dict[str | None, list[Row]] = defaultdict(list)
    default = next((row.group_key for row in evidence.rows if row.group and row.group.is_default), None)
    for row in evidence.rows:
        groups[row.group_key if row.group else default].append(row)
    return sorted(groups.values(), key=lambda rows: -len([row for row in rows if row.waiting]))


def _last_snapshot(evidence: Evidence, at: int) -> list[Fact]:
    """Return what a driver says of all ranks in the last step, if most of those that it lists have come to `at`."""
    told = evidence.of(Kind.NOTE, name="snapshot")
    last = max((fact.number or 0 for fact in told), default=0)
    found = [fact for fact in told if fact.number == last]
    return found if 2 * len([fact for fact in found if fact.enqueued == at]) > len(found) > 2 else []


def by_counters(evidence: Evidence, world: World) -> Verdict | None:
    """A rank whose last enqueued work is before the one that others wait in never called it, or is stuck inside."""
    for rows in _by_group(evidence):
        waiting = [row for row in rows if row.waiting]
        seqs = Counter(row.seq for row in waiting if row.seq is not None)
        if not seqs:
            continue
        at = min(seq for seq, times in seqs.items() if times == max(seqs.values()))
        short = [row for row in rows if not row.waiting and row.enqueued is not None and 0 <= row.enqueued < at]
        short += [row for row in rows if row.enqueued == -1 and not row.waiting]
        # What a rank was in when its peers' limit ran out; it may have come, and waited elsewhere, after that.
        settled = {row.rank for row in waiting if row.seq == at} | {row.rank for row in short}
        short += [
            Row(fact.rank, fact.group, enqueued=fact.enqueued, facts=[fact])
            for fact in evidence.of(Kind.DUMP_RECEIVED) + _last_snapshot(evidence, at)
            if fact.rank is not None and fact.rank not in settled
            and fact.enqueued is not None and 0 <= fact.enqueued < at and rows[0].in_group(fact.group)
        ]  # fmt: skip
        if short and (len(short) <= len(waiting) or world.size == 2):
            ranks = tuple(sorted({row.rank for row in short}))
            reason = tr(
                "{ranks} last enqueued work {enqueued}, while {others} wait in {at}: not called there, or stuck "
                "inside the call (only a stack can tell)",
                ranks=ranks_text(ranks),
                enqueued=short[0].enqueued,
                others=ranks_text(r.rank for r in waiting),
                at=at,
            )
            facts = [fact for row in short for fact in row.facts]
            return Verdict(ranks, Cause.UNKNOWN, "high", "counters", reason, facts)
    return None


def _enriched(works: dict[int, Work]) -> dict[int, Work]:
    """Return the collectives with what others say about the same one: a cut line does not differ from a whole one."""

    def bare(work: Work) -> bool:
        return work.numel_in is None and work.shape is None

    whole = [work for work in works.values() if work.op is not None and not bare(work)]
    more: dict[tuple[object, object], Work | None] = {}  # what others say, by what a cut line says
    found = {}
    for rank, work in works.items():
        found[rank] = work
        if not bare(work):
            continue
        key = work.seq, work.op
        if key not in more:
            same = [one for one in whole if work.seq in (None, one.seq) and work.op in (None, one.op)]
            more[key] = same[0] if len({one.signature() for one in same}) == 1 else None
        if more[key] is not None:
            found[rank] = united(work, more[key]) or work
    told = {work.seq for work in found.values() if work.op is not None}
    return {r: work for r, work in found.items() if work.op is not None or work.seq not in {None, *told}}


def by_divergence(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that wait in one group at another sequence number, operation or size than the majority."""
    for rows in _by_group(evidence):
        waiting = {
            row.rank: row
            for row in rows
            if row.waiting and row.work is not None and (row.work.op is None or _is_collective(row.work.op))
        }
        works = _enriched({rank: row.work for rank, row in waiting.items() if row.work is not None})
        sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
        for rank, work in works.items():
            sides[work.signature()].add(rank)
        if len(sides) < 2:
            continue
        verdict = _by_majority(sides, works, world, next(iter(waiting.values())).spans(world.size))
        verdict = _ahead_by_one(verdict, works)
        if (
            verdict.rule == "pair" and len({work.seq for work in works.values()}) > 1
        ):  # one of them skipped, or added, a call
            verdict.culprits, verdict.suspects, verdict.confidence = (), verdict.culprits, "low"
        if verdict.culprits and all(work.seq is None for work in works.values()):
            verdict.confidence = "medium"  # by their tracebacks: which call it was of each is not known
        verdict.rule = f"divergence: {verdict.rule}"
        verdict.facts = [fact for row in waiting.values() for fact in row.facts[:1]]
        return verdict
    return None


def _ahead_by_one(verdict: Verdict, works: dict[int, Work]) -> Verdict:
    """Ranks at k, others at k + 1 of the same operation: those ahead completed k, which proves nothing against them."""
    odd = {works[rank].seq for rank in verdict.culprits if rank in works}
    rest = {work.seq for rank, work in works.items() if rank not in verdict.culprits}
    if verdict.rule != "majority" or len(odd) != 1 or len(rest) != 1:
        return verdict
    one, many = odd.pop(), rest.pop()
    if one is None or many is None or one != many + 1:
        return verdict
    reason = tr(
        "{ranks} already at #{one} while the others wait in #{many}: who held up #{many} cannot be told",
        ranks=ranks_text(verdict.culprits),
        one=one,
        many=many,
    )
    early = next(work for rank, work in works.items() if work.seq == many)
    ahead, sides = verdict.culprits, verdict.sides
    return Verdict((), Cause.UNKNOWN, "low", "ahead by one", reason, suspects=ahead, sides=sides, work=early)


def by_alone(evidence: Evidence, world: World) -> Verdict | None:
    """One rank alone in a collective of all ranks, while the others wait elsewhere or have ended without one."""
    size = world.size
    if size is None or size < 3 or any(fact.hidden for fact in evidence.facts):
        return None

    def place(row: Row) -> tuple[object, ...]:
        return (row.group_key, row.seq) if row.work is not None else (None, None)

    waits: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for row in evidence.rows:
        if row.waiting and row.rank < size:
            waits[place(row)].add(row.rank)
    everyone = {rank for ranks in waits.values() for rank in ranks}
    spoke = everyone | evidence.seen_ranks | (set(evidence.source_ranks.values()) if not world.merged else set())
    lonely = [row for row in evidence.rows if row.waiting and row.spans(size) and waits.get(place(row)) == {row.rank}]
    if not set(range(size)) <= spoke or len(lonely) != 1:
        return None
    row = lonely[0]
    others, rest = everyone - {row.rank}, set(range(size)) - {row.rank}
    if row.work is None and (others or not any(fact.kind in (Kind.GLOO_TIMEOUT, Kind.TIMEOUT) for fact in row.facts)):
        return None
    if others and others < rest:
        return None
    if any(one.waiting and one.rank != row.rank and one.group_key == row.group_key for one in evidence.rows):
        return None  # the same group at another number: who is ahead and who behind says more
    where: Message = tr("a collective")
    if row.work is not None:
        where = tr("{op} #{number}", op=row.work.op or where, number=row.work.seq)
    if others:
        reason = tr(
            "rank {rank} waits alone in {where} of group {group}; {others} wait in another one",
            rank=row.rank,
            where=where,
            group=row.group or tr("all ranks"),
            others=ranks_text(others),
        )
    else:
        reason = tr(
            "rank {rank} waits alone in {where}; the logs of {others} end without a collective",
            rank=row.rank,
            where=where,
            others=ranks_text(rest),
        )
    overturned = [tr("a line of another rank in the same collective")]
    return Verdict((row.rank,), Cause.DIVERGED, "medium", "alone", reason, row.facts[:2], overturned=overturned, work=row.work, group=row.group)  # fmt: skip


#: Calls that ranks of one job make differently when all is well.
_BETWEEN_TWO = frozenset(["send", "recv", "isend", "irecv", "batch_isend_irecv"])


def by_tracebacks(evidence: Evidence, world: World) -> Verdict | None:
    """All ranks have waited until gloo's limit, and the traceback of one alone is of another call than the others'."""
    waited = {fact.rank for fact in evidence.of(Kind.GLOO_TIMEOUT)} - {None}
    calls: dict[str, list[Fact]] = defaultdict(list)
    for rank in waited:
        traced = next((one for one in evidence.of(Kind.EXCEPTION) if one.rank == rank and one.frames), None)
        if traced is None:
            return None
        in_backward = "backward" if traced.frames[-1].endswith(" in _engine_run_backward") else ""
        calls[next(iter(collectives_in(traced)), in_backward)].append(traced)
    if world.size is None or world.size < 3 or waited != set(range(world.size)) or len(calls) != 2:
        return None
    few, many = sorted(calls, key=lambda call: len(calls[call]))
    if not few or not many or len(calls[few]) > 1 or {few, many} & _BETWEEN_TWO:
        return None
    named = (calls[few][0].rank or 0,)
    reason = tr("{ranks} waited in {call}, and all others in {other}", ranks=ranks_text(named), call=few, other=many)
    overturned = [tr("groups of their own, in which each of these calls belongs")]
    return Verdict(named, Cause.DIVERGED, "medium", "tracebacks", reason, calls[few], overturned=overturned)


# --- who says nothing ---


def _in_a_call(evidence: Evidence) -> set[int]:
    """Ranks that say by an error of their own that they were inside a collective when it was torn down."""
    facts = evidence.of(Kind.ABORTED, Kind.ASYNC_ERROR)
    facts += [fact for fact in evidence.of(Kind.EXCEPTION) if fact.name.endswith("DistBackendError")]
    return {fact.rank for fact in facts if fact.rank is not None}


def by_silence_in_group(evidence: Evidence, world: World) -> Verdict | None:
    """A rank absent from a smaller group, where the group's members can be told from the ranks that wait in it.

    A line of torch 2.3 or newer holds both the global rank and the rank inside the group; two such pairs fix an even
    spacing, and a rank inside the gap is a member.
    """
    if any(fact.hidden for fact in evidence.facts):
        return None
    for rows in _by_group(evidence):
        pairs = {
            fact.group_rank: row.rank
            for row in rows
            if row.waiting and row.work is not None and (_is_collective(row.work.op) or row.work.op == "RECV")
            for fact in row.facts
            if fact.rank_basis == "prefix" and fact.group_rank is not None
        }
        if len(pairs) < 2 or rows[0].group is None or rows[0].group.is_default:
            continue
        (low, first), (high, last) = min(pairs.items()), max(pairs.items())
        spacing, uneven = divmod(last - first, high - low)
        if uneven or spacing < 1 or any(rank != first + (inner - low) * spacing for inner, rank in pairs.items()):
            continue
        size = next((ratio for row in rows if row.work and (ratio := row.work.ratio)), high + 1)
        members = {first + (inner - low) * spacing for inner in range(size)}
        silent = members - {row.rank for row in evidence.rows} - _in_a_call(evidence)
        received = [row for row in rows if row.work is not None and row.work.op == "RECV"]
        if received and (len(received) < len(rows) or not silent <= {min(members), max(members)} or len(pairs) < 3):
            continue  # in a pipeline each waits for its neighbour, and at last for the stage at an end
        if len(silent) == 1 and silent <= set(world.covered):
            who = ranks_text(pairs.values())
            reason = tr(
                "{who} waited in group {group}; its member {ranks} printed nothing",
                who=who,
                group=rows[0].group,
                ranks=ranks_text(silent),
            )
            facts = [fact for row in rows for fact in row.facts[:1]]
            return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts)
    return None


def by_silence(evidence: Evidence, world: World) -> Verdict | None:
    """The minority that printed nothing while the rest wait in a group of all ranks."""
    size = world.size
    if size is None or size < 2 or any(fact.hidden for fact in evidence.facts):
        return None
    waiting = {row.rank for row in evidence.rows if row.waiting and row.spans(size) and row.rank < size}
    in_one = {row.rank for row in evidence.rows if row.waiting and row.rank < size}
    if len({row.group_key for row in evidence.rows if row.waiting}) == 1 and size > 2 and len(in_one) == size - 1:
        waiting = in_one  # all but one of the job are in this group: also a pipeline, in which each waits for the next
    waits = [fact for fact in evidence.facts if fact.kind in WAITING and fact.rank in waiting]
    facts = list({fact.rank: fact for fact in reversed(waits)}.values())
    spoke = {row.rank for row in evidence.rows} | _in_a_call(evidence) | evidence.cut
    spoke |= {fact.rank for fact in evidence.of(Kind.NOTE, name="waits_elsewhere") if fact.rank is not None}
    silent = tuple(sorted(set(world.covered) - spoke))
    kinds = {fact.kind for fact in facts}
    if not waiting or not silent or (kinds <= {Kind.GLOO_CLOSED} and len(waiting) + len(silent) < size):
        return None
    stopped_early = kinds <= {Kind.GLOO_CLOSED, Kind.GLOO_TIMEOUT, Kind.BARRIER_REACHED}
    heard = set(evidence.source_ranks.values()) | evidence.seen_ranks
    begun = min((fact.line for fact in facts), default=0)
    bars = [fact for fact in evidence.of(Kind.PROGRESS, Kind.ALIVE) if fact.rank is None and fact.line > begun]
    heard |= {0} if bars else set()  # the rank that prints for the job goes on, elsewhere than in the call
    pair = world.is_pair and len(waiting) == 1 and set(silent) <= heard
    if world.is_pair and not pair:
        reason = tr(
            "only {ranks} speaks in these inputs; that the other does not proves nothing", ranks=ranks_text(waiting)
        )
        return Verdict(rule="silence", reason=reason, suspects=silent, facts=facts)
    known = size > 3 or world.basis != "highest rank seen" or set(silent) <= heard  # two ranks tell no job's size
    few = (len(silent) == 1 and known) or 4 * len(silent) <= size
    if not pair and (len(silent) >= len(waiting) or not few or (stopped_early and len(silent) > 1)):
        reason = tr("too many ranks are silent to name one")
        return Verdict(rule="silence", reason=reason, suspects=silent, facts=facts) if len(silent) <= 8 else None
    if evidence.never_worked() and (pair or len(silent) >= len(waiting)):
        return None
    calls = {row.seq for row in evidence.rows if row.waiting and row.seq is not None}
    joined = {fact.number for fact in evidence.of(Kind.JOINED)}
    if calls and max(calls) <= 1 and set(silent) <= joined:
        reason = tr(
            "{ranks} set its channels up and printed no timeout; the first collective never worked: the transport",
            ranks=ranks_text(silent),
        )
        return Verdict(rule="first collective", cause=Cause.NETWORK, reason=reason, facts=facts)
    reason = tr(
        "{ranks} waited; {others} printed nothing of the kind", ranks=ranks_text(waiting), others=ranks_text(silent)
    )
    if fabric_errors(evidence):
        reason = tr("{reason}, but the fabric reports errors", reason=reason)
        return Verdict(rule="silence", cause=Cause.NETWORK, reason=reason, facts=facts, suspects=silent)
    torn = {source for source, _ in evidence.open_lines if source in evidence.broken_off}
    if any(source.rank is None for source in evidence.sources if source.index in torn):
        reason = tr(
            "{reason}, but the log breaks off there: its line may be among those that are missing", reason=reason
        )
        return Verdict(rule="silence", reason=reason, facts=facts, suspects=silent)
    sure = "low" if pair and world.basis == "highest rank seen" else "medium"
    overturned = [
        tr("a timeout line of {ranks} for the same collective, in a log that is not here", ranks=ranks_text(silent))
    ]
    return Verdict(silent, Cause.UNKNOWN, sure, "silence", reason, facts, overturned=overturned)


# --- the order ---

RULES: tuple[Rule, ...] = (
    by_guard, by_traces, by_table, by_failure, by_section, by_heartbeats, by_lost_host, engines.by_tool, by_fingerprint, by_parameters, by_desync_report, by_barrier,
    by_store_barrier, by_clients, by_watchdog, by_peer_closed, by_unreachable, by_port, by_ras, by_hccl, by_counters, by_store_key, by_analyser, by_stacks,
)  # fmt: skip
#: Weaker ones, which also say what the ranks differ in.
LAST_RULES: tuple[Rule, ...] = (
    by_alone,
    by_tracebacks,
    by_divergence,
    by_silence,
    by_silence_in_group,
    by_gone_peer,
    by_first_exit,
)


def find_culprits(evidence: Evidence, world: World) -> Verdict:
    """Return the first verdict that names somebody, else the most telling one that does not.

    torchrun counts the ranks of each of torchft's replica groups from 0 on: such a number names nobody in the job.
    """
    verdict = _first_verdict(evidence, world)
    if verdict.rule == "silence" and (end := _end_of(evidence, verdict.culprits)) is not None:
        ended = tr("{ranks} ended first, with exit code {code}", ranks=ranks_text(verdict.culprits), code=end.number)
        verdict.reason, verdict.facts = joined("; ", (ended, verdict.reason)), [end, *verdict.facts]
    own = [fact for fact in verdict.facts if fact.rank in verdict.culprits]
    if evidence.replicated and own and not any(fact.rank_basis in ("launcher", "name", "pid") for fact in own):
        where = {tr("rank {rank} of the replica group in {file}", rank=fact.rank, file=fact.file.rpartition("/")[2]): 0
                 for fact in own}  # fmt: skip
        verdict.culprits, verdict.places = (), tuple(where)[:4]
    return verdict


def _end_of(evidence: Evidence, ranks: Sequence[int]) -> Fact | None:
    """Return what a launcher says of the end of the one rank that is named, if it noticed that first."""
    return next((fact for fact in first_to_exit(evidence) if len(ranks) == 1 and fact.rank in ranks), None)


def _first_verdict(evidence: Evidence, world: World) -> Verdict:
    unnamed: list[Verdict] = []
    for rule in RULES:
        verdict = rule(evidence, world)
        if verdict is not None and (verdict.culprits or verdict.places):
            return _beside(verdict, evidence, world)
        if verdict is not None:
            unnamed.append(verdict)
    agreed = next((verdict for verdict in unnamed if verdict.rule == "ncclguard incident"), None)
    if agreed is not None:  # while they lived they could name nobody: no silence afterwards can
        return agreed
    for rule in LAST_RULES:
        verdict = rule(evidence, world)
        if verdict is not None and verdict.culprits:
            divergence = by_divergence(evidence, world) if not verdict.sides else None
            verdict.sides = divergence.sides if divergence is not None else verdict.sides
            return verdict
        if verdict is not None:
            unnamed.append(verdict)
    return unnamed[0] if unnamed else Verdict()


def _beside(verdict: Verdict, evidence: Evidence, world: World) -> Verdict:
    """Add the ranks that are silent beside a rank that failed: a second fault may be theirs, which is no proof."""
    if verdict.rule in ("failure", "counters", "desync report") and not verdict.suspects:
        silence = by_silence(evidence, world)
        if silence is not None and silence.culprits:
            verdict.suspects = tuple(sorted(set(silence.culprits) - set(verdict.culprits)))
    return verdict
