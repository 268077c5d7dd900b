"""What the ranks of tests/distributed/test_incident_report.py run."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import ncclguard as ng
from ncclguard import faults
from ncclguard.engine import runtime
from ncclguard.incident import report

CULPRIT = 2


def slow_checkpoint(seconds: float) -> None:
    time.sleep(seconds)


def steps(count: int) -> None:
    for _ in range(count):
        ng.safe_all_reduce(torch.ones(10), timeout=30).raise_if_failed()


def waits(key: str, timeout: float = 60.0) -> None:
    """One operation that rank 2 does not come to; what became of it is reported."""
    started = time.monotonic()
    outcome = ng.safe_all_reduce(torch.ones(10), timeout=timeout)
    found = [outcome.ok, str(outcome.cause), list(outcome.culprits), outcome.incident.summary, outcome.incident.id]
    faults.report(**{key: [*found, time.monotonic() - started]})


def late_then_raises() -> None:
    """Two incidents in one job: rank 2 is late, and later raises while a thread of it has died before."""
    dist.init_process_group("gloo")
    steps(5)
    if dist.get_rank() == CULPRIT:
        slow_checkpoint(10.0)
    waits("late", timeout=3.0)
    steps(1)
    if dist.get_rank() == CULPRIT:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    waits("raised")


def one_is_late() -> None:
    dist.init_process_group("gloo")
    steps(2)
    handler_that_calls_the_one_before()
    if dist.get_rank() == CULPRIT:
        slow_checkpoint(10.0)
    waits("late", timeout=3.0)
    dist.destroy_process_group()


def told_to_end() -> None:
    """Rank 1 has a handler of its own and goes on; rank 2 has none, forked a child before, and sits in a C call."""
    seen: list[int] = []
    if int(os.environ["RANK"]) == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps(3)
    if rank == CULPRIT:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
        steps(1)  # the signal was the child's: this process lives, and its peers are not told anything
        faults.report(child=os.WTERMSIG(status), ready=True)
        dist.recv(torch.ones(1), src=0)  # never sent: it waits in C++, where no Python handler runs
    steps(1)
    faults.report(ready=True)
    if rank == 1:
        while not seen:
            time.sleep(0.01)
        faults.report(handled=True)
    waits("told")


def handler_that_calls_the_one_before() -> None:
    """Set after the guard's, as frameworks do that want to end at a moment of their choice."""
    seen: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        seen.append(number)

    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)
    while not seen:
        time.sleep(0.01)
    steps(2)
    faults.report(handled=True)


def killed_under_torchrun(folder: str) -> None:
    """torchrun sends SIGTERM to the survivors as soon as it sees that rank 2 is gone."""
    dist.init_process_group("gloo")
    steps(3)
    if dist.get_rank() == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    waits("killed")
    Path(folder, f"rank{dist.get_rank()}").touch()
    time.sleep(60)
    sys.exit("torchrun did not end this rank")


def ended_while_it_reports() -> None:
    """Rank 1 is killed; rank 0 ends by gloo's error, and its launcher's SIGTERM comes while its report is in the making."""
    ng.watch(timeout=60)
    dist.init_process_group("gloo")
    here, shown = runtime.current(), report.show

    def slowly(*arguments: Any) -> None:
        while not here._left:  # the program's end has come first
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        shown(*arguments)

    report.show = slowly
    dist.all_reduce(torch.ones(10))
    while len(here.monitor.neighbours.here) < dist.get_world_size() - 1:
        time.sleep(0.05)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))
