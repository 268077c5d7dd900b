"""The owner's side of prefork.py: processes that wait with torch imported, and fork the ranks of a job on request."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclguard.faults import prefork
from ncclguard.faults.janitor import JOB_VARIABLE
from ncclguard.faults.result import RanksFailed

PATIENCE = 120.0  # seconds for the imports
#: In a job's environment: further modules, separated by blanks, for ranks that all import something slow.
PRELOAD_VARIABLE = "_NCCLGUARD_PRELOAD"
#: Likewise: the interpreter that the process which forks them is started with, where it is not this one.
PYTHON_VARIABLE = "_NCCLGUARD_PYTHON"
_PRELOADED = ("torch.distributed", "ncclguard")
# Read while torch is imported, or before Python starts: a fork cannot be given them.
_READ_EARLY = ("TORCH_", "OMP_", "MKL_", "LD_", "PYTHON")
# But these when a process group or a recorder is made; prefork.py has the debug level read again.
_READ_LATE = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_FR_", "TORCH_NCCL_", "TORCH_GLOO_")
_KEPT = 3  # servers that wait for another job


@dataclass(frozen=True, slots=True)
class Request:
    """The ranks of one job: the folder of its files, all ranks' environment, each
    rank's own, what they run, and in which hosts.
    """

    directory: Path
    env: Mapping[str, str]
    ranks: Sequence[Mapping[str, str]]
    function: Sequence[str]
    entrances: Sequence[Sequence[str]]

    def start(self) -> Leader:
        """Have the ranks forked. Raises RanksFailed when the process that does so has ended, with what it said."""
        file = self.directory / "prefork.json"
        fields = {
            "directory": str(self.directory),
            "cwd": os.getcwd(),
            "python": sys.executable,
            "env": dict(self.env),
            "function": self.function,
        }
        ranks = [dict(own) for own in self.ranks]
        file.write_text(json.dumps({**fields, "ranks": ranks, "entrances": self.entrances}))
        with _lock:
            return _server_for(self.env).lead(file)


class Leader:
    """The process that forked a job's ranks and waits for them: to be used like a subprocess.Popen."""

    def __init__(self, lifeline: socket.socket, pid: int) -> None:
        self.pid = pid
        self._lifeline = lifeline

    def poll(self) -> int | None:
        """None as long as it runs; how the ranks ended is in their files."""
        if self._lifeline.fileno() < 0:
            return 0
        self._lifeline.setblocking(False)
        try:
            self._lifeline.recv(1)
        except BlockingIOError:
            return None
        self._lifeline.close()
        return 0

    def wait(self, timeout: float | None = None) -> int:
        """Block until it has ended; TimeoutError after `timeout` seconds."""
        if self._lifeline.fileno() >= 0:
            self._lifeline.settimeout(timeout)
            self._lifeline.recv(1)
            self._lifeline.close()
        return 0

    def pause(self, seconds: float) -> None:
        """Sleep for so long, or until it has ended."""
        if self._lifeline.fileno() >= 0:
            select.select([self._lifeline], [], [], seconds)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process of the interpreter `python` with `modules` imported, started with `env`; it ends with its owner."""

    def __init__(self, python: str, env: Mapping[str, str], modules: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        started_with = {**env, JOB_VARIABLE: prefork.ROOM}
        started_with.pop(prefork.QUICK_END_VARIABLE, None)  # each job says so for its ranks
        with theirs:
            self._process = subprocess.Popen(
                [python, prefork.__file__, str(theirs.fileno()), JOB_VARIABLE, *modules],
                env=started_with,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def lead(self, request: Path) -> Leader:
        """Have the ranks forked that the file describes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._socket, [os.fsencode(request)], [theirs.fileno()])
            ours.settimeout(PATIENCE)
            pid = ours.recv(32)
        except OSError:  # it has ended, or does not answer
            pid = b""
        if not pid:
            ours.close()
            raise RanksFailed(f"the process that forks the ranks has ended, or hangs; it said:\n{self._output()}")
        return Leader(ours, int(pid))

    def close(self) -> None:
        """Let it end, and wait until it has."""
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _output(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")


_servers: dict[tuple[object, ...], ForkServer] = {}
_lock = threading.Lock()


def _server_for(env: Mapping[str, str]) -> ForkServer:
    """The server with what a job with these variables wants imported; started if need be."""
    modules = (*_PRELOADED, *env.get(PRELOAD_VARIABLE, "").split())
    early = sorted(
        (name, value) for name, value in env.items() if name.startswith(_READ_EARLY) and not name.startswith(_READ_LATE)
    )
    python = env.get(PYTHON_VARIABLE, sys.executable)
    key = (os.getpid(), python, *modules, *early)
    server = _servers.pop(key, None)
    if server is None or not server.running:
        server = ForkServer(python, env, modules)
    _servers[key] = server  # the last now
    while len(_servers) > _KEPT:
        _close(next(iter(_servers)))
    return server


def _close(key: tuple[object, ...]) -> None:
    server = _servers.pop(key)
    if key[0] == os.getpid():  # else it is the parent's
        server.close()


def _close_all() -> None:
    for key in tuple(_servers):
        _close(key)


atexit.register(_close_all)
