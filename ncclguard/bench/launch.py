"""Start the ranks of a bench on this host, keep their store, and make sure that they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from ncclguard.bench.world import PIPE_VARIABLE, own_environment

STALL_GRACE = 120.0  # seconds without a sign from any rank, beyond the limit of one call
EXIT_GRACE = 30.0  # seconds for the other ranks to end after one failed or after Ctrl-C
_POLL = 0.1


class Heartbeat:
    """The rank's end of the pipe to the process that started it; does nothing under a launcher.

    Raises:
        BrokenPipeError: from `beat`, when the starting process is gone: the rank must not outlive it.
    """

    def __init__(self) -> None:
        pipe = os.environ.pop(PIPE_VARIABLE, None)
        self._pipe = None if pipe is None else int(pipe)
        if self._pipe is not None:
            os.set_inheritable(self._pipe, False)

    def beat(self) -> None:
        """Tell the starting process that this rank moves on."""
        if self._pipe is not None:
            os.write(self._pipe, b".")


class Supervisor:
    """The ranks as child processes: watched until all have ended, killed when nothing moves any more."""

    def __init__(self, argv: Sequence[str], ranks: int, stall: float, spare: int | None = None) -> None:
        """`spare` is a rank whose violent end is part of the job and does not hurry the others."""
        self._argv, self._ranks, self._stall, self._spare = list(argv), ranks, stall, spare
        self._children: list[subprocess.Popen[bytes]] = []
        self._signals = 0

    def run(self) -> int:
        """Start the ranks and return the exit code of the whole: 0 only if every rank returned 0."""
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in torch.distributed.__all__
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        with selectors.DefaultSelector() as pipes, self._forwarding():
            try:
                for rank in range(self._ranks):
                    self._start(rank, store.port, pipes)
                problem = self._watch(pipes)
            finally:
                self._kill()
                for key in list(pipes.get_map().values()):
                    os.close(int(key.fd))
        return self._exit_code(problem)

    def _start(self, rank: int, port: int, pipes: selectors.BaseSelector) -> None:
        reader, writer = os.pipe()
        pipes.register(reader, selectors.EVENT_READ)
        try:
            child = subprocess.Popen(
                [sys.executable, "-m", "ncclguard.bench", *self._argv],
                env={**own_environment(rank, self._ranks, port), PIPE_VARIABLE: str(writer)},
                stdin=subprocess.DEVNULL,
                pass_fds=[writer],
                start_new_session=True,  # a terminal's Ctrl-C comes here once and is passed on once
            )
        finally:
            os.close(writer)
        self._children.append(child)

    def _watch(self, pipes: selectors.BaseSelector) -> str | None:
        """Wait until every rank has ended; a sentence when some had to be killed."""
        moved = time.monotonic()
        hurry: float | None = None
        forwarded = 0
        while any(child.poll() is None for child in self._children):
            if pipes.get_map():
                for key, _ in pipes.select(_POLL):
                    if os.read(key.fd, 4096):
                        moved = time.monotonic()
                    else:
                        pipes.unregister(key.fd)
                        os.close(key.fd)
            else:
                time.sleep(_POLL)
            now = time.monotonic()
            if self._signals > forwarded:
                forwarded = self._signals
                hurry = hurry or now + EXIT_GRACE
                self._send(signal.SIGINT)
            if hurry is None and self._someone_failed():
                hurry = now + EXIT_GRACE
            if self._signals > 1:
                return f"a second signal came; killed: {self._running()}."
            if hurry is not None and now > hurry:
                return f"not ended within {EXIT_GRACE:.0f} s, so killed: {self._running()}."
            if now - moved > self._stall:
                return f"no rank moved for {self._stall:.0f} s; killed: {self._running()}."
        return None

    def _exit_code(self, problem: str | None) -> int:
        codes = {rank: child.returncode for rank, child in enumerate(self._children)}
        killed = [f"rank {rank} by signal {-code}" for rank, code in codes.items() if code < 0 and rank != self._spare]
        if problem is not None:
            print(f"# FAILED: {problem} What is printed above is complete.", flush=True)
        elif killed:
            hint = (
                " (an unexpected signal 9 is often the out-of-memory killer: see dmesg)" if -9 in codes.values() else ""
            )
            print(f"# FAILED: ended {', '.join(killed)}{hint}. What is printed above is complete.", flush=True)
        if self._signals:
            return 130
        if problem is not None or killed:
            return 1
        return max(code for rank, code in codes.items() if code >= 0 or rank != self._spare)

    def _someone_failed(self) -> bool:
        return any(child.poll() not in (None, 0) for rank, child in enumerate(self._children) if rank != self._spare)

    def _running(self) -> str:
        alive = [str(rank) for rank, child in enumerate(self._children) if child.poll() is None]
        return f"rank{'s' if len(alive) > 1 else ''} {', '.join(alive) or 'none'}"

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, number)

    def _kill(self) -> None:
        """Nothing is left behind: SIGKILL also ends a stopped process, and each rank leads its own session."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        for child in self._children:
            child.wait()

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Count SIGINT and SIGTERM instead of being ended by them; only the main thread may set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
