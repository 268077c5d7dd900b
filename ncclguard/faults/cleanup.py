"""Ends processes and removes network namespaces that a job left behind, also when the job's owner was killed.

Standard library only: besides being imported, this file is run by its path as a small process of its own, which acts
when the pipe from its owner closes. A ``finally`` in the owner is not enough: a test runner that hits its own limit
leaves through ``os._exit``, and a forked child that started its own session is in no process group the owner knows.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

SEARCH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))  # may have ip, iptables and ss
JOB_VARIABLE = "_NCCLGUARD_JOB"  # inherited over fork and exec, so it marks every descendant, whatever session it is in


def processes_of(job: str) -> list[int]:
    """Return the pids, without this process, whose environment at their start named the job."""
    mark = f"{JOB_VARIABLE}={job}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = file.read()
        except OSError:  # ended meanwhile, or of another user: not ours
            continue
        if mark in environ.split(b"\0"):
            found.append(int(name))
    return found


def end_processes(job: str, patience: float = 10.0) -> list[int]:
    """SIGKILL every process of the job until none is left; return the pids that outlived ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        left = processes_of(job)  # a zombie has an empty environment, so it is not counted
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            kill(pid)
        time.sleep(0.01)


def kill(pid: int) -> None:
    """SIGKILL a process that may be gone already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def remove_namespace(name: str) -> None:
    """Kill what runs in a named network namespace and delete it; nothing happens if there is none."""
    if not os.path.exists(f"/run/netns/{name}"):
        return
    ip = shutil.which("ip", path=SEARCH) or "ip"
    pids = subprocess.run([ip, "netns", "pids", name], capture_output=True, text=True, timeout=10, check=False)
    for word in pids.stdout.split():
        kill(int(word))
    subprocess.run([ip, "netns", "delete", name], capture_output=True, timeout=10, check=False)


class Cleaner:
    """A process that cleans up everything given to `watch` once this process is gone or ``close`` is called.

    >>> cleaner = Cleaner()
    >>> cleaner.close()
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            start_new_session=True,  # a Ctrl-C in the terminal must not take it along
            text=True,
        )

    def watch(self, kind: str, name: str) -> None:
        """Remember a ``"job"``, a ``"namespace"`` or a ``"directory"`` by its name."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {name}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Clean up now, and wait until that is done; safe to call twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.write("end\n")  # closing is not enough while a forked child holds the pipe open too
            self._process.stdin.close()
        self._process.wait(timeout=60)


def main() -> None:
    """Read what to watch until the pipe closes, then clean up: processes, then namespaces, then directories."""
    watched = []
    for line in sys.stdin:
        if line == "end\n":
            break
        watched.append(line.rstrip("\n").split(" ", 1))
    for kind, name in watched:
        if kind == "job":
            end_processes(name)
    for kind, name in watched:
        if kind == "namespace":
            remove_namespace(name)
        elif kind == "directory":
            shutil.rmtree(name, ignore_errors=True)


if __name__ == "__main__":
    main()
