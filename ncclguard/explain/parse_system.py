"""Lines about processes and machines: tracebacks, exits, the launcher's summary, kernel and driver messages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclguard.explain.facts import Fact, Kind
from ncclguard.explain.prefix import message_of, split_prefix
from ncclguard.explain.scan import Line

_EXCEPTION = re.compile(
    r"^(?:[a-zA-Z_][\w]*\.)*(?P<type>[A-Z]\w*(?:Error|Exception|Exit|Interrupt|OutOfMemory\w*|Warning)?)(?:: "
    r"?(?P<text>.*))?$"
)
_LOOSE = re.compile(r"(?:^|[\s\]:(])(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)): (?P<text>.*)$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_SUMMARY_RANK = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)")
_SUMMARY_EXIT = re.compile(r"exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_SUMMARY_TRACE = re.compile(r"traceback\s*: (.*)")
_SRUN = re.compile(
    r"srun: error: (\S+): tasks? (\d+): (Killed|Out Of Memory|Segmentation fault|Bus error|Aborted|Exited with "
    r"exit code (\d+))"
)
_MPIRUN = re.compile(r"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_DEEPSPEED = re.compile(r"(?:--local[_-]rank=(\d+).*)?exits with return code = (-?\d+)")
_FORCED = re.compile(r"Unable to shutdown process (\d+) via Signals\.SIGTERM")
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")
_OOM_KILL = re.compile(
    r"[Oo]ut of memory: Killed process (\d+)|oom-kill|oom_reaper: reaped process (\d+)|OOM[ -]?[Kk]ill"
)
_CUDA = re.compile(r"CUDA error: (.*)|Cuda failure(?: \d+)? '([^']*)'")
_UNUSED = re.compile(r"Expected to have finished reduction in the prior iteration")
_NO_GRAD = re.compile(r"(?:Parameter indices|Parameters) which did not receive grad for rank (\d+): ?(.*)")
_TRACE = re.compile(
    r"[Ii]nvalidate trace cache(?: @ step (\d+)(?: and module \d+)?:? (?:cache has only \d+ modules|expected "
    r"module (\d+), but got module (\d+)))?"
)
_RAY_DEATH = re.compile(
    r"worker died|SYSTEM_ERROR|The actor (?:is dead|died)|ActorDiedError|RayActorError|WorkerCrashedError"
)
_LOADER = re.compile(r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\)? (?:is killed by signal|exited unexpectedly)")
_PYSPY = re.compile(r"^\s+(\S+) \(([^()]+):(\d+)\)$")
_FAULT_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')

# An exception with one of these in its text follows from a peer's absence or from another's failure.
_FOLLOWS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Socket Timeout|[Tt]imed out waiting"
    r"|atchdog caught|caught collective"
    r"|communicator was aborted|remote process exited|ncclRemoteError|pair closure|monitoredBarrier|Detected "
    r"mismatch between coll"
    r"|wait timeout after|Timeout waiting for key|store->get|client socket has timed out|waiting for clients"
    r"|WorkNCCL|timed out in blocking"
    r"|NCCL operations have failed|collective operation timeout|work sequence id|Signals\.SIG|SignalException"
    r"|Failed to recv"
    r"|sendBytes failed|recvValue failed|CUDA error: an illegal.*NCCL|Operation timed out|unhandled system "
    r"error|NCCL error|ncclInternalError"
)
_FOLLOWING_TYPES = frozenset(
    [
        "ChildFailedError",
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


def parse(line: Line, make: Fact) -> Iterator[Fact]:
    """Yield the facts of one line about exceptions, exits, kernel and driver."""
    text = line.text
    if "Traceback (most" in text:
        fact = _traceback(line, make)
        if fact is not None:
            yield fact
        return
    if "most recent call first" in text or "Fatal Python error" in text or '"MainThread"' in text:
        fact = _stack(line, make)
        if fact is not None:
            yield fact
        return
    if "(local_rank: " in text or "first observed failure" in text or "exitcode: " in text:
        yield from _exit(line, make)
        return
    if (other := _other_launcher(text, make)) is not None:
        yield other
        return
    found = _FORCED.search(text)
    if found:
        yield make.clone(kind=Kind.NOTE, name="forced_kill", number=int(found[1]), detail=text[-200:])
        return
    found = _XID.search(text)
    if found:
        yield make.clone(kind=Kind.XID, number=int(found[2]), name=found[1], detail=(found[3] or "")[:200])
        return
    if "IO_PAGE_FAULT" in text:
        yield make.clone(kind=Kind.NOTE, name="iommu_fault", detail=text[-200:])
        return
    if _OOM_KILL.search(text):
        yield make.clone(kind=Kind.KERNEL_OOM, detail=text[-300:])
        return
    if _UNUSED.search(text):
        yield make.clone(kind=Kind.UNUSED)
        return
    found = _NO_GRAD.search(text)
    if found:
        yield make.clone(kind=Kind.UNUSED, rank=int(found[1]), rank_basis="text", detail=found[2][:200])
        return
    found = _TRACE.search(text)
    if found:
        step, expected, got = (int(part) if part else None for part in found.groups())
        yield make.clone(kind=Kind.TRACE_INVALIDATED, number=step, enqueued=expected, completed=got)
        return
    if _LOADER.search(text) or "decord" in text:
        yield make.clone(kind=Kind.DATALOADER, detail=text[-300:])
        return
    if _RAY_DEATH.search(text):
        yield make.clone(kind=Kind.WORKER_DIED, detail=text[-300:], rank=None, rank_basis="")
        return
    yield from _loose(text, make)


def _loose(text: str, make: Fact) -> Iterator[Fact]:
    message = message_of(text)
    found = _EXCEPTION.match(message) if "Error" in message[:120] else None
    found = found or _LOOSE.search(message)
    cuda = _CUDA.search(text)
    if found and found["type"].rsplit(".", 1)[-1] not in ("Error",):
        yield make.clone(kind=Kind.EXCEPTION, name=found["type"].rsplit(".", 1)[-1], detail=(found["text"] or "")[:600])
    elif "ECC error" in text or "fallen off the bus" in text:
        yield make.clone(kind=Kind.CUDA, detail=text[-200:], name="hardware")
    elif cuda:
        yield make.clone(kind=Kind.CUDA, detail=(cuda[1] or cuda[2])[:200])
    elif "CUDA out of memory" in text:
        yield make.clone(kind=Kind.EXCEPTION, name="OutOfMemoryError", detail=text[text.find("CUDA out") :][:300])


def _traceback(line: Line, make: Fact) -> Fact | None:
    """Follow one traceback to its last line; lines of other ranks in between are skipped."""
    own = line.prefix.tag
    frames: list[str] = []
    for raw in line.following(400):
        prefix = split_prefix(raw)
        if own and prefix.tag != own:
            continue
        body = message_of(prefix.text).rstrip()
        if not body or body.startswith((" ", "\t")):
            found = _FRAME.search(body)
            if found:
                frames.append(f"{found[1]}:{found[2]} in {found[3]}")
            continue
        if body.startswith("Traceback") or "direct cause" in body or "During handling" in body:
            continue
        found = _EXCEPTION.match(body)
        if found is None:
            if own or len(frames) == 0:
                return None
            continue
        return make.clone(
            kind=Kind.EXCEPTION,
            name=found["type"],
            detail=(found["text"] or "")[:600],
            text=body[:600],
            frames=tuple(frames[-12:]),
        )
    return make.clone(kind=Kind.STACK, frames=tuple(frames[-12:])) if frames else None


def _stack(line: Line, make: Fact) -> Fact | None:
    """Read a stack printed by faulthandler or py-spy (innermost frame first) into outermost-first order."""
    frames: list[str] = []
    for raw in line.following(60):
        body = message_of(split_prefix(raw).text)
        found = _FAULT_FRAME.search(body)
        if found:
            frames.append(f"{found[1]}:{found[2]} in {found[3]}")
            continue
        spy = _PYSPY.match(body.rstrip())
        if spy:
            frames.append(f"{spy[2]}:{spy[3]} in {spy[1]}")
        elif frames:
            break
    return make.clone(kind=Kind.STACK, frames=tuple(reversed(frames[:12]))) if frames else None


def _other_launcher(text: str, make: Fact) -> Fact | None:
    """Read how srun, mpirun and DeepSpeed's launcher report the end of a rank; exit codes as subprocess gives them."""
    found = _SRUN.search(text)
    if found:
        codes = {"Killed": -9, "Out Of Memory": -9, "Segmentation fault": -11, "Bus error": -7, "Aborted": -6}
        code = codes.get(found[3], int(found[4] or 1))
        return make.clone(kind=Kind.LAUNCHER, rank=int(found[2]), rank_basis="launcher", number=code, detail=found[3])
    found = _MPIRUN.search(text)
    if found:
        code = -int(found[3])
        return make.clone(kind=Kind.LAUNCHER, rank=int(found[1]), rank_basis="launcher", number=code, name="first")
    found = _DEEPSPEED.search(text)
    if found:
        rank = int(found[1]) if found[1] else None
        return make.clone(kind=Kind.LAUNCHER, rank=rank, rank_basis="launcher", number=int(found[2]), name="first")
    return None


def _exit(line: Line, make: Fact) -> Iterator[Fact]:
    """Read torchelastic's "failed (exitcode: ..." line, or one entry of its summary; `name` is "first" for the first
    failure seen.
    """
    text = line.text
    found = _FAILED.search(text)
    if found:
        pid = float(found[3])
        yield make.clone(
            kind=Kind.EXIT,
            number=int(found[1]),
            name="local",
            group_rank=int(found[2]),
            seconds=pid,
            rank=None,
            rank_basis="",
        )
        return
    first = "first observed failure" in text
    rank: int | None = None
    code: int | None = None
    trace = ""
    for row in [text, *line.following(9 if first else 4)]:
        found = _SUMMARY_RANK.search(row)
        if found:
            if rank is not None:
                break
            rank = int(found[1])
        found = _SUMMARY_EXIT.search(row)
        if found and rank is not None:
            code = int(found[1])
        found = _SUMMARY_TRACE.search(row)
        if found and rank is not None:
            trace = found[1][:300]
            break
    if rank is not None and code is not None:
        yield make.clone(
            kind=Kind.LAUNCHER,
            rank=rank,
            rank_basis="text",
            number=code,
            name="first" if first else "failure",
            detail=trace,
        )
