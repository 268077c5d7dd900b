"""A process that waits for a lost rank's place: it has imported what takes seconds, and has no rank until it gets one.

    python -m ncclguard.training.spare DESCRIPTOR [COMMAND ...]

Started by `ncclguard run --spares N`. The descriptor is the reading end of a pipe whose other end only the launcher
has: what comes through it is the place, and its end without one means that the job has ended. The command is there for
people who look for the ranks with `ps`; what is run comes through the pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any, Final

#: A variable that a spare is started with, in the room of which its rank is written, so that tools find it in /proc.
ROOM: Final = "NCCLGUARD_PLACE"
ROOM_BYTES: Final = 64


def main(argv: Sequence[str] | None = None) -> None:
    """Import, wait, and become the rank that the launcher says; returns where the job ended without that."""
    descriptor = int((sys.argv[1:] if argv is None else argv)[0])
    _import()
    with os.fdopen(descriptor, "rb") as pipe:
        text = pipe.read()
    if text:
        _become(json.loads(text))


def _import() -> None:
    import torch
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel  # noqa: F401
    from torch.utils.data import DataLoader  # noqa: F401

    import ncclguard

    assert ncclguard.resilient_step is not None  # the public names are imported when they are asked for
    # The first optimizer imports torch's compiler, which takes longer than all else.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).zero_grad()


def _become(place: dict[str, Any]) -> None:
    """Do what the launcher would have started another process for."""
    with contextlib.suppress(Exception):  # for people and tools only
        _show(place["env"]["RANK"], place["env"]["LOCAL_RANK"])
    os.environ.pop(ROOM, None)
    os.environ.update(place["env"])
    for path, number in ((place["stdout"], 1), (place["stderr"], 2)):
        if path:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, number)
            os.close(file)
    command = list(place["command"])
    if command[:2] != [sys.executable, "-u"] or len(command) < 3:  # no script of this interpreter
        os.execvpe(command[0], command, os.environ)
    what, *arguments = command[2:]
    if what == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(what))
        sys.argv = [what, *arguments]
        runpy.run_path(what, run_name="__main__")


def _show(rank: str, local_rank: str) -> None:
    """Have /proc/PID/environ, which shows what a process was started with, show the rank."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    value = libc.getenv(ROOM.encode())
    text = f"RANK={rank}\0LOCAL_RANK={local_rank}".encode()
    room = len(ROOM) + 1 + ROOM_BYTES
    if value and ctypes.string_at(value) == b" " * ROOM_BYTES and len(text) <= room:
        ctypes.memmove(value - len(ROOM) - 1, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
