"""Advice on what to do about it: one decision that a script can act on, the one next thing, and more for people.

    restart           the fault is over or lies outside the program; the same job may run again as it is
    restart-without   the same, but without the node or rank that is named
    fix-code          it would fail again in the same place: ranks differ, or one raised
    fix-environment   memory, interfaces, firmware, addresses, shared memory: to be put right before a restart
    raise-limit       the awaited rank was at work
    unknown           nothing here tells

Never `restart` for what restarts into the same failure, and never `fix-code` for hardware.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ncclguard_explain import engines, incident_text, places
from ncclguard_explain.cause import ADVICE_SOURCE_FIRST, ADVICE_WATCHED, Cause
from ncclguard_explain.causes import OUT_OF_MEMORY, Finding
from ncclguard_explain.evidence import Evidence
from ncclguard_explain.facts import EXPIRED, Fact, Kind, Verdict
from ncclguard_explain.failures import follows_from_peers, lacks_what_others_hold, own_exceptions
from ncclguard_explain.language import joined, received, tr
from ncclguard_explain.ranks import ranks_text

#: What `--exit-code` returns for each; 0 is "no incident", 2 an input that cannot be used.
EXIT_CODES = {"restart": 10, "restart-without": 11, "fix-code": 12, "fix-environment": 13, "raise-limit": 14, "unknown": 15}  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """One of `EXIT_CODES`, why, and for restart-without what to leave out."""

    action: str
    reason: str
    without: str = ""


_MEMORY = ("OutOfMemory", "out of memory", "MemoryError", "Cannot allocate memory", "DefaultCPUAllocator")
_ENVIRONMENT = ("cudaGetDeviceCount", "system not yet initialized", "system has unsupported display driver", "Driver/library version mismatch", "failed to listen", "ModuleNotFoundError", "ImportError", "PermissionError", "FileNotFoundError", "ConnectionError", "HTTPError",
                "No space left", "Read-only file system", "Stale file handle", "OSError", "CalledProcessError",
                "killed by signal: Killed", "killed by signal: Bus error",
                "Failed to initialize the HCCP process", "Device acquire failed", "was built without", "driver on your system is too old", "Error opening", "PytorchStreamWriter failed", "unexpected pos", "Disk quota exceeded", "Input/output error")  # fmt: skip
_BROKEN_NODE = ("NodeNotReady", "NodeLost", "NODE FAILURE", "NodeShutdown", "DeviceUnhealthy", "TaintManagerEviction")
_DIFFER = ("mismatch_shape_or_op", "rank_divergence", "unequal_batches", "unused_params")
_SET_UP = ("shared_memory", "p2p_acs_iommu", "network_interface", "store_rendezvous")
_AT_WORK = ("checkpoint_io", "slow_rank_side_work", "timeout_too_short")


#: Words of a program that lets one rank alone do something.
_ONE_ONLY = re.compile(
    r"(?i)\b(?:main (?:process|rank)|rank ?0|master) only\b|\bonly (?:on|in|by) (?:the )?(?:main|rank ?0|master)\b"
)


def decide(evidence: Evidence, verdict: Verdict, finding: Finding, cause: Cause) -> Decision:
    """Return the decision that the verdict, its cause and the class of cause lead to."""
    name, sure = finding.name, finding.confidence != "low"
    if finding.action == "restart-without":
        return _without(verdict, finding.facts, finding.reason)
    if verdict.rule == "ncclguard incident" and any(map(incident_text.is_from_outside, verdict.facts)):
        return Decision("unknown", tr("the job was ended from outside while ranks waited; why they waited is not told"))
    if verdict.rule == "ncclguard incident" and verdict.culprits and _went_on(evidence) >= {*verdict.culprits}:
        return Decision(
            "unknown",
            tr(
                "the job went on without {ranks}, and nothing here says that it has ended",
                ranks=ranks_text(verdict.culprits),
            ),
        )
    if verdict.rule == "ncclguard incident" and any(
        "`kill -CONT " in text for fact in verdict.facts for text in fact.advice
    ):
        return Decision("unknown", tr("a process is paused, and the job may go on when it does"))
    if cause is Cause.LOST and evidence.of(Kind.NOTE, name="host_error") and not evidence.of(*EXPIRED):
        return Decision("restart", tr("the machine under a host failed; nothing is wrong with the job"))
    if finding.action and not (
        finding.action == "unknown" and (evidence.of(Kind.KERNEL_OOM) or own_exceptions(evidence))
    ):
        return Decision(finding.action, finding.reason)
    if name == "gpu_hardware" and any(fact.name == "host_memory" for fact in finding.facts):
        return _without(
            verdict, finding.facts, tr("the memory of a host is broken: the next run on it would fail again")
        )
    if name == "gpu_hardware":
        return _without(verdict, finding.facts, tr("a GPU or its link is broken: the next run on it would fail again"))
    if cause is Cause.DIVERGED or (name in _DIFFER and sure):
        return Decision("fix-code", tr("ranks do not make the same calls; a restart comes to the same place"))
    if name == "store_rendezvous" and _only_waited(evidence):
        return Decision("unknown", tr("some did not come to the others, or left them, and nothing tells why"))
    if name in _SET_UP:
        return Decision("fix-environment", tr("the job cannot work on these hosts as they are set up"))
    if name == "network_fabric":
        hosts = {fact.host for fact in finding.facts if fact.kind is Kind.NIC and fact.host}
        if hosts or (verdict.culprits and cause is Cause.LOST):
            return _without(verdict, finding.facts, tr("a link or card of this host fails"))
        if sure and _of_the_whole_fabric(finding.facts):
            reason = tr(
                "transfers of several hosts failed with several peers each: the fabric between them, not one host"
            )
            return Decision("restart", reason)
        if evidence.of(Kind.NOTE, name="switch_up"):
            return Decision("restart", tr("a link of the fabric had gone down and is up again"))
        if sure:
            return Decision("fix-environment", tr("the fabric reports errors that torch cannot mend"))
        if (taken := _taken(evidence, verdict)) is not None:
            return taken
        return Decision("unknown", tr("a connection broke, and nothing says whether a process or the network ended it"))
    if verdict.rule == "tool: slow":
        return _without(verdict, [], tr("its GPU is slower than the others, and the job was stopped for that"))
    if verdict.rule in ("ncclguard incident", "ncclguard inquiry") and cause is Cause.LATE:
        return Decision("fix-code", tr("the awaited rank was at work of its own; its stack says which"))
    if name in _AT_WORK and sure and verdict.rule == "stacks" and not evidence.of(*EXPIRED, Kind.ENGINE_WAIT):
        return Decision("unknown", tr("a rank is at work of its own or stuck in it, and no limit has run out"))
    alone = [fact for fact in evidence.of(Kind.PHASE, name="evaluate") if fact.rank in verdict.culprits]
    if name in _AT_WORK and sure and any(_ONE_ONLY.search(fact.text) for fact in alone):
        return Decision(
            "fix-code", tr("only one rank evaluates, and the others go on to the next collective meanwhile")
        )
    if name in _AT_WORK and sure:
        return Decision("raise-limit", tr("the awaited rank was at work for longer than its peers' limit"))
    if name == "dataloader_stall":
        if any("killed" in fact.detail for fact in finding.facts):
            return Decision("fix-environment", tr("a data loader was killed"))
        return Decision("fix-code", tr("a data loader hangs or is too slow"))
    if name == "library_bug":
        return Decision(
            "fix-environment", tr("the libraries of the ranks do not fit each other, or have a known fault")
        )
    servers, back = (
        {(fact.source, fact.host or fact.detail) for fact in evidence.of(Kind.NOTE, name=said)}
        for said in ("storage", "storage_back")
    )
    if servers - back and cause in (Cause.UNKNOWN, Cause.LATE, Cause.STUCK):
        return Decision("fix-environment", tr("a file server did not answer; who reads or writes there waits for it"))
    if name == "oom_or_crash_other_rank" or cause in (Cause.FAILED, Cause.LOST):
        return _after_a_crash(evidence, verdict, finding, cause)
    if cause is Cause.NETWORK:
        return Decision("fix-environment", tr("all ranks came and the transfer did not work"))
    if not verdict.culprits and _all_try(evidence):
        return Decision("fix-environment", tr("the ranks tried the same thing again and again, without success"))
    if any(fact.kind is Kind.SCHEDULER for fact in finding.facts):
        return Decision("restart", tr("the job's own time limit ended it; it can go on from its last checkpoint"))
    if name in _AT_WORK:
        return Decision("unknown", tr("a rank may have been at work; its stack would tell"))
    if len([fact for fact in evidence.of(Kind.RETRIED) if fact.rank in verdict.culprits]) > 1:
        return Decision("fix-environment", tr("the awaited rank tried the same thing again and again, without success"))
    if verdict.rule == "stacks" and cause is Cause.LATE and evidence.of(*EXPIRED, Kind.ENGINE_WAIT):
        return Decision("fix-code", tr("the awaited rank was at work of its own; its stack says which"))
    if evidence.of(Kind.ENDED_BY_LAUNCHER, name="SIGHUP") and not verdict.culprits:
        return Decision(
            "restart", tr("the terminal that had started the job was closed; nothing is wrong with the job")
        )
    if (taken := _taken(evidence, verdict)) is not None:
        return taken
    ended = evidence.of(Kind.NOTE, name="unit_oom")
    if ended and any(late.source == ended[-1].source and late.line > ended[-1].line for late in evidence.of(*EXPIRED)):
        return Decision("fix-environment", tr("the host ran out of memory; the same job would again"))
    if cause is Cause.LATE:
        return Decision("unknown", tr("the inputs do not tell what the awaited rank did instead; its stack would"))
    return Decision("unknown", tr("the inputs do not tell why a rank was missing"))


def _all_try(evidence: Evidence) -> bool:
    """Return whether all ranks that are seen have tried something again, and none was seen to work since."""
    moved: dict[int, int] = {}
    for fact in evidence.of(Kind.ALIVE, Kind.PROGRESS):
        moved[fact.source] = max(fact.line, moved.get(fact.source, 0))
    tried = {fact.rank for fact in evidence.of(Kind.RETRIED) if fact.line > moved.get(fact.source, 0)} - {None}
    return len(tried) > 1 and tried >= evidence.seen_ranks


def _taken(evidence: Evidence, verdict: Verdict) -> Decision | None:
    """Return the decision for a machine that went away, where no rank is known to have failed; None for none."""
    if verdict.culprits or evidence.of(*EXPIRED) or not evidence.of(Kind.NOTE, name="taken"):
        return None  # who waited until a limit may have waited for anybody
    return Decision("restart", tr("a machine was switched off or taken away; nothing is wrong with the job"))


def _went_on(evidence: Evidence) -> set[int]:
    """Return the ranks without which the job has gone on, by its own words."""
    return {rank for note in evidence.of(Kind.NOTE, name="went on") for rank in note.peers}


#: What waits for others to come, or has lost the host of the store.
_WAITED = re.compile(r"waiting for clients|Rendezvous(?:Timeout|Closed)Error|store based barrier|to store for rank")


def _only_waited(evidence: Evidence) -> bool:
    """Return whether the store's clients only tell that they waited, or lost it, and no task or pod of its fault."""
    facts = evidence.of(Kind.RENDEZVOUS, Kind.STORE_BARRIER)
    since = {fact.source: fact.line for fact in reversed(facts)}
    ended = evidence.of(Kind.EXIT, Kind.LAUNCHER) + evidence.of(Kind.NOTE, name="tasks_ended")
    ended = [fact for fact in ended if fact.line < since.get(fact.source, fact.line + 1)]
    ended += evidence.of(Kind.NOTE, name="not started") + evidence.of(Kind.ENVIRONMENT)
    worked = bool(evidence.of(Kind.STORE_LOST, Kind.JOINED))  # then it had been reached before
    return not ended and all(_WAITED.search(fact.text) or (worked and "ConnectionError" in fact.text) for fact in facts)


_PEER = re.compile(r"\bpeer ([\d.]+|[\da-f:]+)(?=<|\b)")


def _of_the_whole_fabric(facts: Sequence[Fact]) -> bool:
    """Return whether three hosts or more report several peers each, of which none is common to all."""
    told: dict[str, set[str]] = {}
    for fact in facts:
        if fact.host and (peer := _PEER.search(fact.detail)) is not None:
            told.setdefault(fact.host, set()).add(peer[1])
    return len(told) > 2 and all(len(peers) > 1 for peers in told.values()) and not set.intersection(*told.values())


#: What a rank raised, in the words of ncclguard's incident.
_RAISED = re.compile(r"(?:raised|抛出) ?((?:\w+\.)*[A-Z]\w*)(?: at \S+ in [^:]+)?(?:: (.*))?")
_NO_NUMBER = re.compile(r"(?:found|result) (?:nan|inf)", re.IGNORECASE)


def _after_a_crash(evidence: Evidence, verdict: Verdict, finding: Finding, cause: Cause) -> Decision:
    events, facts = evidence.of(Kind.SCHEDULER), finding.facts
    memory = any(fact.name in OUT_OF_MEMORY or "memory" in fact.detail for fact in events)
    if memory or evidence.of(Kind.KERNEL_OOM) or evidence.of(Kind.LAUNCHER, name="oom"):
        return Decision("fix-environment", tr("the host ran out of memory; the same job would again"))
    if any("low on resource" in fact.detail or "ephemeral" in fact.detail for fact in events):
        return Decision("fix-environment", tr("the node ran out of a resource that the job uses; it would again"))
    taken = [fact for fact in events if fact.name != "TIME LIMIT"]
    broken = [fact for fact in taken if fact.name in _BROKEN_NODE]
    if broken and not evidence.of(Kind.NOTE, name="taken_back"):
        decision = _without(verdict, broken, tr("the node failed"))
        if decision.action == "restart-without":
            return decision
    if taken:
        return Decision("restart", tr("the scheduler took the host away; nothing is wrong with the job"))
    if any(fact.name == "duplicate_gpu" for fact in facts):
        return Decision("fix-code", tr("two processes chose the same GPU: each must take that of its local rank"))
    if evidence.of(Kind.NOTE, name="corruption"):
        return _without(verdict, [], tr("a result was not reproducible: this GPU or its memory corrupts data"))
    raised = own_exceptions(evidence) + evidence.of(Kind.ENGINE_END, name="echo") + engines.accused_of_raising(evidence)
    parents = [f for f in evidence.of(Kind.EXCEPTION) if f.place and places.is_parent(f.place)]  # a server's engine
    parents = [fact for fact in parents if not raised and not follows_from_peers(fact.name, fact.detail)]
    if verdict.rule == "ncclguard incident" and cause is Cause.FAILED:
        told = [(fact, found) for fact in verdict.facts if (found := _RAISED.search(fact.detail))]
        raised += [fact for fact, found in told if not follows_from_peers(found[1], found[2] or "")]
    text = " ".join(f"{fact.name} {fact.detail}" for fact in raised + parents)
    own = [fact for fact in raised + parents if not verdict.culprits or fact.rank in verdict.culprits]
    if any(lacks_what_others_hold(evidence, fact) for fact in own):
        return Decision(
            "fix-environment", tr("another process holds memory of the GPU; the job does not fit beside it")
        )
    full = any(fact.name == "oom" for fact in verdict.facts if fact.kind is Kind.NCCL_WARN)
    if full or any(word in text for word in _MEMORY):
        return Decision("fix-code", tr("a rank needs more memory than its GPU has; a restart comes to the same place"))
    if any(word in text for word in _ENVIRONMENT):
        return Decision("fix-environment", tr("a rank lacks a file, module, connection, space or memory of its host"))
    if evidence.of(Kind.ACCUSED, name="nan") and all(_NO_NUMBER.search(fact.detail) for fact in raised):
        return Decision("unknown", tr("a rank found no numbers in its own values: its data, the program or its GPU"))
    if raised:
        return Decision("fix-code", tr("a rank raised; a restart comes to the same place"))
    if any(f.kind in (Kind.CUDA, Kind.WATCHDOG_EXCEPTION, Kind.XID) or f.name == "cuda" for f in facts):
        return Decision("fix-code", tr("a kernel of the program failed (index, shape or memory access)"))
    if any(fact.kind is Kind.DATALOADER for fact in facts):
        return Decision("fix-environment", tr("a data-loader worker was killed: memory, or shared memory, of the host"))
    numbers = {fact.number for fact in facts + verdict.facts if fact.kind in (Kind.LAUNCHER, Kind.EXIT)}
    crashed = [fact for fact in evidence.of(Kind.NOTE, name="segfault") if fact.rank in verdict.culprits]
    crashed = [fact for fact in crashed if re.match(r"(?!lib(?:c\b|c-|pthread)|ld-).*\.so\b", fact.detail)]
    if crashed:
        reason = tr("the kernel says that it crashed in {library}: another version of that", library=crashed[0].detail)
        return Decision("fix-environment", reason)
    if -4 in numbers and len(verdict.culprits) == 1:
        reason = tr(
            "one process met an instruction that its processor lacks: the program is built for another one than that host's"
        )
        return _without(verdict, [], reason)
    if -7 in numbers and evidence.of(Kind.NOTE, name="shm_full"):
        return Decision("fix-environment", tr("a process found no shared memory: /dev/shm is full"))
    if -7 in numbers:
        reason = tr(
            "memory that a process had mapped was not there: /dev/shm or a disk is full, or a file was cut or went away"
        )
        return Decision("fix-environment", reason)
    if numbers & {-11, -4, -8}:
        return Decision("unknown", tr("a process crashed in native code, and nothing says where"))
    if cause is Cause.LOST and -9 in numbers:
        text = tr(
            "a process was killed from outside, most often by the kernel for want of memory; nothing here says by whom"
        )
        return Decision("unknown", text)
    if cause is Cause.LOST and verdict.rule == "ras":
        return Decision("restart", tr("a process was killed from outside and nothing here says that it would be again"))
    if any("remote process exited" in fact.text or fact.kind is Kind.WORKER_DIED for fact in facts):
        return Decision("unknown", tr("a peer's process ended, and its own log is not here"))
    return Decision("unknown", tr("a process ended, and nothing here says why"))


def _without(verdict: Verdict, facts: Sequence[Fact], reason: str) -> Decision:
    host = next((fact.host for fact in facts if fact.host), "")
    device = next((fact.name for fact in facts if fact.kind is Kind.XID and fact.name), "")
    target = tr("node {host}", host=host.removeprefix("node/")) if host and not host.startswith("pod/") else host
    if not target and verdict.culprits:
        target = ranks_text(verdict.culprits)
    elif not target and verdict.places:
        target = joined(", ", verdict.places)
    if device:
        target = (
            tr("{target}, GPU {device}", target=target, device=device)
            if target
            else tr("the host with GPU {device}", device=device)
        )
    if not target:
        return Decision("fix-environment", tr("{reason}; the inputs do not say which host it is", reason=reason))
    return Decision("restart-without", reason, target)


_ADVICE = {
    "rank_divergence": tr("Look for a branch that only some ranks take around this point: `if is_main_process`, an early "
"stop or a best-model test on a rank-local value, a module that is skipped when a batch holds no "
"image. Let one rank decide and broadcast, or run the branch on all ranks."),
    "unequal_batches": tr("Give all ranks the same number of batches (drop_last, an even sampler), or wrap the loop in "
"`Join`."),
    "slow_rank_side_work": tr("Move the work off the collective path: preprocess before the job, or let only that work run "
"under a longer limit (a gloo group of its own with its own timeout)."),
    "unused_params": tr("Some ranks produced no gradient for part of the model. Run the skipped module on a dummy input "
"times zero, or set find_unused_parameters=True with DDP."),
    "mismatch_shape_or_op": tr("Compare what the ranks call here: tensors of different sizes (pad them, or exchange the sizes "
"first), or a call that only some of them make (`if rank == 0:`)."),
    "oom_or_crash_other_rank": tr("Read the failed rank's own traceback first; the timeouts of the others follow from it. For a "
"killed process look into `dmesg -T` for the out-of-memory killer."),
    "checkpoint_io": tr("Saving took longer than the limit. Save under a gloo group with a long timeout, or write "
"asynchronously to local disk first."),
    "dataloader_stall": tr("Find the sample that the loader of that rank was reading; set a `timeout` on the DataLoader and "
"validate media files beforehand."),
    "timeout_too_short": tr("The awaited rank was working. Raise the timeout of this process group above the slowest "
"legitimate step."),
    "network_interface": tr("Set NCCL_SOCKET_IFNAME (and GLOO_SOCKET_IFNAME) on every host to an interface that the other "
"hosts reach; exclude lo and docker0. `ncclguard doctor` checks it."),
    "network_fabric": tr("Check the link between the named peers: `ibstat`, port counters, cable and switch; on RoCE also "
"NCCL_IB_GID_INDEX and the lossless priority. Rerun nccl-tests between these two hosts."),
    "p2p_acs_iommu": tr("Run once with NCCL_P2P_DISABLE=1. If that works, turn ACS and the IOMMU off in the firmware or "
"use pass-through (iommu=pt)."),
    "gpu_hardware": tr("Take the host out of the job, note the Xid, run `nvidia-smi -q` and `dcgmi diag -r 3` on it."),
    "store_rendezvous": tr("Check that MASTER_ADDR and MASTER_PORT reach the host of rank 0 from every host, and that all "
"ranks start within the store's timeout."),
    "shared_memory": tr("Enlarge /dev/shm (docker: --shm-size=8g or --ipc=host)."),
    "library_bug": tr("Compare the versions of torch and NCCL on all hosts, and search their issue trackers for this "
"message."),
}  # fmt: skip


#: torch, of a backend whose package the program has not imported.
_NOT_IMPORTED = re.compile(r"\bUnknown backend type:? '?ncclguard")


#: Words of the advice for a call whose source or destination is not recorded, of any call and of one that has such.
_COMPARE_FIRST = (
    (re.compile(r"Compare the source or destination|先对比各 rank 给出的源"), ADVICE_SOURCE_FIRST),
    (re.compile(r"compare that first|先比较它"), ADVICE_WATCHED[Cause.NETWORK]),
)


def next_step(decision: Decision, verdict: Verdict, finding: Finding, stacks: bool, own: Fact | None = None) -> str:
    """Return the one thing to do next; `own` is the incident of ncclguard's that the verdict is, which has its own."""
    if own is not None and own.advice:
        return _advised(finding, own)[0]
    hint = next((advice for words, advice in _COMPARE_FIRST if own is not None and words.search(own.text)), None)
    if hint is not None:
        return hint
    if any(_NOT_IMPORTED.search(fact.detail) for fact in verdict.facts + finding.facts):
        return tr(
            'Write `import ncclguard` before init_process_group("ncclguard"), in the program of every rank: that makes the '
            "backend known to torch."
        )
    who = ranks_text(verdict.culprits) if verdict.culprits else joined(", ", verdict.places)
    if decision.action == "restart-without":
        return tr(
            "Take {without} out of the job and start it again; test the hardware before it comes back.",
            without=decision.without,
        )
    if decision.action == "restart":
        return tr(
            "Start the job again from its last checkpoint; if a process is killed again, read `dmesg -T` of "
            "its host first."
        )
    if finding.name == "oom_or_crash_other_rank" and decision.action == "fix-environment":
        return tr(
            "Read `dmesg -T` and the memory limit of the host of {ranks}, and give it more memory or the job less to load.",
            ranks=who or tr("the process that ended"),
        )
    if finding.name == "oom_or_crash_other_rank" and any(fact.kind is Kind.EXCEPTION for fact in verdict.facts):
        return tr(
            "Read the traceback of {ranks} first; what the others say follows from it.", ranks=who or tr("who raised")
        )
    if decision.action != "unknown" and finding.name in _ADVICE:
        return _ADVICE[finding.name]
    if who or verdict.suspects:
        who = who or ranks_text(verdict.suspects)
        if verdict.culprits and verdict.cause is Cause.LOST:
            return tr(
                "Read `dmesg -T` of the host of {ranks} for the out-of-memory killer, and the end of its log.",
                ranks=who,
            )
        gone = verdict.cause in (Cause.EXITED, Cause.FAILED) or any(
            fact.kind in (Kind.LAUNCHER, Kind.EXIT) and fact.rank in verdict.culprits for fact in verdict.facts
        )
        if stacks or (verdict.culprits and gone):
            return tr("Read the end of the log of {ranks}.", ranks=who)
        return tr(
            "Read the end of the log of {ranks} and, while the job hangs, all stacks: `ncclguard hang` on its hosts (or "
            "`py-spy dump --pid PID` of each process).",
            ranks=who,
        )
    return tr(
        "Get the logs of every rank, and while the job hangs all stacks: `ncclguard hang` on its hosts (or `py-spy dump "
        "--pid PID` of each process)."
    )


def _advised(finding: Finding, own: Fact) -> list[str]:
    """Return an incident's own advice, behind that on why a rank aborted where messages say so."""
    aborted = any("(SIGABRT)" in text for text in own.advice)  # in any language
    known = aborted and finding.confidence == "high" and finding.name in _DIFFER
    first: list[str] = [_ADVICE[finding.name]] if known else []
    return [*first, *map(received, own.advice)]


_STACKS = tr(
    "Next time have the stacks: run `ncclguard hang` on the hosts while it hangs (or `py-spy dump --pid PID` on every rank); set "
    "TORCH_FR_BUFFER_SIZE=2000 (TORCH_NCCL_TRACE_BUFFER_SIZE before torch 2.8) and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and pass the dumps to this command together with the logs."
)
_MORE = tr(
    "Pass the logs of every rank (torchrun --log-dir DIR -r 3), what the launcher itself printed, and `dmesg -T` of the "
    "hosts: one silent rank's last lines, or how it ended, often settle it."
)
_GUARDED = tr(
    "Next time let the job say it: `ncclguard.watch()`, one line beside init_process_group, names the rank with its stack on "
    "all ranks while the job runs. `safe_*` end such a call at its limit, and `resilient_evaluate` and `resilient_step` go on."
)


def advise(
    finding: Finding,
    verdict: Verdict,
    timeout_ms: int | None,
    stacks: bool,
    own: Fact | None = None,
    guarded: bool = False,
) -> list[str]:
    """Return what to do next, the most telling first; the last lines are about getting more evidence.

    `guarded`: the job has told of itself, so that it needs no advice to. An incident of ncclguard's own has been told
    what to do already, which is all that is said then.
    """
    if own is not None and own.advice:
        return _advised(finding, own)
    lines: list[str] = []
    if verdict.culprits:
        who = ranks_text(verdict.culprits)
        text = tr(
            "Look at the log and the stack of {ranks} first; the ranks that printed the timeout are the victims.",
            ranks=who,
        )
        lines.append(text)
    elif verdict.suspects:
        suspects = ranks_text(verdict.suspects)
        text = tr(
            "Nobody can be named from these inputs. Look at {ranks} first, and add the logs that are missing here.",
            ranks=suspects,
        )
        lines.append(text)
    lines += [_ADVICE[finding.name]] if finding.name in _ADVICE else []
    if timeout_ms is not None:
        text = tr(
            "The limit in force was {seconds:g} s, as printed. If you set another one, it did not reach this process "
            "group.",
            seconds=timeout_ms / 1000,
        )
        lines.append(text)
    lines += [] if stacks else [_STACKS]
    lines += [_MORE] if finding.name == "unknown" else []
    return lines if guarded else [*lines, _GUARDED]
