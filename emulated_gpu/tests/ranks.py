"""Runs a function as several real processes, the ranks, and tells what became of each.

The ranks are forks of the process of the tests, which never uses CUDA itself.
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative: a signal), what its function returned, and what it said on failing."""

    code: int
    value: Any
    error: str


class Rank:
    """One rank, as its function sees it."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size, self._folder, self._barriers = rank, size, folder, 0

    def publish(self, name: str, value: Any = None) -> None:
        """Make a value readable for all ranks."""
        partial = self._folder / f".{name}.{self.rank}"
        partial.write_bytes(pickle.dumps(value))
        partial.rename(self._folder / name)

    def read(self, name: str, seconds: float = 30) -> Any:
        """Wait for a value that some rank publishes and return it."""
        until = time.monotonic() + seconds
        while not (self._folder / name).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"nobody published {name}")
            time.sleep(0.002)
        return pickle.loads((self._folder / name).read_bytes())

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._barriers += 1
        self.publish(f"barrier-{self._barriers}-{self.rank}")
        for rank in range(self.size):
            self.read(f"barrier-{self._barriers}-{rank}")


def run(
    function: Callable[..., Any],
    size: int,
    *arguments: Any,
    settings: Mapping[str, object] | None = None,
    of_rank: Mapping[int, Mapping[str, object]] | None = None,
    seconds: float = 60,
) -> list[Ended]:
    """Call `function(rank, *arguments)` in `size` processes; a rank that is still there after `seconds` is killed.

    `settings` are environment variables of all ranks, `of_rank` of one. Each is on a host of its own, for NCCL, so that
    they may share a device.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            environment = {"NCCL_HOSTID": f"rank-{rank}", **(settings or {}), **(of_rank or {}).get(rank, {})}
            processes.append(_start(function, Rank(rank, size, Path(folder)), arguments, environment))
        until = time.monotonic() + seconds
        return [_end(process, Path(folder) / f"end-{rank}", until) for rank, process in enumerate(processes)]


def check(ended: list[Ended], *ranks: int) -> list[Any]:
    """Return what the functions of ranks (all, if none is named) returned; fails with what a rank said."""
    named = [ended[rank] for rank in ranks] if ranks else ended
    for end in named:
        assert end.code == 0, f"exit code {end.code}: {end.error}"
    return [end.value for end in named]


def _start(function: Callable[..., Any], rank: Rank, arguments: tuple[Any, ...], settings: Mapping[str, object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: the tests' process has a timer thread
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.environ.update({name: str(value) for name, value in settings.items()})
        value = function(rank, *arguments)
        rank.publish(f"end-{rank.rank}", (value, ""))
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the tests are told
        rank.publish(f"end-{rank.rank}", (None, traceback.format_exc()))
    finally:
        os._exit(code)


def _end(process: int, said: Path, until: float) -> Ended:
    while not (done := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.005)
    value, error = pickle.loads(said.read_bytes()) if said.exists() else (None, "")
    return Ended(os.waitstatus_to_exitcode(done[1]), value, error)
