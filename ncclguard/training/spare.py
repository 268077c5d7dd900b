"""A process that waits for a lost rank's place: it has imported what takes seconds, and has no rank until it gets one.

    python -m ncclguard.training.spare DESCRIPTOR [COMMAND ...]
    python -m ncclguard.training.spare --stand-by HOST PORT LOCAL_RANK DESCRIPTOR COMMAND ...

The first is started by `ncclguard run --spares N`. The descriptor is the reading end of a pipe whose other end only the
launcher has: what comes through it is the place, and its end without one means that the job has ended. The command is
there for people who look for the ranks with `ps`; what is run comes through the pipe.

The second is started by `ncclguard run --stand-by`. It looks for a place in the job's store itself, because a call of
the store may block, and a launcher must not. A line goes to the descriptor when it begins, for each look that the store
has answered, and one with the rank when it has got a place. It ends when the store does, which is when the job has
ended, and while it waits with its launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from ncclguard.training.places import Place

#: A variable that a spare is started with: in its room is written what a launcher tells a rank, for tools that read
#: /proc, such as `ncclguard hang`, which takes a process that still has it for no rank.
ROOM: Final = "NCCLGUARD_PLACE"
#: Those variables, in the order in which they are left out, the last one first, where the room is too small.
_SHOWN: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID")
#: For the store, where somebody listens, to answer a process that stands by.
CONNECTED_WITHIN: Final = timedelta(seconds=60)


def main(argv: Sequence[str] | None = None) -> None:
    """Import, wait, and become a rank; returns where the job ended without that."""
    how, *arguments = sys.argv[1:] if argv is None else argv
    if how == "--stand-by":
        _end_with_parent(True)
    _import()
    if how == "--stand-by":
        host, port, local_rank, descriptor, *command = arguments
        place = _found(host, port, local_rank, int(descriptor), command)
    else:
        with os.fdopen(int(how), "rb") as pipe:
            text = pipe.read()
        place = json.loads(text) if text else None
    if place:
        _become(place)


def _found(host: str, port: str, local_rank: str, descriptor: int, command: Sequence[str]) -> dict[str, Any] | None:
    """A place that the job's store offers; None where the job has ended without that."""
    from ncclguard.coordination.store import StoreUnavailable

    with os.fdopen(descriptor, "w") as launcher:
        print(json.dumps({}), file=launcher, flush=True)
        place = None
        while place is None:
            try:
                place = _offered(host, int(port), launcher)
            except ConnectionRefusedError:
                return None
            except (OSError, StoreUnavailable, RuntimeError):  # a connection may break, and the job be there
                time.sleep(1.0)
        _end_with_parent(False)  # as a rank under torchrun
        print(
            json.dumps({"rank": place.rank, "number": place.number, "generation": place.generation}),
            file=launcher,
            flush=True,
        )
    same_store = place.env.get("MASTER_PORT") == port
    env = {**place.env, "LOCAL_RANK": local_rank, **({"MASTER_ADDR": host} if same_store else {})}
    return {"env": env, "command": list(command), "stdout": None, "stderr": None}


def _offered(host: str, port: int, launcher: TextIO) -> Place:
    """The first place that is offered, over one connection. Raises ConnectionRefusedError when there is no store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ncclguard.coordination.store import AgreementStore
    from ncclguard.training import places

    socket.create_connection((host, port), timeout=10.0).close()
    with _quiet():
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECTED_WITHIN)
    who = f"{socket.gethostname()}/{os.getpid()}/{time.time_ns()}"
    search = places.Search(AgreementStore(store, places.PREFIX), who)
    while True:
        with _quiet():
            place = search.look()
        if place is not None:
            return place
        print(json.dumps({}), file=launcher, flush=True)
        time.sleep(places.LOOK_EVERY)


def _end_with_parent(whether: bool) -> None:
    """Have the kernel end this process when the one that started it ends, or not any more; see prctl(2)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL if whether else 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's C++ writes its stack when the store has ended, which is how a job ends well."""
    there = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        os.dup2(there, 2)
        os.close(there)


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
        _show(place["env"])
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


def _show(env: Mapping[str, str]) -> None:
    """Have /proc/PID/environ, which shows what a process was started with, show the rank and its job."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    value = libc.getenv(ROOM.encode())
    blanks = ctypes.string_at(value) if value else b""
    if not blanks or blanks.strip(b" "):
        return
    room = len(ROOM) + 1 + len(blanks)
    text = b""
    for name in _SHOWN:
        more = f"{name}={env[name]}\0".encode() if name in env else b""
        if len(text) + len(more) <= room:
            text += more
    ctypes.memmove(value - len(ROOM) - 1, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
