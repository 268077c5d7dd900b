"""Stacks and places of Python code as short texts, of this process, and of another one of its host.

Files are named as they would be imported, relative to the entry of ``sys.path`` they lie under: ``train.py``,
``torch/distributed/distributed_c10d.py``.

Every rank offers a signal whose C-level handler (`faulthandler.register`) writes the stacks of all threads into a file
in memory, without the GIL. A peer sends the signal to a thread of this library, so that no system call is interrupted
in which a thread of the program waits, and reads the file through ``/proc/<pid>/fd``: for processes of one user that
needs no right to trace. A process that is stopped runs no handler: then /proc says so, and py-spy is tried where it is
installed and allowed.

The handler reads the frames of threads that run meanwhile, which may end the process with SIGSEGV. So a peer looks
first which of them run (`_whom_to_ask`): a single one gets the signal itself and stands still then, and where there are
more nobody is asked, unless a thread of this library waits for the GIL all the time, so that none of them runs Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import itertools
import linecache
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import IO, Any, Final, NamedTuple

import ncclguard_explain
from ncclguard.frames import frames_from, frames_of_threads, thread_frames
from ncclguard_explain.host import read_file
from ncclguard_explain.language import told, tr

SOURCE_LENGTH: Final = 160
EXCEPTION_LENGTH: Final = 400
#: Seconds within which source lines have to be read; 25 files took 0.06 s on a busy machine. The file system may be
#: what holds the job up, and a rank has to answer all the same; it has 1.2 s for that (`protocol.timing`). While the
#: read of one file hangs, others that were not read before are left out too.
READ_WITHIN: Final = 0.25

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _folders_of(package: str) -> list[str]:
    """Return where a package lies, without importing it: integrations of an editable install lie beside `_PACKAGE`."""
    spec = importlib.util.find_spec(package)
    return [os.path.join(folder, "") for folder in (spec and spec.submodule_search_locations) or ()]


_OWN: Final = (
    _PACKAGE,
    os.path.join(os.path.dirname(os.path.abspath(ncclguard_explain.__file__)), ""),
    *_folders_of("ncclguard.integrations"),
)
# Parts of the package that use the library as a program does: their frames are what a reader wants to see.
_USERS: Final = tuple(os.path.join(_PACKAGE, name) for name in ("bench", "faults"))

#: Where packages are installed, also those that a path file or PYTHONPATH takes from another environment.
_ELSEWHERE: Final = [p for p in sys.path if os.path.basename(p) in ("site-packages", "dist-packages")]
_PACKAGES: Final = tuple(
    {os.path.join(path, "") for path in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *_ELSEWHERE)}
)
_TORCH: Final = tuple({os.path.join(folder, "torch", "") for folder in _PACKAGES}.union(_folders_of("torch")))
_INSTALLED: Final = (
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
    *_PACKAGES,
    *_TORCH,
)

_own_files: dict[str, bool] = {}
_reader: threading.Thread | None = None  # of source files, the last one that was not done in time


def main_thread_stack(limit: int = 64) -> tuple[str, ...]:
    """Return the main thread's frames, outermost first, each as ``file:line in function: source``.

    May be called from any thread; the main thread may sit in a native call, as long as that has released the GIL. Runs
    of frames inside this library are folded into one line, and of more than ``limit`` lines the innermost are kept,
    and the program's own innermost, with a line that counts the others. Source lines are read from disk when they were
    not before, and left out where that takes longer than READ_WITHIN.

    >>> "main_thread_stack" in main_thread_stack()[-1]
    True
    """
    return thread_stack(threading.main_thread().ident or 0, limit)


def thread_stack(thread: int, limit: int = 64) -> tuple[str, ...]:
    """Return the frames of a thread, by its ident, as `main_thread_stack` does; nothing of one that has ended."""
    return _lines(_spots(thread_frames(thread)), limit)


def _lines(spots: Sequence[_Spot], limit: int) -> tuple[str, ...]:
    _read_sources(spot for spot in spots if not is_own_file(spot.file))
    lines: list[str] = []  # innermost first
    for own, run in itertools.groupby(spots, lambda spot: is_own_file(spot.file)):
        some = list(run)
        if own:
            lines.append(f"{some[-1].place()}: {_count(len(some), 'frame')} of ncclguard")
        else:
            lines += [spot.text() for spot in some]
    if len(lines) > limit:
        deep = not any(map(_is_of_program, lines[: limit - 1]))
        further = list(filter(_is_of_program, lines))[:1] if deep else []
        kept = limit - 1 - len(further)
        left_out = len(lines) - kept - len(further)
        lines = [*lines[:kept], f"... {_count(left_out, 'line')} further out ...", *further]
    return tuple(reversed(lines))


def frame_text(frame: str) -> str:
    """Return a line of a stack, as any rank has made it, in the language of this process: what the program has stays.

    >>> frame_text("ncclguard/collectives.py:2 in safe_thing: 3 frames of ncclguard")
    'ncclguard/collectives.py:2 in safe_thing: 3 frames of ncclguard'
    """
    own = _FOLDED.fullmatch(frame)
    if own is not None:
        place, number = own.group("place"), int(own.group("count"))
        if number == 1:
            return told("{place}: 1 frame of ncclguard", place=place)
        return told("{place}: {count} frames of ncclguard", place=place, count=number)
    left_out = _LEFT_OUT.fullmatch(frame)
    if left_out is not None:
        number = int(left_out.group("count"))
        return (
            told("... 1 line further out ...")
            if number == 1
            else told("... {count} lines further out ...", count=number)
        )
    return frame


#: Lines of a stack that `_lines` writes for others.
_FOLDED = re.compile(r"(?P<place>.*): (?P<count>\d+) frames? of ncclguard")
_LEFT_OUT = re.compile(r"\.\.\. (?P<count>\d+) lines? further out \.\.\.")


def programs_thread(thread: int) -> str:
    """Return the name of a thread, by its ident, in which the program runs; empty for the main thread and any other.

    Under Ray a program runs in a thread of its own, and the main thread is Ray's.
    """
    if thread == threading.main_thread().ident:
        return ""
    if not any(_is_programs(spot.file) for spot in _spots(thread_frames(thread))):
        return ""
    return next((one.name for one in threading.enumerate() if one.ident == thread), "")


def other_threads(limit: int = 16) -> list[list[object]]:
    """Return the frames of the other threads by name, as `main_thread_stack` writes them, without this library's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: list[tuple[str, list[_Spot]]] = []
    for ident, frames in frames_of_threads().items():
        spots = _spots(frames)
        name = names.get(ident, f"thread {ident:#x}")
        # Threads of a drill have frames of `faults` only, which count as a program's.
        if (
            ident != main
            and not name.startswith("ncclguard drill")
            and not any(is_own_file(spot.file) for spot in spots)
        ):
            found.append((name, spots[:limit]))
    del found[limit:]
    _read_sources(spot for _, spots in found for spot in spots)
    return [[name, [spot.text() for spot in reversed(spots)]] for name, spots in found]


def call_site_of(thread: int = 0) -> str:
    """Return the program's own line that a thread, by its ident, is in, such as ``train.py:211 in step``.

    Where it has none, as the library's own threads, which carry out what the program issued, the main thread's. Of a
    program that is installed like a library it is the innermost line of any that is neither torch's nor Python's.
    Empty for threads that have ended.
    """
    threads = dict.fromkeys((thread, threading.main_thread().ident or 0))
    return _own_line([spot for ident in threads for spot in _spots(thread_frames(ident))])


def _own_line(spots: Sequence[_Spot]) -> str:
    """Return the program's innermost line, or a package's; empty for none."""
    others = [spot for spot in spots if not is_own_file(spot.file)]
    for suits in (_is_programs, _is_packages):
        for spot in others:
            if suits(spot.file):
                return spot.place()
    return ""


def recorded_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the program's own line of frames that torch has recorded, as `call_site_of` does.

    They are innermost first, each with its "filename", "line" and "name".
    """
    return _own_line(_recorded(frames))


def recorded_stack(frames: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
    """Return the same line, and the stack as `main_thread_stack` writes it."""
    return recorded_line(frames), _lines(_recorded(frames), 64)


def _recorded(frames: Sequence[Mapping[str, Any]]) -> list[_Spot]:
    return [_Spot(str(frame["filename"]), int(frame["line"]), str(frame["name"]), {}) for frame in frames]


def call_sites_of(limit: int) -> tuple[str, ...]:
    """Return the lines of the program that led to the caller's, at most `limit`, innermost first, without torch's."""
    files = ((spot, spot.file) for spot in _spots(frames_from(sys._getframe())) if not is_own_file(spot.file))
    spots = [spot for spot, file in files if _is_programs(file) or _is_packages(file)]
    return tuple(spot.place() for spot in spots[:limit])


def _is_packages(filename: str) -> bool:
    return filename.startswith(_PACKAGES) and not filename.startswith(_TORCH)


def _is_programs(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_INSTALLED)) and not is_own_file(filename)


def innermost_of_program(frames: Sequence[str]) -> int | None:
    """Return which of some frames, as other ranks have sent them, is the program's own innermost; None where none is.

    Told by the names of files and what this process has imported: a file system may be what holds the job up.

    >>> innermost_of_program(("train.py:67 in main: next(it)", "torch/utils/data/dataloader.py:725 in __next__"))
    0
    """
    return next((number for number in reversed(range(len(frames))) if _is_of_program(frames[number])), None)


def _is_of_program(frame: str) -> bool:
    top = re.split(r"[/:]", frame, maxsplit=1)[0].removesuffix(".py")
    if top.startswith(("<", "...")) or top in ("torch", "ncclguard") or top in sys.stdlib_module_names:
        return False
    module = sys.modules.get(top)
    where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return where is None or _is_programs(where)


def describe_exception(error: BaseException) -> str:
    """Return one line of bounded length: ``torch.OutOfMemoryError at train.py:211 in step: CUDA out of memory. ...``.

    The place is the innermost frame of the program's own code, if the traceback has one, else the innermost of all.
    """
    name = type(error).__qualname__
    if type(error).__module__ not in ("builtins", "__main__"):
        name = f"{type(error).__module__}.{name}"
    place = _raised_at(error.__traceback__)
    try:
        message = next((line.strip() for line in str(error)[:10_000].splitlines() if line.strip()), "")
    except Exception as failure:  # noqa: BLE001 - a __str__ of the program's own that raises
        message = f"(its text could not be built: {type(failure).__name__})"
    return _shorten(name + (f" at {place}" if place else "") + (f": {message}" if message else ""), EXCEPTION_LENGTH)


_PLACE: Final = re.compile(r"[\w.]+ at (\S+:\d+ in \S+?)(?::|$)")


def place_of(described: str) -> str:
    """Return the place in what `describe_exception` says, empty for none.

    >>> place_of("ValueError at train.py:211 in step: bad batch at row 3")
    'train.py:211 in step'
    """
    found = _PLACE.match(described)
    return found[1] if found else ""


def traceback_frames(error: BaseException, limit: int = 64, begin: TracebackType | None = None) -> tuple[str, ...]:
    """Return the frames an exception came through, outermost first, as `main_thread_stack` writes them.

    `begin`: the first one, where that is not the outermost.
    """
    spots = [_Spot.of(frame, number) for frame, number in traceback.walk_tb(begin or error.__traceback__)][-limit:]
    _read_sources(reversed(spots))
    return tuple(spot.text() for spot in spots)


def is_own_file(filename: str) -> bool:
    """Return whether the code in ``filename`` is this library's, and not a program's that uses it."""
    own = _own_files.get(filename)
    if own is None:
        own = _own_files[filename] = filename.startswith(_OWN) and not filename.startswith(_USERS)
    return own


def _raised_at(trace: TracebackType | None) -> str:
    users = innermost = ""
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        innermost = place_text(filename, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        if _is_programs(filename):
            users = innermost
        trace = trace.tb_next
    return users or innermost


def place_text(file: str, line: int | None, function: str, source: str = "") -> str:
    """A frame in words: ``train.py:211 in step: loss.backward()``."""
    place = f"{_short_path(file)}:{line} in {function}"
    return f"{place}: {_shorten(source, SOURCE_LENGTH)}" if source else place


class _Spot(NamedTuple):
    """The place of a frame when it was looked at: it runs on while source lines are read."""

    file: str
    number: int
    function: str
    names: dict[str, Any]  # the globals of its module, by which its source may have to be found

    @classmethod
    def of(cls, frame: FrameType, number: int | None = None) -> _Spot:
        code = frame.f_code
        return cls(code.co_filename, (frame.f_lineno if number is None else number) or 0, code.co_name, frame.f_globals)

    def place(self) -> str:
        return place_text(self.file, self.number, self.function)

    def text(self) -> str:
        return _frame(self.file, self.number, self.function)


def _spots(frames: Iterable[FrameType]) -> list[_Spot]:
    return [_Spot.of(frame) for frame in frames]


def _source(file: str, number: int) -> str:
    """A line of a file that was read before, without a comment at its end; never waits for a disk."""
    known = linecache.cache.get(file, ())
    lines = known[2] if len(known) == 4 else ()
    return lines[number - 1].partition("  # ")[0].strip() if 0 < number <= len(lines) else ""


def _read_sources(spots: Iterable[_Spot]) -> None:
    """Have the source files of these in memory, as far as they come in READ_WITHIN seconds."""
    _read_files({spot.file: spot.names for spot in spots})


def _read_files(files: Mapping[str, dict[str, Any] | None]) -> None:
    """Read these files in the same way, each with the globals of its module where they are known."""
    global _reader
    unread = {
        file: names
        for file, names in files.items()
        if len(linecache.cache.get(file, ())) != 4 and not (file.startswith("<") and file.endswith(">"))
    }
    if not unread or (_reader is not None and _reader.is_alive()):  # one that hangs is enough
        return

    def read() -> None:
        for file, names in unread.items():
            with contextlib.suppress(BaseException):  # of a loader's own code: nobody is to hear of this thread
                linecache.getlines(file, names)

    reader = threading.Thread(target=read, name="ncclguard-sources", daemon=True)
    try:
        reader.start()
    except RuntimeError:  # the interpreter ends (3.12), or there are as many threads as may be
        read()
        return
    reader.join(READ_WITHIN)
    if reader.is_alive():
        _reader = reader


@functools.lru_cache(maxsize=4096)
def _short_path(filename: str) -> str:
    """The file as an import would name it; its last two parts where it lies under no entry of sys.path."""
    above = os.path.dirname(_PACKAGE.rstrip(os.sep))  # an editable installation is under no entry
    roots = [os.path.join(os.path.abspath(entry), "") for entry in (above, *sys.path)]
    inside = [root for root in roots if filename.startswith(root)]
    if inside:
        return filename[len(max(inside, key=len)) :]
    return os.path.join(*filename.split(os.sep)[-2:])


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


log = logging.getLogger("ncclguard")

#: Signals that are tried in this order with the setting "auto": nothing that torch, NCCL or Python uses.
CANDIDATES: Final = tuple(range(signal.SIGRTMAX - 4, signal.SIGRTMAX - 12, -1))
#: Seconds that a process has to write its stacks; and between two looks.
WRITE_WITHIN: Final = 1.0
LOOK_EVERY: Final = 0.01
#: Seconds between two looks at a process, in which some thread of one that runs goes on by a line.
LOOK_AGAIN: Final = 0.5
#: The part of that time for which a thread waits for a processor where the machine is overloaded. A process may stand
#: still then in nothing but a garbage collection, which takes 0.2 s of a processor in one with torch, and has the GIL.
OVERLOADED: Final = 0.75
#: Seconds for which threads are watched before one gets the signal, and the part of it for which one has to have had a
#: processor to be running.
WATCHED_FOR: Final = 0.1
RUNNING: Final = 0.05
#: How often per second a thread wakes up that waits for the GIL: half of what `sys.getswitchinterval` comes to.
WAKES_FOR_GIL: Final = 100
#: Seconds that py-spy may take.
PYSPY_WITHIN: Final = 3.0
_FILE: Final = "ncclguard-stacks"
#: What the names of threads begin with that run no Python: torch's and NCCL's own.
_NATIVE: Final = ("pt_nccl", "pt_gloo", "pt_tcpstore", "gloo_", "NCCL ", "cuda")
_STATES: Final = {
    "R": tr("running"),
    "S": tr("sleeping"),
    "D": tr("in a system call that cannot be interrupted"),
    "T": tr("stopped by a signal"),
    "t": tr("stopped by a debugger"),
    "Z": tr("ended, not yet collected by its parent"),
    "I": tr("idle"),
}


@dataclass(frozen=True, slots=True)
class Offer:
    """The way to have a process write its stacks: the signal, the thread that gets it, the file, the main thread."""

    signal: int
    thread: int  # native id, of a thread that belongs to this library
    descriptor: int
    main: int  # threading.get_ident() of the main thread


@dataclass(frozen=True, slots=True)
class Fetched:
    """The main thread's frames, outermost first, those of other threads by name, and in `note` how they were had."""

    stack: tuple[str, ...] = ()
    threads: tuple[tuple[str, tuple[str, ...]], ...] = ()
    note: str = ""
    written: str = ""  # what the process itself has written
    runs: bool = False  # its interpreter runs, or might if it got a processor


_file: IO[str] | None = None
_signal = 0


def offer(setting: str, thread: int) -> Offer | None:
    """Install the handler once in this process, and return how to reach it; None without a free or wanted signal.

    ``setting`` is "auto", "none" or a signal's name such as "SIGUSR2"; ``thread`` the native id of a thread of this
    library. A signal for which anybody has a handler, or which is ignored, is left alone.
    """
    global _file, _signal
    if setting == "none":
        return None
    if _file is None:
        number = _choose(setting)
        if number == 0:
            return None
        try:
            _file = os.fdopen(os.memfd_create(_FILE, os.MFD_CLOEXEC), "w")
            faulthandler.register(number, _file, all_threads=True, chain=False)
        except (OSError, RuntimeError, AttributeError) as error:  # a kernel without memfd, a system without signals
            log.info(
                "ncclguard: %s",
                told("stacks cannot be offered to the other ranks of this host: {error}", "log", error=error),
            )
            return None
        _signal = number
    if signal.getsignal(_signal) is not signal.SIG_DFL:  # the program has set a handler of its own since
        return None
    return Offer(_signal, thread, _file.fileno(), threading.main_thread().ident or 0)


def fetch(pid: int, given: Offer | None) -> Fetched:
    """Get the stacks of a process of this host, by its pid; takes up to some seconds, so in a thread of its own."""
    fields = _status(pid)
    letter = fields.get("State", "?")[:1]
    state = _STATES.get(letter, tr("in an unknown state"))
    where = tr(
        "process {pid} is {state} (state {letter}{place})", pid=pid, state=state, letter=letter, place=_wchan(pid)
    )
    if letter in "ZX?":
        return Fetched(note=where)
    runs = False
    if letter in "Tt":
        why = tr("a stopped process cannot write its stacks")
    elif given is None:
        why = tr("it offers no stacks (stack_signal)")
    elif not _is_among(given.signal, fields, "SigCgt"):
        why = tr("it does not handle signal {signal} any more", signal=given.signal)
    elif (text := _have_written(pid, given)) is None:
        runs, why = True, tr("several of its threads run: the signal could end it")
    else:
        stack, threads = parse(text, given.main)
        if stack:
            note = tr("{where}; its stacks were written by a signal handler, without the GIL", where=where)
            return Fetched(stack, threads, note, text)
        why = tr("it did not write the stack of its main thread when it was sent the signal")
    spied = _spy(pid)
    if spied.stack:
        note = tr("{where}; {why}: read by py-spy", where=where, why=why)
        return Fetched(spied.stack, spied.threads, note, runs=runs)
    return Fetched(note=f"{where}; {why}; {spied.note}", runs=runs)


def observe(pid: int, given: Offer | None) -> Fetched:
    """Get the stacks of a process as `fetch` does, and look again whether it runs: so that a slow one is not stuck."""
    waits, began = processor_waits(pid), time.monotonic()
    found = fetch(pid, given)
    if found.runs or _status(pid).get("State", "?")[:1] in "ZXTt?":
        return found
    time.sleep(LOOK_AGAIN)
    if found.written and given is not None and _goes_on(found.written, _have_written(pid, given)):
        note = tr("{note}; it went on between two looks: it runs", note=found.note)
        return replace(found, runs=True, note=note)
    took, later = time.monotonic() - began, processor_waits(pid)
    waited = max((later[thread] - before for thread, before in waits.items() if thread in later), default=0.0)
    if waited < OVERLOADED * took:
        return found
    note = tr(
        "{note}; it waited for a processor for {waited:.2g} of {seconds:.2g} s: its host is overloaded",
        note=found.note,
        waited=waited,
        seconds=took,
    )
    return replace(found, runs=True, note=note)


def _goes_on(before: str, after: str | None) -> bool:
    """Return whether a thread has gone on between two writings: without the GIL none of Python's can.

    One that was read in part, or with what another reader has asked for behind it, is no other one; nor is one of
    another thread, whose own part is headed otherwise.
    """
    if after is None:
        return True
    before, after = (text.replace("Current thread 0x", "Thread 0x") for text in (before, after))
    return not (before.startswith(after) or after.startswith(before))


def parse(text: str, main: int) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Split faulthandler's output into the main thread's frames and other threads', without this library's threads.

    >>> parse('Current thread 0x01 (most recent call first):\\n  File "/x/train.py", line 3 in step\\n', 1)
    (('x/train.py:3 in step',), ())
    """
    stack: tuple[str, ...] = ()
    others = []
    _read_files(dict.fromkeys(re.findall(r'^  File "(.*)", line \d+ in ', text, flags=re.MULTILINE)))
    for block in re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE):
        head = re.match(r"(?:Current t|T)hread 0x([0-9a-f]+)(?: \[([^\]]*)\])?", block)
        if head is None:
            continue
        found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, flags=re.MULTILINE)
        frames = tuple(_frame(file, int(line), function) for file, line, function in reversed(found))
        if int(head[1], 16) == main:
            stack = frames
        elif found and not any(is_own_file(file) for file, _, _ in found):
            others.append((head[2] or f"thread 0x{head[1].lstrip('0')}", frames))
    return stack, tuple(others)


def parse_spied(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Parse the output of ``py-spy dump`` likewise; on Linux the main thread's id is the process's."""
    stack: tuple[str, ...] = ()
    others = []
    process = re.match(r"Process (\d+)", text)
    _read_files(dict.fromkeys(re.findall(r"^ {4}.* \((.*):\d+\)$", text, flags=re.MULTILINE)))
    for block in re.split(r"^(?=Thread )", text, flags=re.MULTILINE):
        head = re.match(r'Thread (\S+) \([^)]*\)(?:: "(.*)")?', block)
        if head is None:
            continue
        found = re.findall(r"^ {4}(.*) \((.*):(\d+)\)$", block, flags=re.MULTILINE)
        frames = tuple(_frame(file, int(line), function) for function, file, line in reversed(found))
        if head[2] == "MainThread" or (process is not None and head[1] == process[1]):
            stack = frames
        elif found and not str(head[2]).startswith("ncclguard"):
            others.append((head[2] or f"thread {head[1]}", frames))
    return stack, tuple(others)


def _stat_of(pid: int) -> list[str]:
    """Fields 3 and on of /proc/<pid>/stat; the name in field 2 may contain spaces and parentheses."""
    return read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()


def process_state(pid: int) -> tuple[str, int] | None:
    """The state letter and the start ticks of a process, /proc/<pid>/stat fields 3 and 22; None if /proc has none."""
    fields = _stat_of(pid)
    if not fields:
        return None
    return fields[0], int(fields[19])


def exit_status(pid: int) -> str:
    """Return how a process ended, while its parent has not collected it yet; empty when that cannot be seen."""
    fields = _stat_of(pid)
    if len(fields) < 50 or fields[0] not in ("Z", "X"):
        return ""
    status = int(fields[49])  # field 52 of proc(5), 0 to those who may not see it
    if os.WIFSIGNALED(status):
        try:
            return tr("killed by {signal}", signal=signal.Signals(os.WTERMSIG(status)).name)
        except ValueError:
            return tr("killed by signal {number}", number=os.WTERMSIG(status))
    return tr("exit code {code}", code=os.WEXITSTATUS(status)) if status else ""


def processor_waits(pid: int) -> dict[str, float]:
    """Return for how many seconds each thread of a process, by its native id, has waited for a processor so far."""
    return {thread: one.waited for thread, one in _scheduled(pid).items()}


class _Scheduled(NamedTuple):
    """A thread: the seconds for which it has had a processor and waited for one, and whether it wants one now."""

    had: float
    waited: float
    wants: bool


def _scheduled(pid: int) -> dict[str, _Scheduled]:
    """Return the threads of a process by their native ids; nothing once it has ended.

    The seconds are the first numbers of /proc/<pid>/task/<tid>/schedstat (sched-stats.rst of the kernel); kernels may
    be built without it.
    """
    found = {}
    for thread in _threads(pid):
        numbers = read_file(f"/proc/{pid}/task/{thread}/schedstat").split()
        had, waited = (int(number) / 1e9 for number in numbers[:2]) if len(numbers) > 1 else (0.0, 0.0)
        wants = read_file(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].startswith(" R")
        found[thread] = _Scheduled(had, waited, wants)
    return found


def _threads(pid: int) -> set[str]:
    """Return the native ids of a process's threads, none once it has ended."""
    try:
        return set(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return set()


def _whom_to_ask(pid: int, given: Offer) -> int | None:
    """Return the thread to send the signal to: the only one that runs, else the given one; None where several run.

    One that begins or ends is as good as several. Where the given thread waits for the GIL all the time, the others may
    run what they like: no frame of theirs changes, and who has the GIL is in a call of C. Takes WATCHED_FOR seconds.
    """
    before, began, changed = _scheduled(pid), time.monotonic(), False
    wakes = _wakes(pid, given.thread)
    while (seconds := time.monotonic() - began) < WATCHED_FOR:
        time.sleep(0.002)  # a thread that does little is there for less
        changed = changed or _threads(pid) != before.keys()
    after, wakes = _scheduled(pid), _wakes(pid, given.thread) - wakes
    running = [
        thread
        for thread in sorted(before.keys() & after.keys())
        if after[thread].had - before[thread].had > RUNNING * seconds or (before[thread].wants and after[thread].wants)
    ]
    waits_for_gil = wakes > WAKES_FOR_GIL * seconds and str(given.thread) not in running
    if not after or waits_for_gil:
        return given.thread
    running = [thread for thread in running if _may_run_python(f"/proc/{pid}/task/{thread}", given.signal)]
    if changed or len(running) > 1:
        return None
    return int(running[0]) if running else given.thread


def _may_run_python(folder: str, number: int) -> bool:
    """Return whether a thread may be one of Python's: those of libraries have names, or take no signals."""
    blocked = _is_among(number, _fields(f"{folder}/status"), "SigBlk")
    return not blocked and not read_file(f"{folder}/comm").startswith(_NATIVE)


def _is_among(number: int, fields: Mapping[str, str], mask: str) -> bool:
    """Return whether a signal is in a mask of /proc/<pid>/status, such as SigCgt, that of those with a handler."""
    return bool(int(fields.get(mask, "0"), 16) >> (number - 1) & 1)


def _wakes(pid: int, thread: int) -> int:
    """Return how often a thread has given its processor up by itself, and so woken up again."""
    return int(_fields(f"/proc/{pid}/task/{thread}/status").get("voluntary_ctxt_switches", "0"))


def _choose(setting: str) -> int:
    fields = _status(os.getpid())

    def is_taken(number: int) -> bool:
        return _is_among(number, fields, "SigCgt") or _is_among(number, fields, "SigIgn")

    if setting != "auto":
        number = int(getattr(signal, setting, 0))
        if number == 0 or is_taken(number):
            log.warning(
                "ncclguard: %s",
                told(
                    "stack_signal {given} is unknown or in use: no stacks are offered to other ranks",
                    "log",
                    given=setting,
                ),
            )
            return 0
        return number
    free = [n for n in CANDIDATES if not is_taken(n) and signal.getsignal(n) is signal.SIG_DFL]
    return free[0] if free else 0


def _have_written(pid: int, given: Offer) -> str | None:
    """Have a process write its stacks, and return them; empty where it writes nothing, None where it is not asked."""
    thread = _whom_to_ask(pid, given)
    if thread is None:
        return None
    path = f"/proc/{pid}/fd/{given.descriptor}"
    try:
        if _FILE not in os.readlink(path):  # the program closed the file and opened another
            return ""
        with open(path, errors="replace") as file:
            file.seek(0, os.SEEK_END)
            _send(pid, thread, given.signal)
            return _read_all(file)
    except OSError as error:
        log.info(
            "ncclguard: %s", told("the stacks of process {pid} cannot be read: {error}", "log", pid=pid, error=error)
        )
        return ""


def _read_all(file: IO[str]) -> str:
    """Read what is being written, until no more comes."""
    text, quiet, end = "", 0, time.monotonic() + WRITE_WITHIN
    while time.monotonic() < end and quiet < 5:
        time.sleep(LOOK_EVERY)
        more = file.read()
        quiet = quiet + 1 if text and not more else 0
        text += more
    return text


def _send(pid: int, thread: int, number: int) -> None:
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # glibc 2.30 and musl
    if tgkill is None:
        os.kill(pid, number)
    elif tgkill(pid, thread, number) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _spy(pid: int) -> Fetched:
    program = shutil.which("py-spy") or shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    if program is None:
        return Fetched(note=tr("install py-spy to see its stack, or run `gdb -p {pid}`", pid=pid))
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--full-filenames"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PYSPY_WITHIN, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Fetched(note=tr("py-spy failed: {error}", error=type(error).__name__))
    stack, threads = parse_spied(done.stdout)
    if not stack:
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Fetched(note=tr("py-spy could not read it: {said}", said=said[:160]))
    return Fetched(stack, threads)


def _frame(file: str, line: int, function: str) -> str:
    return place_text(file, line, function, _source(file, line))


def _status(pid: int) -> dict[str, str]:
    return _fields(f"/proc/{pid}/status")


def _fields(path: str) -> dict[str, str]:
    pairs = (row.split(":", 1) for row in read_file(path).splitlines() if ":" in row)
    return {name: value.strip() for name, value in pairs}


def _wchan(pid: int) -> str:
    """Return where in the kernel its main thread sleeps, where that may be seen."""
    text = read_file(f"/proc/{pid}/wchan").strip()
    return f", in {text}" if text not in ("", "0") else ""
