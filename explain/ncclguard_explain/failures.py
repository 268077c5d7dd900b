"""Failures that name their rank: exceptions of its own, a broken GPU, a signal, an exit; and who follows from whom."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ncclguard_explain import engines, incident_text, places
from ncclguard_explain.cause import Cause
from ncclguard_explain.evidence import OF_A_HEALTHY_JOB, Evidence, World
from ncclguard_explain.facts import EXPIRED, WAITING, Fact, Kind, Verdict
from ncclguard_explain.language import joined, tr
from ncclguard_explain.ranks import ranks_text

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
    r"|coordination service|(?i:\bbarrier\b.{0,120}(?:timed out|deadline.?exceeded)|(?:timed out|deadline.?exceeded).{0,80}\bbarrier\b)|heartbeat|Broken promise|NPU function error|HCCL|hccl api failed|CheckpointException"
    r"|expects same model across all ranks|connectFullMesh failed|Horovod has been shut down|no live replica|no response from peer|Hang detected on rank|ranks arrived|(?:[Mm]issing|[Aa]bsent) ranks|memory capacity is unbalanced|Insufficient space in /dev/shm|placement group|Server failed to become healthy|is not ready after|DeadLock detected"
    r"|RemoteDisconnected|[Ss]erver ?[Dd]isconnected|Remote end closed|[Cc]onnection attempts failed|StatusCode\.UNAVAILABLE"
    r"|\bother (?:ranks?|workers?|peers?|nodes?|hosts?) (?:that |which )?(?:did|do|does|have|has|had)(?: not\b|n.t\b)"
    r"|peer (?:has |may have )?(?:closed|disconnected|exited)|NRT_TIMEOUT|workspace wait failed"
    r"|[Cc]ollective (?:call|op|operation)s? (?:has |have |was |were )?(?:returned|failed|aborted|interrupted)|sync_global_devices name mismatch|status: (?:Cancelled|DeadlineExceeded)"
    r"|MODULE:PT_BRIDGE Exception in \w+ thread|peer (?:rank )?(?:has )?(?:crashed|failed|died)|The Inner error is reported as above|ACL stream synchronize failed(?!.{0,20}error code)|MPI_ERR_(?:OTHER|INTERN|PROC_FAILED)|syn(?:Event|Stream)Synchronize timeout|ndpoint is not connected|[Rr]equest cancell?ed|lease expired"
)
_FOLLOWING_TYPES = frozenset(
    ["ChildFailedError", "ProcessExitedException", "ProcessRaisedException", "SignalException", "KeyboardInterrupt",
     "SystemExit", "CalledProcessError", "DistStoreError", "DistNetworkError", "DistBackendError", "BrokenPipeError",
     "ConnectionResetError", "ConnectionRefusedError", "EOFError", "RendezvousConnectionError", "GeneratorExit",
     "CollectiveFingerPrint", "SIGTERMException", "TrialPruned", "GuardError", *incident_text.ERRORS,
     "RayTaskError", "TimeoutError", "GetTimeoutError", "RayChannelTimeoutError", "RayChannelError", "EngineDeadError",
     "EngineGenerateError", "KVTransferError", "ActorDiedError", "RayActorError", "ActorUnavailableError",
     "WorkerCrashedError", "NodeDiedError", "ExecuteUserScriptError", "RendezvousTimeoutError", "RendezvousClosedError", "CheckpointException",
     "DeadlockDetectedException", "EPException", "CancelledError", "BrokenBarrierError", "ConnectionAbortedError",
     "Again", "ReadTimeout", "ConnectTimeout", "MaxRetryError", "NewConnectionError", "WorkerHealthCheckTimeoutError", "WorkerGroupStartupTimeoutError", "AsyncEngineDeadError",
     "ConnectError", "RemoteProtocolError", "ClientConnectorError", "ServerDisconnectedError", "RemoteDisconnected"]
)  # fmt: skip
#: Frames of a rank that asks a server, which ranks do not ask each other by.
_HTTP = re.compile(r"\b(?:requests|urllib3|httpx|aiohttp)/|\bvllm_client\.py")
BARRIER_KEY = re.compile(r"store_based_barrier_key:\d+")
_PEER_GONE = re.compile(r"remote process exited|ncclRemoteError|[Cc]onnection refused|Connection reset by peer")
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")
_DEADLY = {-9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE"}
#: The waits of engines at whose limit they end the process, and some of them its peers.
_ENDS_ITSELF = frozenset(["monitor", "hang", "scheduler", "xla_limit"])
_STICKY = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch", "out of memory",
           "Memory access fault", "fault from GPU", "aicore exception", "aivector error", "aivec error")  # fmt: skip
_OF_DEVICE = re.compile(r"(?:CUDA|HIP) error: |AcceleratorError|hipError|cudaError")
_OF_A_CALL = ("invalid resource handle", "invalid device ordinal")
#: Frames of a rank that waits for its device, and so perhaps for a collective that it has issued.
WAITS_FOR_DEVICE = re.compile(
    r"synchronize|_engine_run_backward| in (?:item|tolist|cpu|backward)$|^(?!.*(?:file_baton|filelock|threading\.py)).* in wait$"
)
#: Frames of a rank that stands in a collective: torch's, and the engines' own.
IN_COLLECTIVE = re.compile(
    r"distributed_c10d\.py|_functional_collectives\.py|device_communicators/|custom_all_reduce|pynccl|all_?reduce|all_?gather|broadcast_pyobj"
)
# NVIDIA's Xid catalogue: those that point at the GPU, its memory or its link.
_ECC = re.compile(r"ECC error|uncorrectable NVLink error|(?i:multi[- ]bit ecc|ecc uncorrect)")
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})


def follows_from_peers(type_name: str, text: str) -> bool:
    """Return whether an exception is what a rank sees when a peer is gone or absent, not a failure of its own."""
    name = type_name.rsplit(".", 1)[-1]
    if name == "EOFError" and text:  # a pipe that has closed says nothing; of a file its reader says what is wrong
        return False
    if "was built without" in text or "failed to listen" in text:  # the store's own: no libuv, or its port is taken
        return False
    return name in _FOLLOWING_TYPES or _FOLLOWS.search(text) is not None


#: Words of a rank that leaves out a step, whose collectives its peers then wait for.
_SKIPS = re.compile(r"(?i)\bskip(?:s|ped|ping) (?:(?:this|the|a|bad|corrupt\w*|broken) )?(?:batch|step|iteration)\b")


def _went_on(failure: Fact, own: Sequence[Fact], last: int) -> bool:
    """Return whether a rank went on after it raised, as `own` tells of it: then that is not why its peers wait.

    A step that it left out is why, unless the job makes another one behind that: the last is at the line `last`.
    """
    end = failure.line + 3 * len(failure.frames)  # each frame with its source and the marks below that
    return any(
        fact.line >= failure.line
        and (fact.kind is Kind.RETRIED or (fact.rank is not None and fact.line > end))
        and (fact.line < last or _SKIPS.search(fact.text) is None)
        for fact in own
    )


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
    expired: dict[int, Fact] = {}
    for fact in evidence.of(*EXPIRED):
        expired.setdefault(fact.source, fact)
    trapped = _experts_waited(evidence)
    later: dict[tuple[int, int | None], list[Fact]] = {}
    for fact in evidence.of(Kind.RETRIED, Kind.ALIVE):
        later.setdefault((fact.source, fact.rank), []).append(fact)
    ended = bool(evidence.of(Kind.EXIT, Kind.LAUNCHER))
    steps = {
        fact.source: fact.line for fact in sorted(evidence.of(Kind.ALIVE, Kind.PROGRESS), key=lambda one: one.line)
    }
    return [
        fact
        for fact in evidence.of(Kind.EXCEPTION)
        if not follows_from_peers(fact.name, fact.detail)
        and not fact.name.endswith("Warning")
        and not (trapped and "unspecified launch" in fact.detail)
        and (fact.rank_basis == "text" or (fact.source, fact.name, fact.detail) not in quoted)  # of another rank
        and not (fact.place and places.is_parent(fact.place) and ("", fact.pid) not in evidence.ranks.processes)
        and fact.rank not in waited
        and not _is_behind(fact, expired.get(fact.source, fact))  # after the limit it cannot be why the peers waited
        and (fact.name != "RuntimeError" or fact.detail)  # without a text it proves nothing
        and not (fact.name == "RuntimeError" and _is_cut(evidence, fact))  # the rest may explain it
        and not (
            (fact.rank is not None or not ended)
            and _went_on(fact, later.get((fact.source, fact.rank), ()), steps.get(fact.source, 0))
        )
    ]


#: Seconds by which the clocks of hosts may be apart.
_CLOCKS = 30.0


def _is_behind(fact: Fact, limit: Fact) -> bool:
    """Return whether something came after a limit, by the lines of the log, which may be of several hosts in a row."""
    earlier = None not in (fact.when, limit.when) and (fact.when or 0.0) + _CLOCKS < (limit.when or 0.0)
    return fact.line > limit.line and not earlier


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
    alone = evidence.one_node and not named_ranks(raised) and len(gpus) == len(raised) and (world.size or 0) > 1
    once = sorted(gpus[id(fact)] for fact in raised if fact.frames and alone)
    if not alone or once != [*range(world.size or 0)] or len({fact.source for fact in raised}) > 1:
        return raised
    return [fact.clone(rank=gpus[id(fact)], rank_basis="local") for fact in raised]


def named_ranks(facts: Iterable[Fact]) -> tuple[int, ...]:
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
#: torch/c10/cuda/CUDACachingAllocator.cpp: the GPU, what is free of it, and what processes have of it.
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory")
_WANTED = re.compile(r"Tried to allocate ([\d.]+) ([KMG])iB")
_ROOM = re.compile(
    r"\bGPU (\d{1,2})(?: has a total capacity of ([\d.]+) ([KMG])iB of which ([\d.]+) ([KMG])iB is free|;)"
)
_HAS = re.compile(r"\b(?:Process (\d+)|this process) has ([\d.]+) ([KMG])iB memory in use")
_OURS = re.compile(
    r"Of the allocated memory ([\d.]+) ([KMG])iB is allocated by PyTorch(?:, and ([\d.]+) ([KMG])iB is reserved)?"
)
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_OUT_OF_MEMORY = tr("was ended by the kernel's out-of-memory killer")


def _mib(found: re.Match[str] | None, at: int) -> float | None:
    return float(found[at]) * _UNITS[found[at + 1]] if found is not None and found[at] else None


def lacks_what_others_hold(evidence: Evidence, fact: Fact) -> bool:
    """Return whether an allocation failed for memory of its GPU that a process holds which is none of the job's.

    In a container torch does not know its own process among those that it lists: one alone may be itself.
    """
    text = f"{fact.name} {fact.detail}"
    if fact.kind is not Kind.EXCEPTION or not _NO_MEMORY.search(text):
        return False
    room, own = _ROOM.search(text), {pid for _, pid in evidence.ranks.processes}
    gpu = int(room[1]) if room else None
    listed = [(int(found[1]) if found[1] else None, _mib(found, 2) or 0.0) for found in _HAS.finditer(text)]
    others = {pid: mib for pid, mib in listed if pid is not None and pid not in own}
    has = next((mib for pid, mib in listed if pid is None), None)
    known = fact.pid in own or any(rank == fact.rank for rank in evidence.ranks.processes.values())
    if len(listed) < 2 and has is None and not known:
        others = {}
    if has is None and (ours := _OURS.search(text)) is not None:
        least = (_mib(ours, 1) or 0.0) + (_mib(ours, 3) or 0.0)
        itself = min((mib for mib in others.values() if mib >= 0.99 * least), default=0.0)  # beside it CUDA's own
        others = {pid: mib for pid, mib in others.items() if mib != itself}
    for note in evidence.of(Kind.NOTE, name="holds") if gpu is not None else ():
        apart = has is not None and abs(float(note.detail) - has) > 0.1 * has
        if note.number == gpu and note.pid is not None and note.pid not in own and (apart or known):
            others.setdefault(note.pid, float(note.detail))
    held = [note for note in evidence.of(Kind.NOTE, name="held") if None in (gpu, note.number) or note.number == gpu]
    held = [note for note in held if note.pid not in own]
    same = {other.rank for other in evidence.of(Kind.EXCEPTION) if room is not None and other.rank is not None
            and (found := _ROOM.search(other.detail)) and int(found[1]) == gpu}  # fmt: skip
    if len(same) > 1 and evidence.one_node:  # ranks that have chosen one GPU have its memory
        return False
    wanted, free = _mib(_WANTED.search(text), 1), _mib(room, 4)
    fits = wanted is None or free is None or wanted <= free + sum(others.values())
    return bool(held) or (bool(others) and fits)


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
        if what is _RAISED and found is not None and found.culprits and named_ranks(broken):
            facts = _apart(facts, broken)  # what several others raise alike follows from the broken device
        ranks = named_ranks(facts)
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
    table = _raised_alike(evidence)
    if table:  # whose traceback the log has besides is any of theirs
        raised = [
            fact for fact in raised if fact.rank is not None or fact.name.rsplit(".", 1)[-1] != table[0].name
        ] + table
    return _on_all_gpus(evidence, world, raised + _of_their_host(evidence, raised))


#: What a host lacks, and with it all the ranks that run there.
_LACKED = re.compile(
    r"No such file|not found|No space left|Permission denied|Read-only file|[Ss]tale file|cudaGetDeviceCount|no CUDA-capable|CUDA error: (?:system|initialization)|"
    r"[Dd]river|NVML|No module named|shared object"
)


def _of_their_host(evidence: Evidence, raised: Sequence[Fact]) -> list[Fact]:
    """Return the same for the ranks of the same host, where several say that it lacks something and all ended alike."""
    own = [fact for fact in raised if fact.rank is not None and _LACKED.search(f"{fact.name} {fact.detail}")]
    ranks = {fact.rank for fact in own}
    ended = {
        fact.rank: fact
        for fact in evidence.of(Kind.LAUNCHER)
        if fact.rank is not None and fact.local_rank is not None and (fact.number or 0) > 0
    }

    def node(fact: Fact) -> tuple[int, int]:
        return fact.source, (fact.rank or 0) - (fact.local_rank or 0)

    there = [ended[rank] for rank in ranks if rank in ended]
    nodes, codes = {node(fact) for fact in there}, {fact.number for fact in there}
    if len(ranks) < 2 or len(there) < len(ranks) or len(nodes) != 1 or len(codes) != 1 or not _alike(own):
        return []
    heard = WAITING | {Kind.EXCEPTION, Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION}
    spoke = {fact.rank for fact in evidence.facts if fact.kind in heard}
    return [
        own[0].clone(rank=fact.rank, rank_basis="launcher", file=fact.file, line=fact.line, text=fact.text)
        for fact in ended.values()
        if fact.rank not in ranks | spoke and node(fact) in nodes and fact.number in codes
    ]


_IN_TABLE = re.compile(r"(?:\w+\.)*([A-Z]\w*)(?:: (.*))?$")


def _raised_alike(evidence: Evidence) -> list[Fact]:
    """Return what the ranks of torchelastic's table raised, where each that ended by itself raised the same."""
    ended = [fact for fact in evidence.of(Kind.LAUNCHER) if fact.rank is not None and (fact.number or 0) > 0]
    told = [(fact, found) for fact in ended if (found := _IN_TABLE.match(fact.detail))]
    raised = [fact.clone(kind=Kind.EXCEPTION, name=found[1], detail=found[2] or "") for fact, found in told]
    own = [fact for fact in raised if not follows_from_peers(fact.name, fact.detail)]
    return own if len(ended) == len(own) > 1 and _alike(own) else []


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
    table = {fact.rank: fact.number for fact in others if fact.rank is not None}
    if len(table) > 1 == len(set(table.values())) and len(raised) == 1 and not named_ranks(raised):
        (fact,) = raised
        rows = 1 if _OF_DEVICE.search(fact.detail) else 2  # what CUDA says at its end has a row of its own
        if fact.frames and fact.repeated == rows * len(table):  # a traceback of each of them, read by two rows
            return [fact.clone(rank=rank, rank_basis="launcher") for rank in sorted(table)]
    several = len({fact.rank for fact in others} - first.keys()) > 0 and (
        len([fact for fact in raised if fact.frames]) > 1 or any(fact.repeated > 2 for fact in raised)
    )  # of processes that all raised by themselves the one that a launcher noticed first is any
    alike = [(fact.name, fact.frames) for fact in raised if fact.frames]
    several = several or len(set(alike)) < len(alike)  # one place, and other words in each process
    if world.size is not None and world.size > 1:  # a traceback is read by two rows
        several = several or any(fact.frames and fact.repeated >= 2 * world.size for fact in raised)
    if len(first) != 1 or not raised or several or named_ranks(raised) or len({fact.name for fact in raised}) > 2:
        return raised
    (rank,) = first
    return [fact.clone(rank=rank, rank_basis="launcher") for fact in raised] + list(first.values())


def _of_who_aborted(evidence: Evidence, aborted: Sequence[Fact]) -> tuple[list[Fact], list[Fact]]:
    """Return errors of devices and sticky ones of CUDA; the runtime aborts the process whose kernel or GPU fails."""
    broken, sticky = hardware_errors(evidence), sticky_cuda(evidence)
    if len({fact.rank for fact in aborted}) != 1 or named_ranks(broken + sticky):
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
    lost = [fact for fact in evidence.of(Kind.EXCEPTION) if any(map(_HTTP.search, fact.frames))]
    by_launcher = {Kind.LAUNCHER, Kind.EXIT, Kind.ENDED_BY_LAUNCHER}
    troubled = {fact.rank for fact in evidence.facts if fact.kind not in OF_A_HEALTHY_JOB | by_launcher}
    alone = all(fact.rank == first.rank or fact.number in (None, -15) for fact in evidence.of(*by_launcher))
    if lost and alone and first.rank is not None and troubled == {first.rank} == {fact.rank for fact in lost}:
        reason = tr(
            "{ranks} alone failed, first of all: it had no answer from a server that is no rank: {text}",
            ranks=who,
            text=_failure_text(lost[-1])[:300].rstrip(" .。"),
        )
        return Verdict((first.rank,), Cause.FAILED, "medium", "first exit", reason, [*lost, *facts])
    reason = tr("{ranks} exited first, cause not shown", ranks=who)
    if first.number is not None:
        reason = tr("{ranks} exited first with code {code}, cause not shown", ranks=who, code=first.number)
    unprefixed = [fact for fact in own_exceptions(evidence) if fact.rank is None]
    if unprefixed and first.number is not None:
        text = _failure_text(unprefixed[-1])[:300].rstrip(" .。")
        reason = tr(
            "{ranks} exited first with code {code}; which rank raised is not told: {text}",
            ranks=who,
            code=first.number,
            text=text,
        )
    return Verdict((), Cause.UNKNOWN, "low", "first exit", reason, facts, named_ranks(facts[:1]))
