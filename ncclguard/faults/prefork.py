"""Forks the ranks of one job after another from a process that has imported torch, which takes seconds, once for all.

Run by its path: ``python prefork.py DESCRIPTOR VARIABLE MODULE...``: a socket on which its owner names a file for each
job and hands over another socket, the job's own; the variable that names a job; and what to import. It ends with its
owner. The job's ranks are children of a leader, which says its pid on that socket and holds it open as long as one of
them runs. Keeps the same files as supervise.py.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import weakref
from typing import Any, NoReturn

#: In a job's environment: ranks whose function has returned or raised end once Python has waited for their threads and
#: called what they registered for the exit. What is imported is not taken down: that takes 0.3 s of a core.
QUICK_END_VARIABLE = "_NCCLGUARD_QUICK_END"
#: In its own environment: room for what marks a job's processes, which the leader overwrites in place.
ROOM = "0" * 32


def main(descriptor: int, mark: str, modules: list[str]) -> None:
    """Serve the owner; in a rank: run the function and end like any program."""
    owner = socket.socket(fileno=descriptor)
    room = address_of(mark)
    sys.path[0] = ""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, all that was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a leader: its socket says when it has ended
    while True:
        file, descriptors, _, _ = socket.recv_fds(owner, 4096, 1)
        if not file:
            return
        lifeline = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            owner.close()
            with open(file) as request:
                job = json.load(request)
            ctypes.memmove(room, job["env"][mark].encode(), len(ROOM))  # /proc shows this copy, here and in all forks
            if lead(lifeline, job):
                run_rank()
            return
        lifeline.close()


def lead(lifeline: socket.socket, job: dict[str, Any]) -> bool:
    """Fork the ranks, write down how each ends, and end with the last: True in a rank, never returns in the leader."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    redirect(os.path.join(job["directory"], "prefork.output"))
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.executable = job["python"]  # the owner's, whatever this one was started with
    tempfile.tempdir = None  # which Python has remembered if an import asked for it
    lifeline.send(str(os.getpid()).encode())
    children: dict[int, str] = {}
    for own in job["ranks"]:
        base = os.path.join(job["directory"], f"rank{own['RANK']}")
        pid = os.fork()
        if pid == 0:
            lifeline.close()
            os.setsid()
            redirect(f"{base}.output")
            os.environ.update(own)
            if "torch.distributed" in sys.modules:
                sys.modules["torch.distributed"].set_debug_level_from_env()  # which it did when it was imported
            if job["entrances"]:
                importlib.import_module("ncclguard.faults.hosts").enter(*job["entrances"][int(own["RANK"])])
            sys.argv = ["ncclguard.faults", *job["function"]]
            return True
        write(f"{base}.pid", f"{pid}")
        children[pid] = base
    while children:
        pid, status = os.wait()
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            write(f"{children.pop(pid)}.ended", f"{code} {time.monotonic()}")
    os._exit(0)  # what the imported modules do at exit is the ranks' affair


def address_of(variable: str) -> int:
    """Where the text of an environment variable lies that this process was started with."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    found: int | None = libc.getenv(variable.encode())
    if found is None or ctypes.string_at(found) != ROOM.encode():
        raise RuntimeError(f"{variable} is to be {ROOM!r} when this process is started")
    return found


def run_rank() -> None:
    """The program of a rank."""
    quick, code = bool(os.environ.get(QUICK_END_VARIABLE)), 0
    if quick:
        forget_finalizers()
    try:
        runpy.run_module("ncclguard.faults", run_name="__main__", alter_sys=True)
    except Exception:
        if not quick:
            raise
        sys.excepthook(*sys.exc_info())
        code = 1
    if quick:
        end_quickly(code)


def forget_finalizers() -> None:
    """At exit nothing happens to what imports have made: to torch's operators, one by one."""
    for each in tuple(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False


def end_quickly(code: int) -> NoReturn:
    """The first half of what Python does at exit."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def redirect(output: str) -> None:
    """Standard output and error go to the end of a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def write(path: str, text: str) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
