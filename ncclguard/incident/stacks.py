"""Where Python code is: the main thread's stack, the place of a call, the place of an exception, as short texts.

Files are named as they would be imported, relative to the entry of ``sys.path`` they lie under: ``train.py``,
``torch/distributed/distributed_c10d.py``.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import threading
from types import FrameType, TracebackType
from typing import Final

SOURCE_LENGTH: Final = 160
EXCEPTION_LENGTH: Final = 400

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Parts of the package that use the library as a program does: their frames are what a reader wants to see.
_USERS: Final = tuple(os.path.join(_PACKAGE, name) for name in ("bench", "faults", "explain", "integrations"))
# Of these, the one that stands around the library's own calls while a drill is recorded.
_RECORDER: Final = os.path.join(_PACKAGE, "faults", "record.py")
_INSTALLED: Final = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)

_own_files: dict[str, bool] = {}


def main_thread_stack(limit: int = 64) -> tuple[str, ...]:
    """Return the main thread's frames, outermost first, each as ``file:line in function: source``.

    May be called from any thread; the main thread may sit in a native call, as long as that has released the GIL. Runs
    of frames inside this library are folded into one line, and of more than ``limit`` lines the innermost are kept,
    under a first line that counts the others. Source lines are read from disk when they were not before.

    >>> "main_thread_stack" in main_thread_stack()[-1]
    True
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []  # innermost first
    own: list[FrameType] = []
    left_out = 0
    while frame is not None or own:
        if frame is not None and is_own_file(frame.f_code.co_filename):
            own.append(frame)
        else:
            if own:
                lines.append(f"{_place(own[-1])}: {_count(len(own), 'frame')} of ncclguard")
                own = []
            if frame is not None:
                lines.append(_line(frame))
        frame = frame.f_back if frame is not None else None
    if len(lines) > limit:
        left_out = len(lines) - limit + 1
        lines = [*lines[: limit - 1], f"... {_count(left_out, 'line')} further out ..."]
    return tuple(reversed(lines))


def other_threads(limit: int = 16) -> list[list[object]]:
    """Return the frames of the other threads by name, as `main_thread_stack` writes them, without this library's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found: list[list[object]] = []
    for ident, innermost in sys._current_frames().items():
        frames: list[FrameType] = []
        frame: FrameType | None = innermost
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        if ident != main and not any(is_own_file(f.f_code.co_filename) for f in frames):
            found.append([names.get(ident, f"thread {ident:#x}"), [_line(f) for f in reversed(frames[:limit])]])
    return found[:limit]


def call_site_of(thread: int) -> str:
    """Return where a thread, by its ident, called the library from, such as ``train.py:211 in step``.

    Empty when it has ended.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back  # what the library itself is waiting in
    while frame is not None and frame.f_back is not None and is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _place(frame)


def program_place(thread: int = 0) -> str:
    """Return the place of the program's own code on a thread, by its ident, or on the main thread; empty when ended."""
    frame = sys._current_frames().get(thread or threading.main_thread().ident or 0)
    while frame is not None and not _is_programs(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _place(frame)


def _is_programs(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_INSTALLED)) and not is_own_file(filename)


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


def traceback_frames(error: BaseException, limit: int = 64) -> tuple[str, ...]:
    """Return the frames an exception came through, outermost first, as `main_thread_stack` writes them."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        source = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
        lines.append(place_text(code.co_filename, trace.tb_lineno, code.co_name, source))
        trace = trace.tb_next
    return tuple(lines[-limit:])


def is_own_file(filename: str) -> bool:
    """Whether the code in ``filename`` is this library's, and not a program's that uses it."""
    own = _own_files.get(filename)
    if own is None:
        own = _own_files[filename] = filename.startswith(_PACKAGE) and (
            filename == _RECORDER or not filename.startswith(_USERS)
        )
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


def _place(frame: FrameType) -> str:
    return place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _line(frame: FrameType) -> str:
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_globals).strip()
    return place_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, source)


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
