"""Starts ranks as forks of one process that has torch imported already: Python's own fork server (multiprocessing).

What it saves is the import. With torch 2.13 a rank that is a process of its own costs 1.4 s of a core before its first
line, with transformers 4.2 s, and a fork 0.05 s in all; the tests of this project start about 850 ranks. A fork cannot
have variables that are read while Python starts or torch is imported: with these a job is one of ordinary processes.

As with every fork server of multiprocessing, the file that is run as `__main__` is imported by each fork and needs the
usual guard. The server ends with the process that has started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

from ncclguard.faults.cleanup import JOB_VARIABLE

_PRELOADED = ("torch.distributed", "ncclguard")
# Read while torch is imported, or before Python starts, so that a fork cannot be given them.
_READ_EARLY = ("TORCH_", "MKL_", "LD_", "PYTHON")
# But these are read when a process group or a recorder is made, or are given to the fork below, or are about imports.
_READ_LATE = (
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_FR_",
    "TORCH_NCCL_",
    "TORCH_GLOO_",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTHONDONTWRITEBYTECODE",
)
_INHERITED = ("OMP_NUM_THREADS", "PYTHONPATH")  # the server keeps those of the first job
#: The job's name in the server's own environment: a placeholder that each fork overwrites in place.
_ROOM = "0" * 32

_lock = threading.Lock()
_started_with: Mapping[str, str] | None = None  # the early variables of the server
_modules: tuple[str, ...] = ()


def preload(modules: Sequence[str]) -> None:
    """Let the ranks of later jobs be forks of a process that has imported `modules` too; an earlier server ends."""
    global _modules, _started_with
    with _lock:
        if tuple(modules) != _modules:
            _modules, _started_with = tuple(modules), None
            forkserver._forkserver._stop()  # type: ignore[attr-defined]  # CPython's own tests use this


def possible(env: Mapping[str, str]) -> bool:
    """Return whether the ranks of a job with this environment can be forks; starts the server if need be."""
    global _started_with
    with _lock:
        if _started_with is None:
            with_room = {JOB_VARIABLE: _ROOM, "OMP_NUM_THREADS": "1", **{k: env[k] for k in _INHERITED if k in env}}
            before = {name: os.environ.get(name) for name in with_room}
            os.environ.update(with_room)
            try:
                forkserver.set_forkserver_preload([*_PRELOADED, *_modules])
                forkserver.ensure_running()
            finally:
                for name, value in before.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
            _started_with = early(os.environ)
        return early(env) == _started_with


def early(env: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in env.items() if k.startswith(_READ_EARLY) and not k.startswith(_READ_LATE)}


class ForkedRank:
    """A rank that was forked: to be used like a subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], output: Path, entrance: Sequence[str]) -> None:
        """Fork a rank with the arguments of `python -m ncclguard.faults`.

        `entrance` is the result of `Hosts.entrance`, or the path of a file that replaces /etc/hosts where that is
        permitted, or nothing.
        """
        given = (list(arguments), dict(env), str(output), list(entrance), os.getcwd(), sys.executable)
        self._process: ForkServerProcess = multiprocessing.get_context("forkserver").Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return None as long as the rank runs; then its exit code, or minus the signal's number."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Block until the rank has ended, `timeout` seconds at most."""
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    arguments: list[str], env: dict[str, str], output: str, entrance: list[str], folder: str, python: str
) -> NoReturn:
    """Run the function in the fork and end, like an ordinary process in directory, environment and output."""
    gc.freeze()  # a collection would write into each object that the server has imported, and so copy all of its memory
    os.setsid()
    _mark(env[JOB_VARIABLE])
    launching = multiprocessing.parent_process()
    if launching is None or not launching.is_alive():
        os._exit(1)  # who cleans up after it may have looked for the mark before it was there
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    faulthandler.enable()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.executable, tempfile.tempdir = python, None  # tempdir is cached if an import in the server has asked for it
    multiprocessing.set_start_method(None, force=True)  # the default, for a rank's own children
    read_again(env)
    sys.argv = ["ncclguard.faults", *arguments]
    code = 0
    try:
        if len(entrance) == 1:
            with contextlib.suppress(OSError):  # not root
                _put_over_hosts(*entrance)
        elif entrance:
            enter_host(*entrance)
        runpy.run_module("ncclguard.faults", run_name="__main__", alter_sys=True)
    except BaseException as error:  # noqa: BLE001 - the function's own, to be shown as Python does
        code = shown(error)
    end(code)


def read_again(env: Mapping[str, str]) -> None:
    """Let torch, if it is imported, have of these variables what it reads only then."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.distributed.set_debug_level_from_env()
        if env.get("OMP_NUM_THREADS", "").isdigit():
            torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def shown(error: BaseException) -> int:
    """Show what has ended a program as Python does, and return the exit code, or minus the signal's number."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _mark(job: str) -> None:
    """Put the job's name into the environment that /proc shows for this process and its forks."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    found: int | None = libc.getenv(JOB_VARIABLE.encode())
    if found is None or len(ctypes.string_at(found)) != len(job):
        raise RuntimeError(
            "the fork server of this process was started by something else, without room for the job's mark; "
            'use launcher="processes"'
        )
    ctypes.memmove(found, job.encode(), len(job))


def enter_host(namespace: str, hosts_file: str, hostname: str) -> None:
    """Move this process into a host as `Hosts.command` does a program. Raises OSError where the kernel refuses."""
    with open(f"/run/netns/{namespace}", "rb") as file:
        _call("setns", file.fileno(), _NEW_NETWORK)
    _call("unshare", _NEW_UTS)
    _put_over_hosts(hosts_file)
    _call("umount2", "/sys", _DETACH)
    _call("mount", namespace, "/sys", "sysfs", 0, None)
    socket.sethostname(hostname)


def _put_over_hosts(hosts_file: str) -> None:
    """Make this process and its forks read another file as /etc/hosts. Raises OSError where the kernel refuses."""
    _call("unshare", _NEW_MOUNTS)
    _call("mount", "", "/", "none", _RECURSIVE | _SLAVE, None)
    _call("mount", hosts_file, "/etc/hosts", "none", _BIND, None)


_NEW_MOUNTS, _NEW_UTS, _NEW_NETWORK = 0x20000, 0x4000000, 0x40000000  # CLONE_* of sched.h
_BIND, _RECURSIVE, _SLAVE, _DETACH = 0x1000, 0x4000, 0x80000, 2  # MS_* and MNT_DETACH of sys/mount.h


def _call(function: str, *arguments: str | int | None) -> None:
    """Call a function of the C library; OSError where it fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*(a.encode() if isinstance(a, str) else a for a in arguments)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}{arguments}: {os.strerror(number)}")


def end(code: int) -> NoReturn:
    """Do the first half of Python's exit; unloading the imported modules is skipped, which saves 0.3 s of a core."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)
