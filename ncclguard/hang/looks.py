"""Looks at running ranks from outside: their Python stacks by py-spy, and what /proc counts of each of their threads.

py-spy reads with `--nonblocking`: the memory of a process that goes on running. Its own way of stopping a process for
each look takes about 25 ms, and counts as a context switch, which would hide that a rank does not move.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from ncclguard.hang.processes import PROC
from ncclguard.hang.stacks import INSIDE, PAST_THE_END, Kind, Motion, Place, Thread, parse, place_of
from ncclguard_explain.host import read_file
from ncclguard_explain.language import Message, tr

#: Seconds for one call of py-spy, and how often it may read a process that changes while it is read.
SPY_WITHIN: Final = 3.0
SPY_TRIES: Final = 4
AT_ONCE: Final = 8
#: Seconds for reading source lines: their file system may be what hangs.
READ_WITHIN: Final = 0.5
#: Up to this part of one processor a thread only wakes up to ask again; from this many bytes a second it transfers.
IDLE_LOAD: Final = 0.05
IDLE_BYTES: Final = 65536
_TICKS: Final = os.sysconf("SC_CLK_TCK")
#: The reason why a rank was not seen, where ptrace is not allowed.
NO_RIGHT = tr("no right to read its memory")
#: The same, where there is no Python any more, or none yet.
NO_PYTHON = tr("no Python in it, or none that py-spy can read")
#: The name of the thread that `watch` has.
_WATCH: Final = "ncclguard-watch"
#: The name of the thread of torch's TCPStore, where it is.
_STORE: Final = "pt_tcpstore"
#: The description of the default process group.
_DEFAULT: Final = b"default_pg"
#: The kernel's functions in which a thread waits for one of several files or sockets.
_WAITS_FOR_MESSAGES: Final = re.compile(r"poll|select|accept")


@dataclass(frozen=True, slots=True)
class Counters:
    """The counts in /proc of one process: by thread, CPU ticks and how often it gave the processor up by itself."""

    state: str
    threads: Mapping[int, tuple[int, int]]
    transferred: int | None
    helpers: int  # CPU ticks of the processes that it has started, also of those that have ended
    names: frozenset[str] = frozenset()  # of its threads
    running: frozenset[int] = frozenset()  # the threads that ran, or could have run
    transfers: Mapping[int, int] = field(default_factory=dict)  # the part of `transferred` of each thread
    stores: frozenset[int] = frozenset()  # the threads of torch's store, which answers all ranks

    @property
    def is_gloo(self) -> bool:
        """Tell whether it communicates by gloo alone, whose calls do not compute while they wait for peers."""
        nccl = any(name.startswith(("pt_nccl", "NCCL ")) for name in self.names)
        return not nccl and any(name.startswith(("pt_gloo", "gloo_")) for name in self.names)


@dataclass(frozen=True, slots=True)
class Look:
    """One look at one rank; `counters` is None once it has ended, `place` None where no stack could be read."""

    when: float
    counters: Counters | None
    place: Place | None = None
    thread: int = 0
    python_threads: tuple[int, ...] = ()
    trouble: Message | str = ""
    rank: int | None = None  # the value of the program's outermost local variable of that name
    own_threads: frozenset[int] = frozenset()  # those of this library, which `watch` has and guarded calls
    watched: bool = False  # by `watch`, as the name of one of them tells


@dataclass(frozen=True, slots=True)
class Observed:
    """The sum of all looks at one rank; `state` is the letter of /proc, "X" once it has ended.

    `gloo` tells whether it communicates by gloo alone.
    """

    state: str
    motion: Motion
    place: Place | None
    trouble: Message | str = ""
    gloo: bool = False


@dataclass
class Lines:
    """Reads source lines as the processes see their files, and gives up on a file system that does not answer."""

    _known: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    _hangs: bool = False

    def line(self, pid: int, file: str, number: int) -> str:
        """Return a line of a file of a process, nothing where it cannot be read."""
        lines = self._known.get((pid, file))
        if lines is None:
            lines = self._known[pid, file] = [] if self._hangs else self._read(pid, file)
        return lines[number - 1] if 0 < number <= len(lines) else ""

    def _read(self, pid: int, file: str) -> list[str]:
        found: list[str] = []

        def read() -> None:
            try:
                with open(f"{PROC}/{pid}/root{file}", errors="replace") as text:
                    found.extend(text.read(1 << 22).splitlines())
            except (OSError, ValueError):
                pass

        reader = threading.Thread(target=read, name="ncclguard-source", daemon=True)
        reader.start()
        reader.join(READ_WITHIN)
        self._hangs = reader.is_alive()
        return [] if self._hangs else found


def find_spy() -> str | None:
    """Return the path of py-spy, None where it is not installed."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))


def look(pids: Iterable[int], spy: str | None, lines: Lines) -> dict[int, Look]:
    """Look at processes once, at several at a time.

    A process in which py-spy finds no interpreter, while it finds those of others, has come to its end.
    """
    pids, started = list(pids), started_by()
    with ThreadPoolExecutor(min(AT_ONCE, max(len(pids), 1))) as pool:
        looks = dict(zip(pids, pool.map(lambda pid: _look(pid, started, spy, lines), pids), strict=True))
    if any(one.place for one in looks.values()):
        ended = Place(Kind.EXIT, stack=(PAST_THE_END,))
        gone = {pid: replace(one, place=ended, trouble="") for pid, one in looks.items() if one.trouble == NO_PYTHON}
        looks.update(gone)
    return looks


def _look(pid: int, started: Mapping[int, Sequence[tuple[int, int]]], spy: str | None, lines: Lines) -> Look:
    threads, trouble = _stacks(pid, spy) if spy is not None else ([], tr("py-spy is not installed"))
    found = place_of(threads, pid, lambda file, line: lines.line(pid, file, line))
    counters = count(pid, started)
    if found is None:
        return Look(time.monotonic(), counters, thread=pid, trouble=trouble)
    place, thread = found
    frames = next(one.frames for one in threads if one.tid == thread)
    address = next((frame.group for frame in reversed(frames) if frame.group), 0)
    if place.inside and address:
        group, default = _membership(pid, address)
        place = replace(place, group=group, world=place.world or default)
    if place.kind is Kind.PYTHON and _WAITS_FOR_MESSAGES.search(_waits_in(pid, thread)):
        place = replace(place, kind=Kind.IDLE)
    rank = next(
        (frame.rank for one in threads if one.tid == pid for frame in one.frames if frame.rank is not None), None
    )
    own = frozenset(one.tid for one in threads if one.name.startswith("ncclguard"))
    watched = any(one.name == _WATCH for one in threads)
    return Look(time.monotonic(), counters, place, thread, tuple(one.tid for one in threads), "", rank, own, watched)


def _membership(pid: int, address: int) -> tuple[tuple[int, int] | None, bool]:
    """Return the rank within a process group and the size of the group, and whether it is the default one.

    `address` is that of its Python object, which has the address of torch's after the two words of each such object.
    torch's (ProcessGroup.hpp, 2.4 to 2.13) begins with a table, the counts of references and the store; after rank and
    size come a byte, and the description with its address and length.
    """
    try:
        with open(f"{PROC}/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address + 16)
            memory.seek(int.from_bytes(memory.read(8), sys.byteorder) + 24)
            rank, size, _, text, length = struct.unpack("=iiQQQ", memory.read(32))
            if not 0 <= rank < size:
                return None, False
            memory.seek(text)
            return (rank, size), length == len(_DEFAULT) and memory.read(length) == _DEFAULT
    except (OSError, ValueError, OverflowError, struct.error):
        return None, False


def _waits_in(pid: int, thread: int) -> str:
    """Return the kernel's function in which a thread sleeps, nothing where it may not be seen."""
    return read_file(PROC / str(pid) / "task" / str(thread) / "wchan")


def _stacks(pid: int, spy: str) -> tuple[list[Thread], Message | str]:
    """Return the threads of a process, or why they cannot be read."""
    said = ""
    for _ in range(SPY_TRIES):
        command = [spy, "dump", "--pid", str(pid), "--nonblocking", "--json", "--full-filenames", "--locals"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_WITHIN, check=False)
        except subprocess.TimeoutExpired:
            return [], tr("py-spy did not answer within {seconds:.0f} s", seconds=SPY_WITHIN)
        except OSError as error:
            return [], tr("py-spy cannot be started: {error}", error=error)
        if done.returncode == 0:
            try:
                return parse(done.stdout), tr("its main thread has no Python stack")
            except ValueError:  # it has changed while it was read
                said = tr("it changed while it was read")
                continue
        said = done.stderr
        if "permission denied" in said.lower() or "not permitted" in said.lower():
            return [], NO_RIGHT
        if not (PROC / str(pid) / "stat").exists():
            return [], tr("it has ended")
        if "Failed to find a python interpreter" in said:
            return [], NO_PYTHON
    if isinstance(said, Message):
        return [], said
    words = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith("Stack backtrace")]
    return [], tr("py-spy cannot read it: {said}", said=(words or ["no output"])[0][:160])


def helper_places(helpers: Iterable[int], spy: str, lines: Lines) -> list[tuple[int, str]]:
    """Return where the processes stand that a rank has started, such as a data loader's worker, by their number."""
    places = []
    for pid in helpers:
        found = place_of(_stacks(pid, spy)[0], pid, lambda file, line, pid=pid: lines.line(pid, file, line))  # type: ignore[misc]
        if found is not None:
            places.append((pid, found[0].stack[-1]))
    return places


def count(pid: int, started: Mapping[int, Sequence[tuple[int, int]]]) -> Counters | None:
    """Return what /proc counts of a process and of what it has `started`, None once it has ended."""
    folder = f"{PROC}/{pid}"
    found = _stat(folder)
    if found is None:
        return None
    threads: dict[int, tuple[int, int]] = {}
    names, running, stores, transfers = set(), set(), set(), {}
    try:
        for name in os.listdir(f"{folder}/task"):
            own = _stat(f"{folder}/task/{name}")
            if own is not None:
                names.add(own[0])
                running |= {int(name)} if own[1][0] == "R" else set()
                stores |= {int(name)} if own[0].startswith(_STORE) else set()
                transfers[int(name)] = _transferred(f"{folder}/task/{name}") or 0
                threads[int(name)] = int(own[1][11]) + int(own[1][12]), _switches(f"{folder}/task/{name}")
    except OSError:
        return None
    helpers = sum(map(int, found[1][13:15])) + _ticks_below(pid, started)
    return Counters(
        found[1][0], threads, _transferred(folder), helpers, frozenset(names), frozenset(running), transfers,
        frozenset(stores),
    )  # fmt: skip


def started_by() -> dict[int, list[tuple[int, int]]]:
    """Return what each process has started: their numbers, and their CPU ticks with those of what has ended."""
    found: dict[int, list[tuple[int, int]]] = {}
    for name in filter(str.isdigit, os.listdir(PROC)):
        read = _stat(f"{PROC}/{name}")
        if read is not None:
            found.setdefault(int(read[1][1]), []).append((int(name), sum(map(int, read[1][11:15]))))
    return found


def _ticks_below(pid: int, started: Mapping[int, Sequence[tuple[int, int]]]) -> int:
    return sum(ticks + _ticks_below(child, started) for child, ticks in started.get(pid, ()))


def _stat(folder: str) -> tuple[str, list[str]] | None:
    """Return the name of a process or thread, and the fields after it."""
    head, _, rest = read_file(f"{folder}/stat").rpartition(")")
    return (head.partition("(")[2], rest.split()) if rest else None


def _switches(folder: str) -> int:
    rows = read_file(f"{folder}/status").splitlines()
    return next((int(row.split()[1]) for row in rows if row.startswith("voluntary_ctxt_switches")), 0)


def _transferred(folder: str) -> int | None:
    """Return the bytes that a process has read and written, None where this may not be seen.

    `rchar` and `wchar` move at the end of a system call, `read_bytes` and `write_bytes` within a long one.
    """
    moved = ("rchar", "wchar", "read_bytes", "write_bytes")
    rows = read_file(f"{folder}/io").splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith(moved)) if rows else None


def observe(looks: Sequence[Look]) -> Observed:
    """Return what the looks at one rank come to: its last state and place, and whether it has moved between any two.

    What leaves a doubt (`is_doubtful`) counts as movement where it has gone on until the last look.
    """
    last = looks[-1]
    if last.counters is None:
        return Observed("X", Motion.UNKNOWN, None, tr("it ended while it was looked at"))
    # A look between two others may have failed where the host is busy: these two tell all that it would have told.
    told = [one for one in looks if one.place is not None or one in (looks[0], last)]
    pairs = list(itertools.pairwise(told))
    by_all = bool(pairs) and is_doubtful(pairs[-1])
    motions = {_moved(*pair, by_all or not is_doubtful(pair)) for pair in pairs}
    motion = next(
        (one for one in (Motion.MOVING, Motion.UNKNOWN, Motion.SPINNING, Motion.WAKING) if one in motions), Motion.STILL
    )
    state = last.counters.state
    if state in "Tt" and not all(one.counters is not None and one.counters.state in "Tt" for one in looks):
        state = "S"  # somebody else looks at it too, with a debugger that stops it for that
    return Observed(state, motion if motions else Motion.UNKNOWN, last.place, last.trouble, last.counters.is_gloo)


def is_doubtful(looks: Sequence[Look]) -> bool:
    """Tell whether a rank has moved, between any two looks, by nothing but what this library may have done in it.

    The thread that writes a report of what stands still, and a process that it asks, begin and end between two looks.
    """
    return any(
        bool(before.own_threads | after.own_threads)
        and _moved(before, after) in (Motion.MOVING, Motion.SPINNING)
        and _moved(before, after, by_all=False) not in (Motion.MOVING, Motion.SPINNING)
        for before, after in itertools.pairwise(looks)
    )


def _moved(before: Look, after: Look, by_all: bool = True) -> Motion:
    """Return what a rank has done between two looks; not `by_all`: what threads have done that are there in both.

    Of the threads that run Python all count, and of the others (NCCL's and gloo's, which may spin while they wait)
    none, where py-spy tells them apart. Nor do this library's own, which ask the other ranks and write the report of
    what stands still, nor torch's store: what these read and write is left out, and all that the process reads, writes
    and starts while this library is at work.
    """
    old, new = before.counters, after.counters
    if old is None or new is None or (before.place is None) != (after.place is None):
        return Motion.UNKNOWN
    seconds = max(after.when - before.when, 0.01)
    if before.place is not None and before.place.stack != (after.place.stack if after.place else ()):
        return Motion.MOVING
    counted = set(after.python_threads or new.threads) & old.threads.keys() & new.threads.keys()
    own_threads = before.own_threads | after.own_threads  # a look may miss the name of a thread
    ticks, own_ticks = (
        sum(new.threads[tid][0] - old.threads[tid][0] for tid in tids)
        for tids in (counted - own_threads, counted & own_threads)
    )
    idle = max(IDLE_LOAD * seconds * _TICKS, 2)
    seen = old.transferred is not None and new.transferred is not None and own_ticks <= idle
    by_thread = {tid: new.transfers[tid] - old.transfers[tid] for tid in old.transfers.keys() & new.transfers.keys()}
    whole = (new.transferred or 0) - (old.transferred or 0) if seen else 0
    # What ends a collective or a sleep is in no thread that has ended: there the report's may be all of the difference.
    ended = own_threads and after.place is not None and (after.place.inside or after.place.kind is Kind.SLEEP)
    transferred = whole if by_all and not ended else sum(by_thread.values())
    transferred -= sum(done for tid, done in by_thread.items() if tid in own_threads | new.stores)
    works = max(ticks, new.helpers - old.helpers if by_all and own_ticks <= idle else 0) > idle
    # Whom a busy machine lets wait for a processor is running at many a moment, though it only wakes up to ask.
    runs = after.thread in new.running and not (after.place is not None and after.place.wakes)
    if works or transferred / seconds > IDLE_BYTES or runs:
        kind = after.place.kind if after.place is not None else Kind.PYTHON
        in_call = kind is Kind.DEVICE or (kind in INSIDE and not new.is_gloo)
        return Motion.SPINNING if in_call else Motion.MOVING
    thread = after.thread
    if thread not in old.threads or thread not in new.threads:
        return Motion.UNKNOWN
    if new.threads[thread][1] == old.threads[thread][1]:
        return Motion.STILL
    # A network call wakes up when bytes arrive, and a write when the disk has taken some.
    transfers = after.place is not None and after.place.kind in (Kind.NETWORK, Kind.FILE)
    return Motion.MOVING if transfers else Motion.WAKING
