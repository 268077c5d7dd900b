"""The environment of a running process as it is now, out of its memory; /proc/PID/environ has what it was started with.

Ray Train, and programs that spawn their own ranks, tell a process its rank in `os.environ`, after its start.
"""

from __future__ import annotations

import ctypes
import struct
from io import FileIO
from pathlib import Path
from typing import Final

#: Variables of one process, and bytes of each that are read; a longer one is left out.
AT_MOST: Final = 4096
LONGEST: Final = 512
_POINTER: Final = struct.Struct("P")


def environ_now(pid: int) -> dict[str, str]:
    """Return the environment of a process, nothing where it may not be read or its C library is another one than ours.

    Python hands what is written to `os.environ` on to C, whose variable `environ` is at the same place within the same
    file (the C library, or a Python that has a copy of the variable).
    """
    try:
        address = ctypes.addressof(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "environ"))
        file = max(found for found in _files("self") if found[0] <= address)[1]
        first = min(start for start, name in _files("self") if name == file)
        there = min(start for start, name in _files(str(pid)) if name == file)
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            (entries,) = _POINTER.unpack(_read(memory, there + address - first, _POINTER.size))
            found = _read(memory, entries, AT_MOST * _POINTER.size)
            texts = []
            for (entry,) in _POINTER.iter_unpack(found[: len(found) // _POINTER.size * _POINTER.size]):
                if not entry:
                    break
                text, end, _ = _read(memory, entry, LONGEST).partition(b"\0")
                if end:
                    texts.append(text.decode(errors="replace"))
    except (OSError, ValueError, OverflowError, struct.error):
        return {}
    return dict(text.split("=", 1) for text in texts if "=" in text)


def _files(pid: str) -> list[tuple[int, str]]:
    """Return the addresses at which files are mapped, each with the device, number and name of its file."""
    rows = [row.split(maxsplit=5) for row in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()]
    return [(int(row[0].partition("-")[0], 16), " ".join(row[3:])) for row in rows if row[4] != "0"]


def _read(memory: FileIO, address: int, length: int) -> bytes:
    memory.seek(address)
    return memory.read(length)
