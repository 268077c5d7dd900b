"""Log lines as torch writes them, for the tests of `ncclguard explain`."""

from __future__ import annotations


def prefix(rank: int, version: float = 2.8, line: int = 632) -> str:
    """Return what torch puts in front of a C++ log line; `version` is 2.04 for 2.4."""
    if version >= 2.04:
        return f"[rank{rank}]:[E801 14:37:42.731552721 ProcessGroupNCCL.cpp:{line}] "
    return f"{f'[rank{rank}]:' if version >= 2.02 else ''}[E ProcessGroupNCCL.cpp:{line}] "


def pg(rank: int, group: str = "0", description: str | None = "default_pg", number: int = 0) -> str:
    """Return the `[PG ID ...]` tag of torch 2.5 and newer."""
    return f"[PG ID {number} PG GUID {group}{f'({description})' if description else ''} Rank {rank}] "


def timeout(
    rank: int,
    seq: int = 100,
    op: str = "ALLREDUCE",
    numel: tuple[int, int] = (1024, 1024),
    limit: int = 600000,
    version: float = 2.8,
    group: str = "",
    inner: int | None = None,
) -> list[str]:
    """Return the lines of one rank's watchdog timeout, printed three times as torch does."""
    inner = rank if inner is None else inner
    tag = group or (pg(rank) if version >= 2.05 else "")
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel[0]}, NumelOut={numel[1]}, Timeout(ms)={limit})"
    text = (
        f"[Rank {inner}] Watchdog caught collective operation timeout: {work} ran for {limit + 29} milliseconds "
        f"before timing out."
    )
    return [
        f"{prefix(rank, version)}{tag}{text}",
        f"{prefix(rank, version, 1895)}{tag}Process group watchdog thread terminated with exception: {text}",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        f"  what():  {tag}Process group watchdog thread terminated with exception: {text}",
    ]


def status(rank: int, at: int, enqueued: int, completed: int, group: str = "") -> str:
    """Return the status line of torch 2.6 to 2.12."""
    return (
        f"{prefix(rank, line=2241)}{group or pg(rank)} failure detected by watchdog at work sequence id: {at} "
        f"PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )
