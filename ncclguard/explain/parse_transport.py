"""Lines of what carries the data: gloo, monitored barrier, the store, NCCL's own warnings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ncclguard.explain.facts import Fact, Kind
from ncclguard.explain.prefix import message_of, split_prefix
from ncclguard.explain.scan import Line

_BARRIER_ONE = re.compile(r"\[Rank (\d+)\]:? ?Ranks? ([\d, ]+?) failed to pass monitoredBarrier in (\d+) ?ms")
_BARRIER_OK = re.compile(r"Rank (\d+) successfully reached monitoredBarrier")
_GLOO_WAIT = re.compile(r"Timed out waiting (\d+) ?ms for (\w+) operation to complete")
_GLOO_CLOSED = re.compile(
    r"Connection closed by peer|(?:Read|Write|read|write)(?: error|v?).{0,60}(?:Connection reset by peer|Broken pipe)"
    r"|Application timeout caused pair closure|(?:pair|unbound_buffer)\.cc:\d+\].*(?:Connection|Broken pipe)"
)
_UNIQUE_ID = re.compile(
    r"\[(\d+)\] is setting up NCCL communicator and retr?(?:ei|ie)ving ncclUniqueId from \[(\d+)\].*?by key "
    r"'([^']*)'.*?got error: ?(.*)"
)
_KEY_WAIT = re.compile(r"wait timeout after (\d+) ?ms, keys: (\S.*)|Timeout waiting for key: (\S+) after (\d+) ?ms")
_STORE_WAIT = re.compile(
    r"waitForInput.*(?:timed out|time ?out) after (\d+) ?ms|waitForInput.*likely a timeout|(?:^|[: ])Socket Timeout\b"
)
_CLIENTS = re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined")
_CONNECT = re.compile(
    r"client socket has timed out after (\d+) ?ms while trying to connect to \(?([^)]*)\)?"
    r"|RendezvousConnectionError|RendezvousTimeoutError"
)
_STORE_LOST = re.compile(
    r"Failed to recv, got 0 bytes|sendBytes failed|recvBytes failed|TCPStore server has shut down|Failed to "
    r"check the \"should dump\""
)
_WARN = re.compile(r"(?:(\S+?):(\d+):(\d+) \[(\d+)\] )?(?:(\S+?):(\d+) )?NCCL WARN (.*)")
_INFO_DOWN = re.compile(r"NCCL INFO .*socket\.cc:\d+ -> \d+|socket\.cc:\d+ -> \d+")
_SETUP_RANK = re.compile(r"comm \S+ rank (\d+) n[Rr]anks (\d+)(?: nNodes (\d+) localRanks (\d+))?")


def parse(line: Line, make: Fact) -> Iterator[Fact]:
    """Yield the facts of one line about gloo, barriers, the store or NCCL's transports."""
    text = line.text
    if "NCCL WARN" in text:
        yield _warn(line, make)
        return
    if "Last error:" in text:
        rest = text[text.find("Last error:") + 11 :].strip() or " ".join(
            message_of(split_prefix(row).text).strip() for row in line.following(1)
        )
        if rest:
            yield make.clone(kind=Kind.NCCL_WARN, name=warning_class(rest), detail=rest[:400], text=rest[:400])
        return
    if "shared memory segment" in text:
        yield make.clone(kind=Kind.NCCL_WARN, name="shm", detail=text[-300:])
        return
    found = _BARRIER_ONE.search(text)
    if found:
        ranks = tuple(int(part) for part in re.findall(r"\d+", found[2]))
        yield make.clone(
            kind=Kind.BARRIER_MISSING, peers=ranks, seconds=int(found[3]) / 1000, rank=_own(make, int(found[1]))
        )
        return
    found = _BARRIER_OK.search(text)
    if found:
        yield make.clone(
            kind=Kind.BARRIER_REACHED, rank=_own(make, int(found[1])), rank_basis=make.rank_basis or "text"
        )
        return
    found = _UNIQUE_ID.search(text)
    if found:
        yield make.clone(
            kind=Kind.STORE_KEY,
            rank=_own(make, int(found[1])),
            rank_basis=make.rank_basis or "text",
            peers=(int(found[2]),),
            name=found[3],
            detail=found[4][:300],
            seconds=_milliseconds(found[4]),
        )
        return
    found = _GLOO_WAIT.search(text)
    if found:
        yield make.clone(kind=Kind.GLOO_TIMEOUT, seconds=int(found[1]) / 1000, detail=found[2])
        return
    if "EnforceNotMet" in text or "op.preamble.length" in text:
        yield make.clone(kind=Kind.GLOO_ABORT, detail="a message of another size arrived")
        return
    if _GLOO_CLOSED.search(text) and "NCCL" not in text:
        yield make.clone(kind=Kind.GLOO_CLOSED, detail="reset" if "reset" in text else "closed")
        return
    yield from _store(text, make)
    if _INFO_DOWN.search(text):
        yield make.clone(kind=Kind.NCCL_INFO, detail=text[text.find("socket.cc") :][:120])
    elif "sing interface" in text and "NCCL" in text:
        yield make.clone(kind=Kind.NCCL_INFO, name="interface", detail=text[text.find("sing interface") - 1 :][:200])
    elif "Asymmetric link" in text:
        yield make.clone(kind=Kind.NCCL_WARN, name="topology", detail=text[-200:])


def _own(make: Fact, printed: int) -> int:
    return make.rank if make.rank is not None else printed


def _milliseconds(text: str) -> float | None:
    found = re.search(r"after (\d+) ?ms", text)
    return int(found[1]) / 1000 if found else None


def _store(text: str, make: Fact) -> Iterator[Fact]:
    found = _CLIENTS.search(text)
    if found:
        yield make.clone(
            kind=Kind.RENDEZVOUS,
            name="clients",
            seconds=float(found[1]),
            detail=f"{found[2]} of {found[3]} clients joined",
        )
        return
    found = _CONNECT.search(text)
    if found:
        yield make.clone(
            kind=Kind.RENDEZVOUS,
            name="connect",
            seconds=int(found[1]) / 1000 if found[1] else None,
            detail=(found[2] or "")[:120],
        )
        return
    found = _KEY_WAIT.search(text)
    if found:
        limit = found[1] or found[4]
        yield make.clone(kind=Kind.STORE_TIMEOUT, name=(found[2] or found[3])[:120], seconds=int(limit) / 1000)
        return
    found = _STORE_WAIT.search(text)
    if found:
        yield make.clone(kind=Kind.STORE_TIMEOUT, seconds=int(found[1]) / 1000 if found[1] else _milliseconds(text))
    elif _STORE_LOST.search(text):
        yield make.clone(kind=Kind.STORE_LOST)


# What a warning's text means. The first that matches counts; NCCL 2.3 to 2.30 wordings.
_WARNINGS: tuple[tuple[str, str], ...] = (
    ("size_mismatch", r"collective mismatch|[Mm]essage truncated|Mismatch(?:ed)? (?:size|count)"),
    ("version", r"Mismatched NCCL version"),
    ("shm", r"shared memory|/dev/shm|shm_open|No space left on device"),
    ("oom", r"out of memory|Failed to CUDA [cm]alloc"),
    ("cuda", r"Cuda failure|CUDA failure"),
    ("ib_async", r"async fatal event|Got async (?:error )?event"),
    (
        "ib",
        (
            r"NET/IB ?\d* ?: ?Got completion|ibv_\w+ failed|Call to ibv_|NET/IB ?: ?Unable|No IB device|NET/IB "
            r".*(?:error|failed)"
        ),
    ),
    (
        "no_interface",
        (
            r"no socket interface found|No interface found|Could not find any (?:socket )?interface|Unable to find "
            r".*interface"
        ),
    ),
    (
        "connect",
        (
            r"[Cc]onnect(?: to \S+)? (?:timeout|returned|failed)|Call to connect|exceeded error retry count|No "
            r"route to host|Network is unreachable"
        ),
    ),
    ("closed", r"Connection closed by remote peer|Connection reset|Broken pipe|Accept failed|Call to (?:recv|send)"),
    ("p2p", r"peer access|P2P|peer mapping|cuIpc|IpcOpen|Duplicate GPU|Could not enable P2P|NVLS|Multicast"),
    ("gpu", r"ECC|fallen off the bus"),
)
_COMPILED = tuple((name, re.compile(pattern)) for name, pattern in _WARNINGS)


def warning_class(text: str) -> str:
    """Return the family of an NCCL warning's text: ib, connect, closed, shm, p2p, cuda, size_mismatch, ...

    or "other".
    """
    for name, pattern in _COMPILED:
        if pattern.search(text):
            return name
    return "other"


def _warn(line: Line, make: Fact) -> Fact:
    found = _WARN.search(line.text)
    message = found[7] if found else line.text
    status = re.search(r"(?:with error |status=(?:\w+\()?)(\d+)", message)
    return make.clone(
        kind=Kind.NCCL_WARN,
        name=warning_class(message),
        detail=message.strip()[:400],
        number=int(status[1]) if status else None,
    )


def nccl_error_family(text: str) -> str | None:
    """Return the family of the NCCL error inside an exception's text, or None when it holds none."""
    if "NCCL" not in text and "nccl" not in text:
        return None
    kind = warning_class(text)
    if kind != "other":
        return kind
    if "unhandled system error" in text or "ncclSystemError" in text:
        return "system"
    if "remote process exited" in text or "ncclRemoteError" in text:
        return "remote"
    if "unhandled cuda error" in text or "ncclUnhandledCudaError" in text:
        return "cuda"
    if "internal error" in text or "ncclInternalError" in text:
        return "internal"
    return None


def setup_ranks(text: str) -> tuple[int, int, int | None, int | None] | None:
    """Return (rank, nranks, nodes, local ranks) of an NCCL communicator's init line."""
    found = _SETUP_RANK.search(text)
    if found is None:
        return None
    return int(found[1]), int(found[2]), int(found[3]) if found[3] else None, int(found[4]) if found[4] else None
