"""Find the few lines of a log that matter, at memory speed, and hand them on as records.

A log is searched block by block for short byte strings ("needles"), all at once, where one combined regular expression
runs at some 20 MB/s. Only lines with a needle, and their neighbours, are decoded. What a rank printed
last before the incident, and last of all, is kept too: a progress bar that goes on after the timeout says the rank is
alive. Memory is bounded by two blocks; a line that comes in thousands of copies is read a few thousand times.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ncclguard.explain.sources import Source
from ncclguard.explain.text import LONGEST, Prefix, join, pieces, split_prefix

#: Bytes after a hit that must be there before it is read: a message may go on.
FOLLOW_BYTES = 1 << 16
#: Bytes before a hit that are kept: a wrapped line may have begun there; and what stands around an incident.
CONTEXT_BYTES = 8192
#: Hits of a general needle in one source, and lines that differ in their numbers only: more of them say nothing new.
HITS_PER_NEEDLE = 10_000
SAME_SHAPE = 4096

# General words that stand in ordinary output too, so their number is bounded.
GENERAL: tuple[bytes, ...] = (
    b"timeout",  # dump signal due to a collective timeout, "collective operation timeout"
    b"Timeout",  # WorkNCCL(... Timeout(ms)=, Timeout at NCCL work, Socket Timeout, RendezvousTimeoutError
    b"imed out",  # gloo, the store, "Heartbeat monitor timed out", "operations have failed or timed out"
    b"rror",  # exceptions of every kind, NCCL, CUDA, ECC errors, "got error:", srun and slurmstepd
    b"xception",
    b"connect",  # connectFullMesh, trying to connect
    b"Connect",  # closed, reset, refused
    b"etrying",
    b"NCCL INFO Channel",
)
# Any number, of four bytes and more. A general word costs the reading of every line that has it.
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
    b"Getting socket",
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
    b"Evicted",
    b"Eviction",
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
_ERROR_HEAD = re.compile(rb"\[rank(\d{1,6})\]:(?:\s?\[[EF][^\n]*)?$")
_TASK = re.compile(rb"^\s*(\d{1,6}): \S", re.MULTILINE)
_DIGITS = re.compile(rb"\d+")
_BREAKS = re.compile(r"\r\n|\n|\r")


_FACTOR = 2654435761  # Knuth, The Art of Computer Programming, volume 3, 6.4: multiplicative hashing
_WORD = 4
_SLICE = 1 << 20


@functools.cache
def _table(needles: tuple[bytes, ...]) -> tuple[Any, dict[int, list[tuple[bytes, int]]], tuple[bytes, ...]]:
    """Return which hashes of four bytes begin something, hash -> (needle, where in it they stand), and short needles.

    Of seven bytes or more, wherever they stand, four lie in one aligned word.
    """
    import numpy

    flags = numpy.zeros(1 << 16, dtype=bool)
    owners: dict[int, list[tuple[bytes, int]]] = {}
    for needle in needles:
        for at in range(4) if len(needle) >= 2 * _WORD - 1 else ():
            key = (int.from_bytes(needle[at : at + _WORD], sys.byteorder) * _FACTOR & 0xFFFFFFFF) >> 16
            flags[key] = True
            owners.setdefault(key, []).append((needle, at))
    return flags, owners, tuple(needle for needle in needles if len(needle) < 2 * _WORD - 1)


def _finds(data: bytes, needle: bytes, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    at = data.find(needle, begin, end)
    while at >= 0:
        yield at, needle
        at = data.find(needle, at + len(needle), end)


def _places(data: bytes, needles: tuple[bytes, ...], begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield (position, needle) in order.

    The text is looked at as words of four bytes, which are hashed and looked up at once: some 3 ms per MB with numpy,
    whatever the number of needles, where `bytes.find` takes 0.2 to 0.8 ms per MB for each. Short texts are not worth
    the import.
    """
    if end - begin < 1 << 16:
        yield from sorted(hit for needle in needles for hit in _finds(data, needle, begin, end))
        return
    import numpy

    flags, owners, short = _table(needles)
    for low in range(begin - begin % _WORD, end, _SLICE):
        high = min(end, low + _SLICE)
        words = numpy.frombuffer(
            data, dtype=numpy.uint32, count=min(len(data) - low, high - low + _WORD) // _WORD, offset=low
        )
        keys = (words * numpy.uint32(_FACTOR) >> numpy.uint32(16)).astype(numpy.uint16)
        hits = []
        for place in numpy.flatnonzero(flags.take(keys)).tolist():
            for needle, inside in owners[int(keys[place])]:
                at = low + _WORD * place - inside
                if begin <= at < end and data.startswith(needle, at):
                    hits.append((at, needle))
        for needle in short:
            hits += _finds(data, needle, max(begin, low), min(end, high + len(needle) - 1))
        yield from sorted(hits)


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
        self.cut: int | None = None  # the rank whose error line is the last one: it may have been cut off
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
            lines = self._buffer[-4096:].rstrip().rsplit(b"\n", 1)
            cut = _ERROR_HEAD.search(lines[-1])
            self.cut = int(cut[1]) if cut else None
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
        buffer, begin, left = self._buffer, self._done, self._left
        needles = GENERAL + NEEDLES + (STARTING if self.size <= STARTING_BYTES else ())
        found: list[int] = []
        end = begin
        for at, needle in _places(buffer, needles, begin, limit):
            if at < end:
                continue  # on a line that is taken already
            if needle in left:
                if left[needle] <= 0:
                    continue
                left[needle] -= 1
            start = buffer.rfind(b"\n", max(begin, at - LONGEST), at) + 1 or max(begin, at - LONGEST)
            back = buffer.rfind(b"\r", start, at)
            found.append(back + 1 if back >= 0 else start)
            end = self._line_end(at)
        return found

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
                own = replace(
                    own,
                    when=own.when or line.when,
                    tag=line.tag or own.tag,
                    node=line.node,
                    hidden=own.hidden or line.hidden,
                )
                own = replace(
                    own,
                    local_rank=line.local_rank if own.local_rank is None else own.local_rank,
                    pid=own.pid or line.pid,
                )
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
