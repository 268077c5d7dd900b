"""Name the ranks that held the others up, by rules in the order of how much they prove; an empty answer is an answer.

The rank that prints a timeout is a victim. Every rule here looks for the rank that is dead, or absent from, behind,
ahead
of or different from what the victims wait in; silence counts last, and only for ranks whose log would be among the
inputs.
Each verdict carries the facts it rests on and says what would overturn it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from ncclguard.explain.evidence import Evidence, Row, World, is_one_node, is_world_group, ratio_of, united
from ncclguard.explain.facts import WAITING, Fact, Kind, Verdict, Work, ranks_text
from ncclguard.explain.recorder import name_culprits
from ncclguard.outcome import Cause

Rule = Callable[[Evidence, World], "Verdict | None"]

# An exception with one of these in its text follows from a peer's absence or from another's failure.
_FOLLOWS = re.compile(
    r"initializing process group in store|Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|[Tt]imed out waiting"
    r"|atchdog caught|caught collective"
    r"|communicator was aborted|remote process exited|ncclRemoteError|pair closure|monitoredBarrier|Detected "
    r"mismatch between coll"
    r"|wait timeout after|Timeout waiting for key|store->get|client socket has timed out|waiting for clients"
    r"|WorkNCCL|timed out in blocking"
    r"|NCCL operations have failed|collective operation timeout|work sequence id|Signals\.SIG|SignalException"
    r"|Failed to recv"
    r"|DataLoader worker .{0,40}killed by signal: (?:Terminated|Hangup|Interrupt)"
    r"|sendBytes failed|recvValue failed|CUDA error: an illegal.*NCCL|Operation timed out|unhandled system "
    r"error|NCCL error|ncclInternalError"
)
_FOLLOWING_TYPES = frozenset(
    [
        "ChildFailedError",
        "ProcessExitedException",
        "ProcessRaisedException",
        "SignalException",
        "KeyboardInterrupt",
        "CalledProcessError",
        "DistStoreError",
        "DistNetworkError",
        "DistBackendError",
        "BrokenPipeError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "EOFError",
        "RendezvousConnectionError",
        "SystemExit",
        "GeneratorExit",
        "CollectiveFingerPrint",
        "PeerLost",
        "CollectiveTimeout",
        "RayTaskError",
    ]
)


def follows_from_peers(type_name: str, text: str) -> bool:
    """Whether an exception is what a rank sees when a peer is gone or absent, not a failure of its own."""
    return type_name.rsplit(".", 1)[-1] in _FOLLOWING_TYPES or _FOLLOWS.search(text) is not None


_DEADLY = {-9: "SIGKILL", -11: "SIGSEGV", -7: "SIGBUS", -4: "SIGILL", -8: "SIGFPE"}
# A limit ran out; before torch gives up on a peer its whole limit has passed.
EXPIRED = (
    Kind.TIMEOUT,
    Kind.BLOCKING,
    Kind.STATUS,
    Kind.DUMP_RECEIVED,
    Kind.DUMP_OBSERVED,
    Kind.GLOO_TIMEOUT,
    Kind.STORE_TIMEOUT,
)
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "out of memory",
)
# NVIDIA's Xid catalogue: those that point at the GPU, its memory or its link.
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143})


def went_on(evidence: Evidence, failure: Fact) -> bool:
    """Whether a rank retried or went on training after it raised: then that is not why its peers wait."""
    for fact in evidence.of(Kind.RETRIED, Kind.ALIVE):
        same = fact.source == failure.source and fact.line >= failure.line and fact.rank == failure.rank
        if same and (fact.kind is Kind.RETRIED or fact.line > failure.line + len(failure.frames)):
            return failure.rank is not None or not evidence.of(Kind.EXIT, Kind.LAUNCHER)
    return False


def own_exceptions(evidence: Evidence) -> list[Fact]:
    """Return exceptions that no peer's absence explains, of ranks that did not wait for others themselves.

    A rank that also reports a timeout, or whose fingerprint was compared, was alive then: what it raised before it
    caught, what it raised later follows.
    """
    waited = {
        fact.rank
        for fact in evidence.facts
        if fact.kind in WAITING or (fact.kind is Kind.FINGERPRINT and fact.name != "absent")
    }
    waited -= {None}
    expired: dict[int, int] = {}
    for fact in evidence.of(*EXPIRED):
        expired.setdefault(fact.source, fact.line)
    found = []
    for fact in evidence.of(Kind.EXCEPTION):
        if follows_from_peers(fact.name, fact.detail) or fact.name.endswith("Warning") or fact.rank in waited:
            continue
        if went_on(evidence, fact):
            continue
        if fact.line > expired.get(fact.source, fact.line) or (fact.name == "RuntimeError" and not fact.detail):
            continue  # after the peers' limit it cannot be why they waited; without a text it proves nothing
        found.append(fact)
    return found


def sticky_cuda(evidence: Evidence) -> list[Fact]:
    """Return CUDA errors of a rank's own kernels; NCCL and the watchdog only print them because they come by first."""
    found = [fact for fact in evidence.of(Kind.CUDA) if any(word in fact.detail for word in _STICKY)]
    found += [
        fact
        for fact in evidence.of(Kind.NCCL_WARN)
        if fact.name == "cuda" and any(word in fact.detail for word in _STICKY)
    ]
    found += [
        fact
        for fact in evidence.of(Kind.WATCHDOG_EXCEPTION)
        if "CUDA error" in fact.detail and "Work" not in fact.detail
    ]
    return found


def hardware_errors(evidence: Evidence) -> list[Fact]:
    """Return reports of a broken GPU: ECC, lost from the bus, an Xid of the hardware; each of one rank where it is
    known.
    """
    found = [fact for fact in evidence.of(Kind.XID) if fact.number in HARDWARE_XIDS]
    found += [
        fact
        for fact in evidence.of(Kind.CUDA, Kind.EXCEPTION, Kind.NCCL_WARN, Kind.WATCHDOG_EXCEPTION)
        if "ECC error" in fact.text
        or "ECC error" in fact.detail
        or "fallen off the bus" in fact.text
        or fact.name in ("hardware", "gpu")
    ]
    return found


def deadly_exits(evidence: Evidence) -> list[Fact]:
    """Return exits by a signal that no watchdog and no launcher sends to end a job that already failed."""
    forced = {fact.number for fact in evidence.of(Kind.NOTE) if fact.name == "forced_kill"}
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
    if not found and not forced and len({fact.rank for fact in deaths}) == 1:
        found = deaths
    return found


def _named(facts: Iterable[Fact]) -> tuple[int, ...]:
    return tuple(sorted({fact.rank for fact in facts if fact.rank is not None and fact.rank_basis != "group"}))


def first_to_exit(evidence: Evidence) -> list[Fact]:
    """Return the ends with an ordinary exit code that a launcher noticed first; they do not say why."""
    found = [fact for fact in evidence.of(Kind.EXIT) if (fact.number or 0) > 0]
    return found or [fact for fact in evidence.of(Kind.LAUNCHER) if (fact.number or 0) > 0 and fact.name == "first"]


def by_failure(evidence: Evidence, world: World) -> Verdict | None:
    """Ranks that raised or died while peers wait; when most ranks did, nobody is singled out."""
    unused = [fact for fact in evidence.of(Kind.UNUSED) if fact.rank is not None]
    raised = own_exceptions(evidence)
    exits = {fact.rank: fact for fact in first_to_exit(evidence) if fact.rank is not None}
    if len(exits) == 1 and raised and not _named(raised) and len({fact.name for fact in raised}) <= 2:
        rank = next(iter(exits))  # one traceback without a rank, and one process that ended by itself
        raised = [fact.clone(rank=rank, rank_basis="launcher") for fact in raised] + list(exits.values())
    kinds = (
        (unused, Cause.DIVERGED, "raised DDP's unused-parameter error"),
        (hardware_errors(evidence), Cause.FAILED, "lost its GPU"),
        (raised, Cause.FAILED, "raised"),
        (sticky_cuda(evidence), Cause.FAILED, "hit a CUDA error of its own"),
        (deadly_exits(evidence), Cause.LOST, "ended by a signal"),
    )
    found: Verdict | None = None
    for facts, cause, what in kinds:
        ranks = _named(facts)
        if not ranks or (found is not None and set(ranks) <= set(found.culprits)):
            continue
        if len(ranks) > 1 and world.size is not None and 2 * len(ranks) > world.size:
            if found is not None:
                continue
            return Verdict(
                rule="failure",
                cause=cause,
                confidence="medium",
                reason=f"most ranks ({ranks_text(ranks)}) {what}",
                facts=facts,
                suspects=ranks,
            )
        if len(ranks) == world.size and world.size > 1:
            continue
        first = next(fact for fact in facts if fact.rank is not None)
        text = f"{first.name}: {first.detail}" if first.kind is Kind.EXCEPTION else (first.detail or first.text)
        if first.kind in (Kind.LAUNCHER, Kind.EXIT):
            text = _DEADLY.get(first.number or 0, first.text)
        reason = f"{ranks_text(ranks)} {what}: {text[:300]}"
        if found is None:
            basis = {fact.rank_basis for fact in facts if fact.rank is not None}
            found = Verdict(ranks, cause, "medium" if basis <= {"local"} else "high", "failure", reason, facts)
            found.overturned.append(
                f"a failure of another rank that happened before, in a log that is not here; then that of {ranks_text(ranks)} follows from it"
            )
            if "local" in basis:
                found.overturned.append(
                    "a second node: the launcher names a rank of its node, taken here for the rank of the job"
                )
        elif what in ("raised", "lost its GPU", "hit a CUDA error of its own") or any(
            fact.name in ("first", "oom", "local") for fact in facts
        ):  # a second fault, by evidence of its own
            found.culprits = tuple(sorted({*found.culprits, *ranks}))
            found.reason += f"; {reason}"
            found.facts = found.facts + facts
    return found


def by_first_exit(evidence: Evidence, world: World) -> Verdict | None:
    """A launcher says who ended first and not why: worth a look, no proof."""
    facts = first_to_exit(evidence) or [
        fact for fact in evidence.of(Kind.EXIT, Kind.LAUNCHER) if fact.number == -6 and fact.name in ("local", "first")
    ]
    facts = [fact for fact in facts if not any(one.kind in EXPIRED for one in evidence.facts)]
    if not facts:
        return None
    local = facts[0].local_rank
    who = (
        f"rank {facts[0].rank}"
        if facts[0].rank is not None
        else f"local rank {local}"
        if local is not None
        else "a process"
    )
    code = facts[0].number
    reason = f"{who} exited first{f' with code {code}' if code is not None else ''}, cause not shown"
    return Verdict((), Cause.UNKNOWN, "low", "first exit", reason, facts, _named(facts[:1]))


def by_guard(evidence: Evidence, world: World) -> Verdict | None:
    """An incident of ncclguard's own: the ranks agreed on it while they lived."""
    facts = evidence.of(Kind.GUARD)
    if not facts:
        return None
    first = facts[0]
    causes = {cause.value for cause in Cause}
    cause = Cause(first.name) if first.name in causes else Cause.UNKNOWN
    ranks = tuple(sorted({rank for fact in facts[:1] for rank in fact.peers}))
    return Verdict(
        ranks, cause, "high", "ncclguard incident", first.detail or "the ranks agreed on it", facts[:1], work=first.work
    )


def by_store_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """The store-based barrier at set-up prints who waits and how many have come."""
    facts = evidence.of(Kind.STORE_BARRIER)
    if not facts:
        return None
    size = max(fact.number or 0 for fact in facts)
    joined = max(fact.completed or 0 for fact in facts)
    if joined > size:
        reason = f"{joined} processes have come to a barrier of {size}: the store is shared with another job, or stale"
        return Verdict(rule="store barrier", reason=reason, facts=facts[:3])
    here = {fact.rank for fact in facts if fact.rank is not None}
    missing = set(range(size)) - here if size <= 65_536 else set()
    reason = f"{joined} of {size} ranks came to the barrier that ends init_process_group"
    if missing and len(missing) == size - joined and here:
        return Verdict(
            tuple(sorted(missing)),
            Cause.UNKNOWN,
            "high",
            "store barrier",
            f"{reason}; all but {ranks_text(missing)} wait in it",
            facts,
            overturned=[f"a line of {ranks_text(missing)} in this barrier"],
        )
    return Verdict(
        rule="store barrier",
        reason=reason,
        facts=facts[:3],
        suspects=tuple(sorted(missing)) if len(missing) <= 8 else (),
    )


def by_peer_closed(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's proxy threads say whose connection closed; after an abort that is only the teardown."""
    facts = evidence.of(Kind.PEER_CLOSED)
    aborts: dict[int, int] = {}
    for fact in evidence.of(Kind.NOTE):
        if fact.name == "abort_complete":
            aborts.setdefault(fact.source, fact.line)
    facts = [fact for fact in facts if fact.line < aborts.get(fact.source, 1 << 60)]
    if not facts or not is_one_node(evidence) or len({fact.host for fact in facts if fact.host}) > 1:
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
    return Verdict(
        (local,),
        Cause.LOST,
        "medium",
        "peer closed",
        reason,
        facts,
        overturned=["an abort of all communicators before these lines"],
    )


def by_ras(evidence: Evidence, world: World) -> Verdict | None:
    """NCCL's RAS: processes that are dead or do not answer, and ranks that have launched fewer operations."""
    facts = evidence.of(Kind.RAS)
    gone = [fact for fact in facts if fact.name in ("dead", "silent", "error")]
    ranks = tuple(
        sorted({rank for fact in gone for rank in fact.peers} | {fact.rank for fact in gone if fact.rank is not None})
    )
    if gone:
        names = {fact.name for fact in gone}
        cause = Cause.LOST if "dead" in names else Cause.FAILED if "error" in names else Cause.UNKNOWN
        what = (
            "is dead" if "dead" in names else "reports an asynchronous error" if "error" in names else "does not answer"
        )
        if ranks and (world.size is None or 2 * len(ranks) < max(world.size, 3)):
            sure = "high" if "dead" in names else "medium"
            return Verdict(ranks, cause, sure, "ras", f"{ranks_text(ranks)} {what} by NCCL's RAS", gone)
        where = ", ".join(sorted({fact.host for fact in gone if fact.host})) or "one of the hosts"
        return Verdict(rule="ras", cause=cause, reason=f"a process on {where} {what} by NCCL's RAS", facts=gone)
    behind = [fact for fact in facts if fact.name in ("behind", "ahead") and fact.peers]
    if not behind:
        return None
    proven = any(fact.repeated > 1 for fact in behind) or any(fact.kind in EXPIRED for fact in evidence.facts)
    first = max(behind, key=lambda fact: fact.repeated)
    others = (first.completed or world.size or 0) - len(first.peers)
    text = f"{ranks_text(first.peers)} {'has' if len(first.peers) == 1 else 'have'} launched {'fewer' if first.name == 'behind' else 'more'} operations than the others ({first.detail})"
    overturned = ["a second query a few seconds later with other counts: then the job moves, and nobody is stuck"]
    if others > len(first.peers):
        return Verdict(
            first.peers, Cause.UNKNOWN, "high" if proven else "low", "ras", text, behind, overturned=overturned
        )
    return Verdict(rule="ras", reason=text, facts=behind, suspects=first.peers, overturned=overturned)


def by_hccl(evidence: Evidence, world: World) -> Verdict | None:
    """Ascend's HCCL names the peer whose record did not come; the rank that prints it is a victim."""
    facts = [fact for fact in evidence.of(Kind.TIMEOUT) if fact.name == "hccl"]
    victims = {fact.rank for fact in facts if fact.rank is not None}
    told = Counter(peer for fact in facts for peer in set(fact.peers))
    suspects = tuple(sorted(set(told) - victims))
    if not suspects:
        return None
    if len(suspects) == 1 and len(victims) >= 2 and told[suspects[0]] >= 2:
        return Verdict(
            suspects,
            Cause.UNKNOWN,
            "medium",
            "hccl",
            f"{ranks_text({r for r in victims if r is not None})} wait for {ranks_text(suspects)}",
            facts,
        )
    return Verdict(
        rule="hccl",
        reason=f"the rank that printed the timeout waits for {ranks_text(suspects)}",
        facts=facts,
        suspects=suspects,
    )


def by_gone_peer(evidence: Evidence, world: World) -> Verdict | None:
    """All but one rank report that a peer's process ended; the one whose log is here and says nothing is that peer."""
    facts = [
        fact
        for fact in evidence.of(Kind.ASYNC_ERROR, Kind.WATCHDOG_EXCEPTION, Kind.EXCEPTION)
        if fact.rank is not None and ("remote process exited" in fact.text or "remote process exited" in fact.detail)
    ]
    told = {fact.rank for fact in facts if fact.rank is not None}
    spoke = (
        told
        | {row.rank for row in evidence.rows}
        | {fact.rank for fact in evidence.of(*EXPIRED) if fact.rank is not None}
    )
    silent = set(world.covered) - spoke
    if len(silent) != 1 or world.size is None or len(told) < max(2, world.size - 1) or _fabric_failed(evidence):
        return None
    reason = f"{ranks_text(told)} report that a peer's process ended or the network broke; {ranks_text(silent)} printed nothing of the kind"
    return Verdict(
        tuple(silent),
        Cause.UNKNOWN,
        "medium",
        "silence",
        reason,
        facts,
        overturned=[
            f"a later line of {ranks_text(silent)}, or the same error in its log: then the network between them broke"
        ],
    )


def by_alone(evidence: Evidence, world: World) -> Verdict | None:
    """One rank alone in a collective of all ranks, while the others wait elsewhere or have ended without one."""
    size = world.size
    if size is None or size < 3 or any(fact.hidden for fact in evidence.facts):
        return None
    waits: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for row in evidence.rows:
        if row.waiting and row.rank < size:
            waits[(row.group_key, row.seq) if row.work is not None else (None, None)].add(row.rank)
    everyone = {rank for ranks in waits.values() for rank in ranks}
    spoke = (
        everyone
        | {rank for rank in evidence.seen_ranks if rank < size}
        | (set(evidence.source_ranks.values()) if not world.merged else set())
    )
    if spoke < set(range(size)):
        return None
    lonely = [
        (rank, row)
        for row in evidence.rows
        for rank in (row.rank,)
        if row.waiting
        and is_world_group(row, size)
        and waits.get((row.group_key, row.seq) if row.work is not None else (None, None)) == {rank}
    ]
    if len(lonely) != 1 or len({rank for rank, _ in lonely}) != 1:
        return None
    rank, row = lonely[0]
    others = everyone - {rank}
    if row.work is None and (others or not any(fact.kind in (Kind.GLOO_TIMEOUT, Kind.TIMEOUT) for fact in row.facts)):
        return None
    rest = set(range(size)) - {rank}
    if others and len(others) < len(rest):
        return None
    if any(other.waiting and other.rank != rank and other.group_key == row.group_key for other in evidence.rows):
        return None  # the same group at another number: who is ahead and who behind says more
    where = f"{row.work.op or 'a collective'} #{row.work.seq}" if row.work is not None else "a collective"
    if others:
        reason = f"rank {rank} waits alone in {where} of group {row.group or 'all ranks'}; {ranks_text(others)} wait in another one"
    else:
        reason = f"rank {rank} waits alone in {where}; the logs of {ranks_text(rest)} end without a collective"
    return Verdict(
        (rank,),
        Cause.DIVERGED,
        "medium",
        "alone",
        reason,
        row.facts[:2],
        overturned=["a line of another rank in the same collective"],
        work=row.work,
        group=row.group,
    )


def _side_text(work: Work) -> str:
    shape = f" {list(work.shape)}" if work.shape is not None else ""
    numel = f" NumelIn={work.numel_in} NumelOut={work.numel_out}" if work.numel_in is not None else ""
    dtype = f" {work.dtype}" if work.dtype else ""
    return f"#{work.seq if work.seq is not None else '?'} {work.op or '?'}{shape}{numel}{dtype}"


def by_traces(evidence: Evidence, world: World) -> Verdict | None:
    """Flight-recorder dumps of two ranks or more."""
    if len(evidence.dumps) < 2:
        return None
    verdict = name_culprits(evidence.dumps)
    failure = by_failure(evidence, world)
    if failure is not None and failure.culprits and set(failure.culprits) <= set(verdict.culprits):
        verdict.cause = failure.cause
        verdict.facts += failure.facts
        verdict.reason += f"; {failure.reason}"
    return verdict if verdict.culprits or verdict.sides else None


def by_fingerprint(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: fingerprints of the ranks, the majority is right; a zeroed one is an absent
    peer.
    """
    facts = evidence.of(Kind.FINGERPRINT)
    prints: dict[int, Work] = {}
    absent: set[int] = set()
    known: dict[int, Fact] = {}
    for fact in facts:
        if fact.rank is None or fact.work is None:
            continue
        if fact.name == "absent":
            absent.add(fact.rank)
        elif fact.rank not in prints or fact.name == "own":
            prints[fact.rank] = fact.work
        known.setdefault(fact.rank, fact)
    absent -= set(prints)
    if absent:
        reason = f"{ranks_text(absent)} sent an empty fingerprint: absent from the check, not in a REDUCE"
        return Verdict(
            tuple(sorted(absent)),
            Cause.UNKNOWN,
            "high",
            "empty fingerprint",
            reason,
            [known[rank] for rank in sorted(absent)],
        )
    if len(prints) < 2:
        return None
    sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, work in prints.items():
        sides[(work.seq, work.op, work.shape, work.dtype)].add(rank)
    told = {key: set(ranks) for key, ranks in sides.items()}
    for own, peer in itertools.pairwise(facts):
        # A rank compares itself with rank 0, 1, 2, ... and stops at the first that differs: those before it agree.
        if (
            own.name == "own"
            and peer.name == "peer"
            and own.line == peer.line
            and own.file == peer.file
            and own.work
            and own.rank is not None
        ):
            key = (own.work.seq, own.work.op, own.work.shape, own.work.dtype)
            told.setdefault(key, set()).update(
                r for r in range(peer.rank or 0) if r not in prints and r in evidence.seen_ranks
            )
    verdict = _by_majority(told, {key: min(ranks) for key, ranks in sides.items()}, prints, world)
    verdict.facts = list(known.values())
    verdict.rule = "collective fingerprints"
    return verdict


def _by_majority(
    told: dict[tuple[object, ...], set[int]],
    first: dict[tuple[object, ...], int],
    works: dict[int, Work],
    world: World,
    of_all: bool = True,
) -> Verdict:
    ordered = sorted(told.items(), key=lambda item: (-len(item[1]), min(item[1], default=0)))
    sides = [(_side_text(works[first[key]]), tuple(sorted(ranks))) for key, ranks in ordered if key in first]
    if len(ordered) < 2:
        return Verdict(cause=Cause.UNKNOWN, sides=sides, reason="all fingerprints agree")
    total = sum(len(ranks) for _, ranks in ordered)
    majority = ordered[0][1]
    size = world.size if of_all and world.size is not None and world.basis != "highest rank seen" else total
    enough = len(majority) >= 3 or 2 * len(majority) > size  # two against one are few when most ranks have not spoken
    if len(majority) >= 2 and 2 * len(majority) > total and enough:
        odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        reason = f"{ranks_text(odd)} in another collective than the majority ({ranks_text(majority)})"
        overturned = [f"the call sites: the majority may have skipped a call that only {ranks_text(odd)} made"]
        return Verdict(odd, Cause.DIVERGED, "high", "majority", reason, sides=sides, overturned=overturned)
    if total == 2 and world.is_pair:
        reason = "the two ranks are in different collectives; which of them is right cannot be told from the logs"
        overturned = ["the call sites of both: they say which of the two left the common path"]
        return Verdict(
            tuple(sorted(works)), Cause.DIVERGED, "medium", "pair", reason, sides=sides, overturned=overturned
        )
    reason = "ranks are in different collectives and no side has a majority"
    return Verdict((), Cause.DIVERGED, "low", "no majority", reason, suspects=tuple(sorted(works)), sides=sides)


def by_desync_report(evidence: Evidence, world: World) -> Verdict | None:
    """TORCH_NCCL_DESYNC_DEBUG: the ranks that the report calls lagging."""
    facts = [fact for fact in evidence.of(Kind.DESYNC) if fact.name == "lagging"]
    named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
    if not named or (world.size is not None and 2 * len(named) > world.size and world.size > 2):
        return None
    what = facts[0].detail or "lag behind"
    return Verdict(
        named, Cause.UNKNOWN, "high", "desync report", f"the desync report says {ranks_text(named)} {what}", facts
    )


def by_barrier(evidence: Evidence, world: World) -> Verdict | None:
    """monitored_barrier: rank 0 names who did not come; when rank 0 itself says nothing, it is the one."""
    facts = evidence.of(Kind.BARRIER_MISSING)
    if facts:
        named = tuple(sorted({rank for fact in facts for rank in fact.peers}))
        return Verdict(
            named,
            Cause.UNKNOWN,
            "high",
            "monitored barrier",
            f"rank 0 reports that {ranks_text(named)} did not reach the barrier",
            facts,
        )
    reached = evidence.of(Kind.BARRIER_REACHED)
    waiting = {fact.rank for fact in reached}
    if (
        reached
        and 0 not in waiting
        and 0 in world.covered
        and not any(f.rank == 0 and f.kind in WAITING for f in evidence.facts)
    ):
        who = ranks_text({rank for rank in waiting if rank is not None})
        reason = f"{who} reached the barrier and waited for rank 0, which printed nothing"
        return Verdict((0,), Cause.UNKNOWN, "medium", "monitored barrier", reason, reached)
    return None


def _is_collective(op: str | None) -> bool:
    """Whether all ranks of a group take part; a pipeline's sends and receives differ by design."""
    return op is not None and op.upper() not in ("SEND", "RECV", "RECVANYSOURCE", "COALESCED")


def _stuck_at(rows: Sequence[Row]) -> int | None:
    seqs = Counter(row.seq for row in rows if row.waiting and row.seq is not None)
    if not seqs:
        return None
    count = max(seqs.values())
    return min(seq for seq, times in seqs.items() if times == count)


def _by_group(evidence: Evidence) -> list[list[Row]]:
    groups: dict[str | None, list[Row]] = defaultdict(list)
    default = next((row.group_key for row in evidence.rows if row.group and row.group.is_default), None)
    for row in evidence.rows:
        groups[row.group_key if row.group else default].append(row)
    return sorted(groups.values(), key=lambda rows: -len([row for row in rows if row.waiting]))


def by_counters(evidence: Evidence, world: World) -> Verdict | None:
    """A rank whose last enqueued work is before the one that others wait in never called it, or is stuck inside the
    call.
    """
    for rows in _by_group(evidence):
        at = _stuck_at(rows)
        waiting = [row for row in rows if row.waiting]
        if at is None or not waiting:
            continue
        short = [row for row in rows if not row.waiting and row.enqueued is not None and 0 <= row.enqueued < at]
        short += [row for row in rows if row.enqueued == -1 and not row.waiting]
        # What a rank was in when its peers' limit ran out; it may have come, and waited elsewhere, after that.
        inside = {row.rank for row in waiting if row.seq == at}
        short += [
            Row(fact.rank, fact.group, enqueued=fact.enqueued, facts=[fact])
            for fact in evidence.of(Kind.DUMP_RECEIVED)
            if fact.rank is not None
            and fact.rank not in inside
            and fact.enqueued is not None
            and 0 <= fact.enqueued < at
            and (fact.group is None or rows[0].group is None or fact.group.key == rows[0].group_key)
            and fact.rank not in {row.rank for row in short}
        ]
        if short and (len(short) <= len(waiting) or world.size == 2):
            ranks = tuple(sorted({row.rank for row in short}))
            reason = (
                f"{ranks_text(ranks)} last enqueued work {short[0].enqueued}, while "
                f"{ranks_text([row.rank for row in waiting])} "
                f"wait in {at}: not called there, or stuck inside the call (only a stack can tell)"
            )
            return Verdict(
                ranks, Cause.UNKNOWN, "high", "counters", reason, [fact for row in short for fact in row.facts]
            )
    return None


def _enriched(works: dict[int, Work]) -> dict[int, Work]:
    """Return the collectives with what others say about the same one: a line that is cut does not differ from a
    whole one.
    """
    whole = [
        work for work in works.values() if work.op is not None and (work.numel_in is not None or work.shape is not None)
    ]
    found = {}
    for rank, work in works.items():
        if work.numel_in is None and work.shape is None:
            same = [one for one in whole if work.seq in (None, one.seq) and work.op in (None, one.op)]
            if len({one.signature() for one in same}) == 1:
                work = united(work, same[0]) or work
        found[rank] = work
    told = {work.seq for work in found.values() if work.op is not None}
    return {
        rank: work
        for rank, work in found.items()
        if work.op is not None or (work.seq is not None and work.seq not in told)
    }


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
        first = {key: min(ranks) for key, ranks in sides.items()}
        of_all = is_world_group(next(iter(waiting.values())), world.size)
        verdict = _by_majority(sides, first, works, world, of_all)
        verdict = _ahead_by_one(verdict, works)
        seqs = {rank: work.seq for rank, work in works.items() if work.seq is not None}
        if not verdict.culprits or verdict.rule == "pair":
            low = min(seqs.values(), default=0)
            if len(works) == 2 and world.is_pair and len(set(seqs.values())) == 2:
                rank = min(seqs, key=lambda r: seqs[r])
                verdict = Verdict(
                    (rank,),
                    Cause.DIVERGED,
                    "medium",
                    "behind",
                    f"rank {rank} waits in {low}, its peer is already past it",
                    sides=verdict.sides,
                )
        verdict.rule = f"divergence: {verdict.rule}"
        verdict.facts = [fact for row in waiting.values() for fact in row.facts[:1]]
        return verdict
    return None


def _ahead_by_one(verdict: Verdict, works: dict[int, Work]) -> Verdict:
    """Ranks at k and others at k + 1 of the same operation: those ahead have completed k, which proves nothing
    against them.
    """
    odd = {works[rank].seq for rank in verdict.culprits if rank in works}
    rest = {work.seq for rank, work in works.items() if rank not in verdict.culprits}
    if verdict.rule != "majority" or len(odd) != 1 or len(rest) != 1:
        return verdict
    one, many = odd.pop(), rest.pop()
    if one is None or many is None or one != many + 1:
        return verdict
    reason = f"{ranks_text(verdict.culprits)} already at #{one} while the others wait in #{many}: who held up #{many} cannot be told"
    early = next(work for rank, work in works.items() if work.seq == many)
    return Verdict(
        (), Cause.UNKNOWN, "low", "ahead by one", reason, suspects=verdict.culprits, sides=verdict.sides, work=early
    )


def by_store_key(evidence: Evidence, world: World) -> Verdict | None:
    """The peers wait for a key that one rank sets before its first NCCL call."""
    facts = [fact for fact in evidence.of(Kind.STORE_KEY) if "imeout" in fact.detail or "timed out" in fact.detail]
    owners = {peer for fact in facts for peer in fact.peers}
    if len(owners) != 1 or any(fact.rank in owners for fact in facts):
        return None
    owner = next(iter(owners))
    who = ranks_text({fact.rank for fact in facts if fact.rank is not None})
    reason = f"{who} waited for the NCCL id that rank {owner} sets at its first collective"
    return Verdict((owner,), Cause.UNKNOWN, "medium", "store key", reason, facts)


def _in_a_call(evidence: Evidence) -> set[int]:
    """Ranks that say by an error of their own that they were inside a collective when it was torn down."""
    facts = evidence.of(Kind.ABORTED, Kind.ASYNC_ERROR)
    facts += [f for f in evidence.of(Kind.EXCEPTION) if f.name.endswith("DistBackendError")]
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
            if row.waiting and row.work is not None and _is_collective(row.work.op)
            for fact in row.facts
            if fact.rank_basis == "prefix" and fact.group_rank is not None
        }
        if len(pairs) < 2 or rows[0].group is None or rows[0].group.is_default:
            continue
        (low, first), (high, last) = min(pairs.items()), max(pairs.items())
        spacing, uneven = divmod(last - first, high - low)
        if uneven or spacing < 1 or any(rank != first + (inner - low) * spacing for inner, rank in pairs.items()):
            continue
        size = next((ratio for row in rows if (ratio := ratio_of(row))), high + 1)
        members = {first + (inner - low) * spacing for inner in range(size)}
        silent = members - {row.rank for row in evidence.rows} - _in_a_call(evidence)
        if len(silent) == 1 and len(pairs) > 1 and silent <= set(world.covered):
            who = ranks_text(set(pairs.values()))
            reason = f"{who} wait in group {rows[0].group}; its member {ranks_text(silent)} printed nothing"
            facts = [fact for row in rows for fact in row.facts[:1]]
            return Verdict(tuple(silent), Cause.UNKNOWN, "medium", "silence", reason, facts)
    return None


def by_silence(evidence: Evidence, world: World) -> Verdict | None:
    """The minority that printed nothing while the rest wait in a group of all ranks."""
    if world.size is None or world.size < 2:
        return None
    waiting = {
        row.rank for row in evidence.rows if row.waiting and is_world_group(row, world.size) and row.rank < world.size
    }
    waits = [fact for fact in evidence.facts if fact.kind in WAITING and fact.rank in waiting]
    facts = list({fact.rank: fact for fact in reversed(waits)}.values())
    if not waiting or any(fact.hidden for fact in evidence.facts):
        return None
    spoke = {row.rank for row in evidence.rows} | _in_a_call(evidence) | evidence.cut
    silent = tuple(sorted(set(world.covered) - spoke))
    if not silent:
        return None
    broken = all(fact.kind is Kind.GLOO_CLOSED for fact in facts)
    stopped_early = all(fact.kind in (Kind.GLOO_CLOSED, Kind.GLOO_TIMEOUT, Kind.BARRIER_REACHED) for fact in facts)
    pair = world.is_pair and len(waiting) == 1
    if broken and len(waiting) + len(silent) < world.size:
        return None
    few = len(silent) == 1 or 4 * len(silent) <= world.size
    if not pair and (len(silent) >= len(waiting) or not few or (stopped_early and len(silent) > 1)):
        return (
            Verdict(rule="silence", reason="too many ranks are silent to name one", suspects=silent, facts=facts)
            if len(silent) <= 8
            else None
        )
    if _never_worked(evidence) and (pair or len(silent) >= len(waiting)):
        return None
    first_call = {row.seq for row in evidence.rows if row.waiting and row.seq is not None}
    joined = {fact.number for fact in evidence.of(Kind.JOINED)}
    if first_call and max(first_call) <= 1 and set(silent) <= joined:
        reason = f"{ranks_text(silent)} set its channels up and printed no timeout; the first collective never worked: the transport"
        return Verdict(rule="first collective", cause=Cause.NETWORK, reason=reason, facts=facts)
    if _fabric_failed(evidence):
        reason = f"{ranks_text(waiting)} wait; {ranks_text(silent)} printed nothing of the kind, but the fabric reports errors"
        return Verdict(rule="silence", cause=Cause.NETWORK, reason=reason, facts=facts, suspects=silent)
    reason = f"{ranks_text(waiting)} wait; {ranks_text(silent)} printed nothing of the kind"
    return Verdict(
        silent,
        Cause.UNKNOWN,
        "low" if pair and world.basis == "highest rank seen" else "medium",
        "silence",
        reason,
        facts,
        overturned=[f"a timeout line of {ranks_text(silent)} for the same collective, in a log that is not here"],
    )


def _fabric_failed(evidence: Evidence) -> bool:
    return any(fact.name in ("ib", "ib_async") and fact.number != 5 for fact in evidence.of(Kind.NCCL_WARN))


def _never_worked(evidence: Evidence) -> bool:
    """Whether the stuck collective is the group's first and nothing ever completed: the transport is the suspect."""
    rows = [row for row in evidence.rows if row.waiting and row.seq is not None]
    return bool(rows) and all(
        (row.seq or 0) <= 2 and (row.completed is not None and row.completed <= 0) for row in rows
    )


RULES: tuple[Rule, ...] = (
    by_guard,
    by_traces,
    by_failure,
    by_fingerprint,
    by_desync_report,
    by_barrier,
    by_store_barrier,
    by_peer_closed,
    by_ras,
    by_hccl,
    by_counters,
    by_store_key,
)


def find_culprits(evidence: Evidence, world: World) -> Verdict:
    """Return the first verdict that names somebody, else the most telling one that does not."""
    fallback: list[Verdict] = []
    for rule in RULES:
        verdict = rule(evidence, world)
        if verdict is not None and verdict.culprits:
            return _beside(verdict, evidence, world)
        if verdict is not None:
            fallback.append(verdict)
    divergence = by_divergence(evidence, world)
    for verdict in (
        by_alone(evidence, world),
        divergence,
        by_silence(evidence, world),
        by_silence_in_group(evidence, world),
        by_gone_peer(evidence, world),
    ):
        if verdict is not None and verdict.culprits:
            if divergence is not None and not verdict.sides:
                verdict.sides = divergence.sides
            return verdict
        if verdict is not None:
            fallback.append(verdict)
    first = by_first_exit(evidence, world)
    if first is not None and not fallback:
        fallback.append(first)
    return fallback[0] if fallback else Verdict()


def _beside(verdict: Verdict, evidence: Evidence, world: World) -> Verdict:
    """Add the ranks that are silent beside a rank that failed: a second fault may be theirs, which is no proof."""
    if verdict.rule in ("failure", "counters", "desync report") and not verdict.suspects:
        silence = by_silence(evidence, world)
        if silence is not None and silence.culprits:
            verdict.suspects = tuple(sorted(set(silence.culprits) - set(verdict.culprits)))
    return verdict
