"""Find the few lines of a log that matter, at memory speed, and hand them on as records.

A log is searched block by block for short byte strings ("needles"): `bytes.find` runs at 1 to 4 GB/s where one combined
regular expression runs at some 30 MB/s. Only lines with a needle, and their neighbours, are decoded. What a rank printed
last before the incident, and last of all, is kept too: a progress bar that goes on after the timeout says the rank is
alive. Memory is bounded by two blocks; a line that comes in thousands of copies is read a few thousand times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ncclguard.explain.sources import Source
from ncclguard.explain.text import LONGEST, Prefix, join, pieces, split_prefix

#: Bytes after a hit that must be there before it is read: a message may go on.
FOLLOW_BYTES = 1 << 16
#: Bytes before a hit that are kept: a wrapped line may have begun there; and what stands around an incident.
CONTEXT_BYTES = 8192
#: Hits of a general needle in one source, and lines that differ in their numbers only: more of them say nothing new.
HITS_PER_NEEDLE = 20_000
SAME_SHAPE = 4096

# General words that stand in ordinary output too, so their number is bounded.
GENERAL: tuple[bytes, ...] = (
    b"imeout",  # WorkNCCL(... Timeout(ms)=, Timeout at NCCL work, dump signal due to a collective timeout, Socket Timeout
    b"imed out",  # gloo, the store, "Heartbeat monitor timed out", "operations have failed or timed out"
    b"rror",  # exceptions of every kind, NCCL, CUDA, ECC errors, "got error:", srun and slurmstepd
    b"xception",
    b"onnect",  # closed, reset, refused, connectFullMesh
    b"etrying",
    b"NCCL INFO Channel",
)
# Each costs 0.2 ms per MB (long) to 0.8 ms (short): a new row of the table should be found by one that is here already.
NEEDLES: tuple[bytes, ...] = (
    b"Timeout(ms)=",  # by itself, should a log be full of the word timeout
    b"OpType=",
    b"atchdog",  # caught, "failure detected by watchdog", got stuck, thread terminated
    b"ignal",  # dump signal, "to signal dumping", Signals.SIGTERM, "killed by signal", "exited on signal"
    b"acquire GIL",
    b"ast enqueued",
    b"FlightRecorderHook",
    b"DESYNC_DEBUG",
    b"collective #",  # "didn't join collective #8"
    b"latest states",
    b"Culprit rank",
    b"Collective sequence number",
    b"CollectiveFingerPrint(",
    b"onitoredBarrier",
    b"based barrier",
    b"Bytes failed",
    b"EnforceNotMet",
    b"op.preamble",
    b"not receive grad",
    b"finished reduction",
    b"nvalidate trace",
    b"Notify register",
    b"EI0006",
    b"NCCL WARN",
    b"NET/OFI",
    b"Got completion",
    b"bort COMPLETE",
    b"operation counts",  # RAS
    b"considered dead",
    b"Missing communicator",
    b"local_rank: ",  # the launcher's death line and summary
    b"first observed failure",
    b"sigkill_handler",
    b"return code = ",  # DeepSpeed's launcher
    b"terminated with ",
    b"Worker proc ",
    b"(exitcode:",
    b"task timeout",
    b"worker died",
    b"torchelastic.worker.status",
    b"most recent call",  # tracebacks last, faulthandler first
    b'"MainThread"',  # py-spy dump
    b"DataLoader worker",
    b"decord",
    b"ut of memory",
    b"OOMKill",
    b"oom-kill",
    b"NVRM: Xid",
    b"fallen off",
    b"IO_PAGE_FAULT",
    b"mlx5_core",
    b"NETDEV WATCHDOG",
    b"ink is Down",
    b"definitely down",
    b"NodeNotReady",
    b"Evict",
    b"Preempt",
    b'"culprits"',
)
# What a job prints while it starts; looked for in the first blocks only.
STARTING: tuple[bytes, ...] = (
    b"orld_size",
    b"orld size",
    b"ORLD_SIZE",
    b"um_processes",
    b"nodes",
    b"NODES",
    b"num_machines",
    b"proc_per_node",
    b"proc-per-node",
    b"ranks ",
    b"Ranks ",
    b"sing interface",
    b"Asymmetric link",
)
STARTING_BYTES = 16 << 20

_RANK = re.compile(rb"\[rank(\d{1,6})\]")
_TASK = re.compile(rb"^\s*(\d{1,6}): \S", re.MULTILINE)
_DIGITS = re.compile(rb"\d+")
_BREAKS = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Record:
    """One record worth reading: its place, its prefixes, its message, and a way to the raw lines after it.

    `context`: it is read only for what the rank was doing; `last`: it stands at the end of its source.
    """

    source: Source
    number: int
    prefix: Prefix
    following: Callable[[int], Sequence[str]]
    context: bool = False
    last: bool = False

    @property
    def text(self) -> str:
        return self.prefix.text


def _lines(data: bytes) -> list[str]:
    return _BREAKS.split(data.decode("utf-8", "replace").replace("\x00", ""))


class Scanner:
    """Take one source's bytes as they come and yield the records that matter, in order."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.size = 0
        self.ranks: set[int] = set()
        self.tasks: set[int] = set()
        self._buffer = b""
        self._done = 0  # what stands before it in the buffer has been read
        self._line = 1  # the number of the line at _done
        self._left = dict.fromkeys(GENERAL, HITS_PER_NEEDLE)
        self._shapes: dict[bytes, int] = {}
        self._seen_context = False

    def feed(self, data: bytes, final: bool = False, settle: bool = False) -> Iterator[Record]:
        """Yield the records that the bytes complete; `final`: nothing follows; `settle`: nothing follows for now."""
        first = self.size == 0
        self.size += len(data)
        self._buffer = self._buffer[max(0, self._done - CONTEXT_BYTES) :] + data
        self._done = min(self._done, CONTEXT_BYTES)
        if first or final:
            self._speakers(self._buffer[-(1 << 20) :])
        if final:
            limit = len(self._buffer)
        elif settle:
            limit = self._buffer.rfind(b"\n") + 1
        else:
            limit = self._buffer.rfind(b"\n", 0, max(0, len(self._buffer) - FOLLOW_BYTES)) + 1
            if limit <= self._done and len(self._buffer) - self._done > 8 * LONGEST:
                limit = len(self._buffer) - FOLLOW_BYTES  # a line without an end
        if limit > self._done:
            yield from self._read(limit)
        if final:
            yield from self._context(self._buffer[-CONTEXT_BYTES:], self._line, last=True)

    def _speakers(self, data: bytes) -> None:
        """Note which ranks speak at all, at both ends of the source."""
        self.ranks.update(int(number) for number in _RANK.findall(data))
        self.tasks.update(int(number) for number in _TASK.findall(data))

    def _read(self, limit: int) -> Iterator[Record]:
        buffer, number, counted, end = self._buffer, self._line, self._done, self._done
        for start in self._hits(limit):
            if start < end:
                continue
            number += buffer.count(b"\n", counted, start)
            counted = start
            stop = self._line_end(start)
            shape = _DIGITS.sub(b"", buffer[start : min(stop, start + 160)])
            copies = self._shapes.get(shape, 0)
            if copies >= SAME_SHAPE or (copies == 0 and len(self._shapes) >= 100_000):
                continue
            self._shapes[shape] = copies + 1
            raw = buffer[start:stop]
            if not self._seen_context and (b"imeout" in raw or b"imed out" in raw):
                self._seen_context = True
                yield from self._context(buffer[max(0, start - CONTEXT_BYTES) : start], number, last=False)
            last_end, records = self._record(start, stop, number)
            end = max(end, last_end)
            yield from records
        limit = max(limit, min(end, len(buffer)))
        self._line = number + buffer.count(b"\n", counted, limit)
        self._done = limit

    def _line_end(self, at: int) -> int:
        end = self._buffer.find(b"\n", at, at + LONGEST)
        if end < 0:
            end = min(len(self._buffer), at + LONGEST)
        back = self._buffer.find(b"\r", at, end)
        return back if back >= 0 else end

    def _hits(self, limit: int) -> list[int]:
        """Return where the lines with a needle begin, in order; a carriage return ends a line too (progress bars)."""
        buffer, begin = self._buffer, self._done
        needles = GENERAL + NEEDLES + (STARTING if self.size <= STARTING_BYTES else ())
        found: set[int] = set()
        for needle in needles:
            left = self._left.get(needle, 1 << 62)
            at = buffer.find(needle, begin, limit) if left > 0 else -1
            while at >= 0:
                start = buffer.rfind(b"\n", max(begin, at - LONGEST), at) + 1 or max(begin, at - LONGEST)
                back = buffer.rfind(b"\r", start, at)
                found.add(back + 1 if back >= 0 else start)
                left -= 1
                if left <= 0:
                    break
                end = buffer.find(b"\n", at, at + LONGEST)
                back = buffer.find(b"\r", at, end if end >= 0 else at + LONGEST)
                at = buffer.find(needle, max(back if back >= 0 else end, at + len(needle)), limit)
            if needle in self._left:
                self._left[needle] = left
        return sorted(found)

    def _record(self, start: int, stop: int, number: int) -> tuple[int, list[Record]]:
        """Return where the record ends and what it holds; lines before and after are joined where it was wrapped."""
        buffer = self._buffer
        before = _lines(buffer[max(0, start - 4096) : start])[-9:-1] if start else []
        after = _lines(buffer[stop : stop + 8192])[1:28]
        lines = [*before, *_lines(buffer[start:stop])[:1], *after]
        at = len(before)
        first, last, text = join(lines, at)
        end = stop
        for _ in range(last - at):
            end = self._line_end(min(len(buffer), end + (2 if buffer[end : end + 2] == b"\r\n" else 1)))
        number -= sum(1 for _ in range(at - first))

        def following(count: int) -> Sequence[str]:
            return _lines(buffer[end : end + FOLLOW_BYTES])[1 : count + 1]

        line = split_prefix(text)
        records = []
        for index, piece in enumerate(pieces(line.text)):
            own = split_prefix(piece) if index or piece is not line.text else line
            if own.rank is None and (index == 0 or not piece.startswith("[")):
                own = replace(own, rank=line.rank, basis=line.basis)
            if index or own is not line:
                own = replace(own, when=own.when or line.when, tag=line.tag or own.tag, node=line.node, hidden=own.hidden or line.hidden)
                own = replace(own, local_rank=line.local_rank if own.local_rank is None else own.local_rank, pid=own.pid or line.pid)
            records.append(Record(self.source, number, own, following))
        return end, records

    def _context(self, data: bytes, number: int, last: bool) -> Iterator[Record]:
        """Yield the last lines before the incident, or of the file, as context."""
        parts = data.replace(b"\r", b"\n").split(b"\n")
        line = max(1, number - data.count(b"\n"))
        for index, piece in enumerate(parts[1:] if len(data) >= CONTEXT_BYTES else parts):
            if piece.strip():
                prefix = split_prefix(piece[:LONGEST].decode("utf-8", "replace").replace("\x00", ""))
                yield Record(self.source, line + index, prefix, lambda count: [], context=True, last=last)
