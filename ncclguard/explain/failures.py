"""Rules for ranks that failed: an exception of their own, a broken GPU, a signal, a connection that closed.

Each rule takes the evidence and returns a `Verdict` or None. The functions above them select the facts that prove a
failure; `causes` and `decision` use the same ones.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from ncclguard.cause import Cause
from ncclguard.explain.evidence import Evidence, World
from ncclguard.explain.facts import EXPIRED, WAITING, Fact, Kind, Verdict, ranks_text

# An exception with one of these in its text follows from a peer's absence or from another's failure.
_FOLLOWS = re.compile(
    r"initializing process group in store|Connection closed by peer|Connection reset by peer|Broken pipe"
    r"|Socket Timeout|[Tt]imed out waiting|atchdog caught|caught collective|communicator was aborted"
    r"|remote process exited|ncclRemoteError|pair closure|monitoredBarrier|Detected mismatch between coll"
    r"|wait timeout after|Timeout waiting for key|store->get|client socket has timed out|waiting for clients"
    r"|WorkNCCL|timed out in blocking|NCCL operations have failed|collective operation timeout|work sequence id"
    r"|Signals\.SIG|SignalException|Failed to recv|sendBytes failed|recvValue failed|Operation timed out"
    r"|DataLoader worker .{0,40}killed by signal: (?:Terminated|Hangup|Interrupt)"
    r"|CUDA error: an illegal.*NCCL|unhandled system error|NCCL error|ncclInternalError"
)
_FOLLOWING_TYPES = frozenset(
    ["ChildFailedError", "ProcessExitedException", "ProcessRaisedException", "SignalException", "KeyboardInterrupt",
     "SystemExit", "CalledProcessError", "DistStoreError", "DistNetworkError", "DistBackendError", "BrokenPipeError",
     "ConnectionResetError", "ConnectionRefusedError", "EOFError", "RendezvousConnectionError", "GeneratorExit",
     "CollectiveFingerPrint", "PeerLost", "CollectiveTimeout", "RayTaskError"]
)  # fmt: skip
_DEADLY = {-9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE"}
_STICKY = ("illegal memory access", "device-side assert", "misaligned address", "unspecified launch", "out of memory",
           "Memory access fault")  # fmt: skip
# NVIDIA's Xid catalogue: those that point at the GPU, its memory or its link.
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})


def follows_from_peers(type_name: str, text: str) -> bool:
    """Whether an exception is what a rank sees when a peer is gone or absent, not a failure of its own."""
    return type_name.rsplit(".", 1)[-1] in _FOLLOWING_TYPES or _FOLLOWS.search(text) is not None


def went_on(evidence: Evidence, failure: Fact) -> bool:
    """Whether a rank retried or went on training after it raised: then that is not why its peers wait."""
    for fact in evidence.of(Kind.RETRIED, Kind.ALIVE):
        same = fact.source == failure.source and fact.line >= failure.line and fact.rank == failure.rank
        alive = fact.rank is not None and fact.line > failure.line + len(failure.frames)
        if same and (fact.kind is Kind.RETRIED or alive):
            return failure.rank is not None or not evidence.of(Kind.EXIT, Kind.LAUNCHER)
    return False


def own_exceptions(evidence: Evidence) -> list[Fact]:
    """Return exceptions that no peer's absence explains, of ranks that did not wait for others themselves.

    A rank that also reports a timeout, or whose fingerprint was compared, was alive then: what it raised before it
    caught, what it raised later follows.
    """
    waited = {fact.rank for fact in evidence.facts if fact.kind in WAITING and fact.rank is not None}
    waited |= {f.rank for f in evidence.of(Kind.FINGERPRINT) if f.name != "absent" and f.rank is not None}
    expired: dict[int, int] = {}
    for fact in evidence.of(*EXPIRED):
        expired.setdefault(fact.source, fact.line)
    return [
        fact
        for fact in evidence.of(Kind.EXCEPTION)
        if not follows_from_peers(fact.name, fact.detail)
        and not fact.name.endswith("Warning")
        and fact.rank not in waited
        and fact.line <= expired.get(fact.source, fact.line)  # after the limit it cannot be why the peers waited
        and (fact.name != "RuntimeError" or fact.detail)  # without a text it proves nothing
        and not (
            fact.name == "RuntimeError" and (fact.source, fact.line) in evidence.open_lines
        )  # the rest may explain it
        and not went_on(evidence, fact)
    ]


def sticky_cuda(evidence: Evidence) -> list[Fact]:
    """Return CUDA errors of a rank's own kernels; NCCL and the watchdog only print them because they come by first."""
    found = [fact for fact in evidence.of(Kind.CUDA) + evidence.of(Kind.NCCL_WARN, name="cuda")
             if any(word in fact.detail for word in _STICKY)]  # fmt: skip
    of_watchdog = evidence.of(Kind.WATCHDOG_EXCEPTION)
    return found + [fact for fact in of_watchdog if "CUDA error" in fact.detail and "Work" not in fact.detail]


def hardware_errors(evidence: Evidence) -> list[Fact]:
    """Return reports of a broken GPU: ECC, lost from the bus, an Xid of the hardware; of one rank where it is known."""
    found = [fact for fact in evidence.of(Kind.XID) if fact.number in HARDWARE_XIDS]
    return found + [
        fact
        for fact in evidence.of(Kind.CUDA, Kind.EXCEPTION, Kind.NCCL_WARN, Kind.WATCHDOG_EXCEPTION)
        if "ECC error" in fact.text + fact.detail
        or "fallen off the bus" in fact.text
        or fact.name in ("hardware", "gpu")
    ]


def deadly_exits(evidence: Evidence) -> list[Fact]:
    """Return exits by a signal that no watchdog and no launcher sends to end a job that already failed."""
    forced = {fact.number for fact in evidence.of(Kind.NOTE, name="forced_kill")}
    deaths = [
        fact
        for fact in evidence.of(Kind.LAUNCHER, Kind.EXIT)
        if (fact.number in _DEADLY and fact.pid not in forced) or (fact.name == "first" and fact.number is None)
    ]
    # A launcher that has seen one end ends the others: of several such lines of one launcher only the first counts.
    chosen: dict[int, Fact] = {}
    first = [fact for fact in deaths if fact.name in ("first", "oom", "local", "command")]
    for fact in sorted(first, key=lambda one: (one.source, one.name != "oom", one.line)):
        chosen.setdefault(fact.source, fact)
    found = [
        fact
        for fact in deaths
        if any(fact is one for one in chosen.values()) or (fact.number != -9 and fact.name in ("failure", "event", ""))
    ]
    return deaths if not found and not forced and len({fact.rank for fact in deaths}) == 1 else found


def first_to_exit(evidence: Evidence) -> list[Fact]:
    """Return the ends with an ordinary exit code that a launcher noticed first; they do not say why."""
    found = [fact for fact in evidence.of(Kind.EXIT) if (fact.number or 0) > 0]
    return found or [fact for fact in evidence.of(Kind.LAUNCHER, name="first") if (fact.number or 0) > 0]


def _named(facts: Iterable[Fact]) -> tuple[int, ...]:
    return tuple(sorted({fact.rank for fact in facts if fact.rank is not None and fact.rank_basis != "group"}))


def by_failure(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that raised or died while peers wait; when most ranks did, nobody is singled out."""
    raised = own_exceptions(evidence)
    exits = {fact.rank: fact for fact in first_to_exit(evidence) if fact.rank is not None}
    if len(exits) == 1 and raised and not _named(raised) and len({fact.name for fact in raised}) <= 2:
        rank = next(iter(exits))  # one traceback without a rank, and one process that ended by itself
        raised = [fact.clone(rank=rank, rank_basis="launcher") for fact in raised] + list(exits.values())
    found: Verdict | None = None
    for facts, cause, what in (
        ([f for f in evidence.of(Kind.UNUSED) if f.rank is not None], Cause.DIVERGED, "raised DDP's unused-parameter error"),
        (hardware_errors(evidence), Cause.FAILED, "lost its GPU"),
        (raised, Cause.FAILED, "raised"),
        (sticky_cuda(evidence), Cause.FAILED, "hit a CUDA error of its own"),
        (deadly_exits(evidence), Cause.LOST, "ended by a signal"),
    ):  # fmt: skip
        ranks = _named(facts)
        if not ranks or (found is not None and set(ranks) <= set(found.culprits)):
            continue
        if len(ranks) > 1 and world.size is not None and 2 * len(ranks) > world.size:
            if found is not None:
                continue
            reason = f"most ranks ({ranks_text(ranks)}) {what}"
            return Verdict((), cause, "medium", "failure", reason, facts, suspects=ranks)
        if len(ranks) == world.size and world.size > 1:
            continue
        first = next(fact for fact in facts if fact.rank is not None)
        text = f"{first.name}: {first.detail}" if first.kind is Kind.EXCEPTION else (first.detail or first.text)
        if first.kind in (Kind.LAUNCHER, Kind.EXIT):
            text = _DEADLY.get(first.number or 0, first.text)
        reason = f"{ranks_text(ranks)} {what}: {text[:300]}"
        if found is None:
            basis = {fact.rank_basis for fact in facts if fact.rank is not None}
            overturned = [f"a failure of another rank that happened before, in a log that is not here; then that of {ranks_text(ranks)} follows from it"]  # fmt: skip
            if "local" in basis:
                overturned.append(
                    "a second node: the launcher names a rank of its node, taken here for the rank of the job"
                )
            sure = "medium" if basis <= {"local"} else "high"
            found = Verdict(ranks, cause, sure, "failure", reason, facts, overturned=overturned)
        elif what in ("raised", "lost its GPU", "hit a CUDA error of its own") or any(
            fact.name in ("first", "oom", "local") for fact in facts
        ):  # a second fault, by evidence of its own
            found.culprits = tuple(sorted({*found.culprits, *ranks}))
            found.reason += f"; {reason}"
            found.facts = found.facts + facts
    return found


def by_first_exit(evidence: Evidence, world: World) -> Verdict | None:
    """A launcher says who ended first and not why: worth a look, no proof."""
    aborted = [f for f in evidence.of(Kind.EXIT, Kind.LAUNCHER) if f.number == -6 and f.name in ("local", "first")]
    facts = first_to_exit(evidence) or aborted
    if not facts or evidence.of(*EXPIRED):
        return None
    first = facts[0]
    who = f"rank {first.rank}" if first.rank is not None else f"local rank {first.local_rank}"
    who = "a process" if first.rank is None and first.local_rank is None else who
    code = f" with code {first.number}" if first.number is not None else ""
    reason = f"{who} exited first{code}, cause not shown"
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
    reason = f"{len(speakers)} processes say that the connection of local rank {local} closed"
    overturned = ["an abort of all communicators before these lines"]
    return Verdict((local,), Cause.LOST, "medium", "peer closed", reason, facts, overturned=overturned)


def by_ras(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's RAS: processes that are dead or do not answer, and ranks that have launched fewer operations."""
    facts = evidence.of(Kind.RAS)
    gone = [fact for fact in facts if fact.name in ("dead", "silent", "error")]
    if gone:
        ranks = tuple(sorted({*(r for f in gone for r in f.peers), *(f.rank for f in gone if f.rank is not None)}))
        cause, what, sure = next(
            row[1:]
            for row in (
                ("dead", Cause.LOST, "is dead", "high"),
                ("error", Cause.FAILED, "reports an asynchronous error", "medium"),
                ("silent", Cause.UNKNOWN, "does not answer", "medium"),
            )
            if row[0] in {fact.name for fact in gone}
        )
        if ranks and (world.size is None or 2 * len(ranks) < max(world.size, 3)):
            return Verdict(ranks, cause, sure, "ras", f"{ranks_text(ranks)} {what} by NCCL's RAS", gone)
        where = ", ".join(sorted({fact.host for fact in gone if fact.host})) or "one of the hosts"
        return Verdict(rule="ras", cause=cause, reason=f"a process on {where} {what} by NCCL's RAS", facts=gone)
    uneven = [fact for fact in facts if fact.name in ("behind", "ahead") and fact.peers]
    if not uneven:
        return None
    first = max(uneven, key=lambda fact: fact.repeated)
    proven = first.repeated > 1 or bool(evidence.of(*EXPIRED))
    have, less = "has" if len(first.peers) == 1 else "have", "fewer" if first.name == "behind" else "more"
    text = f"{ranks_text(first.peers)} {have} launched {less} operations than the others ({first.detail})"
    overturned = ["a second query a few seconds later with other counts: then the job moves, and nobody is stuck"]
    if (first.completed or world.size or 0) > 2 * len(first.peers):
        sure = "high" if proven else "low"
        return Verdict(first.peers, Cause.UNKNOWN, sure, "ras", text, uneven, overturned=overturned)
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
    reason = f"{ranks_text(told)} report that a peer's process ended or the network broke; {ranks_text(silent)} printed nothing of the kind"
    overturned = [
        f"a later line of {ranks_text(silent)}, or the same error in its log: then the network between them broke"
    ]
    return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts, overturned=overturned)
